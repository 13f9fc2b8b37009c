"""`jaxrl-llm eval`: accuracy of a run's policy on its test examples or on published problems."""

import hashlib
import logging
from typing import Any

from jaxrl_llm.cli.open_run import open_run
from jaxrl_llm.errors import UserError, flags_at_least
from jaxrl_llm.learning import evaluate
from jaxrl_llm.learning.evaluate import Result
from jaxrl_llm.tasks.math import records
from jaxrl_llm.tasks.math.records import Problem, Suite, without
from jaxrl_llm.tasks.math.task import MathTask
from jaxrl_llm.training import record, tables, terminal
from jaxrl_llm.training.components import DATA, TESTED, Components, Prompted, add, askable
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.leaving import Stop

logger = logging.getLogger(__name__)
TEST = "test"  # names the run's own test examples in the table


def main(
    run: str,
    /,
    *,
    step: int | None = None,
    last: int = 0,
    suite: tuple[str, ...] = (),
    samples: int | None = None,
    temperature: float = 1.0,
    data_folder: str = DATA,
) -> None:
    """Evaluate a run's policy on all test examples: greedy accuracy by group, avg@k and pass@k.

    It executes the folder's config.py: evaluate only runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint; if not given, the best.
        last: evaluate this many of the last checkpoints, each and their mean, instead of one.
        suite: published problems instead of the test examples: math500, minerva, olympiad, amc,
            aime24, from the hub, or NAME=SOURCE with a parquet, JSONL or JSON file or a hub name.
        samples: k, the responses drawn to each prompt for avg@k and pass@k; if not given, 16
            for amc and aime24, else 0.
        temperature: at which they are drawn.
        data_folder: where data sets are kept.
    """
    console = terminal.plain()
    folder = RunFolder(run)
    if last and step is not None:
        raise UserError("eval: give either --step or --last")
    flags_at_least(0, samples=samples or 0)
    sources = [(name, source) for name, _, source in (word.partition("=") for word in suite)]
    if len(dict(sources)) < len(sources):
        raise UserError(f"--suite {' '.join(suite)}: a suite is named twice")
    steps = _last(folder, last) if last else [step]
    published = ((name, records.suite(name), source) for name, source in sources)
    suites = {name: (one, one.load(source)) for name, one, source in published}
    with open_run(run, data_folder, steps[0]) as (components, sampler, chosen):
        config, tests = components.config, _examples(components, suites, samples)
        for said in _overlaps(components, suites):
            console.print(said)
        if not suites:
            _warn_of_other_data(folder, tests[TEST][0])
        table: dict[int, dict[str, Result]] = {}
        for number in steps:
            if table:
                chosen, params = folder.params(components, number)
                sampler.push(params, chosen)
                del params
            with console.status(f"step {chosen}"):
                table[chosen] = {
                    name: evaluate.evaluate(
                        sampler,
                        components.token_task(evaluates=True),
                        examples,
                        components.sampling(examples, temperature=temperature, seed=config.seed),
                        samples=k,
                        by=config.evaluation.by,
                        stop=Stop(),
                    )
                    for name, (examples, k) in tests.items()
                }
    if last or suite:
        console.print(tables.checkpoints(f"{run}: accuracy in percent (95% interval)", table))
    else:
        title = f"{run}, step {chosen}: test accuracy in percent (95% interval)"
        console.print(tables.accuracies(title, table[chosen][TEST], config.evaluation.by))


def _last(folder: RunFolder, count: int) -> list[int]:
    """Steps of the last `count` regular checkpoints; a UserError if the run keeps fewer."""
    config = folder.config()
    steps = [step for step in folder.checkpoints().steps if config.saves(step)]
    if not 0 < count <= min(config.keep_checkpoints, len(steps)):
        raise UserError(
            f"--last {count}: {folder.path} has regular checkpoints of {steps} and keeps the last "
            f"{config.keep_checkpoints} (save_every and keep_checkpoints in its config)"
        )
    return steps[-count:]


def _examples(
    components: Components,
    suites: dict[str, tuple[Suite, list[Problem]]],
    samples: int | None,
) -> dict[str, tuple[Prompted[Any], int]]:
    """Examples by the name of the test or suite, with the responses drawn besides the greedy one."""
    if not components.graded:
        raise UserError("eval: the run's task has no rewards: test/loss is in its metrics.jsonl")
    if not suites:
        return {TEST: (askable(components, components.task.test), samples or 0)}
    if not isinstance(components.task, MathTask):
        raise UserError(
            f"--suite asks math problems in the way of the run's task, and that is {components.task.name}"
        )
    return {
        name: (askable(components, problems), published.samples if samples is None else samples)
        for name, (published, problems) in suites.items()
    }


def _warn_of_other_data(folder: RunFolder, tested: Prompted[Any]) -> None:
    add(tested, now := hashlib.sha256())
    if record.read(folder.path)["given"].get(TESTED) not in (None, now.hexdigest()):
        logger.warning(
            "the test data are not as they were when %s was started: its other figures are of others",
            folder.path,
        )


def _overlaps(components: Components, suites: dict[str, tuple[Suite, list[Problem]]]) -> list[str]:
    """A warning for each suite that has problems in common with the training examples."""
    learned = (
        [components.task.train[i] for i in range(len(components.task.train))] if suites else []
    )
    seen = {name: _count_known(there, learned) for name, (_, there) in suites.items()}
    return [
        f"warning: {count} of {len(suites[name][1])} problems of {name} are in the run's training data"
        for name, count in seen.items()
        if count
    ]


def _count_known(there: list[Problem], learned: list[Problem]) -> int:
    """How many problems one of those learned from is, or holds, as with an instruction around it."""
    others = set(map(id, without(learned, there)))
    holding = [problem for problem in learned if id(problem) not in others]
    return sum(len(without(holding, [one])) < len(holding) for one in there)
