"""Accuracy on held-out examples: greedy, avg@k and pass@k, each with its 95% interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxrl_llm.distributed import Stop
from jaxrl_llm.learning.groups import Group, TokenTask
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.sampler import Sampler, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import Source, names_of_tasks

ALL = "all"
Z = 1.96  # of a 95% interval


@dataclass(frozen=True)
class Line:
    """One row of the table: the share of `examples` solved greedily, and of k samples each.

    `length` is in tokens, `truncated` the share cut at the limit. Ungraded responses count nowhere, and
    `pass_k` is of the prompts all of whose k samples are graded.
    Intervals are Wilson's; for `mean_k` with an effective sample size, from the variance between
    prompts.
    """

    name: str
    examples: int
    greedy: float
    interval: tuple[float, float]
    score: float
    length: float
    truncated: float
    k: int = 0
    mean_k: float = 0.0
    mean_interval: tuple[float, float] = (0.0, 0.0)
    pass_k: float = 0.0
    pass_interval: tuple[float, float] = (0.0, 0.0)

    @property
    def by_reward(self) -> bool:
        """True if no response is correct, so that rewards, where there are any, tell more."""
        return not self.greedy and self.score != 0


@dataclass(frozen=True)
class Result:
    """The table by group, its last line over all examples; and how many responses are ungraded.

    `first` is the first example with its greedy response, `tasks` the lines that are tasks of a mixture.
    """

    lines: tuple[Line, ...]
    ungraded: int
    first: Group | None = None
    tasks: tuple[str, ...] = ()

    @property
    def total(self) -> Line:
        """The line over all examples."""
        return self.lines[-1]

    def score(self, task: str = "") -> tuple[float, float]:
        """Accuracy and reward of a task of a mixture, or the means of its tasks; else of all examples."""
        measured = [one for one in self.lines if one.name in self.tasks and one.examples]
        chosen = [line for line in measured if task in ("", line.name)]
        chosen = chosen if self.tasks else [self.total]
        if not chosen:  # all of it is ungraded
            return -math.inf, 0.0
        return _mean([line.greedy for line in chosen]), _mean([line.score for line in chosen])

    def metrics(self) -> dict[str, float]:
        """The results by flat names, such as `accuracy/GROUP`."""
        out: dict[str, float] = {"examples": self.total.examples, "ungraded": self.ungraded}
        for line in self.lines:
            if line.name != ALL and not line.examples:  # all of it is ungraded
                continue
            measured = {"accuracy": (line.greedy, line.interval)}
            if line.k:
                measured[f"avg@{line.k}"] = line.mean_k, line.mean_interval
                measured[f"pass@{line.k}"] = line.pass_k, line.pass_interval
            for name, (value, (low, high)) in measured.items():
                if line.name == ALL:
                    out |= {name: value, f"{name}_low": low, f"{name}_high": high}
                else:
                    out[f"{name}/{line.name}"] = value
        total = self.total
        return out | {"score": total.score, "length": total.length, "truncated": total.truncated}


def evaluate(
    sampler: Sampler,
    task: TokenTask,
    examples: Source[Any],
    sampling: Sampling,
    *,
    samples: int = 0,
    by: str = "",
    stop: Stop,
) -> Result:
    """One greedy response an example, and `samples` at `sampling.temperature`; grouped by task and `by`.

    Raises StopRequested if the run was asked to stop meanwhile.
    """
    every = [examples[i] for i in range(len(examples))]
    greedy = replace(sampling, temperature=0.0)
    answered = task.answer(sampler, every, n=1, sampling=greedy, stop=stop)
    responses = [group.trajectories[0] for group in answered]
    rewards: list[Reward] = [group.rewards[0] for group in answered]
    drawn: list[Sequence[Reward]] = [()] * len(every)
    if samples:
        found = task.answer(sampler, every, n=samples, sampling=sampling, stop=stop)
        drawn = [group.rewards for group in found]
    ungraded = sum(not reward.graded for each in (rewards, *drawn) for reward in each)
    groups: dict[float, list[int]] = {}
    for i, (first, others) in enumerate(zip(rewards, drawn, strict=True)):
        known = (r.fields[by] for r in (first, *others) if r.graded and by in r.fields)
        group = next(known, None)
        if group is not None:
            groups.setdefault(group + 0.0, []).append(i)  # -0.0 is 0.0
    tasks = names_of_tasks(every)
    is_of = lambda name: [i for i, one in enumerate(every) if one.name == name]
    named = [(name, is_of(name)) for name in tasks]
    named += [(repr(group).removesuffix(".0"), groups[group]) for group in sorted(groups)]
    lines = [
        _line(name, index, rewards, responses, drawn)
        for name, index in [*named, (ALL, range(len(every)))]
    ]
    return Result(tuple(lines), ungraded, answered[0], tuple(tasks))


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if not n:
        return 0.0, 1.0
    share, z2 = successes / n, Z * Z / n
    middle = (share + z2 / 2) / (1 + z2)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n)) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def _line(
    name: str,
    index: Sequence[int],
    rewards: Sequence[Reward],
    responses: Sequence[Trajectory],
    drawn: Sequence[Sequence[Reward]],
) -> Line:
    """The line of the examples at `index`; `drawn` has the rewards of each example's k samples."""
    greedy = [i for i in index if rewards[i].graded]
    solved = sum(rewards[i].correct for i in greedy)
    line = Line(
        name=name,
        examples=len(greedy),
        greedy=_mean([rewards[i].correct for i in greedy]),
        interval=wilson(solved, len(greedy)),
        score=_mean([rewards[i].score for i in greedy]),
        length=_mean([responses[i].length for i in greedy]),
        truncated=_mean([not responses[i].finished for i in greedy]),
    )
    if not any(drawn):
        return line
    graded = [[r.correct for r in drawn[i] if r.graded] for i in index]
    graded = [correct for correct in graded if correct]
    shares, k = np.asarray([np.mean(c) for c in graded]), len(drawn[0])
    passed = [any(correct) for correct in graded if len(correct) == k]
    n, mean = len(graded), _mean(shares)
    variance = float(shares.var(ddof=1)) / n if n > 1 else 0.0
    effective = mean * (1 - mean) / variance if variance else n  # samples of a prompt correlate
    effective = min(effective, sum(map(len, graded)))
    return replace(
        line,
        k=k,
        mean_k=mean,
        mean_interval=wilson(mean * effective, effective),
        pass_k=_mean(passed),
        pass_interval=wilson(sum(passed), len(passed)),
    )


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
