"""Seeded random Knights and Knaves puzzles with one solution each, in splits that share no wording."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

from jaxrl_llm.errors import UserError, at_least
from jaxrl_llm.tasks.knights_knaves import english
from jaxrl_llm.tasks.knights_knaves.logic import (
    Compound,
    Connective,
    Is,
    Not,
    Puzzle,
    Statement,
    canonical_key,
    solutions,
    truth_table,
)

SPLITS = ("train", "test")
_TEST_SHARE = 5  # one key in five belongs to the test split
_PATIENCE = 20_000  # draws without a new puzzle before the space counts as used up


@dataclass(frozen=True)
class Recipe:
    """A data set: numbers of people (evenly mixed), nesting of statements, sizes, and the seed."""

    people: tuple[int, ...] = (3,)
    depth: int = 2
    train: int = 10_000
    test: int = 1_000
    seed: int = 0

    def __post_init__(self):
        if not self.people or not set(self.people) <= set(range(2, 9)):
            raise UserError(
                f"people={self.people}: a puzzle has 2 to 8 people, as in people=(3, 4)"
            )
        at_least(1, "puzzles", self, "depth", "train", "test")


def split_of(key: str) -> str:
    """The split of a canonical key: the same in every data set, of any seed, sizes and people."""
    return "test" if int(key, 16) % _TEST_SHARE == 0 else "train"


def generate(recipe: Recipe, split: str) -> Iterator[Puzzle]:
    """The puzzles of one split of a recipe, with its numbers of people in turn."""
    streams = [puzzles(split, n, recipe.depth, recipe.seed) for n in recipe.people]
    size = {"train": recipe.train, "test": recipe.test}[split]
    return (next(stream) for stream in islice(cycle(streams), size))


def puzzles(split: str, people: int, depth: int, seed: int) -> Iterator[Puzzle]:
    """Endless distinct puzzles of one split; a UserError once no new one can be found."""
    rng = Random(f"{seed} {split} {people} {depth}")  # noqa: S311 (not for secrets)
    keys: set[str] = set()
    draws = 0
    while draws < _PATIENCE:
        draws += 1
        statements = tuple(_informative(rng, people, depth) for _ in range(people))
        roles = solutions(statements)
        if len(roles) != 1:
            continue
        key = canonical_key(statements)
        if key in keys or split_of(key) != split:
            continue
        keys.add(key)
        draws = 0
        names = tuple(rng.sample(english.NAMES, people))
        yield Puzzle(names, statements, roles[0], english.question(names, statements, rng))
    raise UserError(
        f"only {len(keys)} distinct {split} puzzles found with {people} people at depth {depth}: "
        "ask for fewer, or for more people or depth"
    )


def _informative(rng: Random, people: int, depth: int) -> Statement:
    """A random statement without a part that is always true or always false."""
    while True:
        statement = _statement(rng, people, depth)
        if 0 < truth_table(statement, people) < (1 << (1 << people)) - 1:
            return statement


def _statement(rng: Random, people: int, depth: int) -> Statement:
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return Is(rng.randrange(people), rng.random() < 0.5)
    if kind < 0.3:
        return Not(_informative(rng, people, depth - 1))
    connective = rng.choice(tuple(Connective))
    left, right = _informative(rng, people, depth - 1), _informative(rng, people, depth - 1)
    return Compound(connective, left, right)
