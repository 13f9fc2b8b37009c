"""A run of seconds in which everything happens: supervised steps, some of reinforcement, a save after each."""

from dataclasses import replace
from pathlib import Path

from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2
from jaxrl_llm.objectives import Objective, advantages, kl
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.tasks.task import load_task

WORDS = [f"w{i}" for i in range(62)]
TASK = Path(__file__).with_name("small_task.py")
WARM_STEPS, STEPS, PROMPTS, GROUP = 2, 4, 3, 4


def config(
    *,
    python: str = "",
    servers: str = "",
    memory: str = "",
    patience: float = 60.0,
    timeout: float = 3.0,
    max_lag: int = 0,
    max_resamples: int = 0,
    steps: int = STEPS,
) -> Config:
    """For chaos.

    Args:
        python: that of an environment with vLLM, or what stands in for it; empty: the embedded engine.
        servers: the address of a running server.
        memory: where weights are exchanged.
        patience: seconds to wait for a server that is away.
        timeout: seconds for an answer.
        max_lag: how many steps to sample ahead.
        max_resamples: how often groups of equal rewards are replaced.
        steps: of reinforcement.
    """
    engine = Native(slots=PROMPTS * GROUP, prefill_prompts=PROMPTS, block=24)
    if python or servers:
        engine = Vllm(
            python=python,
            servers=(servers,) if servers else (),
            memory=Path(memory),
            dtype="float32",
            max_model_len=32,
            arguments=("--enforce-eager",),
            environment=(("VLLM_CPU_KVCACHE_SPACE", "1"),),
            concurrency=4,
            patience=patience,
            timeout=timeout,
        )
    collate = Collator(prompt_length=8, response_length=16, pack=True, microbatches=4)
    return Config(
        task=lambda data: load_task(f"{TASK}:task"),
        model=Scratch(qwen2.Shape(64, 64, 64, 1, 2, 1, tied=True, max_length=64), WORDS),
        objective=Objective(advantage=advantages.grpo, penalties=((1e-2, kl.k3),)),
        optimizer=optimizers.adamw(1e-3),
        collate=replace(collate, minibatches=2),
        steps=steps,
        prompts=PROMPTS,
        group_size=GROUP,
        engine=engine,
        ratios="sampler" if max_lag else "trainer",
        max_lag=max_lag,
        max_resamples=max_resamples,
        warm_start=WarmStart(WARM_STEPS, collate, optimizers.adamw(2e-3), batch=4),
        evaluation=Evaluation(every=2, validation=4, examples=4),
        save_every=1,
        show_samples_every=1,
    )
