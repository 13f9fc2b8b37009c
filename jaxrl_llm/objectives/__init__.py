"""Policy-gradient objectives as pure algebra on `[B,T]` arrays: no model, no config, no strings."""

from jaxrl_llm.objectives import (
    advantages,
    aggregation,
    factors,
    kl,
    losses,
    partition,
    selections,
)
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.seen import Seen

__all__ = [
    "Objective",
    "Seen",
    "advantages",
    "aggregation",
    "factors",
    "kl",
    "losses",
    "partition",
    "selections",
]
