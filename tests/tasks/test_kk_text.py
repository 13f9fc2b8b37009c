"""The texts of the puzzles and of their solutions, in English and in tiny words."""

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.tasks.knights_knaves import english as kk_english
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
from jaxrl_llm.tasks.knights_knaves.logic import Compound, Connective, Is, Not
from jaxrl_llm.tasks.knights_knaves.task import reward
from tests.tasks.brute import holds, puzzles_strategy, statements_strategy

PEOPLE = range(2, 9)


def drawn(people, depth=2, count=15):
    return list(generate(Recipe((people,), depth, count, 1), "train"))


@pytest.mark.parametrize("people", PEOPLE)
def test_english_reasoning_ends_supposing_the_solution(people):
    for puzzle in drawn(people):
        thought = kk_english.demonstration(puzzle).split("</think>")[0]
        last = dict(re.findall(r"Suppose (\w+) is a (\w+)\.", thought))
        assert [last[name] == "knight" for name in puzzle.names] == list(puzzle.solution)


@given(puzzles_strategy(), st.data())
def test_a_contradiction_is_claimed_exactly_where_there_is_one(statements, data):
    people = len(statements)
    roles = data.draw(st.lists(st.booleans(), max_size=people).map(tuple))
    cases = [(*roles, *rest) for rest in product((True, False), repeat=people - len(roles))]
    never_fits = [
        speaker
        for speaker in range(len(roles))
        if not any(holds(statements[speaker], case) == case[speaker] for case in cases)
    ]
    assert kk_english.contradicted(statements, roles) == (never_fits[0] if never_fits else None)


@given(statements_strategy(3), statements_strategy(3))
def test_different_statements_read_differently(one, other):
    names = ("Ann", "Bo", "Cy")
    assert (kk_english.claim(one, names) == kk_english.claim(other, names)) == (one == other)


def parse_tiny(words):
    """A reader of the tiny grammar written apart from its writer: (statement, words left)."""

    def operand(words):
        if words[0] == "(":
            inner, rest = parse_tiny(words[1:])
            assert rest[0] == ")"
            return inner, rest[1:]
        if words[0] == "not":
            inner, rest = operand(words[1:])
            return Not(inner), rest
        return Is(kk_tiny.TINY_NAMES.index(words[0]), words[1] == "knight"), words[2:]

    connectives = {
        "and": Connective.AND,
        "or": Connective.OR,
        "implies": Connective.IMPLIES,
        "iff": Connective.IFF,
    }
    left, rest = operand(words)
    if rest and rest[0] in connectives:
        right, after = operand(rest[1:])
        return Compound(connectives[rest[0]], left, right), after
    return left, rest


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tiny_question_can_be_read_back(depth):
    for puzzle in drawn(4, depth):
        words = kk_tiny.prompt(kk_tiny.retell(puzzle)).split()
        for person, statement in enumerate(puzzle.statements):
            assert words[:2] == [kk_tiny.TINY_NAMES[person], ":"]
            read, words = parse_tiny(words[2:])
            assert read == statement
            assert words.pop(0) == "."
        assert words == ["<think>"]


@pytest.mark.parametrize("people", [2, 3, 5])
def test_tiny_trace_states_true_facts_and_stops_at_the_solution(people):
    for puzzle in map(kk_tiny.retell, drawn(people)):
        words = kk_tiny.demonstration(puzzle).split("</think>")[0].split()
        roles = None
        while words:
            roles = tuple(word == "knight" for word in words[:people])
            values = list(words[people:])
            verdict = next(i for i, word in enumerate(values) if word in ("yes", "no"))
            stated = [word == "true" for word in values[:verdict]]
            facts = [holds(s, roles) for s in puzzle.statements]
            fits = [fact == role for fact, role in zip(facts, roles, strict=True)]
            assert stated == facts[:verdict]
            assert fits[: verdict - 1] == [True] * (verdict - 1)
            assert (values[verdict] == "yes") == all(fits) == (roles == puzzle.solution)
            words = values[verdict + 1 :]
        assert roles == puzzle.solution


def test_tiny_words_are_all_in_the_vocabulary():
    vocabulary = kk_tiny.vocabulary()
    used = {
        word
        for people in PEOPLE
        for puzzle in map(kk_tiny.retell, drawn(people, depth=3))
        for text in (kk_tiny.prompt(puzzle), kk_tiny.demonstration(puzzle))
        for word in text.split(" ")
    }
    assert used == set(vocabulary)
    assert len(set(vocabulary)) == len(vocabulary) <= 60


def test_tiny_guesses_can_be_given_but_must_reach_the_solution():
    puzzle = kk_tiny.retell(drawn(3)[0])
    wrong = tuple(not role for role in puzzle.solution)
    short = kk_tiny.demonstration(puzzle, [puzzle.solution])
    assert len(short) < len(kk_tiny.demonstration(puzzle, [wrong, puzzle.solution]))
    assert reward(puzzle.names, puzzle.solution, short).score == 3
    with pytest.raises(ValueError, match="do not reach"):
        kk_tiny.demonstration(puzzle, [wrong])
