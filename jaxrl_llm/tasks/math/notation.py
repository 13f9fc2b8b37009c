r"""One way of writing for what LaTeX writes in many: `\dfrac`, `\left(`, `10,\!080`, `$5$`, units, words."""

# ruff: noqa: RUF001 (signs of mathematics that look like letters are what is replaced here)
import re

from jaxrl_llm.tasks.math.expression import FUNCTIONS, UnreadableError

LONGEST = 2000  # characters of an answer
_SIGNS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "√": r"\sqrt ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ",
    "∈": r"\in ", "°": r"\degree ", "²": "^2", "³": "^3", "\u00a0": " ", "’": "'",
})  # fmt: skip
_FUNCTIONS = "|".join(sorted(FUNCTIONS))
_POWER_IN_TEXT = re.compile(r"(\\text\s*\{[^{}]*)(?:\^\s*\{\s*(-?\d)\s*\}|(\\cdot)(?![A-Za-z]))")
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac"),
        (r"\\(?:dbinom|tbinom)(?![A-Za-z])", r"\\binom"),
        (r"\\(?:mathrm|operatorname)\s*\{\s*([ie])\s*\}", r"\1"),
        (r"\{\s*\\(?:rm|bf|it|sf)\s+([^{}]*)\}", r"\\text{\1}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (
            r"\\(?:mbox|hbox|textup|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname)(?=\s*\{)",
            r"\\text",
        ),
        (rf"\\text\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"_\s*\{\s*\\text\s*\{\s*(?:base\s*)?\(?\s*(\w*)\s*\)?\s*\}\s*(\d*)\s*\}", r"_{\1\2}"),
        (r"\\text\s*\{\s*\(?\s*base(?: (\w+)|(\d+))\s*\)?\s*\}$", r"_{\1\2}"),
        (r"\\text\s*\{\s*([0-9A-F]+)\s*\}(?=\s*_)", r"\1"),
        (r"\\text\s*\{\s*([:,])\s*\}|\{(:)\}", r"\1\2"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])", ""),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"(?<=\d)(?:\{,\}|,\\!\s?|\\,)(?=\d{3}(?!\d))", "\x01"),  # thousands, beyond doubt
        (r"\\(?:emptyset|varnothing)(?![A-Za-z])", r"\\{\\}"),
        (r"(?<=\.)(\d*)\\(?:bar|dot)\s*(?:\{(\d+)\}|(\d))", r"\1\\overline{\2\3}"),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"(?<![A-Za-z])([ap])\.\s?m\.?(?![A-Za-z])", r"\1m"),
        (r"(?<=\d)\s*\^\s*\{?\s*(\\text\s*\{\s*(?:th|st|nd|rd)\s*\})\s*\}?", r"\1"),
        (r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))", r"\\degree "),
        (r"\\degree\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF]))\s*$", r"\\text{ degree \1\2}"),
        (r"\\mu\s*\\text\s*\{\s*(?=[a-z])", r"\\text{u"),
        (r"(?<=[\d}])\s*\\Omega\s*$", r"\\text{ ohm}"),
        (r"\\mathbb\s*\{\s*R\s*\}", r"(-\\infty,\\infty)"),
        (r"\\(?:leq|leqslant|le)(?![A-Za-z])", "≤"),
        (r"\\(?:geq|geqslant|ge)(?![A-Za-z])", "≥"),
        (r"\\(?:neq|ne)(?![A-Za-z])|\\not\s*=", "≠"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace|rbrace)(?![A-Za-z])", lambda m: r"\{" if m[0] == r"\lbrace" else r"\}"),
        (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|cot|ln|log|infty)(?![A-Za-z])", r"\\\1 "),
        (r"\\text\s*\{\s*(?:or|and|OR|AND)\s*\}|(?<![A-Za-z\\])(?:or|and|OR|AND)(?![A-Za-z])", ","),
        (
            r"\\%|%|\\text\s*\{\s*(?:per\s?cent|pct|\\?%)\s*\}|(?<![A-Za-z])(?:per\s?cent|pct)(?![A-Za-z])",
            r"\\%",
        ),
    )
]
_ROUNDED = re.compile(r" ?-?\d+(?:\.\d+)?(?: ?\\text ?\{[^{}]*\})? ?")
_THOUSANDS = re.compile(r"(?:[^,]*=)?[^,=\d]*\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:[^,\d].*)?")


