"""A plan against the memory that a process really uses: `python -m tests.planning.test_measured` prints both.

Bytes of all devices: `planned`, and `used`, by which the memory of the process grows from before there was an
array to the peak of a step. XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices.
"""

import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config import Mesh
from jaxrl_llm.learning import update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.planning.machines import compiling_for
from jaxrl_llm.planning.plan import peak_of
from jaxrl_llm.planning.programs import Step
from tests.tiny import slow
from tests.training import quick

ROOT = pathlib.Path(__file__).parents[2]
SHAPE = qwen2.Shape(8192, 512, 1536, 4, 8, 2, tied=True)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), slow(2)])
def test_a_step_uses_what_its_plan_says_within_a_tenth(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"NPROC": "2", "PJRT_NPROC": "2"}  # more threads have more scratch memory
    command = [sys.executable, "-m", "tests.planning.test_measured"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == devices
    assert found["state planned"] == pytest.approx(found["state held"], rel=1e-3)
    assert found["planned"] == pytest.approx(found["used"], rel=0.1)


def resident(which: str) -> int:
    """VmRSS, what is used now, or VmHWM, the most since it was reset; without what was freed."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(which))


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
    with compiling_for(mesh):
        step = Step(config, SHAPE, mesh, 2**40)
        compiled = {program.name: program.compile for program in step.programs()}["update"]()
        planned = step.on_device["parameters"] + step.on_device["optimizer"]
    before = resident("VmRSS")
    shapes = qwen2.graph(SHAPE)[1]
    with jax.set_mesh(mesh):
        params = qwen2.init(SHAPE, shardings=sharding.param_shardings(shapes, mesh))
        state = jax.block_until_ready(update.init_state(params, config.optimizer))
    del params
    ones = lambda x: sharding.put(np.ones(x.shape, x.dtype), x.sharding)
    credited = jax.block_until_ready(jax.tree.map(ones, step.credited))
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    resident("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is forgotten
    state, metrics = jax.block_until_ready(compiled(state, credited))
    used = resident("VmHWM") - before
    assert jnp.isfinite(metrics["loss"]).all()
    figures = {
        "devices": mesh.size,
        "planned": mesh.size * peak_of(compiled.memory_analysis(), "cpu"),
        "used": used,
        "state planned": mesh.size * planned,
        "state held": held,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
