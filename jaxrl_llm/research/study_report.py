"""The report of a study: tables in Markdown, mean curves, and differences to the baseline."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm import storage
from jaxrl_llm.research.statistics import FEW, detectable, estimate, finite
from jaxrl_llm.training.curves import COLOURS, label, save, sheet

Results = Mapping[str, Any]
"""the result of `study.results`, as JSON"""
COLUMNS = {  # figure: title, factor, digits
    "sampled": ("sampled, %", 100, 1),
    "sampled_mean": ("mean of the curve, %", 100, 1),
    "greedy": ("greedy, %", 100, 1),
    "test": ("test, %", 100, 1),
    "steps_to_level": ("steps to the level", 1, 1),
    "rare_half": ("p < 0.5, %", 100, 1),
    "entropy": ("entropy, nats", 1, 3),
    "length": ("length, tokens", 1, 0),
    "kl_reference": ("KL to the start, nats", 1, 3),
}
SIGNIFICANT = 0.05  # p-values below it are in bold
READING = """\
Figures are means over seeds with their 95% interval (Student's t); Δ is the paired difference to **{baseline}**
within a seed, with its own interval; in bold what has a p-value below 5% also when corrected (Holm) for the other
variants of the table (not for its columns). Sampled: accuracy of the responses that a run learns from, in the last
three eighths of its steps; the mean of the curve is that of all steps. Greedy: held-out examples, mean of the last
three evaluations. Test, where there is one: the test set, by the best checkpoint. Steps to the level: until
{level:.0%} of what the same seed's **{baseline}** gains in sampled accuracy is made; a run that never gets there
counts with all its steps, and a seed whose **{baseline}** gains nothing has no such number. The others are means
over the last ten steps."""
POWER = """\
By the spread of its seeds, four of five such studies would show (p below 5%, for itself) a difference in the mean
of the curve of so many points: {}."""
NAME, PICTURES = "results.json", ("curves.png", "differences.png")
CURVES = {"sampled": "sampled accuracy, %", "greedy": "held-out accuracy, greedy, %"}
DIFFERENCES = {
    "sampled": "sampled\nat the end",
    "sampled_mean": "mean of\nthe curve",
    "greedy": "greedy\nat the end",
}


def write(results: Results, folder: Path) -> str:
    """results.json, results.md, curves.png and differences.png; returns the text of results.md."""
    text = markdown(results)
    numbers = json.dumps(finite(results), indent=1, default=str, allow_nan=False)
    storage.write(folder / NAME, numbers + "\n")
    storage.write(folder / "results.md", text)
    for name, picture in zip(PICTURES, (_curves, _differences), strict=True):
        save(partial(picture, results), folder / name)
    return text


def markdown(results: Results) -> str:
    """results.md: the question, tables, how to read them, commands to repeat runs."""
    parts = [f"# {results['title']}", results["text"], results["state"]]
    for panel, titles, rows in tables(results):
        parts += [f"## {panel}"] if panel else []
        lines = [titles, ["---"] * len(titles), *rows]
        cells = ([cell.replace("|", r"\|") for cell in line] for line in lines)
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in cells))
        parts.append(_power(results, panel))
    parts.append(reading(results))
    parts += [f"![{name[:-4]}]({name})" for name in PICTURES]
    after = ", after its warm start" if " --from " in results["commands"][-1] else ""
    parts.append(f"To repeat one of the {len(results['runs'])} runs by hand{after}:")
    parts.append("\n".join(f"    {command}" for command in results["commands"]))
    return "\n\n".join(filter(None, parts)) + "\n"


def reading(results: Results) -> str:
    """How to read the tables."""
    study = results["study"]
    return READING.format(baseline=study["baseline"], level=study["level"])


def tables(results: Results) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Each panel with the titles and rows of its table; what is `**significant**` is marked so."""
    study, entries = results["study"], _entries(results)
    for panel in _panels(results):
        columns = [n for n in COLUMNS if any((panel, v, n) in entries for v in study["variants"])]
        titles, rows = [title for name in columns for title in (COLUMNS[name][0], "Δ")], []
        for variant in study["variants"]:
            found = {name: entries.get((panel, variant, name)) for name in columns}
            seeds = max((entry["n"] for entry in found.values() if entry), default=0)
            cells = [variant, str(seeds)]
            for name, entry in found.items():
                _, scale, digits = COLUMNS[name]
                cells.append(_cell(entry, scale, f".{digits}f", seeds))
                cells.append(_cell(entry and entry["difference"], scale, f"+.{digits}f", seeds))
            rows.append(cells)
        yield panel, ["variant", "seeds", *titles], rows


def _power(results: Results, panel: str) -> str:
    """The differences in the mean of the curve that so many seeds would have shown; empty of few."""
    entries, least = _entries(results), list[str]()
    for variant in results["study"]["variants"]:
        apart = entries.get((panel, variant, "sampled_mean"), {}).get("difference")
        if apart and apart["n"] >= FEW and (shown := detectable(apart["seeds"])):
            least.append(f"{variant} {100 * shown:.1f}")
    return POWER.format(", ".join(least)) if least else ""


def _cell(estimate: Mapping[str, Any] | None, scale: float, form: str, seeds: int) -> str:
    """A mean and its interval; the number of seeds if it is less than that of the row."""
    if estimate is None:
        return ""
    mean = f"{scale * estimate['mean']:{form}}"
    fewer = f" [{estimate['n']} seeds]" if estimate["n"] < seeds else ""
    if estimate["low"] is None:
        return mean + fewer
    low, high = (f"{scale * estimate[side]:{form}}" for side in ("low", "high"))
    if (holm := estimate.get("holm")) is not None and holm < SIGNIFICANT:
        mean = f"**{mean}**"
    return f"{mean} ({low} to {high}){fewer}"


def _curves(results: Results) -> Any:
    """Columns are panels, rows kinds of accuracy; the band is the interval of the baseline."""
    panels, baseline = _panels(results), results["study"]["baseline"]
    figure, axes = sheet(len(CURVES), len(panels), (max(6.0, 1.5 + 3.4 * len(panels)), 6))
    lines: dict[str, Any] = {}
    for row, (kind, title) in zip(axes, CURVES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            axis.sharey(row[0])
            for number, variant in enumerate(results["study"]["variants"]):
                runs = [
                    r for r in results["runs"] if (r["panel"], r["variant"]) == (panel, variant)
                ]
                if runs:
                    colour, mine = COLOURS[number % len(COLOURS)], [r["curves"][kind] for r in runs]
                    banded = variant == baseline and len(mine) >= FEW
                    lines[variant] = _mean_curve(axis, mine, colour, banded=banded)
            axis.set_title(label(panel) if kind == "sampled" else "")
        row[0].set_ylabel(title)
    figure.supxlabel(
        f"step of reinforcement (means over seeds; 95% interval of {label(baseline)})", fontsize=9
    )
    where: Any = {"loc": "outside upper center", "ncols": 4, "fontsize": 8, "frameon": False}
    figure.legend(lines.values(), [*map(label, lines)], **where)
    return figure


def _mean_curve(axis: Any, curves: list[Any], colour: str, *, banded: bool) -> Any:
    """The line of the mean over seeds, with its interval if `banded`."""
    heights: dict[float, list[float]] = {}
    for step, height in (point for curve in curves for point in curve):
        if height is not None:  # of results that are read again
            heights.setdefault(step, []).append(100 * height)
    steps = sorted(heights)
    means = [estimate(heights[step]) for step in steps]
    [line] = axis.plot(steps, [m.mean for m in means], marker="o", ms=3, color=colour)
    if banded and all(m.low is not None for m in means):
        low, high = ([getattr(m, side) for m in means] for side in ("low", "high"))
        axis.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    return line


def _differences(results: Results) -> Any:
    """Paired differences of each variant to the baseline: mean, 95% interval, and every seed."""
    panels, baseline = _panels(results), results["study"]["baseline"]
    present = {run["variant"] for run in results["runs"]} - {baseline}
    variants = [name for name in results["study"]["variants"] if name in present][::-1]
    labels = [*map(label, variants)]
    height = 0.8 + len(DIFFERENCES) * (0.6 + 0.22 * len(variants))
    size = (max(6.0, 1.9 + 2.6 * len(panels)), height)
    figure, axes = sheet(len(DIFFERENCES), len(panels), size)
    entries = _entries(results)
    for row, (name, title) in zip(axes, DIFFERENCES.items(), strict=True):
        for axis, panel in zip(row, panels, strict=True):
            axis.sharex(row[0])
            axis.axvline(0.0, color="grey", linewidth=1)
            for y, variant in enumerate(variants):
                apart = entries.get((panel, variant, name), {}).get("difference")
                if apart is None:
                    continue
                seeds = [100 * one for one in apart["seeds"]]
                axis.plot(seeds, [y] * len(seeds), "|", color=COLOURS[0], ms=7, alpha=0.6)
                axis.plot(100 * apart["mean"], y, "o", color=COLOURS[0], ms=5)
                if apart["n"] >= FEW:
                    axis.hlines(y, 100 * apart["low"], 100 * apart["high"], color=COLOURS[0])
            axis.set_yticks(range(len(variants)), labels if panel == panels[0] else [])
            axis.set_ylim(-0.5, max(1, len(variants)) - 0.5)
        row[0].set_ylabel(title)
    for axis, panel in zip(axes[0], panels, strict=True):
        axis.set_title(label(panel))
    figure.supxlabel(
        f"points apart from {label(baseline)}, paired by seed: each seed (|),\n"
        f"the mean, its 95% interval from {FEW} seeds on",
        fontsize=9,
    )
    return figure


def _entries(results: Results) -> dict[tuple[str, str, str], Any]:
    """The entries of the summary, by panel, variant and figure."""
    return {(e["panel"], e["variant"], e["figure"]): e for e in results["summary"]}


def _panels(results: Results) -> list[str]:
    """The panels that have finished runs, in the study's order."""
    made = {run["panel"] for run in results["runs"]}
    return [panel for panel in results["study"]["panels"] if panel in made]
