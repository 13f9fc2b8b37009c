r"""Compares an answer with the truth: both are normalised, parsed into a `Form`, compared by parts.

A form is a list, a tuple or interval, a matrix, a relation, a word, or an expression with a unit.
Expressions are compared as exact fractions where they are numbers, else by `engine`, which may be
slow. An answer must be worked out as far as the truth, so `2+3` is not 5.
"""

# ruff: noqa: RUF001 (signs of mathematics that look like letters are replaced here)
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import add

from jaxrl_llm.tasks.math.expression import (
    CONSTANTS,
    FUNCTIONS,
    GREEK,
    Node,
    UnreadableError,
    parse,
)

Engine = Callable[[Node, Node], bool]

_LONGEST = 2000  # the most characters of an answer
_PARTS = 64  # the most parts of a list
_DEPTH = 8  # the most lists in lists
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "√": r"\sqrt ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ",
    "∈": r"\in ", "°": r"\degree ", "²": "^2", "³": "^3", "\u00a0": " ", "’": "'",
})  # fmt: skip
_COMPARED = {
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠",
    "neq": "≠", "lt": "<", "gt": ">",
}  # fmt: skip
_END = "(?![A-Za-z])"  # the end of a LaTeX command
_SPELLINGS = [  # applied in this order: later ones rely on earlier ones
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[<>]=", lambda m: "≤≥"[m[0] == ">="]),
        (rf"\\[dtc]?(frac|binom){_END}", r"\\\1"),
        (r"\\(?:mathrm|operatorname)\s*\{\s*([ie])\s*\}", r"\1"),
        (r"\\(?:math(?:bf|it|sf)|boldsymbol|bm)(?=\s*\{)", ""),
        (r"\\(?:[mh]box|text[a-z]+|mathrm|operatorname)(?=\s*\{)", r"\\text"),
        (rf"\\text\s*\{{\s*({'|'.join(sorted(FUNCTIONS))})\s*\}}", r"\\\1 "),
        (rf"\\text\s*\{{\s*([:,])\s*\}}|\{{([:,])\}}|\\colon{_END}", lambda m: m[1] or m[2] or ":"),
        (rf"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits){_END}", ""),
        (rf"\\[lr]?vert{_END}", "|"),
        (r"(?<=\d)\\[, ](?=\d{3}(?!\d))", ""),
        (rf"\\([lr])angle{_END}", lambda m: "()"[m[1] == "r"]),
        (r"\.{2,}", r"\\dots "),
        (rf"\\(?:emptyset|varnothing){_END}", r"\\{\\}"),
        (r"(?<=\.)(\d*)\\(?:bar|dot)\s*(?:\{(\d+)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"(?<!\\)\\!\s?", ""),
        (rf"(?<!\\)\\[,;: ]|\\q?quad{_END}|~", " "),
        (rf"\^\s*(?:\{{\s*\\(?:circ|degree)\s*\}}|\\(?:circ|degree){_END})", r"\\degree "),
        (r"\\mathbb\s*\{\s*R\s*\}", r"(-\\infty,\\infty)"),
        (rf"\\not\s*=|\\({'|'.join(_COMPARED)}){_END}", lambda m: _COMPARED[m[1] or "ne"]),
        (r"\\text\s*\{\s*(?:or|and|OR|AND)\s*\}|(?<![A-Za-z\\])(?:or|and|OR|AND)(?![A-Za-z])", ", "),
        (r"\\?%|\\text\s*\{\s*(?:per\s?cent|pct|\\?%)\s*\}|\s(?:percent|pct)(?![A-Za-z])", r"\\%"),
    )
]  # fmt: skip
_THOUSANDS = re.compile(r"[^,\d]*\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:[^,\d](?:[^,]|,\d{3}(?!\d))*)?")
_PAIRS = re.compile(r"\d{1,3}(,[1-9]\d{2})+")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_CHOICE = re.compile(r"\(?\s*([A-Za-z]|[IVX]+)\s*\)|([A-Za-z])\s*\.")
_CHOSEN = re.compile(  # (C) 12: a choice with its value, which has no words and no second choice
    r"(?:\\text\s*\{\s*\(([A-Z])\)\s*\}|\(([A-Z])\)\s)(?:\\(?!text)[a-z]+|\\[$%]|[^,(A-Za-z\\])+"
)
_NAME = re.compile(  # the left side of an equation that names its value: no arithmetic, no function
    rf"(?:\\(?:{GREEK}|angle|overline|ell|hbar|max|min|gcd|lcm){_END}|\(-?\d{{1,3}}\)"
    r"|_(?:\{\w+\}|[A-Za-z0-9])|\\text\s*\{[^{}=+*/^\\-][^{}=+*/^\\]*\}|[A-Za-z(),|\[\]{}' ])+"
)
_MEMBER = re.compile(r"([A-Za-z])\s*\\in(?![A-Za-z])\s*(.+)")
_BASED = re.compile(r"\(?\s*(\d[0-9A-F]*|[A-F][0-9A-F]+)\s*\)?_\s*(?:\{\s*\(?(\d+)\)?\s*\}|(\d))")
_MATRIX = re.compile(
    r"\\begin\s*\{([pb](?:small)?)matrix\}(.*)\\end\s*\{\1matrix\}|"
    r"[(\[]\s*\\begin\s*\{array\}\s*\{[lcr ]*\}(.*)\\end\s*\{array\}\s*[)\]]"
)  # fmt: skip
_LABELS = re.compile(r"(?:\(\d\)\s*){2,}")
_RELATIONS = re.compile(r"(<|>|=|≤|≥|≠)")
_MIRRORED = {">": "<", "≥": "≤"}
_PLAIN = re.compile(r"symbol:.*|number:\d+")  # what an answer may have in common with a question
_GIVEN_PERCENT = re.compile(r"(?:\d[\s$}]*+|[\w)}])\\?%|\d[\s$}]*percent", re.IGNORECASE)
_FORMULAS = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_UNIT = re.compile(
    r"(.+?)\s*((?:\\text\s*\{(?:[^{}]|\{[^{}]*\})*\}\s*+(?:\^\s*\{?\s*-?\d\s*\}?)?\s*+(?:/|\\cdot)?\s*+)+)"
)
_BARE_UNIT = re.compile(  # written without \text
    r"(.*[\d)}])(\s+[a-z]{4,}(?: [a-z]+)*|\s*(?:cm|mm|km|in|ft|mi|kg|inches|feet|meters|miles|students|units"
    r"|degrees|[ap]\.?m|cents)(?:\^\{?[23]\}?)?)",
    re.IGNORECASE,
)
_SYMBOLS = frozenset("msghlNJWVACFTKL")  # units of one letter; other letters may be variables
_SYNONYMS = (  # spellings of a unit that become one
    (r"sq(?:uare)? (\w+)", r"\1^2"), (r"cu(?:bic)? (\w+)", r"\1^3"), (r"\binch(es)?\b", "in"),
    (r"\b(feet|foot)\b", "ft"), (r"centimet(er|re)s?\b", "cm"), (r"millimet(er|re)s?\b", "mm"),
    (r"kilomet(er|re)s?\b", "km"), (r"\bmet(er|re)s?\b", "m"), (r"\bdegrees\b", "degree"),
)  # fmt: skip
_NO_UNITS = frozenset(  # words that change the number before them, or deny it
    """
    hundred thousand bn googol dozen score gross pair couple half halves third quarter fourth fifth sixth seventh
    eighth ninth tenth hundredth thousandth eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
    nineteen twenty thirty forty fifty sixty seventy eighty ninety one two three four five six seven eight nine ten
    mil mille lakh crore doz permille ppm doubled tripled halved squared cubed negative opposite inverse reciprocal
    plus minus times over by divided factorial mod modulo root power to percent choose binary octal not no non
    never or and nor either neither but except unless if is are was wrong false incorrect about approximately
    roughly almost nearly around less more fewer greater least most than under above below between through
    repeating isn neg
    """.split()  # noqa: SIM905 (a list of words is easier to read as words)
)
_DENIALS = FUNCTIONS | {  # in a name, they say that its value is not the answer
    *"not no non never wrong false incorrect except neg isn minus half but sqrt".split()  # noqa: SIM905
}


