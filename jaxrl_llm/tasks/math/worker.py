"""Checks math answers, where needed in worker processes, so that none can hang or end the run.

What numbers and notation do not settle, an `AnswerChecker` asks a worker: this module in a fresh
Python, without the caller's main module, JAX, and most environment variables. It reads a JSON list
`[truth, answer, question, seconds]` a line and writes equal, different, timeout or crash.
"""

import importlib.util
import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import weakref
from enum import Enum
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Self

import jaxrl_llm
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.math.expression import Node, parse
from jaxrl_llm.tasks.math.grade import same

if TYPE_CHECKING:
    import sympy

logger = logging.getLogger(__name__)

_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT")
_WALL = 200.0  # wall-clock seconds for one of CPU time until a worker counts as stuck
_START = 300.0  # seconds a worker may take to import its libraries
_MEMORY = 4 << 30  # bytes of address space a comparison may use
_DIGITS = 100  # precision of a numerical comparison
_EXITS = {0: "equal", 1: "different"} | dict.fromkeys(  # the kernel's signals at a limit
    (-signal.SIGPROF, -signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL), "timeout"
)
_WARMING = (  # compared at start: else sympy would load its parts anew in each forked child
    (r"2\sqrt{3}", r"3\sqrt[3]{2}"),
    (r"7\pi", r"\frac{43}{2}\sqrt{2}"),
    ("6-5i", "6+5i"),
    (r"3x+2\ln y", r"\sin x+e^{y}"),
    (r"\frac{x-1}{x+1}", r"\frac{(x-1)^2}{x^2+1}"),
)

_Process = subprocess.Popen[str]


