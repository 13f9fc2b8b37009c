"""Math problems from parquet, JSONL, JSON and the Hugging Face hub; the published ones by name."""

import json
import logging
import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.tasks.math.grade import read

logger = logging.getLogger(__name__)

Row = Mapping[str, Any] | Sequence[Any]

_QUESTION_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "target")
_EITHER = re.compile(r"(.+) or (.+) \(both were accepted\)")
_BOX = "\\boxed{"
_LOST = re.compile("unread|text .{60}")  # forms of truths that equal only the same text
LONG = 40  # letters and digits that a question needs to be found within a longer text
_INSTRUCTION = "Let's think step by step"  # begins the text that published data add to a question


@dataclass(frozen=True)
class Problem:
    """A question and its accepted answers, `truths`, in LaTeX or plain notation; else TypeError."""

    question: str
    truths: tuple[str, ...]

    def __post_init__(self):
        if not isinstance(self.question, str):
            raise TypeError(f"a question is a text, not {self.question!r:.60}")
        if isinstance(self.truths, str) or not all(isinstance(t, str) for t in self.truths):
            raise TypeError(f"the truths of a problem are a tuple of texts, not {self.truths!r}")
        if not any(self.truths):
            raise TypeError("a problem needs at least one truth")
        try:
            "".join((self.question, *self.truths)).encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"a text that is no Unicode: {error}") from error


def problem_of(row: Row) -> Problem:
    """The problem of a row: `problem`, `answer`; a chat `prompt`, `reward_model`; or two turns."""
    if not isinstance(row, Mapping):
        return Problem(row[0]["value"], truths(row[1]["ground_truth"]["value"]))
    question = _first(row, _QUESTION_COLUMNS)
    if isinstance(question, list):  # a chat: the user's last message
        question = [turn["content"] for turn in question if turn["role"] == "user"][-1]
    if row.get("reward_model") is not None:
        return Problem(question, truths(row["reward_model"]["ground_truth"]))
    answer = _first(row, _ANSWER_COLUMNS)
    if isinstance(answer, list) and row.get("is_multiple_answer"):  # parts, no alternatives
        answer = ", ".join(_final(str(part)) for part in answer)
    return Problem(question, truths(answer))


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    for column in columns:
        if row.get(column) is not None:
            return row[column]
    raise KeyError(f"none of {', '.join(columns)}")


def truths(stored: Any) -> tuple[str, ...]:
    r"""The accepted answers in a cell: a text (`72` of `#### 72`, `\boxed{72}`), number or list."""
    if isinstance(stored, str):
        both = _EITHER.fullmatch(stored.strip())
        stored = both.groups() if both else _printed_list(stored)
    items = stored if isinstance(stored, list | tuple) else [stored]
    for item in items:
        if not isinstance(item, str | int | float) or item != item:
            raise TypeError(f"an answer is a text or a number, not {item!r:.60}")
    texts = [_final(str(item)).strip() for item in items]
    return tuple(dict.fromkeys(filter(None, texts)))


def _final(text: str) -> str:
    inside = boxed(text)
    return text.rpartition("####")[2] if inside is None else inside


def boxed(text: str) -> str | None:
    r"""The text in the last `\boxed{}`; None without one.

    A box around another one is returned with it, and cannot be read as an answer.
    """
    inside, start = None, text.find(_BOX)
    while start >= 0:
        inside = _braced(text, start + len(_BOX))
        if inside is None:
            return None
        start = text.find(_BOX, start + len(_BOX) + len(inside))
    return inside


def _braced(text: str, start: int) -> str | None:
    """The text from `start`, behind an open brace, up to the brace that closes it; None if none."""
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place]
        place += 1
    return None


def _printed_list(text: str) -> list[str] | str:
    """The list that a text like `['9.6\\n']` shows; else the text, as for an interval `[-2,4]`."""
    if not text.strip().startswith("["):
        return text
    try:
        listed = literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    texts = isinstance(listed, list) and listed and all(isinstance(t, str) for t in listed)
    return listed if texts else text


