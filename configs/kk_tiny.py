"""Knights and Knaves on a laptop: a small Qwen2.5 from scratch, warm start, reinforcement.

The SFT data are bad on purpose: 55% of the answers are random guesses, right no more often than chance; the others
reason step by step. The model learns to imitate both, and mostly guesses; which of the two pays it
finds out by reinforcement. With `--careless 0` every demonstration is worked out and right.
With `--chatter 0.35` all of them say meaningless words as they think: a controlled source of tokens of low
probability, of which a model this small has almost none otherwise.

Of 20,000 puzzles to train on 1,000 are set aside for validation; the 1,500 of the test set are read at the end.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import optax

from jaxrl_llm.config import Config, Evaluation, Pretrained, Scratch, WarmStart
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.models.qwen2 import Lora
from jaxrl_llm.objectives import partition, recipes
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import builders
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.knights_knaves.generate import Recipe
from jaxrl_llm.tasks.knights_knaves.logic import Puzzle

SHAPE = qwen2.Shape(
    vocab_size=64,  # 80 with chatter
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    tied=True,
    kinds=(qwen2.LayerKind(theta=1e3),),
    max_length=512,
)
SHAPES = {  # by the number of parameters
    "0.8M": SHAPE,
    "1.6M": replace(SHAPE, num_layers=8),
    "5M": replace(SHAPE, hidden_size=256, intermediate_size=768, num_layers=6),
}
LENGTHS = {3: (32, 112), 4: (40, 208)}  # people: tokens of a prompt, and of a response
STAGES = {  # besides Lopti
    "reversed": partition.reversed,
    "drop_low": partition.drop_low,
    "drop_high": partition.drop_high,
    "random_matched": partition.random_matched,
    "quantile": lambda data, eta: partition.quantile(data, share=eta),
    "twice": lambda data, eta: partition.together(data, steps=2),
}
Stages = Literal[
    "lopti", "reversed", "drop_low", "drop_high", "random_matched", "quantile", "twice"
]


def task(data: Path, people: int = 3):
    """The puzzles in tiny words."""
    puzzles = Recipe(people=(people,), depth=1, train=20_000, test=1_500)
    return knights_knaves.tiny(*builders.knights_knaves(puzzles, data))


def sft_example(puzzle: Puzzle, careless: float, chatter: float = 0.0) -> str:
    """An SFT example, guessed or worked out, the same at every run."""
    rng = Random(puzzle.question)  # noqa: S311 (not for secrets)
    guesses = rng.random() < careless
    response = kk_tiny.guess(puzzle, rng) if guesses else kk_tiny.demonstration(puzzle)
    return kk_tiny.chatter(response, rng, chatter)


def config(
    algo: recipes.Name = "grpo",
    *,
    alpha: float | None = None,
    eta: float | None = None,
    stages: Stages = "lopti",
    stage_major: bool = False,
    minibatches: int = 2,
    learning_rate: float = 1e-4,
    steps: int = 40,
    warm_steps: int = 600,
    careless: float = 0.55,
    chatter: float = 0.0,
    people: Literal[3, 4] = 3,
    size: Literal["0.8M", "1.6M", "5M"] = "0.8M",
    model: str = "",
    teacher: str = "",
    lora: int = 0,
    vllm: str = "",
    max_lag: int = 0,
    max_resamples: int = 0,
    keep_tokens: int = 2,
    seed: int = 0,
) -> Config:
    """A run of minutes on two cores.

    Args:
        algo: any recipe of jaxrl_llm/objectives/recipes.py.
        alpha: strength of Advantage Reweighting; 0 switches it off. If not given, 0.3 with the paper's two
            algorithms, grpo and reinforce_plus_plus, and 0 with any other, which is then as published.
        eta: probability that separates Lopti's two stages; 0 switches it off. If not given, 0.5 with the paper's
            two algorithms and with other stages than Lopti's, else 0.
        stages: Lopti, or one of its ablations and controls (jaxrl_llm/objectives/partition.py); `twice` is
            two steps on all tokens; `quantile` puts the share eta of the tokens first.
        stage_major: the first stage of every mini-batch comes before the second of any.
        minibatches: optimizer batches that a step's responses are divided into.
        learning_rate: of the reinforcement phase.
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        careless: share of the demonstrators who answer at once, by guessing.
        chatter: probability of a meaningless word after each word of a demonstration's thought.
        people: in a puzzle; with four the worked answers are about twice as long.
        size: parameters of the model.
        model: folder of a model to begin with, as exported from a run, instead of a warm start.
        teacher: folder of a model that `--algo distillation` or `gkd` learns from, as exported from a run;
            `--size 5M --careless 0` makes a better one than the policy.
        lora: rank of adapters, which are then trained in place of the weights of `model`; 0 for none.
        vllm: generate by vLLM: "auto", with the environment that launch/sidecar.sh makes here, beside the
            trainer; the Python of such an environment; or addresses of running servers, separated by commas.
        max_lag: let vLLM sample so many steps ahead of the updates, by older weights.
        max_resamples: how often, in a step, groups of equal rewards are replaced by those of other prompts.
        keep_tokens: groups of a step whose tokens are kept for `jaxrl-llm view`.
        seed: of everything: initial weights, order of the data, sampling.
    """
    if not 0 <= chatter < 1:
        raise UserError(f"--chatter {chatter:g}: a probability, from 0 on and below 1")
    if lora and not model:
        raise UserError(f"--lora {lora}: adapters need a --model to be trained beside")
    prompt_length, response_length = LENGTHS[people]
    if chatter:
        response_length = response_length * 10 // 7
    lengths = {"prompt_length": prompt_length, "response_length": response_length}
    papers = algo in ("grpo", "reinforce_plus_plus")
    if alpha is None:
        alpha = 0.3 if papers else 0.0
    if eta is None:
        eta = 0.5 if papers or stages != "lopti" else 0.0
    recipe = recipes.BY_NAME[algo](response_length)
    objective = recipes.with_ar_and_lopti(recipe, alpha=alpha, eta=eta)
    if stages != "lopti":
        objective = replace(objective, partition=partial(STAGES[stages], eta=eta))
    behind = max_lag > 0
    words = kk_tiny.vocabulary(chatter=chatter > 0)
    shape = SHAPES[size]
    return Config(
        task=partial(task, people=people),
        model=Pretrained(model, lora=Lora(rank=lora, alpha=2.0 * lora) if lora else None)
        if model
        else Scratch(replace(shape, vocab_size=80) if chatter else shape, words),
        objective=objective,
        teacher=Pretrained(teacher) if teacher else None,
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(
            **lengths, minibatches=minibatches, microbatches=32, pack=True, share_prompts=True
        ),
        steps=steps,
        prompts=32,
        group_size=8,
        drop_constant_groups=algo in ("dapo", "entropy_80_20"),
        max_resamples=max_resamples,
        keep_tokens=keep_tokens,
        sampling=Sampling(temperature=1.0),
        engine=sidecar(vllm, prompt_length + response_length)
        if vllm
        else Native(slots=128, prefill_prompts=32, block=64),
        order=update.stage_major if stage_major else update.interleaved,
        ratios="sampler" if behind and not objective.allows_for_staleness else "trainer",
        max_lag=max_lag,
        warm_start=None
        if model or not warm_steps
        else WarmStart(
            steps=warm_steps,
            collate=Collator(**lengths, microbatches=8, pack=True),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=32,
            demonstration=partial(sft_example, careless=careless, chatter=chatter),
        ),
        evaluation=Evaluation(every=10, validation=1000, by="people"),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )


def sidecar(where: str, length: int) -> Vllm:
    """vLLM as this small a model wants it, on a CPU too."""
    settings = Vllm(
        dtype="float32",
        max_model_len=length,
        arguments=("--enforce-eager",),
        environment=(("VLLM_CPU_KVCACHE_SPACE", "1"),),
    )
    if where == "auto":  # beside the trainer, on its GPU if it has one
        return replace(settings, python=".sidecar/bin/python", share=0.4)
    if where.startswith(("http", "unix:")):
        return replace(settings, servers=tuple(where.split(",")))
    return replace(settings, python=where)
