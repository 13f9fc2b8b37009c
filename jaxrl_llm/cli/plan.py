"""`jaxrl-llm plan`: what a config would need of a machine that is not here."""

import json
from dataclasses import dataclass

from jaxrl_llm.cli import parse
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.machines import plan_text, search, topologies
from jaxrl_llm.machines.plan import plan
from jaxrl_llm.training import terminal


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


def run(words: list[str]) -> None:
    options, config, _ = parse.with_config("plan", words, Options, main.__doc__)
    main(options, config)


def main(options: Options, config: Config) -> None:
    """Compiles a config for a machine, nothing allocated: memory, traffic, time, and what to change."""
    console = terminal.plain(stderr=options.json)
    machine = topologies.machine(options.on)
    if options.tokens < 0 or options.tokens > config.collate.response_length:
        limit = config.collate.response_length
        raise UserError(f"--tokens {options.tokens}: a response has 1 to {limit} tokens")
    with console.status(f"for {machine.name}") as status:
        if options.search:
            made = search.fastest(config, machine, options.tokens, say=console.print)
        else:
            made = plan(config, machine, tokens=options.tokens, say=status.update)
    if options.json:
        print(json.dumps(plan_text.as_json(made), indent=1))
        return
    for part in plan_text.tables(made, config.steps):
        console.print(part)
