"""Policy-gradient objectives as pure algebra on `[B,T]` arrays: no model, no config, no strings."""

from jaxrl_llm.objectives import (
    advantages,
    aggregation,
    correction,
    kl,
    losses,
    partition,
    reweighting,
)
from jaxrl_llm.objectives.objective import Objective

__all__ = [
    "Objective",
    "advantages",
    "aggregation",
    "correction",
    "kl",
    "losses",
    "partition",
    "reweighting",
]
