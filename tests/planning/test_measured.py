"""A plan against the memory that a process really uses."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_uses_what_its_plan_says_within_a_tenth(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment |= {"NPROC": "2", "PJRT_NPROC": "2"}  # more threads have more scratch memory
    command = [sys.executable, "-m", "tests.machines.measured"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == devices
    assert found["state planned"] == pytest.approx(found["state held"], rel=1e-3)
    assert found["planned"] == pytest.approx(found["used"], rel=0.1)
