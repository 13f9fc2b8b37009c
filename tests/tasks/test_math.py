import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.math.task import MathTask, boxed_answer
from jaxrl_llm.tasks.math.worker import AnswerChecker, Verdict
from jaxrl_llm.tasks.task import RewardSettings
from tests.tasks.scoring import score_responses

PROBLEM = Problem("What is one half?", (r"\frac{1}{2}",))


@pytest.fixture
def task(checker):
    return MathTask([PROBLEM], [PROBLEM], checker)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"</think> \boxed{5}", "5"),
        (r"\boxed{4} </think> \boxed{5}", "5"),
        (r"</think> \boxed{4} then \boxed{5}", "5"),
        (r"a </think> \boxed{4} </think> nothing", "4"),
        (r"</think> \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"</think> \boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"</think> \boxed{\}}", r"\}"),
        (r"</think> \boxed{}", ""),
        (r"</think> \boxed{4} \boxed{\boxed{5}}", r"\boxed{5}"),
        (r"</think> \boxed{\boxed{5} is wrong}", r"\boxed{5} is wrong"),
        (r"</think> \boxed{x=\boxed{5}}", r"x=\boxed{5}"),
        (r"</think> \boxed{4} \boxed{5", None),
        (r"\boxed{5} </think>", None),
        (r"\boxed{5}", None),
        (r"</think> \boxed{5", None),
        (r"</think> \boxed{5\\", None),
        ("</think> \\boxed{5\\", None),
        ("", None),
    ],
)
def test_the_last_box_after_the_first_thought_is_the_answer(response, answer):
    assert boxed_answer(response) == answer


def test_reward_is_one_for_an_equivalent_answer(task, caplog):
    responses = [r"so </think> \boxed{0.5}", r"so </think> \boxed{2}", r"so \boxed{0.5}"]
    scored = score_responses(task, [PROBLEM] * 3, responses, RewardSettings(threads=2))
    assert [(r.score, r.correct) for r in scored] == [(1, True), (0, False), (0, False)]
    assert all(reward.graded for reward in scored)
    assert not caplog.records


def test_prompt_holds_the_question_and_opens_the_thought(task):
    assert PROBLEM.question in task.prompt(PROBLEM)
    assert task.prompt(PROBLEM).endswith("<think>")
    braces = Problem("Is {x} a set?", ("1",))
    assert "{x}" in task.prompt(braces)


def test_a_comparison_that_hangs_is_left_unchecked_and_harms_no_other(caplog):
    hard = Problem("?", ("(x+1)^{98}(x+2)^{97}(x+3)",))
    answer = r"</think> \boxed{(x+1)^{98}(x+2)^{97}(x+3.5)}"
    with AnswerChecker(workers=1, seconds=0.1) as checker:
        reward = MathTask([hard], [hard], checker).reward(hard, answer)
        assert (reward.score, reward.correct, reward.graded) == (0, False, False)
        assert "not checked" in caplog.text
        assert checker.check("1", "1.0") is Verdict.EQUAL


ALGEBRA = (r"\sqrt{8}", r"2\sqrt{2}")  # a pair that numbers and notation alone do not settle


def test_a_worker_that_dies_or_stops_is_replaced_and_asked_again(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.tasks.workers._WALL", 2)
    with AnswerChecker(workers=1, seconds=2.0) as pool:
        for fatal in (signal.SIGKILL, signal.SIGSTOP):
            process = pool._workers._workers[0].process
            os.kill(process.pid, fatal)
            assert pool.check(*ALGEBRA) is Verdict.EQUAL
            assert process.poll() is not None
        process = pool._workers._workers[0].process
    assert process.poll() is not None
    pool.close()  # once more does no harm


def test_without_any_worker_check_says_so_and_a_later_one_starts_it_again(monkeypatch):
    with AnswerChecker(workers=1) as pool:
        process = pool._workers._workers[0].process
        os.kill(process.pid, signal.SIGKILL)
        with monkeypatch.context() as broken:
            broken.setattr("jaxrl_llm.tasks.workers.sys.executable", "/no/python")
            for _ in range(2):
                with pytest.raises(UserError, match="cannot be started"):
                    pool.check(*ALGEBRA)
        assert pool.check(*ALGEBRA) is Verdict.EQUAL
    for pair in (ALGEBRA, ("1", "1")):  # nothing that a model wrote is read in this process
        with pytest.raises(UserError, match="closed"):
            pool.check(*pair)


def test_time_that_passes_without_work_is_not_counted():
    """A worker that the machine does not let run for twice its seconds still decides."""
    with AnswerChecker(workers=1, seconds=0.5) as pool, ThreadPoolExecutor(1) as threads:
        process = pool._workers._workers[0].process
        os.kill(process.pid, signal.SIGSTOP)
        verdict = threads.submit(pool.check, *ALGEBRA)
        time.sleep(1.5)
        os.kill(process.pid, signal.SIGCONT)
        assert verdict.result(60) is Verdict.EQUAL
        assert pool._workers._workers[0].process is process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_inherit_neither_secrets_nor_files_nor_jax(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRL_LLM_API_KEY", "secret-key")
    with (tmp_path / "open").open("w") as open_file:
        os.set_inheritable(open_file.fileno(), True)
        with AnswerChecker(workers=1) as pool:
            process = pool._workers._workers[0].process
            proc = Path(f"/proc/{process.pid}")
            assert b"secret" not in (variables := (proc / "environ").read_bytes())
            assert not [x for x in variables.split(b"\0") if x.startswith(b"HOME=")]
            assert str(tmp_path / "open") not in [os.readlink(fd) for fd in (proc / "fd").iterdir()]
            assert "jaxlib" not in (proc / "maps").read_text()
            assert "Max address space" in (limits := (proc / "limits").read_text())
            assert str(4 << 30) in limits


def test_more_threads_than_workers_wait_their_turn(checker):
    pairs = [
        (rf"{n}\pi^2", rf"\frac{{{2 * n}}}{{2}}\pi^2" if n % 3 else r"\pi") for n in range(2, 26)
    ]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda pair: checker.check(*pair), pairs))
    assert [v is Verdict.EQUAL for v in verdicts] == [bool(n % 3) for n in range(2, 26)]


@pytest.mark.parametrize(
    ("found", "checked", "correct"),
    [
        ([Verdict.UNDECIDED, Verdict.DIFFERENT], False, False),
        ([Verdict.UNDECIDED, Verdict.EQUAL], True, True),
        ([Verdict.DIFFERENT] * 2, True, False),
    ],
)
def test_of_several_truths_one_is_enough(found, checked, correct):
    left = iter(found)
    task = MathTask([], [], SimpleNamespace(check=lambda *_: next(left)))
    reward = task.reward(Problem("?", ("1", "2")), r"</think> \boxed{3}")
    assert (reward.graded, reward.correct) == (checked, correct)
