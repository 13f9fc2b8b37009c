"""The quick run with an engine that has weights of its own, some steps ahead of the trainer."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config
from jaxrl_llm.learning import optimizers
from jaxrl_llm.models.generation import CpuGenerator
from jaxrl_llm.rollouts.native import NativeSampler
from tests.training import quick


class Copying(CpuGenerator):
    def weights(self, params):
        return super().weights(jax.tree.map(jnp.copy, params))


@dataclass(frozen=True)
class Apart:
    """The embedded sampler on a copy of the weights, as a server has one."""

    own_weights: ClassVar[bool] = True

    @contextmanager
    def start(self, model, mesh, folder=None, check=lambda: None):
        yield NativeSampler(
            Copying(model.definition, 32, mesh), slots=8, prefill_prompts=4, check=check
        )


def config(*, max_lag: int = 1, learning_rate: float = 1e-3) -> Config:
    """For tests."""
    return replace(
        quick.config(ratios="sampler"),
        engine=Apart(),
        max_lag=max_lag,
        optimizer=optimizers.adamw(learning_rate, weight_decay=0.0),
    )
