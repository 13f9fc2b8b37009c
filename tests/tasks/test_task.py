import contextlib
import gc
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import math_verify
import pytest

from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.tasks import deadline
from jaxrl_llm.tasks.task import (
    UNGRADED,
    Demonstrator,
    Mapped,
    Reward,
    RewardSettings,
    TaskExample,
    load_task,
    score_groups,
)
from jaxrl_llm.training.leaving import Stop, stoppable
from tests.tasks.scoring import score_responses

USER_TASK = """
from jaxrl_llm.tasks.task import Reward


class Sums:
    name = "sums"
    train = [(a, b) for a in range(5) for b in range(5)]
    test = [(5, b) for b in range(5)]

    def prompt(self, example):
        return f"{example[0]} + {example[1]} = "

    def reward(self, example, response):
        correct = int(response) == sum(example)
        return Reward(float(correct), correct)


task = Sums()
unfinished = Reward(1.0, True)
"""


@dataclass(frozen=True)
class Fake:
    """Rewards the response "i" by calling the i-th of some functions with the example."""

    functions: Sequence[Callable[[int], Any]]
    name: str = "fake"
    train: tuple[int, ...] = (1, 2, 3)
    test: tuple[int, ...] = (4,)

    def prompt(self, example: int) -> str:
        return str(example)

    def reward(self, example: int, response: str) -> Reward:
        return self.functions[int(response)](example)


def boom(_: int):
    raise RuntimeError("boom")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_raising_reward_costs_its_own_sample_only(threads, caplog):
    task = Fake([lambda e: Reward(e, True, {"length": e}), boom, lambda e: Reward(-e, False)])
    with caplog.at_level(logging.WARNING):
        scored = score_responses(task, [5, 6, 7], ["0", "1", "2"], RewardSettings(threads=threads))
    assert [reward.score for reward in scored] == [5.0, 0.0, -7.0]
    assert [reward.graded for reward in scored] == [True, False, True]
    assert scored[0].fields == {"length": 5.0}
    assert sum(not reward.graded for reward in scored) == 1
    assert "boom" in caplog.text
    assert len(caplog.records) == 1


@dataclass(frozen=True)
class Ranked(Fake):
    """Rewards a group by one of the functions, called with the responses."""

    def rewards(self, example, responses):
        return self.functions[example](responses)


ALIKE = lambda responses: [Reward(1 / responses.count(one), False) for one in responses]
LATE = lambda responses: time.sleep(5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (boom, "RuntimeError in boom"),
        (LATE, "no result after 0.3 s"),
        (lambda some: ALIKE(some)[1:], "rewards() returned 2 for 3 responses"),
        (lambda some: [0.5] * 3, "returned float, not Reward"),
        (lambda some: [*ALIKE(some)[1:], Reward(float("nan"), False)], "not finite"),
        (lambda some: None, "'NoneType' object is not iterable"),
    ],
)
def test_a_group_is_graded_together_or_not_at_all(threads, fails, message, caplog):
    task, settings = Ranked([ALIKE, fails]), RewardSettings(threads, 0.3)
    mixed = [
        TaskExample("ranked", 1, task),
        0,
        TaskExample("fake", 7, Fake([lambda _: int("x"), lambda e: Reward(e, True)])),
    ]
    groups = [["a", "b", "a"], ["a", "a"], ["0", "1"]]
    got = score_groups(task, mixed, groups, settings)
    assert got[:2] == [[UNGRADED] * 3, [Reward(0.5, False)] * 2]
    assert got[2] == [UNGRADED, Reward(7.0, True)]  # each by itself
    assert message in caplog.text
    assert "3 of 7 responses ungraded" in caplog.text
    assert score_responses(task, [0], ["a"]) == [Reward(1.0, False)]  # one is a group


def said(caplog):
    """What was logged, without the folder of this file."""
    return [r.getMessage().replace(__file__, "test_task.py") for r in caplog.records]


def test_each_kind_of_error_is_said_once_with_its_place_and_number(caplog):
    task, known = Fake([boom, lambda e: int("x"), lambda e: e, sum]), set()  # pyright: ignore
    for _ in range(2):
        score_responses(task, [5] * 6, list("001123"), RewardSettings(reported=known))
    line = lambda function: function.__code__.co_firstlineno
    reward, number = (
        line(Fake.reward),
        line(test_each_kind_of_error_is_said_once_with_its_place_and_number) + 1,
    )
    assert said(caplog) == [
        f"RuntimeError in boom (test_task.py:{line(boom) + 1}): boom; 2 of 6 responses ungraded",
        f"ValueError in <lambda> (test_task.py:{number}): invalid literal for int() with base 10: 'x'; "
        "2 of 6 responses ungraded",
        f"TypeError in reward (test_task.py:{reward}): reward() returned int, not Reward; "
        "1 of 6 responses ungraded",
        f"TypeError in reward (test_task.py:{reward + 1}): 'int' object is not iterable; "
        "1 of 6 responses ungraded",
    ]


