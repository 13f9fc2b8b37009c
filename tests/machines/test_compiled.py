"""Programs compiled for machines that are not here do not grow past what is recorded."""

import json
import os
import pathlib
import subprocess

import pytest

from tests.machines.programs import CASES, RECORDED
from tests.reference.peer import needed

ROOT = pathlib.Path(__file__).parents[2]
ROOM = 1.02  # what memory may grow by before it is said


@pytest.fixture(scope="module")
def found():
    """What the compilers, in an environment of their own, make of every case."""
    python = needed("JAXRL_PLAN_PYTHON", "an interpreter with the extras plan-gpu and plan-tpu")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    command = [python, "-m", "tests.machines.programs"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: case for line in lines for name, case in json.loads(line).items()}


@pytest.mark.parametrize("name", CASES)
def test_a_program_does_not_grow(found, name):
    recorded = json.loads(RECORDED.read_text())[name]
    worse = []
    for program, figures in found[name].items():
        before = recorded[program]
        if figures["KiB"] > ROOM * before["KiB"]:
            worse.append(f"{program}: {before['KiB']} KiB a device before, {figures['KiB']} now")
        for what in {*figures, *before} - {"KiB"}:
            old, new = before.get(what, 0), figures.get(what, 0)
            fused = "fmha" in what or "triton" in what or "custom" in what
            if new > old or (fused and new != old):
                worse.append(f"{program}: {what} {old} times before, {new} now")
    assert not worse, "; ".join(worse) + " (python -m tests.machines.programs --write records it)"


def test_attention_is_fused_and_packed_rows_make_no_square(found):
    for name, programs in found.items():
        for program in ("score", "update", "prefill"):
            if program in programs:
                kernels = [
                    k
                    for k in programs[program]
                    if "fmha" in k or "triton" in k or "tpu_custom" in k
                ]
                assert kernels, f"{name}: {program} has no fused attention"
