r"""The form of an answer, and whether two are equal: interval, tuple, set, matrix, equation, single expression.

Single expressions are compared as exact fractions where they are numbers, else by `engine`, which may be slow.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxrl_llm.tasks.math import notation
from jaxrl_llm.tasks.math.evaluated import worked_out
from jaxrl_llm.tasks.math.expression import (
    ARITHMETIC,
    CONSTANTS,
    Node,
    key,
    symbols,
)

Engine = Callable[[Node, Node], bool]

_INEQUALITY = re.compile(r"relation ([<≤]{1,2})")
_INFINITY = Node("symbol", (), "\\infty")


@dataclass(frozen=True)
class Form:
    """An answer's shape: its kind, its parts, or one expression; with the name and unit it came with."""

    kind: str
    parts: tuple["Form", ...] = ()
    node: Node | None = None
    name: str = ""
    unit: str = ""


def exactly(truth: Node, answer: Node) -> bool:
    """The engine that finds nothing beyond what is found without one."""
    return False


def _alike(form: Form, other: Form) -> Form:
    r"""The form in the notation of the other where that says the same: `\{2\}`, `x=1,y=2`, `x>2`."""
    if form.kind == "set" and len(form.parts) == 1 and other.kind != "set":
        return form.parts[0]
    if form.kind == "set" and other.kind == "tuple ()":
        ordered = sorted(form.parts, key=lambda part: part.name.strip("\\"))
        plain = {part.name for part in ordered} <= {"x", "y", "z"}
        if _told_apart(form) and (plain or ordered == [*form.parts]):
            return replace(other, parts=tuple(replace(part, name="") for part in ordered))
    quotient = form.node if form.node and form.node.op == "quotient" and not form.unit else None
    if quotient and other.kind == "ratio":
        return Form("ratio", tuple(Form("scalar", node=part) for part in quotient.args))
    if other.kind.startswith("tuple"):
        return _interval(form) or form
    return form


def _result(answer: Form, truth: Form) -> Form:
    """`m+n=10` as 10, where that is asked for."""
    if (
        answer.kind != "relation ="
        or truth.kind != "scalar"
        or truth.name
        or len(answer.parts) != 2
    ):
        return answer
    left, right = answer.parts
    letters = (
        left.node is not None
        and left.node.op == "sum"
        and all(term.op == "symbol" for term in left.node.args)
    )
    return right if letters else answer


def _told_apart(form: Form) -> bool:
    """Whether each part has a name of its own."""
    names = {part.name for part in form.parts}
    return "" not in names and len(names) == len(form.parts)


def _interval(form: Form) -> Form | None:
    """`2<x≤3` as an interval."""
    relation = _INEQUALITY.fullmatch(form.kind)
    places = [i for i, part in enumerate(form.parts) if _is_variable(part)]
    if relation is None or len(places) != 1 or (len(form.parts) == 3 and places != [1]):
        return None
    (place,), signs = places, relation[1]
    low, high = form.parts[:place], form.parts[place + 1 :]
    infinite = Form("scalar", node=_INFINITY), Form("scalar", node=Node("negative", (_INFINITY,)))
    kind = ("[" if low and signs[0] == "≤" else "(") + ("]" if high and signs[-1] == "≤" else ")")
    return Form(f"tuple {kind}", (*(low or infinite[1:]), *(high or infinite[:1])))


def _is_variable(form: Form) -> bool:
    node = form.node
    return node is not None and node.op == "symbol" and node.value not in CONSTANTS


def equal(truth: Form, answer: Form, engine: Engine) -> bool:
    """Whether they say the same, the answer worked out as far as the truth."""
    truth, answer = _alike(truth, answer), _result(_alike(answer, truth), truth)
    if truth.name and answer.name and truth.name != answer.name:
        return False
    same_unit = answer.unit in ("", truth.unit)
    if truth.kind != answer.kind or len(truth.parts) != len(answer.parts):
        return False
    if not (same_unit or (not truth.unit and notation.is_unit(answer.unit))):
        return False
    if answer.unit == "degree" != truth.unit and truth.node and "\\pi" in symbols(truth.node):
        return False
    if truth.node is not None and answer.node is not None:
        return _equal_nodes(truth.node, answer.node, engine)
    pairs = zip(truth.parts, answer.parts, strict=True)
    ordered = len(truth.parts) > 1 and _told_apart(truth) and not any(p.name for p in answer.parts)
    if ordered or truth.kind not in ("set", "union", "relation ="):
        return all(equal(t, a, engine) for t, a in pairs)
    left = list(answer.parts)
    for part in truth.parts:
        match = next((other for other in left if equal(part, other, engine)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _equal_nodes(truth: Node, answer: Node, engine: Engine) -> bool:
    if key(truth) == key(answer):
        return True
    if not worked_out(answer, truth):
        return False
    known = truth.rational
    if known is not None or _too_long(truth):
        return known is not None and known == answer.rational
    return engine(truth, answer)


def _too_long(truth: Node) -> bool:
    """Whether it is a rational number that nobody writes out, or none at all, as 1/0 is."""
    exponents = [part.args[1].rational for part in truth.walk() if part.op == "power"]
    rooted = any(known is not None and known.denominator != 1 for known in exponents)
    return not rooted and all(part.op in ARITHMETIC for part in truth.walk())
