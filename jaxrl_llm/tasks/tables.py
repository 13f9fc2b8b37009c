"""Rows of data in files (parquet, JSONL, JSON, CSV) and on the Hugging Face hub, and the questions in them."""

import csv
import gzip
import json
import re
import sys
import zlib
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet

from jaxrl_llm.errors import UserError, first_line

Row = Mapping[str, Any]
Asked = str | tuple[Mapping[str, str], ...]

# In the order in which they are looked for. A prompt may hold an instruction of its own, a question does not.
PROMPTS = ("problem", "question", "prompt", "messages", "query", "instruction")
_LISTS = ("golden_answers", "possible_answers")
ANSWERS = (
    *("answer", *_LISTS),
    *("final_answer", "expected_answer", "ground_truth", "target", "solution"),
    *("answerKey", "label"),
)
CHOICES = ("choices", "options")
LETTERS = "ABCDEFGHIJ"
_UTF8 = "utf-8-sig"  # with the mark that some programs put first, or without
_UNREADABLE = (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error, pyarrow.ArrowException)
_EITHER = re.compile(r"(.+) or (.+) \(both were accepted\)")
_NUMBERED = re.compile(
    r"(?:[-_.](?:part|shard)?[-_]?\d+(?:-of-\d+)?(?:-[0-9a-f]{8,})?)?"
    r"(?:\.(?:parquet|jsonl|jsonl\.gz|json|csv|tsv))?$"
)
_BOX = "\\boxed{"


