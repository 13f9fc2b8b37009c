"""Mutation tests of what guards work: does a test notice when a guard is taken away?

    python -m tests.mutants                       # all mutants of all files: hours
    python -m tests.mutants --count 20 --seed 3   # a random sample
    python -m tests.mutants --only storage        # those of one file

A mutant is the file with one change: a condition turned round, a `raise` or a call of its own
taken out, an `and` made an `or`. It survives if all tests of the file pass. Survivors that no test
can see are listed with a reason in tests/survivors.json; any other makes the command fail.
"""

import argparse
import ast
import copy
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "tests/survivors.json"
TESTS = {
    "storage.py": ["training/test_storage.py"],
    "distributed.py": ["training/test_distributed.py", "training/test_shares.py"],
    "training/checkpoint.py": ["training/test_checkpoint.py", "training/test_resume.py"],
    "training/folder.py": [
        "training/test_folder.py",
        "training/test_resume.py",
        "training/test_commands.py",
        "training/test_evaluate.py",
    ],
    "training/record.py": ["training/test_folder.py"],
    "training/leaving.py": ["training/test_leaving.py", "training/test_checkpoint.py"],
    "rollouts/vllm/sync.py": ["rollouts/test_sync.py"],
    "rollouts/vllm/proof.py": ["rollouts/test_proof.py"],
}
SPOKEN = {"say", "warning", "print", "_say"}  # calls that only tell people something


@dataclass(frozen=True)
class Mutant:
    """A file with one change; `name` says which, without line numbers."""

    file: str
    name: str
    line: int
    source: str


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file of the package."""
    tree = ast.parse((ROOT / "jaxrl_llm" / file).read_text())
    inside = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {id(node): function.name for node in ast.walk(function)}
    for number, node in enumerate(ast.walk(tree)):
        changed = copy.deepcopy(tree)
        other = next(x for i, x in enumerate(ast.walk(changed)) if i == number)
        if kind := _change(other, changed):
            text = ast.unparse(getattr(node, "test", node)).splitlines()[0]
            name = f"{inside.get(id(node), 'module')}: {kind} {text}"
            source = ast.unparse(ast.fix_missing_locations(changed))
            yield Mutant(file, name, getattr(node, "lineno", 0), source)


def _change(node: ast.AST, tree: ast.Module) -> str:
    """Changes the node in place; returns how, or an empty string if nothing can be changed."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        if not isinstance(node.test, ast.Constant):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return "not"
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return "and/or"
    elif isinstance(node, ast.Raise) or _does_something(node):
        for parent in ast.walk(tree):
            for body in (getattr(parent, name, []) for name in ("body", "orelse", "finalbody")):
                if isinstance(body, list) and node in body:
                    body[body.index(node)] = ast.Pass()
                    return "without"
    return ""


def _does_something(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(call := node.value, ast.Call | ast.Await):
        return False
    call = call.value if isinstance(call, ast.Await) else call
    called = getattr(call, "func", None)
    return getattr(called, "attr", getattr(called, "id", "")) not in SPOKEN


def survives(mutant: Mutant, tree: Path, seconds: float) -> bool:
    """Whether all tests of the file pass with the mutant, in a copy of the checkout, in so many seconds."""
    target = tree / "jaxrl_llm" / mutant.file
    before = target.read_text()
    target.write_text(mutant.source)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setpgid(0, 0)
            code = _tested(mutant.file, tree)
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.2)
    if not ended[0]:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    target.write_text(before)
    return ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 0


def _tested(file: str, tree: Path) -> int:
    import pytest

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.chdir(tree)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "jaxrl_llm")]:
        del sys.modules[name]  # those of the checkout, which started this
    sys.path.insert(0, str(tree))
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries imported before
    return int(pytest.main([*options, *(f"tests/{name}" for name in TESTS[file])]))


def _try(mutant: Mutant, seconds: float) -> tuple[Mutant, bool, float]:
    global _TREE
    if _TREE is None:  # a copy for each worker; libraries are imported once and inherited
        _TREE = Path(tempfile.mkdtemp(prefix="mutants-"))
        for name in ("jaxrl_llm", "tests", "configs"):
            shutil.copytree(ROOT / name, _TREE / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, _TREE)
        sys.dont_write_bytecode = True
        sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
        for library in ("flax.nnx", "jax", "numpy", "optax", "orbax.checkpoint", "transformers"):
            __import__(library)
    start = time.monotonic()
    return mutant, survives(mutant, _TREE, seconds), time.monotonic() - start


_TREE: Path | None = None


def main() -> int:
    """Tries the mutants; 1 if one survives that is not known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, help="how many of the mutants, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    files = [file for file in TESTS if given.only in file]
    found = [mutant for file in files for mutant in mutants(file)]
    if given.count is not None:
        found = random.Random(given.seed).sample(found, min(given.count, len(found)))
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    survived, tried = [], Counter[str]()
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.jobs) as pool:
        whole = [Mutant(x, "", 0, (ROOT / "jaxrl_llm" / x).read_text()) for x in files]
        longest = 60.0  # seconds of a mutant: whose tests take longer was noticed
        for mutant, lives, seconds in pool.imap_unordered(partial(_try, seconds=1800.0), whole):
            print(f"{mutant.file}: its tests take {seconds:.0f} s", flush=True)
            longest = max(longest, 3 * seconds)
            if not lives:
                raise SystemExit(f"they fail without a mutant: {' '.join(TESTS[mutant.file])}")
        trials = pool.imap_unordered(partial(_try, seconds=longest), found)
        for done, (mutant, lives, _) in enumerate(trials, 1):
            tried[mutant.file] += 1
            if lives:
                survived.append(mutant)
            if lives or done % 10 == 0:
                said = f"{mutant.file}:{mutant.line} {mutant.name}" if lives else ""
                print(f"{done}/{len(found)}, {len(survived)} survive  {said}", flush=True)
    unknown = [m for m in survived if m.name not in known.get(m.file, {})]
    for file, count in tried.items():
        alive = sum(mutant.file == file for mutant in survived)
        print(f"{file}: {count} mutants, {alive} survive")
    for mutant in unknown:
        print(f"unknown survivor: jaxrl_llm/{mutant.file}:{mutant.line} {mutant.name}")
    return int(bool(unknown))


if __name__ == "__main__":
    raise SystemExit(main())
