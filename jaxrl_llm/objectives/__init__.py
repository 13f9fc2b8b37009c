"""Policy-gradient objectives: pure functions of `[B,T]` arrays that know no model and no config."""

from jaxrl_llm.objectives import advantages, aggregation, factors, kl, losses, partition, selections
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.token_data import TokenData

__all__ = [
    "Objective",
    "TokenData",
    "advantages",
    "aggregation",
    "factors",
    "kl",
    "losses",
    "partition",
    "selections",
]
