"""`jaxrl-llm eval`: how good a run's policy is."""

from pathlib import Path

import rich.console

from jaxrl_llm import desk
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.learning import evaluate
from jaxrl_llm.reports import tables
from jaxrl_llm.runs import assemble, folder


def main(
    run: Path,
    /,
    *,
    step: int | None = None,
    samples: int = 0,
    temperature: float = 1.0,
    data: DataFolder = folder.DATA,
) -> None:
    """Evaluate a run's policy on all test examples: greedy accuracy by group, avg@k and pass@k.

    It executes the folder's config.py: evaluate only runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint (default: the best).
        samples: k, the responses drawn to each prompt for avg@k and pass@k.
        temperature: at which they are drawn.
        data: where data sets are kept.
    """
    console = rich.console.Console(soft_wrap=True)
    with opened(run, data, step) as (config, parts, sampler, chosen):
        test_set = assemble.readable(parts, parts.task.test, config, "test")
        with console.status(f"{len(test_set)} examples"):
            sampling = parts.sampling(config, temperature=temperature, seed=config.seed)
            result = evaluate.evaluate(
                sampler,
                parts.token_task(config),
                test_set,
                sampling,
                samples=samples,
                by=config.evaluation.by,
            )
    title = (
        f"{desk.named(desk.at_hand(run))}, step {chosen}: test accuracy in percent (95% interval)"
    )
    console.print(tables.accuracies(title, {"": result}, config.evaluation.by))
