"""The figures of ../README.md that stand in no table of a study: `python configs/studies/results/more.py`.

From the records alone, in points of accuracy where nothing else is said; 95% intervals over seeds.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np

from jaxrl_llm.research import statistics

HERE = Path(__file__).parent
VARIANTS = ("reweighting", "Lopti", "both")
DOSES = (0.0, 0.15, 0.35, 0.6)
Values = Mapping[int, float]  # by seed


@cache
def recorded(study: str) -> dict:
    """The results of a study."""
    return json.loads((HERE / study / "results.json").read_text())


def runs(study: str, panel: str, variant: str) -> list[dict]:
    """The records of a cell of a study."""
    found = recorded(study)["runs"]
    return [r for r in found if (r["panel"], r["variant"]) == (panel, variant)]


def values(study: str, panel: str, variant: str, figure: str, seeds: Collection = ()) -> Values:
    """A figure of each seed, in points if it is an accuracy."""
    scale = 1.0 if figure in ("kl_reference", "entropy", "steps_to_level") else 100.0
    found = {r["seed"]: scale * r["figures"][figure] for r in runs(study, panel, variant)}
    return {seed: x for seed, x in found.items() if not seeds or seed in seeds}


def leads(
    study: str, panel: str, variant: str, figure: str, seeds: Collection = (), over: str = "plain"
) -> list[float]:
    """How far a variant is ahead of another in each seed."""
    cells = (values(study, panel, of, figure, seeds) for of in (variant, over))
    return statistics.differences(*cells)


def eighths(variant: str, parts: slice) -> Values:
    """Sampled accuracy in some eighths of the runs of GRPO."""
    return {r["seed"]: 100 * fmean([y for _, y in r["curves"]["sampled"]][parts])
            for r in runs("main", "GRPO", variant)}  # fmt: skip


def said(apart: Collection[float]) -> str:
    """A mean, its interval and how many values it has."""
    one = statistics.estimate([*apart])
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f}), n {one.n}"


def lead(of: Values, over: Values) -> str:
    """A paired difference."""
    return said(statistics.differences(of, over))


def main() -> None:
    """Prints them."""
    parts = {"first": slice(0, 1), "third and fourth": slice(2, 4),
             "sixth and seventh": slice(5, 7), "last": slice(7, 8)}  # fmt: skip
    for variant in VARIANTS:
        for name, part in parts.items():
            print(
                f"main, {variant}, {name} eighth:",
                lead(eighths(variant, part), eighths("plain", part)),
            )
        loss = [
            {seed: eighths(v, slice(2, 4))[seed] - x for seed, x in eighths(v, slice(7, 8)).items()}
            for v in (variant, "plain")
        ]
        print(
            f"main, {variant}, what of the lead is lost from there to the last eighth:", lead(*loss)
        )
        few = leads("main", "GRPO", variant, "sampled", {*range(8)} - {6})
        print(f"main, {variant}, at the end without seed 6:", said(few))

    for variant, study, cell, over in (
        ("reweighting", "alpha", "alpha 0.3", "alpha 0"),
        ("Lopti", "eta", "eta 0.5", "eta 0"),
    ):
        eight = leads("main", "GRPO", variant, "sampled_mean")
        two = leads(study, "", cell, "sampled_mean", (0, 1), over)
        print(
            f"main and {study}, {variant}, mean of the curve, ten warm starts:", said(eight + two)
        )

    for figure in ("sampled", "sampled_mean"):
        for variant in VARIANTS:
            grpo, other = (
                leads("main", algorithm, variant, figure, (0, 1, 6, 7))
                for algorithm in ("GRPO", "REINFORCE++")
            )
            print(
                f"GRPO's lead less REINFORCE++'s, {figure}, {variant}:",
                said(np.subtract(grpo, other)),
            )

    for variant in VARIANTS:
        by_dose = [
            leads("dose", f"chatter {dose:g}", variant, "sampled_mean", range(4)) for dose in DOSES
        ]
        for begin in (0, 1):
            slopes = np.polyfit(DOSES[begin:], np.array(by_dose[begin:]), 1)[0]
            print(f"dose, {variant}, lead per unit from {DOSES[begin]:g} on:", said(slopes))
        for dose, apart in zip(DOSES, by_dose, strict=True) if variant == "Lopti" else ():
            plain = [r for r in runs("dose", f"chatter {dose:g}", "plain") if r["seed"] < 4]
            gains = [100 * (r["figures"]["sampled"] - r["curves"]["sampled"][0][1]) for r in plain]
            share = 100 * np.mean(apart) / np.mean(gains)
            print(
                f"dose {dose:g}: plain gains {np.mean(gains):.1f}, Lopti's lead is {share:.0f}% of it"
            )

    accuracies = ("sampled_mean", "sampled", "greedy")
    for study, figures in (("controls", (*accuracies, "kl_reference")), ("neighbours", accuracies)):
        variants = [v for v in recorded(study)["study"]["variants"] if v != "Lopti"]
        for figure in figures:
            apart = {v: leads(study, "", v, figure, over="Lopti") for v in variants}
            corrected = statistics.holm({v: statistics.p_value(apart[v]) for v in variants})
            for variant in variants:
                print(
                    f"{study}, {variant} over Lopti, {figure}: {said(apart[variant])}, "
                    f"Holm {corrected[variant]:.2f}"
                )

    forty = ("neighbours", "")  # steps in two mini-batches, whose plain is called GRPO
    for count in (4, 8):
        more = ("length", f"{count} mini-batches")
        for figure in (*accuracies, "kl_reference"):
            for over in ("GRPO", "Lopti"):
                print(f"{count} mini-batches, plain over {over} with two, {figure}:",
                      lead(values(*more, "plain", figure), values(*forty, over, figure)))  # fmt: skip
            for variant in ("reweighting", "Lopti"):
                two = leads(*forty, variant, figure, over="GRPO")
                less = np.subtract(two, leads(*more, variant, figure))
                print(f"{count} mini-batches, what {variant} loses to two, {figure}:", said(less))
    for variant in ("reweighting", "Lopti"):
        less = np.subtract(
            leads(*forty, variant, "sampled", over="GRPO"),
            leads("length", "300 steps", variant, "sampled"),
        )
        print(f"300 steps, what {variant} loses to 40 at the end:", said(less))
    test = json.loads((HERE / "length" / "test_set.json").read_text())
    for variant in VARIANTS:
        print(f"300 steps, test set, {variant}:", lead(test[variant], test["plain"]))


if __name__ == "__main__":
    main()
