"""Shows an analysis: a table of key numbers, and a picture for each figure of arXiv:2505.12929."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rich.table

from jaxrl_llm import storage
from jaxrl_llm.research.statistics import correlation
from jaxrl_llm.training.curves import save, sheet

Figures = Mapping[str, Any]
"""the result of `analysis.measure`, as JSON"""
NAME = "analysis.json"
GREY = "0.45"
LEGEND: Any = {"fontsize": 8, "frameon": False, "handlelength": 1, "columnspacing": 1}


def write(figures: Figures, folder: Path) -> None:
    """Writes analysis.json, and each figure as a PNG."""
    storage.write(folder / NAME, json.dumps(figures, indent=1, allow_nan=False) + "\n")
    draw(figures, folder)


def table(shown: Figures) -> rich.table.Table:
    """The key numbers, for a terminal."""
    out = rich.table.Table("", "", title=f"{shown['run']}, step {shown['step']}", show_header=False)
    for row in rows(shown):
        out.add_row(*row)
    return out


def rows(figures: Figures) -> list[tuple[str, str]]:
    """The key numbers: what each is, and its value."""
    sample, single = figures["sample"], figures["single_tokens"]
    out = [("responses, tokens", f"{sample['responses']}, {sample['tokens']}")]
    bins = figures["updates"]["probability"]["bins"]
    for entry in bins:
        norm = entry.get("gradient_norm")
        value = "no tokens" if norm is None else f"{entry['share']:.1%}, {norm:.3g}"
        out.append((f"tokens, gradient norm: {entry['name']}", value))
    known = single["correlation"]
    ranks = correlation(single["one_minus_p"], single["over_parameters"], ranks=True)
    for name, value in (
        ("gradient of a token and 1 - p: correlation at the logits", known["at_logits"]),
        ("... over all parameters", known["over_parameters"]),
        ("... over all parameters, of ranks", ranks),
    ):
        out.append((name, _number(value)))
    outside = f"{len(single['at_logits'])} tokens at the logits: {single['outside_at_logits']}"
    if "stretch" in single:
        layers = sum(single["outside_at_layers"])
        outside += f"; {single['stretch']['tokens']} at the layers: {layers}"
    out.append(("outside the bounds of Prop. 4.2", outside))
    rare, likely = bins[0]["name"], bins[-1]["name"]
    for by, tried in figures["updates"]["probability"]["updates"].items():
        moved = [
            _number(tried[on]["logp_size"][-1] if on in tried else None) for on in (rare, likely)
        ]
        out.append(
            (f"likely tokens moved by the {by}: on the rare, on their own", ", ".join(moved))
        )
    for name, part in figures["directions"]["probability"]["variants"].items():
        rising = part["rising"][-1]
        said = "none" if rising is None else f"{rising:.1%}"
        out.append((f"good tokens that rise: {name}", said))
    if not figures["words"]:
        out.append(("words that tell reasoning", "none in this vocabulary"))
    return out


def _number(x: float | None) -> str:
    return "none" if x is None else f"{x:.3g}"


def draw(figures: Figures, folder: Path) -> None:
    """Writes {bins,single_tokens,directions,sources}.png, and words.png if words were counted."""
    pictures = {
        "bins": _bins,
        "single_tokens": _single_tokens,
        "directions": _directions,
        "sources": _sources,
    }
    if figures["words"]:
        pictures["words"] = _words
    for name, picture in pictures.items():
        save(partial(picture, figures), folder / f"{name}.png")


def _bars(
    axis: Any, places: Sequence[str], figures: Figures, heights: Callable[[Any], Mapping[str, list]]
) -> None:
    """Grouped bars, one colour for each name; no bar for None.

    `heights` reads them from a record of figures; whiskers go from "least" to "most" if known.
    """
    ends = [heights(figures[end]) for end in ("least", "most") if end in figures]
    bars = heights(figures)
    width = 0.8 / len(bars)
    for n, (name, values) in enumerate(bars.items()):
        left = (n - (len(bars) - 1) / 2) * width
        known = [i for i, v in enumerate(values) if v is not None]
        x = [i + left for i in known]
        axis.bar(x, [values[i] for i in known], 0.95 * width, label=name, color=f"C{n}")
        if ends:
            low, high = ([end[name][i] for i in known] for end in ends)
            axis.vlines(x, low, high, color="0.2", linewidth=0.8)
    axis.set_xticks(range(len(places)), places, fontsize=7)


def _bins(figures: Figures) -> Any:
    """Fig. 1."""
    figure, [axes] = sheet(1, 5, (16, 3.2))
    bins = lambda of: of["updates"]["probability"]["bins"]
    names = [entry["name"] for entry in bins(figures)]
    of_bins = lambda key: lambda of: [entry.get(key) for entry in bins(of)]
    share, norm = of_bins("share"), of_bins("gradient_norm")
    signed, size = of_bins("advantage"), of_bins("advantage_size")

    def moved(by: str) -> Callable[[Any], dict]:
        tried = lambda of: of["updates"]["probability"]["updates"][by]
        label = lambda on: "all tokens" if on == "all" else on
        return lambda of: {label(on): change["logp_size"] for on, change in tried(of).items()}

    mean_change = "mean |change of log-prob|,\na step"
    panels: dict[str, Callable[[Any], dict]] = {
        "share of tokens": lambda of: {"": share(of)},
        "mean advantage": lambda of: {"signed": signed(of), "size": size(of)},
        "gradient norm of the bin": lambda of: {"": norm(of)},
        f"{mean_change} of the optimizer on": moved("optimizer"),
        f"{mean_change} along the gradient of": moved("gradient"),
    }
    for axis, (title, heights) in zip(axes, panels.items(), strict=True):
        _bars(axis, names, figures, heights)
        axis.set_title(title)
    for axis in axes[[1, 3, 4]]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, **LEGEND)
    for axis in axes[2:]:
        axis.set_yscale("log")
    axes[1].axhline(0.0, color=GREY, linewidth=0.8)
    return figure


def _single_tokens(figures: Figures) -> Any:
    """Fig. 2."""
    tokens = figures["single_tokens"]
    x, vocab, layers = tokens["one_minus_p"], tokens["vocabulary"], tokens["at_layers"]
    linears, stretch = tokens["correlation"], tokens.get("stretch")
    at = {0: "the first layer's input", len(layers) - 1: "the head's input"}
    at[len(layers) // 2] = f"the input of layer {len(layers) // 2 + 1}"
    panels = [("the logits", tokens["at_logits"], linears["at_logits"], (1.0, 1.0))]
    for i, name in sorted(at.items()):
        within = (stretch["least"][i], stretch["most"][i]) if stretch else (0.0, 0.0)
        panels.append((name, layers[i], linears["at_layers"][i], within))
    over = (tokens["over_parameters"], linears["over_parameters"])
    panels.append(("over all parameters", *over, (0.0, 0.0)))
    figure, [axes] = sheet(1, len(panels), (3.2 * len(panels), 3.4))
    ends = [min(v for v in x if v > 0), 1.0]
    for axis, (title, norms, linear, (least, most)) in zip(axes, panels, strict=True):
        axis.loglog(x, norms, "o", ms=3, alpha=0.5, markeredgewidth=0)
        for factor in (least * (vocab / (vocab - 1)) ** 0.5, most * 2**0.5):
            if factor:
                axis.plot(ends, [factor * v for v in ends], color=GREY, linewidth=1)
        ranks = correlation(x, norms, ranks=True)
        both = linear is not None and ranks is not None
        axis.set_title(
            f"{title}\ncorrelation {linear:.2f}, of ranks {ranks:.2f}" if both else title
        )
        axis.set_xlabel("1 - p")
    axes[0].set_ylabel("norm of the gradient of log p")
    bounds = "lines: the bounds of Proposition 4.2"
    axes[0].text(0.04, 0.94, bounds, transform=axes[0].transAxes, fontsize=7, color=GREY)
    return figure


def _directions(figures: Figures) -> Any:
    """Fig. 3: the share of tokens that an update moves as their advantage says."""
    figure, [axes] = sheet(1, 2, (11, 3.2))
    places = [*figures["directions"]["probability"]["bins"], "all"]
    tried = lambda of: of["directions"]["probability"]["variants"].items()
    for axis, key, title in (
        (axes[0], "rising", "advantage > 0: share that rises, of those that move"),
        (axes[1], "falling", "advantage < 0: share that falls, of those that move"),
    ):
        _bars(axis, places, figures, lambda of, key=key: {name: x[key] for name, x in tried(of)})
        axis.axhline(0.5, color=GREY, linewidth=0.8, linestyle="--")
        axis.set_ylim(0, 1)
        axis.set_title(title)
    _legend(figure, axes)
    return figure


def _sources(figures: Figures) -> Any:
    """The gradients of the groups: norm, share of the whole, agreement between prompts."""
    steps = [name for name in figures["sources"] if name != "tokens"]
    places = [name.replace(", ", ",\n") for name in steps]
    figure, [axes] = sheet(1, 3, (15, 3.6))

    def groups(of: Any, key: str, of_all: str = "") -> dict[str, list]:
        """A figure of each group in all steps, and that of all tokens if it has one."""
        parts = [of["sources"][step] for step in steps]
        names = of["sources"]["tokens"]
        bars = {group: [part["groups"][group][key] for part in parts] for group in names}
        return bars | ({"all tokens": [part[of_all] for part in parts]} if of_all else {})

    def shares(of: Any) -> dict[str, list]:
        tokens = of["sources"]["tokens"]
        return {group: [tokens[group], *share] for group, share in groups(of, "share").items()}

    _bars(axes[0], places, figures, partial(groups, key="norm", of_all="gradient_norm"))
    _bars(axes[1], ["tokens", *places], figures, shares)
    _bars(axes[2], places, figures, partial(groups, key="agreement", of_all="agreement"))
    axes[0].set_ylabel("norm of the gradient")
    axes[1].set_ylabel("share: of the tokens, and of the\ngradient (along the whole)")
    axes[2].set_ylabel("agreement: cosine of the gradients\nof every other prompt and the rest")
    _legend(figure, axes)
    return figure


def _legend(figure: Any, axes: Any) -> None:
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4, **LEGEND)


def _words(figures: Figures) -> Any:
    """Fig. 5: frequency of each category of words, and its correlation with the reward."""
    names = [entry["name"] for entry in figures["words"]]
    figure, [axes] = sheet(1, 2, (9, 1.2 + 0.4 * len(names)))
    for axis, key, label in (
        (axes[0], "a_response", "words a response"),
        (axes[1], "correlation_with_reward", "correlation with the reward"),
    ):
        axis.barh(range(len(names)), [entry[key] or 0.0 for entry in figures["words"]], 0.6)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [])
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=5)
        axis.axvline(0.0, color=GREY, linewidth=0.8)
    return figure
