"""The curves of one or several runs as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import journal
from jaxrl_llm.training.journal import REINFORCE, WARM_START

PICTURE = "curves.png"


def curves(folders: Sequence[Path], target: Path) -> None:
    """Validation accuracy with its 95% band, and what moved during reinforcement, one colour a run."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = {
        name: journal.read(folder) for name, folder in zip(_names(folders), folders, strict=True)
    }
    empty = [
        name for name, found in records.items() if not any("eval/accuracy" in r for r in found)
    ]
    if empty:
        raise UserError(f"{empty[0]} has no evaluation to draw yet: is it the folder of a run?")
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    small = (("reward", "mean reward"), ("length", "tokens a response"),
             ("entropy", "entropy, nats a token"), ("rare_half", "share of tokens with p < 0.5"))  # fmt: skip
    rows: Any = [["accuracy"] * len(small), [key for key, _ in small]]
    axes = figure.subplot_mosaic(rows, height_ratios=(3, 2))
    accuracy = axes["accuracy"]
    for number, (name, found) in enumerate(records.items()):
        colour = mpl.color_sequences["tab10"][number % 10]
        _accuracy(accuracy, found, name, colour)
        for key, title in small:
            points = [(r["step"], r[key]) for r in found if r["phase"] == REINFORCE and key in r]
            axes[key].plot(*_columns(points), color=colour, linewidth=1)
            axes[key].set_title(title, fontsize=9)
    accuracy.set_ylabel("validation accuracy, greedy")
    accuracy.set_xlabel("step (supervised, then reinforcement from the dotted line on)")
    accuracy.legend(loc="lower right")
    for panel in axes.values():
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    try:
        with storage.replacing(target) as file:
            figure.savefig(file, dpi=130, format=target.suffix[1:] or "png")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write {target}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    paths = [Path(storage.spoken(folder.absolute())).parts for folder in folders]
    length = 1
    while len({path[-length:] for path in paths}) < len(set(paths)):
        length += 1
    return ["/".join(path[-length:]) for path in paths]


def _accuracy(axes: Any, records: list[dict[str, Any]], name: str, colour: Any) -> None:
    found = [r for r in records if "eval/accuracy" in r]
    steps = [r["step"] for r in found]
    low, high = ([r[f"eval/accuracy_{side}"] for r in found] for side in ("low", "high"))
    axes.plot(
        steps, [r["eval/accuracy"] for r in found], marker="o", ms=3, color=colour, label=name
    )
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    begin = min((r["step"] for r in found if r["phase"] == REINFORCE), default=None)
    if begin is not None and any(r["phase"] == WARM_START for r in records):
        axes.axvline(begin, color=colour, linestyle=":")


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
