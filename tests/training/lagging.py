"""The quick run with an engine that has weights of its own, some steps ahead of the trainer."""

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config
from jaxrl_llm.learning import optimizers
from jaxrl_llm.models.generation import ScannedGenerator
from jaxrl_llm.rollouts.native import NativeSampler
from tests.training import quick


class Copying(ScannedGenerator):
    def weights(self, params):
        return super().weights(jax.tree.map(jnp.copy, params))


class Behind(NativeSampler):
    """Answers in the background, by the weights that it had when it was asked; all before it is waited for."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.pool, self.jobs = ThreadPoolExecutor(1), []

    def submit(self, prompts, *, n, sampling, reply=None):
        responses = [Future() for _ in range(n * len(prompts))]
        then = copy.copy(self)

        def work():
            made = NativeSampler.submit(then, prompts, n=n, sampling=sampling, reply=reply)
            for response, one in zip(responses, made, strict=True):
                response.set_result(one.result())

        self.jobs.append(self.pool.submit(work))
        return responses

    def wait(self, responses):
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.result()
        return super().wait(responses)


@dataclass(frozen=True)
class Apart:
    """The embedded sampler on a copy of the weights, as a server has one."""

    own_weights: ClassVar[bool] = True

    @contextmanager
    def start(self, model, mesh, folder=None, check=lambda: None):
        definition = Copying(model.definition, 32, mesh)
        sampler = Behind(definition, slots=8, prefill_prompts=4, check=check)
        with sampler.pool:
            yield sampler


def config(*, max_lag: int = 1, learning_rate: float = 1e-3) -> Config:
    """For tests."""
    return replace(
        quick.config(ratios="sampler"),
        engine=Apart(),
        max_lag=max_lag,
        optimizer=optimizers.adamw(learning_rate, weight_decay=0.0),
    )
