"""An analysis as pictures: one each for the figures of arXiv:2505.12929, and whose gradient it is."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.reports import pictures, statistics
from jaxrl_llm.reports.pictures import sheet

GREY = "0.45"
PLAIN: dict[str, Any] = {
    "fontsize": 8,
    "frameon": False,
    "handlelength": 1,
    "columnspacing": 1,
}  # legends, beside what they explain


def draw(found: Mapping[str, Any], folder: Path) -> None:
    """Each figure as .png and .svg."""
    figures = {
        "bins": _bins,
        "single_tokens": _single_tokens,
        "directions": _directions,
        "sources": _sources,
    }
    if found["words"]:
        figures["words"] = _words
    pictures.save({name: partial(one, found) for name, one in figures.items()}, folder)


def _side_by_side(
    axis: Any, places: list[str], found: Mapping[str, Any], heights: Callable[[Any], dict]
) -> None:
    """Bars in groups, a colour a name, from what was `found`; a gap where there is no number.

    Whiskers go from the least to the most of several batches.
    """
    ends = [heights(found[end]) for end in ("least", "most") if end in found]
    bars = heights(found)
    width = 0.8 / len(bars)
    for n, (name, values) in enumerate(bars.items()):
        left = (n - (len(bars) - 1) / 2) * width
        known = [i for i, v in enumerate(values) if v is not None]
        x, y = [i + left for i in known], [values[i] for i in known]
        axis.bar(x, y, 0.95 * width, label=name, color=f"C{n}")
        if ends:
            low, high = ([end[name][i] for i in known] for end in ends)
            axis.vlines(x, low, high, color="0.2", linewidth=0.8)
    axis.set_xticks(range(len(places)), places, fontsize=7)


def _bins(found: Mapping[str, Any]) -> Any:
    """Fig. 1: a row for bins by probability and one for quarters of the tokens."""
    figure, axes = sheet(2, 5, (16, 5.6))
    moved = "mean |change of log-prob|"
    titles = ("share of tokens", "mean advantage", "gradient norm of the bin",
              f"{moved},\na step of the optimizer on", f"{moved},\na step along the gradient of")  # fmt: skip
    for row, kind in zip(axes, ("probability", "share"), strict=True):
        names = [b["name"] for b in found["updates"][kind]["bins"]]
        places = [name.replace(" quarter", "\nquarter") for name in names]

        def get(keys: Mapping[str, str], kind: str = kind) -> Callable[[Any], dict]:
            bins = lambda of: of["updates"][kind]["bins"]
            return lambda of: {name: [b.get(k) for b in bins(of)] for name, k in keys.items()}

        def after(by: str, kind: str = kind, names: list[str] = names) -> Callable[[Any], dict]:
            on = {"all": "all tokens"} | {name: name for name in names}
            tried = lambda of: of["updates"][kind]["updates"][by]
            return lambda of: {
                n: tried(of)[k]["logp_size"] for k, n in on.items() if k in tried(of)
            }

        _side_by_side(row[0], places, found, get({"": "share"}))
        _side_by_side(row[1], places, found, get({"signed": "advantage", "size": "advantage_size"}))
        _side_by_side(row[2], places, found, get({"": "gradient_norm"}))
        _side_by_side(row[3], places, found, after("optimizer"))
        _side_by_side(row[4], places, found, after("gradient"))
        for axis in (row[1], row[3], row[4]):
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, **PLAIN)
        row[1].axhline(0.0, color=GREY, linewidth=0.8)
    for axis in axes[:, 2:].ravel():
        axis.set_yscale("log")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    figure.supylabel("quarters of the tokens            bins of probability", fontsize=9)
    return figure


def _single_tokens(found: Mapping[str, Any]) -> Any:
    """Fig. 2: the gradient of single tokens against 1 - p."""
    tokens = found["single_tokens"]
    x, vocab, layers = tokens["one_minus_p"], tokens["vocabulary"], tokens["at_layers"]
    correlation = tokens["correlation"]
    middle = len(layers) // 2
    panels: list[Any] = [("at the logits", tokens["at_logits"], correlation["at_logits"], None)]
    for i, name in ((0, "the first layer's input"), (middle, f"the input of layer {middle + 1}"),
                    (len(layers) - 1, "the head's input")):  # fmt: skip
        panels.append((f"at {name}", layers[i], correlation["at_layers"][i], i))
    over = (tokens["over_parameters"], correlation["over_parameters"])
    panels.append(("over all parameters", *over, None))
    figure, axes = sheet(1, len(panels), (3.2 * len(panels), 3.4))
    ends = [min(v for v in x if v > 0), 1.0]
    for n, (axis, (title, norms, r, layer)) in enumerate(zip(axes[0], panels, strict=True)):
        axis.loglog(x, norms, "o", ms=3, alpha=0.5, markeredgewidth=0)
        stretch = tokens.get("stretch")
        least, most = (1.0, 1.0) if n == 0 else (0.0, 0.0)
        if layer is not None and stretch:
            least, most = stretch["least"][layer], stretch["most"][layer]
        for factor in (least * (vocab / (vocab - 1)) ** 0.5, most * 2**0.5):
            if factor:
                axis.plot(ends, [factor * v for v in ends], color=GREY, linewidth=1)
        ranks = statistics.rank_correlation(x, norms)
        said = "" if r is None or ranks is None else f"\ncorrelation {r:.2f}, of ranks {ranks:.2f}"
        axis.set_title(title + said)
        axis.set_xlabel("1 - p")
    axes[0][0].set_ylabel("norm of the gradient of log p")
    bounds = "lines: the bounds of Proposition 4.2"
    axes[0][0].text(0.04, 0.94, bounds, transform=axes[0][0].transAxes, fontsize=7, color=GREY)
    return figure


def _directions(found: Mapping[str, Any]) -> Any:
    """Fig. 3: the share of tokens that an update moves as their advantage says."""
    figure, axes = sheet(2, 2, (11, 6))
    titles = {
        "rising": "advantage > 0: share that rises, of those that move",
        "falling": "advantage < 0: share that falls, of those that move",
    }
    for row, kind in zip(axes, ("probability", "share"), strict=True):
        places = [*found["directions"][kind]["bins"], "all"]
        for axis, (key, title) in zip(row, titles.items(), strict=True):

            def heights(of: Any, kind: str = kind, key: str = key) -> dict:
                variants = of["directions"][kind]["variants"]
                return {name: values[key] for name, values in variants.items()}

            _side_by_side(axis, places, found, heights)
            axis.axhline(0.5, color=GREY, linewidth=0.8, linestyle="--")
            axis.set_ylim(0, 1)
            axis.set_title(title)
    of_one = axes[0][0].get_legend_handles_labels()
    figure.legend(*of_one, loc="outside upper center", ncols=4, **PLAIN)
    return figure


def _sources(found: Mapping[str, Any]) -> Any:
    """The groups' gradients: how long, how far along the whole, and how much alike from prompt to prompt."""
    steps = [name for name in found["sources"] if name != "tokens"]
    places = [name.replace(", ", ",\n") for name in steps]
    figure, axes = sheet(1, 3, (15, 3.6))

    def groups(key: str) -> Callable[[Any], dict]:
        return lambda of: {
            group: [of["sources"][step]["groups"][group][key] for step in steps]
            for group in of["sources"]["tokens"]
        }

    def shares(of: Any) -> dict:
        tokens = of["sources"]["tokens"]
        return {group: [tokens[group], *share] for group, share in groups("share")(of).items()}

    def with_all(key: str, of_all: str) -> Callable[[Any], dict]:
        every = lambda of: {"all tokens": [of["sources"][step][of_all] for step in steps]}
        return lambda of: groups(key)(of) | every(of)

    _side_by_side(axes[0][0], places, found, with_all("norm", "gradient_norm"))
    axes[0][0].set_ylabel("norm of the gradient")
    _side_by_side(axes[0][1], ["tokens", *places], found, shares)
    axes[0][1].set_ylabel("share: of the tokens, and of the\ngradient (along the whole)")
    _side_by_side(axes[0][2], places, found, with_all("agreement", "agreement"))
    axes[0][2].set_ylabel("agreement: cosine of the gradients\nof every other prompt and the rest")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, **PLAIN
    )
    return figure


def _words(found: Mapping[str, Any]) -> Any:
    """Fig. 5: categories of words, how frequent, and how they go with the reward."""
    names = [entry["name"] for entry in found["words"]]
    figure, axes = sheet(1, 2, (9, 1.2 + 0.4 * len(names)))
    for axis, key, label in (
        (axes[0][0], "a_response", "words a response"),
        (axes[0][1], "correlation_with_reward", "correlation with the reward"),
    ):
        values = [entry[key] or 0.0 for entry in found["words"]]
        axis.barh(range(len(names)), values, 0.6)
        axis.set_yticks(range(len(names)), names if key == "a_response" else [])
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=5)
        axis.axvline(0.0, color=GREY, linewidth=0.8)
    return figure
