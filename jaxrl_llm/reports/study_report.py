"""The results of a study in its folder: to go on with, to read, and as pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm import storage
from jaxrl_llm.errors import cannot_write
from jaxrl_llm.reports import study_figures

COLUMNS = {  # figure: its title, what it is multiplied by, digits
    "sampled": ("sampled, %", 100, 1),
    "sampled_mean": ("mean of the curve, %", 100, 1),
    "greedy": ("greedy, %", 100, 1),
    "steps_to_level": ("steps to the level", 1, 1),
    "rare_half": ("p < 0.5, %", 100, 1),
    "entropy": ("entropy, nats", 1, 3),
    "length": ("length, tokens", 1, 0),
    "kl_reference": ("KL to the start, nats", 1, 3),
}
CHANCE = 0.05  # below which a difference is in bold
READING = """\
Figures are means over seeds with their 95% interval (Student's t); Δ is the paired difference to **{baseline}**
within a seed, with its own interval; in bold what has a p-value below 5% also when corrected (Holm) for the other
variants of the table (not for its columns). Sampled: accuracy of the responses that a run learns from, in the last
three eighths of its steps; the mean of the curve is that of all steps. Greedy: held-out examples, mean of the last
three evaluations. Steps to the level: until {level:.0%} of what the same seed's **{baseline}** gains in sampled
accuracy is made; a run that never gets there counts with all its steps, and a seed whose **{baseline}** gains
nothing has no such number. The others are means over the last ten steps."""


def write(results: Mapping[str, Any], folder: Path) -> str:
    """results.json, results.md and the pictures; the text."""
    text = markdown(results)
    try:
        storage.write(folder / "results.json", json.dumps(results, indent=1, default=str) + "\n")
        storage.write(folder / "results.md", text)
        study_figures.draw(results, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return text


def markdown(results: Mapping[str, Any]) -> str:
    """Question, tables, how to read them, how to repeat them."""
    study = results["study"]
    reading = READING.format(baseline=study["baseline"], level=study["level"])
    parts = [f"# {results['title']}", results["text"], results["state"]]
    entries = {(e["panel"], e["variant"], e["figure"]): e for e in results["summary"]}
    for panel in study["panels"]:
        figures = [
            name for name in COLUMNS if any((panel, v, name) in entries for v in study["variants"])
        ]
        if not figures:
            continue
        parts += [f"## {panel}"] if panel else []
        parts.append(_table(entries, panel, [*study["variants"]], {f: COLUMNS[f] for f in figures}))
        groups = sorted({f for p, _, f in entries if p == panel and f.startswith("greedy/")})
        if groups:
            columns = {g: (f"greedy of {g.partition('/')[2]}, %", 100, 1) for g in groups}
            parts.append(_table(entries, panel, [*study["variants"]], columns))
    parts += [reading, "![curves](curves.png)", "![differences](differences.png)"]
    if results["runs"]:
        parts.append(
            f"To repeat one of the {len(results['runs'])} runs by hand, after its warm start:"
        )
        parts.append("\n".join(f"    {command}" for command in results["commands"]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(
    entries: Mapping[Any, Any], panel: str, variants: list[str], columns: Mapping[str, Any]
) -> str:
    titles = [t for title, _, _ in columns.values() for t in (title, "Δ")]
    lines = ["| variant | seeds | " + " | ".join(titles) + " |", "|---" * (2 + len(titles)) + "|"]
    for variant in variants:
        found = [entries.get((panel, variant, name)) for name in columns]
        seeds = max((e["n"] for e in found if e), default=0)
        cells = []
        for entry, (_, scale, digits) in zip(found, columns.values(), strict=True):
            cells.append(_cell(entry, scale, digits, "", seeds))
            cells.append(_cell(entry and entry["difference"], scale, digits, "+", seeds))
        lines.append(f"| {variant} | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(
    estimate: Mapping[str, Any] | None, scale: float, digits: int, sign: str, seeds: int
) -> str:
    """A mean and its interval; the number of seeds where it is not that of the row."""
    if estimate is None:
        return ""
    mean = f"{scale * estimate['mean']:{sign}.{digits}f}"
    fewer = f" [{estimate['n']} seeds]" if estimate["n"] < seeds else ""
    if estimate["low"] is None:
        return mean + fewer
    low, high = (f"{scale * estimate[side]:{sign}.{digits}f}" for side in ("low", "high"))
    if (holm := estimate.get("holm")) is not None and holm < CHANCE:
        mean = f"**{mean}**"
    return f"{mean} ({low} to {high}){fewer}"
