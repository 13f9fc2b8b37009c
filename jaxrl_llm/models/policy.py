"""A model without its parameters, as it is used by those who do not know how it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.models import generation, logprobs
from jaxrl_llm.models.decode import Decoder
from jaxrl_llm.models.inputs import Inputs
from jaxrl_llm.models.logprobs import PerToken
from jaxrl_llm.models.serve import Served
from jaxrl_llm.models.unrolled import Unrolled


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

    def decoder(
        self, mesh: Mesh, *, block: int, devices_a_copy: int | None = None
    ) -> Decoder | Unrolled:
        """For an engine that generates on the trainer's devices, so many sharing a copy of the weights.

        On a CPU the cache lies in blocks of columns.
        """
        shared = devices_a_copy or generation.devices_a_copy(self.definition, mesh)
        there = generation.mesh_of_copies(mesh, shared)
        if mesh.devices.flat[0].platform == "cpu":
            return Decoder(self.definition, block, there)
        return Unrolled(self.definition, there)

    def served(self, shards: int) -> Served:
        """For servers that get the parameters sent."""
        return Served(self.definition, shards)
