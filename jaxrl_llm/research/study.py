"""A study: variants of a run over seeds, their outcomes, and differences to a baseline."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.research import statistics
from jaxrl_llm.training import journal

Flags = Mapping[str, Any]
Outcome = dict[str, Any]
"""The outcome of a run, as in results.json: panel, variant, seed, flags, name, and

curves: "sampled", accuracy of the responses that a step samples and learns from, and "greedy", of
    held-out examples. Reinforcement raises the first. The second sees only the likeliest answer: it
    jumps when another way of answering becomes likeliest, and is flat while one gets likelier.
figures: numbers by name, None for one that is not finite
made: flags and versions of the run, its files with their checksums, and its date
"""
PARTS = 8  # points of the sampled curve, each a mean over an eighth of the steps
AT_THE_END = ("rare_half", "entropy", "length", "kl_reference")  # means over LAST_STEPS
LAST_STEPS = 10


@dataclass(frozen=True)
class Run:
    """One run of a study, or a warm start of some, and the flags that make it."""

    panel: str
    variant: str
    seed: int
    flags: Flags

    @property
    def name(self) -> str:
        """The name of its folder."""
        words = f"{self.panel} {self.variant} seed{self.seed}"
        return re.sub(r"[^\w.+]+", "-", words).strip("-").lower()


@dataclass(frozen=True)
class Study:
    """A grid of runs, panels x variants x seeds: each is a call of the `config()` of a config file.

    `config` is a path relative to the study's file, or that file itself. Parameters are set by
    `flags` (of all runs), then by the panel's, the variant's, then `seed`. Variants are compared to
    `baseline` within panel and seed, and all of these begin with one warm start, which has the
    flags of the study and the panel. Panels share it too where `warm` names the only flags on which
    it depends. `level`: "steps_to_level" counts steps until this share of the baseline's gain is
    reached.
    """

    config: str
    variants: Mapping[str, Flags]
    baseline: str
    panels: Mapping[str, Flags] = field(default_factory=lambda: {"": {}})
    flags: Flags = field(default_factory=dict)
    warm: tuple[str, ...] | None = None
    seeds: Sequence[int] = range(8)
    level: float = 0.5

    def __post_init__(self):
        if self.baseline not in self.variants:
            raise UserError(f"study: the baseline {self.baseline!r} is none of {[*self.variants]}")
        for name, flags in self.variants.items():
            if unequal := {*flags} & {*(self.warm or ())}:
                raise UserError(
                    f"study: variant {name!r} sets {unequal.pop()!r}, on which the shared warm start depends: "
                    "set it in a panel"
                )

    def runs(self, seeds: Sequence[int] = ()) -> list[Run]:
        """All runs, seed after seed, so that a stopped study has complete seeds."""
        every = itertools.product(dict.fromkeys(seeds or self.seeds), self.panels, self.variants)
        return [
            Run(
                panel,
                variant,
                seed,
                {**self.flags, **self.panels[panel], **self.variants[variant], "seed": seed},
            )
            for seed, panel, variant in every
        ]

    def warm_start(self, run: Run) -> Run:
        """The run that makes this one's warm start, with `steps` 0: no reinforcement."""
        flags = {**self.flags, **self.panels[run.panel]}
        if self.warm is None:
            return Run(run.panel, "warm", run.seed, {**flags, "steps": 0, "seed": run.seed})
        known = {name: flags[name] for name in self.warm if name in flags}
        label = " ".join(["warm", *(f"{name} {value}" for name, value in known.items())])
        return Run("", label, run.seed, {**known, "steps": 0, "seed": run.seed})


def outcome(run: Run, records: Sequence[journal.Record], flags: Flags) -> Outcome:
    """The outcome of a finished run, from its records in metrics.jsonl."""
    ours = [r for r in records if r["phase"] == journal.REINFORCE]
    steps = [r for r in ours if "reward" in r]
    sampled = [r["accuracy"] for r in steps if "accuracy" in r]
    begin, scores = ours[0]["step"], journal.evaluations(ours)
    curves = {
        "sampled": statistics.in_parts(sampled, PARTS),
        "greedy": [(r["step"] - begin, r["eval/accuracy"]) for r in scores],
    }
    figures = {
        "sampled": statistics.plateau(curves["sampled"]),
        "sampled_mean": fmean(sampled),
        **{n: fmean(r[n] for r in steps[-LAST_STEPS:]) for n in AT_THE_END if n in steps[-1]},
        "rare_half_first": steps[0]["rare_half"],
        "seconds": sum(r.get("time/step", r.get("time/evaluation", 0.0)) for r in ours),
    }
    if after := [point for point in curves["greedy"] if point[0]]:
        figures["greedy"] = statistics.plateau(after)
        figures["greedy_mean"] = statistics.area(curves["greedy"])
    tests = [r for r in ours if "test/accuracy" in r and r.get("test/examples", 1)]
    if tests:
        figures["test"] = tests[-1]["test/accuracy"]
    figures = statistics.finite(figures)
    return {**asdict(run), "name": run.name, "curves": curves, "figures": figures, "made": flags}


def results(study: Study, outcomes: Sequence[Outcome], **about: Any) -> dict[str, Any]:
    """The content of results.json; `about` are further entries, such as title and commands."""
    runs = _with_steps_to_level(study, outcomes)
    described = {**asdict(study), "seeds": [*study.seeds]}
    return {**about, "study": described, "summary": summary(study, runs), "runs": runs}


def _with_steps_to_level(study: Study, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Adds "steps_to_level" and "reached": all of a run's steps and 0 if it never gets there."""
    baseline = {(o["panel"], o["seed"]): o for o in outcomes if o["variant"] == study.baseline}
    out = []
    for one in outcomes:
        figures, base = dict(one["figures"]), baseline.get((one["panel"], one["seed"]))
        if base is not None:
            start, end = base["curves"]["sampled"][0][1], base["figures"]["sampled"]
            if start is not None and end is not None and end > start:
                level = start + study.level * (end - start)
                steps = statistics.steps_to(one["curves"]["sampled"], level)
                last = max(x for curve in one["curves"].values() for x, _ in curve)
                figures["steps_to_level"] = last if steps is None else steps
                figures["reached"] = float(steps is not None)
        out.append({**one, "figures": figures})
    return out


def summary(study: Study, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """An entry for each panel, figure and variant: mean over seeds, paired difference to baseline.

    `holm` of a difference is its p-value, corrected for the other variants of its panel; `seeds`
    are the differences of the single seeds.
    """
    cells: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for one in outcomes:
        for figure, value in one["figures"].items():
            if value is not None:
                variants = cells.setdefault((one["panel"], figure), {})
                variants.setdefault(one["variant"], {})[one["seed"]] = value
    entries = []
    for (panel, figure), variants in cells.items():
        base = variants.get(study.baseline, {})
        apart = {
            variant: leads
            for variant, values in variants.items()
            if variant != study.baseline and (leads := statistics.differences(values, base))
        }
        p_values = {variant: statistics.p_value(values) for variant, values in apart.items()}
        holm = statistics.holm({name: p for name, p in p_values.items() if p is not None})
        for variant, values in variants.items():
            entry = {"panel": panel, "variant": variant, "figure": figure, "difference": None}
            entry |= asdict(statistics.estimate([*values.values()]))
            if seeds := apart.get(variant):
                leads = asdict(statistics.estimate(seeds))
                entry["difference"] = {**leads, "holm": holm.get(variant), "seeds": seeds}
            entries.append(entry)
    return entries
