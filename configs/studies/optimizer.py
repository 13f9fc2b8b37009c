"""Is what Lopti does the optimizer's doing?

Steps of AdamW do not shrink with the gradient, so two of half a batch may go farther than one of the whole; and
its momentum mixes the halves. Without momentum the second is gone, along the plain gradient both: there two halves
add up to what the whole batch does, to first order.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import optax

from jaxrl_llm.config import Config, load
from jaxrl_llm.learning import optimizers
from jaxrl_llm.research.study import Study

kk_tiny = load(Path(__file__).parents[1] / "kk_tiny.py")


def config(
    optimizer: Literal["adamw", "no_momentum", "sgd"] = "adamw",
    *,
    alpha: float = 0.0,
    eta: float = 0.0,
    stages: str = "lopti",
    learning_rate: float = 6e-5,
    steps: int = 40,
    warm_steps: int = 600,
    chatter: float = 0.35,
    seed: int = 0,
) -> Config:
    """kk_tiny with another optimizer; the other flags are its own.

    Args:
        optimizer: AdamW, the same without momentum, or the gradient itself.
    """
    made = kk_tiny(
        alpha=alpha,
        eta=eta,
        stages=stages,
        steps=steps,
        warm_steps=warm_steps,
        chatter=chatter,
        seed=seed,
    )
    by = {
        "adamw": optimizers.adamw(learning_rate),
        "no_momentum": optimizers.adamw(learning_rate, b1=0.0),
        "sgd": optax.chain(
            optax.clip_by_global_norm(1.0), optimizers.scale_by_batches(learning_rate)
        ),
    }
    return replace(made, optimizer=by[optimizer])


study = Study(
    config="optimizer.py",
    panels={
        "AdamW": {"optimizer": "adamw"},
        "without momentum": {"optimizer": "no_momentum"},
        "plain gradient": {"optimizer": "sgd", "learning_rate": 0.1},
    },
    variants={
        "plain": {},
        "reweighting": {"alpha": 0.3},
        "Lopti": {"eta": 0.5},
        "reversed": {"eta": 0.5, "stages": "reversed"},
        "random split": {"eta": 0.5, "stages": "random_matched"},
        "two plain steps": {"stages": "twice"},
    },
    baseline="plain",
    warm=("chatter", "warm_steps"),
)
