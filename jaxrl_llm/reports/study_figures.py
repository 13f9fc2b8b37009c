"""The results of a study as pictures: mean curves, and differences to the baseline."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.reports import pictures
from jaxrl_llm.reports.pictures import sheet
from jaxrl_llm.reports.statistics import estimate

FEW = 4  # seeds below which an interval says less than the seeds themselves
_CURVES = {"sampled": "sampled accuracy, %", "greedy": "held-out accuracy, greedy, %"}
_DIFFERENCES = {
    "sampled": "sampled at the end, points",
    "sampled_mean": "mean of the curve, points",
    "greedy": "greedy at the end, points",
}


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """curves and differences, each as .png and .svg."""
    figures = {"curves": _curves, "differences": _differences}
    pictures.save({name: partial(one, results) for name, one in figures.items()}, folder)


def _curves(results: Mapping[str, Any]) -> Any:
    """A column a panel, a row a kind of accuracy."""
    panels = [*results["study"]["panels"]]
    figure, axes = sheet(len(_CURVES), len(panels), (1.5 + 4.2 * len(panels), 7))
    for row, (kind, title) in zip(axes, _CURVES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            for number, variant in enumerate(results["study"]["variants"]):
                mine = [
                    r for r in results["runs"] if (r["panel"], r["variant"]) == (panel, variant)
                ]
                _curve(axis, [run["curves"][kind] for run in mine], f"C{number % 10}", variant)
            axis.set_title(panel if kind == "sampled" else "")
        row[0].set_ylabel(title)
    for axis in axes[-1]:
        axis.set_xlabel("step of reinforcement")
    of_one = axes[0][0].get_legend_handles_labels()
    figure.legend(*of_one, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def _curve(axis: Any, curves: list[Any], colour: str, label: str) -> None:
    """The mean over seeds, with its interval, or with the seeds if they are few."""
    heights: dict[float, list[float]] = {}
    for curve in curves:
        for step, height in curve:
            heights.setdefault(step, []).append(100 * height)
    means = [(step, estimate(values)) for step, values in sorted(heights.items())]
    steps = [step for step, _ in means]
    axis.plot(steps, [m.mean for _, m in means], marker="o", ms=3, color=colour, label=label)
    if len(curves) >= FEW and all(m.low is not None for _, m in means):
        low, high = ([getattr(m, side) for _, m in means] for side in ("low", "high"))
        axis.fill_between(steps, low, high, color=colour, alpha=0.1, linewidth=0)
    for curve in curves if 1 < len(curves) < FEW else ():
        seed = [(step, 100 * height) for step, height in curve]
        axis.plot(*zip(*seed, strict=True), color=colour, linewidth=0.6, alpha=0.5)


def _differences(results: Mapping[str, Any]) -> Any:
    """The paired differences of each variant to the baseline, with 95% intervals."""
    study = results["study"]
    panels = [*study["panels"]]
    variants = [name for name in study["variants"] if name != study["baseline"]][::-1]
    size = (1.5 + 3.2 * len(panels), 0.4 + len(_DIFFERENCES) * (0.8 + 0.22 * len(variants)))
    figure, axes = sheet(len(_DIFFERENCES), len(panels), size)
    entries = {(e["panel"], e["variant"], e["figure"]): e["difference"] for e in results["summary"]}
    for row, (name, title) in zip(axes, _DIFFERENCES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            axis.sharex(row[0])
            axis.axvline(0.0, color="grey", linewidth=1)
            for place, variant in enumerate(variants):
                apart = entries.get((panel, variant, name))
                if apart is None:
                    continue
                axis.plot(100 * apart["mean"], place, "o", color="C0", ms=4)
                if apart["low"] is not None:
                    axis.hlines(place, 100 * apart["low"], 100 * apart["high"], color="C0")
            axis.set_yticks(range(len(variants)), variants if panel == panels[0] else [])
            axis.set_ylim(-0.5, len(variants) - 0.5)
            axis.set_title(f"{panel}\n{title}".strip())
    figure.supxlabel(f"difference to {study['baseline']}, paired by seed (95% interval)")
    return figure
