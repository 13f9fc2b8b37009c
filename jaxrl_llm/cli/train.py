"""`jaxrl-llm train`: a config in, a run's folder out."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import rich.console
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_llm import desk, hosts
from jaxrl_llm.cli import dryrun
from jaxrl_llm.cli.data import building
from jaxrl_llm.config import Config
from jaxrl_llm.errors import Leaving
from jaxrl_llm.learning.evaluate import Result
from jaxrl_llm.models import sharding
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.runs import assemble, folder, journal, origin, splits, terminal
from jaxrl_llm.runs import train as training
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.journal import Journal, Unwritten
from jaxrl_llm.runs.leaving import UNFINISHED, Stop, leaving_gracefully
from jaxrl_llm.runs.notes import REINFORCE
from jaxrl_llm.runs.splits import Splits
from jaxrl_llm.runs.train import Run
from jaxrl_llm.training import curves, tables


def _resume(words: list[str]) -> bool | Literal["auto"]:
    if words not in ([], ["auto"]):
        raise ValueError("--resume stands alone, or as --resume auto")
    return "auto" if words else True


_RESUME = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto]",
    instance_from_str=_resume,
    is_instance=lambda value: value in (True, False, "auto"),
    str_from_instance=lambda value: ["auto"] if value == "auto" else [],
)


@dataclass(frozen=True)
class Options:
    """Where a run goes and how it starts."""

    out: Path | None = None
    """the run's folder, or s3://bucket/name or gs://bucket/name (default: runs/ and the name of the config)"""
    resume: Annotated[bool | Literal["auto"], _RESUME] = False
    """go on from the newest checkpoint in the folder; with auto, start if there is no run in it yet"""
    max_minutes: float | None = None
    """stop, saved, after so many minutes"""
    grace: float = 60.0
    """seconds from a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1) to the end of the process at the latest"""
    origin: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """another run (a folder or URL), with whose warm start this one begins instead of making its own"""
    process: str | None = None
    """one of several processes of a run, one a host: auto, as the cluster says (SLURM, Cloud TPU, Kubernetes, Open
    MPI), or I/N@HOST:PORT, process I (from 0) of N, which meet at that address of process 0; --out is then storage
    that all see"""
    lost: float = hosts.LOST
    """seconds after which a process that gives no sign of life ends the others"""
    dry_run: bool = False
    """print the resolved config, a prompt, memory and traffic on these devices, and stop: no run is started, but
    missing data sets are made"""
    data: Path = folder.DATA
    """where data sets are kept, a folder or URL"""

    def resumes(self, out: Path) -> bool:
        """Whether a run goes on in its folder."""
        return folder.resumable(out) if self.resume == "auto" else bool(self.resume)


def main(options: Options, config: Config, made_by: Path, flags: dict[str, Any]) -> None:
    """A whole run, with a table and a picture at the end."""
    stop = Stop()
    with (
        leaving_gracefully(stop, grace=options.grace, minutes=options.max_minutes),
        hosts.joined(options.process, lost=options.lost, asked=lambda: stop.asked),
    ):
        console = terminal.console(quiet=not hosts.first())
        try:
            finished = _train(options, config, made_by, flags, stop, console)
        except Leaving:
            console.print("stopped before there was anything to save")
            finished = False
    if not finished:
        raise SystemExit(UNFINISHED)


