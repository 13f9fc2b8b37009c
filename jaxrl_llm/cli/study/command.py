"""`jaxrl-llm study`: a grid of runs, resumable at any moment, and what it says in the end."""

import fcntl
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.console
import rich.live
import rich.table

import jaxrl_llm
from jaxrl_llm import files, userfile
from jaxrl_llm.cli.study.grid import (
    Grid,
    continued,
    finished,
    lengths_of,
    made,
    require_same,
)
from jaxrl_llm.cli.study.watch import Watch
from jaxrl_llm.errors import UserError, cannot_write
from jaxrl_llm.reports import study as studies
from jaxrl_llm.reports import study_report
from jaxrl_llm.reports.study import Outcome, Planned, Study
from jaxrl_llm.runs import fleet, folder, journal, terminal
from jaxrl_llm.runs.leaving import UNFINISHED, Stop, leaving_gracefully
from jaxrl_llm.storage import url_of

GRACE = 90.0  # seconds, of which the trainers have 60


def main(
    file: Path,
    /,
    *,
    out: Path | None = None,
    jobs: int = 0,
    threads: int = 1,
    seeds: tuple[int, ...] = (),
    report: bool = False,
    data: Path = folder.DATA,
) -> None:
    """Run the grid of a study file, whatever is left of it, and report.

    Args:
        file: a Python file that defines `study`.
        out: the study's folder (default: runs/studies/ and the name of the file).
        jobs: how many runs at a time; 0 for as many as there are cores for.
        threads: cores of each run, the same for all of a study.
        seeds: instead of those of the study.
        report: only read what is there.
        data: where data sets are kept.
    """
    module = userfile.run(file, "study")
    study = userfile.member(module, "study", f"study file {file}")
    if not isinstance(study, Study):
        raise UserError(f"{file}: study is a {type(study).__name__}, not a Study")
    config = Path(os.path.relpath((file.parent / study.config).resolve()))
    if threads < 1 or jobs < 0:
        raise UserError(
            "--threads is at least 1, and --jobs too (0: as many as there are cores for)"
        )
    if out is not None and url_of(out):
        raise UserError(f"--out {url_of(out)}: a study's folder lies in a file system")
    text = (module.__doc__ or "").strip()
    grid = Grid(study, file.stem, text, config, out or Path("runs") / "studies" / file.stem)
    console, runs = terminal.console(), study.runs(seeds)
    lengths, kept = lengths_of(grid, runs), grid.kept(runs, whole=not report)
    failed, stopped = [], False
    if not report:
        workers = jobs or max(1, len(fleet.available()) // threads)
        with _alone(grid.out, threads):
            left = [run for run in runs if run.name not in kept]
            failed, stopped = _run(grid, left, lengths, workers, threads, data, console)
    done = [run for run in runs if finished(grid.folder_of(run), *lengths[run.name])]
    fresh = {
        run.name: studies.outcome(run, journal.read(grid.folder_of(run)), made(grid, run))
        for run in done
    }
    _report(grid, runs, lengths, kept | fresh, console)
    if stopped:
        raise SystemExit(UNFINISHED)
    if failed:
        log = grid.out / "logs" / f"{failed[0]}.log"
        raise UserError(f"{len(failed)} runs failed; the first one, {failed[0]}, says why in {log}")


def _run(
    grid: Grid,
    runs: Sequence[Planned],
    lengths: Mapping[str, tuple[int, int]],
    workers: int,
    threads: int,
    data: Path,
    console: rich.console.Console,
) -> tuple[list[str], bool]:
    """Makes what is not finished; the names of what failed, and whether it was told to stop."""
    jobs: dict[str, fleet.Job] = {}

    def add(run: Planned, origin: Planned | None) -> bool:
        where = grid.folder_of(run)
        require_same(grid, run)
        if finished(where, *lengths[run.name]):
            return False
        more = continued(where)
        begun = grid.folder_of(origin).absolute() if origin else None
        command = [sys.executable, "-P", "-m", "jaxrl_llm.cli", *grid.command(run, begun), *more]
        after = origin.name if origin and origin.name in jobs else ""
        log = grid.out / "logs" / f"{run.name}.log"
        jobs[run.name] = fleet.Job(run.name, [*command, "--data", str(data)], log, after)
        return True

    for run in runs:
        warm = grid.study.warm_start(run) if lengths[run.name][0] else None
        if warm and warm.name not in jobs and not finished(grid.folder_of(run), *lengths[run.name]):
            add(warm, None)
        add(run, warm)
    package = str(Path(jaxrl_llm.__file__).parents[1])  # which need not be the installed one
    cache = {"JAX_COMPILATION_CACHE_DIR": str((grid.out / "compiled").absolute()),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    environment = {k: v for k, v in cache.items() if k not in os.environ}
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    stop = Stop()
    console.print(
        f"{len(jobs)} runs to make, {workers} at a time, {threads} cores each, in {grid.out}"
    )
    with leaving_gracefully(stop, grace=GRACE), Watch(grid, runs, lengths, console) as look:
        states = fleet.run([*jobs.values()], workers, threads, stop, look, environment)
    if stop.asked:
        console.print(f"stopped and saved in {grid.out}; the same command goes on")
    failed = [name for name, state in states.items() if state == fleet.FAILED]
    return failed, stop.asked and fleet.unfinished(states)


def _report(
    grid: Grid,
    runs: Sequence[Planned],
    lengths: Mapping[str, tuple[int, int]],
    outcomes: Mapping[str, Outcome],
    console: Any,
) -> None:
    """results.json, results.md and the pictures, of the runs that are finished."""
    if not outcomes:
        console.print(f"no run in {grid.out} is finished yet")
        return
    done = [run for run in runs if run.name in outcomes]
    commands = []
    for run in done[:2]:
        warm = grid.study.warm_start(run) if lengths[run.name][0] else None
        commands += [grid.command(warm)] if warm else []
        commands.append(grid.command(run, grid.folder_of(warm) if warm else None))
    results = studies.results(
        grid.study,
        [outcomes[run.name] for run in done],
        title=grid.title,
        text=grid.text,
        state=f"{len(done)} of {len(runs)} runs are finished; cores a run: {_threads(grid.out)}.",
        config=str(grid.config),
        commands=[*dict.fromkeys("jaxrl-llm " + shlex.join(command) for command in commands)],
    )
    others = [one for name, one in grid.known().items() if name not in outcomes]
    results["others"] = [*map(studies.recorded, others)]
    text = study_report.write(results, grid.out)
    console.print(text, highlight=False)
    console.print(f"written to {grid.out / 'results.md'}, results.json, and pictures beside them")


@contextmanager
def _alone(out: Path, threads: int) -> Iterator[None]:
    """Holds the study's folder, made with as many cores a run as before."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("a")
    except OSError as error:
        raise cannot_write(out, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{out} is being worked on by another process") from error
        before = _threads(out) or threads
        if before != threads:
            raise UserError(f"{out} has runs of {before} cores each: go on with --threads {before}")
        if not (out / "threads").exists():
            files.write(out / "threads", f"{threads}\n")
        yield


def _threads(out: Path) -> int | None:
    """Cores that each run of the folder has had."""
    noted = out / "threads"
    try:
        return int(noted.read_text()) if noted.exists() else None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{noted} cannot be read: write into it how many cores each run there has had"
        ) from error
