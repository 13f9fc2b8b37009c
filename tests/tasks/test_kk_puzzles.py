"""The logic of the puzzles, and the puzzles drawn from it."""

from collections import Counter
from hashlib import sha256
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.knights_knaves.generate import SPLITS, Recipe, generate, puzzles, split_of
from jaxrl_llm.tasks.knights_knaves.logic import (
    Compound,
    Connective,
    Is,
    Not,
    assignments,
    canonical_key,
    from_nested,
    solutions,
    to_nested,
    truth_table,
)
from tests.tasks.brute import (
    brute_form,
    brute_solutions,
    holds,
    puzzles_strategy,
    renamed,
    statements_strategy,
)


@given(statements_strategy(4))
def test_truth_table_is_the_value_in_every_assignment(statement):
    table = truth_table(statement, 4)
    assert [bool(table >> a & 1) for a in range(16)] == [
        holds(statement, r) for r in assignments(4)
    ]


@given(puzzles_strategy())
def test_solutions_are_those_of_plain_enumeration(statements):
    assert solutions(statements) == brute_solutions(statements)


@given(puzzles_strategy(), st.data())
def test_key_is_blind_to_names_and_order(statements, data):
    new_place = data.draw(st.permutations(range(len(statements))))
    assert canonical_key(renamed(statements, new_place)) == canonical_key(statements)


@given(puzzles_strategy())
def test_key_is_blind_to_the_order_of_operands(statements):
    def swapped(s):
        if isinstance(s, Compound) and s.connective is not Connective.IMPLIES:
            return Compound(s.connective, swapped(s.right), swapped(s.left))
        return s

    assert canonical_key([swapped(s) for s in statements]) == canonical_key(statements)


def test_key_tells_different_puzzles_apart():
    drawn = [p.statements for p in generate(Recipe((4,), 1, 400, 1), "train")]
    assert len({brute_form(statements) for statements in drawn}) == 400
    either, both = Compound(Connective.OR, Is(0, True), Is(1, True)), Is(0, True)
    one_way = Compound(Connective.IMPLIES, Is(0, True), Is(1, True))
    other_way = Compound(Connective.IMPLIES, Is(1, True), Is(0, True))
    keys = {
        canonical_key([s, Is(1, True)]) for s in (either, both, one_way, other_way, Not(either))
    }
    assert len(keys) == 5


@given(statements_strategy(5))
def test_nested_form_round_trips(statement):
    assert from_nested(to_nested(statement)) == statement


def test_published_conjunction_of_three_nests_to_the_left():
    parts = [Is(0, True), Is(1, False), Is(2, True)]
    form = ("and", ("telling-truth", 0), ("lying", 1), ("telling-truth", 2))
    inner = Compound(Connective.AND, parts[0], parts[1])
    assert from_nested(form) == Compound(Connective.AND, inner, parts[2])


@pytest.mark.parametrize(
    "form", [(), "lying", ("lying", -1), ("xor", ("lying", 0), ("lying", 1)), ("->", ("lying", 0))]
)
def test_malformed_nested_form_is_an_error(form):
    with pytest.raises(ValueError, match="not a statement"):
        from_nested(form)


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


def test_a_puzzle_in_other_connectives_is_another():
    """As docs say: splits share no wording, but they may share what is said."""
    said = Compound(Connective.IMPLIES, Is(0, True), Is(1, True))
    same = Compound(Connective.OR, Is(0, False), Is(1, True))
    assert truth_table(said, 2) == truth_table(same, 2)
    keys = {canonical_key((one, Is(0, True))) for one in (said, same)}
    assert len(keys) == 2


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
        ({"test": 0}, "test = 0 must be at least 1"),
    ],
)
def test_bad_recipe_is_a_one_line_error(change, message):
    with pytest.raises(UserError, match=message):
        Recipe(**change)
