"""Opens a run to generate with its policy, for `analyze`, `eval` and `sample`."""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager, nullcontext

import jax

from jaxrl_llm import accelerators, storage
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.training import record
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.folder import RunFolder


@contextmanager
def open_run(where: str, data: str, step: int | None) -> Iterator[tuple[Components, Sampler, int]]:
    """A run's components, a sampler with the weights of `step` (None: the best), and that step.

    Within the block the working folder is that in which the run was started, if it is here: relative paths
    of models, data and rewards are from there.
    """
    folder, data_folder = RunFolder(where), storage.local(data)
    begun_in = record.read(folder.path).get("folder", "")
    with chdir(begun_in) if os.path.isdir(begun_in) else nullcontext():
        components = Components.make(folder.config(), data_folder)
        folder.require_model(components)
        record.require_given(folder.path, record.modules())
        engine = components.config.engine
        beside = accelerators.present("nvidia") and not accelerators.in_use()
        if isinstance(engine, Vllm) and not engine.servers and beside:
            engine = Native()  # its servers would take the GPUs, which JAX keeps off
        with (
            jax.set_mesh(components.mesh),
            engine.start(components.policy, components.mesh, folder.path) as sampler,
        ):
            chosen, params = folder.params(components, step)
            sampler.prompt_length = components.prompt_length
            sampler.push(params, chosen)
            yield components, sampler, chosen
    storage.try_push(data_folder)  # the marks of a judge
