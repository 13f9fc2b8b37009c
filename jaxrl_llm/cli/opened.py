"""A finished run that answers again: what `eval` and `sample` share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxrl_llm.config import Config
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.runs import assemble, folder
from jaxrl_llm.runs.assemble import Parts

DataFolder = Annotated[Path, tyro.conf.arg(help="where data sets are kept")]


@contextmanager
def opened(
    where: Path, data: Path, step: int | None
) -> Iterator[tuple[Config, Parts, Sampler, int]]:
    """A run's policy, ready to answer."""
    here = folder.at_hand(where)
    config = folder.reopen(here)
    parts = assemble.parts(config, data)
    with (
        jax.set_mesh(parts.mesh),
        config.engine.start(parts.policy, parts.mesh, here) as sampler,
    ):
        chosen, params = folder.params(here, parts, step)
        sampler.push(params, chosen)
        yield config, parts, sampler, chosen