def rows(path: Path) -> list[Any]:
    """The rows of a file, read by its suffix; a UserError if it cannot be read."""
    reader = READERS.get(path.suffix)
    if reader is None:
        raise UserError(f"cannot read {path}: its name ends in none of {', '.join(READERS)}")
    try:
        return reader(path)
    except _UNREADABLE as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _json_lines(path: Path) -> list[Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding=_UTF8) as lines:  # not splitlines: U+2028 ends no line
        return [_json(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def _json_list(path: Path) -> list[Any]:
    found = _json(path.read_text(encoding=_UTF8), str(path))
    if not isinstance(found, list):
        raise UserError(f"{path} holds a {type(found).__name__}, not a list of rows")
    return found


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        said = error if error.lineno > 1 else f"{error.msg} at character {error.pos + 1}"
        raise UserError(f"{where}: not JSON: {said}") from error
    except ValueError as error:  # Python reads 4300 digits
        raise UserError(f"{where}: a number of too many digits: write it as a text") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects too deep in one another") from error


def _csv(path: Path) -> list[Any]:
    with path.open(encoding=_UTF8, newline="") as file:
        between = max(",;\t", key=file.readline().count)  # some spreadsheets write semicolons
    return _cells(path, between)


def _tsv(path: Path) -> list[Any]:
    try:
        return _cells(path, "\t")
    except csv.Error:  # written without quotes, so one is a character
        return _cells(path, "\t", quoting=csv.QUOTE_NONE)


def _cells(path: Path, between: str, **settings: Any) -> list[Any]:
    cells = []
    csv.field_size_limit(sys.maxsize)  # not 131,072 characters, which a document may have
    with path.open(encoding=_UTF8, newline="") as file:
        rows = csv.DictReader(file, delimiter=between, strict=True, **settings)
        for row in rows:
            if any(row.get(cast(Any, None)) or ()):
                raise UserError(
                    f"{path}, line {rows.line_num}: more cells than columns: put texts with {between!r} in quotes"
                )
            cells.append({name: x or None for name, x in row.items() if name})
    return cells


def _published(path: Path) -> list[Any]:
    """The rows of `of_published`'s files, which are none here but names."""
    from jaxrl_llm.tasks import builders

    return builders.rows_of(str(path.parent), path.stem)


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".parquet": lambda path: pyarrow.parquet.read_table(path).to_pylist(),
    ".jsonl": _json_lines,
    ".gz": _json_lines,
    ".json": _json_list,
    ".csv": _csv,
    ".tsv": _tsv,
    ".tfds": _published,
}


def is_local(source: str | Path) -> bool:
    """True if a source is a file here; any other name, with a dot in it too, is of the hub."""
    return Path(source).suffix in READERS or Path(source).is_file()


@dataclass(frozen=True)
class HubData:
    """A data set of the hub as it is on disk: its files by their path there, of one config if that is named."""

    name: str
    config: str
    files: Mapping[Path, str]

    def find(self, *splits: str) -> list[Path]:
        """The files of the first of `splits` that there is; empty without one."""
        known = self._called(self.config, [*self.files])
        found = ((split, self._called(split, known)) for split in splits)
        split, chosen = next((one for one in found if one[1]), ("", []))
        names = {path: _names(self.files[path]) for path in chosen}
        longer = sorted({parts[-1] for parts in names.values() if split not in parts})
        if len(longer) > 1:
            published = all(path.suffix == ".tfds" for path in chosen)
            start = f"tfds:{self.name}" if published else f"{self.name}:{self.config}"
            raise UserError(
                f"the data set {self.name!r} has several splits with {split!r} in their names "
                f"({', '.join(longer)}): name one, as {start}:{longer[0]} (--test: those to test on)"
            )
        places = {"/".join(x for x in parts[:-1] if x != split) for parts in names.values()}
        if len(places) > 1:
            several = ", ".join(filter(None, sorted(places)))
            raise UserError(
                f"the data set {self.name!r} has {split!r} for several configs ({several}): "
                f"name one, as {self.name}:CONFIG"
            )
        kinds = [kind for kind in READERS if any(path.suffix == kind for path in chosen)]
        # others have the same rows again
        return [path for path in chosen if path.suffix == kinds[0]]

    def _called(self, wanted: str, paths: Sequence[Path]) -> list[Path]:
        """Of these files those of this name, or in a folder of it; else those with its words in theirs."""
        exact = [path for path in paths if wanted in _names(self.files[path])]
        words = {*_words(wanted)}
        return exact or [path for path in paths if words <= {*_words(self.files[path])}]

    def require(self, *splits: str) -> list[Path]:
        """The same; a UserError without one."""
        if found := self.find(*splits):
            return found
        nothing = "no file's name has that in it" if self.config else "none at all"
        listed = ", ".join(self.files.values()) or nothing
        which = f" and the config {self.config!r}" * bool(self.config)
        wanted = " or ".join(map(repr, splits))
        raise UserError(
            f"the data set {self.name!r} has no files of the split {wanted}{which}: {listed}"
        )


def of_hub(name: str) -> HubData:
    """The data set `owner/name[:config]` of the hub: parquet, JSONL or CSV; none of its code runs."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, config = name.partition(":")
    words = "*".join(["", *_words(config), ""])  # of a repository of many sets one is wanted
    kinds = [f"{words}.parquet", f"{words}.jsonl", f"{words}.csv"]
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=kinds))
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        reason = first_line(error)
        raise UserError(f"cannot download the data set {name!r}: {reason}") from error
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in READERS]
    return HubData(name, config, {path: str(path.relative_to(folder)) for path in files})


def of_published(name: str) -> HubData:
    """The data set `NAME[/CONFIG]` of tensorflow-datasets, a file each split."""
    from jaxrl_llm.tasks import builders  # whose library takes seconds to import

    splits = builders.published(name).info.splits
    return HubData(name, "", {Path(name, f"{split}.tfds"): split for split in splits})


def _names(text: str) -> list[str]:
    """A path's folders, and its name but for numbers: `train_sft` of train_sft-00000-of-00003.parquet."""
    *folders, name = text.split("/")
    return [*folders, _NUMBERED.sub("", name)]


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9]+", text)


def truths(stored: Any, printed: bool = True) -> tuple[str, ...]:
    r"""The accepted answers in a cell: a text (`72` of `#### 72`, `\boxed{72}`), number or list.

    A text that shows a list, `['72', '73']`, is one, unless `printed` is False.
    """
    if isinstance(stored, str):
        both = _EITHER.fullmatch(stored.strip())
        stored = both.groups() if both else _printed_list(stored) if printed else stored
    if isinstance(stored, Mapping):  # TriviaQA's, and the truth of Search-R1's rows
        stored = stored.get("target", [stored.get("value"), *stored.get("aliases", [])])
    items = stored if isinstance(stored, list | tuple) else [stored]
    items = [int(x) if isinstance(x, float) and x.is_integer() else x for x in items]  # 42 of 42.0
    for item in items:
        if not isinstance(item, str | int | float) or item != item:
            raise TypeError(f"an answer is a text or a number, not {item!r:.60}")
    texts = [final(str(item)).strip() for item in items]
    return tuple(dict.fromkeys(filter(None, texts)))


def final(text: str) -> str:
    r"""The content of the last `\boxed{}` of a solution, or behind its last `####`; else all of it."""
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


