"""`jaxrl-llm eval`: accuracy of a run's policy on its test examples or on published problems."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.cli import parse
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import evaluate
from jaxrl_llm.learning.evaluate import Result
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.tasks.math.records import Problem, Suite, suite, without
from jaxrl_llm.tasks.math.task import MathTask
from jaxrl_llm.tasks.task import Source
from jaxrl_llm.training import folder as folders
from jaxrl_llm.training import tables, terminal
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.parts import DATA, Parts, askable

Problems = dict[str, tuple[Suite, list[Problem]]]
TEST = "test"  # names the run's own test examples in the table


class Asked(NamedTuple):
    """Examples, and the number of responses drawn for each besides the greedy one."""

    examples: Source[Any]
    samples: int


def run(words: list[str]) -> None:
    """Parse the words after `eval` and run `main`."""
    parse.call(main, words, "eval")


def main(
    run: str,
    /,
    *,
    step: int | None = None,
    last: int = 0,
    suite: tuple[str, ...] = (),
    samples: int | None = None,
    temperature: float = 1.0,
    data: DataFolder = DATA,
) -> None:
    """Evaluate a run's policy on all test examples: greedy accuracy by group, avg@k and pass@k.

    It executes the folder's config.py: evaluate only runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint (default: the best).
        last: evaluate this many of the last checkpoints, each and their mean, instead of one.
        suite: published problems instead of the test examples: math500, minerva, olympiad, amc,
            aime24, from the hub, or NAME=SOURCE with a parquet, JSONL or JSON file or a hub name.
        samples: k, the responses drawn to each prompt for avg@k and pass@k (default: 16
            for amc and aime24, else 0).
        temperature: at which they are drawn.
        data: where data sets are kept.
    """
    console = terminal.plain()
    folder = folders.at(run)
    if last and step is not None:
        raise UserError("eval: give either --step or --last")
    if samples is not None and samples < 0:
        raise UserError(f"--samples {samples}: at least 0")
    sources = [(name, source) for name, _, source in (word.partition("=") for word in suite)]
    if len(dict(sources)) < len(sources):
        raise UserError(f"--suite {' '.join(suite)}: a suite is named twice")
    steps = _last(folder, last) if last else [step]
    problems = {name: _suite(name, source) for name, source in sources}
    with opened(run, data, steps[0]) as (config, parts, sampler, chosen):
        asked = dict(_asked(config, parts, problems, samples))
        for said in _overlaps(parts, problems):
            console.print(said)
        table: dict[int, dict[str, Result]] = {}
        for number in steps:
            if table:
                chosen, params = folders.params(folder, parts, number)
                sampler.push(params, chosen)
                del params
            with console.status(f"step {chosen}"):
                table[chosen] = {
                    name: _answered(config, parts, sampler, one, temperature)
                    for name, one in asked.items()
                }
    if last or suite:
        console.print(tables.checkpoints(f"{run}: accuracy in percent (95% interval)", table))
    else:
        title = f"{run}, step {chosen}: test accuracy in percent (95% interval)"
        console.print(tables.accuracies(title, {"": table[chosen][TEST]}, config.evaluation.by))
    if unchecked := sum(one.unchecked for made in table.values() for one in made.values()):
        console.print(f"{unchecked} responses could not be checked, and count nowhere")


def _suite(name: str, source: str) -> tuple[Suite, list[Problem]]:
    found = suite(name)
    return found, found.load(source)


def _last(folder: Path, count: int) -> list[int]:
    """Steps of the last `count` regular checkpoints; a UserError if the run keeps fewer."""
    config = folders.reopen(folder)
    keeps, steps = (
        config.keep_checkpoints,
        [s for s in folders.checkpoints(folder).steps if config.saves(s)],
    )
    if not 0 < count <= min(keeps, len(steps)):
        raise UserError(
            f"--last {count}: {folder} has regular checkpoints of {steps} and keeps the last {keeps} "
            "(save_every and keep_checkpoints in its config)"
        )
    return steps[-count:]


def _asked(
    config: Config,
    parts: Parts,
    problems: Problems,
    samples: int | None,
) -> Iterator[tuple[str, Asked]]:
    """Name and examples of each evaluation: the test examples, or the suites."""
    if not problems:
        yield TEST, Asked(askable(parts, parts.task.test, config), samples or 0)
    elif not isinstance(parts.task, MathTask):
        raise UserError(
            f"--suite asks math problems in the way of the run's task, and that is {parts.task.name}"
        )
    for name, (published, there) in problems.items():
        k = published.samples if samples is None else samples
        yield name, Asked(askable(parts, there, config), k)


def _overlaps(parts: Parts, problems: Problems) -> Iterator[str]:
    """A warning for each suite that has problems in common with the training examples."""
    learned = [parts.task.train[i] for i in range(len(parts.task.train))] if problems else []
    for name, (_, there) in problems.items():
        if seen := len(there) - len(without(there, learned)):
            yield f"warning: {seen} of {len(there)} problems of {name} are in the run's training data"


def _answered(
    config: Config, parts: Parts, sampler: Sampler, asked: Asked, temperature: float
) -> Result:
    return evaluate.evaluate(
        sampler,
        parts.token_task(config),
        asked.examples,
        parts.sampling(config, temperature=temperature, seed=config.seed),
        samples=asked.samples,
        by=config.evaluation.by,
        stop=Stop(),
    )
