"""A run of seconds, for tests: nothing is learned, everything happens."""

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Literal

from jaxrl_llm.config import Config, Evaluation, Offload, Pretrained, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.qwen2 import Lora
from jaxrl_llm.objectives import Objective, advantages, factors, kl, partition
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.tasks.knights_knaves import generate as kk_generate
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.mixture import Mixture
from jaxrl_llm.tasks.task import Reward
from tests import tiny

SHAPE = qwen2.Shape(64, 32, 64, 2, 2, 1, tied=True)


def task(data):
    return knights_knaves.tiny(*(
        list(islice(kk_generate.puzzles(split, 3, 1, 0), size))
        for split, size in (("train", 64), ("test", 12))
    ))  # fmt: skip


class Short(knights_knaves.KnightsKnaves):
    """Puzzles whose responses are right if they are short."""

    def reward(self, example, response):
        return Reward(1 / (1 + len(response)), len(response) < 150)


def mixture(data):
    puzzles = task(data)
    half = lambda n: {"train": [*puzzles.train][n::2], "test": [*puzzles.test][n::2]}
    kk, short = replace(puzzles, **half(0)), Short(**vars(puzzles) | half(1))
    return Mixture({"kk": (kk, 3.0), "short": (short, 1.0)})


def config(
    *,
    eta: float = 0.5,
    steps: int = 6,
    warm_steps: int = 4,
    hidden: int = 32,
    prompt_length: int = 40,
    long_prompts: Literal["skip", "refuse"] = "skip",
    drop_constant_groups: bool = False,
    max_resamples: int = 0,
    ratios: Literal["trainer", "sampler"] = "trainer",
    offload: Offload = "none",
    model: str = "",
    teacher: str = "",
    family: str = "",
    mixed: bool = False,
    seed: int = 0,
) -> Config:
    """For tests.

    Args:
        eta: separates the stages of Lopti.
        steps: of reinforcement.
        model: a folder; adapters are trained beside it.
        teacher: a folder; its log-probs are learned from.
        family: of `tests.tiny.FAMILIES`.
        mixed: three puzzles to one that pays for short responses.
    """
    collate = Collator(prompt_length, 48, minibatches=2, microbatches=2, pack=True)
    shape = qwen2.Shape(64, hidden, 64, 2, 2, 1, tied=True)
    if family:
        shape = replace(tiny.FAMILIES[family], vocab_size=64)
    return Config(
        task=mixture if mixed else task,
        model=Pretrained(model, lora=Lora(rank=2, alpha=4.0))
        if model
        else Scratch(shape, kk_tiny.vocabulary()),
        objective=Objective(
            advantage=partial(advantages.distilled, reward_coef=0.5)
            if teacher
            else advantages.grpo,
            factors=(partial(factors.linear_in_probability, alpha=0.3),),
            penalties=((1e-3, kl.k3),),
            partition=partial(partition.lopti, eta=eta),
        ),
        optimizer=optimizers.adamw(1e-3),
        collate=collate,
        steps=steps,
        prompts=4,
        group_size=2,
        offload=offload,
        engine=Native(slots=8, prefill_prompts=4, block=32),
        warm_start=WarmStart(
            warm_steps,
            Collator(prompt_length, 48),
            optimizers.adamw(2e-3),
            batch=8,
            evaluate_every=3,
        )
        if warm_steps
        else None,
        evaluation=Evaluation(every=3, validation=8, examples=8, samples=2, by="people"),
        long_prompts=long_prompts,
        drop_constant_groups=drop_constant_groups,
        max_resamples=max_resamples,
        ratios=ratios,
        teacher=Pretrained(teacher) if teacher else None,
        save_every=2,
        show_samples_every=3,
        seed=seed,
    )
