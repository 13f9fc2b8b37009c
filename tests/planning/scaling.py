"""What the update of `configs/kk.py` sends as devices are added: `python -m tests.machines.scaling`.

The batch is the same for all, 256 rows of 4,496 tokens a mini-batch, so there are as many micro-batches as rows a
device. GB that a device sends in a step over the links of its node or slice and over the network beyond, and the
seconds that arithmetic and either would take alone, at the rates of a data sheet: estimates.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config import Mesh
from jaxrl_llm.machines import topologies
from jaxrl_llm.machines.plan import plan

KK = Path(__file__).parents[2] / "configs" / "kk.py"
CASES = (  # model, machine, mesh (data, fsdp, tensor)
    ("7B", "h100x8", (1, 8, 1)),
    ("7B", "8xh100x8", (1, 64, 1)),
    ("7B", "8xh100x8", (8, 8, 1)),
    ("7B", "32xh100x8", (1, 256, 1)),
    ("7B", "32xh100x8", (32, 8, 1)),
    ("32B", "4xh100x8", (1, 32, 1)),
    ("32B", "4xh100x8", (1, 4, 8)),
    ("32B", "32xh100x8", (1, 256, 1)),
    ("32B", "32xh100x8", (8, 4, 8)),
    ("7B", "v5p:2x2x2", (1, 8, 1)),
    ("7B", "v5p:4x4x4", (1, 64, 1)),
    ("7B", "v5p:4x8x8", (1, 256, 1)),
    ("32B", "v5p:2x4x4", (1, 32, 1)),
    ("32B", "v5p:4x8x8", (1, 256, 1)),
)


def line(model: str, name: str, mesh: tuple[int, int, int]) -> str:
    """A row of the table."""
    make: Any = configs.load(KK)
    config, machine = make(model=f"Qwen/Qwen2.5-{model}"), topologies.machine(name)
    data, fsdp, _ = mesh
    rows = config.prompts * config.group_size // config.collate.minibatches
    collate = replace(config.collate, microbatches=max(1, rows // (data * fsdp)))
    config = replace(config, mesh=Mesh(*mesh), collate=collate)
    (update,) = plan(config, machine, only=("update",)).programs
    sent = [0.0, 0.0]
    for c in update.collectives:
        sent[c.span > machine.together] += c.sent / 1e9
    seconds = update.seconds
    sizes = " x ".join(map(str, mesh))
    return (
        f"| {model} | {name} | {sizes} | {collate.microbatches} | {update.peak / 2**30:.1f} | "
        f"{sent[0]:,.0f} | {sent[1]:,.0f} | "
        f"{seconds.arithmetic:.1f} | {seconds.links:.1f} | {seconds.network:.1f} |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only cases with one of these words")
    words = parser.parse_args().words
    print("| model | machine | data x fsdp x tensor | micro-batches | GiB | GB links | GB network "
          "| arithmetic s | links s | network s |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for case in CASES:
        if not words or {case[0], case[1]} & {*words}:
            print(line(*case), flush=True)
