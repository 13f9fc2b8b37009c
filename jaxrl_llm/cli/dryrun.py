"""What a run would be, before it is one: the resolved config, an example, and its plan on the devices here."""

import rich.console
import rich.pretty

from jaxrl_llm.config import Config
from jaxrl_llm.machines import plan_text, topologies
from jaxrl_llm.machines.plan import plan
from jaxrl_llm.models import qwen2
from jaxrl_llm.training.parts import parts, splits


def report(config: Config, data: str, console: rich.console.Console) -> None:
    """Prints it all; the programs are compiled for the longest batch but nothing is allocated or written."""
    made = parts(config, data)
    divided = splits(made, config)
    rich.pretty.pprint(config, console=console, expand_all=True)
    count = qwen2.parameter_count(made.shape)
    console.print(f"{count / 1e6:,.1f}M parameters on a mesh of {dict(made.mesh.shape)}")
    console.print(
        f"{len(divided.train) + len(divided.validation):,} training examples, {divided.skipped} left out as too long"
    )
    console.print(f"{len(divided.test):,} test examples")
    prompt = made.task.prompt(divided.train[0])
    console.print("the first prompt:", prompt, sep="\n", highlight=False)
    with console.status("compiling") as status:
        planned = plan(config, topologies.machine("here"), shape=made.shape, say=status.update)
    for part in plan_text.tables(planned, config.steps):
        console.print(part)