@dataclass(frozen=True)
class Form:
    """A parsed answer: a kind with parts, or one expression (`node`); its name and unit if any."""

    kind: str
    parts: tuple["Form", ...] = ()
    node: Node | None = None
    name: str = ""
    unit: str = ""


def same(truth: str, answer: str, question: str, engine: Engine) -> bool:
    """True if the answer is the truth, worked out as far, and not copied from the question."""
    if len(answer) > max(_LONGEST, len(truth)):
        return False
    return any(
        _same(read(true), read(given), question, engine)
        for true in _readings(truth, question)
        for given in _readings(answer, question)
    )


def _readings(text: str, question: str) -> list[str]:
    """The text, `15,450` as two numbers too; or the product of letters that the question has."""
    word = text.strip(" $")
    if word.isalpha() and all(f"symbol:{letter}" in _terms(question) for letter in word):
        return [" ".join(word)]
    return [text, text.replace(",", ", ")] if _PAIRS.fullmatch(text.strip()) else [text]


def _same(true: Form, answer: Form, question: str, engine: Engine) -> bool:
    percent = _in_percent(answer) and not _in_percent(true)
    if percent and not re.search("percent|%", _GIVEN_PERCENT.sub("", question), re.IGNORECASE):
        return False  # 0.5 is not 0.5%
    asked = _terms(question) - {_bare(node).key for node in _nodes(true)}
    copied = asked & {_bare(node).key for node in _nodes(answer)}
    if not all(map(_PLAIN.fullmatch, copied)):
        return False
    return equal(true, answer, engine)


