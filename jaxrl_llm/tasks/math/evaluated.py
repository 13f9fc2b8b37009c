r"""Whether an answer is worked out: it may leave to do only what the truth itself leaves to do.

So `\sqrt{3}/2` is an answer, and `\sum_{k=1}^{10} k^2`, `\log_2 8`, `2+3`, `\sqrt{16}`, `x+x` are questions.
"""

from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import product

from jaxrl_llm.tasks.math.expression import (
    ARITHMETIC,
    Node,
    key,
    literal,
    number,
    symbols,
    variables,
)

_EXPONENT = 100  # beyond it an exponent must be one of the truth's
_NUMBER = 10**20  # likewise a number beside roots, constants, names; others are compared
_TERMS = 200  # of a product of sums
_LETTER = "letter "
_PRIMES = 1000  # whose powers are taken out of roots


def worked_out(answer: Node, truth: Node) -> bool:
    """Whether the answer has no name, function or open computation that the truth has not."""
    if literal(answer):
        known = truth.rational
        whole = known is not None and known.denominator == 1
        return not (whole and any(part.op == "quotient" for part in answer.walk()))
    if not symbols(answer) <= symbols(truth):
        return False
    return open_computations(answer) <= open_computations(truth)


def open_computations(node: Node) -> Counter[str]:
    """What is left to do in an expression, by name; functions are counted, the rest is there or not."""
    found = Counter[str]()
    variable = bool(variables(node))
    for part in node.walk():
        rule = _RULES.get(part.op)
        if rule is not None:
            for name in rule(part, variable):
                found[name] = 1
        elif isinstance(part.value, Fraction):
            if max(abs(part.value.numerator), part.value.denominator) > _NUMBER:
                found[f"number {part.value}"] = 1
        elif part.op not in ("number", "symbol", "negative"):
            found[part.op] += 1
    return found


def _sum(node: Node, _: bool) -> list[str]:
    terms = [_cores(term) for term in node.args]
    cores = [core for found in terms for core in found or ()]
    like = ["like terms"] if len(set(cores)) < len(cores) else []
    return like + ["sum in a sum"] * (None in terms)


def _cores(term: Node) -> list[tuple[str, ...]] | None:
    """The keys of what a term gives when its sums are multiplied out, without rational coefficients.

    None where more than letters are multiplied, which could make one of two.
    """
    factors = [factor for factor in _factors(term) if factor.rational is None]
    multiplied = len(factors) > 1 and any(factor.op == "sum" for factor in factors)
    cores: list[tuple[str, ...]] = [()]
    for factor in factors:
        if factor.op == "sum":
            found = [_cores(part) for part in factor.args]
            if None in found:
                return None
            inner = [core for one in found for core in one or ()]
        else:
            inner = [_letters(factor) or (_core(factor),)]
        if multiplied and not all(key.startswith(_LETTER) for core in inner for key in core):
            return None
        if len(cores) * len(inner) > _TERMS:
            return None
        cores = [tuple(sorted(a + b)) for a, b in product(cores, inner)]
    return cores


def _letters(factor: Node) -> tuple[str, ...]:
    """A name, as often as it is multiplied; nothing for another factor."""
    base, exponent = factor.args if factor.op == "power" else (factor, number(1))
    times = exponent.rational
    if base.op != "symbol" or base.value == "i" or times is None or times.denominator != 1:
        return ()
    return (f"{_LETTER}{base.value}",) * int(times) if 1 <= times <= _EXPONENT else ()


def _core(factor: Node) -> str:
    r"""The key of a factor, of `\sqrt{18}` that of `\sqrt{2}`: of what is left when all has been taken out."""
    if factor.op != "root":
        return key(factor)
    radicand, degree = (arg.rational for arg in factor.args)
    if radicand is None or degree is None or degree.denominator != 1 or not 2 <= degree <= 8:
        return key(factor)
    n = int(degree)
    whole = radicand.numerator * radicand.denominator ** (n - 1)
    return key(factor) if abs(whole) > _NUMBER else f"root {n} of {_stays(whole, n)}"


