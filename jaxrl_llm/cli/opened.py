"""Opens a run to generate with its policy, for `analyze`, `eval` and `sample`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import jax
import tyro

from jaxrl_llm.config import Config
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.training import folder as folders
from jaxrl_llm.training import record
from jaxrl_llm.training.parts import Parts, parts

DataFolder = Annotated[str, tyro.conf.arg(help="where data sets are kept")]


@contextmanager
def opened(where: str, data: str, step: int | None) -> Iterator[tuple[Config, Parts, Sampler, int]]:
    """A run's config, parts, sampler with the weights of `step` (None: the best), and that step."""
    here = folders.at(where)
    config = folders.reopen(here)
    made = parts(config, data)
    folders.require_model(here, made)
    record.require_given(here, record.modules())
    with (
        jax.set_mesh(made.mesh),
        config.engine.start(made.policy, made.mesh, here) as sampler,
    ):
        chosen, params = folders.params(here, made, step)
        sampler.push(params, chosen)
        yield config, made, sampler, chosen
