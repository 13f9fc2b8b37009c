"""What a server of the policy is given: a config.json, tensors in Hugging Face form, log-probs to check it by.

A tied model is served untied, with its embedding repeated as `lm_head.weight`: some backends keep a stale
head when tied weights are loaded again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrl_llm.models import hf, logprobs, sharding
from jaxrl_llm.models.inputs import Inputs

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Served:
    """What keeps a server in step with the model of a definition; log-probs are split over `shards` devices."""

    definition: Any
    shards: int = 1

    def config(self, params, dtype: str) -> dict[str, Any]:
        """The config.json of the untied model."""
        shape = nnx.merge(self.definition, params).shape
        return hf.hf_config(replace(shape, tied=False), dtype)

    def tensors(self, params, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) pairs of the untied model, one at a time."""
        tied = HEAD.split(".")[0] not in params
        for name, array in hf.named_tensors(params, dtype):
            yield name, array
            if tied and name == EMBEDDING:
                yield HEAD, array

    def score(self, params, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Log-probs of every token of each sequence but the first, in the trainer's own arithmetic."""
        scores = sharding.on_host(self._logp(params, _padded(sequences, self.shards)))
        return [row[: len(s) - 1] for row, s in zip(scores, sequences, strict=False)]

    @cached_property
    def _logp(self):
        return jax.jit(partial(logprobs.of_responses, self.definition))


def _padded(sequences: Sequence[Sequence[int]], shards: int) -> Inputs:
    """A sequence a bin, padded on the right, and empty bins up to a multiple of `shards`."""
    bins, length = -(-len(sequences) // shards) * shards, max(map(len, sequences))
    tokens: Any = np.zeros((bins, length), np.int32)
    sizes = np.zeros((bins, 1), np.int32)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)], sizes[i] = sequence, len(sequence)
    columns = np.arange(length, dtype=np.int32)[None]
    positions: Any = np.where(columns < sizes, columns, 0)
    scored: Any = columns[:, 1:] < sizes
    index: Any = np.where(scored, columns[:, :-1], 0)
    return Inputs(tokens, positions, None, index, tokens[:, 1:], scored)
