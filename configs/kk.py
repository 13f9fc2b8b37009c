"""Knights and Knaves with Qwen2.5-3B, the setting of arXiv:2505.12929 and its 2 x 4 grid of variants.

64 prompts x 8 responses a step in 2 mini-batches, temperature 0.7, up to 400 + 4096 tokens; AdamW at 1e-6.
The paper reports 0.39 for GRPO and 0.57 for GRPO with both methods.
"""

from functools import partial

from jaxrl_llm import update
from jaxrl_llm.batch import Collator
from jaxrl_llm.objectives import Objective, advantages, kl, losses, partition, reweighting

MODEL = "Qwen/Qwen2.5-3B-Instruct"
PROMPTS, GROUP_SIZE, TEMPERATURE = 64, 8, 0.7

ADVANTAGES = {
    "grpo": partial(advantages.grpo, group_size=GROUP_SIZE),
    "reinforce_plus_plus": partial(advantages.reinforce_plus_plus, kl_coef=1e-3, gamma=1.0),
}


def objective(algo: str = "grpo", *, alpha: float = 0.3, eta: float = 0.5) -> Objective:
    """One cell of the grid: alpha 0 turns Advantage Reweighting off, eta 0 turns Lopti off."""
    return Objective(
        advantage=ADVANTAGES[algo],
        reweight=partial(reweighting.linear_in_probability, alpha=alpha),
        surrogate=partial(losses.clipped, low=0.2, high=0.24, dual=10.0),
        penalties=((1e-3, kl.k3),) if algo == "grpo" else (),
        partition=partial(partition.lopti, eta=eta) if eta else partition.together,
    )


collate = partial(Collator, prompt_length=400, response_length=4096, minibatches=2, pack=True)
optimizer = partial(update.adamw, 1e-6)
