"""A plan as tables for people and as JSON for programs."""

from collections.abc import Iterator, Mapping
from typing import Any

import rich.table
from rich.box import SIMPLE

from jaxrl_llm.planning.plan import WAITS, Compiled, Plan

GIB = 2**30
TRAFFIC = 4  # collectives shown for each program
REMEDIES = {
    "gather": "more devices that share a copy (devices_a_copy of the engine)",
    "prefill": "fewer slots or prefill_prompts of the engine",
    "decode": "fewer slots of the engine",
    "score": "more collate.microbatches",
    "teacher": "more collate.microbatches, offload, or more devices on the axes fsdp and tensor",
    "credit": "more devices on the axes data and fsdp",
    "update": "more collate.microbatches, compute.remat, offload, or more devices on the axes fsdp and tensor",
}


def tables(plan: Plan, steps: int) -> Iterator[Any]:
    """Tables and lines for rich: memory, whether it fits, traffic, and time for `steps` (0: unknown)."""
    yield _memory(plan)
    yield f"{sized(plan.sizes)}; {verdict(plan)}"
    yield from plan.left_whole
    if plan.devices > 1:
        yield _traffic(plan)
    if plan.timed:
        yield _time(plan)
        least, most = plan.seconds
        whole = f"; {steps} steps {_duration(steps * least)} to {_duration(steps * most)}"
        yield (
            f"a step takes {_duration(least)} if everything overlaps, {_duration(most)} if nothing does"
            f"{whole if steps else ''}. These are estimates: what was counted, at the "
            "rates of the data sheet; kernels reach about half of them"
        )
        waits, again = plan.programs[-1].seconds, plan.programs[-1].recomputed
        once = (1 - again) * waits["arithmetic"]
        yield (
            f"{again:.0%} of the update's arithmetic is recomputation; the rest, the model's, is "
            f"{once / sum(waits.values()):.0%} of what the machine could do meanwhile, "
            f"{once / max(waits.values()):.0%} if everything overlaps"
        )


def sized(sizes: Mapping[str, int]) -> str:
    """Slots and micro-batches in words."""
    words = {"slots": ("slot", "slots"), "microbatches": ("micro-batch", "micro-batches")}
    return ", ".join(f"{size} {words[name][size != 1]}" for name, size in sizes.items())


def verdict(plan: Plan) -> str:
    """A line that says whether the plan fits, and what would help if not."""
    worst = plan.worst.name
    said = f"the worst moment is {worst}: {in_gib(plan.peak)} of {in_gib(plan.memory)} a device"
    if plan.fits:
        return f"{said}; it fits"
    search = "; or let --search find it" if plan.timed else ""  # a search needs a data sheet
    return f"{said}; it does not fit. What would help: {REMEDIES[worst]}{search}"


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan, for programs; sizes in bytes, times in seconds, None without a data sheet."""
    return {
        "machine": plan.machine,
        "mesh": dict(plan.mesh),
        "devices": plan.devices,
        "memory": plan.memory,
        "peak": plan.peak,
        "fits": plan.fits,
        "sizes": dict(plan.sizes),
        "parts": dict(plan.on_device),
        "waiting": dict(plan.on_hosts),
        "left_whole": list(plan.left_whole),
        "seconds": dict(zip(("least", "most"), plan.seconds, strict=True)) if plan.timed else None,
        "programs": {program.name: _fields(program, plan.timed) for program in plan.programs},
    }


def _fields(program: Compiled, timed: bool) -> dict[str, Any]:
    fields = {**vars(program)} | ({} if timed else {"seconds": None})
    del fields["name"], fields["collectives"]  # collectives are many, and are put last
    return fields | {"collectives": [{**vars(c), "sent": c.sent} for c in program.collectives]}


def _memory(plan: Plan) -> rich.table.Table:
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    title = f"{plan.machine}, {mesh}: memory of a device"
    table = rich.table.Table("", "", title=title, box=SIMPLE, show_header=False)
    table.columns[1].justify = "right"
    for name, size in plan.on_device.items():
        table.add_row(name, in_gib(size))
    for name, size in plan.on_hosts.items():
        table.add_row(f"{name}, in the memory of the host", in_gib(size))
    table.add_section()
    for program in plan.programs:
        note = f" ({in_gib(program.beside)} of it held beside)" if program.beside else ""
        table.add_row(f"peak of {program.name}{note}", in_gib(program.needed))
    return table


def _traffic(plan: Plan) -> rich.table.Table:
    columns = ("program", "GB sent", "times", "MB each", "devices", "what", "line")
    title = "between devices, each time a program runs"
    table = rich.table.Table(*columns, title=title, box=SIMPLE)
    for program in plan.programs:
        for c in program.collectives[:TRAFFIC]:
            values = f"{c.sent / 1e9:.2f}", str(c.times), f"{c.size / 1e6:.1f}", str(c.devices)
            table.add_row(program.name, *values, f"{c.kind} {c.array}", c.line)
        if rest := program.collectives[TRAFFIC:]:
            sent, times = sum(c.sent for c in rest) / 1e9, sum(c.times for c in rest)
            more = f"{len(rest)} kinds more"
            table.add_row(program.name, f"{sent:.2f}", str(times), "", "", more, "")
    return table


def _time(plan: Plan) -> rich.table.Table:
    cycles = ["compiler's Mcycles"] if any(program.cycles for program in plan.programs) else []
    header = ("program", *WAITS, *cycles, "compiled in")
    table = rich.table.Table(*header, title="seconds of a step", box=SIMPLE)
    for program in plan.programs:
        row = [_seconds(program.seconds[name]) for name in WAITS]
        row += [f"{program.cycles / 1e6:,.0f}"] if cycles else []
        table.add_row(program.name, *row, f"{program.compiled_in:.0f} s")
    return table


def in_gib(size: float) -> str:
    """So many bytes in words."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else ("" if value == 0 else f"{value:.4f}")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
