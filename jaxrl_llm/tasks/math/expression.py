r"""Parses a scalar answer in LaTeX into a small tree.

Nothing but rational numbers of bounded size is evaluated, so no text can make it slow.
"""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp".split()  # noqa: SIM905
)
GREEK = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|kappa|lambda|mu|nu|xi|rho|sigma|"
    "tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega"
)
CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
_DEPTH = 40  # the most nested groups
_BITS = 1 << 14  # the most in a computed number
_DIGITS = 1000  # the most in a written number
_SYMBOL = rf"([A-Za-z]|\\(?:{GREEK}|pi|infty)(?![A-Za-z]))"
_SUBSCRIPT = r"_(?:\{([A-Za-z0-9]+)\}|([A-Za-z0-9])(?![0-9]))"
_APPLIED = r"\(\s*(-?\d+|[a-z])\s*\)"  # I(0), f(x): a name, not a product
_FUNCTION = "|".join(sorted(FUNCTIONS))
_COMMAND = rf"\\({_FUNCTION}|frac|binom|sqrt|lfloor|lceil)(?![A-Za-z])"
_BEGINS = rf"[({{\[]|{_SYMBOL}|{_COMMAND}"  # a factor that needs no multiplication sign before it
_RAISED = re.compile(r"(?<=[A-Za-z)}])\s*\d+(?:\.\d+)?\s*\^")  # nor does the number of n2^{n-1}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"
_SCIENTIFIC = (  # 3e-5 is a printed number, 3e5 too, 3e a product
    rf"{_NUMBER}(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{{\s*([+-]?\d{{1,3}})\s*\}}|(\d))(?!\s*[\^!.\d])"
    r"|[eE]([+-]?\d{1,3})(?![\w.^!]))|10\s*\^\s*\{\s*(-\d{1,3})\s*\}(?!\s*[\^!.\d])"  # 10^{-3} too
)
_REPEATING = r"(\d*)\.(\d*)\\overline\s*\{(\d{1,40})\}"
_MIXED = (
    r"(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)(?!\d))(?!\s*[\^!])"
    r"|(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\^!.\d])"
)


class UnreadableError(Exception):
    """The text is not in a notation that `parse` understands."""


@dataclass(frozen=True)
class Node:
    """An operation with arguments, or what has a value: a symbol, or a number by its notation."""

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | str = ""

    def walk(self) -> Iterator["Node"]:
        yield self
        for arg in self.args:
            yield from arg.walk()

    @cached_property
    def key(self) -> str:
        """The expression as text, the same however its terms and factors are ordered."""
        if not self.args:
            return f"{self.op}:{self.value}"
        keys = [arg.key for arg in self.args]
        return f"{self.op}({','.join(sorted(keys) if self.op in ('sum', 'product') else keys)})"

    @cached_property
    def rational(self) -> Fraction | None:
        """The exact value; None if it is not a rational number, or has too many bits."""
        if isinstance(self.value, Fraction):
            return self.value
        if self.op not in _ARITHMETIC:
            return None
        result = Fraction(0) if self.op == "negative" else self.args[0].rational
        for arg in self.args if self.op == "negative" else self.args[1:]:
            if result is None or arg.rational is None:
                return None
            result = _ARITHMETIC[self.op](result, arg.rational)
        return result

    @property
    def literal(self) -> bool:
        """True if it is written as a result: an integer, decimal or fraction, signed or not."""
        if self.op == "negative":
            return self.args[0].op != "negative" and self.args[0].literal
        if self.op == "quotient":
            bare = [arg.args[0] if arg.op == "negative" else arg for arg in self.args]
            return all(isinstance(arg.value, Fraction) for arg in bare)
        return isinstance(self.value, Fraction)

    @property
    def symbols(self) -> set[str]:
        """The names in it, including constants'."""
        return {str(part.value) for part in self.walk() if part.op == "symbol"}


def number(value: int | Fraction, notation: str = "number") -> Node:
    """The node of a number."""
    return Node(notation, (), Fraction(value))


def _bits(number: Fraction) -> int:
    return number.numerator.bit_length() + number.denominator.bit_length()


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    undefined = exponent.denominator != 1 or (base == 0 and exponent <= 0)
    return None if undefined or abs(exponent) * _bits(base) > _BITS else base ** int(exponent)


def _bounded(operation: Callable[..., Fraction | None]) -> Callable[..., Fraction | None]:
    def result(left: Fraction, right: Fraction) -> Fraction | None:
        found = operation(left, right)
        return None if found is None or _bits(found) > _BITS else found

    return result


_ARITHMETIC = {
    "negative": _bounded(operator.sub),
    "sum": _bounded(operator.add),
    "product": _bounded(operator.mul),
    "quotient": _bounded(lambda left, right: left / right if right else None),
    "power": _bounded(_power),
}


def parse(text: str) -> Node:
    """The tree of the whole text; UnreadableError if it is not one expression."""
    reader = _Reader(text)
    node = reader.sum(0)
    if not reader.find("$"):
        raise reader.error("more than an expression")
    return node


