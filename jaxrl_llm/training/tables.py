"""Tables for the terminal."""

from collections.abc import Iterable, Mapping

import rich.table

from jaxrl_llm.learning.evaluate import Result, wilson


def accuracies(title: str, columns: dict[str, Result], by: str) -> rich.table.Table:
    """Accuracies in percent, a row a group, a set of columns a result."""
    out = rich.table.Table(by or "", "examples", title=title)
    results = list(columns.values())
    out.caption = _unchecked(results)
    k = results[0].total.k
    for name in columns:
        out.add_column(f"{name}greedy")
        if k:
            out.add_column(f"{name}avg@{k}")
            out.add_column(f"{name}pass@{k}")
    for lines in zip(*(result.lines for result in results), strict=True):
        cells = []
        for line in lines:
            cells.append(percent(line.greedy, line.interval))
            if k:
                cells.append(percent(line.mean_k, line.mean_interval))
                cells.append(percent(line.pass_k, line.pass_interval))
        out.add_row(lines[0].name, str(lines[0].examples), *cells)
    return out


def checkpoints(title: str, found: Mapping[int, Mapping[str, Result]]) -> rich.table.Table:
    """Accuracies in percent on several sets: a column a checkpoint, then their mean."""
    out = rich.table.Table("", "examples", *(f"step {step}" for step in found), title=title)
    out.caption = _unchecked(one for results in found.values() for one in results.values())
    if len(found) > 1:
        out.add_column(f"mean of {len(found)}")
    for name in next(iter(found.values())):
        lines = [results[name].total for results in found.values()]
        k = lines[0].k
        measures = {f"{name} greedy": [(line.greedy, line.interval) for line in lines]}
        if k:
            measures[f"{name} avg@{k}"] = [(line.mean_k, line.mean_interval) for line in lines]
            measures[f"{name} pass@{k}"] = [(line.pass_k, line.pass_interval) for line in lines]
        for measure, values in measures.items():
            cells = [percent(*value) for value in values]
            if len(values) > 1:
                cells.append(f"{100 * sum(value for value, _ in values) / len(values):.1f}")
            out.add_row(measure, str(max(line.examples for line in lines)), *cells)
    return out


def _unchecked(results: Iterable[Result]) -> str | None:
    count = sum(result.unchecked for result in results)
    return f"unchecked responses, which count nowhere: {count}" if count else None


def percent(value: float, interval: tuple[float, float]) -> str:
    """A share and its 95% interval, in percent."""
    low, high = interval
    if interval == wilson(0, 0):
        return "all unchecked"
    return f"{100 * value:.1f} ({100 * low:.1f} to {100 * high:.1f})"
