"""`jaxrl-llm train`: a whole run of a config."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import which
from typing import Annotated, Literal

import rich.pretty
import tyro
from rich.console import Console
from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_llm import accelerators, distributed
from jaxrl_llm.cli import parse
from jaxrl_llm.config import Config
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA, Components
from jaxrl_llm.training.leaving import FACTOR, LEAST, UNFINISHED, Stop, stoppable
from jaxrl_llm.training.record import Source

# the least of what each flag may be, and the most of all: a wait of the system has a limit
LEAST_OF = {"max_minutes": 0, "grace": 0, "lost": 5, "stall_minutes": 0.05, "stall_factor": 1}
LARGEST = 1_000_000


def _resume(words: list[str]) -> bool | int | Literal["auto"]:
    match words:
        case []:
            return True
        case ["auto"]:
            return "auto"
        case [step] if step.isdecimal():
            return int(step)
    raise ValueError("--resume stands alone, or as --resume auto, or as --resume STEP")


_RESUME = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto|STEP]",
    instance_from_str=_resume,
    is_instance=lambda value: isinstance(value, int) or value == "auto",
    str_from_instance=lambda value: [] if isinstance(value, bool) else [str(value)],
)


@dataclass(frozen=True)
class Options:
    """The folder of a run, how it starts and when it stops."""

    out: str | None = None
    """the run's folder, s3://bucket/name or gs://bucket/name; if not given, runs/NAME of the config"""
    resume: Annotated[bool | int | Literal["auto"], _RESUME] = False
    """go on from the newest checkpoint in the folder; with auto, start if it has no run yet; with a
    step, from its checkpoint (later ones are kept aside)"""
    max_minutes: float | None = None
    """save and stop after this many minutes"""
    grace: float = 60.0
    """most seconds from a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1) to the end of the process"""
    init_from: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """begin with the warm start of another run (a folder or URL) instead of making one; without a warm
    start in the config, with that run's best checkpoint"""
    process: str | None = None
    """one of several processes of a run, one a host: auto, as the cluster says (SLURM, Cloud TPU,
    Kubernetes, Open MPI), or I/N@HOST:PORT, process I (from 0) of N, which meet at that address of
    process 0; --out must then be storage that all see"""
    lost: float = distributed.LOST
    """seconds without a sign of life from one process after which the others end"""
    stall_minutes: float = LEAST / 60
    """minutes without progress, six times as many for the first of each phase, after which the run
    writes the stacks of its threads into its folder and ends with 76, to go on with --resume"""
    stall_factor: float = FACTOR
    """and at least so many times as long as the phase (a rollout, a save, ...) has ever taken"""
    dry_run: bool = False
    """print the resolved config, its data and a prompt, and stop: no run is started, but missing data
    sets are made (`jaxrl-llm plan` tells memory and time); an --out, --resume or --from that a run would
    refuse is refused"""
    quiet: bool = False
    """print nothing but warnings and errors"""
    json: bool = False
    """print nothing on standard output but each record of metrics.jsonl, as it is written"""
    data_folder: str = DATA
    """where data sets are kept, a folder or URL"""

    def __post_init__(self):
        for name, least in LEAST_OF.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= LARGEST:  # or it is nan
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} {value:g}: a number from {least:g} to {LARGEST:,}")

    def where(self, path: Path) -> str:
        """The folder or URL of the run, for a config file at `path`."""
        return self.out if self.out is not None else str(Path("runs") / path.stem)


def run(words: list[str]) -> None:
    """Parse the words after `train` and run `main`."""
    main(*parse.with_config("train", words, Options, main.__doc__, _resumed))


def _dry_run(config: Config, options: Options, source: Source, console: Console) -> None:
    """Prints what a run would be; a UserError for a folder or a start that it would refuse."""
    # with no word about them runs/NAME may be there, and a look at the config is all that is wanted
    named = options.out is not None or options.init_from is not None or options.resume is not False
    if not named:
        _describe(Components.make(config, options.data_folder), source, console)
        return
    from jaxrl_llm.training.folder import Start

    start = Start.make(config, options.where(source.path), options.resume, options.init_from)
    components = Components.make(start.config, options.data_folder)
    _describe(components, source, console)
    start.require_steps(components)
    if start.resuming:
        start.folder.continued(components, start.new_record(components, source, {}))


def _describe(components: Components, source: Source, console: Console) -> None:
    """Prints the config, its flags, and what it makes of its data."""
    config, splits, shape = components.config, components.splits, components.shape
    flags = [f"--{name.replace('_', '-')} {value!r}" for name, value in source.flags.items()]
    rich.pretty.pprint(config, console=console, expand_all=True)
    console.print("made by", *flags)
    count, mesh = qwen2.parameter_count(shape), dict(components.mesh.shape)
    console.print(f"{count / 1e6:,.1f}M parameters on a mesh of {mesh}")
    examples = len(splits.train) + len(splits.validation)
    console.print(f"{examples:,} training examples, {splits.skipped} left out as too long")
    console.print(f"{len(splits.test):,} test examples")
    tokenizer, prompt = components.tokenizer, components.task.prompt(splits.train[0])
    text = tokenizer.decode(tokenizer.prompt(prompt), ended=False)
    console.print("the first prompt, as the model reads it:", text, sep="\n")
    if isinstance(config.engine, Vllm) and not (
        config.engine.servers or which(config.engine.python)
    ):
        console.print(f"on this machine there is no Python at {config.engine.python} to serve by")
    console.print("memory and time: jaxrl-llm plan, with the same config and flags")


def _resumed(options: Options, path: Path) -> Path | None:
    """The folder of the run to resume, whose flags are then the defaults; None for a new run."""
    if options.resume is False:
        return None
    from jaxrl_llm.training.folder import RunFolder

    folder = RunFolder(options.where(path))
    return folder.path if folder.holds_run else None


def main(options: Options, config: Config, source: Source) -> None:
    """A run of a config, from a warm start, if any, to its test; JAXRL_LOGGERS=wandb,trackio logs it there too."""
    accelerators.begin(config.shared)  # now: meeting the others starts JAX
    stop = Stop()
    with (
        stoppable(stop, grace=options.grace, minutes=options.max_minutes),
        distributed.initialize(options.process, stop, lost=options.lost),
        terminal.alone() if options.json and not options.dry_run else nullcontext() as records,
    ):
        silent = (options.quiet or options.json) and not options.dry_run
        console = terminal.console(quiet=silent or not distributed.first())
        if options.dry_run:
            return _dry_run(config, options, source, console)
        from jaxrl_llm.training.journal import print_to
        from jaxrl_llm.training.run import Session, train  # not needed to plan, or for help

        try:
            train(
                config,
                options.where(source.path),
                resume=options.resume,
                init_from=options.init_from,
                source=source,
                data=options.data_folder,
                session=Session(
                    stop,
                    console,
                    records and partial(print_to, records),
                    (60 * options.stall_minutes, options.stall_factor),
                ),
            )
        except StopRequested as error:
            raise SystemExit(UNFINISHED) from error
