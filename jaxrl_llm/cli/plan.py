"""`jaxrl-llm plan`: memory, traffic and time of a config, here or on a machine that is not here."""

import json
from dataclasses import dataclass
from typing import Any

from jaxrl_llm import accelerators
from jaxrl_llm.cli import parse
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import machines, report
from jaxrl_llm.planning.plan import Plan, plan, shape_of
from jaxrl_llm.planning.programs import first_phase
from jaxrl_llm.training import terminal


@dataclass(frozen=True)
class Options:
    """The machine, and what to print."""

    on: str = "here"
    """the machine: v5e-16, v5p-8, v6e-8, v5p:2x2x2, h100x8, h200x1, 4xh100x8 (4 nodes), here"""
    search: bool = False
    """try meshes, micro-batches, recomputation and offload, and plan the fastest that fits; not for
    the devices here, which have no data sheet"""
    tokens: int = 0
    """mean length of a response, for the estimate of time; if not given, the limit"""
    json: bool = False
    """print one JSON object instead of tables"""


def run(words: list[str]) -> None:
    """Parse the words after `plan` and run `main`."""
    options, config, _ = parse.with_config("plan", words, Options, main.__doc__)
    main(options, config)


def main(options: Options, config: Config) -> None:
    """Compile a config for a machine, allocating nothing: memory, traffic, time, remedies."""
    console, config = terminal.plain(stderr=options.json), first_phase(config)
    if options.on == "here":  # what JAX has there is planned, and the next line starts it
        accelerators.leave(config.shared)
    machine = machines.machine(options.on)
    if options.tokens < 0 or options.tokens > config.collate.response_length:
        limit = config.collate.response_length
        raise UserError(f"--tokens {options.tokens}: a response has 1 to {limit} tokens")
    with console.status(f"for {machine.name}") as status:
        if options.search:
            from jaxrl_llm.planning import search

            planned = search.fastest(config, machine, options.tokens, say=console.print)
        else:
            planned = _planned(config, machine, tokens=options.tokens, say=status.update)
    if options.json:
        print(json.dumps(report.as_json(planned), indent=1))
        return
    for part in report.tables(planned, config.steps or config.warm_steps):
        console.print(part)


def _planned(config: Config, machine: machines.Machine, **settings: Any) -> Plan:
    """The plan of a config, whose open sizes are chosen first."""
    made, shape = None, shape_of(config)
    if not all(config.sizes.values()):
        from jaxrl_llm.planning import sizes  # most configs leave none open

        config, made = sizes.fitted(config, machine, shape, **settings)
    return made or plan(config, machine, shape, **settings)
