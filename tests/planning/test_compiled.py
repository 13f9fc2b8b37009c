"""Programs compiled for machines that are not here do not grow past what is recorded."""

import json
import os
import pathlib
import subprocess

import pytest

from tests.machines.programs import CASES, FUSED, RECORDED, worse
from tests.reference.peer import needed

ROOT = pathlib.Path(__file__).parents[2]


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
    said = "; ".join(worse(recorded, found[name]))
    assert not said, f"{said} (python -m tests.machines.programs --write records it)"


def test_attention_is_fused_and_packed_rows_make_no_square(found):
    for name, programs in found.items():
        for program in ("score", "update", "prefill"):
            if program in programs:
                kernels = [k for k in programs[program] if any(word in k for word in FUSED)]
                assert kernels, f"{name}: {program} has no fused attention"


def test_what_has_grown_is_said():
    before = {"update": {"KiB": 1000, "all-gather": 4, "all-reduce": 2, "triton": 3}}
    assert worse(before, before) == []
    assert worse(before, {"update": {"KiB": 1010, "all-gather": 3, "triton": 3}}) == []
    said = worse(before, {"update": {"KiB": 1030, "all-gather": 5, "all-to-all": 1}})
    assert len(said) == 4
    assert said[0] == "update: 1000 KiB a device before, 1030 now"
    assert "update: all-gather 4 times before, 5 now" in said
    assert "update: triton 3 times before, 0 now" in said
