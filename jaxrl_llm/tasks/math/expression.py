r"""Parses a scalar answer in LaTeX into a small tree.

Nothing but rational numbers of bounded size is evaluated, so no text can make it slow.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp"
_GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
GREEK = frozenset(_GREEK.split())
CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
_COMMANDS = FUNCTIONS | GREEK | {"pi", "infty", "frac", "sqrt", "binom", "lfloor", "lceil"}
_ARITHMETIC = frozenset({"number", "scientific", "negative", "sum", "product", "quotient", "power"})
_SIGN = re.compile(r"\s*(\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[-+*/^_!|(){}\[\]]|$)")
_SUBSCRIPT = re.compile(r"\{([A-Za-z0-9]+)\}|([A-Za-z0-9])(?![0-9])")
_APPLIED = re.compile(r"\s*\(\s*(-?\d+|[a-z])\s*\)")  # I(0), f(x): a name, not a product
_SCIENTIFIC = re.compile(
    r"(\d+(?:\.\d+)?|\.\d+)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*"
    r"(?:\{\s*([+-]?\d{1,3})\s*\}|(\d))(?!\s*[\^!.\d])"
    r"|(\d+(?:\.\d+)?)[eE](\d{1,3})(?![\w.^!])|(\d+\.\d+)[eE]([+-]\d{1,3})(?![\w.^!])"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d{1,40})\}")
_MIXED = re.compile(
    r"(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)(?!\d))(?!\s*[\^!])"
    r"|(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\^!.\d])"
)
_DEPTH = 40  # the most nested groups
_BITS = 1 << 14  # the most in a computed number
_DIGITS = 1000  # the most in a written number


class UnreadableError(Exception):
    """The text is not in a notation that `parse` understands."""


@dataclass(frozen=True)
class Node:
    """An operation with arguments; a "number", "scientific" or "symbol" has a value instead."""

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
        known = [arg.rational for arg in self.args] if self.op in _ARITHMETIC else [None]
        result = None if None in known else _result(self.op, [v for v in known if v is not None])
        return None if result is None or _bits(result) > _BITS else result

    @property
    def literal(self) -> bool:
        """Whether it is written as a result: an integer, decimal or fraction, signed or not."""
        if self.op == "negative":
            return self.args[0].op != "negative" and self.args[0].literal
        if self.op == "quotient":
            bare = [arg.args[0] if arg.op == "negative" else arg for arg in self.args]
            return all(arg.op in ("number", "scientific") for arg in bare)
        return self.op in ("number", "scientific")

    @property
    def symbols(self) -> set[str]:
        """The names in it, including constants'."""
        return {str(part.value) for part in self.walk() if part.op == "symbol"}


def number(value: int | Fraction) -> Node:
    """The node of a number."""
    return Node("number", (), Fraction(value))


def _result(op: str, known: list[Fraction]) -> Fraction | None:
    if op == "negative":
        return -known[0]
    if op in ("sum", "product"):
        result = Fraction(op == "product")
        for part in known:
            result = result + part if op == "sum" else result * part
            if _bits(result) > _BITS:
                return None
        return result
    left, right = known
    if op == "quotient":
        return left / right if right else None
    if right.denominator != 1 or abs(right) * _bits(left) > _BITS or (left == 0 and right <= 0):
        return None
    return left ** int(right)


def _bits(number: Fraction) -> int:
    return number.numerator.bit_length() + number.denominator.bit_length()


def parse(text: str) -> Node:
    """The tree of the whole text; UnreadableError if it is not one expression."""
    reader = _Reader(text)
    node = reader.sum(0)
    if reader.sign:
        raise UnreadableError(f"{reader.sign!r} is left over")
    return node


