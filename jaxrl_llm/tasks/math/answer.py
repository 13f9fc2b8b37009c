r"""Reads answers, and compares a given one with the truth: the same form, worked out, not the question's own."""

import re
from dataclasses import replace
from functools import lru_cache
from itertools import product

from jaxrl_llm.tasks.math import notation
from jaxrl_llm.tasks.math.expression import (
    GREEK,
    Node,
    UnreadableError,
    key,
    literal,
    number,
    parse,
)
from jaxrl_llm.tasks.math.form import Engine, Form, equal, exactly
from jaxrl_llm.tasks.math.plainly import factors, plainly

_WORDS = r"\\text\s*\{[^{}=+*/^\\-][^{}=+*/^\\]*\}"  # that compute nothing
_LETTERS = rf"[A-Za-z]{{1,3}}|\\(?:{'|'.join(GREEK)}|ell|hbar|max|min|gcd|lcm)|{_WORDS}"
_NAME = rf"(?:m?\s*\\angle\s*)?(?:{_LETTERS})(?:_\{{?\w+\}}?)?'*(?:\(-?\w{{1,3}}\))?"
_MEASURE = r"\|\s*[A-Z]{2}\s*\||\\overline\s*\{\s*[A-Z]{2}\s*\}|\[[A-Z]{3,5}\]"
_NAMES = re.compile(rf"{_NAME}|{_MEASURE}|\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\)")
_MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*(.+)")
_BASED = re.compile(r"(?:\(\s*)?([0-9A-Fa-f]+)\s*\)?_\s*(?:\{\s*\(?\s*(\w+)\s*\)?\s*\}|(\d))")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_MATRIX = re.compile(
    r"\\begin\s*\{([pb](?:small)?)matrix\}(.*)\\end\s*\{\1matrix\}|"
    r"[(\[]\s*\\begin\s*\{array\}\s*\{[lcr ]*\}(.*)\\end\s*\{array\}\s*[)\]]"
)
_LABELS = re.compile(r"(?:\(\d\)\s*){2,}")
_ROW = re.compile(r"\\\\(?:\s*\[[^\[\]&]*\])?")
_CALL = re.compile(r"[fghFGHP]'*\(-?\d+\)")
_RELATIONS = re.compile(r"(<|>|=|≤|≥|≠)")
_MIRRORED = {">": "<", "≥": "≤"}
_PERCENT = re.compile(r"percent|%", re.IGNORECASE)
_FACTOR = re.compile(r"\bfactor", re.IGNORECASE)
_PARTS = 64


def same(truth: str, answer: str, question: str, engine: Engine) -> bool:
    """Whether the answer is the truth, worked out, and no expression that the question has given."""
    if len(answer) > max(notation.LONGEST, len(truth)):
        return False
    pairs = product(notation.readings(truth), notation.readings(answer))
    return any(_same(read(true), read(given), question, engine) for true, given in pairs)


def _same(true: Form, given: Form, question: str, engine: Engine) -> bool:
    if _in_percent(given) and not _in_percent(true) and not _PERCENT.search(question):
        return False  # 0.5 is not 0.5%
    if _restates(given, true, question):
        return False
    if equal(true, given, exactly):
        return True
    return not _unfactored(given, true, question) and equal(true, given, engine)


def _restates(given: Form, true: Form, question: str) -> bool:
    """Whether a part of the answer is an expression of the question, at most with a 1 or a sign moved about."""
    asked, asked_plainly = _asked(question)
    printed = lambda node: literal(node) and all(part.op != "scientific" for part in node.walk())
    computed = [node for node in _nodes(given) if not printed(node)]
    found, found_plainly = asked & {*map(key, computed)}, asked_plainly & {*map(plainly, computed)}
    if not found_plainly and not found:
        return False
    truths = _nodes(true)
    return bool(found - {*map(key, truths)} or found_plainly - {*map(plainly, truths)})


def _unfactored(given: Form, true: Form, question: str) -> bool:
    """Whether the question is for factors, and the answer has fewer than the truth."""
    if not _FACTOR.search(question) or given.node is None or true.node is None:
        return False
    return factors(given.node) < factors(true.node)


def _nodes(form: Form) -> list[Node]:
    own = [] if form.node is None else [form.node]
    return own + [node for part in form.parts for node in _nodes(part)]


def _in_percent(form: Form) -> bool:
    return form.unit == "%" or any(map(_in_percent, form.parts))


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """The form of an answer; a text that is none of the notations known is equal to itself only."""
    try:
        text = notation.clean(text)
        return _read(text)
    except UnreadableError:
        return Form("text " + "".join(text.split()))


