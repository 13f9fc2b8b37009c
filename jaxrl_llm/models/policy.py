"""A model without its parameters, as it is used by those who do not know how it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl_llm.models import logprobs
from jaxrl_llm.models.decode import Decoder
from jaxrl_llm.models.inputs import Inputs
from jaxrl_llm.models.logprobs import PerToken
from jaxrl_llm.models.serve import Served


@dataclass(frozen=True)
class Policy:
    """The model of a definition; temperature 0, greedy, is trained as 1."""

    definition: Any

    def logp(self, temperature: float = 1.0) -> Callable[[Any, Inputs], PerToken]:
        """`(params, inputs) -> [R,C]`, the log-probs that are trained."""
        return partial(logprobs.of_responses, self.definition, temperature=temperature or 1.0)

    def scores(
        self, temperature: float = 1.0, *, proxy: float = 0.0
    ) -> Callable[[Any, Inputs], Any]:
        """`logprobs.Scores`: the same, the entropy, and with `proxy` the log-probs without unlikely tokens."""
        return partial(
            logprobs.scores, self.definition, temperature=temperature or 1.0, proxy=proxy
        )

    def narrowed(self, params: Any) -> Any:
        """Parameters that stay as they are, in the precision of the model: the same log-probs in less memory."""
        return Decoder(self.definition, block=1).weights(params)

    def decoder(self, block: int) -> Decoder:
        """For an engine that generates with the trainer's parameters; the cache lies in blocks of columns."""
        return Decoder(self.definition, block)

    def served(self, shards: int) -> Served:
        """For servers that get the parameters sent."""
        return Served(self.definition, shards)
