"""The page of the studies says what their records say."""

import contextlib
import io
import pathlib
import re
import runpy

import pytest

STUDIES = pathlib.Path(__file__).parents[2] / "configs" / "studies"
MORE = runpy.run_path(str(STUDIES / "results" / "more.py"))
CURVE, END = "sampled_mean", "sampled"
TABLES = [
    ("main", "GRPO", (CURVE, END, "greedy")),
    *(("dose", f"chatter {dose}", (CURVE,)) for dose in (0, 0.15, 0.35, 0.6)),
    ("controls", "", (CURVE, END)), ("alpha", "", (CURVE, END)), ("eta", "", (CURVE, END)),
    ("length", "300 steps", (CURVE, END, "greedy", "greedy_mean")), ("masking", "", (END,)),
    *(("length", f"{n} mini-batches", (CURVE, END)) for n in (4, 8)),
    ("neighbours", "", (CURVE, END, "greedy")), ("people", "four people", (CURVE, END, "greedy")),
    ("size", "5M", (CURVE, END, "greedy")), ("length", "rate 1e-4", (CURVE, END, "greedy")),
]  # fmt: skip
ALONE = [("length", f"rate {rate}") for rate in ("3e-6", "3e-5", "3e-4")]


def summary(study, panel, figure):
    found = MORE["recorded"](study)["summary"]
    return [entry for entry in found if (entry["panel"], entry["figure"]) == (panel, figure)]


def points(share, sign="+"):
    """As the page writes them: a true minus, and 0.0 without a sign."""
    said = f"{100 * share:{sign}.1f}"
    return "0.0" if said.strip("+-") == "0.0" else said.replace("-", "\u2212")


def said(difference):
    low, high = (points(difference[side]) for side in ("low", "high"))
    holm = difference.get("holm")
    mean = points(difference["mean"])
    return f"{f'**{mean}**' if holm is not None and holm < 0.05 else mean} ({low} to {high})"


@pytest.fixture(scope="module")
def page():
    return " ".join((STUDIES / "README.md").read_text().split())


@pytest.fixture(scope="module")
def more():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        MORE["main"]()
    return dict(line.rsplit(": ", 1) for line in printed.getvalue().splitlines())


@pytest.mark.parametrize(
    ("study", "panel", "figure"), [(s, p, f) for s, p, figures in TABLES for f in figures]
)
def test_tables(page, study, panel, figure):
    entries = summary(study, panel, figure)
    [base] = [entry for entry in entries if not entry["difference"]]
    assert f" {points(base['mean'], '')} " in page
    missing = [
        (entry["variant"], said(entry["difference"]))
        for entry in entries
        if entry["difference"] and said(entry["difference"]) not in page
    ]
    assert not missing


HELP = STUDIES.parents[1] / "docs" / "does-it-help.md"
CONTROLS = {"two plain steps": "two plain steps", "plain, twice the rate": "twice the rate"}
METHODS = {name: name for name in ("plain", "reweighting", "Lopti", "both")}
PRETRAINED = CONTROLS | METHODS


def row(figure, variant, seeds=range(2, 7)):
    """A row of `docs/does-it-help.md`: percent of each seed, their mean, the difference to plain."""
    runs = {r["seed"]: r["figures"] for r in MORE["runs"]("pretrained_short", "", variant)}
    of = [100 * runs[seed][figure] for seed in seeds]
    [entry] = [e for e in summary("pretrained_short", "", figure) if e["variant"] == variant]
    apart = said(entry["difference"]).replace("*", "") if entry["difference"] else ""
    cells = (PRETRAINED[variant], *(f"{x:.1f}" for x in (*of, sum(of) / len(of))), apart)
    return f"| {' | '.join(cells)} |".replace("  ", " ")


@pytest.mark.parametrize("variant", PRETRAINED)
def test_does_it_help(variant):
    page = HELP.read_text()
    assert row("sampled_mean", variant) in page
    assert row("test", variant, range(4, 7)) in page
    if variant in METHODS:
        assert row("sampled", variant) in page
        assert row("greedy", variant) in page


@pytest.mark.parametrize(("study", "panel"), ALONE)
def test_rows_of_one_or_two_seeds(page, study, panel):
    of = lambda variant: {r["seed"]: r["figures"][END] for r in MORE["runs"](study, panel, variant)}
    base = of("plain")
    ahead = (
        ", ".join(points(x - base[seed]) for seed, x in sorted(of(variant).items()))
        for variant in ("reweighting", "Lopti", "both")
    )
    row = [", ".join(points(base[seed], "") for seed in sorted(base)) + " %", *ahead]
    assert " ".join(f"| {' | '.join(row)} |".split()) in page


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "main, Lopti, third and fourth eighth",
            "its lead is 1.9 points in the third and fourth eighth",
        ),
        ("main, reweighting, sixth and seventh eighth", "(1.2 in the sixth and seventh eighth"),
        (
            "main and eta, Lopti, mean of the curve, ten warm starts",
            "+1.3 (+0.8 to +1.8) for Lopti",
        ),
        ("300 steps, test set, both", "+0.8 (-1.9 to +3.6)"),
        ("300 steps, what Lopti loses to 40 at the end", "1.2 less (0.4 to 2.0)"),
        ("8 mini-batches, what Lopti loses to two, sampled_mean", "with two (0.3 to 3.6)"),
        (
            "8 mini-batches, what reweighting loses to two, sampled_mean",
            "reweighting's 1.1 (0.4 to 1.8)",
        ),
        (
            "8 mini-batches, plain over GRPO with two, sampled_mean",
            "is 4.3 points (3.9 to 4.7) ahead",
        ),
        ("8 mini-batches, plain over Lopti with two, sampled_mean", "2.8 (2.1 to 3.5) ahead"),
        ("8 mini-batches, plain over Lopti with two, sampled", "1.5 (-0.3 to +3.3) ahead"),
        (
            "8 mini-batches, plain over Lopti with two, greedy",
            "greedily -0.1 (-3.7 to +3.4)",
        ),
        ("4 mini-batches, plain over Lopti with two, sampled_mean", "+1.1 (-0.5 to +2.7)"),
        ("4 mini-batches, plain over Lopti with two, sampled", "at the end +0.8 (-0.8 to +2.4)"),
    ],
)
def test_figures_that_stand_in_no_table(page, more, name, words):
    """Words end with a mean, its interval, or both."""
    assert words.replace("-", "\u2212") in page
    said, recorded = (
        [float(x) for x in re.findall(r"[+-]?\d+\.\d+", text)] for text in (words, more[name])
    )
    assert said == pytest.approx(
        recorded[1:] if len(said) == 2 else recorded[: len(said)], abs=0.05
    )