def _in_percent(form: Form) -> bool:
    return form.unit == "%" or any(map(_in_percent, form.parts))


def _nodes(form: Form) -> list[Node]:
    own = [] if form.node is None else [form.node]
    return own + [node for part in form.parts for node in _nodes(part)]


@lru_cache(maxsize=4096)
def _terms(question: str) -> frozenset[str]:
    """The keys (`Node.key`) of the expressions in the formulas of a question."""
    sides = [s for found in _FORMULAS.findall(question) for s in "".join(found).split("=")]
    nodes = [node for side in sides for node in _nodes(read(side))]
    names = (f"symbol:{name}" for node in nodes for name in node.symbols)
    return frozenset((*(_bare(node).key for node in nodes), *names))


def _bare(node: Node) -> Node:
    """Without sign, rational factors, terms of 0, power of 1: `x+1` of `-2(x+1)`; numbers stay."""
    if node.op != "negative" and node.literal:
        return replace(node, args=tuple(map(_bare, node.args)))
    if node.op == "negative" or (node.op == "quotient" and node.args[1].rational is not None):
        return _bare(node.args[0])
    if node.op == "power" and node.args[1].rational == 1:
        return _bare(node.args[0])
    if node.op in ("product", "sum"):
        left = [a for a in node.args if a.rational is None or (node.op == "sum" and a.rational)]
        return _bare(left[0]) if len(left) == 1 else node
    return node


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """The form of an answer; a text in no known notation equals only the same text."""
    try:
        return _read(spelled(text))
    except UnreadableError:
        return Form("unread " + "".join(text.split()))


def spelled(text: str) -> str:
    r"""The answer with `\dfrac`, `\left(`, `10,\!080`, `$5$` normalised; else UnreadableError."""
    text = text.translate(_SIGNS)
    if len(text) > 2 * _LONGEST or not text.isascii():
        raise UnreadableError("too long, or letters or digits that are not ASCII")
    text = re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", re.sub(r"\s+", " ", text))
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return _stripped(text)


