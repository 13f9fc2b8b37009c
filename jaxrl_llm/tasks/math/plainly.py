"""What is plainly the same expression: a factor of 1, a term of 0, a sign moved about; and its factors."""

import math
from fractions import Fraction

from jaxrl_llm.tasks.math.expression import Node, variables


def plainly(node: Node) -> str:
    """One text for all that is plainly the same: `1(x+1)`, `-(-x-1)`, `x+1+0`; nothing is multiplied out."""
    return _text(*_parts(node))


def _text(coefficient: Fraction, rest: tuple[str, ...]) -> str:
    return "*".join([str(coefficient), *rest])


def _parts(node: Node) -> tuple[Fraction, tuple[str, ...]]:
    """A rational coefficient, and the other factors as texts in order."""
    if node.op == "number":
        assert isinstance(node.value, Fraction)
        return node.value, ()
    if node.op == "negative":
        coefficient, rest = _parts(node.args[0])
        return -coefficient, rest
    if node.op == "product":
        parts = [_parts(arg) for arg in node.args]
        factors = sorted(factor for _, rest in parts for factor in rest)
        return math.prod((known for known, _ in parts), start=Fraction(1)), tuple(factors)
    if node.op == "quotient":
        (upper, over), (lower, under) = map(_parts, node.args)
        if lower and not under:
            return upper / lower, over
        return upper, (*over, f"1/({_text(lower, under)})")
    if node.op == "sum":
        return _sum([_parts(term) for term in _terms(node)])
    if node.op == "power":
        return _power(node)
    return Fraction(1), (f"{node.op}:{node.value}({','.join(map(plainly, node.args))})",)


def _terms(node: Node) -> list[Node]:
    return [n for arg in node.args for n in (_terms(arg) if arg.op == "sum" else [arg])]


def _sum(terms: list[tuple[Fraction, tuple[str, ...]]]) -> tuple[Fraction, tuple[str, ...]]:
    """Its terms that are not 0, with the sign of the first taken out."""
    left = sorted((rest, coefficient) for coefficient, rest in terms if coefficient)
    if len(left) < 2:
        return (left[0][1], left[0][0]) if left else (Fraction(0), ())
    sign = 1 if left[0][1] > 0 else -1
    return Fraction(sign), (f"({'+'.join(_text(sign * number, rest) for rest, number in left)})",)


def _power(node: Node) -> tuple[Fraction, tuple[str, ...]]:
    base, exponent = node.args
    power = exponent.rational
    if power == 1:
        return _parts(base)
    coefficient, rest = _parts(base)
    sign = Fraction(1)
    if rest and coefficient < 0 and power is not None and power.denominator == 1:
        sign, coefficient = Fraction((-1) ** (power.numerator % 2)), -coefficient
    return sign, (f"({_text(coefficient, rest)})^({plainly(exponent)})",)


def factors(node: Node) -> int:
    """How many factors with a variable an expression is written with, those of powers counted as often."""
    if not variables(node):
        return 0
    if node.op in ("negative", "quotient"):
        return factors(node.args[0])
    if node.op == "product":
        return sum(map(factors, node.args))
    power = node.args[1].rational if node.op == "power" else None
    if power is not None and power.denominator == 1 and 0 < power < 100:
        return int(power) * factors(node.args[0])
    return 1
