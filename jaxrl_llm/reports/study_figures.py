"""The results of a study as pictures: mean curves, and differences to the baseline."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.reports import pictures
from jaxrl_llm.reports.pictures import sheet
from jaxrl_llm.reports.statistics import FEW, differences, estimate

_CURVES = {"sampled": "sampled accuracy, %", "greedy": "held-out accuracy, greedy, %"}
_DIFFERENCES = {
    "sampled": "sampled\nat the end",
    "sampled_mean": "mean of\nthe curve",
    "greedy": "greedy\nat the end",
}


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """curves and differences, each as .png and .svg."""
    figures = {"curves": _curves, "differences": _differences}
    pictures.save({name: partial(one, results) for name, one in figures.items()}, folder)


def _curves(results: Mapping[str, Any]) -> Any:
    """A column a panel, a row a kind of accuracy."""
    panels, variants = _panels(results), results["study"]["variants"]
    figure, axes = sheet(len(_CURVES), len(panels), (max(6.0, 1.5 + 3.4 * len(panels)), 6))
    for row, (kind, title) in zip(axes, _CURVES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            axis.sharey(row[0])
            for number, variant in enumerate(variants):
                mine = [r["curves"][kind] for r in _runs(results, panel, variant)]
                banded = variant == results["study"]["baseline"] and len(mine) >= FEW
                if mine:
                    _curve(axis, mine, f"C{number % 10}", variant, banded=banded)
            axis.set_title(panel if kind == "sampled" else "")
        row[0].set_ylabel(title)
    baseline = results["study"]["baseline"]
    figure.supxlabel(
        f"step of reinforcement (means over seeds; 95% interval of {baseline})", fontsize=9
    )
    handles = (axis.get_legend_handles_labels() for axis in axes[0])
    labels = {label: line for both in handles for line, label in zip(*both, strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=4, fontsize=8,
                  frameon=False)  # fmt: skip
    return figure


def _curve(axis: Any, curves: list[Any], colour: str, label: str, *, banded: bool) -> None:
    """The mean over seeds, with its interval if that is asked for."""
    heights: dict[float, list[float]] = {}
    for curve in curves:
        for step, height in curve:
            heights.setdefault(step, []).append(100 * height)
    means = [(step, estimate(values)) for step, values in sorted(heights.items())]
    steps = [step for step, _ in means]
    axis.plot(steps, [m.mean for _, m in means], marker="o", ms=3, color=colour, label=label)
    if banded and all(m.low is not None for _, m in means):
        low, high = ([getattr(m, side) for _, m in means] for side in ("low", "high"))
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _differences(results: Mapping[str, Any]) -> Any:
    """The paired difference of each variant to the baseline: the mean, its 95% interval, and every seed."""
    panels, baseline = _panels(results), results["study"]["baseline"]
    present = {run["variant"] for run in results["runs"]} - {baseline}
    variants = [name for name in results["study"]["variants"] if name in present][::-1]
    size = (
        max(6.0, 1.9 + 2.6 * len(panels)),
        0.8 + len(_DIFFERENCES) * (0.6 + 0.22 * len(variants)),
    )
    figure, axes = sheet(len(_DIFFERENCES), len(panels), size)
    entries = {(e["panel"], e["variant"], e["figure"]): e["difference"] for e in results["summary"]}
    for row, (name, title) in zip(axes, _DIFFERENCES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            axis.sharex(row[0])
            axis.axvline(0.0, color="grey", linewidth=1)
            base = {r["seed"]: r["figures"][name] for r in _runs(results, panel, baseline)}
            for place, variant in enumerate(variants):
                apart = entries.get((panel, variant, name))
                if apart is None:
                    continue
                mine = {r["seed"]: r["figures"][name] for r in _runs(results, panel, variant)}
                seeds = [100 * one for one in differences(mine, base)]
                axis.plot(seeds, [place] * len(seeds), "|", color="C0", ms=7, alpha=0.6)
                axis.plot(100 * apart["mean"], place, "o", color="C0", ms=5)
                if apart["n"] >= FEW:
                    axis.hlines(place, 100 * apart["low"], 100 * apart["high"], color="C0")
            axis.set_yticks(range(len(variants)), variants if panel == panels[0] else [])
            axis.set_ylim(-0.5, max(1, len(variants)) - 0.5)
        row[0].set_ylabel(title)
    for axis, panel in zip(axes[0], panels, strict=True):
        axis.set_title(panel)
    figure.supxlabel(
        f"points apart from {baseline}, paired by seed: each seed (|),\n"
        f"the mean, its 95% interval from {FEW} seeds on",
        fontsize=9,
    )
    return figure


def _panels(results: Mapping[str, Any]) -> list[str]:
    """Those with runs."""
    made = {run["panel"] for run in results["runs"]}
    return [panel for panel in results["study"]["panels"] if panel in made]


def _runs(results: Mapping[str, Any], panel: str, variant: str) -> list[Mapping[str, Any]]:
    return [r for r in results["runs"] if (r["panel"], r["variant"]) == (panel, variant)]