def from_file(path: str | Path, convert: Callable[[Row], Problem] = problem_of) -> list[Problem]:
    """The problems of a parquet, JSONL or JSON (one list) file, by its suffix; or UserError."""
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise UserError(f"cannot read {path}: its name ends in none of {', '.join(_READERS)}")
    try:
        rows = reader(Path(path))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    problems = []
    for number, row in enumerate(rows):
        try:
            problems.append(convert(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            columns = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise UserError(
                f"{path}, row {number} ({columns}): no problem found: {error}"
            ) from error
    if not problems:
        raise UserError(f"{path} holds no problems")
    if lost := [
        n for n, p in enumerate(problems) if all(_LOST.match(read(t).kind) for t in p.truths)
    ]:
        row, truth = lost[0], problems[lost[0]].truths[0]
        said = "no answer but this very text is right there: %.80r; rows like this one: %d of %d"
        logger.warning(f"%s, row %d: {said}", path, row, truth, len(lost), len(problems))
    return problems


def _json_lines(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: U+2028 ends no line
    return [_json(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _json_list(path: Path) -> list[Row]:
    rows = _json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(rows, list):
        raise UserError(f"{path} holds a {type(rows).__name__}, not a list of problems")
    return rows


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from error


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
    ".jsonl": _json_lines,
    ".json": _json_list,
}


def from_hub(
    name: str, split: str, convert: Callable[[Row], Problem] = problem_of
) -> list[Problem]:
    """The problems of a hub data set's split, in parquet or JSONL files; none of its code runs.

    A data set of several configs, which have a folder each, needs one: `openai/gsm8k/main`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    owner, *parts = name.split("/")
    try:
        folder = snapshot_download(
            "/".join([owner, *parts[:1]]),
            repo_type="dataset",
            allow_patterns=["*.parquet", "*.jsonl"],
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = first_line(error)
        raise UserError(f"cannot download the data set {name!r}: {reason}") from error
    folder = Path(folder, *parts[1:])
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _READERS]
    names = {path: str(path.relative_to(folder)) for path in files}
    chosen = [path for path, name in names.items() if split in re.split(r"[^A-Za-z0-9]+", name)]
    if not chosen:
        found = ", ".join(names.values()) or "none at all"
        raise UserError(f"the data set {name!r} has no files of the split {split!r}: {found}")
    places = {"/".join(p for p in names[path].split("/")[:-1] if p != split) for path in chosen}
    if len(places) > 1:
        one = ", ".join(filter(None, sorted(places)))
        raise UserError(f"the data set {name!r} has {split!r} in several folders: add one, /{one}")
    return [problem for path in chosen for problem in from_file(path, convert)]


def without(problems: Sequence[Problem], held_out: Sequence[Problem]) -> list[Problem]:
    """The problems whose question neither is nor contains a held-out one.

    Letters and digits are compared. Held-out questions with less than `LONG` must match as a whole.
    """
    taken = {_folded(problem.question) for problem in held_out}
    long = [text for text in taken if len(text) >= LONG]
    folded = [(problem, _folded(problem.question)) for problem in problems]
    return [p for p, text in folded if text not in taken and not any(one in text for one in long)]


def _folded(question: str) -> str:
    """A question's letters and digits in lower case, up to the published instruction."""
    asked = question.partition(_INSTRUCTION)[0]
    return "".join(filter(str.isalnum, asked.casefold()))


@dataclass(frozen=True)
class Suite:
    """A named data set: answered greedily, and with `samples` also so often each (avg@k, pass@k).

    Sets to train on have no `hub` name, as the hub has none in a supported form: give a local file.
    """

    name: str
    hub: str = ""
    split: str = "test"
    samples: int = 0

    def load(self, source: str | Path = "") -> list[Problem]:
        """The problems of a local parquet, JSONL or JSON file or a hub name, by default `hub`."""
        if not source and not self.hub:
            raise UserError(f"the math suite {self.name} needs a file: parquet, JSONL or JSON")
        if (
            Path(source).suffix in _READERS or Path(source).is_file()
        ):  # any other name with a dot may be of the hub
            return from_file(source)
        return from_hub(str(source or self.hub), self.split)


_ALL = (
    Suite("math500", "HuggingFaceH4/MATH-500"),
    Suite("minerva", "math-ai/minervamath"),
    Suite("olympiad", "math-ai/olympiadbench"),
    Suite("amc", "math-ai/amc23", samples=16),
    Suite("aime24", "HuggingFaceH4/aime_2024", split="train", samples=16),
    Suite("dsr_uniform", split="train"),
    Suite("orz", split="train"),
)
SUITES = {suite.name: suite for suite in _ALL}


def suite(name: str) -> Suite:
    """The suite of that name; UserError if there is none."""
    if name not in SUITES:
        raise UserError(f"no math suite {name!r}: there are {', '.join(SUITES)}")
    return SUITES[name]
