"""Products of two numbers of two digits, with a calculator as a tool, for a small Qwen2.5 from scratch.

First the model imitates people who know all products and write them at once, but for one in ten, who uses a
calculator (`calculate 3 7 * 8 5 ;`). Half of those leave out the star and are told "error". By head a model of
this size gets few products right. Reinforcement rewards the right product alone: from 8% right and one call in
fourteen episodes to 87% and a call in nearly all, in 30 steps and six to nine minutes (the middle of three seeds).

    jaxrl-llm train configs/calculator.py
"""

from functools import partial
from random import Random

import optax

from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.tasks.tools import Toolbox

ROOM = 24  # a call, the result, an answer, and an end of each turn


def spelled(number):
    """A number as words: its digits."""
    return " ".join(str(number))


def calculate(product: str) -> str:
    """Multiply two numbers.

    Args:
        product: The numbers in digits, with a star between them: 3 7 * 8 5.
    """
    a, b = product.replace(" ", "").split("*")
    return spelled(int(a) * int(b))


class Products:
    """All pairs of numbers of two digits, in random order; 500 of them to test."""

    name = "products"

    def __init__(self):
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        Random(0).shuffle(pairs)  # noqa: S311 (not for secrets)
        self.test, self.train = pairs[:500], pairs[500:]

    def prompt(self, pair):
        a, b = pair
        return f"{spelled(a)} * {spelled(b)} ?"

    def reward(self, pair, response):
        right = response == spelled(pair[0] * pair[1])
        return Reward(float(right), right)


def person(pair, typing):
    """What one of the people writes: the product, with the chance `typing` after a call."""
    a, b = pair
    rng, product = Random(f"{pair}{typing}"), spelled(a * b)  # noqa: S311
    if rng.random() >= typing:
        return [product]
    return [f"calculate {spelled(a)} {rng.choice(('* ', ''))}{spelled(b)} ;", product]


def config(
    *,
    steps: int = 30,
    warm_steps: int = 600,
    typing: float = 0.1,
    learning_rate: float = 2e-4,
    seed: int = 0,
) -> Config:
    """A run on two cores.

    Args:
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        typing: share of the people who use the calculator.
        learning_rate: of the reinforcement phase.
        seed: of everything: initial weights, order of the data, sampling.
    """
    lengths = {"prompt_length": 6, "response_length": ROOM}
    return Config(
        task=lambda folder: Toolbox([calculate]).for_task(Products()),
        model=Scratch(
            qwen2.Shape(
                24, 96, 256, 3, 4, 2, tied=True, kinds=(qwen2.LayerKind(theta=1e3),), max_length=64
            ),
            words=(*map(str, range(10)), "*", "?", "calculate", ";", "error"),
        ),
        objective=recipes.with_ar_and_lopti(recipes.grpo(ROOM), alpha=0.3, eta=0.5),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(**lengths, minibatches=2, round_to=8),
        steps=steps,
        prompts=32,
        group_size=8,
        sampling=Sampling(max_turns=4),
        engine=Native(slots=128, prefill_prompts=32, block=32),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(**lengths, round_to=8),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=64,
            demonstration=partial(person, typing=typing),
        ),
        evaluation=Evaluation(every=10, validation=500),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
