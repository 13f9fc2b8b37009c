"""Which written answers are right: honest forms of the truth are, and questions restated are not."""

import time

import pytest

from jaxrl_llm.tasks.math.expression import UnreadableError, parse
from jaxrl_llm.tasks.math.grade import operations, read
from jaxrl_llm.tasks.math.worker import AnswerChecker, Verdict
from tests.tasks import adversary
from tests.tasks.answers import QUESTIONS, pairs
from tests.tasks.tricks import wrong_puzzles


@pytest.mark.parametrize(("truth", "answer", "right"), pairs())
def test_honest_forms_are_right_and_other_values_or_sums_are_wrong(checker, truth, answer, right):
    assert checker.check(truth, answer) is (Verdict.EQUAL if right else Verdict.DIFFERENT)


@pytest.mark.parametrize(("question", "truth", "answer", "right"), QUESTIONS)
def test_what_the_question_gives_is_no_answer(checker, question, truth, answer, right):
    expected = Verdict.EQUAL if right else Verdict.DIFFERENT
    assert checker.check(truth, answer, question) is expected


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        (r"\frac{12!}{2^6}", "7484400", True),
        (r"\frac{12!}{2^6}", "7484401", False),
        ("10!", "3628800", True),
        (r"\binom{20}{10}", "184756", True),
        (r"3\sqrt{4}", "6", True),
        (r"\log_2 8", "3", True),
        (r"\sin 30^\circ", r"\frac12", True),
        ("120", "5!", False),
        ("6", r"3\sqrt{4}", False),
        (r"\sqrt{2}", "1.4142135623", False),
        (r"\pi", "3.141593", False),
        ("x+1", "6", False),
    ],
)
def test_a_number_may_be_worked_out_further_than_the_truth(checker, truth, answer, right):
    assert checker.check(truth, answer) is (Verdict.EQUAL if right else Verdict.DIFFERENT)


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
def test_the_whole_adversary_gives_the_same_verdicts_beside_eight_busy_processes():
    with AnswerChecker(workers=1) as checker:
        quiet = adversary.report(10_000, 0, checker)
        with adversary.busy(8):
            assert adversary.report(10_000, 0, checker) == quiet
    assert not any(isinstance(row[1], tuple) for row in quiet)  # a wrong answer that was accepted


UPPER, LOWER = (
    "+".join(f"1/{n}^{{1400}}" for n in range(start, start + 60)) for start in (101, 161)
)
LONG_FRACTION = rf"\frac{{{UPPER}}}{{{LOWER}}}x" + "/2" * 30
HOSTILE = [
    *("(" * 900, "{" * 900 + "1" + "}" * 900, "1/" * 900 + "1", "2^" * 900 + "2", "-" * 900 + "1"),
    *(r"\frac" * 300, r"\sin" * 300 + "x", r"\sqrt" * 300 + "2", "1!" * 900, "," * 1900, "|" * 900),
    *("9" * 1990, "0." + "9" * 1900, "1" + "0" * 1000, r"\pm" * 600 + "1", "=" * 1900, "1:" * 900),
    *(
        "9^{9^{9^{9}}}",
        "(9^{9})!^{9}",
        r"2^{100}" * 200,
        "1,2" * 600,
        "a" * 1990,
        "\\{" * 600,
        "x_" * 900,
        LONG_FRACTION,
    ),
    *(r"5_{\text{" + " " * 1900 + "x y}}", r"_{\text{" + " " * 1980, " " * 1990 + "1"),
    *("(1+" * 35 + r"\sqrt7" + ")" * 35, r"\sqrt{99991}(" * 60 + "1+a" + ")" * 60),
    *("1 " * 990, "{1 " * 600, r"\text{" * 300, r"\text{a\cdot " * 140, r"{a\over " * 200),
    *(
        "(a+b+c)" * 280,
        "(1+(a+" * 300 + "b" + "))" * 300,
        "((a+b)(c+d)+e)" * 140 + "+x",
        "[a+" * 600,
    ),
    *(r"\begin{array}{c}" * 110, "(1)" * 600, "(1" * 900, "1^" + "{" * 900, r"x\approx" * 200),
    *(r"5\text{ cm}" + r" \text{ cm} " * 14 + "!", "~" * 1900 + "x", r"\mathbf{" * 240),
    *("(a)" * 300 + "+=1", "x_a" * 300 + "+=1", r"\text{a}" * 300 + "+=1"),
]


def reading(text):
    """Seconds of this thread."""
    read.cache_clear()
    start = time.thread_time()
    form = read(text)
    if form.node is not None:
        form.node.rational, form.node.key, operations(form.node)
    return time.thread_time() - start


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_is_slow_to_read_or_ends_the_reader(text):
    """Of three readings one is without a garbage collection, which takes a second after other tests."""
    assert min(reading(text) for _ in range(3)) < 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("1\\frac{4}{5}", "9/5"), ("2 1/2", "5/2"), ("0.1\\overline{6}", "1/6"), (".5", "1/2"),
     ("-\\frac12", "-1/2"), ("2^{10}", "1024"), ("2^{-1}", "1/2"), ("3\\times 10^2", "300"),
     ("2e-1", "1/5"), ("10^{10^{9}}", "None"), ("0^{-1}", "None"), (r"\frac{1}{0}", "None")],
)  # fmt: skip
def test_numbers_are_exact_or_have_no_value(text, number):
    assert str(parse(text).rational) == number


@pytest.mark.parametrize(
    "text",
    ["1 2", "x2", "2^10", r"\frac123", r"\sqrt13", "2^3^4", "1\\frac{5}{2}x", "", "5 +", ")"],
)
def test_what_could_be_read_in_two_ways_is_not_read(text):
    with pytest.raises(UnreadableError):
        parse(text)
