"""A study: variants of a run over seeds, what each reached, and how they differ from a baseline."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.reports import statistics
from jaxrl_llm.training.journal import REINFORCE

Flags = Mapping[str, Any]
Records = Sequence[Mapping[str, Any]]
PARTS = 8  # of the steps of a run, each a point of its sampled curve
LATE = ("rare_half", "entropy", "length", "kl_reference")  # where a run has got to
TAIL = 10  # steps whose mean says how the policy was at the end


@dataclass(frozen=True)
class Study:
    """A grid of runs, panels x variants x seeds: each is a call of the `config()` of a config file.

    `config` lies relative to the study's file, and may be that file itself. Its parameters are set by `flags` (for
    all runs), then those of the panel and of the variant, then `seed`. Variants are compared to `baseline` within
    panel and seed. Runs of a seed that agree in the flags named in `warm` begin with the same warm start. `level`
    is the share of the baseline's gain to which steps are counted.
    """

    config: str
    variants: Mapping[str, Flags]
    baseline: str
    panels: Mapping[str, Flags] = field(default_factory=lambda: {"": {}})
    flags: Flags = field(default_factory=dict)
    warm: tuple[str, ...] = ()
    seeds: Sequence[int] = range(8)
    level: float = 0.5

    def __post_init__(self):
        if self.baseline not in self.variants:
            raise UserError(f"study: the baseline {self.baseline!r} is none of {[*self.variants]}")
        for name, flags in self.variants.items():
            if unequal := {*flags} & {*self.warm}:
                raise UserError(
                    f"study: variant {name!r} sets {unequal.pop()!r}, on which the shared warm start depends: "
                    "set it in a panel"
                )

    def runs(self, seeds: Sequence[int] = ()) -> list["Planned"]:
        """All runs, seed after seed, so that a study that is stopped has whole seeds."""
        return [
            Planned(
                panel,
                variant,
                seed,
                {**self.flags, **self.panels[panel], **self.variants[variant], "seed": seed},
            )
            for seed, panel, variant in itertools.product(
                dict.fromkeys(seeds or self.seeds), self.panels, self.variants
            )
        ]

    def warm_start(self, run: "Planned") -> "Planned":
        """The run of no step whose warm start this one begins with."""
        flags = {**self.flags, **self.panels[run.panel]}
        known = {name: flags[name] for name in self.warm if name in flags}
        label = " ".join(["warm", *(f"{name} {value}" for name, value in known.items())])
        return Planned("", label, run.seed, {**known, "steps": 0, "seed": run.seed})


@dataclass(frozen=True)
class Planned:
    """One run of a study, and the flags that make it."""

    panel: str
    variant: str
    seed: int
    flags: Flags

    @property
    def name(self) -> str:
        """That of its folder."""
        words = f"{self.panel} {self.variant} seed{self.seed}"
        return re.sub(r"[^\w.+]+", "-", words).strip("-").lower()


@dataclass(frozen=True)
class Outcome:
    """What a run reached: accuracy by step of reinforcement, and figures.

    Two curves: `sampled`, of the responses that a step samples and learns from, and `greedy`, of held-out
    examples. The first is what reinforcement raises. The second sees only which answer is the likeliest: it
    leaps where two ways of answering change places, and stands still while the better one gets more likely.
    """

    run: Planned
    curves: Mapping[str, statistics.Curve]
    figures: Mapping[str, float]
    made: Mapping[str, Any] = field(default_factory=dict)  # settings, versions, when


def outcome(run: Planned, records: Records, made: Mapping[str, Any]) -> Outcome:
    """Reads a finished run's records."""
    ours = [r for r in records if r["phase"] == REINFORCE]
    begin = ours[0]["step"]
    evaluated = [r for r in ours if "eval/accuracy" in r]
    steps = [r for r in ours if "reward" in r]
    sampled = [r["accuracy"] for r in steps if "accuracy" in r]
    curves = {
        "sampled": statistics.smoothed(sampled, PARTS),
        "greedy": [(r["step"] - begin, r["eval/accuracy"]) for r in evaluated],
    }
    figures = {
        "sampled": statistics.plateau(curves["sampled"]),
        "sampled_mean": statistics.mean(sampled),
        "greedy": statistics.plateau(curves["greedy"][1:]),
        "greedy_mean": statistics.area(curves["greedy"]),
    }
    groups = [name for name in evaluated[0] if name.startswith("eval/accuracy/")]
    for name in groups if len(groups) > 1 else []:
        group = statistics.plateau([(r["step"], r[name]) for r in evaluated[1:]])
        figures[f"greedy/{name.rpartition('/')[2]}"] = group
    for name in [n for n in LATE if n in steps[-1]]:
        figures[name] = statistics.mean([r[name] for r in steps[-TAIL:]])
    figures["rare_half_first"] = steps[0]["rare_half"]
    figures["seconds"] = sum(r.get("time/step", r.get("time/evaluation", 0.0)) for r in ours)
    return Outcome(run, curves, figures, made)


