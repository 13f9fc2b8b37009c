"""Knights and Knaves in a few dozen words, for a model with a word-level vocabulary."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from jaxrl_llm.tasks.knights_knaves.english import role
from jaxrl_llm.tasks.knights_knaves.logic import (
    Compound,
    Connective,
    Is,
    Not,
    Puzzle,
    Roles,
    Statement,
    assignments,
    truth_table,
)

TINY_NAMES = ("Ada", "Ben", "Cat", "Dan", "Eve", "Fay", "Gus", "Hal")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # of a response
_CONNECTIVES = {
    Connective.AND: "and",
    Connective.OR: "or",
    Connective.IMPLIES: "implies",
    Connective.IFF: "iff",
}
FILLERS = ("um", "uh", "er", "ah", "hm", "oh", "eh", "mm",
           "huh", "aha", "hey", "ooh", "wow", "meh", "pff", "tsk")  # fmt: skip
_ZIPF = [1 / rank for rank in range(1, 1 + len(FILLERS))]
_MARKS = (":", ".", "(", ")", "not", "true", "false", "yes", "no", "is", "a", "knight", "knave")


def vocabulary(*, chatter: bool = False) -> tuple[str, ...]:
    """Every word of tiny prompts and responses; all text is these words joined by single spaces."""
    words = (*TAGS, *_MARKS, *_CONNECTIVES.values(), *TINY_NAMES)
    return (*words, *FILLERS) if chatter else words


def retell(puzzle: Puzzle) -> Puzzle:
    """The same puzzle about the tiny names, its question in tiny words."""
    names = TINY_NAMES[: len(puzzle.names)]
    parts = zip(names, puzzle.statements, strict=True)
    said = " ".join(f"{name} : {_claim(statement)} ." for name, statement in parts)
    return replace(puzzle, names=names, question=said)


def _claim(statement: Statement) -> str:
    match statement:
        case Is(person, knight):
            return f"{TINY_NAMES[person]} {role(knight)}"
        case Not(of):
            return f"not {_operand(of)}"
        case Compound(connective, left, right):
            return f"{_operand(left)} {_CONNECTIVES[connective]} {_operand(right)}"


def _operand(statement: Statement) -> str:
    text = _claim(statement)
    return f"( {text} )" if isinstance(statement, Compound) else text


def prompt(puzzle: Puzzle) -> str:
    """The retold question and an open `<think>`."""
    return f"{puzzle.question} <think>"


def demonstration(puzzle: Puzzle, guesses: Iterable[Roles] | None = None) -> str:
    """A full-score response: guess roles, state each statement's truth value, accept or try again.

    A guess ends at the first statement that contradicts its speaker's role. `guesses` (by default
    all, knights first) must reach the solution, else ValueError; fewer give shorter responses.
    """
    words: list[str] = []
    for roles in assignments(len(puzzle.names)) if guesses is None else guesses:
        words += _attempt(puzzle, roles)
        if roles == puzzle.solution:
            break
    else:
        raise ValueError(f"the guesses do not reach the solution {puzzle.solution}")
    return " ".join((*words, _answer(puzzle.names, puzzle.solution)))


def guess(puzzle: Puzzle, rng: Random) -> str:
    """A well-formed response with random roles and no reasoning."""
    return _answer(puzzle.names, [rng.random() < 0.5 for _ in puzzle.names])


def chatter(response: str, rng: Random, share: float) -> str:
    """The response with filler words in its thought: a controlled source of unlikely tokens.

    Before the first word and after each one comes a filler with probability `share`, and after a
    filler another one; they are drawn with Zipf's weights. The answer, so the reward, is unchanged.
    """
    thought, end, answer = response.partition("</think>")
    words: list[str] = []
    for word in ("", *thought.split()):
        words.append(word)
        while rng.random() < share:
            words += rng.choices(FILLERS, _ZIPF)
    return " ".join((*filter(None, words), end + answer))


def _answer(names: Iterable[str], roles: Iterable[bool]) -> str:
    stated = [f"{name} is a {role(knight)}" for name, knight in zip(names, roles, strict=True)]
    return " ".join(("</think>", "<answer>", *stated, "</answer>"))


def _attempt(puzzle: Puzzle, roles: Roles) -> list[str]:
    """One guess: the roles, the truth values up to the first contradiction, and yes or no."""
    people = len(roles)
    case = assignments(people).index(roles)
    words = [role(knight) for knight in roles]
    for speaker, statement in enumerate(puzzle.statements):
        value = bool(truth_table(statement, people) >> case & 1)
        words.append("true" if value else "false")
        if value != roles[speaker]:
            return [*words, "no"]
    return [*words, "yes"]
