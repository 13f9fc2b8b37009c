"""Knights and Knaves as a task: prompts, the rule-based reward, and the published puzzles."""

import re
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.knights_knaves import english as texts
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.knights_knaves.logic import (
    Puzzle,
    Roles,
    canonical_key,
    from_nested,
    solutions,
)
from jaxrl_llm.tasks.task import Mapped, Source

# The instruction of the published runs (arXiv:2505.12929), word for word.
_PAPER_PROMPT = (
    "<|im_start|>system\n"
    "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind "
    "and then provides the user with the answer. The reasoning process and answer are enclosed within "
    "<think> </think> and<answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    "</think><answer> answer here </answer>.  Now the user asks you to solve a logical reasoning "
    "problem. After thinking, when you finally reach a conclusion, clearly state the identity of each "
    "character within <answer> </answer> tags. i.e., <answer> (1) Zoey is a knight\n(2) ... </answer>."
    "\n<|im_end|>\n<|im_start|>user\n{question}\n<|im_end|>\n<|im_start|>assistant\n<think>"
)
_BETWEEN = re.compile(r"(?:[\s,.;:*-]|\(?\d{1,2}\)|\d{1,2}\.|\band\b)*")
_COLUMNS = ("quiz", "names", "statements", "solution")


@dataclass(frozen=True)
class KnightsKnaves:
    """Puzzles to train and test on; `demonstration` writes a full-score response to a `prompt`."""

    name: str
    train: Source[Puzzle]
    test: Source[Puzzle]
    prompt: Callable[[Puzzle], str]
    demonstration: Callable[[Puzzle], str]

    def reward(self, example: Puzzle, response: str) -> Reward:
        return reward(example.names, example.solution, response)


def english(train: Source[Puzzle], test: Source[Puzzle]) -> KnightsKnaves:
    """The task in English, under the paper's prompt."""
    return KnightsKnaves("knights_knaves", train, test, paper_prompt, texts.demonstration)


def tiny(train: Source[Puzzle], test: Source[Puzzle]) -> KnightsKnaves:
    """The task in the words of `kk_tiny.vocabulary()`, from puzzles in English."""
    train, test = Mapped(train, kk_tiny.retell), Mapped(test, kk_tiny.retell)
    return KnightsKnaves("knights_knaves_tiny", train, test, kk_tiny.prompt, kk_tiny.demonstration)


def paper_prompt(puzzle: Puzzle) -> str:
    """The paper's prompt for a puzzle; it ends in `<think>`, which the response continues."""
    return _PAPER_PROMPT.format(question=puzzle.question)


def reward(names: Sequence[str], solution: Roles, response: str) -> Reward:
    """Format +1 or -1, answer +2 if all right, -1.5 if wrong, -2 if unreadable or badly formatted.

    So a score is 3, -0.5, -1 or -3. The response continues a prompt that ends in `<think>`.
    """
    text = "<think>" + response
    formatted = well_formed(text)
    roles = parse_answer(text, names) if formatted else None
    correct = roles == tuple(solution)
    answer_score = -2.0 if roles is None else 2.0 if correct else -1.5
    fields = {
        "formatted": float(formatted),
        "parsed": float(roles is not None),
        "people": float(len(names)),
    }
    return Reward((1.0 if formatted else -1.0) + answer_score, correct, fields)


def well_formed(text: str) -> bool:
    """True if each of the four tags occurs exactly once, in order."""
    places = [text.find(tag) for tag in kk_tiny.TAGS]
    return all(text.count(tag) == 1 for tag in kk_tiny.TAGS) and places == sorted(places)


def parse_answer(text: str, names: Sequence[str]) -> Roles | None:
    """The roles in a well-formed text; None unless the answer states each name's once and no more.

    Numbers, punctuation and "and" may stand between the statements; "it is false that" may not.
    """
    answer = text.partition("<answer>")[2].partition("</answer>")[0].lower()
    if answer.count("knight") + answer.count("knave") != len(names):
        return None
    roles = []
    for name in names:
        statement = re.compile(rf"\b{re.escape(name.lower())}\s+is\s+a\s+(knight|knave)\b")
        found = statement.search(answer)
        if found is None:
            return None
        roles.append(found[1] == "knight")
        answer = answer[: found.start()] + " " + answer[found.end() :]
    return tuple(roles) if _BETWEEN.fullmatch(answer) else None


def read_published(path: str | Path) -> list[Puzzle]:
    """The puzzles of a parquet file in the published format; UserError if a solution is wrong."""
    try:
        rows = pyarrow.parquet.read_table(path, columns=list(_COLUMNS)).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read {path} as a parquet file of puzzles: {error}") from error
    return [_published(row, f"{path}, row {i}") for i, row in enumerate(rows)]


def _published(row: dict[str, Any], where: str) -> Puzzle:
    if row.keys() != set(_COLUMNS):
        raise UserError(f"{where}: the columns {', '.join(_COLUMNS)} are needed")
    names, solution = tuple(row["names"]), tuple(row["solution"])
    try:
        statements = tuple(map(from_nested, literal_eval(row["statements"])))
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(f"{where}: unreadable statements: {error}") from error
    if not (2 <= len(names) <= 8 and len(names) == len(statements)):
        raise UserError(
            f"{where}: {len(statements)} statements by {len(names)} people; 2 to 8 are needed"
        )
    try:
        found = solutions(statements)
    except IndexError as error:
        raise UserError(f"{where}: a statement is about somebody not in the puzzle") from error
    if found != [solution]:
        raise UserError(f"{where}: {solution} is not the only solution of its statements")
    return Puzzle(names, statements, solution, row["quiz"])


def without(puzzles: Sequence[Puzzle], held_out: Sequence[Puzzle]) -> list[Puzzle]:
    """The puzzles without the held-out ones, also where those have other names or another order."""
    taken = {canonical_key(puzzle.statements) for puzzle in held_out}
    return [puzzle for puzzle in puzzles if canonical_key(puzzle.statements) not in taken]
