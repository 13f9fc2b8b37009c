"""A slice of `python -m tests.tasks.adversary`; all of it is slow."""

import pytest

from jaxrl_llm.tasks.math.worker import AnswerChecker
from tests.tasks import adversary
from tests.tasks.tricks import wrong_puzzles


def test_no_trick_is_taken_for_an_answer(checker):
    assert adversary.wrongly_accepted(600, 1, checker) == ([], 0)


def test_no_trick_is_taken_for_a_solved_puzzle():
    assert [trick for trick, reward in wrong_puzzles(2000, 1) if reward.correct] == []


def test_published_truths_are_accepted_in_other_words_and_not_when_spoiled(checker):
    problems = adversary.published()
    graded = adversary.verdicts(problems[::6] + problems[-20:], checker)
    right = [reward.correct for _, _, is_right, reward in graded if is_right]
    assert len(right) > 500
    assert sum(right) / len(right) > 0.97
    assert [g for g in graded if not g[2] and g[3].correct] == []


@pytest.mark.slow
def test_all_of_it_gives_the_same_verdicts_beside_eight_busy_processes():
    with AnswerChecker(workers=1) as checker:
        quiet = adversary.report(10_000, 0, checker)
        with adversary.busy(8):
            assert adversary.report(10_000, 0, checker) == quiet
    assert not any(isinstance(row[1], tuple) for row in quiet)  # a wrong answer that was accepted
