"""No response can raise in a reward, or keep it for long: random bytes and mutated answers."""

import random
import time
from functools import partial
from statistics import quantiles

import pytest

from jaxrl_llm.adapters.reasoning_gym import tagged
from jaxrl_llm.tasks.knights_knaves import english as kk_english
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
from jaxrl_llm.tasks.knights_knaves.task import english, parse_answer, well_formed
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.math.task import MathTask, boxed_answer
from jaxrl_llm.tasks.math.worker import AnswerChecker
from jaxrl_llm.tasks.tools import hermes, llama, words

ANSWERS = (
    r"\frac{1}{2}",
    r"\left( 3, \frac{\pi}{2} \right)",
    r"x^2+\sqrt{3}-2^{10}",
    r"\{1,2,3\}\cup(4,5]",
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
    r"12\%",
    "1,234.5",
    r"10^{12}",
    r"\sum_{k=1}^{9} k!",
    r"\text{Evelyn}",
)
ALPHABET = "0123456789^_{}()[]\\,.+-*/!=<>%&| \nxyzπ"


def random_bytes(rng):
    return rng.randbytes(rng.randrange(400)).decode("utf-8", errors="replace")


def mutated(rng, text):
    """The text after one to eight cuts, repeats, swaps and insertions at random places."""
    for _ in range(rng.randint(1, 8)):
        i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        text = rng.choice(
            (
                text[:i] + text[j:],
                text[:j] + text[i:],
                text[:i] + rng.choice(ALPHABET) + text[i:],
                text[:i] + text[i:j].swapcase() + text[j:],
                text[:i] + text[i:j][::-1] + text[j:],
            )
        )
    return text[:5000]


def fuzz(task, examples, responses, clock=time.perf_counter):
    """The seconds that each reward took; a reward that raises ends the test."""
    seconds = []
    for example, response in zip(examples, responses, strict=True):
        start = clock()
        reward = task.reward(example, response)
        seconds.append(clock() - start)
        assert -3 <= reward.score <= 3
        assert reward.correct == (reward.score in (1, 3))
    p50, p99 = (quantiles(seconds, n=100)[i] for i in (49, 98))
    print(
        f"{task.name}: {len(seconds)} calls, p50 {p50:.6f} p99 {p99:.6f} max {max(seconds):.6f} s"
    )
    return seconds


def puzzle_cases(count):
    puzzles = list(generate(Recipe((3, 8), 2, 20, 20), "test"))
    rng = random.Random(0)
    examples = [rng.choice(puzzles) for _ in range(2 * count)]
    mutants = [mutated(rng, kk_english.demonstration(example)) for example in examples[:count]]
    return english(puzzles, puzzles), examples, mutants + [random_bytes(rng) for _ in range(count)]


def math_cases(count, checker):
    rng = random.Random(0)
    problems = [Problem("?", (rng.choice(ANSWERS),)) for _ in range(2 * count)]
    mutants = [f"</think> \\boxed{{{mutated(rng, p.truths[0])}}}" for p in problems[:count]]
    noise = [f"</think> \\boxed{{{random_bytes(rng)}}}" for _ in range(count)]
    return MathTask(problems, problems, checker), problems, mutants + noise


def test_puzzle_reward_survives_5000_of_each():
    assert max(fuzz(*puzzle_cases(5000), clock=time.thread_time)) < 1


def test_math_reward_survives_forty_of_each(checker):
    fuzz(*math_cases(40, checker))


READERS = {  # of what a model wrote, in the process that trains; math is read in workers
    "tags": tagged,
    "format": well_formed,
    "roles": partial(parse_answer, names=("Ada", "Bo")),
    "box": boxed_answer,
    "hermes": hermes,
    "llama": llama,
    "words": words,
}
PIECES = (
    *("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", r"\boxed{"),
    *(
        "{",
        "}",
        "\\",
        "[",
        '"',
        '{"name":',
        "Ada ",
        "Ada is a ",
        "is a",
        " ",
        "\n",
        ",",
        "1",
        "(1)",
    ),
    *("12.", "(12", "and ", "a", ";", "add ;", "<|python_tag|>", "</tool_call><tool_call>"),
)
BEGUN = (
    "",
    "</think><answer>Ada is a knight, Bo is a knave ",
    r"</think><answer>\boxed{<tool_call>{",
)


@pytest.mark.parametrize("reader", READERS)
def test_no_repetition_takes_more_than_time_in_proportion(reader):
    """Of 100,000 characters: milliseconds, where a second look for each would take a minute."""
    for begun in BEGUN:
        for piece in PIECES:
            text = begun + piece * (100_000 // len(piece)) + "!</answer>"
            start = time.thread_time()
            READERS[reader](text)
            READERS[reader](text[:-10])
            assert time.thread_time() - start < 10, (begun, piece)


@pytest.mark.slow
def test_math_reward_survives_5000_of_each_within_a_second():
    with AnswerChecker(workers=1) as checker:
        assert max(fuzz(*math_cases(5000, checker))) < 1
