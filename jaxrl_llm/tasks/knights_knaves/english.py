"""Knights and Knaves in English: the puzzle's text and a chain of reasoning that solves it."""

from collections.abc import Generator, Sequence
from random import Random

from jaxrl_llm.tasks.knights_knaves.logic import (
    Compound,
    Connective,
    Is,
    Not,
    Puzzle,
    Roles,
    Statement,
    assignments,
    consistent_table,
)

# fmt: off
NAMES = (
    "Alma", "Amir", "Anya", "Arlo", "Bela", "Boris", "Carmen", "Cyrus", "Dana", "Dmitri", "Edda",
    "Elio", "Enid", "Farid", "Fiona", "Gita", "Hana", "Hugo", "Ines", "Ivan", "Jara", "Jonas",
    "Kaito", "Kira", "Lars", "Leila", "Malik", "Mira", "Nadia", "Nils", "Odile", "Omar", "Petra",
    "Priya", "Quinn", "Rafael", "Rosa", "Selma", "Sven", "Tariq", "Tess", "Uma", "Viktor", "Wanda",
    "Xenia", "Yara", "Yusuf", "Zora",
)
# fmt: on

_INTRODUCTION = (
    "Everyone on this island is either a knight, whose every statement is true, or a knave, whose "
    "every statement is false. You talk to {count} of them: {people}. "
)
_QUESTION = " Which of them are knights, and which are knaves?"
_SAYINGS = (
    '{name} says: "{quoted}."',
    '"{quoted}," says {name}.',
    "{name} tells you that {claim}.",
    "{name} insists that {claim}.",
    '{name} answers, "{quoted}."',
)
_COUNTS = ("two", "three", "four", "five", "six", "seven", "eight")
_JOINED = {
    Connective.AND: "{} and {}",
    Connective.OR: "{} or {}",
    Connective.IMPLIES: "if {} then {}",
    Connective.IFF: "{} if and only if {}",
}


def role(knight: bool) -> str:
    """The word for a role."""
    return "knight" if knight else "knave"


def claim(statement: Statement, names: Sequence[str]) -> str:
    """The statement in English; a compound inside another stands in brackets."""
    match statement:
        case Is(person, knight):
            return f"{names[person]} is a {role(knight)}"
        case Not(Is(person, knight)):
            return f"{names[person]} is not a {role(knight)}"
        case Not(of):
            return f"it is not true that {_operand(of, names)}"
        case Compound(connective, left, right):
            return _JOINED[connective].format(_operand(left, names), _operand(right, names))


def _operand(statement: Statement, names: Sequence[str]) -> str:
    text = claim(statement, names)
    match statement:
        case Is() | Not(Is()):
            return text
    return f"({text})"


def question(names: Sequence[str], statements: Sequence[Statement], rng: Random) -> str:
    """The whole puzzle as a paragraph, with a seeded choice of phrases."""
    people = f"{', '.join(names[:-1])} and {names[-1]}"
    claims = [claim(statement, names) for statement in statements]
    sayings = [
        rng.choice(_SAYINGS).format(name=name, claim=text, quoted=text[0].upper() + text[1:])
        for name, text in zip(names, claims, strict=True)
    ]
    introduction = _INTRODUCTION.format(count=_COUNTS[len(names) - 2], people=people)
    return introduction + " ".join(sayings) + _QUESTION


def answer(names: Sequence[str], roles: Roles) -> str:
    """The numbered list of roles that the reward reads."""
    pairs = zip(names, roles, strict=True)
    return "\n".join(f"({i}) {name} is a {role(r)}" for i, (name, r) in enumerate(pairs, 1))


def demonstration(puzzle: Puzzle) -> str:
    """A full-score response: a search written out, then the answer; continues an open `<think>`."""
    steps = " ".join(_search(puzzle, ()))
    return f" {steps} </think>\n<answer>\n{answer(puzzle.names, puzzle.solution)}\n</answer>"


def _search(puzzle: Puzzle, roles: Roles) -> Generator[str, None, bool]:
    """Depth-first search from a partial assignment, as sentences; returns whether it succeeded."""
    if len(roles) == len(puzzle.names):
        yield "Everyone has a role and nothing is contradicted, so this is the solution."
        return True
    name = puzzle.names[len(roles)]
    for knight in (True, False):
        trial = (*roles, knight)
        yield f"Suppose {name} is a {role(knight)}."
        speaker = contradicted(puzzle.statements, trial)
        if speaker is not None:
            yield _refutation(puzzle, trial, speaker)
        elif (yield from _search(puzzle, trial)):
            return True
    yield f"Neither role fits {name}, so something supposed earlier is wrong."
    return False


def contradicted(statements: Sequence[Statement], roles: Roles) -> int | None:
    """The first person whose statement contradicts their role, whatever the roles not yet given."""
    people = len(statements)
    open_cases = sum(  # a bit for each assignment that agrees with `roles`, as in a truth table
        1 << case for case, full in enumerate(assignments(people)) if full[: len(roles)] == roles
    )
    for speaker in range(len(roles)):
        if not consistent_table(speaker, statements[speaker], people) & open_cases:
            return speaker
    return None


def _refutation(puzzle: Puzzle, roles: Roles, speaker: int) -> str:
    name, truthful = puzzle.names[speaker], roles[speaker]
    said = claim(puzzle.statements[speaker], puzzle.names)
    value, kind = ("false", "true") if truthful else ("true", "false")
    return f"Then it is {value} that {said}, but a {role(truthful)} like {name} says only {kind} things."
