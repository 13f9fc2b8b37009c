"""Mutation tests of what guards work: does a test notice when a guard is taken away?

    python -m tests.mutants                    # all mutants of all files: some hours
    python -m tests.mutants storage.py locked  # those of a file, and of functions named so
    python -m tests.mutants --quick            # by the tests that start no processes; the rest later, by name

A mutant is the file with one change: a condition turned round, a `raise` or a call of its own
taken out, an `and` made an `or`. The tests of each file run once, to see which of them execute which
lines, in processes that they start too. A mutant survives if all tests that execute its lines pass,
the shortest first. Survivors that no test can see are listed with a reason in tests/survivors.json; any
other makes the command fail.
"""

import argparse
import ast
import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KNOWN = ROOT / "tests/survivors.json"
TESTS = {
    "storage.py": ["training/test_storage.py", "training/test_folder.py"],
    "distributed.py": ["training/test_distributed.py", "training/test_shares.py"],
    "training/checkpoint.py": ["training/test_checkpoint.py", "training/test_resume.py"],
    "training/folder.py": [
        "training/test_folder.py",
        "training/test_resume.py",
        "training/test_commands.py",
        "training/test_evaluate.py",
    ],
    "training/record.py": ["training/test_folder.py", "training/test_resume.py"],
    "training/leaving.py": ["training/test_leaving.py", "training/test_checkpoint.py"],
    "rollouts/vllm/sync.py": [
        "rollouts/test_sync.py",
        "rollouts/test_checksums.py",
        "rollouts/test_vllm.py",
    ],
    "rollouts/vllm/proof.py": ["rollouts/test_proof.py", "rollouts/test_checksums.py"],
}
# files of tests that mostly start processes; tried last, and not by --quick
PROCESSES = {"training/test_resume.py", "training/test_commands.py", "training/test_distributed.py"}
SPOKEN = {"say", "warning", "print", "_say"}  # calls that only tell people something
MEMORY = 12 * 2**30  # bytes that the tests may take; a loop without end takes any
LINES, NOW = (
    "MUTANTS_LINES",
    "MUTANTS_TEST",
)  # in the environment: where executed lines go, of which test


@dataclass(frozen=True)
class Mutant:
    """A file with one change in some of its lines; `name` says which, without line numbers."""

    file: str
    name: str
    lines: range
    source: str


def mutants(file: str) -> Iterator[Mutant]:
    """All mutants of a file of the package."""
    tree = ast.parse((ROOT / "jaxrl_llm" / file).read_text())
    inside = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside |= {id(node): function.name for node in ast.walk(function)}
    for kind, node, holder, place, new in list(_changes(tree)):
        name = f"{inside[id(node)]}: {kind} {ast.unparse(node).splitlines()[0]}"
        before, holder[place] = holder[place], new
        yield Mutant(file, name, range(node.lineno, node.end_lineno + 1), ast.unparse(tree))
        holder[place] = before