def _stripped(text: str) -> str:
    """The text without final punctuation and without braces around all of it."""
    text = text.strip().rstrip(" .,;")
    while len(text) > 1 and text[0] == "{" and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _closing(text: str, start: int) -> int:
    """The index of the bracket, of any kind, that closes the one at `start`; -1 if none does."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return -1


def split(text: str, separator: str) -> list[str]:
    """The parts of a text between separators outside all brackets."""
    parts, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0 and place >= start and text.startswith(separator, place):
            parts.append(text[start:place].strip())
            start = place + len(separator)
    return [*parts, text[start:].strip()]


def _without_thousands(text: str) -> str:
    """`1,000\\pi` without its comma; one inside brackets or beside a space separates parts."""
    begin = 1 + max(text.rfind(sign) for sign in "=<>≤≥≠")
    first = re.split(r"[(\[{]", text[begin:], maxsplit=1)[0]
    name, rest = text[:begin], text[begin + len(first) :]
    whole = _THOUSANDS.fullmatch(first) and "," not in name + rest
    return name + first.replace(",", "") + rest if whole else text


def _read(text: str, depth: int = 0) -> Form:
    if depth > _DEPTH or not text:
        raise UnreadableError("no answer")
    text = _stripped(text)
    wrapped = _TEXT.fullmatch(text)
    inner = (wrapped[1] if wrapped else text).strip()
    words = _WORD.fullmatch(inner.rstrip("0123456789"))  # June 5
    words = words and (re.search("[A-Za-z]{3}", inner) or inner.casefold() == "no")
    if words or re.fullmatch("[IVX]{2,}", inner) or (wrapped and _WORD.fullmatch(inner[1:])):
        return Form("text " + " ".join(inner.casefold().strip(" .").split()))
    choice = _CHOICE.fullmatch(inner) or _CHOSEN.fullmatch(inner)
    text = _without_thousands(choice[1] or choice[2] if choice else inner)
    if not text:
        raise UnreadableError("an empty text")
    if choice and len(text) > 1:
        return Form("text " + text.casefold())
    if member := _MEMBER.fullmatch(text):
        return replace(_read(member[2], depth + 1), name=member[1])
    for kind in (_list, _relation, _union, _group):
        if (form := kind(text, depth + 1)) is not None:
            return form
    if based := _BASED.fullmatch(text):
        return Form(f"{based[1]} in base {based[2] or based[3]}")
    inside, unit = _unit_split(text)
    return Form("scalar", node=parse(_without_thousands(inside)), unit=unit)


def _list(text: str, depth: int) -> Form | None:
    r"""A set, from `1,-2`, `\{1,-2\}` or `1 \pm \sqrt{2}`: equal parts count once, in any order."""
    braces = text.startswith("\\{") and _closing(text, 1) == len(text) - 1
    inside = text[2:-2] if braces else text
    spaced = [_without_thousands(part) for part in split(inside, ", ")]  # 1,000, 2,000
    spaced = spaced if len(spaced) > 1 and "," not in "".join(spaced) else split(inside, ",")
    parts = [part for part in spaced if part]
    labels = re.findall(r"\d", text) if _LABELS.fullmatch(text) else []
    parts = labels if labels and labels == sorted({*labels}) else parts
    if len(parts) < 2 and not braces and "\\pm" not in text:
        return None
    forms: list[Form] = []
    for part in parts:
        first, *others = part.split("\\pm")
        if len(forms) + 2 ** len(others) > _PARTS:
            raise UnreadableError("too many parts")
        signed = product("+-", repeat=len(others))  # each with each
        forms += [_read(first + "".join(map(add, signs, others)), depth) for signs in signed]
    return Form("set", tuple(forms))


def _relation(text: str, depth: int) -> Form | None:
    """`x=5` is 5 with a name; other equations and inequalities keep their sides, smaller first."""
    sides = [side.strip() for side in _RELATIONS.split(text)]
    if len(sides) == 1:
        return None
    if len(sides) == 3 and sides[1] == "=" and _NAME.fullmatch(sides[0]):
        right = _read(sides[2], depth)
        if right.name or _DENIALS & {*re.findall("[a-z]+", sides[0])}:
            raise UnreadableError("what it is not, or a name for what has one")
        return replace(right, name=re.sub(r"[\s{}]", "", sides[0]))
    signs = {*sides[1::2]}
    if signs & _MIRRORED.keys():
        if signs & {*_MIRRORED.values()}:
            raise UnreadableError("inequalities in both directions")
        sides = [_MIRRORED.get(side, side) for side in reversed(sides)]
    return Form("relation " + "".join(sides[1::2]), tuple(_read(s, depth) for s in sides[::2]))


def _union(text: str, depth: int) -> Form | None:
    parts = split(text, "\\cup")
    return None if len(parts) == 1 else Form("union", tuple(_read(p, depth) for p in parts))


def _group(text: str, depth: int) -> Form | None:
    """Intervals and tuples (which look alike), matrices, ratios and times of day."""
    if matrix := _MATRIX.fullmatch(text):
        rows = [
            row
            for row in re.split(r"\\\\(?:\s*\[[^\[\]&]*\])?", matrix[2] or matrix[3])
            if row.strip()
        ]
        cells = [Form("row", tuple(_read(c.strip(), depth) for c in r.split("&"))) for r in rows]
        return Form("matrix", tuple(cells))
    kind, unit, parts = "ratio", "", []
    if text[0] in "([" and _closing(text, 0) == len(text) - 1:
        kind, parts = f"tuple {text[0]}{text[-1]}", split(_stripped(text[1:-1]), ",")
    if len(parts) < 2:
        inside, unit = _unit_split(text)
        kind, parts = "ratio", split(inside, ":")
    return Form(kind, tuple(_read(p, depth) for p in parts), unit=unit) if len(parts) > 1 else None


def _unit_split(text: str) -> tuple[str, str]:
    r"""The text without its unit, and the unit or "": `5\text{ inches}^2` gives 5 and "in^2"."""
    if money := re.fullmatch(r"(-?)\s*\\\$(.+)", text):
        return money[1] + money[2].strip(), "$"
    for ending, unit in (("\\%", "%"), ("\\degree", "degree")):
        turned = unit == "degree" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)
        if text.endswith(ending) and not turned:
            return text[: -len(ending)].strip(), unit
    match = _UNIT.fullmatch(text) or _BARE_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    unit = " ".join(re.sub(r"[{}]|\\cdot|\\text", " ", match[2]).replace(".", "").split())
    unit = re.sub(r"\s*\^\s*", "^", unit)
    unit = unit if len(unit) == 1 else unit.lower()
    for pattern, name in _SYNONYMS:
        unit = re.sub(pattern, name, unit)
    return match[1], unit


def _is_unit(unit: str) -> bool:
    """True if it does not change the number before it: `students`, `m/s`; not `thousand`, `00`."""
    if re.search(r"(?<![\^A-Za-z])(?<!\^-)\d|[+=<>]|(fold|illion)s?\b", unit):
        return False
    words = re.findall("[A-Za-z]+", unit)
    letters = [word for word in words if len(word) == 1]
    plain = {*letters} <= _SYMBOLS or (
        len(words) > 1 and {*letters} <= {s.lower() for s in _SYMBOLS}
    )
    changed = _NO_UNITS & {form for word in words for form in (word, word.removesuffix("s"))}
    return unit in ("%", "$") or (bool(words) and plain and not changed)


def _no_engine(truth: Node, answer: Node) -> bool:
    return False


def equal(truth: Form, answer: Form, engine: Engine) -> bool:
    """True if both forms say the same, with the answer worked out as far as the truth."""
    named = {part.name for part in truth.parts} - {""}  # x=1, y=2 keeps its order if not named
    in_order = len(named) == len(truth.parts) > 1 and not any(p.name for p in answer.parts)
    if not in_order:
        truth, answer = _once(truth), _once(answer)
    if truth.kind.startswith("text ") and answer.node and answer.node.op == "product":  # AB
        letters = "".join(str(part.value) or "?" for part in answer.node.args)
        answer = Form("text " + letters.casefold())
    truth, answer = _alike(truth, answer), _alike(answer, truth)
    if truth.kind != answer.kind or len(truth.parts) != len(answer.parts):
        return False
    if truth.name and answer.name and truth.name != answer.name:
        return False
    units = {truth.unit, answer.unit}
    if len(units) > 1 and not ("" in units and _is_unit(truth.unit or answer.unit)):
        return False
    if truth.node is not None and answer.node is not None:
        if answer.unit == "degree" != truth.unit and "\\pi" in truth.node.symbols:
            return False
        return _equal_nodes(truth.node, answer.node, engine)
    if in_order or truth.kind not in ("set", "union", "relation =", "relation ≠"):
        return all(equal(t, a, engine) for t, a in zip(truth.parts, answer.parts, strict=True))
    left = list(answer.parts)
    for part in truth.parts:
        match = next((other for other in left if equal(part, other, engine)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _once(form: Form) -> Form:
    """A set with each part once."""
    parts: list[Form] = []
    for part in form.parts if form.kind == "set" else ():
        if not any(equal(part, p, _no_engine) and equal(p, part, _no_engine) for p in parts):
            parts.append(part)
    return replace(form, parts=tuple(parts)) if parts else form


def _alike(form: Form, other: Form) -> Form:
    r"""The form in the other's notation where it can be: `\{2\}`, `x>2`, `4/13`."""
    if form.kind == "set" and len(form.parts) == 1 and other.kind != "set":
        return form.parts[0]
    if form.kind == "set" and all(part.kind.startswith("relation") for part in form.parts):
        return replace(form, kind=other.kind) if other.kind == "union" else form
    divided = form.node and form.node.op == "quotient" and form.node.args[1].rational != 0
    if form.node and divided and other.kind == "ratio":
        return Form("ratio", tuple(Form("scalar", node=part) for part in form.node.args))
    return _interval(form) if other.kind.startswith("tuple") else form


