"""`jaxrl-llm plan`: what a config would need of a machine that is not here; and what `train --dry-run` prints."""

import json
from dataclasses import dataclass
from typing import Any

import rich.console
import rich.pretty

from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.planning import machines, report, search
from jaxrl_llm.planning.plan import plan
from jaxrl_llm.runs import terminal
from jaxrl_llm.runs.assemble import Parts, Readable
from jaxrl_llm.tasks.task import Source


@dataclass(frozen=True)
class Options:
    """Which machine, and how to answer."""

    on: str = "here"
    """the machine: v5e-16, v5p-8, v6e-8, v5p:2x2x2, h100x8, h200x1, 4xh100x8 (nodes x kind x devices), or here"""
    search: bool = False
    """try meshes, micro-batches, recomputation and offload, and plan the fastest that fits; not of the devices
    here, which have no data sheet"""
    tokens: int = 0
    """mean length of a response to reckon time with (default: the limit)"""
    json: bool = False
    """print one JSON object instead of tables"""


def main(options: Options, config: Config) -> None:
    """Compiles a config for a machine, nothing allocated: memory, traffic, time, and what to change."""
    console = terminal.plain(stderr=options.json)
    machine = machines.machine(options.on)
    if options.tokens < 0 or options.tokens > config.collate.response_length:
        limit = config.collate.response_length
        raise UserError(f"--tokens {options.tokens}: a response has 1 to {limit} tokens")
    with console.status(f"for {machine.name}") as status:
        if options.search:
            made = search.fastest(config, machine, options.tokens, say=console.print)
        else:
            made = plan(config, machine, tokens=options.tokens, say=status.update)
    if options.json:
        print(json.dumps(report.as_json(made), indent=1))
        return
    for part in report.tables(made, config.steps):
        console.print(part)


def dry_run(
    config: Config,
    parts: Parts,
    train_set: Readable[Any],
    test_set: Source[Any],
    console: rich.console.Console,
) -> None:
    """Prints the resolved config, an example and the plan on the devices here; nothing is allocated or written."""
    rich.pretty.pprint(config, console=console, expand_all=True)
    count = qwen2.parameter_count(parts.shape)
    console.print(f"{count / 1e6:,.1f}M parameters on a mesh of {dict(parts.mesh.shape)}")
    console.print(f"{len(train_set):,} training examples, {train_set.skipped} left out as too long")
    console.print(f"{len(test_set):,} test examples")
    console.print("the first prompt:", parts.task.prompt(train_set[0]), sep="\n", highlight=False)
    with console.status("compiling") as status:
        made = plan(config, machines.machine("here"), shape=parts.shape, say=status.update)
    for part in report.tables(made, config.steps):
        console.print(part)