class _Reader:
    """Recursive descent with one token (`sign`) of lookahead; `depth` bounds the recursion."""

    def __init__(self, text: str):
        self._text, self._end, self.sign = text, 0, ""
        self._advance()

    def _advance(self, end: int | None = None) -> str:
        """Returns the current token and reads the next, from `end` or where this one ends."""
        taken, match = self.sign, _SIGN.match(self._text, self._end if end is None else end)
        if match is None:
            raise UnreadableError(f"{self._text[self._end : self._end + 10]!r}")
        self._begin, self._end, self.sign = match.start(1), match.end(), match[1]
        return taken

    def _take(self, pattern: re.Pattern[str], start: int) -> list[str] | None:
        """The groups of a pattern at `start`, which is moved past; None if it does not match."""
        match = pattern.match(self._text, start)
        if match is None:
            return None
        self._advance(match.end())
        return [text for text in match.groups() if text is not None]

    def sum(self, depth: int) -> Node:
        terms = [self._signed(depth)]
        while self.sign in ("+", "-"):
            terms.append(self._signed(depth))
        return _joined("sum", terms)

    def _signed(self, depth: int) -> Node:
        negative = self.sign in ("+", "-") and self._advance() == "-"
        term = self._product(depth)
        return Node("negative", (term,)) if negative else term

    def _product(self, depth: int) -> Node:
        factors = [self._power(depth)]
        while depth < _DEPTH:
            if self.sign in ("\\cdot", "\\times", "*"):
                self._advance()
                factors.append(self._power(depth))
            elif self.sign in ("/", "\\div"):
                self._advance()
                factors = [Node("quotient", (_joined("product", factors), self._power(depth)))]
                depth += 1
            elif self._starts_factor():
                factors.append(self._power(depth))
            else:
                return _joined("product", factors)
        raise UnreadableError("nested too deeply")

    def _starts_factor(self) -> bool:
        """Whether a factor follows without a multiplication sign; numbers only as in `n2^{n-1}`."""
        sign = self.sign
        if sign[:1].isdigit():
            before, after = self._text[: self._begin].rstrip(), self._text[self._end :].lstrip()
            return after[:1] == "^" and (before[-1:].isalpha() or before[-1:] in (")", "}"))
        return sign in ("(", "{", "[") or sign.isalpha() or sign[1:] in _COMMANDS

    def _power(self, depth: int) -> Node:
        node = self._atom(depth)
        for sign, op in (("!", "factorial"), ("\\degree", "degree")):
            if self.sign == sign:
                self._advance()
                node = Node(op, (node,))
        if self.sign == "^":
            self._advance()
            node = Node("power", (node, self._argument(depth + 1)))
        return node

    def _argument(self, depth: int, *, more: bool = False) -> Node:
        """An argument of `^`, `\\frac`, `\\sqrt`: a group or a character; `more` may follow it."""
        if self.sign[:1].isdigit():
            if not more and len(self.sign) > 1:
                raise UnreadableError("an argument of several digits needs braces")
            digit = self.sign[0]
            self._advance(self._begin + 1)
            return number(int(digit))
        if self.sign != "{" and not self.sign.isalpha() and self.sign[1:] not in _COMMANDS:
            raise UnreadableError(f"{self.sign!r} is no argument")
        return self._atom(depth)

    def _group(self, closing: str, depth: int) -> Node:
        self._advance()
        node = self.sum(depth + 1)
        if self._advance() != closing:
            raise UnreadableError(f"{closing!r} is missing")
        return node

    def _atom(self, depth: int) -> Node:
        sign = self.sign
        if depth > _DEPTH:
            raise UnreadableError("nested too deeply")
        if sign[:1].isdigit() or sign[:1] == ".":
            return self._number()
        if sign in ("(", "{"):
            return self._group({"(": ")", "{": "}"}[sign], depth)
        if sign == "[" and (node := self._group("]", depth)).op == "sum":
            return node  # [x] may be the floor of x
        if sign == "|":
            return Node("absolute", (self._group("|", depth),))
        if sign.isalpha() or sign[1:] in GREEK or sign in CONSTANTS:
            return self._symbol()
        if sign[1:] in ("lfloor", "lceil"):
            return Node(sign[1:], (self._group("\\r" + sign[2:], depth),))
        if sign[1:] in _COMMANDS:
            return self._command(self._advance()[1:], depth + 1)
        raise UnreadableError(f"{sign!r} begins no expression")

    def _number(self) -> Node:
        start = self._begin
        if found := self._take(_SCIENTIFIC, start):
            return Node("scientific", (), Fraction(found[0]) * Fraction(10) ** int(found[1]))
        if found := self._take(_REPEATING, start):
            whole, fixed, cycle = found
            repeated = Fraction(int(cycle), 10 ** len(cycle) - 1)
            return number(int(whole or 0) + (int(fixed or 0) + repeated) / 10 ** len(fixed))
        if found := self._take(_MIXED, start):
            if int(found[1]) >= int(found[2]) or max(map(len, found)) > _DIGITS:
                raise UnreadableError("not a mixed number")
            return number(int(found[0]) + Fraction(int(found[1]), int(found[2])))
        if len(self.sign) > _DIGITS:
            raise UnreadableError("a number of too many digits")
        return number(Fraction(self._advance()))

    def _symbol(self) -> Node:
        name = self._advance()
        if self.sign == "_":
            found = self._take(_SUBSCRIPT, self._end)
            if found is None:
                raise UnreadableError("a subscript that is no name")
            name += "_" + found[0]
        if name[0].isupper() or name[0] in "fgh":
            applied = self._take(_APPLIED, self._begin)
            name += f"({applied[0]})" if applied else ""
        return Node("symbol", (), name)

    def _command(self, name: str, depth: int) -> Node:
        if name in ("frac", "binom"):
            upper = self._argument(depth, more=True)
            return Node("quotient" if name == "frac" else name, (upper, self._argument(depth)))
        if name == "sqrt":
            index = self._group("]", depth) if self.sign == "[" else number(2)
            inner = self._group(")", depth) if self.sign == "(" else self._argument(depth)
            return Node("root", (inner, index))
        base: tuple[Node, ...] = ()
        exponent = None
        if name == "log" and self.sign == "_":
            self._advance()
            base = (self._argument(depth, more=True),)
        if self.sign == "^":
            self._advance()
            exponent = self._argument(depth, more=True)
        if self.sign == "(":
            inner = self._group(")", depth)
        else:
            factors = [self._power(depth)]
            while self._starts_factor() and self.sign != "(" and self.sign[1:] not in FUNCTIONS:
                factors.append(self._power(depth))
            inner = _joined("product", factors)
        if exponent is not None and exponent.rational == -1 and "arc" + name in FUNCTIONS:
            return Node("arc" + name, (inner,))
        e = Node("symbol", (), "e")
        node = Node("power", (e, inner)) if name == "exp" else Node(name, (inner, *base))
        return node if exponent is None else Node("power", (node, exponent))


def _joined(op: str, nodes: list[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else Node(op, tuple(nodes))
