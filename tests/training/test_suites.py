"""`eval` on published problems and over several checkpoints, of a run that answers a number at random."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console

from jaxrl_llm.cli import eval as suites
from jaxrl_llm.learning import evaluate
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.tasks.math import records
from jaxrl_llm.training import journal, tables
from jaxrl_llm.training.leaving import Stop
from tests.rollouts.fake import Scripted
from tests.training import test_evaluate
from tests.training.process import ROOT, fails, finished

CONFIG = """
from dataclasses import replace
from jaxrl_llm.config import Evaluation, Scratch
from jaxrl_llm.tasks.math.worker import AnswerChecker
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.math.task import MathTask
from tests.training.quick import SHAPE, config as quick

PROBLEMS = [Problem(f"one and {i}", (str(i % 4),)) for i in range(40)]
WORDS = ("one", "and", "</think>", *(f"\\\\boxed{{{i}}}" for i in range(4)), *map(str, range(40)))

def task(data):
    return MathTask(PROBLEMS[:32], PROBLEMS[32:], AnswerChecker(workers=1), prompt_format="{question}")

def config(keep: int = 3):
    made = quick(warm_steps=0, steps=3)
    return replace(made, task=task, model=Scratch(SHAPE, WORDS), save_every=1, keep_checkpoints=keep,
                   evaluation=Evaluation(every=3, validation=4))
"""


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory):
    config = tmp_path_factory.mktemp("math") / "mine.py"
    config.write_text(CONFIG)
    return finished(environment, config.parent / "run", config=str(config))


def evaluated(environment, run, *words):
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", "eval", str(run), *words],
        cwd=ROOT, env=environment | {"COLUMNS": "200"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def cells(text):
    """The rows of the table by their first column."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def percent(cell):
    return float(cell.split()[0])


@pytest.mark.slow
def test_suites_over_the_last_checkpoints(environment, run, tmp_path):
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    for path, count in ((few, 3), (many, 40)):
        rows = [{"problem": f"one and {i}", "answer": f"{i % 4}"} for i in range(count)]
        path.write_text("\n".join(map(json.dumps, rows)))
    given = ("--suite", f"math500={many}", f"aime24={few}", "--last", "2")
    done = evaluated(environment, run, *given)
    assert done.returncode == 0, done.stderr
    for said in ("32 of 40 problems of math500", "3 of 3 problems of aime24"):
        assert f"warning: {said} are in the run's training data" in done.stdout
    table = cells(done.stdout)
    assert table[""] == ["examples", "step 2", "step 3", "mean of 2"]
    rows = ["math500 greedy", "aime24 greedy", "aime24 avg@16", "aime24 pass@16"]
    assert [name for name in table if name] == rows
    assert [table[name][0] for name in rows] == ["40", "3", "3", "3"]
    for name in rows:
        two, three, mean = map(percent, table[name][1:])
        assert mean == pytest.approx((two + three) / 2, abs=0.11)
    done = evaluated(environment, run, "--step", "3", "--samples", "2", "--suite", f"amc={few}")
    table = cells(done.stdout)
    assert table[""] == ["examples", "step 3"]
    assert "amc pass@2" in table
    done = evaluated(environment, run, "--last", "3")
    assert cells(done.stdout)[""] == ["examples", "step 1", "step 2", "step 3", "mean of 3"]
    assert [*cells(done.stdout)] == ["", "test greedy"]


def test_a_problem_is_known_from_training_with_an_instruction_around_it():
    question = "How many primes are there between one hundred and one hundred and twenty?"
    told = lambda text: records.Problem(text, ("1",))
    learned = [
        told(f"Solve this. {question} Think first."),
        told(f"Again: {question}"),
        told("1+1?"),
    ]
    there = [told(question), told("1+1"), told("2+2"), told(f"No. {question} Or are there none?")]
    parts: Any = SimpleNamespace(task=SimpleNamespace(train=learned))
    (said,) = suites._overlaps(parts, {"amc": (records.suite("amc"), there)})
    assert said == "warning: 2 of 4 problems of amc are in the run's training data"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--suite", "mth"), "no math suite 'mth'"),
        (("--suite", "orz"), "needs a file"),
        (("--suite", "amc=/nowhere.jsonl"), "cannot read /nowhere.jsonl"),
        (("--suite", "amc=a.jsonl", "amc=b.jsonl"), "a suite is named twice"),
        (("--samples", "-1"), "--samples -1 must be at least 0"),
        (("--last", "4"), "keeps the last 3"),
        (("--last", "-1"), "keeps the last 3"),
        (("--last", "2", "--step", "3"), "either --step or --last"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(run, words, message, capsys):
    assert message in fails(capsys, "eval", run, *words)


def test_a_run_on_another_task_is_asked_no_math(whole, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"problem": "q", "answer": 1}')
    said = fails(capsys, "eval", whole, "--suite", f"amc={tmp_path / 'p.jsonl'}")
    assert "in the way of the run's task, and that is knights_knaves_tiny" in said


def test_the_mean_is_that_of_the_checkpoints():
    """One knows the even digits, one nothing: 4 of 7 and 0 of 7."""
    words, task = test_evaluate.WORDS, TokenTask(test_evaluate.Echo(), test_evaluate.WORDS)
    sampling = evaluate.Sampling(temperature=1.0, max_tokens=4, stop=(words.eos,))
    policies = {1: test_evaluate.right_for_even, 2: lambda *_: [words.eos]}
    found = {}
    for step, reply in policies.items():
        how = {"samples": 4, "stop": Stop()}
        result = evaluate.evaluate(Scripted(reply), task, task.task.test, sampling, **how)
        found[step] = {"digits": result}
    out = io.StringIO()
    rich.console.Console(file=out, width=200).print(tables.checkpoints("", found))
    table = cells(out.getvalue())
    assert table["digits greedy"][0] == "7"
    assert [percent(cell) for cell in table["digits greedy"][1:]] == [57.1, 0.0, 28.6]
    one, two, mean = map(percent, table["digits avg@4"][1:])
    assert (one, two, mean) == (28.6, 0.0, 14.3)
    assert [percent(cell) for cell in table["digits pass@4"][1:]] == [57.1, 0.0, 28.6]


def test_a_task_of_which_nothing_is_graded_is_no_better_than_any():
    """Where it chooses the best checkpoint, negative rewards would be worse than none."""
    nothing = evaluate.Line("a", 0, 0.0, evaluate.wilson(0, 0), 0.0, 0.0, 0.0)
    other = replace(nothing, name="b", examples=5, score=-1.0)
    result = evaluate.Result((nothing, other, replace(other, name="all")), 3, tasks=("a", "b"))
    assert result.score("a") == journal.LOWEST
    assert result.score() == result.score("b") == (0.0, -1.0)


def test_the_mean_leaves_out_checkpoints_of_which_nothing_is_known():
    line = evaluate.Line("all", 0, 0.0, evaluate.wilson(0, 0), 0.0, 0.0, 0.0)
    known = replace(line, examples=4, greedy=0.5, interval=evaluate.wilson(2, 4))
    results = {i: {"x": evaluate.Result((one,), 0)} for i, one in enumerate((line, known))}
    out = io.StringIO()
    rich.console.Console(file=out, width=200).print(tables.checkpoints("", results))
    row = cells(out.getvalue())["x greedy"]
    assert row[1] == "all ungraded"
    assert row[3] == "50.0"
    results.pop(1)
    results[2] = results[0]
    rich.console.Console(file=(out := io.StringIO()), width=200).print(
        tables.checkpoints("", results)
    )
    assert cells(out.getvalue())["x greedy"][3] == "all ungraded"
