"""Math problems from parquet, JSONL, JSON and the Hugging Face hub; the published ones by name."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import tables
from jaxrl_llm.tasks.math.grade import read
from jaxrl_llm.tasks.tables import final, truths

logger = logging.getLogger(__name__)

Row = Mapping[str, Any] | Sequence[Any]

_QUESTION_COLUMNS = ("problem", "question", "prompt")
_ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "target")
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
        answer = ", ".join(final(str(part)) for part in answer)
    return Problem(question, truths(answer))


def _first(row: Mapping[str, Any], columns: Sequence[str]) -> Any:
    for column in columns:
        if row.get(column) is not None:
            return row[column]
    raise KeyError(f"none of {', '.join(columns)}")


def from_file(path: str | Path, convert: Callable[[Row], Problem] = problem_of) -> list[Problem]:
    """The problems of a parquet, JSONL, JSON (one list) or CSV file, by its suffix; or UserError."""
    problems = []
    for number, row in enumerate(tables.rows(Path(path))):
        try:
            problems.append(convert(row))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            columns = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise UserError(
                f"{path}, row {number} ({columns}): no problem found: {error}"
            ) from error
    if not problems:
        raise UserError(f"{path} holds no problems")
    if lost := [n for n, p in enumerate(problems) if not any(map(is_read, p.truths))]:
        row, truth = lost[0], problems[lost[0]].truths[0]
        said = "no answer but this very text is right there: %.80r; rows like this one: %d of %d"
        logger.warning(f"%s, row %d: {said}", path, row, truth, len(lost), len(problems))
    return problems


def is_read(truth: str) -> bool:
    """True if another text than this very one can equal a truth."""
    return not _LOST.match(read(truth).kind)


def from_hub(name: str, split: str) -> list[Problem]:
    """The problems of a split of a data set at the hub, `owner/name`, with `:config` if it has several."""
    return [problem for path in tables.of_hub(name).require(split) for problem in from_file(path)]


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
        if tables.is_local(source):
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
