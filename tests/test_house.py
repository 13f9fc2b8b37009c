"""The plan of the package: who may import whom, and how much one must read to follow a run."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxrl_llm"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up: a module imports its own room and rooms of lower layers, no neighbour.
# So the command line alone knows research.
LAYERS = (
    ("errors", "forks", "reward", "background"),
    ("storage", "distributed", "userfile", "accelerators", "childprocess"),
    ("objectives",),
    ("models",),
    ("rollouts", "tasks"),
    ("learning", "adapters"),
    ("config",),
    ("planning",),
    ("model", "start", "training"),
    ("research",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
ALONE = {"objectives": {"jax", "jaxtyping", "jaxrl_llm"}}  # all that a room imports from elsewhere
HEAVY = {"torch", "tensorflow", "libtpu", "vllm"}
OTHER_PROCESSES = {  # run by the Pythons of vLLM and other packages, beside torch
    *("serverside.py", "peer.py", "in_torch.py", "in_trl.py", "in_tunix.py", "in_vllm.py")
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
RIDDLES = {"car", "desk", "seal", "sealed"}  # words that say nothing to a newcomer


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The full names that a file imports, wherever in it; a relative import counts as `.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {
                f"{node.module}.{name.name}" if not node.level else "." for name in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_arrows_between_rooms_go_one_way():
    wrong = []
    for path in FILES:
        here = room(path)
        ours = {name.split(".")[1] for name in imported(path) if name.startswith("jaxrl_llm.")}
        lower = {other for other in HEIGHT if HEIGHT[other] < HEIGHT.get(here, 0)} | {here}
        if here != "__init__":
            wrong += [f"{path.relative_to(PACKAGE)} imports {x}" for x in sorted(ours - lower)]
    assert not wrong, "\n".join(wrong)


def test_imports_from_elsewhere():
    for path in FILES:
        outside = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
        assert "" not in outside, f"{path}: a relative import"
        assert outside <= ALONE.get(room(path), outside), path
        assert path.name in OTHER_PROCESSES or not outside & HEAVY, path
        assert "pickle" not in imported(path), path


def test_the_install_is_light():
    """The environment of the tests is the base install and the development tools."""
    assert [name for name in sorted(HEAVY) if importlib.util.find_spec(name)] == []


READ = """
import atexit, pathlib, sys

@atexit.register
def say():
    ours = [m.__file__ for n, m in [*sys.modules.items()] if n.partition(".")[0] == "jaxrl_llm"]
    print("\\n", len(ours), sum(len(pathlib.Path(f).read_text().splitlines()) for f in ours))

"""
DRY_RUN = "from jaxrl_llm.cli.main import main; main('train configs/kk_tiny.py --dry-run'.split())"


@pytest.mark.parametrize(
    ("program", "modules", "lines"),
    [
        pytest.param(DRY_RUN, 66, 13_369, id="a dry run"),
        pytest.param("import jaxrl_llm.learning.update", 23, 3_108, id="the train step"),
    ],
)
def test_how_much_there_is_to_read(program, modules, lines):
    """Modules of the package that are loaded, and their lines: a reader's way through the code."""
    command = [sys.executable, "-c", READ + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded, read = map(int, done.stdout.split()[-2:])
    assert loaded <= modules, f"{loaded} modules of {read} lines"
    assert read <= lines, f"{loaded} modules of {read} lines"


def test_words_are_those_of_the_field():
    """In names and docstrings; docs/glossary.md says what to call things."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            said = getattr(node, "name", None) or getattr(node, "id", None)
            said = said or getattr(node, "arg", None) or ""
            if isinstance(node, ast.Module | ast.ClassDef | FUNCTION):
                said += " " + (ast.get_docstring(node) or "")
            words = set(re.findall("[a-z]+", said.lower().replace("_", " ")))
            found += [f"{path.relative_to(PACKAGE)}: {word}" for word in sorted(words & RIDDLES)]
        found += [f"{path.name}: its name"] * (path.stem in RIDDLES | {"utils", "common"})
    assert sorted(set(found)) == []


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's parameters, but for `*` and `**`."""
    every = function.args
    return [one.arg for one in (*every.posonlyargs, *every.args, *every.kwonlyargs)]


FOREIGN = {  # optional attributes of others' objects: of Python, JAX, orbax, rich, the C library
    *("__code__", "__file__", "__loader__", "__name__", "__notes__", "mesh", "malloc_trim"),
    *("compute_capability", "cr_code", "manual_axes", "rich_proxied_file", "tolist"),
}


def test_optional_members_have_a_protocol():
    """What the package may find in its own objects, or in users', is named by one."""
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(name), _]):
                    hidden = path.name not in OTHER_PROCESSES and name not in FOREIGN
                    wrong += [f"{path.relative_to(PACKAGE)}: {name}"] * hidden
    assert wrong == []


MOST_PARAMETERS = 8


def test_functions_have_few_parameters():
    """What has more is given an object; a row of a table and a user's own function may stay."""
    many = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, FUNCTION)
        and len({*arguments(node)} - {"self", "cls"}) > MOST_PARAMETERS
    ]
    assert len(many) <= 3, many


BANNED = {
    *("made", "found", "seen", "said", "known", "given", "kept", "own", "over", "asked", "told")
}
SHORT = 5  # lines that such a name may live
QUESTIONS = ("What", "Whether", "Where", "Who", "These")


def unnamed(tree: ast.Module) -> list[str]:
    """Names of BANNED that live long, and docstrings that begin with a question word.

    A name lives long as a parameter, an attribute or a name of a module or class; and in a function
    where it is used over more than SHORT lines.
    """
    banned, wrong = lambda name: name.strip("_") in BANNED, []
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION):
            wrong += [f"{node.name}({name})" for name in filter(banned, arguments(node))]
            places: dict[str, list[int]] = {}
            for name in (one for one in ast.walk(node) if isinstance(one, ast.Name)):
                places.setdefault(name.id, []).append(name.lineno)
            long = {name for name, lines in places.items() if max(lines) - min(lines) > SHORT}
            wrong += [f"{node.name}: {name}" for name in filter(banned, long - {*arguments(node)})]
        if isinstance(node, FUNCTION | ast.ClassDef) and banned(node.name):
            wrong.append(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            targets = [one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)]
            names = [
                name for one in targets for name in ast.walk(one) if isinstance(name, ast.Name)
            ]
            wrong += [one.id for one in names if isinstance(one.ctx, ast.Store) and banned(one.id)]
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and banned(node.attr)
        ):
            wrong.append(f".{node.attr}")
        if isinstance(node, FUNCTION | ast.ClassDef | ast.Module):
            words = (ast.get_docstring(node) or "-").split()
            wrong += [" ".join(words[:4])] * (words[0].strip(",") in QUESTIONS)
    return wrong


def test_names_and_docstrings_say_what_things_are():
    """A reader who meets `made` in the middle of a function has to look for what it is."""
    wrong = [
        f"{path.relative_to(PACKAGE)}: {one}"
        for path in FILES
        if path.name not in OTHER_PROCESSES
        for one in unnamed(ast.parse(path.read_text()))
    ]
    assert not wrong, "\n".join(wrong)
