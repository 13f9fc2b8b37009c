"""The larger of two numbers, asked of a small pretrained model in a chat: its own words, now right and now wrong.

jaxrl-llm train larger.py --model FOLDER --steps 0 --out runs/larger
jaxrl-llm analyze runs/larger --prompts 8 --batches 1 --tokens 64
"""

import re
from random import Random

from jaxrl_llm.config import Config, Evaluation, Pretrained
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.objectives import recipes
from jaxrl_llm.tasks.task import Reward

PROMPT = """<|im_start|>user
Which number is larger, {} or {}? Answer in one sentence.<|im_end|>
<|im_start|>assistant
"""


class Larger:
    """Two numbers below a hundred."""

    name = "larger"

    def __init__(self):
        pairs = [(a, b) for a in range(3, 100) for b in range(3, 100) if a != b]
        Random(0).shuffle(pairs)  # noqa: S311 (not for secrets)
        self.test, self.train = pairs[:32], pairs[32:]

    def prompt(self, example):
        return PROMPT.format(*example)

    def reward(self, example, response):
        """One where the first number in the response is the larger."""
        right = re.findall(r"[0-9]+", response)[:1] == [str(max(example))]
        return Reward(score=float(right), correct=right)


def config(model: str, learning_rate: float = 1e-5, steps: int = 100) -> Config:
    """GRPO with both methods, sixteen prompts a step."""
    return Config(
        task=lambda folder: Larger(),
        model=Pretrained(model),
        objective=recipes.with_ar_and_lopti(recipes.grpo(64), alpha=0.3, eta=0.5),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(64, 64, minibatches=2, microbatches=8, pack=True),
        steps=steps,
        prompts=16,
        evaluation=Evaluation(validation=32),
    )
