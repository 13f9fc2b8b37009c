"""`jaxrl-llm study`: a grid of runs, resumable at any moment, and what it says in the end."""

import fcntl
import inspect
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import rich.live
import rich.table

from jaxrl_llm import config as configs
from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.reports import study as studies
from jaxrl_llm.reports import study_figures, study_text
from jaxrl_llm.reports.study import Outcome, Planned, Study
from jaxrl_llm.runs import fleet, folder, journal
from jaxrl_llm.runs.leaving import Stop, leaving_gracefully
from jaxrl_llm.runs.notes import REINFORCE
from jaxrl_llm.storage import url_of

REDRAW = 5.0  # seconds


@dataclass(frozen=True)
class Grid:
    """A study, the config file it sets the flags of, and the folder that it lives in."""

    study: Study
    title: str
    text: str
    config: Path
    out: Path

    def folder_of(self, run: Planned) -> Path:
        """The folder of a run."""
        return self.out / "runs" / run.name

    def kept(self, runs: Sequence[Planned]) -> dict[str, Outcome]:
        """Outcomes of runs whose folders are gone, out of the results in the study's folder.

        Whole seeds alone: what is compared has begun with the same warm start.
        """
        there = self.out / "results.json"
        written = json.loads(there.read_text())["runs"] if there.exists() else []
        known = {made.run.name: made for made in map(studies.kept, written)}
        missing = {
            (run.panel, run.seed)
            for run in runs
            if self.folder_of(run).exists() or run.name not in known or known[run.name].run != run
        }
        return {run.name: known[run.name] for run in runs if (run.panel, run.seed) not in missing}

    def command(self, run: Planned, origin: Path | None = None) -> list[str]:
        """What makes the run, as anybody can type it."""
        flags: list[str] = []
        for name, value in run.flags.items():
            dashed = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{dashed}" if value else f"--no-{dashed}")
            else:
                flags += [f"--{dashed}", str(value)]
        begin = ["--from", str(origin)] if origin else []
        return ["train", str(self.config), *flags, "--out", str(self.folder_of(run)), *begin]


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
        jobs: how many runs at a time (default: as many as there are cores for).
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
    if out is not None and url_of(out):
        raise UserError(f"--out {url_of(out)}: a study's folder lies in a file system")
    text = (module.__doc__ or "").strip()
    grid = Grid(study, file.stem, text, config, out or Path("runs") / "studies" / file.stem)
    console, runs = rich.console.Console(markup=False, soft_wrap=True), study.runs(seeds)
    lengths, kept = _lengths(grid, runs), grid.kept(runs)
    failed: list[str] = []
    if not report:
        workers = jobs or max(1, (os.cpu_count() or 1) // threads)
        with _alone(grid.out, threads):
            left = [run for run in runs if run.name not in kept]
            failed = _run(grid, left, lengths, workers, threads, data, console)
    done = [run for run in runs if finished(grid.folder_of(run), *lengths[run.name])]
    made = {run.name: studies.outcome(run, journal.read(grid.folder_of(run))) for run in done}
    _report(grid, runs, kept | made, console)
    if failed:
        log = grid.out / "logs" / f"{failed[0]}.log"
        raise UserError(f"{len(failed)} runs failed; the first one, {failed[0]}, says why in {log}")


def finished(where: Path, begin: int, steps: int) -> bool:
    """Whether a run has made, evaluated and saved its last step."""
    if not (where / "checkpoints" / str(begin + steps)).is_dir():
        return False
    last = begin + steps
    return any(r["step"] == last and "eval/accuracy" in r for r in journal.read(where))


def prepared(where: Path, flags: Mapping[str, Any]) -> list[str]:
    """The flags that go on with what is in a run's folder; a start that came to nothing is cleared away."""
    if not (where / "checkpoints").is_dir():
        shutil.rmtree(where, ignore_errors=True)
        return []
    there = json.loads((where / "run.json").read_text())["flags"]
    for name, value in json.loads(json.dumps(flags)).items():
        if there.get(name, value) != value:
            raise UserError(
                f"{where} was made with {name} = {there[name]}, the study says {value}: choose another --out"
            )
    return ["--resume"]


def _lengths(grid: Grid, runs: Sequence[Planned]) -> dict[str, tuple[int, int]]:
    """Steps of both phases of every run and warm start, by building their configs: wrong flags are found now."""
    make = configs.load(grid.config)
    out: dict[str, tuple[int, int]] = {}
    known: dict[tuple[str, str], tuple[int, int]] = {}
    for run in [*runs, *map(grid.study.warm_start, runs)]:
        key = (run.panel, run.variant)
        if key not in known:
            made = configs.build(make, grid.config, **run.flags)
            known[key] = (made.warm_start.steps if made.warm_start else 0, made.steps)
        out[run.name] = known[key]
    if len({run.name for run in runs}) < len(runs):
        raise UserError(
            f"{grid.title}: two variants or panels have names that make the same folder"
        )
    return out


def _run(
    grid: Grid,
    runs: Sequence[Planned],
    lengths: Mapping[str, tuple[int, int]],
    workers: int,
    threads: int,
    data: Path,
    console: rich.console.Console,
) -> list[str]:
    """Makes what is not finished; the names of what failed."""
    make = configs.load(grid.config)
    jobs: dict[str, fleet.Job] = {}

    def add(run: Planned, origin: Planned | None) -> bool:
        where = grid.folder_of(run)
        bound = inspect.signature(make).bind(**run.flags)
        bound.apply_defaults()
        more = prepared(where, bound.arguments)
        if finished(where, *lengths[run.name]):
            return False
        begun = grid.folder_of(origin).absolute() if origin else None
        command = [sys.executable, "-m", "jaxrl_llm.cli", *grid.command(run, begun), *more]
        after = origin.name if origin and origin.name in jobs else ""
        log = grid.out / "logs" / f"{run.name}.log"
        jobs[run.name] = fleet.Job(run.name, [*command, "--data", str(data)], log, after)
        return True

    for run in runs:
        warm = grid.study.warm_start(run) if lengths[run.name][0] else None
        if warm and warm.name not in jobs and not finished(grid.folder_of(run), *lengths[run.name]):
            add(warm, None)
        add(run, warm)
    cache = {"JAX_COMPILATION_CACHE_DIR": str((grid.out / "compiled").absolute()),
             "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
    environment = {k: v for k, v in cache.items() if k not in os.environ}
    stop = Stop()
    console.print(
        f"{len(jobs)} runs to make, {workers} at a time, {threads} cores each, in {grid.out}"
    )
    with leaving_gracefully(stop), _Watch(grid, runs, lengths, console) as look:
        states = fleet.run([*jobs.values()], workers, threads, stop, look, environment)
    if stop.asked:
        console.print(f"stopped and saved in {grid.out}; the same command goes on")
    return [name for name, state in states.items() if state == fleet.FAILED]


class _Watch:
    """The live table: a line a variant, a column a seed; where there is no terminal, a line a run."""

    def __init__(self, grid, runs, lengths, console):
        self.grid, self.runs, self.lengths, self.console = grid, runs, lengths, console
        self.cells: dict[str, str] = {}
        self.shown: dict[str, str] = {}
        self.next = 0.0
        self.live = rich.live.Live(console=console, auto_refresh=False)

    def __enter__(self):
        if self.console.is_terminal:
            self.live.start()
        return self.look

    def __exit__(self, *_):
        self.live.stop()

    def look(self, states: Mapping[str, str]) -> None:
        """Shows what has changed."""
        changed = {n: s for n, s in states.items() if self.shown.get(n, fleet.WAITING) != s}
        self.shown.update(changed)
        if not self.console.is_terminal:
            for name, state in changed.items():
                self.console.print(
                    f"{time.strftime('%H:%M')} {state} {name} {self._progress(name)}"
                )
        elif changed or time.monotonic() > self.next:
            self.next = time.monotonic() + REDRAW
            self.live.update(self._table(states), refresh=True)

    def _table(self, states: Mapping[str, str]) -> rich.table.Table:
        seeds = sorted({run.seed for run in self.runs})
        busy = sum(state == fleet.RUNNING for state in states.values())
        left = sum(state == fleet.WAITING for state in states.values())
        title = f"{self.grid.title}: step and held-out accuracy; {busy} running, {left} waiting"
        table = rich.table.Table("", *(f"seed {seed}" for seed in seeds), title=title)
        warm = [self.grid.study.warm_start(run) for run in self.runs]
        rows: dict[tuple[str, str], dict[int, str]] = {}
        for run in [*warm, *self.runs]:
            state = states.get(run.name, fleet.DONE)
            if (
                run.name not in self.cells
                or state != self.cells[run.name].partition(" ")[0]
                or (state == fleet.RUNNING)
            ):
                self.cells[run.name] = f"{state} {self._progress(run.name)}"
            rows.setdefault((run.panel, run.variant), {})[run.seed] = self.cells[run.name]
        for (panel, variant), cells in rows.items():
            table.add_row(f"{panel} {variant}".strip(), *(cells.get(seed, "") for seed in seeds))
        return table

    def _progress(self, name: str) -> str:
        records = journal.read(self.grid.out / "runs" / name)
        if not records:
            return ""
        step, scores = records[-1]["step"], [r for r in records if "eval/accuracy" in r]
        score = f" {100 * scores[-1]['eval/accuracy']:.1f}%" if scores else ""
        begin, steps = self.lengths[name]
        if records[-1]["phase"] == REINFORCE and steps:
            return f"{step - begin}/{steps}{score}"
        return f"warm {step}/{begin}{score}"


def _report(
    grid: Grid, runs: Sequence[Planned], outcomes: Mapping[str, Outcome], console: Any
) -> None:
    """results.json, results.md and the pictures, of the runs that are finished."""
    if not outcomes:
        console.print(f"no run in {grid.out} is finished yet")
        return
    done = [run for run in runs if run.name in outcomes]
    commands = []
    for run in done[: len(grid.study.variants)][:2]:
        warm = grid.study.warm_start(run)
        for one, origin in ((warm, None), (run, grid.folder_of(warm))):
            commands.append("jaxrl-llm " + shlex.join(grid.command(one, origin)))
    results = studies.results(
        grid.study,
        [outcomes[run.name] for run in done],
        title=grid.title,
        text=grid.text,
        state=f"{len(done)} of {len(runs)} runs are finished; cores a run: {_threads(grid.out)}.",
        config=str(grid.config),
        commands=[*dict.fromkeys(commands)],
    )
    (grid.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (grid.out / "results.md").write_text(study_text.markdown(results))
    study_figures.draw(results, grid.out)
    console.print(study_text.markdown(results), highlight=False)
    console.print(f"written to {grid.out / 'results.md'}, results.json, and pictures beside them")


@contextmanager
def _alone(out: Path, threads: int) -> Iterator[None]:
    """Holds the study's folder, made with as many cores a run as before."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("a")
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{out} is being worked on by another process") from error
        before = _threads(out) or threads
        if before != threads:
            raise UserError(f"{out} has runs of {before} cores each: go on with --threads {before}")
        (out / "threads").write_text(f"{threads}\n")
        yield


def _threads(out: Path) -> int | None:
    """Cores that each run of the folder has had."""
    noted = out / "threads"
    return int(noted.read_text()) if noted.exists() else None
