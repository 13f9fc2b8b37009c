"""Knights and Knaves as logic: statements, truth tables, solutions, and identity up to renaming."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce
from hashlib import blake2b
from itertools import product
from typing import Any

Roles = tuple[bool, ...]  # True is a knight, False a knave


class Connective(Enum):
    """A binary connective, valued by its word in the published data."""

    AND = "and"
    OR = "or"
    IMPLIES = "->"
    IFF = "<=>"


@dataclass(frozen=True, slots=True)
class Is:
    """`person` is a knight, or is a knave."""

    person: int
    knight: bool


@dataclass(frozen=True, slots=True)
class Not:
    """The negation of a statement."""

    of: "Statement"


@dataclass(frozen=True, slots=True)
class Compound:
    """Two statements joined by a connective."""

    connective: Connective
    left: "Statement"
    right: "Statement"


Statement = Is | Not | Compound


@dataclass(frozen=True)
class Puzzle:
    """Person i, `names[i]`, says `statements[i]`; `solution` is the only consistent assignment."""

    names: tuple[str, ...]
    statements: tuple[Statement, ...]
    solution: Roles
    question: str


@cache
def assignments(people: int) -> tuple[Roles, ...]:
    """All 2^people role assignments, all knights first, the last person changing fastest."""
    return tuple(product((True, False), repeat=people))


@cache
def knight_table(person: int, people: int) -> int:
    """The truth table of "`person` is a knight"; bit a is its value in `assignments(people)[a]`."""
    return sum(roles[person] << a for a, roles in enumerate(assignments(people)))


def truth_table(statement: Statement, people: int) -> int:
    """The statement's value in every assignment, as bits of an integer like `knight_table`'s."""
    full = (1 << (1 << people)) - 1
    match statement:
        case Is(person, knight):
            return knight_table(person, people) ^ (0 if knight else full)
        case Not(of):
            return truth_table(of, people) ^ full
        case Compound(connective, left, right):
            a, b = truth_table(left, people), truth_table(right, people)
            values = {
                Connective.AND: a & b,
                Connective.OR: a | b,
                Connective.IMPLIES: (a ^ full) | b,
                Connective.IFF: a ^ b ^ full,
            }
            return values[connective]


def consistent_table(speaker: int, statement: Statement, people: int) -> int:
    """The truth table of "the statement is true if the speaker is a knight, else false"."""
    full = (1 << (1 << people)) - 1
    return truth_table(statement, people) ^ knight_table(speaker, people) ^ full


def solutions(statements: Sequence[Statement]) -> list[Roles]:
    """Every assignment in which knights' statements are true and knaves' false; tries all.

    IndexError if a statement is about somebody who makes none.
    """
    people = len(statements)
    table = (1 << (1 << people)) - 1
    for speaker, statement in enumerate(statements):
        table &= consistent_table(speaker, statement, people)
    return [roles for a, roles in enumerate(assignments(people)) if table >> a & 1]


def canonical_key(statements: Sequence[Statement]) -> str:
    """A digest of a puzzle that ignores people's names, their order, and the order of operands.

    Colour refinement (Weisfeiler and Leman, 1968): a person's colour is hashed from the colours of
    those they mention. Renamed puzzles always share a key; distinct ones may too, but very rarely.
    """
    colours = [""] * len(statements)
    for _ in statements:
        seen = [[*colours[:i], "self", *colours[i + 1 :]] for i in range(len(colours))]
        colours = [_digest(_shape(s, seen[i], True)) for i, s in enumerate(statements)]
    return _digest(" ".join(sorted(colours)))


def _shape(statement: Statement, colours: list[str], positive: bool) -> str:
    """The statement or its negation as text: people as colours, operands sorted if commutative."""
    match statement:
        case Is(person, knight):
            return colours[person] + ("+" if knight == positive else "-")
        case Not(of):
            return _shape(of, colours, not positive)
        case Compound(connective, left, right):
            sides = [_shape(left, colours, True), _shape(right, colours, True)]
            if connective is not Connective.IMPLIES:
                sides.sort()
            return f"{'' if positive else '!'}({sides[0]} {connective.value} {sides[1]})"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=12).hexdigest()


def to_nested(statement: Statement) -> tuple:
    """The statement as nested tuples in the words of the published data."""
    match statement:
        case Is(person, knight):
            return ("telling-truth" if knight else "lying", person)
        case Not(of):
            return ("not", to_nested(of))
        case Compound(connective, left, right):
            return (connective.value, to_nested(left), to_nested(right))


def from_nested(form: Any) -> Statement:
    """The inverse of `to_nested`; "and" and "or" of more than two operands nest to the left."""
    match form:
        case ("telling-truth", int(person)) if person >= 0:
            return Is(person, True)
        case ("lying", int(person)) if person >= 0:
            return Is(person, False)
        case ("not", of):
            return Not(from_nested(of))
        case ("->" | "<=>" as word, left, right):
            return Compound(Connective(word), from_nested(left), from_nested(right))
        case ("and" | "or" as word, first, second, *rest):
            operands = [from_nested(part) for part in (first, second, *rest)]
            return reduce(lambda a, b: Compound(Connective(word), a, b), operands)
    raise ValueError(f"not a statement: {form!r}")
