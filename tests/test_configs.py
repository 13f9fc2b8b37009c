"""Every config builds, with every variant of the paper a flag away."""

import importlib.util
import pathlib
import subprocess

import pytest

from jaxrl_llm.config import Config
from jaxrl_llm.objectives import partition

ROOT = pathlib.Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_every_config_builds(path):
    made = load(path.stem).config()
    assert isinstance(made, Config)
    assert callable(made.task)


@pytest.mark.parametrize("name", ["kk", "kk_tiny"])
@pytest.mark.parametrize("algo", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize(("alpha", "eta"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.3, 0.5)])
def test_the_grid_of_the_paper(name, algo, alpha, eta):
    objective = load(name).config(algo, alpha=alpha, eta=eta).objective
    assert objective.advantage.func.__name__ == algo
    assert objective.reweight.keywords["alpha"] == alpha
    assert objective.stages == (2 if eta else 1)
    assert (objective.partition is partition.together) == (eta == 0)
    assert bool(objective.penalties) == (algo == "grpo")


@pytest.mark.parametrize("script", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_launch_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)
