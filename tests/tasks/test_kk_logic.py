import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
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
