"""Learning curves of runs as a picture; how all pictures of the package are styled and written."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import journal
from jaxrl_llm.training.journal import REINFORCE, WARM_START

PICTURE = "curves.png"
TOGETHER = 5  # steps of which sampled accuracy is a mean: one step's has few prompts
COLOURS = [f"C{number}" for number in range(10)]
MEASURED = {  # what is drawn large: the first that is not 0 throughout
    "eval/accuracy": "accuracy: validation, greedy (dots)\nand sampled in training (dashed)",
    "eval/score": "mean reward in validation, greedy",
    journal.LOSS: "validation loss",
}
SMALL = {
    "reward": "mean reward",
    "length": "tokens a response",
    "entropy": "entropy, nats a token",
    "rare_half": "share of tokens with p < 0.5",
}


def draw(folders: Sequence[Path], target: Path) -> None:
    """Draws validation accuracy with its 95% band (or reward, or loss) and what each run sampled as it learned.

    The suffix of `target` gives the format, PNG without one. Raises a UserError if a run has no
    evaluation yet, or the target cannot be written.
    """
    records = {}
    for name, folder in zip(names(folders), folders, strict=True):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        records[name] = journal.read(folder)
        if not any(journal.LOSS in r or "eval/accuracy" in r for r in records[name]):
            raise UserError(f"{folder} has no evaluation to draw yet: is it the folder of a run?")
    try:
        save(partial(_runs, records), target)
    except (OSError, ValueError) as error:  # ValueError: an unknown format
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(f"cannot write {target}: {reason}") from error


def series(records: Sequence[journal.Record], name: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of a metric of reinforcement where it is finite: a curve, or one a stage."""
    stage = re.compile(f"{name}/stage[0-9]+")
    curves: dict[str, list[tuple[int, float]]] = {}
    for r in records:
        if r["phase"] != REINFORCE:
            continue
        for key, value in r.items():
            # a reward's fields may be called like stages
            mine = key == name or (name != "reward" and stage.fullmatch(key))
            if mine and math.isfinite(value):
                curves.setdefault(key, []).append((r["step"], value))
    return curves


def sheet(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of `size` inches and its axes `[rows, columns]`, without decoration."""
    figure = _figure(size)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        _plain(axis)
    return figure, axes


def save(drawn: Callable[[], Any], target: Path) -> None:
    """Writes the figure `drawn()` atomically; the same numbers give the same bytes."""
    import matplotlib as mpl

    style: Any = {"font.size": 9, "svg.hashsalt": ""}  # else names in an SVG are random
    with mpl.rc_context(style), storage.replacing(target) as file:
        figure = drawn()
        kind = target.suffix[1:] or "png"
        varies = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
        metadata: Any = {varies[kind]: None} if kind in varies else None
        figure.savefig(file, dpi=130, format=kind, metadata=metadata)


def _runs(records: Mapping[str, list[dict[str, Any]]]) -> Any:
    figure = _figure((11, 6.4))
    rows: Any = [["accuracy"] * len(SMALL), [*SMALL]]
    axes = figure.subplot_mosaic(rows, height_ratios=(3, 2))
    # rows that are imitated may have no rewards
    some = [*chain(*records.values())]
    measured = next((name for name in MEASURED if any(r.get(name) for r in some)), "eval/accuracy")
    for number, (name, found) in enumerate(records.items()):
        colour = COLOURS[number % len(COLOURS)]
        _accuracy(axes["accuracy"], found, name, colour, measured)
        for key in SMALL:
            for points in series(found, key).values():
                axes[key].plot(*zip(*points, strict=True), color=colour, lw=1)
    for key, title in SMALL.items():
        axes[key].set_title(title, fontsize=9)
    axes["accuracy"].set_ylabel(MEASURED[measured])
    axes["accuracy"].set_xlabel("step (supervised, then reinforcement from the dotted line on)")
    axes["accuracy"].legend(loc="lower right")
    for panel in axes.values():
        _plain(panel)
    return figure


def _figure(size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def label(name: str) -> str:
    """A name as a picture shows it: a legend leaves out what begins with _, $ begins mathematics."""
    return (" " * name.startswith("_") + name).replace("$", r"\$")


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest path endings that tell the runs apart."""
    paths = [Path(storage.as_url(folder.absolute())).parts for folder in folders]
    length = 1
    while len({path[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def _accuracy(
    axis: Any, records: list[dict[str, Any]], name: str, colour: str, measured: str
) -> None:
    scored = journal.evaluations(records, measured)
    steps = [r["step"] for r in scored]
    low, high = (
        [r.get(f"{measured}_{side}", math.nan) for r in scored] for side in ("low", "high")
    )
    heights = [r[measured] for r in scored]
    axis.plot(steps, heights, "o-", ms=3, color=colour, label=label(name))
    axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    sampled = series(records, "accuracy").get("accuracy", [])
    if sampled and measured == "eval/accuracy":
        pieces = [sampled[i : i + TOGETHER] for i in range(0, len(sampled), TOGETHER)]
        means = [tuple(map(fmean, zip(*piece, strict=True))) for piece in pieces]
        axis.plot(*zip(*means, strict=True), "--", color=colour, lw=1.2)
    begin = min((r["step"] for r in scored if r["phase"] == REINFORCE), default=None)
    if begin is not None and any(r["phase"] == WARM_START for r in records):
        axis.axvline(begin, color=colour, linestyle=":")
