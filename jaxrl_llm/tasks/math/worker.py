"""Checks math answers in worker processes, so that none can hang or end the run.

A worker is this module. It reads the texts too, and answers equal, different or failed.
"""

import importlib.util
import logging
from collections.abc import Iterable
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Self

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.math.expression import Node, parse
from jaxrl_llm.tasks.math.grade import same
from jaxrl_llm.tasks.workers import Workers, serve

if TYPE_CHECKING:
    import sympy

logger = logging.getLogger(__name__)

_WARMING = r"\sqrt[3]{2}+\frac{x^2+5i}{x-1}", r"e^{y}+\pi\sin x"  # load parts of sympy


class Verdict(Enum):
    """The outcome of one comparison; UNDECIDED is neither right nor wrong."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


class AnswerChecker:
    """Compares answers with truths in worker processes.

    A comparison has `seconds` of CPU time, then a second try with twice that, so a verdict does not
    depend on the machine's load. Thread-safe. Raises UserError if the workers do not start.
    """

    def __init__(self, workers: int = 2, seconds: float = 1.0):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("checking math answers needs math-verify: pip install math-verify")
        self._seconds = seconds
        self._workers = Workers(workers, "jaxrl_llm.tasks.math.worker")

    def check(self, truth: str, answer: str, question: str = "") -> Verdict:
        """True if the answer is the truth, worked out as far, and not copied from the question."""
        for seconds in (self._seconds, 2 * self._seconds):
            reply = self._workers.ask([truth, answer, question], seconds)
            if reply in ("equal", "different"):
                return Verdict(reply)
        logger.warning("math answer not checked (it takes too long, or fails): %.100r", answer)
        return Verdict.UNDECIDED

    def close(self) -> None:
        """Ends the workers; garbage collection and the end of the program do the same."""
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def equals_any(
    checker: AnswerChecker, truths: Iterable[str], answer: str, question: str = ""
) -> Verdict:
    """True if the answer is one of the truths; UNDECIDED if that hangs on a comparison that is."""
    verdicts = {checker.check(truth, answer, question) for truth in truths}
    known = (v for v in (Verdict.EQUAL, Verdict.UNDECIDED) if v in verdicts)
    return next(known, Verdict.DIFFERENT)


def in_sympy(node: Node) -> "sympy.Expr":
    """The expression for the algebra system, in exact numbers; every name is a plain symbol."""
    import sympy

    if isinstance(node.value, Fraction):
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
    """True if math-verify takes the two for the same value, at 100 digits where it computes."""
    import math_verify

    gold, given = in_sympy(truth), in_sympy(answer)
    return math_verify.verify(gold, given, numeric_precision=100, timeout_seconds=0)


def _answer(truth: str, answer: str, question: str) -> str:
    return "equal" if same(truth, answer, question, equivalent) else "different"


def warm() -> None:
    """Loads what a comparison needs."""
    equivalent(*map(parse, _WARMING))


if __name__ == "__main__":
    serve(_answer, warm)
