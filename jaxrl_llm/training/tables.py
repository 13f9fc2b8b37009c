"""Tables for the terminal."""

from collections.abc import Iterable, Mapping
from statistics import fmean

import rich.table

from jaxrl_llm.learning.evaluate import Result, wilson


def accuracies(title: str, result: Result, by: str) -> rich.table.Table:
    """Accuracies in percent, a row a group; the mean reward too where no response is correct."""
    k = result.total.k
    drawn = (f"avg@{k}", f"pass@{k}") if k else ()
    out = rich.table.Table(
        by or "task" * bool(result.tasks), "examples", "greedy", *drawn, title=title
    )
    if result.total.by_reward:
        out.add_column("reward")
    out.caption = _ungraded([result])
    for line in result.lines:
        cells = [percent(line.greedy, line.interval)]
        if k:
            cells.append(percent(line.mean_k, line.mean_interval))
            cells.append(percent(line.pass_k, line.pass_interval))
        if result.total.by_reward:
            cells.append(f"{line.score:.3g}" if line.examples else "")
        out.add_row(line.name, str(line.examples), *cells)
    return out


def checkpoints(title: str, tables: Mapping[int, Mapping[str, Result]]) -> rich.table.Table:
    """Accuracies in percent on several sets: a column a checkpoint, then their mean."""
    out = rich.table.Table("", "examples", *(f"step {step}" for step in tables), title=title)
    out.caption = _ungraded(one for results in tables.values() for one in results.values())
    if len(tables) > 1:
        out.add_column(f"mean of {len(tables)}")
    for name in next(iter(tables.values())):
        lines = [results[name].total for results in tables.values()]
        k = lines[0].k
        measures = {f"{name} greedy": [(line.greedy, line.interval) for line in lines]}
        if k:
            measures[f"{name} avg@{k}"] = [(line.mean_k, line.mean_interval) for line in lines]
            measures[f"{name} pass@{k}"] = [(line.pass_k, line.pass_interval) for line in lines]
        for measure, values in measures.items():
            cells = [percent(*value) for value in values]
            if len(values) > 1:
                known = [value for value, interval in values if interval != wilson(0, 0)]
                cells.append(f"{100 * fmean(known):.1f}" if known else cells[0])
            out.add_row(measure, str(max(line.examples for line in lines)), *cells)
    return out


def _ungraded(results: Iterable[Result]) -> str | None:
    count = sum(result.ungraded for result in results)
    return f"ungraded responses, which count nowhere: {count}" if count else None


def percent(value: float, interval: tuple[float, float]) -> str:
    """A share and its 95% interval, in percent."""
    low, high = interval
    if interval == wilson(0, 0):
        return "all ungraded"
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"