async def later(_):
    return Reward(1.0, True)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    "bad",
    [
        later,
        lambda e: 1.0,
        lambda e: None,
        lambda e: Reward(float("nan"), True),
        lambda e: Reward(-1e16, True),  # squares of a batch of them are infinite in float32
        lambda e: Reward(1.0, True, {"x": float("inf")}),
        lambda e: Reward("much", True),  # pyright: ignore[reportArgumentType]
        lambda e: Reward(
            0.0, False, {"x": 1}, graded=False
        ),  # as a task says that it does not know
    ],
)
def test_an_unusable_reward_is_a_failure(bad):
    scored = score_responses(Fake([bad]), [1], ["0"])
    assert (scored[0].score, scored[0].graded) == (0.0, False)
    with pytest.raises(ValueError, match="shorter"):
        score_responses(Fake([bad]), [1, 2], ["0"])
    gc.collect()  # what was never awaited warns here, and not in another test


def test_what_a_task_says_to_people_ends_the_run():
    def refuse(_):
        raise UserError("the grader is not installed")

    with pytest.raises(UserError, match="not installed"):
        score_responses(Fake([refuse]), [1], ["0"])


def spin(_):
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            continue


def backtrack(_):
    re.match("(a+)+$", "a" * 60 + "b")
    return Reward(1.0, True)


def sleep(_):
    time.sleep(3600)
    return Reward(1.0, True)


def stubborn(_):
    try:
        time.sleep(3600)
    except BaseException:
        time.sleep(3600)


