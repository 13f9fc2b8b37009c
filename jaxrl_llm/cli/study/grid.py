"""A study where it lives: a config file, a folder, and what is finished there."""

import inspect
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_type_hints

from jaxrl_llm import config as configs
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.reports import study as studies
from jaxrl_llm.reports.study import Outcome, Planned, Study
from jaxrl_llm.runs import journal, record


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

    @cached_property
    def make(self) -> Callable[..., configs.Config]:
        """The config's function."""
        return configs.load(self.config)

    def settings(self, run: Planned) -> dict[str, Any]:
        """All flags of a run, also those that the study leaves as they are."""
        bound = inspect.signature(self.make).bind(**run.flags)
        bound.apply_defaults()
        return record.plain(bound.arguments)

    def known(self) -> dict[str, Outcome]:
        """The outcomes in results.json by name, those of other seeds or flags that it keeps among them."""
        there = self.out / "results.json"
        if not there.exists():
            return {}
        try:
            found = json.loads(there.read_text())
            made = map(studies.kept, found["runs"] + found["others"])
            return {one.run.name: one for one in made}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{there} cannot be read: move it away, or --out elsewhere") from error

    def kept(self, runs: Sequence[Planned], *, whole: bool) -> dict[str, Outcome]:
        """Outcomes of runs whose folders are gone, out of the results in the study's folder.

        What is compared has begun with the same warm start, so a seed is all here or all in folders; it is `whole`
        where nothing of it is left to make.
        """
        known = self.known()

        def same(run: Planned) -> bool:
            plain = replace(run, flags=record.plain(run.flags))
            if run.name not in known or known[run.name].run != plain:
                return False
            there = known[run.name].made.get("flags", {})
            _require_equal(f"{run.name} of {self.out / 'results.json'}", there, self.settings(run))
            return True

        missing = {
            (run.panel, run.seed)
            for run in runs
            if self.folder_of(run).exists() or (whole and not same(run))
        }
        return {
            run.name: known[run.name]
            for run in runs
            if (run.panel, run.seed) not in missing and same(run)
        }

    def command(self, run: Planned, origin: Path | None = None) -> list[str]:
        """What makes the run, as anybody can type it."""
        flags: list[str] = []
        hints = get_type_hints(self.make)
        for name, value in run.flags.items():
            dashed = name.replace("_", "-")
            if isinstance(value, bool) and hints.get(name, bool) is bool:
                flags.append(f"--{dashed}" if value else f"--no-{dashed}")
            else:
                words = value if isinstance(value, list | tuple) else [value]
                flags += [f"--{dashed}", *map(str, words)]
        begin = ["--from", str(origin)] if origin else []
        return ["train", str(self.config), *flags, "--out", str(self.folder_of(run)), *begin]


def finished(where: Path, begin: int, steps: int) -> bool:
    """Whether a run has made, evaluated and saved its last step.

    Its checkpoints may be gone as a whole, to save room; not those of a warm start, which others begin with.
    """
    last, checkpoints = begin + steps, where / "checkpoints"
    if not (checkpoints / str(last)).is_dir() and (not steps or checkpoints.exists()):
        return False
    return any(r["step"] == last and "eval/accuracy" in r for r in journal.read(where))


def made(grid: Grid, run: Planned) -> dict[str, Any]:
    """All flags of the run in a folder, which must be the study's, when it was begun and with which versions."""
    where = grid.folder_of(run)
    there = record.read(where)
    _require_equal(str(where), there["flags"], grid.settings(run))
    began = there["sessions"][:1]
    return {"flags": there["flags"]} | {k: s[k] for s in began for k in ("at", "versions")}


def require_same(grid: Grid, run: Planned) -> None:
    """A UserError if it was made with other flags, or by files that have changed."""
    where = grid.folder_of(run)
    if not (where / record.NAME).exists():
        return
    there = record.read(where)
    _require_equal(str(where), there["flags"], grid.settings(run))
    if changed := record.changed(where, there, grid.config):
        raise UserError(
            f"{changed[0]} has changed since {where} was made: "
            f"put it back as it was ({changed[1]}), or choose another --out"
        )


def _require_equal(which: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, value in now.items():
        if there.get(name, value) != value:
            raise UserError(
                f"{which} was made with {name} = {there[name]}, the study says {value}: choose another --out"
            )


def continued(where: Path) -> list[str]:
    """The flags that go on with what is in a run's folder; a start that came to nothing is cleared away."""
    if (where / "checkpoints").is_dir():
        return ["--resume"]
    if journal.read(where):
        raise UserError(
            f"{where} has lost its checkpoints before it was finished: move it away, and it is made anew"
        )
    shutil.rmtree(where, ignore_errors=True)
    return []


def _require_same_beginning(run: Planned, made: configs.Config, warm: configs.Config) -> None:
    """A UserError where a flag that the study does not name in `warm` changes the warm start."""
    ours, its = made.warm_start, warm.warm_start
    if ours is None or its is None:
        return
    parts = {
        "the model": (made.model, warm.model),
        "the task": (_bound(made.task), _bound(warm.task)),
        "the demonstrations": (_bound(ours.demonstration), _bound(its.demonstration)),
        "the optimizer of the warm start": (_bound(ours.optimizer), _bound(its.optimizer)),
        "its batch": ((ours.batch, _rows(ours)), (its.batch, _rows(its))),
        "its steps": (ours.steps, its.steps),
    }
    for what, (one, other) in parts.items():
        if one != other:
            raise UserError(
                f"study: {run.name} and the warm start that it would begin with have not {what} in common: "
                f"name the flag that changes it in warm, and set it for a panel or for all; {[*run.flags]} are set"
            )


def _rows(warm_start: configs.WarmStart) -> Collator:
    """What its batches hold, in however many slices they are computed."""
    return replace(warm_start.collate, microbatches=1, shards=1)


def _bound(made: Any, seen: frozenset[int] = frozenset()) -> list[Any]:
    """The plain values that are bound in a function or a collection of them, however deep."""
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


def lengths_of(grid: Grid, runs: Sequence[Planned]) -> dict[str, tuple[int, int]]:
    """Steps of both phases of every run and warm start, by building their configs: wrong flags are found now."""
    built: dict[str, configs.Config] = {}
    for run in runs:
        warm = grid.study.warm_start(run)
        for one in (run, warm):
            if one.name not in built:
                built[one.name] = configs.build(grid.make, grid.config, **one.flags)
        _require_same_beginning(run, built[run.name], built[warm.name])
    out = {
        name: (made.warm_start.steps if made.warm_start else 0, made.steps)
        for name, made in built.items()
    }
    warm = {grid.study.warm_start(run).name for run in runs if out[run.name][0]}
    if len({run.name for run in runs} | warm) < len(runs) + len(warm):
        raise UserError(
            f"{grid.title}: two variants or panels, or one and a warm start, have names that make the same folder"
        )
    return out
