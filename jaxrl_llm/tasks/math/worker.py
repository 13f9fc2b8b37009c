"""Checks math answers, where needed in worker processes, so that none can hang or end the run.

What numbers and notation do not settle, an `AnswerChecker` asks a worker: this module in a fresh
Python, without the caller's main module, JAX, and most environment variables. It reads a JSON list
`[truth, answer, question, seconds]` a line and writes equal, different or failed. A comparison that
takes too long ends its worker, and the next one finds a new worker.
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
_WARMING = r"\sqrt[3]{2}+\frac{x^2+5i}{x-1}", r"e^{y}+\pi\sin x"  # see `_serve`


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
        self._workers = [_Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:  # all start before one is ready
                worker.ready()
                self._idle.put(worker)
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
        for seconds in (self._seconds, 2 * self._seconds):
            worker = self._idle.get()
            try:
                if not self._finalizer.alive:
                    raise UserError("math answers cannot be checked: the checker is closed")
                reply = worker.ask([truth, answer, question, seconds], _WALL * seconds)
            finally:
                self._idle.put(worker)
            if reply in ("equal", "different"):
                return Verdict(reply)
        logger.warning("math answer not checked (it takes too long, or fails): %.100r", answer)
        return Verdict.UNDECIDED

    def close(self) -> None:
        """Ends the workers; garbage collection and the end of the program do the same."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A process that answers one question at a time; one that is lost is replaced when asked."""

    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process, which gets no secrets from the environment and no Ctrl-C."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        package = str(Path(jaxrl_llm.__file__).parents[1])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "jaxrl_llm.tasks.math.worker"],
                env=kept | {"PYTHONPATH": package, "PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"a math answer worker cannot be started: {error}") from error

    def ready(self) -> None:
        """Waits until the process can answer; UserError if it does not come to that."""
        if self._reply(_START) != "ready":
            raise UserError("a math answer worker did not start: see its message above")

    def ask(self, question: list, timeout: float) -> str:
        """The reply, or "" if the process had ended, or has ended or been stopped since."""
        if self.process is None:
            self.start()
            self.ready()
        return self._reply(timeout, json.dumps(question) + "\n")

    def _reply(self, timeout: float, line: str = "") -> str:
        """The next line of output, after `line` is sent; if there is none, the process is ended."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        reply = ""
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
            if wait([self.process.stdout.fileno()], timeout):
                reply = self.process.stdout.readline().strip()
        except BrokenPipeError:
            pass  # it has ended
        finally:
            if not reply:
                self.stop()
        return reply

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


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
    """Whether math-verify takes the two for the same value, at 100 digits where it computes."""
    import math_verify

    gold, given = in_sympy(truth), in_sympy(answer)
    return math_verify.verify(gold, given, numeric_precision=100, timeout_seconds=0)


def limit_time(seconds: float) -> None:
    """The kernel ends this process after so much CPU time, or far more time; 0 lifts the limit."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL / 2 * seconds)


def _limit_memory() -> None:
    """Caps the address space of this process, on Linux (macOS cannot)."""
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
    equivalent(*map(parse, _WARMING))  # no comparison's time goes into loading parts of sympy
    print("ready", file=replies)
    for line in sys.stdin:
        truth, answer, question, seconds = json.loads(line)
        limit_time(seconds)
        try:
            reply = "equal" if same(truth, answer, question, equivalent) else "different"
        except Exception:  # sympy and math-verify raise anything
            reply = "failed"
        limit_time(0)
        print(reply, file=replies)


if __name__ == "__main__":
    _serve()