class _Reader:
    """Recursive descent over the text; `depth` bounds the recursion."""

    def __init__(self, text: str):
        self._text, self._at = text, 0

    def error(self, message: str) -> UnreadableError:
        return UnreadableError(f"{message}: {self._text[self._at : self._at + 10]!r}")

    def find(self, pattern: str) -> re.Match[str] | None:
        """Goes past what comes next, if it is this, and returns it."""
        return re.compile(rf"\s*(?:{pattern})").match(self._text, self._at)

    def _groups(self, pattern: str) -> list[str]:
        """The groups of what comes next, which is moved past; none if it is not this."""
        match = self.find(pattern)
        if match is None:
            return []
        self._at = match.end()
        return [group for group in match.groups() if group is not None]

    def _take(self, pattern: str) -> str:
        """The text of what comes next, which is moved past; "" if it is not this."""
        return "".join(self._groups(f"({pattern})")[:1])

    def sum(self, depth: int) -> Node:
        terms: list[Node] = []
        while not terms or self.find("[+-]"):
            negative = self._take("[+-]") == "-"
            term = self._product(depth)
            terms.append(Node("negative", (term,)) if negative else term)
        return _joined("sum", terms)

    def _product(self, depth: int) -> Node:
        factors = [self._power(depth)]
        while True:
            if self._take(r"/|\\div(?![A-Za-z])"):
                depth += 1
                factors = [Node("quotient", (_joined("product", factors), self._power(depth)))]
            elif self._take(r"\*|\\(?:cdot|times)(?![A-Za-z])") or self._factor_begins():
                factors.append(self._power(depth))
            else:
                return _joined("product", factors)

    def _factor_begins(self) -> bool:
        return bool(self.find(_BEGINS) or _RAISED.match(self._text, self._at))

    def _power(self, depth: int) -> Node:
        node = self._atom(depth)
        for sign, op in (("!", "factorial"), (r"\\degree(?![A-Za-z])", "degree")):
            node = Node(op, (node,)) if self._take(sign) else node
        if self._take(r"\^"):
            node = Node("power", (node, self._argument(depth + 1)))
        return node

    def _argument(self, depth: int, *, more: bool = False) -> Node:
        """An argument of `^`, `\\frac`, `\\sqrt`: a group or a character; `more` may follow it."""
        if digit := self._take(r"\d"):
            if not more and re.match(r"[\d.]", self._text[self._at :]):
                raise self.error("an argument of several digits needs braces")
            return number(int(digit))
        if not self.find(rf"\{{|{_SYMBOL}|{_COMMAND}"):
            raise self.error("no argument")
        return self._atom(depth)

    def _group(self, closing: str, depth: int) -> Node:
        node = self.sum(depth + 1)
        if not self._take(closing):
            raise self.error(f"no {closing}")
        return node

    def _atom(self, depth: int) -> Node:
        if depth > _DEPTH:
            raise self.error("nested too deeply")
        if self.find(r"\.?\d"):
            return self._number()
        if opening := self._take(r"[({|\[]"):
            node = self._group({"(": r"\)", "{": r"\}", "|": r"\|", "[": r"\]"}[opening], depth)
            if opening == "[" and node.op != "sum":
                raise self.error("[x] may be the floor of x")
            return Node("absolute", (node,)) if opening == "|" else node
        if name := self._take(_SYMBOL):
            name += "".join(f"_{index}" for index in self._groups(_SUBSCRIPT))
            if name[0].isupper() or name[0] in "fgh":
                name += "".join(f"({argument})" for argument in self._groups(_APPLIED))
            return Node("symbol", (), name)
        if command := self._groups(_COMMAND):
            return self._command(command[0], depth + 1)
        raise self.error("no expression")

    def _number(self) -> Node:
        if parts := self._groups(_SCIENTIFIC):
            *factor, exponent = parts
            return number(Fraction(*factor or "1") * Fraction(10) ** int(exponent), "scientific")
        if parts := self._groups(_REPEATING):
            whole, fixed, cycle = parts
            repeated = Fraction(int(cycle), 10 ** len(cycle) - 1)
            value = int(whole or 0) + (int(fixed or 0) + repeated) / 10 ** len(fixed)
            return number(value, "repeating")
        parts = self._groups(_MIXED) or self._groups(_NUMBER)
        if max(map(len, parts)) > _DIGITS:
            raise self.error("a number of too many digits")
        if len(parts) == 1:
            return number(Fraction(parts[0]))
        whole, above, below = map(int, parts)
        if above >= below:
            raise self.error("not a mixed number")
        return number(whole + Fraction(above, below), "mixed")

    def _command(self, name: str, depth: int) -> Node:
        if name in ("frac", "binom"):
            upper = self._argument(depth, more=True)
            return Node("quotient" if name == "frac" else name, (upper, self._argument(depth)))
        if name in ("lfloor", "lceil"):
            return Node(name, (self._group(rf"\\r{name[1:]}", depth),))
        if name == "sqrt":
            index = self._group(r"\]", depth) if self._take(r"\[") else number(2)
            inner = self._group(r"\)", depth) if self._take(r"\(") else self._argument(depth)
            return Node("root", (inner, index))
        base = (self._argument(depth, more=True),) if name == "log" and self._take("_") else ()
        exponent = self._argument(depth, more=True) if self._take(r"\^") else None
        if self._take(r"\("):
            inner = self._group(r"\)", depth)
        else:
            factors = [self._power(depth)]
            while self._factor_begins() and not self.find(rf"\(|\\(?:{_FUNCTION})"):
                factors.append(self._power(depth))
            inner = _joined("product", factors)
        if exponent is not None and exponent.rational == -1 and "arc" + name in FUNCTIONS:
            return Node("arc" + name, (inner,))
        e = Node("symbol", (), "e")
        node = Node("power", (e, inner)) if name == "exp" else Node(name, (inner, *base))
        return node if exponent is None else Node("power", (node, exponent))


def _joined(op: str, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Node(op, tuple(nodes))
