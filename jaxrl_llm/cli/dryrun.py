"""What a run would be, before it is one: the resolved config, an example, and its plan on the devices here."""

from typing import Any

import rich.console
import rich.pretty

from jaxrl_llm.config import Config
from jaxrl_llm.machines import plan_text, topologies
from jaxrl_llm.machines.plan import plan
from jaxrl_llm.models import qwen2
from jaxrl_llm.runs.assemble import Parts, Readable
from jaxrl_llm.tasks.task import Source


def report(
    config: Config,
    parts: Parts,
    train_set: Readable[Any],
    test_set: Source[Any],
    console: rich.console.Console,
) -> None:
    """Prints it all; the programs are compiled for the longest batch but nothing is allocated or written."""
    rich.pretty.pprint(config, console=console, expand_all=True)
    count = qwen2.parameter_count(parts.shape)
    console.print(f"{count / 1e6:,.1f}M parameters on a mesh of {dict(parts.mesh.shape)}")
    console.print(f"{len(train_set):,} training examples, {train_set.skipped} left out as too long")
    console.print(f"{len(test_set):,} test examples")
    console.print("the first prompt:", parts.task.prompt(train_set[0]), sep="\n", highlight=False)
    with console.status("compiling") as status:
        made = plan(config, topologies.machine("here"), shape=parts.shape, say=status.update)
    for part in plan_text.tables(made, config.steps):
        console.print(part)
