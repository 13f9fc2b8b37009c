"""Reinforcement of a pretrained model, which has rare tokens by itself: sums of three digits, worked out in steps.

    python tests/reference/real_model.py smollm2         # SmolLM2-135M-Instruct; its first lines say what it needs
    jaxrl-llm train configs/pretrained.py --model smollm2

Two examples in the prompt show how a sum is worked out, `5 + 8 = 13, 13 - 4 = 9`; only the last number of a
response counts. The model reads and writes ChatML, as SmolLM2 and Qwen2.5 do. Before reinforcement 14.5% of
SmolLM2's responses at temperature 1 are right, and 18% of their tokens have p < 0.5.
"""

import itertools
import re
from dataclasses import replace
from functools import partial
from random import Random
from typing import Literal

from jaxrl_llm.config import Config, Evaluation, Pretrained
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.models.qwen2 import Lora
from jaxrl_llm.objectives import partition, recipes
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.tasks.task import Reward

# in tokens; a prompt has 86: a bin has room for one and its eight responses
PROMPT, RESPONSE = 280, 48
SHOWN = (("5 + 8 - 4", "5 + 8 = 13, 13 - 4 = 9"), ("2 - 6 + 7", "2 - 6 = -4, -4 + 7 = 3"))
DIGITS, SIGNS = range(1, 7), "+-"
STAGES = {"lopti": partition.lopti, "random_matched": partition.random_matched}


def turn(asked: str) -> str:
    """What the user says, and how the answer begins."""
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


class Sums:
    """All sums and differences of three digits from 1 to 6, in random order; 128 of them to test."""

    name = "sums"

    def __init__(self):
        every = itertools.product(DIGITS, SIGNS, DIGITS, SIGNS, DIGITS)
        sums = [" ".join(map(str, terms)) for terms in every]
        Random(0).shuffle(sums)  # noqa: S311 (not for secrets)
        self.test, self.train = sums[:128], sums[128:]

    def prompt(self, asked):
        shown = "".join(f"{turn(one)}{answer}<|im_end|>\n" for one, answer in SHOWN)
        return shown + turn(asked)

    def reward(self, asked, response):
        found = re.findall(r"-?\d+", response)
        right = found[-1:] == [str(value(asked))]
        return Reward(float(right), right, {"worked": float(response.count("=") == 2)})


def value(asked: str) -> int:
    """What a sum comes to."""
    return sum(map(int, asked.replace("+ ", "+").replace("- ", "-").split()))


def config(
    algo: recipes.Name = "grpo",
    *,
    alpha: float = 0.3,
    eta: float = 0.5,
    stages: Literal["lopti", "random_matched", "twice"] = "lopti",
    learning_rate: float = 1e-5,
    steps: int = 40,
    prompts: int = 8,
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    lora: int = 0,
    seed: int = 0,
) -> Config:
    """A run on two cores.

    Args:
        algo: any recipe of jaxrl_llm/objectives/recipes.py.
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        stages: Lopti, a random split of the same share, or two steps on all tokens (`twice`).
        learning_rate: of AdamW; adapters want about ten times as much.
        steps: batches of prompts x 8 responses.
        prompts: of a step.
        model: a chat model in ChatML: a folder, or a name of the hub.
        lora: rank of adapters, which are then trained in place of the weights; 0 for none.
        seed: of the order of the data and of sampling.
    """
    recipe = recipes.BY_NAME[algo](RESPONSE)
    objective = recipes.with_ar_and_lopti(recipe, alpha=alpha, eta=eta)
    if stages == "twice":
        objective = replace(objective, partition=partial(partition.together, steps=2))
    elif eta:
        objective = replace(objective, partition=partial(STAGES[stages], eta=eta))
    return Config(
        task=lambda _: Sums(),
        model=Pretrained(model, lora=Lora(rank=lora, alpha=2.0 * lora) if lora else None),
        objective=objective,
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(
            PROMPT,
            RESPONSE,
            minibatches=2,
            microbatches=4 * prompts,  # of a bin each
            pack=True,
            share_prompts=True,
        ),
        steps=steps,
        prompts=prompts,
        group_size=8,
        engine=Native(slots=64, prefill_prompts=8, block=32),
        evaluation=Evaluation(every=20, validation=128),
        compute=qwen2.Compute(attend=attention.xla),
        save_every=20,
        keep_checkpoints=1,
        seed=seed,
    )
