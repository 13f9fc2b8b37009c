"""Knights and Knaves on a laptop: a small Qwen2.5 from scratch, warm start, then reinforcement."""

import zlib
from functools import partial
from pathlib import Path
from typing import Literal

from jaxrl_llm import update
from jaxrl_llm.batch import Collator
from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.engines import Native
from jaxrl_llm.models import qwen2
from jaxrl_llm.objectives import Objective, advantages, kl, losses, partition, reweighting
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import builders, kk_tiny, knights_knaves
from jaxrl_llm.tasks.kk_generate import Recipe
from jaxrl_llm.tasks.kk_logic import Puzzle
from jaxrl_llm.tasks.task import Reward

GROUP_SIZE = 8
SHAPE = qwen2.Shape(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    tied=True,
    max_length=512,
)
PUZZLES = Recipe(people=(3, 4), depth=1, train=20_000, test=1_500)
LENGTHS = {"prompt_length": 64, "response_length": 160}


def task(data: Path):
    """The puzzles in tiny words."""
    return knights_knaves.tiny(*builders.knights_knaves(PUZZLES, data))


def demonstration(puzzle: Puzzle) -> str:
    """Of three puzzles two are answered at once and one is worked through first; every answer is right."""
    thinks = zlib.crc32(puzzle.question.encode()) % 3 == 0
    return kk_tiny.demonstration(puzzle) if thinks else kk_tiny.immediate_answer(puzzle)


def config(
    algo: Literal["grpo", "reinforce_plus_plus"] = "grpo",
    *,
    alpha: float = 0.3,
    eta: float = 0.5,
    learning_rate: float = 1e-4,
    steps: int = 60,
    warm_steps: int = 400,
    examples: int = 0,
    seed: int = 0,
) -> Config:
    """A run of minutes on two cores.

    Args:
        algo: how rewards become advantages.
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        learning_rate: of the reinforcement phase.
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        examples: demonstrations that the supervised phase may see (0: one for each training puzzle).
        seed: of everything: initial weights, order of the data, sampling.
    """
    grpo = partial(advantages.grpo, group_size=GROUP_SIZE)
    rpp = partial(advantages.reinforce_plus_plus, kl_coef=1e-3, gamma=1.0)
    return Config(
        task=task,
        model=Scratch(SHAPE, kk_tiny.vocabulary()),
        objective=Objective(
            advantage={"grpo": grpo, "reinforce_plus_plus": rpp}[algo],
            reweight=partial(reweighting.linear_in_probability, alpha=alpha),
            surrogate=partial(losses.clipped, low=0.2, high=0.24, dual=10.0),
            penalties=((1e-3, kl.k3),) if algo == "grpo" else (),
            partition=partial(partition.lopti, eta=eta) if eta else partition.together,
        ),
        optimizer=update.adamw(learning_rate),
        collate=Collator(**LENGTHS, minibatches=2, microbatches=8, pack=True),
        steps=steps,
        prompts=32,
        group_size=GROUP_SIZE,
        sampling=Sampling(temperature=1.0),
        engine=Native(slots=128, prefill_rows=32, block=64),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(**LENGTHS, microbatches=4, pack=True),
            optimizer=update.adamw(2e-3),
            batch=64,
            examples=examples,
            demonstration=demonstration,
        ),
        evaluation=Evaluation(every=10, examples=1000),
        default_reward=Reward(-3.0, False),
        compute=qwen2.Compute(remat=None),
        seed=seed,
    )