def _train(
    options: Options,
    config: Config,
    made_by: Path,
    flags: dict[str, Any],
    stop: Stop,
    console: rich.console.Console,
) -> bool:
    """Whether the run has come to its end."""
    with stop.droppable():
        with building(console, options.data):
            parts = assemble.parts(config, options.data)
            train_set = assemble.readable(parts, parts.task.train, config, "training")
            test_set = assemble.askable(parts, parts.task.test, config)
        if options.dry_run:
            dryrun.report(config, parts, train_set, test_set, console)
            return True
        divided = splits.split(train_set, test_set, config.evaluation.validation)
        _describe(parts, train_set.skipped, divided, console)
        out = folder.of(options.out, made_by)
        resume = hosts.told(lambda: options.resumes(out))
        warm_steps = config.warm_start.steps if config.warm_start else 0
        given = options.origin
        if resume:
            hosts.told(lambda: folder.require_at_most(out, warm_steps + config.steps))
            given = given or hosts.told(lambda: folder.began_with(out))
        begun = given and desk.at_hand(Path(given)).absolute()
        if options.origin and not resume:
            origin.check(folder.at_hand(options.origin), parts, warm_steps)
    run, concluded, finished = None, None, False
    with (
        folder.opened(
            out, made_by, flags, parts, resume=resume, origin=begun, say=console.print
        ) as check,
        jax.set_mesh(parts.mesh),
        ExitStack() as stack,
    ):
        with hosts.together():
            checkpoints = Checkpoints(
                out / "checkpoints", config.keep_checkpoints, regular=config.saves, check=check
            )
        written = stack.enter_context(
            (Journal if hosts.first() else Unwritten)(out, console, check=check)
        )
        try:
            with stop.droppable():
                sampler = stack.enter_context(config.engine.start(parts.policy, parts.mesh, out))
            if isinstance(sampler, NativeSampler) and parts.mesh.size > 1:
                console.print(sampler.place)
            run = Run(config, parts, sampler, written, checkpoints, divided, stop)
            warmed = partial(origin.params, begun, parts, warm_steps) if begun else None
            training.train(run, resume=resume, warmed=warmed)
            concluded = training.conclude(run)
            finished = True
        except Leaving:
            finished = False
        except Exception as error:
            hosts.announce(error)  # before closing, which waits for the others
            raise
        finally:
            checkpoints.close()
        if run is not None:
            written.close()
    if run is None or not finished:
        console.print(f"stopped and saved in {desk.named(out)}; go on with --resume")
        return False
    if hosts.first():
        _summarise(run, concluded, console)
    return True


def _describe(parts: Parts, skipped: int, divided: Splits, console: rich.console.Console) -> None:
    """What is learned from and tested on, and what about it may surprise."""
    if skipped:
        console.print(f"{skipped} examples are left out: their prompts are too long to learn from")
    console.print(
        f"{len(divided.train)} examples to learn from, {len(divided.validation)} to choose the best "
        f"checkpoint by, {len(divided.test)} to test on"
    )
    whole = sharding.left_whole(assemble.like_params(parts), parts.mesh)
    for said in (*whole, splits.overlap(parts.task, divided)):
        if said:
            console.print(said)


def _summarise(
    run: Run, concluded: tuple[int, Result] | None, console: rich.console.Console
) -> None:
    """The test table, what the validation examples say of the way there, the picture, and what to do next."""
    out = run.journal.folder
    curves.draw([out], out / curves.PICTURE)
    desk.store(out / curves.PICTURE)
    if concluded is None:
        console.print(f"nothing was left to do in {desk.named(out)}")
        return
    step, result = concluded
    chosen = "the best on the validation examples" if run.best is not None else "the last"
    title = f"test accuracy in percent (95% interval) of step {step}, {chosen}"
    console.print(tables.accuracies(title, {"": result}, run.config.evaluation.by))
    console.print(_progress(out, step))
    where = desk.named(out)
    console.print(
        f"curves: {where}/{curves.PICTURE}   talk to it: jaxrl-llm sample {where}   "
        f"evaluate it: jaxrl-llm eval {where}"
    )


def _progress(out: Path, step: int) -> str:
    """What reinforcement has changed on the validation examples, up to the chosen step."""
    scores = {
        record["step"]: record["eval/accuracy"]
        for record in journal.read(out)
        if record["phase"] == REINFORCE and "eval/accuracy" in record
    }
    start, chosen = scores[min(scores)], scores.get(step, scores[max(scores)])
    said = f"validation accuracy: {100 * start:.1f}% before reinforcement"
    later = [scores[s] for s in sorted(scores)[1:]][-3:]
    if not later:  # a run of no steps
        return said
    mean = sum(later) / len(later)
    said += f", {100 * chosen:.1f}% at step {step}"
    said += (
        f", mean of the last {len(later)}: {100 * mean:.1f}% ({100 * (mean - start):+.1f} points)"
    )
    if chosen <= start:
        said += "\nwarning: no checkpoint is better than the start of reinforcement"
    return said