def _changes(tree: ast.Module) -> Iterator[tuple[str, Any, Any, Any, ast.AST]]:
    """Kind and place of each change: in which list, or whose attributes, and what comes there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            if not isinstance(node.test, ast.Constant):
                yield "not", node.test, vars(node), "test", ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.BoolOp):
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", node, vars(node), "op", other
        bodies = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        for body in (x for x in bodies if isinstance(x, list)):
            for i, statement in enumerate(body):
                if isinstance(statement, ast.Raise) or _does_something(statement):
                    yield "without", statement, body, i, ast.Pass()


def _does_something(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(call := node.value, ast.Call | ast.Await):
        return False
    call = call.value if isinstance(call, ast.Await) else call
    called = getattr(call, "func", None)
    return getattr(called, "attr", getattr(called, "id", "")) not in SPOKEN


class Tests:
    """The tests of files, in a copy of the checkout: imported once, run in children."""

    def __init__(self, files: list[str]):
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        for name in ("jaxrl_llm", "tests", "configs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, self.folder)
        traced = f"import os\nif '{LINES}' in os.environ:\n    from tests.mutants import trace\n    trace()\n"
        (self.folder / "sitecustomize.py").write_text(traced)
        os.environ |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chdir(self.folder)
        sys.dont_write_bytecode = True
        sys.path[:] = [str(self.folder), *(x for x in sys.path if x not in ("", str(ROOT)))]
        for name in [x for x in sys.modules if x.partition(".")[0] in ("tests", "jaxrl_llm")]:
            del sys.modules[name]  # those of the checkout, which started this
        from jax._src import xla_bridge

        os.environ["FORKED_LATER"] = ""
        self._quiet(lambda: _pytest([f"tests/{x}" for x in files], "--collect-only"))
        del os.environ["FORKED_LATER"]
        assert not xla_bridge.backends_are_initialized(), "a test makes arrays where it is imported"
        self.seconds: dict[str, float] = {}
        self.executed: dict[str, set[tuple[str, int]]] = {}

    def learn(self, files: list[str], seconds: float) -> bool:
        """Runs the tests of files once, and notes their lines and seconds; whether they pass."""
        lines, said = self.folder / "lines", self.folder / "said.json"
        os.environ[LINES] = str(lines)
        passed = self._child(lambda: _learned([f"tests/{x}" for x in files], said), seconds)
        del os.environ[LINES]
        if not passed:
            return False
        found: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for line in lines.read_text().splitlines():
            place, file, number = line.split("\t")
            found[place].add((file, int(number)))
        for test, (took, fixtures) in json.loads(said.read_text()).items():
            self.seconds[test] = took
            self.executed[test] = set.union(found[test], *(found[x] for x in fixtures))
        return True

    def survives(self, mutant: Mutant) -> bool:
        """Whether all tests that execute its lines pass with the mutant."""
        wanted = {(mutant.file, line) for line in mutant.lines}
        chosen = [test for test, lines in self.executed.items() if lines & wanted]
        chosen.sort(key=self.seconds.__getitem__)
        target = self.folder / "jaxrl_llm" / mutant.file
        before = target.read_text()
        target.write_text(mutant.source)  # for processes that tests start
        changed = compile(mutant.source, str(target), "exec")
        limit = 20.0 + 4 * sum(map(self.seconds.__getitem__, chosen))
        try:
            return not chosen or self._child(lambda: _replace(changed) or _pytest(chosen), limit)
        finally:
            target.write_text(before)

    def _child(self, work, seconds: float) -> bool:
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
                sys.modules["tests.conftest"].make_devices()
                code = self._quiet(work)
            finally:
                os._exit(code)
        until = time.monotonic() + seconds
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.05)
        if not ended[0]:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return ended[0] == child and os.waitstatus_to_exitcode(ended[1]) == 0

    def _quiet(self, work) -> int:
        kept, log = os.dup(1), os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        try:
            return int(work() or 0)
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(log)
            os.close(kept)


def _pytest(chosen: list[str], *more: str, plugins=()) -> int:
    import pytest

    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *more]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries imported before
    return int(pytest.main([*options, *chosen], plugins=list(plugins)))


def _replace(changed: CodeType) -> None:
    """Gives functions of an imported file the code that they have in a changed one."""
    codes, waiting = {}, [changed]
    while waiting:
        code = waiting.pop()
        codes[code.co_qualname] = code
        inner = [x for x in code.co_consts if isinstance(x, CodeType)]
        waiting += [x for x in inner if "<" not in x.co_qualname]
    for function in [x for x in gc.get_objects() if isinstance(x, FunctionType)]:
        new = codes.get(function.__code__.co_qualname)
        if new and function.__code__.co_filename == changed.co_filename:
            function.__code__ = new


def _learned(chosen: list[str], said: Path) -> int:
    """Runs tests with the lines of each noted; `said` gets their seconds and wider fixtures."""
    import pytest

    found: dict[str, tuple[float, list[str]]] = {}

    class Noted:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item):
            os.environ[NOW], start = item.nodeid, time.monotonic()
            yield
            info = item._fixtureinfo.name2fixturedefs
            wide = [x for x, defs in info.items() if defs[-1].scope != "function"]
            found[item.nodeid] = time.monotonic() - start, wide
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef):
            before = os.environ[NOW]
            if fixturedef.scope != "function":
                os.environ[NOW] = fixturedef.argname
            try:
                return (yield)
            finally:
                os.environ[NOW] = before

    trace()
    code = _pytest(chosen, plugins=[Noted()])
    sys.settrace(None)
    said.write_text(json.dumps(found))
    return code


def trace() -> None:
    """Notes the lines of the package's guarded files that this process executes from now on."""
    package = f"{os.environ['PYTHONPATH'].split(os.pathsep)[0]}/jaxrl_llm/"
    files = {package + name: name for name in TESTS}
    out = os.open(os.environ[LINES], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    seen = set()

    def executed(frame, event, _):
        place = os.environ.get(NOW, ""), files[frame.f_code.co_filename], frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            os.write(out, ("\t".join(map(str, place)) + "\n").encode())
        return executed

    def called(frame, event, argument):
        return executed if frame.f_code.co_filename in files else None

    threading.settrace(called)
    sys.settrace(called)


_TESTS: Tests | None = None
_FAILED = ""  # why there are none


def _begin(files: list[str]) -> None:
    global _TESTS, _FAILED
    made = Tests(files)
    if made.learn(files, 3600.0):
        _TESTS = made
    else:  # an error here would have the pool begin again without end
        log = (made.folder / "log").read_text()
        _FAILED = f"they fail without a mutant: {' '.join(files)}: {log[-2000:]}"


def _try(mutant: Mutant) -> tuple[Mutant, bool, float]:
    if _TESTS is None:
        raise RuntimeError(_FAILED)
    start = time.monotonic()
    return mutant, _TESTS.survives(mutant), time.monotonic() - start


def _is_meant(mutant: Mutant, names: list[str]) -> bool:
    return not names or any(x == mutant.file or x in mutant.name for x in names)


def main() -> int:
    """Tries the mutants; 1 if one survives that is not known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of files, or what stands in a mutant's name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="without tests that start processes")
    given = parser.parse_args()
    found = [x for file in TESTS for x in mutants(file) if _is_meant(x, given.names)]
    known = json.loads(KNOWN.read_text())
    files = {test for mutant in found for test in TESTS[mutant.file]}
    files = sorted(files - PROCESSES if given.quick else files)
    survived, tried, start = [], Counter(), time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(given.jobs, _begin, [files]) as pool:
        for done, (mutant, lives, took) in enumerate(pool.imap_unordered(_try, found), 1):
            tried[mutant.file] += 1
            if lives:
                survived.append(mutant)
            if lives or done % 10 == 0:
                said = (
                    f"{mutant.file}:{mutant.lines[0]} {mutant.name} ({took:.0f} s)" if lives else ""
                )
                print(f"{done}/{len(found)}, {len(survived)} survive  {said}", flush=True)
    unknown = [m for m in survived if m.name not in known.get(m.file, {})]
    for file, count in tried.items():
        alive = sum(mutant.file == file for mutant in survived)
        print(f"{file}: {count} mutants, {alive} survive")
    for mutant in unknown:
        print(f"unknown survivor: jaxrl_llm/{mutant.file}:{mutant.lines[0]} {mutant.name}")
    print(f"{time.monotonic() - start:.0f} s")
    return int(bool(unknown))


if __name__ == "__main__":
    raise SystemExit(main())
