"""Who may import whom, and nothing heavy in the base install."""

import ast
import importlib.util
import pathlib
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxrl_llm"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {"objectives", "models", "rollouts", "tasks"}
MAY_IMPORT = {  # rooms, or one file of a room
    "errors": set(),
    "files": {"errors"},
    "held": {"errors"},
    "storage": {"errors"},
    "desk": {"held", "storage"},
    "hosts": {"errors"},
    "userfile": {"errors"},
    "objectives": set(),
    "models": {"errors", "files"},
    "rollouts": {"errors", "held"},
    "tasks": {"errors", "userfile"},
    "learning": {"errors", "hosts"} | ROOMS,
    "config": {"errors", "userfile", "learning"} | ROOMS,
    "runs": {
        "errors",
        "files",
        "desk",
        "storage",
        "hosts",
        "userfile",
        "config",
        "learning",
        "models",
        "rollouts",
        "tasks",
    },
    "machines": {"errors", "config", "learning", "models", "rollouts"},
    "training": {"desk", "errors", "files", "runs", "learning"},
    "research": {
        "errors",
        "files",
        "storage",
        "userfile",
        "config",
        "learning",
        "runs",
        "machines",
        "training",
    }
    | ROOMS,
    "cli": {
        "errors",
        "files",
        "desk",
        "held",
        "storage",
        "hosts",
        "userfile",
        "config",
        "learning",
        "runs",
        "machines",
        "training",
        "research",
    }
    | ROOMS,
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path}: relative import")
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def room(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_layers(path):
    here = room(path)
    if here == "__init__":
        return
    ours = [name for name in imported(path) if name.startswith("jaxrl_llm.")]
    known = [f"jaxrl_llm.{name}." for name in {here} | MAY_IMPORT[here]]
    assert [name for name in ours if not f"{name}.".startswith(tuple(known))] == []


def test_arrows_go_one_way():
    """The table reads from the bottom up: nobody knows a room that comes later."""
    above = list(MAY_IMPORT)
    for here, known in MAY_IMPORT.items():
        assert {name.split(".")[0] for name in known} <= set(above[: above.index(here)])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_objectives_import_jax_and_jaxtyping_only(path):
    outside = {name.split(".")[0] for name in imported(path)}
    if room(path) == "objectives":
        assert outside - sys.stdlib_module_names <= {"jax", "jaxtyping", "jaxrl_llm"}
    if path.name != "peer.py":
        assert not outside & {"torch", "tensorflow", "pickle", "vllm"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_fit_in_a_head(path):
    assert len(path.read_text().splitlines()) <= 340
    assert path.stem not in ("utils", "common")


@pytest.mark.parametrize("package", ["torch", "tensorflow", "libtpu", "vllm"])
def test_the_install_is_light(package):
    """The test environment is the base install and the development tools."""
    assert importlib.util.find_spec(package) is None
