"""Makes the runs of a study that are not finished yet, and reports on the finished ones."""

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import rich.console

import jaxrl_llm
from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import fleet, study_report
from jaxrl_llm.research import grid as grids
from jaxrl_llm.research.grid import Grid
from jaxrl_llm.research.study import Outcome, Planned, results
from jaxrl_llm.training import journal, terminal
from jaxrl_llm.training.leaving import UNFINISHED


def run(
    file: Path,
    out: str | None,
    *,
    jobs: int,
    threads: int,
    seeds: tuple[int, ...],
    report: bool,
    data: str,
) -> None:
    """The command `jaxrl-llm study`; SystemExit(75) if stopped, a UserError if a run failed."""
    if threads < 1 or jobs < 0:
        raise UserError(
            "--threads is at least 1, and --jobs too (0: as many as there are cores for)"
        )
    if out is not None and storage.is_url(out):
        raise UserError(f"--out {out}: a study's folder lies in a file system")
    grid, console = grids.load(file, None if out is None else Path(out), seeds), terminal.console()
    kept, states = grid.kept(whole=not report), dict[str, str]()
    if not report:
        workers = jobs or max(1, len(fleet.available()) // threads)
        with _alone(grid.out, threads):
            states = _make(grid, kept, workers, threads, data, console)
    done = {run.name: grid.outcome(run) for run in grid.runs if grid.finished(run)}
    _report(grid, kept | done, console)
    if {fleet.WAITING, fleet.STOPPED} & {*states.values()}:
        console.print(f"stopped and saved in {grid.out}; the same command goes on")
        raise SystemExit(UNFINISHED)
    if failed := [name for name, state in states.items() if state == fleet.FAILED]:
        log = grid.out / "logs" / f"{failed[0]}.log"
        raise UserError(f"{len(failed)} runs failed; the first one, {failed[0]}, says why in {log}")


def _make(
    grid: Grid,
    kept: Mapping[str, Outcome],
    workers: int,
    threads: int,
    data: str,
    console: rich.console.Console,
) -> dict[str, str]:
    """Makes the runs that are neither finished nor kept; the last state of each."""
    jobs: dict[str, fleet.Job] = {}

    def add(run: Planned, origin: Planned | None) -> None:
        grid.require_same(run)
        if run.name in jobs or grid.finished(run):
            return
        begun = grid.folder(origin).absolute() if origin else None
        words = [*grid.command(run, begun), *grids.resume_flags(grid.folder(run))]
        command = [sys.executable, "-P", "-m", "jaxrl_llm.cli", *words, "--data", data]
        after = origin.name if origin and origin.name in jobs else ""
        log = grid.out / "logs" / f"{run.name}.log"
        jobs[run.name] = fleet.Job(run.name, command, log, after)

    for run in grid.runs:
        if run.name not in kept:
            warm = grid.warm_start(run)
            if warm and not grid.finished(run):
                add(warm, None)
            add(run, warm)

    def say(name: str, state: str) -> None:
        scores = [r for r in journal.read(grid.out / "runs" / name) if "eval/accuracy" in r]
        last = scores[-1:] if state != fleet.RUNNING else []
        score = "".join(f", {100 * r['eval/accuracy']:.1f}% at step {r['step']}" for r in last)
        console.print(f"{time.strftime('%H:%M')} {state} {name}{score}")

    package = str(Path(jaxrl_llm.__file__).parents[1])  # may be another than the installed one
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str((grid.out / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    environment = {name: value for name, value in environment.items() if name not in os.environ}
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    console.print(
        f"{len(jobs)} runs to make, {workers} at a time, {threads} cores each, in {grid.out}"
    )
    return fleet.run([*jobs.values()], workers, threads, environment, say)


def _report(grid: Grid, outcomes: Mapping[str, Outcome], console: rich.console.Console) -> None:
    """Writes results.json, results.md and the pictures, from the finished runs."""
    done = [run for run in grid.runs if run.name in outcomes]
    if not done:
        console.print(f"no run in {grid.out} is finished yet")
        return
    commands = dict[str, None]()  # in order, each once
    for run in done[:2]:
        warm = grid.warm_start(run)
        steps = [grid.command(warm)] if warm else []
        steps.append(grid.command(run, grid.folder(warm) if warm else None))
        commands |= dict.fromkeys("jaxrl-llm " + shlex.join(words) for words in steps)
    others = [one for name, one in grid.recorded().items() if name not in outcomes]
    found = results(
        grid.study,
        [outcomes[run.name] for run in done],
        title=grid.name,
        text=grid.text,
        state=f"{len(done)} of {len(grid.runs)} runs are finished; cores a run: {_threads(grid.out)}.",
        config=str(grid.config),
        commands=[*commands],
        others=others,
    )
    console.print(study_report.write(found, grid.out), highlight=False)
    console.print(f"written to {grid.out / 'results.md'}, results.json, and pictures beside them")


@contextmanager
def _alone(out: Path, threads: int) -> Iterator[None]:
    """Locks the study's folder; a UserError if its runs were made with another number of cores."""
    out.mkdir(parents=True, exist_ok=True)
    with storage.locked(out):
        before = _threads(out)
        if before is None:
            storage.write(out / "threads", f"{threads}\n")
        elif before != threads:
            raise UserError(f"{out} has runs of {before} cores each: go on with --threads {before}")
        yield


def _threads(out: Path) -> int | None:
    """Cores of each run in the folder; None for a new one."""
    path = out / "threads"
    try:
        return int(path.read_text()) if path.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: write into it how many cores each run there has had"
        ) from error
