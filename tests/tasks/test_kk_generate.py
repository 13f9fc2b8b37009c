from collections import Counter
from hashlib import sha256
from itertools import islice

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.knights_knaves.generate import SPLITS, Recipe, generate, puzzles, split_of
from jaxrl_llm.tasks.knights_knaves.logic import Compound, Is, Not, assignments, canonical_key
from tests.tasks.brute import brute_form, brute_solutions, holds


@pytest.mark.parametrize("people", range(2, 9))
def test_every_puzzle_has_one_solution(people):
    for puzzle in generate(Recipe((people,), depth=2, train=20, test=1), "train"):
        assert brute_solutions(puzzle.statements) == [puzzle.solution]
        assert len(set(puzzle.names)) == people
        assert all(name in puzzle.question for name in puzzle.names)


def parts(statement):
    yield statement
    if isinstance(statement, Not):
        yield from parts(statement.of)
    if isinstance(statement, Compound):
        yield from parts(statement.left)
        yield from parts(statement.right)


def nesting(statement):
    if isinstance(statement, Is):
        return 0
    inner = [statement.of] if isinstance(statement, Not) else [statement.left, statement.right]
    return 1 + max(map(nesting, inner))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_statements_nest_to_the_depth_and_no_part_is_empty_talk(depth):
    drawn = [s for p in generate(Recipe((4,), depth, 40, 1), "train") for s in p.statements]
    assert max(map(nesting, drawn)) == depth
    for part in (part for statement in drawn for part in parts(statement)):
        assert {holds(part, roles) for roles in assignments(4)} == {True, False}


def test_all_connectives_and_both_roles_occur():
    drawn = list(generate(Recipe((3,), 2, 100, 1), "train"))
    seen = [part for p in drawn for s in p.statements for part in parts(s)]
    assert {part.connective.value for part in seen if isinstance(part, Compound)} == {
        "and",
        "or",
        "->",
        "<=>",
    }
    assert any(isinstance(part, Not) for part in seen)
    knights = sum(role for p in drawn for role in p.solution)
    assert 0.35 < knights / 300 < 0.65


def test_generation_follows_from_the_seed_on_every_machine():
    """The same puzzles again, more of them when asked, the numbers of people in turn."""
    drawn = list(generate(Recipe((2, 3, 8), 2, 30, 1, seed=0), "train"))
    questions = "\n".join(p.question for p in drawn)
    assert sha256(questions.encode()).hexdigest()[:16] == "fd2a776ea305473e"
    assert [len(p.names) for p in drawn] == [2, 3, 8] * 10
    assert list(generate(Recipe((2, 3, 8), 2, 40, 1, seed=0), "train"))[:30] == drawn
    assert list(generate(Recipe((2, 3, 8), 2, 30, 1, seed=5), "train")) != drawn


def test_no_puzzle_of_any_seed_or_recipe_meets_a_test_puzzle_under_other_names():
    recipes = [Recipe((2, 3), 1, 150, 60, seed=s) for s in (0, 1)] + [Recipe((2, 3), 2, 150, 60)]
    forms = {
        split: Counter(brute_form(p.statements) for r in recipes for p in generate(r, split))
        for split in SPLITS
    }
    assert not forms["train"].keys() & forms["test"].keys()
    assert max(forms["train"].values()) > 1  # seeds do overlap within a split, so the law has teeth


def test_puzzles_of_a_split_are_distinct_up_to_renaming():
    drawn = islice(puzzles("train", 3, 1, seed=0), 500)
    assert len({brute_form(p.statements) for p in drawn}) == 500


def test_split_shares():
    drawn = list(islice(puzzles("train", 4, 2, seed=0), 50))
    assert {split_of(canonical_key(p.statements)) for p in drawn} == {"train"}
    shares = Counter(split_of(f"{i:x}") for i in range(1000))
    assert shares == {"train": 800, "test": 200}


def test_used_up_space_is_a_one_line_error():
    with pytest.raises(UserError, match=r"only \d+ distinct test puzzles .* 2 people at depth 1"):
        list(generate(Recipe((2,), 1, 1, 1000), "test"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"people": (1,)}, "2 to 8"),
        ({"people": (3, 9)}, "2 to 8"),
        ({"people": ()}, "2 to 8"),
        ({"depth": 0}, "at least 1"),
        ({"test": 0}, "both splits"),
    ],
)
def test_bad_recipe_is_a_one_line_error(change, message):
    with pytest.raises(UserError, match=message):
        Recipe(**change)
