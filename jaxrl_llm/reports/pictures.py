"""Figures for a report: axes without decoration, and files that are the same for the same numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm import storage


def sheet(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure and its axes, rows x columns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.ravel():
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figures: Mapping[str, Any], folder: Path) -> None:
    """NAME.png and NAME.svg of each, which a function of no argument draws."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "jaxrl", "svg.fonttype": "none", "font.size": 9}):
        for name, drawn in figures.items():
            figure = drawn()
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
                with storage.replacing(folder / f"{name}.{kind}") as file:
                    figure.savefig(file, format=kind, dpi=130, metadata=metadata)
