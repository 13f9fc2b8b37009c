"""Decides by math-verify what needs algebra, each comparison in a forked child with a limit of CPU time.

Run as a module, never imported by the trainer: a JSON list `[truth, answer, question, seconds]` a line comes
in, one word goes out: equal, different, timeout or crash. It ends when its input does.
"""

import json
import logging
import os
import resource
import signal
import sys

import math_verify
import sympy

from jaxrl_llm.tasks.math.answer import same
from jaxrl_llm.tasks.math.expression import CONSTANTS, Node, parse

_MEMORY = 4 << 30  # bytes of address space a comparison may use
_WALL = 100.0  # seconds of the clock to one of CPU time, however busy the machine
_DIGITS = 100  # of a numerical comparison
_EQUAL, _DIFFERENT, _CRASH = 0, 1, 2
_WORDS = {_EQUAL: "equal", _DIFFERENT: "different"}
_TIMEOUTS = (-signal.SIGPROF, -signal.SIGALRM, -signal.SIGXCPU, -signal.SIGKILL)
_CONSTANTS = dict(zip(sorted(CONSTANTS), (sympy.oo, sympy.pi, sympy.E, sympy.I), strict=True))
_WARMING = (  # pairs that load here, once, what the algebra system would load in every child
    (r"2\sqrt{3}", r"3\sqrt[3]{2}"),
    (r"7\pi", "21.5"),
    ("6-5i", "6+5i"),
    (r"3x+2\ln y", r"\sin x+e^{y}"),
    (r"\frac{x-1}{x+1}", r"\frac{(x-1)^2}{x^2+1}"),
)
_NAMES = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan", "absolute": "Abs",
          "binom": "binomial", "lfloor": "floor", "lceil": "ceiling"}  # fmt: skip


def in_sympy(node: Node) -> sympy.Expr:
    """The expression for the algebra system, in exact numbers."""
    if node.op in ("number", "scientific"):
        return sympy.Rational(node.value)
    if node.op == "symbol":
        return _CONSTANTS.get(str(node.value)) or sympy.Symbol(str(node.value))
    args = [in_sympy(arg) for arg in node.args]
    if node.op == "log":
        return sympy.log(args[0], args[1] if len(args) > 1 else 10)
    function = _OPERATIONS.get(node.op) or getattr(sympy, _NAMES.get(node.op, node.op))
    return function(*args)


_OPERATIONS = {
    "sum": sympy.Add,
    "product": sympy.Mul,
    "negative": lambda x: -x,
    "degree": lambda x: x * sympy.pi / 180,
    "quotient": lambda x, y: x / y,
    "power": sympy.Pow,
    "root": lambda x, n: sympy.Pow(x, 1 / n),
}


def equivalent(truth: Node, answer: Node) -> bool:
    """Whether math-verify takes the two for the same value."""
    gold, given = in_sympy(truth), in_sympy(answer)
    return math_verify.verify(gold, given, numeric_precision=_DIGITS, timeout_seconds=0)


def judge(truth: str, answer: str, question: str, seconds: float) -> str:
    """The word for a pair, found by a child that the kernel ends when its time is spent."""
    child = os.fork()
    if child == 0:
        code = _CRASH
        try:
            _limit_time(seconds)
            code = _EQUAL if same(truth, answer, question, equivalent) else _DIFFERENT
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return "timeout" if code in _TIMEOUTS else _WORDS.get(code, "crash")


def _limit_time(seconds: float) -> None:
    """CPU time decides; the clock only ends a child that waits for what never comes."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 2, int(seconds) + 2))


def _limit_memory() -> None:
    """Caps the address space of this process and its children, where the system can (not on macOS)."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    """Answers one line for each line of input."""
    _limit_memory()
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    for pair in _WARMING:
        equivalent(*map(parse, pair))
    print("ready", file=replies)
    for line in sys.stdin:
        print(judge(*json.loads(line)), file=replies)


if __name__ == "__main__":
    main()
