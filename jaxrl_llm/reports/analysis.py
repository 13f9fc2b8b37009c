"""An analysis on disk and on the screen."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.table

from jaxrl_llm import storage
from jaxrl_llm.errors import cannot_write
from jaxrl_llm.reports import analysis_figures, statistics

NAME = "analysis.json"


def write(found: Mapping[str, Any], folder: Path) -> None:
    """All numbers as JSON, and the figures."""
    try:
        storage.write(folder / NAME, json.dumps(found, indent=1, allow_nan=False) + "\n")
        analysis_figures.draw(found, folder)
    except OSError as error:
        raise cannot_write(folder, error) from error


def table(found: Mapping[str, Any]) -> rich.table.Table:
    """The key numbers."""
    sample, single = found["sample"], found["single_tokens"]
    out = rich.table.Table("", "", title=f"{found['run']}, step {found['step']}", show_header=False)
    out.add_row("responses, tokens", f"{sample['responses']}, {sample['tokens']}")
    for entry in found["updates"]["probability"]["bins"]:
        norm = entry.get("gradient_norm")
        said = "no tokens" if norm is None else f"{entry['share']:.1%}, {norm:.3g}"
        out.add_row(f"tokens, gradient norm: {entry['name']}", said)
    correlation = single["correlation"]
    out.add_row(
        "gradient of a token and 1 - p: correlation at the logits",
        _number(correlation["at_logits"]),
    )
    out.add_row("... over all parameters", _number(correlation["over_parameters"]))
    ranks = statistics.rank_correlation(single["one_minus_p"], single["over_parameters"])
    out.add_row("... over all parameters, of ranks", _number(ranks))
    checked = f"{len(single['at_logits'])} tokens at the logits: {single['outside_at_logits']}"
    if "stretch" in single:
        checked += (
            f"; {single['stretch']['tokens']} at the layers: {sum(single['outside_at_layers'])}"
        )
    out.add_row("outside the bounds of Prop. 4.2", checked)
    for by in ("optimizer", "gradient"):
        low, own = likely_moved(found, by)
        out.add_row(
            f"likely tokens moved by the {by}: on the rare, on their own",
            f"{_number(low)}, {_number(own)}",
        )
    for name, part in found["directions"]["share"]["variants"].items():
        out.add_row(f"good tokens that rise: {name}", _percent(part["rising"][-1]))
    if not found["words"]:
        out.add_row("words that tell reasoning", "none in this vocabulary")
    return out


def likely_moved(found: Mapping[str, Any], by: str) -> tuple[float | None, float | None]:
    """The mean |change of log-prob| of the likely tokens after an update on the rare ones, and on their own."""
    part = found["updates"]["probability"]
    names, tried = [entry["name"] for entry in part["bins"]], part["updates"][by]
    rare, own = (tried[n]["logp_size"][-1] if n in tried else None for n in (names[0], names[-1]))
    return rare, own


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.3g}"


def _percent(x: float | None) -> str:
    return "none" if x is None else f"{x:.1%}"
