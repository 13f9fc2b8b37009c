"""A plan as people read it."""

from collections.abc import Iterator, Mapping
from typing import Any

import rich.table
from rich.box import SIMPLE

from jaxrl_llm.machines.plan import Plan, Program

GIB = 2**30
TRAFFIC = 4  # lines a program
WAYS_OUT = {
    "gather": "more devices that share a copy (devices_a_copy of the engine)",
    "prefill": "fewer slots or prefill_prompts of the engine",
    "decode": "fewer slots of the engine",
    "score": "more collate.microbatches",
    "credit": "more devices on the axes data and fsdp",
    "update": "more collate.microbatches, compute.remat, offload, or more devices on the axes fsdp and tensor",
}


def tables(plan: Plan, steps: int) -> Iterator[Any]:
    """Memory, traffic and time, and what they come to."""
    yield _memory(plan)
    yield verdict(plan)
    yield from plan.left_whole
    if plan.devices > 1:
        yield _traffic(plan)
    if plan.timed:
        yield _time(plan)
        least, most = plan.seconds
        yield (
            f"a step takes {_duration(least)} if everything overlaps, {_duration(most)} if nothing does; "
            f"{steps} steps {_duration(steps * least)} to {_duration(steps * most)}. These are estimates: "
            "what was counted, at the rates of the data sheet; kernels reach about half of them"
        )


def verdict(plan: Plan) -> str:
    """Whether it fits, and what to do if not."""
    said = f"the worst moment is {plan.worst.name}: {_size(plan.peak)} of {_size(plan.memory)} a device"
    if plan.fits:
        return f"{said}; it fits"
    search = "; or let --search find it" if plan.timed else ""  # which reckons with a data sheet
    return f"{said}; it does not fit. What would help: {WAYS_OUT[plan.worst.name]}{search}"


def _memory(plan: Plan) -> rich.table.Table:
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    title = f"{plan.machine}, {mesh}: memory of a device"
    table = rich.table.Table("", "", title=title, box=SIMPLE, show_header=False)
    table.columns[1].justify = "right"
    for part, size in plan.parts.items():
        table.add_row(part, _size(size))
    for part, size in plan.waiting.items():
        table.add_row(f"{part}, in the memory of the host", _size(size))
    table.add_section()
    for program in plan.programs:
        note = f" ({_size(program.beside)} of it held beside)" if program.beside else ""
        table.add_row(f"peak of {program.name}{note}", _size(program.together))
    return table


def _traffic(plan: Plan) -> rich.table.Table:
    columns = ("program", "GB sent", "times", "MB each", "devices", "what", "line")
    table = rich.table.Table(
        *columns, title="between devices, each time a program runs", box=SIMPLE
    )
    for program in plan.programs:
        for c in program.collectives[:TRAFFIC]:
            values = f"{c.sent / 1e9:.2f}", str(c.times), f"{c.size / 1e6:.1f}", str(c.devices)
            table.add_row(program.name, *values, f"{c.kind} {c.array}", c.line)
        if rest := program.collectives[TRAFFIC:]:
            sent, count = sum(c.sent for c in rest) / 1e9, sum(c.times for c in rest)
            table.add_row(
                program.name, f"{sent:.2f}", str(count), "", "", f"{len(rest)} kinds more", ""
            )
    return table


def _time(plan: Plan) -> rich.table.Table:
    columns = ("arithmetic", "memory", "links", "network", "host")
    cycles = any(program.cycles for program in plan.programs)
    more = ["compiler's Mcycles"] if cycles else []
    header = ("program", *columns, *more, "compiled in")
    table = rich.table.Table(*header, title="seconds of a step", box=SIMPLE)
    for program in plan.programs:
        row = [_seconds(getattr(program.seconds, name)) for name in columns]
        row += [f"{program.cycles / 1e6:,.0f}"] if cycles else []
        table.add_row(program.name, *row, f"{program.compiled_in:.0f} s")
    return table


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "machine": plan.machine,
        "mesh": dict(plan.mesh),
        "devices": plan.devices,
        "memory": plan.memory,
        "peak": plan.peak,
        "fits": plan.fits,
        "parts": dict(plan.parts),
        "waiting": dict(plan.waiting),
        "left_whole": list(plan.left_whole),
        "seconds": dict(zip(("least", "most"), plan.seconds, strict=True)),
        "programs": {program.name: _program(program) for program in plan.programs},
    }


def _program(program: Program) -> Mapping[str, Any]:
    collectives = [{**vars(c), "sent": c.sent} for c in program.collectives]
    plain = {k: v for k, v in vars(program).items() if k not in ("name", "collectives", "seconds")}
    return {**plain, "seconds": vars(program.seconds), "collectives": collectives}


def _size(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else ("" if value == 0 else f"{value:.4f}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
