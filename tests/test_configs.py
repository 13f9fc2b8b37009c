"""Every config builds."""

import importlib.util
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("algo", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize(("alpha", "eta"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.3, 0.5)])
def test_the_grid_of_the_paper(algo, alpha, eta):
    kk = load("kk")
    objective = kk.objective(algo, alpha=alpha, eta=eta)
    assert objective.stages == (2 if eta else 1)
    assert bool(objective.penalties) == (algo == "grpo")
    assert kk.collate().minibatches == 2


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_launch_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
