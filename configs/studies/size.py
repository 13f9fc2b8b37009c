"""Does what the methods do grow with the size of the model?

The paper's models (arXiv:2505.12929) have 3B and 7B parameters. Here a model of six times as many as kk_tiny's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from jaxrl_llm.config import Config, Scratch, load
from jaxrl_llm.reports.study import Study

kk_tiny = load(Path(__file__).parents[1] / "kk_tiny.py")


def config(
    size: Literal["0.8M", "5M"] = "0.8M",
    *,
    alpha: float = 0.0,
    eta: float = 0.0,
    learning_rate: float = 6e-5,
    steps: int = 40,
    warm_steps: int = 600,
    chatter: float = 0.35,
    seed: int = 0,
) -> Config:
    """kk_tiny with a larger model; the other flags are its own.

    Args:
        size: parameters of the model; 0.8M is that of kk_tiny.
    """
    made = kk_tiny(
        alpha=alpha,
        eta=eta,
        learning_rate=learning_rate,
        steps=steps,
        warm_steps=warm_steps,
        chatter=chatter,
        seed=seed,
    )
    if size == "0.8M":
        return made
    assert isinstance(made.model, Scratch)
    shape = replace(made.model.shape, hidden_size=256, intermediate_size=768, num_layers=6)
    return replace(made, model=replace(made.model, shape=shape))


study = Study(
    config="size.py",
    panels={"5M": {"size": "5M"}, "0.8M": {"size": "0.8M"}},
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
    },
    baseline="plain",
    warm=("size", "chatter", "warm_steps"),
)
