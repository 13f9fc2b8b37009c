"""Three tasks at once for a small Qwen2.5 from scratch: digits are sorted, reversed, or the commonest is named.

Half of a step's prompts are to sort, by weight. The SFT data are bad on purpose: more than half of the answers
repeat digits as they come. Reinforcement rewards what is right.

    jaxrl-llm train mixture
"""

from collections import Counter
from random import Random

import optax

from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.mixture import Mixture
from jaxrl_llm.tasks.task import Reward

DIGITS, LENGTH = "0123456789", 6  # digits of a question
SOLVE = {
    "sort": sorted,
    "reverse": lambda digits: [*reversed(digits)],
    "mode": lambda digits: [min(Counter(digits).items(), key=lambda one: (-one[1], one[0]))[0]],
}


class Digits:
    """Digits and what is to be done with them."""

    def __init__(self, name, careless):
        self.name, self.careless = name, careless
        rng = Random(name)  # noqa: S311 (not for secrets)
        questions = [tuple(rng.choices(DIGITS, k=LENGTH)) for _ in range(20_500)]
        questions = [*dict.fromkeys(questions)]
        self.test, self.train = questions[:300], questions[300:]

    def prompt(self, digits):
        return f"{self.name} {' '.join(digits)} ="

    def reward(self, digits, response):
        right = response.split() == SOLVE[self.name](digits)
        return Reward(float(right), right)

    def demonstration(self, digits):
        """The answer, or with the chance `careless` the first digits of the question."""
        rng, answer = Random(f"{self.name}{digits}"), SOLVE[self.name](digits)  # noqa: S311
        if rng.random() < self.careless:
            answer = digits[: len(answer)]
        return " ".join(answer)


def config(
    *,
    sort: float = 0.5,
    careless: float = 0.6,
    steps: int = 40,
    warm_steps: int = 600,
    learning_rate: float = 2e-4,
    seed: int = 0,
) -> Config:
    """A run on two cores.

    Args:
        sort: share of the prompts that are to sort, below 1; the others have half of the rest each.
        careless: share of the demonstrations that repeat digits.
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        learning_rate: of the reinforcement phase.
        seed: of everything: initial weights, order of the data, sampling.
    """
    lengths = {"prompt_length": LENGTH + 2, "response_length": LENGTH + 1}
    tasks = {
        "sort": (Digits("sort", careless), sort),
        "reverse": (Digits("reverse", careless), (1 - sort) / 2),
        "mode": (Digits("mode", careless), (1 - sort) / 2),
    }
    return Config(
        task=lambda folder: Mixture(tasks),
        model=Scratch(
            qwen2.Shape(
                24, 96, 256, 3, 4, 2, tied=True, kinds=(qwen2.LayerKind(theta=1e3),), max_length=64
            ),
            words=(*DIGITS, *SOLVE, "="),
        ),
        objective=recipes.with_ar_and_lopti(
            recipes.grpo(lengths["response_length"]), alpha=0.3, eta=0.5
        ),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(**lengths, minibatches=2, round_to=8),
        steps=steps,
        prompts=32,
        group_size=8,
        sampling=Sampling(),
        engine=Native(slots=128, prefill_prompts=32, block=8),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(**lengths, round_to=8),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=64,
        ),
        evaluation=Evaluation(every=10, validation=600),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
