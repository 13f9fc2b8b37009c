"""What a plan says of an update and what a process on CPUs really uses: `python -m tests.machines.measured`.

Prints bytes of all devices: `planned`, and `used`, by which the memory of this process grows from before there was
an array to the peak of a step. Wants XLA_FLAGS=--xla_force_host_platform_device_count=N for more than one device.
"""

import ctypes
import gc
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Mesh
from jaxrl_llm.learning import update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.machines import topologies
from jaxrl_llm.machines.plan import parts_of, peak_of
from jaxrl_llm.machines.programs import Planned
from jaxrl_llm.models import qwen2, sharding
from tests.training import quick

SHAPE = qwen2.Shape(8192, 512, 1536, 4, 8, 2, tied=True)


def resident(which: str) -> int:
    """VmRSS, what is used now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


def settled() -> int:
    """Resident memory when what was freed has gone."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return resident("VmRSS")


def main() -> None:
    """Compiles, then runs what was compiled."""
    made = quick.config()
    config = replace(
        made,
        model=replace(made.model, shape=SHAPE),
        mesh=Mesh(),
        collate=Collator(64, 192, minibatches=1, microbatches=2),
        prompts=4,
        group_size=4,
        warm_start=None,
    )
    mesh = sharding.make_mesh()
    with topologies.compiling_for(mesh):
        planned = Planned(config, SHAPE, mesh, 2**40)
        compiled = planned.programs()["update"]()
        parts = parts_of(planned)
    before = settled()
    shapes = qwen2.graph(SHAPE)[1]
    with jax.set_mesh(mesh):
        params = qwen2.init(SHAPE, shardings=sharding.param_shardings(shapes, mesh))
        state = jax.block_until_ready(update.init_state(params, config.optimizer))
    del params
    ones = lambda x: sharding.put(np.ones(x.shape, x.dtype), x.sharding)
    credited = jax.block_until_ready(jax.tree.map(ones, planned.credited))
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    settled()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    state, metrics = jax.block_until_ready(compiled(state, credited))
    used = resident("VmHWM") - before
    assert jnp.isfinite(metrics["loss"]).all()
    figures = {
        "devices": mesh.size,
        "planned": mesh.size * peak_of(compiled.memory_analysis(), "cpu"),
        "used": used,
        "state planned": mesh.size * (parts["parameters"] + parts["optimizer"]),
        "state held": held,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
