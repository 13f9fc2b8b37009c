"""A study with its config file and folder, and which of its runs are finished.

OUT/runs/NAME     the folder of each run and warm start; those of finished runs may be deleted
OUT/results.json  outcomes of finished runs, and earlier ones of other seeds or flags
OUT/threads       cores of each run: another number would change the order of sums
"""

import inspect
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_type_hints

from jaxrl_llm import config as configs
from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.research.study import Outcome, Planned, Study, outcome
from jaxrl_llm.training import journal, record


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
    def runs(self) -> list[Planned]:
        """All runs of the chosen seeds."""
        return self.study.runs(self.seeds)

    @cached_property
    def lengths(self) -> dict[str, tuple[int, int]]:
        """Steps of warm start and reinforcement of each run and warm start, by name.

        Builds every config, so that wrong flags are found before anything starts.
        """
        built: dict[str, configs.Config] = {}
        for run in self.runs:
            warm = self.study.warm_start(run)
            for one in (run, warm):
                if one.name not in built:
                    built[one.name] = configs.build(self.make, self.config, **one.flags)
            _require_same_beginning(run, built[run.name], built[warm.name])
        lengths = {
            name: (made.warm_start.steps if made.warm_start else 0, made.steps)
            for name, made in built.items()
        }
        warm = {self.study.warm_start(run).name for run in self.runs if lengths[run.name][0]}
        if len({run.name for run in self.runs} | warm) < len(self.runs) + len(warm):
            raise UserError(
                f"{self.name}: two variants or panels, or one and a warm start, "
                "have names that make the same folder"
            )
        return lengths

    def warm_start(self, run: Planned) -> Planned | None:
        """The run that makes the warm start of this one; None if it has no warm start."""
        return self.study.warm_start(run) if self.lengths[run.name][0] else None

    def folder(self, run: Planned) -> Path:
        """The folder of a run or warm start."""
        return self.out / "runs" / run.name

    def settings(self, run: Planned) -> dict[str, Any]:
        """All flags of a run, defaults included, as JSON."""
        bound = inspect.signature(self.make).bind(**run.flags)
        bound.apply_defaults()
        return record.plain(bound.arguments)

    def finished(self, run: Planned) -> bool:
        """Whether a run has made, evaluated and saved its last step.

        Its checkpoints may have been deleted since; not a warm start's, which other runs load.
        """
        where, (begin, steps) = self.folder(run), self.lengths[run.name]
        last, checkpoints = begin + steps, where / "checkpoints"
        if not (checkpoints / str(last)).is_dir() and (not steps or checkpoints.exists()):
            return False
        return any(r["step"] == last and "eval/accuracy" in r for r in journal.read(where))

    def outcome(self, run: Planned) -> Outcome:
        """The outcome of a finished run; a UserError if its flags are not the study's."""
        where = self.folder(run)
        there = record.read(where)
        _require_equal(str(where), there["flags"], self.settings(run))
        began = there["sessions"][:1]
        made = {"flags": there["flags"]} | {k: s[k] for s in began for k in ("at", "versions")}
        return outcome(run, journal.read(where), made)

    def require_same(self, run: Planned) -> None:
        """Raises a UserError if its folder was made with other flags, or by files changed since."""
        where = self.folder(run)
        if not (where / record.NAME).exists():
            return
        there = record.read(where)
        _require_equal(str(where), there["flags"], self.settings(run))
        if changed := record.changed(where, there, self.config):
            raise UserError(
                f"{changed[0]} has changed since {where} was made: "
                f"put it back as it was ({changed[1]}), or choose another --out"
            )

    def command(self, run: Planned, origin: Path | None = None) -> list[str]:
        """Arguments of `jaxrl-llm` that make the run, from the warm start in `origin` if given."""
        words: list[str] = []
        hints = get_type_hints(self.make)
        for name, value in run.flags.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool) and hints.get(name, bool) is bool:
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                values = value if isinstance(value, list | tuple) else [value]
                words += [f"--{flag}", *map(str, values)]
        begin = ["--from", str(origin)] if origin else []
        return ["train", str(self.config), *words, "--out", str(self.folder(run)), *begin]

    def recorded(self) -> dict[str, Outcome]:
        """The outcomes in results.json by name, including those of other seeds or flags."""
        path = self.out / "results.json"
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text())
            return {one["name"]: one for one in found["runs"] + found["others"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read: move it away, or --out elsewhere") from error

    def kept(self, *, whole: bool) -> dict[str, Outcome]:
        """Outcomes in results.json of runs whose folders were deleted, by name.

        Compared runs must share a warm start, so if any run of a panel and seed has a folder, none
        is taken; with `whole` none either unless results.json has them all.
        """
        recorded = self.recorded()

        def same(run: Planned) -> bool:
            one, wanted = recorded.get(run.name), record.plain(vars(run))
            if one is None or {name: one[name] for name in wanted} != wanted:
                return False
            source = f"{run.name} of {self.out / 'results.json'}"
            _require_equal(source, one["made"].get("flags", {}), self.settings(run))
            return True

        there = {run.name for run in self.runs if same(run)}
        left_out = {
            (run.panel, run.seed)
            for run in self.runs
            if self.folder(run).exists() or (whole and run.name not in there)
        }
        chosen = [run for run in self.runs if (run.panel, run.seed) not in left_out]
        return {run.name: recorded[run.name] for run in chosen if run.name in there}


def load(file: Path, out: Path | None, seeds: Sequence[int]) -> Grid:
    """The grid of a study file; a UserError if it defines no valid `study`."""
    module = userfile.run(file, "study")
    study = userfile.member(module, "study", f"study file {file}")
    if not isinstance(study, Study):
        raise UserError(f"{file}: study is a {type(study).__name__}, not a Study")
    config = Path(os.path.relpath((file.parent / study.config).resolve()))
    out = out or Path("runs") / "studies" / file.stem
    grid = Grid(study, file.stem, (module.__doc__ or "").strip(), config, out, seeds)
    if not grid.lengths:
        raise UserError(f"{file}: the study has no runs")
    return grid


def resume_flags(where: Path) -> list[str]:
    """Flags of `train` to go on in a run's folder; deletes one that has no record of a step yet."""
    if (where / "checkpoints").is_dir():
        return ["--resume"]
    if journal.read(where):
        raise UserError(
            f"{where} has lost its checkpoints before it was finished: move it away, and it is made anew"
        )
    if where.exists():
        shutil.rmtree(where)
    return []


def _require_equal(source: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if there.get(name, value) != value:
            raise UserError(
                f"{source} was made with {name} = {there[name]}, the study says {value}: choose another --out"
            )


def _require_same_beginning(run: Planned, made: configs.Config, warm: configs.Config) -> None:
    """Raises a UserError if a flag that is not in the study's `warm` changes the warm start."""

    def beginning(config: configs.Config) -> dict[str, Any]:
        start = config.warm_start
        if start is None:
            return {}
        slices = replace(start.collate, microbatches=1, shards=1)  # do not change the result
        return {
            "the model": config.model,
            "the task": _bound(config.task),
            "the demonstrations": _bound(start.demonstration),
            "the optimizer of the warm start": _bound(start.optimizer),
            "its batch": (start.batch, slices),
        }

    ours, its = beginning(made), beginning(warm)
    for name in ours.keys() & its:
        if ours[name] != its[name]:
            raise UserError(
                f"study: {run.name} and the warm start that it would begin with have not {name} in common: "
                f"name the flag that changes it in warm, and set it for a panel or for all; {[*run.flags]} are set"
            )


def _bound(made: Any, seen: frozenset[int] = frozenset()) -> list[Any]:
    """Plain values in partials, defaults, closures and collections, however deep, to compare."""
    if isinstance(made, str | int | float | Path):
        return [made]
    if id(made) in seen:
        return []
    if isinstance(made, partial):
        parts = [made.func, *made.args, *made.keywords.values()]
    elif inspect.isfunction(made):
        parts = [*(made.__defaults__ or ()), *inspect.getclosurevars(made).nonlocals.values()]
    elif isinstance(made, Mapping):
        parts = [*made.values()]
    else:
        parts = made if isinstance(made, list | tuple) else []
    return [value for part in parts for value in _bound(part, seen | {id(made)})]