def clean(text: str) -> str:
    """The answer with one spelling for each sign; UnreadableError for other alphabets, or a novel."""
    if len(text) > LONGEST:
        raise UnreadableError("too long for an answer")
    text = text.translate(_SIGNS)
    if not text.isascii():
        raise UnreadableError("letters or digits that are not ASCII")
    text = re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", re.sub(r"\s+", " ", text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    exact, _, rounded = text.partition("\\approx")
    if _ROUNDED.fullmatch(rounded) and "=" not in exact and re.search(r"\d", exact):
        text = exact
    while match := _POWER_IN_TEXT.search(text):  # \text{m \cdot s^{-1}}
        inside = f"^{match[2]}" if match[2] else "*"
        text = text[: match.start()] + match[1] + inside + text[match.end() :]
    return stripped(text.replace("\x01", ""))


def stripped(text: str) -> str:
    """Without what closes a sentence, and without braces around all of it."""
    text = re.sub(r"\s+", " ", text).strip().rstrip(" .,;")
    while len(text) > 1 and text[0] == "{" and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def without_thousands(text: str) -> str:
    """`1,000\\pi` without its comma; inside brackets a comma separates, as it does beside a space."""
    first = re.split(r"[(\[{]", text, maxsplit=1)[0]
    whole = _THOUSANDS.fullmatch(first) and "," not in text[len(first) :]
    return first.replace(",", "") + text[len(first) :] if whole else text


def readings(text: str) -> list[str]:
    """The text, and as it may be meant too: `15,450` as two numbers, `3e-5` as a printed number."""
    other = text.replace(",", ", ") if _PAIRS.fullmatch(text.strip()) else text
    return [*dict.fromkeys((text, _EULER_OR_TEN.sub(r"\1 \\times 10^{\2}", other)))]


_PAIRS = re.compile(r"\d{1,3}(,[1-9]\d{2})+")
_EULER_OR_TEN = re.compile(r"(?<![\w.])(\d+)[eE]([+-]\d{1,3})(?![\w.^!])")


def closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`, of whatever kind; -1 if none does."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return -1


def split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place].strip())
            place += len(separator)
            start = place
        else:
            place += 1
    return [*parts, text[start:].strip()]


WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
ROMAN = re.compile(r"[IVX]{2,}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")


def words(text: str) -> str | None:
    r"""What a purely verbal answer says, in lower case: `\text{Tuesday}`, `Tuesday`; None for others."""
    wrapped = _TEXT.fullmatch(text)
    said = " ".join((wrapped[1] if wrapped else text).split()).strip(" .")
    if not WORDS.fullmatch(said):
        return None
    long = any(len(word) > 2 for word in re.findall("[A-Za-z]+", said)) or said.casefold() == "no"
    if long or (wrapped and len(said) > 1):
        return said.casefold()
    return None


def unwrapped(text: str) -> str:
    r"""`5` for `\text{5}`, `C` for `\text{(C)}` and `(C)`."""
    wrapped = _TEXT.fullmatch(text)
    text = wrapped[1].strip() if wrapped else text
    letter = re.fullmatch(r"\(?\s*([A-Za-z]|[IVX]+)\s*\)|([A-Za-z])\s*\.", text)
    return letter[1] or letter[2] if letter else text


_UNIT_NAMES = {
    "cm": "cm centimeter centimeters centimetre centimetres", "m": "meter meters metre metres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres", "in": "in inch inches",
    "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles", "mph": "mph",
    "g": "gram grams", "kg": "kg kilogram kilograms", "mg": "mg", "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces", "s": "sec second seconds", "min": "min minute minutes",
    "h": "hr hrs hour hours", "day": "day days", "week": "week weeks wk wks",
    "month": "month months mo", "year": "year years yr yrs", "$": "dollar dollars",
    "cent": "cent cents", "unit": "unit units",
    "degree": "degree degrees", "rad": "rad radian radians", "l": "liter liters litre litres",
    "ml": "ml milliliter milliliters", "people": "people",
    "am": "am", "pm": "pm",
}  # fmt: skip
_UNIT_OF = {name: unit for unit, names in _UNIT_NAMES.items() for name in names.split()}
_SHORT = {  # only within \text
    "m": "m", "s": "s", "g": "g", "h": "h", "L": "l", "l": "l", "M": "million", "k": "thousand",
}  # fmt: skip
_SYMBOLS = frozenset(  # that are shorter than a word; other letters may be names of numbers
    """
    m s g h l n j w v a c f t k hz pa ev kw kn kj kv mj mw gw ma mv nm pm um ms us ns db ly au pc hp cc ha
    gb mb kb tb dm cl dl mn wb lm lx cd th st nd rd qt pt ac of o
    """.split()  # noqa: SIM905 (a list of words is easier to read as words)
)
KNOWN_UNITS = frozenset(_UNIT_NAMES) | {f"{unit}^{n}" for unit in _UNIT_NAMES for n in "23"} | {"%"}
_TEXT_UNIT = re.compile(r"(.*?)\s*\\text\s*\{([^{}]*)\}\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?$")
_JOINT = re.compile(
    r"(\\text\s*\{[^{}]*)\}\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?\s*(/|\\cdot|)\s*\\text\s*\{"
)
_TURNED = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_COMPOUND = re.compile(r"[a-z]+(\^?-?\d)?([ /*'-]+[a-z]+(\^?-?\d)?){0,3}")
_PLAIN = frozenset({"times", "ordered pairs", "unordered pairs"})  # where they stand alone
_NO_UNITS = frozenset(
    """
    hundred hundreds thousand thousands million millions billion billions trillion trillions dozen dozens score
    gross pair pairs couple half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths
    eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen thirty forty fifty sixty seventy
    eighty ninety mil lakh lakhs crore crores doz factorials negative opposite inverse reciprocal mille permille
    ppm fold twofold threefold tenfold hundredfold thousandfold millionfold
    seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths
    one two three four five six seven eight nine ten twenty plus minus times over by divided squared cubed
    factorial mod modulo root power to the percent choose base binary octal not no non never or and nor either
    neither but except unless if is are was wrong false incorrect about approximately roughly almost nearly
    around less more fewer greater least most than under above below between through repeating
    """.split()  # noqa: SIM905 (a list of words is easier to read as words)
)
_DENIALS = frozenset(
    "not no non never nor neither wrong false incorrect except unless neg isn minus half".split()  # noqa: SIM905
)
_BARE_UNIT = re.compile(
    r"(.*?[\d)}])\s*((?:square |cubic |sq |cu )?[A-Za-z]{2,})(?:\^\{?([23])\}?)?$"
)


def unit_split(text: str) -> tuple[str, str]:
    r"""The text without its unit, and the unit: `5\text{ inches}^2` is 5 and "in^2"; "" if it has none."""
    if text.startswith("\\$"):
        return text[2:].strip(), "$"
    for ending, unit in (("\\%", "%"), ("\\degree", "degree")):
        if text.endswith(ending) and not (unit == "degree" and _TURNED.search(text)):
            return text[: -len(ending)].strip(), unit
    match = _TEXT_UNIT.match(_joined(text))
    if match and match[1]:
        return match[1], _unit(match[2], match[3], _SHORT)
    match = _BARE_UNIT.match(text)
    if match and (unit := _unit(match[2], match[3], {})) in KNOWN_UNITS:
        return match[1].strip(), unit
    return text, ""


def _joined(text: str) -> str:
    r"""One unit for several in a row: `\text{m}/\text{s}^2` is `\text{m/s}^2`."""
    while match := _JOINT.search(text):
        unit, power, sign = match.groups()
        between = (f"^{power}" if power else "") + {"": " ", "\\cdot": "*"}.get(sign, sign)
        text = text[: match.start()] + unit + between + text[match.end() :]
    return text


_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}


def scaled(unit: str) -> tuple[int, str]:
    """What the number before it is multiplied by, and the unit that is left: `million dollars`."""
    word, _, rest = unit.partition(" ")
    return (_SCALES[word], _unit(rest, None, {})) if word in _SCALES else (1, unit)


def is_unit(unit: str) -> bool:
    """Whether it leaves the number before it as it is: `students`, `m/s`; not `thousand`, `or less`."""
    words = re.findall("[a-z]+", unit)
    plain = all(len(word) > 2 or word in _SYMBOLS or word in _UNIT_OF for word in words)
    compound = _COMPOUND.fullmatch(unit) and plain and not _NO_UNITS & {*words}
    return unit in KNOWN_UNITS | _PLAIN or bool(compound)


def denies(name: str) -> bool:
    r"""Whether a name says that what follows is not it: `\text{wrong}`, `\neg`."""
    return bool(_DENIALS & {*re.findall("[a-z]+", name.casefold())})


def _unit(name: str, exponent: str | None, short: dict[str, str]) -> str:
    """The unit's own name; an unknown one is its text without spaces and dots."""
    plain = " ".join(name.replace(".", "").split())
    for prefix, power in (("square ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if plain.startswith(prefix) and exponent is None:
            plain, exponent = plain.removeprefix(prefix), power
    if len(plain) == 1 and plain.islower() and plain not in short:
        return f"\\{plain}" + (f"^{exponent}" if exponent else "")  # a letter, and no unit
    unit = short.get(plain) or _UNIT_OF.get(plain.casefold()) or plain.casefold()
    return f"{unit}^{exponent}" if exponent else unit