def _interval(form: Form) -> Form:
    """`2<x≤3` as an interval; other forms as they are."""
    relation = re.fullmatch(r"relation ([<≤]{1,2})", form.kind)
    places = [
        i for i, part in enumerate(form.parts)
        if part.node and part.node.op == "symbol" and part.node.value not in CONSTANTS
    ]  # fmt: skip
    if relation is None or len(places) != 1 or (len(form.parts) == 3 and places != [1]):
        return form
    low, high = form.parts[: places[0]], form.parts[places[0] + 1 :]
    kind = "(["[bool(low) and relation[1][0] == "≤"] + ")]"[bool(high) and relation[1][-1] == "≤"]
    return Form(f"tuple {kind}", (*(low or (read("-\\infty"),)), *(high or (read("\\infty"),))))


def _equal_nodes(truth: Node, answer: Node, engine: Engine) -> bool:
    if truth.key == answer.key:
        return True
    if not _worked_out(answer, truth):
        return False
    if truth.rational is not None:
        return truth.rational == answer.rational
    if answer.rational is not None and truth.symbols - CONSTANTS:  # without a name it may be `10!`
        return False
    return engine(truth, answer)


def _worked_out(answer: Node, truth: Node) -> bool:
    """True if the answer has no name, and no more operations of any kind, than the truth."""
    if answer.literal:
        known = truth.rational
        whole = known is not None and known.denominator == 1
        return not (whole and any(part.op == "quotient" for part in answer.walk()))
    return operations(answer) <= operations(truth)


def operations(node: Node) -> Counter[str]:
    """Counts the operations left to do in an expression (sums, roots, ...), and its symbols."""
    tally = Counter[str]()
    for part in node.walk():
        exponent = part.args[1] if part.op == "power" else None
        if part.op == "sum":
            tally["sum"] += len(part.args) - 1
        elif part.op == "product":
            tally["product"] += max(sum(arg.rational is not None for arg in part.args) - 1, 0)
        elif part.op == "symbol":
            tally[str(part.value)] += 1
        elif part.op == "quotient":
            tally["quotient"] += bool(part.args[1].symbols)
        elif exponent is not None:
            known = exponent.rational
            tally["quotient"] += exponent.op == "negative"
            tally["root" if known is not None and known.denominator > 1 else "power"] += known != -1
        elif part.op == "scientific":
            tally["power"] += 1
        elif part.op not in ("number", "negative"):
            tally[part.op] += 1
    return tally