class Verdict(Enum):
    """The outcome of one comparison; UNDECIDED is neither right nor wrong."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


class _AlgebraNeededError(Exception):
    """Numbers and notation alone do not decide whether two expressions are equal."""


def _no_algebra(truth: Node, answer: Node) -> bool:
    raise _AlgebraNeededError


class AnswerChecker:
    """Compares answers with truths; where that takes algebra, in worker processes.

    A comparison has `seconds` of CPU time, then a second try with twice that, so a verdict does not
    depend on the machine's load. Thread-safe. Raises UserError if the workers do not start.
    """

    def __init__(self, workers: int = 2, seconds: float = 1.0):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("checking math answers needs math-verify: pip install math-verify")
        self._seconds = seconds
        self._processes: set[_Process] = set()
        self._finalizer = weakref.finalize(self, _stop_all, self._processes)
        self._idle: queue.SimpleQueue[_Process | None] = queue.SimpleQueue()
        try:
            for process in [self._spawn() for _ in range(workers)]:  # all start before one is ready
                self._idle.put(self._ready(process))
        except UserError:
            self.close()
            raise

    def check(self, truth: str, answer: str, question: str = "") -> Verdict:
        """Whether the answer is the truth, worked out as far, and not copied from the question."""
        try:
            equal = same(truth, answer, question, _no_algebra)
            return Verdict.EQUAL if equal else Verdict.DIFFERENT
        except _AlgebraNeededError:
            pass
        reply = ""
        for seconds in (self._seconds, 2 * self._seconds):
            reply = self._ask(json.dumps([truth, answer, question, seconds]), _WALL * seconds)
            if reply in ("equal", "different"):
                return Verdict(reply)
        logger.warning("math answer not checked (%s): %.100r", reply or "a worker ended", answer)
        return Verdict.UNDECIDED

    def _ask(self, line: str, timeout: float) -> str:
        """A worker's reply to a line, or "" if it was dead or stuck and has been killed.

        An entry taken from the queue always returns to it: the worker, or None to start another.
        """
        process, reply = self._idle.get(), ""
        try:
            if not self._finalizer.alive:
                raise UserError("math answers cannot be checked: the checker is closed")
            process = process or self._ready(self._spawn())
            reply = _reply(process, timeout, line)
            return reply
        finally:
            if process is not None and not reply:
                self._end(process)
                process = None
            self._idle.put(process)

    def _spawn(self) -> _Process:
        """A new worker, which gets no secrets from the environment and no Ctrl-C."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        package = str(Path(jaxrl_llm.__file__).parents[1])
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "jaxrl_llm.tasks.math.worker"],
                env=kept | {"PYTHONPATH": package, "PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"a math answer worker cannot be started: {error}") from error
        self._processes.add(process)
        return process

    def _ready(self, process: _Process) -> _Process:
        if _reply(process, _START) != "ready":
            self._end(process)
            raise UserError("a math answer worker did not start: see its message above")
        return process

    def _end(self, process: _Process) -> None:
        self._processes.discard(process)
        _stop(process)

    def close(self) -> None:
        """Ends the workers; garbage collection and the end of the program do the same."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _reply(process: _Process, timeout: float, line: str = "") -> str:
    """A worker's next line, after `line` is sent; "" if it has ended or takes over `timeout` s."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if line:
            process.stdin.write(line + "\n")
            process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline().strip() if wait([process.stdout.fileno()], timeout) else ""


def _stop_all(processes: set[_Process]) -> None:
    while processes:
        _stop(processes.pop())


def _stop(process: _Process) -> None:
    process.kill()
    process.communicate()


def in_sympy(node: Node) -> "sympy.Expr":
    """The expression for the algebra system, in exact numbers; every name is a plain symbol."""
    import sympy

    if node.op in ("number", "scientific"):
        return sympy.Rational(node.value)
    if node.op == "symbol":
        constants = {"\\pi": sympy.pi, "e": sympy.E, "i": sympy.I, "\\infty": sympy.oo}
        return constants.get(str(node.value)) or sympy.Symbol(str(node.value))
    args = [in_sympy(arg) for arg in node.args]
    operations = {
        "sum": sympy.Add,
        "product": sympy.Mul,
        "negative": lambda x: -x,
        "degree": lambda x: x * sympy.pi / 180,
        "quotient": lambda x, y: x / y,
        "power": sympy.Pow,
        "root": lambda x, n: sympy.Pow(x, 1 / n),
        "log": lambda x, base=10: sympy.log(x, base),
        "ln": sympy.log,
        "arcsin": sympy.asin,
        "arccos": sympy.acos,
        "arctan": sympy.atan,
        "absolute": sympy.Abs,
        "binom": sympy.binomial,
        "lfloor": sympy.floor,
        "lceil": sympy.ceiling,
    }
    return (operations.get(node.op) or getattr(sympy, node.op))(*args)


def equivalent(truth: Node, answer: Node) -> bool:
    """Whether math-verify takes the two for the same value."""
    import math_verify

    gold, given = in_sympy(truth), in_sympy(answer)
    return math_verify.verify(gold, given, numeric_precision=_DIGITS, timeout_seconds=0)


def judge(truth: str, answer: str, question: str, seconds: float) -> str:
    """The reply for a pair, found by a forked child that the kernel kills when its time is up."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            _limit_time(seconds)
            code = 0 if same(truth, answer, question, equivalent) else 1
        finally:
            os._exit(code)
    return _EXITS.get(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "crash")


def _limit_time(seconds: float) -> None:
    """Limits CPU time, and far more generously wall-clock time, for a child that waits forever."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL / 2 * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2, int(seconds) + 2))


def _limit_memory() -> None:
    """Caps the address space of this process and its children, on Linux (macOS cannot)."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _serve() -> None:
    """The main loop of a worker: one line of output for each line of input."""
    _limit_memory()
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    for truth, answer in _WARMING:
        equivalent(parse(truth), parse(answer))
    print("ready", file=replies)
    for line in sys.stdin:
        print(judge(*json.loads(line)), file=replies)


if __name__ == "__main__":
    _serve()
