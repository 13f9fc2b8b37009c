r"""A scalar answer in LaTeX as a small tree, and what of it is left to compute.

Nothing here evaluates more than rational numbers of bounded size, so no text can make it slow.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

_FUNCTION_NAMES = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp"
_GREEK_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma "
    "tau phi varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega"
)
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
GREEK = frozenset(_GREEK_NAMES.split())
CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
ARITHMETIC = frozenset({"number", "scientific", "negative", "sum", "product", "quotient", "power"})
_TIMES = ("\\cdot", "\\times", "*")
_OVER = ("/", "\\div")
_SIGN = re.compile(r"\s*(\\[A-Za-z]+|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[-+*/^_!|(){}\[\]]|$)")
_SUBSCRIPT = re.compile(r"\{([A-Za-z0-9]+)\}|([A-Za-z0-9])(?![0-9])")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d{1,40})\}")
_MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)(?!\d))(?!\s*[\^!])")
_PLAIN_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\^!.\d])")
_SCIENTIFIC = re.compile(
    r"(\d+(?:\.\d+)?|\.\d+)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,3})\s*\}|(\d))(?!\s*[\^!.\d])"
)
_PRINTED = re.compile(
    r"(\d+(?:\.\d+)?)[eE](\d{1,3})(?![\w.^!])|(\d+\.\d+)[eE]([+-]\d{1,3})(?![\w.^!])"
)
_DEPTH = 40  # of nested groups
_BITS = 1 << 14  # of a number that is worked out
_DIGITS = 1000  # of a number


class UnreadableError(Exception):
    """The text is not an expression of the notation that is understood here."""


@dataclass(frozen=True)
class Node:
    """An operation on its arguments; a "number", a "scientific" one or a "symbol" has a value instead."""

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | str = ""

    def walk(self) -> Iterator["Node"]:
        yield self
        for arg in self.args:
            yield from arg.walk()

    @cached_property
    def rational(self) -> Fraction | None:
        """What arithmetic on numbers gives; None for no rational number, or too long a one."""
        if isinstance(self.value, Fraction):
            return self.value
        values = [arg.rational for arg in self.args] if self.op in ARITHMETIC else [None]
        known = [v for v in values if v is not None]
        result = _result(self.op, known) if len(known) == len(values) else None
        return None if result is None or _bits(result) > _BITS else result


def number(value: int | Fraction) -> Node:
    """The node of a number."""
    return Node("number", (), Fraction(value))


def parse(text: str) -> Node:
    """The tree of an expression that fills the whole text; UnreadableError if there is none."""
    reader = _Reader(text)
    node = reader.sum(0)
    if reader.sign:
        raise UnreadableError(f"{reader.sign!r} is left over")
    return node


class _Reader:
    """Recursive descent, one sign ahead; explicit `depth` keeps hostile nesting from the stack."""

    def __init__(self, text: str):
        self._text, self._end, self.sign = text, 0, ""
        self._advance()

    def _advance(self) -> str:
        taken, match = self.sign, _SIGN.match(self._text, self._end)
        if match is None:
            raise UnreadableError(f"{self._text[self._end : self._end + 10]!r}")
        self._begin, self._end, self.sign = match.start(1), match.end(), match[1]
        return taken

    def _jump(self, end: int) -> None:
        self._end = end
        self._advance()

    def _expect(self, sign: str) -> None:
        if self._advance() != sign:
            raise UnreadableError(f"{sign!r} is missing")

    def sum(self, depth: int) -> Node:
        terms = [self._signed(depth)]
        while self.sign in ("+", "-"):
            terms.append(self._signed(depth))
        return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))

    def _signed(self, depth: int) -> Node:
        negative = False
        if self.sign in ("+", "-"):
            negative = self._advance() == "-"
        term = self._product(depth)
        return Node("negative", (term,)) if negative else term

    def _product(self, depth: int) -> Node:
        factors = [self._power(depth)]
        while depth < _DEPTH:
            if self.sign in _TIMES:
                self._advance()
                factors.append(self._power(depth))
            elif self.sign in _OVER:
                self._advance()
                factors = [Node("quotient", (_product_of(factors), self._power(depth)))]
                depth += 1
            elif self._starts_factor():
                factors.append(self._power(depth))
            else:
                return _product_of(factors)
        raise UnreadableError("nested too deeply")

    def _starts_factor(self) -> bool:
        """Whether a factor follows without a sign of multiplication; a number does only as in `n2^{n-1}`."""
        sign = self.sign
        if sign[:1].isdigit():
            before, after = self._text[: self._begin].rstrip(), self._text[self._end :].lstrip()
            return after[:1] == "^" and (before[-1:].isalpha() or before[-1:] in (")", "}"))
        return (
            sign in ("(", "{", "[") or sign.isalpha() or (sign[:1] == "\\" and _is_atom(sign[1:]))
        )

    def _power(self, depth: int) -> Node:
        node = self._atom(depth)
        if self.sign == "!":
            self._advance()
            node = Node("factorial", (node,))
        if self.sign == "\\degree":
            self._advance()
            node = Node("degree", (node,))
        if self.sign == "^":
            self._advance()
            node = Node("power", (node, self._argument(depth + 1)))
        return node

    def _argument(self, depth: int, *, more: bool = False) -> Node:
        """What `^`, `\\frac` and `\\sqrt` take: a group or one character; `more` arguments may follow."""
        if self.sign == "{":
            return self._group("{", "}", depth)
        if self.sign[:1].isdigit():
            digit, end = self.sign[0], self._begin + 1
            if not more and len(self.sign) > 1:
                raise UnreadableError("an argument of several digits needs braces")
            self._jump(end)
            return number(int(digit))
        if self.sign.isalpha() or self.sign[1:] in GREEK | {"pi", "frac", "sqrt", "infty"}:
            return self._atom(depth)
        raise UnreadableError(f"{self.sign!r} is no argument")

    def _group(self, opening: str, closing: str, depth: int) -> Node:
        self._expect(opening)
        node = self.sum(depth + 1)
        self._expect(closing)
        return node

    def _atom(self, depth: int) -> Node:
        sign = self.sign
        if depth > _DEPTH:
            raise UnreadableError("nested too deeply")
        if sign[:1].isdigit() or sign[:1] == ".":
            return self._number()
        if sign == "(":
            return self._group("(", ")", depth)
        if sign == "{":
            return self._group("{", "}", depth)
        if sign == "[" and (node := self._group("[", "]", depth)).op == "sum":
            return node  # [x] may be the floor of x
        if sign == "|":
            return Node("absolute", (self._group("|", "|", depth),))
        if sign.isalpha() or sign[1:] in GREEK or sign in CONSTANTS:
            return self._symbol()
        if sign[:1] == "\\" and _is_atom(sign[1:]):
            return self._command(self._advance()[1:], depth)
        raise UnreadableError(f"{sign!r} begins no expression")

    def _number(self) -> Node:
        for pattern in (_SCIENTIFIC, _PRINTED):
            match = pattern.match(self._text, self._begin)
            if match:
                self._jump(match.end())
                mantissa, exponent = (text for text in match.groups() if text is not None)
                return Node("scientific", (), Fraction(mantissa) * Fraction(10) ** int(exponent))
        for pattern, convert in (
            (_REPEATING, _repeating),
            (_MIXED, _mixed),
            (_PLAIN_MIXED, _mixed),
        ):
            match = pattern.match(self._text, self._begin)
            if match:
                self._jump(match.end())
                return number(convert(*match.groups()))
        sign = self._advance()
        if len(sign) > _DIGITS:
            raise UnreadableError("a number of too many digits")
        return number(Fraction(sign))

    def _symbol(self) -> Node:
        name = self._advance()
        if self.sign == "_":
            match = _SUBSCRIPT.match(self._text, self._end)
            if match is None:
                raise UnreadableError("a subscript that is no name")
            self._jump(match.end())
            name += "_" + (match[1] or match[2])
        return Node("symbol", (), name)

    def _command(self, name: str, depth: int) -> Node:
        if name in ("frac", "binom"):
            upper = self._argument(depth + 1, more=True)
            lower = self._argument(depth + 1)
            return Node("quotient" if name == "frac" else name, (upper, lower))
        if name == "sqrt":
            index = self._group("[", "]", depth) if self.sign == "[" else number(2)
            if self.sign == "(":
                return Node("root", (self._group("(", ")", depth), index))
            return Node("root", (self._argument(depth + 1), index))
        if name in ("lfloor", "lceil"):
            node = self.sum(depth + 1)
            self._expect("\\r" + name[1:])
            return Node(name, (node,))
        return self._function(name, depth)

    def _function(self, name: str, depth: int) -> Node:
        base: tuple[Node, ...] = ()
        exponent = None
        if name == "log" and self.sign == "_":
            self._advance()
            base = (self._argument(depth + 1, more=True),)
        if self.sign == "^":
            self._advance()
            exponent = self._argument(depth + 1, more=True)
        if self.sign == "(":
            inner = self._group("(", ")", depth)
        else:
            factors = [self._power(depth + 1)]
            while self._starts_factor() and self.sign != "(" and self.sign[1:] not in FUNCTIONS:
                factors.append(self._power(depth + 1))
            inner = _product_of(factors)
        e = Node("symbol", (), "e")
        if exponent is not None and exponent.rational == -1 and "arc" + name in FUNCTIONS:
            return Node("arc" + name, (inner,))
        node = Node("power", (e, inner)) if name == "exp" else Node(name, (inner, *base))
        return node if exponent is None else Node("power", (node, exponent))


def _is_atom(name: str) -> bool:
    known = name in FUNCTIONS or name in GREEK or "\\" + name in CONSTANTS
    return known or name in ("frac", "sqrt", "binom", "lfloor", "lceil")


def _product_of(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("product", tuple(factors))


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    shift = 10 ** len(fixed)
    cycle = Fraction(int(repeated), 10 ** len(repeated) - 1)
    return int(whole or 0) + (int(fixed or 0) + cycle) / shift


def _mixed(whole: str, *digits: str | None) -> Fraction:
    upper, lower = (int(text) for text in digits if text is not None)
    if upper >= lower or max(map(len, (whole, str(upper), str(lower)))) > _DIGITS:
        raise UnreadableError("not a mixed number")
    return int(whole) + Fraction(upper, lower)


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


def literal(node: Node) -> bool:
    """Whether it is a number as people write a result: an integer, a decimal, a fraction, signed or not."""
    if node.op == "negative":
        return node.args[0].op != "negative" and literal(node.args[0])
    if node.op == "quotient":
        return all(_unsigned(arg).op in ("number", "scientific") for arg in node.args)
    return node.op in ("number", "scientific")


def _unsigned(node: Node) -> Node:
    return node.args[0] if node.op == "negative" else node


def key(node: Node) -> str:
    """One text for a form, however its terms and factors are ordered."""
    if not node.args:
        return f"{node.op}:{node.value}"
    keys = [key(arg) for arg in node.args]
    if node.op in ("sum", "product"):
        keys.sort()
    return f"{node.op}({','.join(keys)})"


def symbols(node: Node) -> set[str]:
    """The names in it, those of constants too."""
    return {str(part.value) for part in node.walk() if part.op == "symbol"}


def variables(node: Node) -> set[str]:
    """The names in it that stand for no constant."""
    return symbols(node) - CONSTANTS