@lru_cache(maxsize=4096)
def _asked(question: str) -> tuple[frozenset[str], frozenset[str]]:
    """The expressions within the formulas of a question: their keys, and what is plainly the same."""
    found: list[Node] = []
    formulas = re.findall(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", question, re.DOTALL)
    for formula in formulas:
        for side in "".join(formula).split("="):
            if len(side) <= notation.LONGEST:
                found += _nodes(read(side))
    return frozenset(map(key, found)), frozenset(map(plainly, found))


def _read(text: str, depth: int = 0) -> Form:
    if depth > 8 or not text:
        raise UnreadableError("no answer")
    text = notation.without_thousands(text)
    said = notation.words(text)
    if said is not None:
        return Form("text " + said)
    text = notation.without_thousands(notation.unwrapped(text))
    if not text:
        raise UnreadableError("an empty text")
    if notation.ROMAN.fullmatch(text):
        return Form("text " + text.casefold())
    member = _MEMBER.fullmatch(text)
    if member:
        return replace(_read(member[2], depth + 1), name=member[1])
    for split in (_list, _relation, _union, _group, _based):
        form = split(text, depth + 1)
        if form is not None:
            return form
    return _scalar(text, depth)


def _list(text: str, depth: int) -> Form | None:
    r"""`1,-2`, `\{1,-2\}` and `1 \pm \sqrt{2}`: parts in any order, none twice."""
    labels = re.findall(r"\d", text) if _LABELS.fullmatch(text) else []
    if labels and labels == sorted({*labels}):
        parts = labels
    elif text.startswith("\\{") and notation.closing(text, 1) == len(text) - 1:
        inside = text[2:-2].strip()
        parts = [part for part in notation.split(inside, ",") if inside]
    else:
        parts = [part for part in notation.split(text, ",") if part]
        if len(parts) < 2 and "\\pm" not in text:
            return None
    forms: dict[Form, None] = {}
    for part in parts:
        for sign in ("+", "-") if "\\pm" in part else ("",):
            forms[_read(part.replace("\\pm", sign), depth)] = None
    if len(forms) > _PARTS:
        raise UnreadableError("too many parts")
    distinct = _distinct(list(forms))
    return distinct[0] if len(distinct) == 1 and text[:2] != "\\{" else Form("set", tuple(distinct))


def _distinct(forms: list[Form]) -> list[Form]:
    """The forms without those that are plainly equal to an earlier one: `0.09 \\text{ or } 9/100`."""
    out: list[Form] = []
    for form in forms:
        if not any(equal(form, other, exactly) for other in out):
            out.append(form)
    return out


def _relation(text: str, depth: int) -> Form | None:
    """`x=5` is 5 with a name; other equations and inequalities keep their sides, the smaller one first."""
    sides = [side.strip() for side in _RELATIONS.split(text)]
    if len(sides) == 1:
        return None
    if len(sides) == 3 and sides[1] == "=" and notation.denies(sides[0]):
        raise UnreadableError("what it is not")
    if len(sides) == 3 and sides[1] == "=" and _NAMES.fullmatch(sides[0]):
        name = re.sub(r"[\s{}]", "", sides[0])
        right = _read(sides[2], depth)
        return replace(right, name=name) if not right.name else _unreadable()
    directions = {*sides[1::2]} & {*_MIRRORED, *_MIRRORED.values()}
    if directions & _MIRRORED.keys():
        if directions - _MIRRORED.keys():
            raise UnreadableError("inequalities in both directions")
        sides = [_MIRRORED.get(side, side) for side in reversed(sides)]
    return Form("relation " + "".join(sides[1::2]), tuple(_read(s, depth) for s in sides[::2]))


def _unreadable() -> Form:
    raise UnreadableError("a name for what has one")


def _union(text: str, depth: int) -> Form | None:
    parts = notation.split(text, "\\cup")
    return None if len(parts) == 1 else Form("union", tuple(_read(p, depth) for p in parts))


def _group(text: str, depth: int) -> Form | None:
    """Intervals and tuples (which look alike), matrices, ratios and times of day."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in _ROW.split(matrix[2] or matrix[3]) if row.strip()]
        cells = [Form("row", tuple(_read(c.strip(), depth) for c in r.split("&"))) for r in rows]
        return Form("matrix", tuple(cells))
    if text[0] in "([" and notation.closing(text, 0) == len(text) - 1:
        parts = notation.split(notation.stripped(text[1:-1]), ",")
        if len(parts) > 1:
            forms = tuple(_read(part, depth) for part in parts)
            return Form(f"tuple {text[0]}{text[-1]}", forms)
    inside, unit = notation.unit_split(text)
    parts = notation.split(inside, ":")
    if len(parts) > 1:
        return Form("ratio", tuple(_read(part, depth) for part in parts), unit=unit)
    return None


def _based(text: str, depth: int) -> Form | None:
    match = _BASED.fullmatch(text)
    if match is None or not (match[1][0].isdigit() or (match[1].isupper() and len(match[1]) > 1)):
        return None
    base = (match[2] or match[3]).casefold()
    return Form(f"{match[1].upper()} in base {_BASES.get(base, base)}")


def _scalar(text: str, depth: int) -> Form:
    if _CALL.fullmatch(text):
        return Form("text " + text)  # whatever its value
    inside, unit = notation.unit_split(text)
    if inside.startswith("-\\$"):
        inside, unit = "-" + inside[3:], "$"
    node = parse(notation.without_thousands(inside))
    scale, left = notation.scaled(unit)
    if scale > 1 and literal(node) and node.rational is not None:
        return Form("scalar", node=number(scale * node.rational), unit=left)
    return Form("scalar", node=node, unit=unit)