def _printed_list(text: Any) -> Any:
    """The list that a text like `['9.6\\n']` shows; else the same, as for an interval `[-2,4]`."""
    if not (isinstance(text, str) and text.strip().startswith("[")):
        return text
    try:
        listed = literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    texts = isinstance(listed, list) and listed and all(isinstance(t, str) for t in listed)
    return listed if texts else text


@dataclass(frozen=True)
class Question:
    """The prompt (a text, or messages), the answers that are right, and the row it comes from.

    `hint` is what only a teacher is told.
    """

    prompt: Asked
    truths: tuple[str, ...]
    row: Row = field(compare=False, repr=False)
    hint: str = ""


def column(row: Row, wanted: str, names: Sequence[str], flag: str) -> str:
    """The name of the column `wanted`, or of the first of `names` that the row has; or a UserError.

    `Answer` is `answer` too.
    """
    there = {name.lower(): name for name in sorted(row, key=lambda name: row[name] is not None)}
    asked = [wanted] if wanted else [there.get(name.lower(), name) for name in names]
    found = [name for name in asked if name in row]
    if full := [name for name in found if row[name] is not None]:
        return full[0]
    if found:
        raise UserError(f"its {found[0]} is empty: fill it in, or leave the row out")
    known = ", ".join(row) or "no columns"
    raise UserError(f"no {wanted or ' or '.join(names)} among {known}: name the column by {flag}")


def prompt_of(row: Row, wanted: str = "") -> Asked:
    """The prompt of a row: a text, or messages up to the last that is not the assistant's."""
    name = column(row, wanted, PROMPTS, "--prompt-column")
    value = row[name]
    if isinstance(value, str) and value.strip():
        what = row.get("input") if name == "instruction" and not wanted else None  # as Alpaca's
        return f"{value}\n\n{what}" if what else value
    try:
        chat = [{"role": one["role"], "content": one["content"]} for one in cast(Any, value)]
    except (TypeError, KeyError) as error:
        raise UserError(
            f"a prompt is a text or messages with role and content, not {value!r:.60}"
        ) from error
    while chat and chat[-1]["role"] == "assistant":
        chat.pop()
    if not chat or not all(isinstance(one["content"], str) for one in chat):
        raise UserError(f"a prompt with no text in it: {value!r:.60}")
    return tuple(chat)


def answer_of(row: Row, wanted: str = "") -> Any:
    """The truth of a row: a column, verl's `reward_model`, or the assistant's last message."""
    if not wanted and isinstance(row.get("reward_model"), Mapping):
        return row["reward_model"].get("ground_truth")
    messages = row.get("messages")
    try:
        name = column(row, wanted, ANSWERS, "--answer-column")
        answer = _printed_list(row[name]) if name in _LISTS else row[name]
        aliases = None if wanted else row.get("answer_aliases")  # MuSiQue's
        return [answer, *truths(aliases)] if aliases else answer
    except UserError:
        last = messages[-1] if isinstance(messages, list | tuple) and messages else {}
        if not wanted and isinstance(last, Mapping) and last.get("role") == "assistant":
            return last["content"]
        raise


def choices_of(row: Row) -> dict[str, str]:
    """The texts that a row gives to choose from, by its own names for them; none if it gives none."""
    choices = next((row[name] for name in CHOICES if row.get(name) is not None), [])
    choices = _printed_list(choices)
    if isinstance(choices, str):
        raise UserError(f"its choices are one text, {choices!r:.60}: give a list of them")
    if not isinstance(choices, Mapping):
        choices = dict(zip(LETTERS, choices, strict=False))
    elif isinstance(choices.get("text"), list | tuple):  # {"label": ["A", ...], "text": [...]}
        choices = dict(zip(choices.get("label") or LETTERS, choices["text"], strict=False))
    there = {str(name): str(one) for name, one in choices.items() if one is not None}
    return dict([*there.items()][: len(LETTERS)])


def letter_of(answer: Any, named: Mapping[str, str]) -> str:
    """The letter that a right choice has here, given by the row's name for it, a number from 0, or its text."""
    if isinstance(answer, float) and answer.is_integer():  # of a column with gaps
        answer = int(answer)
    text, names, choices = str(answer).strip(), [*named], [*named.values()]
    if text in names:  # 1 to 4 in some rows of ARC; letters may be others where a choice is absent
        return LETTERS[names.index(text)]
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return LETTERS[answer]
    if text in choices:
        return LETTERS[choices.index(text)]
    if text.isdecimal() and int(text) < len(choices):  # of a CSV file
        return LETTERS[int(text)]
    upper = text.upper()
    return LETTERS[names.index(upper)] if upper in names else f"none of the choices: {text}"