@lru_cache(maxsize=4096)
def _stays(radicand: int, n: int) -> int:
    """What stays under a root of degree n when all has been taken out; a text may have the same root often."""
    for prime in range(2, _PRIMES):
        while radicand and radicand % prime**n == 0:
            radicand //= prime**n
    return radicand


def _factors(node: Node) -> list[Node]:
    """The factors of a term, through signs and the numerators of fractions with a rational denominator."""
    if node.op == "negative":
        return _factors(node.args[0])
    if node.op == "product":
        return [factor for arg in node.args for factor in _factors(arg)]
    if node.op == "quotient" and node.args[1].rational is not None:
        return _factors(node.args[0])
    return [node]


def _product(node: Node, variable: bool) -> list[str]:
    found = []
    factors = _factors(node)
    if sum(factor.rational is not None for factor in factors) > 1:
        found.append("product of numbers")
    if sum(factor.op == "root" and _rational(factor.args[0]) for factor in factors) > 1:
        found.append("product of roots")
    rest = [key(_base(factor)) for factor in factors if factor.rational is None]
    if len(set(rest)) < len(rest):
        found.append("repeated factor")
    if not variable and sum(factor.op == "sum" for factor in factors) > 1:
        found.append("product of sums")
    return found


def _base(factor: Node) -> Node:
    """What a factor is a power of."""
    known = factor.op == "power" and factor.args[1].rational is not None
    return factor.args[0] if known else factor


def _quotient(node: Node, _: bool) -> list[str]:
    found = []
    upper, lower = node.args
    if variables(lower):
        found.append("quotient by a variable")
    if "i" in symbols(lower):
        found.append("quotient by i")
    if node.rational is not None and not literal(node):
        found.append("quotient of computations")
    if lower.op == "number" and lower.value == 1:
        found.append("quotient by one")
    if key(upper) == key(lower):
        found.append("quotient of the same")
    return found


def _power(node: Node, variable: bool) -> list[str]:
    base, exponent = node.args
    found = []
    power = exponent.rational
    if not literal(exponent) and power is not None:
        found.append("computed exponent")
    if power is not None and power.denominator != 1:
        found.append("root")
    elif _rational(base) and power is not None:
        found.append("power of a number")
    if variables(node) and (exponent.op == "negative" or (power or 0) < 0):
        found.append("quotient by a variable")
    if base.op == "sum" and not variable:
        found.append("power of a sum")
    if base.op in ("power", "root"):
        found.append("power of a power")
    if "i" in symbols(exponent) or base == Node("symbol", (), "i"):
        found.append("imaginary power")
    if power is not None and (abs(power) > _EXPONENT or power in (0, 1)):
        found.append(f"exponent {power}")
    return found


def _root(node: Node, _: bool) -> list[str]:
    inside, index = node.args
    found = ["root"]
    if any(part.op == "root" for part in inside.walk()):
        found.append("root in a root")
    if not literal(index):
        found.append("computed index")
    radicand = inside.rational
    if radicand is not None:
        if not literal(inside):
            found.append("root of a computation")
        degree = index.rational
        if degree is None or _comes_out(radicand, degree):
            found.append("root that comes out")
    return found


def _comes_out(radicand: Fraction, degree: Fraction) -> bool:
    """Whether the root of that degree is rational."""
    if degree.denominator != 1 or degree < 2:
        return True
    return all(_is_power(abs(part), int(degree)) for part in radicand.as_integer_ratio())


def _is_power(number: int, degree: int) -> bool:
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < number else (low, middle)
    return low**degree == number


def _rational(node: Node) -> bool:
    """Whether it is made of numbers and arithmetic only, however long the result."""
    return all(part.op in ARITHMETIC for part in node.walk())


def _scientific(node: Node, _: bool) -> list[str]:
    return ["power of a number"]  # a truth that is written so may be given as a power of ten


_RULES = {
    "scientific": _scientific,
    "sum": _sum,
    "product": _product,
    "quotient": _quotient,
    "power": _power,
    "root": _root,
}
