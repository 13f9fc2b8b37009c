"""Programs compiled for machines that are not here, against what is recorded of them.

    python -m tests.planning.records small         small shapes, seconds each; a test does the same
    python -m tests.planning.records presets 3B    configs/kk.py and math.py on whole machines, an hour in all
    python -m tests.planning.records scaling 7B    the update of kk.py, a row a device and micro-batch; no record

Fails if a program needs more memory or collectives than small.json or presets.json say; `--write` records. Words
pick cases. It wants `JAX_PLATFORMS=cpu`, and the extras plan-gpu and plan-tpu.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config, Mesh
from jaxrl_llm.models import qwen2
from jaxrl_llm.planning.machines import machine
from jaxrl_llm.planning.plan import Plan, plan, shape_of
from jaxrl_llm.rollouts.engines import Native
from tests.training import quick

HERE, CONFIGS = Path(__file__).parent, Path(__file__).parents[2] / "configs"
FUSED = ("fmha", "triton", "tpu_custom_call")  # kernels of attention
ROOM = 1.02  # what memory may grow by before it is said
SMALL = {  # machine, mesh (data, fsdp, tensor), programs; the name says what else
    "h100x4, fsdp 4, padded": ("h100x4", (1, 4, 1), ("update",)),
    "h100x4, fsdp 4, packed": ("h100x4", (1, 4, 1), ("score", "update")),
    "h100x4, tensor 4, padded": ("h100x4", (1, 1, 4), ("update",)),
    "2xh100x2, data 2 x fsdp 2, packed": ("2xh100x2", (2, 2, 1), ("update",)),
    "h100x4, fsdp 4, sampling": ("h100x4", (1, 4, 1), ("prefill", "decode")),
    "v5e-4, fsdp 4, packed": ("v5e-4", (1, 4, 1), ("update",)),
    "h100x4, fsdp 4, offloaded": ("h100x4", (1, 4, 1), ("score", "update")),
    "v5e-4, fsdp 4, offloaded": ("v5e-4", (1, 4, 1), ("update",)),
    "v5e-4, fsdp 2 x tensor 2, padded": ("v5e-4", (1, 2, 2), ("update",)),
    "v5e-4, fsdp 4, sampling": ("v5e-4", (1, 4, 1), ("prefill", "decode")),
    "h100x4, fsdp 4, few rows": ("h100x4", (1, 4, 1), ("score", "update")),
    "v5e-4, fsdp 4, few rows": ("v5e-4", (1, 4, 1), ("update",)),
}
PRESETS = """kk 3B h100x4; kk 3B h100x8; kk 3B h100x8 1 x -1 x 4; kk 3B h200x1; kk 3B v5e-16; kk 3B v5p-8;
kk 7B h100x4; kk 7B h100x8; kk 7B h200x1 offload both; kk 7B v5p:2x2x2; kk 14B h100x4 offload both; kk 14B h100x8;
kk 32B h200x4 offload both; kk 32B h200x8; kk 32B 4xh100x8; math 7B h100x8; kk Qwen3-4B h100x4; kk Qwen3-4B h100x8;
kk Qwen3-4B v5p-8; kk Qwen3-8B h100x8; kk Qwen3-8B v5p:2x2x2; kk Llama-3.1-8B h100x8; kk Llama-3.1-8B v5p:2x2x2;
kk gemma-3-1b-it h100x4; kk gemma-3-1b-it v5e-16; kk Qwen3-30B-A3B h100x8 offload both;
kk Qwen3-30B-A3B v5p:2x2x2"""
SCALING = """kk 7B h100x8; kk 7B 8xh100x8; kk 7B 8xh100x8 8 x 8 x 1; kk 7B 32xh100x8; kk 7B 32xh100x8 32 x 8 x 1;
kk 32B 4xh100x8; kk 32B 4xh100x8 1 x 4 x 8; kk 32B 32xh100x8; kk 32B 32xh100x8 8 x 4 x 8; kk 7B v5p:2x2x2;
kk 7B v5p:4x4x4; kk 7B v5p:4x8x8; kk 32B v5p:2x4x4; kk 32B v5p:4x8x8"""


def small(name: str) -> Plan:
    """A case of SMALL."""
    on, mesh, only = SMALL[name]
    made = quick.config(offload="both" if "offloaded" in name else "none")
    rows = 1024 if "few rows" in name else 4096  # of the vocabulary; a micro-batch has 2,044 tokens
    shape = qwen2.Shape(rows, 256, 512, num_layers=2, num_heads=4, num_kv_heads=2, tied=True)
    lengths = {"prompt_length": 100, "response_length": 411}
    config = replace(
        made,
        model=replace(made.model, shape=shape),
        mesh=Mesh(*mesh),
        collate=replace(made.collate, pack="padded" not in name, microbatches=2, **lengths),
        compute=qwen2.Compute(dtype="bfloat16"),
        engine=Native(slots=16, prefill_prompts=4),
        warm_start=None,
    )
    return plan(config, machine(on), shape, only=only)


def preset(name: str) -> tuple[Config, str]:
    """A config and a machine: file, preset (or size of Qwen2.5), machine, then a mesh or what is offloaded."""
    words = name.replace(" x ", " ").split()
    file, model, on, *places = words
    made: Any = configs.load(CONFIGS / f"{file}.py")
    sizes = {"slots": 256, "microbatches": {"kk": 32, "math": 64}[file]}
    config = made(model=model if "-" in model else f"Qwen2.5-{model}", **sizes)
    if "offload" in places:
        return replace(config, offload=places[-1]), on
    return replace(config, mesh=Mesh(*map(int, places))), on


def scaled(name: str) -> Plan:
    """Only the update, a row of each mini-batch on each device at a time."""
    config, on = preset(name)
    place = machine(on)
    shards = len(place.devices) // config.mesh.tensor
    rows = config.prompts * config.group_size // config.collate.minibatches
    collate = replace(config.collate, microbatches=max(1, rows // shards))
    return plan(replace(config, collate=collate), place, shape_of(config), only=("update",))


def figures(made: Plan) -> dict[str, dict[str, int]]:
    """What is recorded of each program: memory, collectives by kind and how often they run, fused kernels."""
    found = {}
    for program in made.programs:
        counts: dict[str, int] = {}
        for one in program.collectives:
            counts[one.kind] = counts.get(one.kind, 0) + one.times
        kernels = {k: n for k, n in program.kernels.items() if any(word in k for word in FUSED)}
        found[program.name] = {"KiB": program.peak // 1024, **counts, **kernels}
    return found


def worse(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> Iterator[str]:
    """In words: programs that need more memory or collectives than recorded, or have other fused kernels."""
    for program, one in now.items():
        recorded = before[program]
        if one["KiB"] > ROOM * recorded["KiB"]:
            yield f"{program}: {recorded['KiB']} KiB a device before, {one['KiB']} now"
        for what in sorted({*one, *recorded} - {"KiB"}):
            old, new = recorded.get(what, 0), one.get(what, 0)
            if new > old or (new != old and any(word in what for word in FUSED)):
                yield f"{program}: {what} {old} times before, {new} now"


def line(made: Plan) -> str:
    """The worst moment of a step, its time, and what the updates send."""
    (least, most), update = made.seconds, made.programs[-1]
    room = f"{made.peak / 2**30:.1f} of {made.memory / 2**30:.1f} GiB in {made.worst.name}"
    sent = sum(c.sent for c in update.collectives) / 1e9
    waits = ", ".join(f"{name} {s:.1f}" for name, s in update.seconds.items() if s)
    fit = "" if made.fits else "; IT DOES NOT FIT"
    return f"{room}, {least:.0f} to {most:.0f} s; updates send {sent:,.0f} GB ({waits} s){fit}"


def main() -> int:
    """0 if nothing has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=("small", "presets", "scaling"))
    parser.add_argument("words", nargs="*", help="only cases with one of these in their names")
    parser.add_argument("--write", action="store_true", help="record what is found")
    given = parser.parse_args()
    path, faults = HERE / f"{given.group}.json", []
    recorded = json.loads(path.read_text()) if path.exists() else {}
    large = {"presets": PRESETS, "scaling": SCALING}.get(given.group, "")
    for name in [one.strip() for one in large.split(";")] if large else SMALL:
        if given.words and not any(word in name for word in given.words):
            continue
        if given.group == "small":
            made = small(name)
        elif given.group == "scaling":
            made = scaled(name)
        else:
            config, on = preset(name)
            made = plan(config, machine(on), shape_of(config))
        print(f"{name}: {line(made)}", flush=True)
        if given.write and given.group != "scaling":
            recorded[name] = figures(made)
            path.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        elif given.group != "scaling":
            faults += [f"{name}: {said}" for said in worse(recorded[name], figures(made))]
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
