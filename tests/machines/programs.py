"""Programs compiled for machines that are not here: `python -m tests.machines.programs` prints what they are.

Small shapes, every attention, packed and padded rows, fsdp and tensor axes. `--write` records it in recorded.json,
which a test compares with.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from jaxrl_llm.config import Mesh
from jaxrl_llm.machines import topologies
from jaxrl_llm.machines.plan import Plan, plan
from jaxrl_llm.models import qwen2
from jaxrl_llm.rollouts.engines import Native
from tests.training import quick

FUSED = ("fmha", "triton", "tpu_custom_call")  # kernels of attention
ROOM = 1.02  # what memory may grow by before it is said
RECORDED = Path(__file__).with_name("recorded.json")
SHAPE = qwen2.Shape(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tied=True,
)
OFFLOADED = "offloaded"  # what a case with this in its name does with optimizer and reference
CASES = {  # machine, mesh (data, fsdp, tensor), packed, programs
    "h100x4, fsdp 4, padded": ("h100x4", (1, 4, 1), False, ("update",)),
    "h100x4, fsdp 4, packed": ("h100x4", (1, 4, 1), True, ("score", "update")),
    "h100x4, tensor 4, padded": ("h100x4", (1, 1, 4), False, ("update",)),
    "2xh100x2, data 2 x fsdp 2, packed": ("2xh100x2", (2, 2, 1), True, ("update",)),
    "h100x4, fsdp 4, sampling": ("h100x4", (1, 4, 1), True, ("prefill", "decode")),
    "v5e-4, fsdp 4, packed": ("v5e-4", (1, 4, 1), True, ("update",)),
    "h100x4, fsdp 4, offloaded": ("h100x4", (1, 4, 1), True, ("score", "update")),
    "v5e-4, fsdp 4, offloaded": ("v5e-4", (1, 4, 1), True, ("update",)),
    "v5e-4, fsdp 2 x tensor 2, padded": ("v5e-4", (1, 2, 2), False, ("update",)),
    "v5e-4, fsdp 4, sampling": ("v5e-4", (1, 4, 1), True, ("prefill", "decode")),
}


def compiled(name: str) -> dict[str, dict[str, int]]:
    """Memory, and collectives by kind with how often they run, of each program of a case."""
    machine, mesh, pack, only = CASES[name]
    made = quick.config()
    config = replace(
        made,
        model=replace(made.model, shape=SHAPE),
        mesh=Mesh(*mesh),
        offload="both" if OFFLOADED in name else "none",
        collate=replace(
            made.collate, pack=pack, microbatches=2, prompt_length=100, response_length=411
        ),
        compute=qwen2.Compute(dtype="bfloat16"),
        engine=Native(slots=16, prefill_prompts=4),
        warm_start=None,
    )
    return figures(plan(config, topologies.machine(machine), only=only))


def figures(made: Plan) -> dict[str, dict[str, int]]:
    """What is recorded of each program of a plan."""
    found = {}
    for program in made.programs:
        one = {"KiB": program.peak // 1024}
        for c in program.collectives:
            one[c.kind] = one.get(c.kind, 0) + c.times
        one |= {k: n for k, n in program.kernels.items() if any(word in k for word in FUSED)}
        found[program.name] = dict(sorted(one.items()))
    return found


def worse(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """In words: programs that need more memory or collectives than recorded, or have other fused kernels."""
    said = []
    for program, one in now.items():
        recorded = before[program]
        if one["KiB"] > ROOM * recorded["KiB"]:
            said.append(f"{program}: {recorded['KiB']} KiB a device before, {one['KiB']} now")
        for what in sorted({*one, *recorded} - {"KiB"}):
            old, new = recorded.get(what, 0), one.get(what, 0)
            if new > old or (new != old and any(word in what for word in FUSED)):
                said.append(f"{program}: {what} {old} times before, {new} now")
    return said


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument("names", nargs="*", default=[*CASES], help="cases, all of them by default")
    given = parser.parse_args()
    everything = {}
    for name in given.names or CASES:
        everything[name] = compiled(name)
        print(json.dumps({name: everything[name]}), flush=True)
    if given.write:
        recorded = json.loads(RECORDED.read_text()) | everything
        RECORDED.write_text(json.dumps({name: recorded[name] for name in CASES}, indent=1) + "\n")
