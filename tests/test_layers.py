"""Who may import whom, and nothing heavy in the base install."""

import ast
import importlib.util
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxrl_llm"
FILES = sorted(PACKAGE.rglob("*.py"))
BASE = {"errors"}
ROOMS = BASE | {"objectives", "models", "rollouts", "tasks"}
MAY_IMPORT = {
    "errors": set(),
    "objectives": set(),
    "batch": BASE,
    "metrics": BASE | {"objectives"},
    "models": BASE | {"batch"},
    "rollouts": BASE | {"batch"},
    "userfile": BASE,
    "tokenizer": BASE,
    "checkpoint": BASE,
    "journal": BASE,
    "tasks": BASE | {"userfile"},
    "update": BASE | {"objectives", "batch", "metrics", "models"},
    "stream": BASE | {"batch", "tasks"},
    "engines": BASE | {"models", "rollouts"},
    "config": ROOMS | {"batch", "engines", "update", "userfile"},
    "assemble": ROOMS | {"config", "tokenizer"},
    "evaluate": ROOMS | {"assemble", "batch", "config", "tokenizer"},
    "run": ROOMS | {"assemble", "checkpoint", "config", "evaluate", "journal", "update"},
    "train": ROOMS
    | {"assemble", "batch", "checkpoint", "config", "evaluate", "journal", "metrics", "run", "stream",
       "update"},
    "plot": BASE | {"journal", "run"},
    "dryrun": BASE | {"assemble", "batch", "config", "models", "update"},
    "folder": BASE | {"assemble", "checkpoint", "config", "models"},
    "commands": ROOMS | {"assemble", "checkpoint", "config", "dryrun", "engines", "evaluate", "folder",
                         "journal", "plot", "run", "train"},
    "bench": ROOMS | {"batch", "engines", "update"},
    "cli": BASE | {"bench", "commands", "config"},
}  # fmt: skip


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "jaxrl_llm":
                yield from (f"jaxrl_llm.{name.name}" for name in node.names)
            else:
                yield node.module
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
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("jaxrl_llm.")}
    assert ours - {here} <= MAY_IMPORT[here]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_objectives_import_jax_and_jaxtyping_only(path):
    outside = {name.split(".")[0] for name in imported(path)}
    if room(path) == "objectives":
        assert outside <= {"jax", "jaxtyping", "jaxrl_llm", "collections", "dataclasses"}
    if not path.name.startswith("peer_"):
        assert not outside & {"torch", "tensorflow", "pickle", "vllm"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_fit_in_a_head(path):
    assert len(path.read_text().splitlines()) <= 340
    assert path.stem not in ("utils", "common")


@pytest.mark.parametrize("package", ["torch", "tensorflow", "libtpu", "vllm"])
def test_the_install_is_light(package):
    """The test environment is the base install and the development tools."""
    assert importlib.util.find_spec(package) is None