def own_alarm(_):
    """Limits its time by an alarm, takes that away, and hangs in what comes then."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    time.sleep(3600)


def own_alarm_and_backtrack(_):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    backtrack(_)


def left_alarm(_):
    """Its alarm would ring in the middle of something else."""
    signal.signal(signal.SIGALRM, lambda *_: boom(0))
    signal.setitimer(signal.ITIMER_REAL, 60)
    time.sleep(0.3)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    re.match("(a+)+$", "a" * 60 + "b")


def deaf(_):
    while True:
        try:  # noqa: SIM105
            time.sleep(0.01)
        except:  # noqa: E722
            pass


def deaf_in_a_call(_):
    def again():
        with contextlib.suppress(BaseException):
            time.sleep(3600)

    while True:
        again()


def translating(_):
    """What it raises instead is no matter."""
    try:
        time.sleep(3600)
    except BaseException as error:
        raise ValueError from error


def late(_):
    try:
        time.sleep(3600)
    except BaseException:
        return Reward(9.0, True)


def waits_for_a_process(_):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=False)


def waits_for_threads(_):
    spinning = [threading.Thread(target=lambda: time.sleep(60), daemon=True) for _ in range(4)]
    for thread in spinning:
        thread.start()
    for thread in spinning:
        thread.join()


def judged_by_math_verify(_):
    """With the alarms that it sets of itself."""
    math_verify.verify(math_verify.parse("$1/2$"), math_verify.parse("$0.5$"))
    time.sleep(3600)


HANGING = [
    spin, backtrack, sleep, stubborn, own_alarm, own_alarm_and_backtrack, left_alarm, deaf, deaf_in_a_call,
    translating, late, waits_for_a_process, waits_for_threads, judged_by_math_verify,
]  # fmt: skip


def handled():
    """What of the process a reward might change."""
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return signals, [signal.getitimer(timer) for timer in timers], sys.gettrace()


@pytest.mark.parametrize("hanging", HANGING)
def test_a_reward_that_hangs_is_interrupted(hanging, monkeypatch):
    monkeypatch.setattr(deadline, "LOOK", 0.1)
    before = handled()
    good = lambda e: Reward(e, True)
    start = time.monotonic()
    scored = score_responses(
        Fake([good, hanging]), [5, 6, 7, 8], ["0", "1", "0", "1"], RewardSettings(seconds=0.5)
    )
    assert 1.0 <= time.monotonic() - start < 60
    assert [r.graded for r in scored] == [True, False, True, False]
    assert [r.score for r in scored] == [5.0, 0.0, 7.0, 0.0]
    assert handled() == before


@pytest.mark.parametrize("removed", [False, True])
def test_the_working_folder_is_as_it_was_after_a_reward(tmp_path, monkeypatch, removed):
    """One that runs programs may be elsewhere, and what is relative would be there then."""
    monkeypatch.chdir(tmp_path)

    def elsewhere(_):
        (folder := tmp_path / "scratch").mkdir()
        os.chdir(folder)
        if removed:
            folder.rmdir()
        return Reward(1.0, True)

    [said] = score_responses(Fake([elsewhere]), [1], ["0"])
    assert said.score == 1.0
    assert pathlib.Path.cwd() == tmp_path


@pytest.mark.parametrize("hanging", HANGING)
def test_a_stop_reaches_a_reward_that_hangs(hanging, monkeypatch):
    monkeypatch.setattr(deadline, "LOOK", 0.1)
    good = lambda e: Reward(e, True)
    with stoppable(stop := Stop()):
        before = handled()
        one = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        one.start()
        with pytest.raises(StopRequested):
            score_responses(
                Fake([good, hanging]),
                [5, 6],
                ["0", "1"],
                RewardSettings(stop_requested=lambda: stop.requested),
            )
        assert handled() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reward_is_alive_while_it_has_time(threads, monkeypatch):
    """It may take longer than anything else in a run may stand still."""
    monkeypatch.setattr(deadline, "LOOK", 0.05)
    beats = []
    slow = lambda _: time.sleep(1.0) or Reward(1.0, True)
    score_responses(
        Fake([slow]), [1], ["0"], RewardSettings(threads=threads, heartbeat=lambda: beats.append(1))
    )
    assert len(beats) > 2
    before = len(beats)
    score_responses(
        Fake([slow]),
        [1],
        ["0"],
        RewardSettings(threads=threads, seconds=0.1, heartbeat=lambda: beats.append(1)),
    )
    assert len(beats) - before < 10


@pytest.mark.parametrize(("threads", "hanging"), [(1, spin), (1, backtrack), (2, sleep)])
def test_a_slow_reward_is_named_and_a_stop_is_not_kept_waiting(
    threads, hanging, caplog, monkeypatch
):
    monkeypatch.setattr(deadline, "SLOW", 1.0)
    monkeypatch.setattr(deadline, "LOOK", 0.1)
    good = lambda e: Reward(e, True)
    asked = lambda: bool(caplog.records)
    start = time.monotonic()
    with pytest.raises(StopRequested):
        score_responses(
            Fake([good, hanging]),
            [5, (6, 7)],
            ["0", "1"],
            RewardSettings(threads=threads, stop_requested=asked),
        )
    assert time.monotonic() - start < 60
    [line] = said(caplog)
    assert re.fullmatch(
        r"the reward of response 2 of 2 has been running for \d+ s: on example \(6, 7\), now in "
        rf"{hanging.__name__} \(test_task.py:\d+\); it is given up after 300 s \(reward_seconds\)",
        line,
    )


def test_a_stop_comes_between_two_rewards():
    scored = []
    note = lambda e: scored.append(e) or Reward(e, True)
    with pytest.raises(StopRequested):
        score_responses(
            Fake([note]),
            [1, 2, 3],
            ["0"] * 3,
            RewardSettings(stop_requested=lambda: len(scored) == 2),
        )
    assert scored == [1, 2]


def test_rewards_that_hang_in_threads_are_given_up():
    release = threading.Event()

    def hang(_):
        release.wait()
        return Reward(9.0, True)

    good = lambda e: Reward(e, True)
    responses = ["1", "1", "1", "0", "0", "0"]
    scored = score_responses(
        Fake([good, hang]), list(range(6)), responses, RewardSettings(threads=2, seconds=1.0)
    )
    release.set()
    assert [r.graded for r in scored] == [False] * 3 + [True] * 3
    assert [r.score for r in scored] == [0.0] * 3 + [3.0, 4.0, 5.0]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reward_that_ends_the_program_ends_itself(threads, caplog):
    """As one that runs what the model wrote may: `exit(0)` would look like a run that is finished."""
    good = lambda e: Reward(e, True)
    leave = lambda _: sys.exit(0)
    scored = score_responses(
        Fake([good, leave]), [5, 6, 7], ["0", "1", "0"], RewardSettings(threads=threads)
    )
    assert [r.graded for r in scored] == [True, False, True]
    assert "it called exit(0)" in caplog.text


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reward_that_hangs_does_not_keep_the_program_from_its_end(threads):
    program = f"""
import time
from jaxrl_llm.tasks.task import RewardSettings
from tests.tasks.scoring import score_responses
class Slow:
    name = "slow"
    def reward(self, example, response):
        time.sleep(3600)