def recorded(one: Outcome) -> dict[str, Any]:
    """An outcome as JSON has it."""
    reached = {"curves": one.curves, "figures": one.figures, "made": one.made}
    return {**asdict(one.run), "name": one.run.name, **reached}


def kept(record: Mapping[str, Any]) -> Outcome:
    """The outcome that `recorded` wrote down."""
    run = Planned(record["panel"], record["variant"], record["seed"], record["flags"])
    return Outcome(run, record["curves"], record["figures"], record.get("made", {}))


def with_speed(study: Study, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Adds the steps to the level; a run that never gets there has all its steps, and `reached` is 0."""
    baseline = {(o.run.panel, o.run.seed): o for o in outcomes if o.run.variant == study.baseline}
    out = []
    for one in outcomes:
        of_seed, figures = baseline.get((one.run.panel, one.run.seed)), dict(one.figures)
        if of_seed is not None:
            (_, start), end = of_seed.curves["sampled"][0], of_seed.figures["sampled"]
            if end > start:
                level = start + study.level * (end - start)
                steps = statistics.steps_to(one.curves["sampled"], level)
                figures["steps_to_level"] = one.curves["greedy"][-1][0] if steps is None else steps
                figures["reached"] = float(steps is not None)
        out.append(replace(one, figures=figures))
    return out


def summary(study: Study, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One entry a panel, variant and figure: the mean over seeds, and the paired difference to the baseline.

    `holm` of a difference is its p-value, corrected for the other variants of its panel.
    """
    values: dict[tuple[str, str, str], dict[int, float]] = {}
    for one in outcomes:
        for name, value in one.figures.items():
            values.setdefault((one.run.panel, one.run.variant, name), {})[one.run.seed] = value
    out, chances = [], dict[tuple[str, str], dict[str, float]]()
    for (panel, variant, name), by_seed in values.items():
        entry = {"panel": panel, "variant": variant, "figure": name}
        entry |= asdict(statistics.estimate([*by_seed.values()]))
        base = {} if variant == study.baseline else values.get((panel, study.baseline, name), {})
        apart = statistics.paired(by_seed, base)
        out.append({**entry, "difference": apart and asdict(apart)})
        if apart and (p := statistics.chance(statistics.differences(by_seed, base))) is not None:
            chances.setdefault((panel, name), {})[variant] = p
    corrected = {group: statistics.holm(of_variants) for group, of_variants in chances.items()}
    for entry in filter(lambda entry: entry["difference"], out):
        of_variants = corrected.get((entry["panel"], entry["figure"]), {})
        entry["difference"]["holm"] = of_variants.get(entry["variant"])
    return out


def results(study: Study, outcomes: Sequence[Outcome], **made: Any) -> dict[str, Any]:
    """Everything that is worth keeping, as JSON has it; `made` says how it came about."""
    outcomes = with_speed(study, outcomes)
    return {
        **made,
        "study": {**asdict(study), "seeds": [*study.seeds]},
        "summary": summary(study, outcomes),
        "runs": [*map(recorded, outcomes)],
    }
