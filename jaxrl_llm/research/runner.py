"""Makes the runs of a study that are not finished yet, and reports on the finished ones.

OUT/runs/NAME      the folder of each run and warm start; those of finished runs may be deleted
OUT/logs/NAME.log  what it printed
OUT/results.json   outcomes of finished runs, and earlier ones of other seeds or flags
OUT/threads        cores of each run: another number would change the order of sums
"""

import inspect
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import rich.console

import jaxrl_llm
from jaxrl_llm import accelerators, storage, userfile
from jaxrl_llm import config as configs
from jaxrl_llm.errors import UserError, flags_at_least
from jaxrl_llm.research import pool, statistics, study_report
from jaxrl_llm.research.study import Outcome, Run, Study, outcome, results
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.training import journal, record, terminal
from jaxrl_llm.training.leaving import UNFINISHED, Stop, stoppable

GRACE = 75.0  # seconds from a signal to the end: the runs have 60


@dataclass(frozen=True)
class Grid:
    """A study, its config file and folder; `name` and `text` are title and text of its report."""

    study: Study
    name: str
    text: str
    config: Path
    out: Path
    seeds: Sequence[int] = ()

    @cached_property
    def make(self) -> Callable[..., configs.Config]:
        """The config's function."""
        return configs.load(self.config)

    @cached_property
    def built(self) -> dict[str, configs.Config]:
        """Every run's config, by its name, so that wrong flags are found before anything starts."""
        by_run = {r.name: configs.build(self.make, self.config, **r.flags) for r in self.runs}
        for name, built in by_run.items():
            if not built.steps:
                raise UserError(f"{self.name}: {name}: steps = 0 leaves nothing to compare")
        return by_run

    def require_gpus_alone(self) -> None:
        """A UserError where runs at the same time would have servers on the GPUs that they share."""
        for name, config in self.built.items():
            if isinstance(config.engine, Vllm) and config.engine.share:
                raise UserError(
                    f"{self.name}: {name} shares its GPU with a server of its own: --jobs 1"
                )

    @cached_property
    def warm_starts(self) -> dict[str, Run | None]:
        """The warm start of each run, by the run's name; None where the config has none."""
        by_run: dict[str, Run | None] = {}
        for run in self.runs:
            warm = self.built[run.name].warm_start
            by_run[run.name] = self.study.warm_start(run) if warm else None
        shared = {warm.name: warm for warm in by_run.values() if warm}
        for warm in shared.values():
            configs.build(self.make, self.config, **warm.flags)
        if len(by_run.keys() | shared) < len(self.runs) + len(shared):
            raise UserError(
                f"{self.name}: two variants or panels, or one and a warm start, "
                "have names that make the same folder"
            )
        return by_run

    @cached_property
    def runs(self) -> list[Run]:
        """All runs of the chosen seeds."""
        return self.study.runs(self.seeds)

    def folder(self, run: Run) -> Path:
        """The folder of a run or warm start."""
        return self.out / "runs" / run.name

    def settings(self, run: Run) -> dict[str, Any]:
        """All flags of a run, defaults included, as JSON."""
        bound = inspect.signature(self.make).bind(**run.flags)
        bound.apply_defaults()
        return record.plain(bound.arguments)

    def finished(self, run: Run) -> bool:
        """True if a run has been tested, which is the last thing that it does."""
        return any("test/accuracy" in r for r in journal.read(self.folder(run)))

    def outcome(self, run: Run) -> Outcome:
        """The outcome of a finished run; a UserError if its flags are not the study's."""
        there = self.require_same_flags(run)
        began = there["sessions"][:1]
        made = {name: there[name] for name in ("flags", "sums")}
        made |= {k: s[k] for s in began for k in ("at", "versions")}
        # from the config's folder on: the results may be read on another machine
        beside = lambda path: os.path.relpath(path, self.config.parent)
        made["files"] = {beside(path): copy for path, copy in there["files"].items()}
        return outcome(run, journal.read(self.folder(run)), made)

    def require_same_flags(self, run: Run) -> record.Run:
        """The record of the run in its folder; a UserError if its flags are not the study's."""
        there = record.read(self.folder(run))
        _require_equal(str(self.folder(run)), there["flags"], self.settings(run))
        return there

    def require_same(self, run: Run) -> None:
        """Raises a UserError if its folder was made with other flags, or by files changed since."""
        where = self.folder(run)
        if not (where / record.NAME).exists():
            return
        if changed := record.changed(where, self.require_same_flags(run), self.config):
            raise UserError(
                f"{changed[0]} has changed since {where} was made: "
                f"put it back as it was ({changed[1]}), or choose another --out"
            )

    def require_unchanged(self, outcome: Outcome) -> None:
        """A UserError if a file that made a run of results.json has changed since, where it says so."""
        ran = {"files": {}, "sums": {}} | outcome["made"]
        ran["files"] = {str(self.config.parent / path): x for path, x in ran["files"].items()}
        if changed := record.changed(self.out, ran, self.config):
            raise UserError(
                f"{changed[0]} has changed since {outcome['name']} of {self.out / 'results.json'} was made: "
                "put it back as it was, or choose another --out"
            )

    def command(self, run: Run, data: str | None = None) -> list[str]:
        """Arguments of `jaxrl-llm` that make the run, from its warm start if it has one."""
        words = ["train", str(self.config), *as_words(self.make, run.flags)]
        words += ["--out", str(self.folder(run))]
        if warm := self.warm_starts.get(run.name):
            words += ["--from", str(self.folder(warm).absolute() if data else self.folder(warm))]
        return words + (["--resume", "auto", "--data-folder", data] if data else [])

    def recorded(self) -> dict[str, Outcome]:
        """The outcomes in results.json by name, including those of other seeds or flags."""
        path = self.out / "results.json"
        if not path.exists():
            return {}
        try:
            found = statistics.finite(json.loads(path.read_text()))  # older ones have NaN
            return {one["name"]: one for one in found["runs"] + found["others"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read: move it away, or --out elsewhere") from error

    def outcomes(self, *, whole: bool) -> dict[str, Outcome]:
        """Outcomes in results.json of runs whose folders were deleted, by name.

        Compared runs must share a warm start, so if any run of a panel and seed that has one has a
        folder, none is taken; with `whole` none either unless results.json has them all.
        """
        by_name, recorded = {}, self.recorded()
        for run in self.runs:
            one, wanted = recorded.get(run.name), statistics.finite(record.plain(vars(run)))
            if one is not None and {name: one[name] for name in wanted} == wanted:
                source = f"{run.name} of {self.out / 'results.json'}"
                settings = statistics.finite(self.settings(run))
                _require_equal(source, one["made"].get("flags", {}), settings)
                by_name[run.name] = one
        there = {run.name for run in self.runs if self.folder(run).exists()}
        left_out = {
            (run.panel, run.seed)
            for run in self.runs
            if self.warm_starts[run.name]
            and (run.name in there or (whole and run.name not in by_name))
        }
        return {
            name: one
            for name, one in by_name.items()
            if name not in there and (one["panel"], one["seed"]) not in left_out
        }


def as_words(make: Callable[..., configs.Config], flags: Mapping[str, Any]) -> list[str]:
    """Flags of a config's function as words of the command line."""
    words, hints = list[str](), get_type_hints(make)
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool) and hints.get(name, bool) is bool:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words


def load(file: Path, out: Path | None, seeds: Sequence[int]) -> Grid:
    """The grid of a study file; a UserError if it defines no valid `study`."""
    module = userfile.run(file, "study")
    study = userfile.member(module, "study", f"study file {file}")
    if not isinstance(study, Study):
        raise UserError(f"{file}: study is a {type(study).__name__}, not a Study")
    config = Path(os.path.relpath((file.parent / study.config).resolve()))
    out = out or Path("runs") / "studies" / file.stem
    grid = Grid(study, file.stem, (module.__doc__ or "").strip(), config, out, seeds)
    if not grid.warm_starts:
        raise UserError(f"{file}: the study has no runs")
    return grid


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
    flags_at_least(1, threads=threads)
    flags_at_least(0, jobs=jobs)
    if out is not None and storage.is_url(out):
        raise UserError(f"--out {out}: a study's folder lies in a file system")
    grid, console = load(file, None if out is None else Path(out), seeds), terminal.console()
    outcomes, codes, stop = grid.outcomes(whole=not report), dict[str, int | None](), Stop()
    if not report:
        workers = _workers(jobs, threads)
        if workers > 1 and accelerators.in_use():
            grid.require_gpus_alone()
        with _alone(grid.out, threads), stoppable(stop, grace=GRACE):
            codes = _make(grid, outcomes, workers, threads, data, stop, console)
    done = {run.name: grid.outcome(run) for run in grid.runs if grid.finished(run)}
    _report(grid, outcomes | done, console)
    if stop.requested and any(code != 0 for code in codes.values()):
        console.print(f"stopped and saved in {grid.out}; the same command goes on")
        raise SystemExit(UNFINISHED)
    if failed := [name for name, code in codes.items() if code != 0]:
        log = grid.out / "logs" / f"{failed[0]}.log"
        raise UserError(f"{len(failed)} runs failed; the first one, {failed[0]}, says why in {log}")


def _workers(jobs: int, threads: int) -> int:
    """How many runs at a time; a UserError if they would share cores though each is to have some."""
    cores = len(pool.available())
    fit = max(1, cores // threads)
    if threads > 1 and jobs > 1 and jobs * threads > cores:
        raise UserError(
            f"--jobs {jobs} with {threads} cores each need {jobs * threads} cores, and there are {cores}: "
            f"--jobs {fit} fits"
        )
    return jobs or (1 if accelerators.in_use() else fit)


def _make(
    grid: Grid,
    outcomes: Mapping[str, Outcome],
    workers: int,
    threads: int,
    data: str,
    stop: Stop,
    console: rich.console.Console,
) -> dict[str, int | None]:
    """Makes the runs that are neither finished nor kept, warm starts first; their exit codes."""
    wanted = [run for run in grid.runs if run.name not in outcomes]
    left = [run for run in wanted if not grid.finished(run)]
    origins = {run.name: warm for run in left if (warm := grid.warm_starts[run.name])}
    warm = {one.name: one for one in origins.values() if not grid.finished(one)}
    for run in [*origins.values(), *wanted]:
        grid.require_same(run)
    for one in outcomes.values():
        grid.require_unchanged(one)

    def say(name: str, code: int | None) -> None:
        scores = journal.evaluations(journal.read(grid.out / "runs" / name))
        last = scores[-1:] if code is not None else []
        score = "".join(f", {100 * r['eval/accuracy']:.1f}% at step {r['step']}" for r in last)
        state = {None: "running", 0: "done"}.get(
            code, "stopped" if stop.requested or code == UNFINISHED else "failed"
        )
        console.print(f"{time.strftime('%H:%M')} {state} {name}{score}")

    console.print(
        f"{len(warm) + len(left)} runs to make, {workers} at a time, {threads} cores each, in {grid.out}"
    )
    codes, program = dict[str, int | None](), [sys.executable, "-P", "-m", "jaxrl_llm"]
    for runs in (warm.values(), left):  # a run without its warm start fails, and says so
        codes |= pool.run(
            {run.name: [*program, *grid.command(run, data)] for run in runs},
            grid.out / "logs",
            workers=workers,
            threads=threads,
            environment=_environment(grid.out) | divided(workers),
            stop=stop,
            say=say,
        )
    return codes


def divided(count: int) -> dict[str, str]:
    """Variables with which each of so many processes takes its part of the GPUs.

    None where the environment sets a share. A UserError where a part would be next to nothing.
    """
    whole, memory = accelerators.own_share(), accelerators.gpu_memory()
    if count == 1 or not whole or not accelerators.present("nvidia"):
        return {}
    share = round(whole / count - (accelerators.CONTEXT / memory if memory else 0.0), 3)
    if share < accelerators.LEAST:
        raise UserError(
            f"{count} processes on a GPU would have {share:.1%} of it each: fewer at a time"
        )
    return {accelerators.FRACTIONS[0]: str(share)}


def _environment(out: Path) -> dict[str, str]:
    """Variables of the runs' processes: our package, and what is compiled is kept for the next."""
    package = str(Path(jaxrl_llm.__file__).parents[1])  # may be another than the installed one
    paths = filter(None, (package, os.environ.get("PYTHONPATH")))
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    known = {name: os.environ.get(name, value) for name, value in cache.items()}
    return {**known, "PYTHONPATH": os.pathsep.join(paths)}


def _report(grid: Grid, outcomes: Mapping[str, Outcome], console: rich.console.Console) -> None:
    """Writes results.json, results.md and the pictures, from the finished runs."""
    done = [run for run in grid.runs if run.name in outcomes]
    if not done:
        console.print(f"no run in {grid.out} is finished yet")
        return
    steps = [one for one in (grid.warm_starts[done[0].name], *done[:2]) if one]
    overview = results(
        grid.study,
        [outcomes[run.name] for run in done],
        title=grid.name,
        text=grid.text,
        state=f"{len(done)} of {len(grid.runs)} runs are finished; cores a run: {_threads(grid.out)}.",
        config=str(grid.config),
        commands=["jaxrl-llm " + shlex.join(grid.command(one)) for one in steps],
        others=[one for name, one in grid.recorded().items() if name not in outcomes],
    )
    console.print(study_report.write(overview, grid.out))
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


def _require_equal(source: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if there.get(name, value) != value:
            raise UserError(
                f"{source} was made with {name} = {there[name]}, the study says {value}: choose another --out"
            )