scored = score_responses(Slow(), [1, 2], ["", ""], RewardSettings({threads}, 0.1))
print(len(scored), any(reward.graded for reward in scored))
"""
    end = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=600)
    assert (end.returncode, end.stdout.split()) == (0, [b"2", b"False"])


def test_a_reward_that_ends_when_its_time_does_is_whole_or_ungraded():
    """What interrupts it comes at any moment of its end, and never after it."""
    before = handled()

    def about(example):
        time.sleep(example / 1e5)
        return Reward(1.0, True)

    scored = score_responses(
        Fake([about]), range(180, 230), ["0"] * 50, RewardSettings(seconds=0.002)
    )
    assert {(r.graded, r.score) for r in scored} <= {(True, 1.0), (False, 0.0)}
    assert handled() == before


FORKS = """
import os, signal, subprocess, sys, time
from multiprocessing import Pool
from jaxrl_llm.tasks.task import Reward, RewardSettings
from tests.tasks.scoring import score_responses

class Forks:
    name = "forks"
    def reward(self, example, response):
        if response == "pool":
            with Pool(2) as pool:
                return Reward(sum(pool.map(abs, [-1, 2])), True)
        if (child := os.fork()) == 0:
            if response == "hangs":
                time.sleep(3600)
            if response == "returns":
                return Reward(1.0, True)
            sys.exit(int(response))
        if response == "hangs":
            os.kill(child, signal.SIGTERM)
        return Reward(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), True)

said = ["pool", "0", "7", "returns", "hangs"]
for reward in score_responses(Forks(), [0] * 5, said, RewardSettings(int(sys.argv[1]), 300)):
    os.write(1, f"{reward.score:g} ".encode())
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_that_a_reward_forks_never_becomes_a_second_trainer(threads):
    command = [sys.executable, "-c", FORKS, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.stdout.split(), done.returncode) == (["3", "0", "7", "0", "-15"], 0), done.stderr


class Cancelled(BaseException):
    """As time limits of some libraries raise it."""


@pytest.mark.parametrize("threads", [1, 2])
def test_whatever_a_reward_raises_costs_its_own_sample(threads, caplog):
    def cancel(_):
        raise Cancelled("too late")

    good = lambda e: Reward(e, True)
    scored = score_responses(
        Fake([good, cancel]), [5, 6], ["0", "1"], RewardSettings(threads=threads)
    )
    assert [r.graded for r in scored] == [True, False]
    assert "Cancelled in cancel" in caplog.text


def test_interruption_is_not_a_failed_sample():
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_responses(Fake([interrupt]), [1], ["0"])


def test_threads_run_at_the_same_time():
    barrier = threading.Barrier(3, timeout=120)

    def meet(_):
        barrier.wait()
        return Reward(1.0, True)

    scored = score_responses(Fake([meet]), [1, 2, 3], ["0"] * 3, RewardSettings(threads=3))
    assert all(reward.graded for reward in scored)


def test_mapped_source_is_the_function_of_each_example():
    mapped = Mapped([1, 2, 3], lambda x: x * 10)
    assert (len(mapped), mapped[1], list(mapped)) == (3, 20, [10, 20, 30])


def test_a_user_task_is_one_small_file(tmp_path, caplog):
    (tmp_path / "sums.py").write_text(USER_TASK)
    task = load_task(f"{tmp_path / 'sums.py'}:task")
    assert task.prompt(task.train[7]) == "1 + 2 = "
    scored = score_responses(task, [task.train[7]] * 3, ["3", "4", "three"])
    assert [reward.score for reward in scored] == [1.0, 0.0, 0.0]
    assert sum(not reward.graded for reward in scored) == 1
    assert f"ValueError in reward ({tmp_path / 'sums.py'}:14): invalid literal" in caplog.text
    assert not isinstance(task, Demonstrator)


@pytest.mark.parametrize(
    ("spec", "old", "new", "message"),
    [
        ("sums.py:tsak", "", "", "did you mean 'task'"),
        ("sums.py:Sums", "", "", "is a class: an instance is wanted, as Sums"),
        ("sums.py:unfinished", "", "", "has no 'name'"),
        ("sums", "", "", "path/to/file.py:name"),
        (":task", "", "", "path/to/file.py:name"),
        ("no/such/file.py:task", "", "", "does not exist"),
        ("sums.py:task", "class Sums:", "class Sums", "line 5: SyntaxError"),
        ("sums.py:task", "task = Sums()", "task = Sum()", "line 18: NameError"),
        ("sums.py:task", "def reward", "def rewarded", "has no 'reward'"),
        ("sums.py:task", "test = [(5, b) for b in range(5)]", "test = iter('ab')", "'test' needs a length"),
        ("sums.py:task", "def prompt(self, example):", "prompt = 1\n    def x(self, example):", "not a function"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_a_one_line_error(tmp_path, monkeypatch, spec, old, new, message):
    monkeypatch.chdir(tmp_path)
    assert old in USER_TASK
    (tmp_path / "sums.py").write_text(USER_TASK.replace(old, new) if old else USER_TASK)
    with pytest.raises(UserError, match=message) as caught:
        load_task(spec)
    assert "\n" not in str(caught.value)
