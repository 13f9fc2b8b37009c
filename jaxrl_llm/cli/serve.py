"""`jaxrl-llm serve`: run the vLLM servers of a config apart from any trainer."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax

from jaxrl_llm import storage
from jaxrl_llm.cli import parse
from jaxrl_llm.config import Config, Mesh
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.rollouts.engines import KEY_FILE, Vllm
from jaxrl_llm.rollouts.vllm import client
from jaxrl_llm.rollouts.vllm.client import Patience
from jaxrl_llm.rollouts.vllm.sidecar import Sidecar
from jaxrl_llm.rollouts.vllm.sync import write_folder
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA, Components
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.leaving import Stop, stoppable

# what a trainer has to have as the servers have it
_TRAINERS = ("dtype", "max_model_len", "concurrency", "replay", "timeout", "patience", "tolerance")


@dataclass(frozen=True)
class Options:
    """The weights that the servers start with, and the folder of their logs."""

    out: str = "runs/serve"
    """the folder for the logs"""
    run: str | None = None
    """serve this run's policy (a folder or URL) until a trainer syncs; if not given, the config's"""
    data_folder: str = DATA
    """where data sets are kept"""


def run(words: list[str]) -> None:
    """Parse the words after `serve` and run `main`."""
    options, config, _ = parse.with_config("serve", words, Options, main.__doc__)
    main(options, config)


def main(options: Options, config: Config) -> None:
    """Start the vLLM servers of a config and keep them running for trainers, until Ctrl-C."""
    engine = config.engine
    if not isinstance(engine, Vllm) or engine.servers:
        raise UserError("serve starts the servers of engine=Vllm(python=...): the config has none")
    if storage.is_url(options.out):
        raise UserError(f"--out {options.out}: the servers' logs lie in a file system")
    jax.config.update("jax_platforms", "cpu")  # leaves the accelerator to the servers
    stop = Stop()
    components = Components.make(replace(config, mesh=Mesh()), options.data_folder)
    with (
        stoppable(stop),
        storage.temporary_folder(engine.memory or storage.memory()) as root,
        engine.sidecars(
            root,
            Path(options.out),
            components.policy.served(1).adapter,
            components.policy.experts,
        ) as sidecars,
    ):
        weights = _first_weights(options, components, engine.dtype, root / "first")
        for sidecar in sidecars:
            sidecar.serve(weights)
        with contextlib.suppress(StopRequested):
            _watch(engine, sidecars, Path(options.out), stop)


def _first_weights(options: Options, components: Components, dtype: str, target: Path) -> Path:
    """Writes the weights that the servers start with; the folder."""
    if options.run is not None and components.shape.lora is not None:
        raise UserError(
            f"--run {options.run}: its policy is adapters, and servers start with a whole model: write one by "
            "jaxrl-llm export --merge, and serve a config with that model and no lora"
        )
    with jax.set_mesh(components.mesh):
        if options.run is None:
            params = components.merged(components.initial_params())
        else:
            _, params = RunFolder(options.run).params(components)
        model = components.policy.served(1)
        write_folder(model.tensors(params, dtype), model.config(dtype), target)
    return target


def engine_of(engine: Vllm, urls: Sequence[str], key: Path) -> str:
    """The engine of a trainer with these servers, in Python: it has to agree in what they compute."""
    settings = {"servers": (*urls,), "key_file": str(key)}
    settings |= {
        one.name: value
        for one in fields(engine)
        if one.name in _TRAINERS and (value := getattr(engine, one.name)) != one.default
    }
    return f"Vllm({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _watch(engine: Vllm, sidecars: list[Sidecar], logs: Path, stop: Stop) -> None:
    """Prints the config of a trainer once all servers answer; a UserError if one cannot be kept."""

    def check() -> None:
        stop.check()
        for sidecar in sidecars:
            sidecar.check()

    async def ready() -> None:
        for sidecar in sidecars:
            patience = Patience([sidecar.server], engine.patience)
            await patience.persist(sidecar.server, lambda x: x.request("GET", "/health"))

    client.run(ready(), check)
    urls = [sidecar.launch.url for sidecar in sidecars]
    console = terminal.plain()
    console.print(f"ready; logs in {logs}. In the config of the trainer:")
    console.print(f"  engine={engine_of(engine, urls, sidecars[0].root / KEY_FILE)}")
    while True:
        time.sleep(0.5)
        check()
