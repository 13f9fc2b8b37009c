"""Leaving: at once where nothing is lost by it, after the step where its state would be, and in time."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import Leaving, UserError
from jaxrl_llm.learning import reinforce
from jaxrl_llm.learning.clock import Clock
from jaxrl_llm.learning.stream import Stream
from jaxrl_llm.learning.token_task import Answers
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.runs import leaving
from jaxrl_llm.runs.leaving import Stop, leaving_gracefully
from jaxrl_llm.tasks.task import Reward


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch):
    """Nothing here may end the process of the tests."""
    monkeypatch.setattr(leaving, "_end", lambda *_, **__: None)


def tell(number):
    os.kill(os.getpid(), number)


def told_in_work(number):
    in_work(lambda: tell(number))


def in_work(happens):
    happens()
    time.sleep(10)
    pytest.fail("it went on")


@pytest.mark.parametrize("number", leaving.SIGNALS)
def test_each_signal_drops_what_may_be_dropped(number):
    stop, before = Stop(), signal.getsignal(signal.SIGHUP)
    with leaving_gracefully(stop), pytest.raises(Leaving), stop.droppable():
        told_in_work(number)
    assert stop.asked
    assert signal.getsignal(signal.SIGHUP) == before


def test_elsewhere_a_signal_waits():
    stop = Stop()
    with leaving_gracefully(stop):
        tell(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(Leaving):
            stop.check()
        with pytest.raises(Leaving), stop.droppable():
            pytest.fail("it began")


def test_it_interrupts_one_who_waits_for_other_threads():
    """As vLLM's sampler waits for its answers."""
    stop, changed = Stop(), threading.Condition()
    with leaving_gracefully(stop):
        threading.Timer(0.1, tell, [signal.SIGTERM]).start()
        with pytest.raises(Leaving), stop.droppable(), changed:
            changed.wait(timeout=20.0)
    assert changed.acquire(blocking=False)


class Finalized:
    """Told while it is deleted."""

    def __del__(self):
        tell(signal.SIGTERM)


def forgotten():
    one = threading.Event()
    weakref.finalize(one, tell, signal.SIGTERM)
    del one


def collected():
    def told(phase, _):
        if phase == "start":
            tell(signal.SIGTERM)

    gc.callbacks.append(told)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(told)


@pytest.mark.parametrize("collect", [collected, forgotten, Finalized])
def test_a_signal_in_a_garbage_collection_is_not_lost(collect):
    """What is raised there Python prints, and goes on."""
    stop = Stop()
    with leaving_gracefully(stop), pytest.raises(Leaving), stop.droppable():
        in_work(collect)


@pytest.mark.parametrize("collect", [collected, forgotten, Finalized])
def test_a_signal_at_the_end_that_cannot_be_raised_is_known(collect):
    with leaving_gracefully(stop := Stop()):
        collect()
    assert stop.asked


def test_a_second_interrupt_is_an_interrupt():
    with leaving_gracefully(stop := Stop()):
        tell(signal.SIGINT)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            told_in_work(signal.SIGINT)


def test_the_clock_asks_as_a_signal_does():
    stop, start = Stop(), time.monotonic()
    with leaving_gracefully(stop, minutes=0.002), pytest.raises(Leaving), stop.droppable():
        time.sleep(20)
    assert time.monotonic() - start < 10


HELD = """
import ctypes, os, signal, sys, time
from jaxrl_llm.runs.leaving import Stop, leaving_gracefully
sleep = ctypes.CDLL(None).usleep
with leaving_gracefully(Stop(), grace=float(sys.argv[1])):
    numbers, end = list(map(int, sys.argv[2:])), time.monotonic() + 60
    while time.monotonic() < end:  # no signal handler of Python ends a long program
        try:
            if numbers:
                os.kill(os.getpid(), numbers.pop())
            sleep(500_000)
        except KeyboardInterrupt:
            pass
"""


@pytest.mark.parametrize(
    ("grace", "signals", "code", "said"),
    [(0.2, [15], leaving.UNFINISHED, "more than 0.2 s"), (40, [2, 2], 130, "")],
)
def test_the_process_ends_when_its_grace_is_over(grace, signals, code, said):
    command = [sys.executable, "-c", HELD, str(grace), *map(str, signals)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


TOLD = """
import os, signal, time
from dataclasses import replace
from tests.training.quick import config as quick

def task(data):
    if not {clock}:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)

def config():
    return replace(quick(), task=task)
"""


@pytest.mark.parametrize("clock", [(), ("--max-minutes", "0.002")])
def test_told_before_there_is_anything_to_save_it_leaves_at_once(clock, tmp_path, capsys):
    path, out, start = tmp_path / "mine.py", tmp_path / "run", time.monotonic()
    path.write_text(TOLD.format(clock=clock))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(path), "--out", str(out), *clock])
    assert time.monotonic() - start < 300
    assert stop.value.code == leaving.UNFINISHED
    assert "before there was anything to save" in capsys.readouterr().out
    assert not out.exists()


class Programs:
    """A step that adds one to its state."""

    def batch(self, rollout, rewards):
        return None, jnp.zeros((1, len(rewards)))

    gap = 0.0

    def score(self, params, batch):
        return {}, {"mismatch_mean": jnp.float32(self.gap)}

    def credit(self, batch, reward):
        return None

    def update(self, state, credited):
        return SimpleState(state.params + 1), {}


class SimpleState(SimpleNamespace):
    def __init__(self, params):
        super().__init__(params=params)


class Sampler:
    counters, sync = {}, {}

    def __init__(self, away_at=-1):
        self.away_at = away_at

    def push(self, params, version):
        if version == self.away_at:
            raise UserError("no server has answered")
        self.sync = {"sync/version": version}

    def release(self):
        pass


class Data:
    """Batches of the numbers of the steps."""

    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return [self.next - 1]

    def get_state(self):
        return {"next": self.next}


ROLLOUT = Rollout([[1]], [[2]], [[0.0]], [True])


def steps(
    sampler, *, sample=lambda step, examples: ROLLOUT, droppable=nullcontext, programs=None, **how
):
    task = SimpleNamespace(answers=lambda e, r: Answers(e, ["a"], [Reward(1.0, True)]))
    return reinforce.reinforce(
        range(5), SimpleState(0), Stream(Data(), sample), task, programs or Programs(), sampler, Clock(),
        droppable=droppable, **how,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _states_are_arrays(monkeypatch):
    monkeypatch.setattr(reinforce.jax, "block_until_ready", lambda x: x)


def test_after_an_outage_the_state_is_handed_over(monkeypatch):
    monkeypatch.setattr(reinforce, "_of_update", lambda visits, described, host: host)
    found = list(steps(Sampler(away_at=3)))
    assert [(s.number, s.state.params) for s in found] == [(1, 1), (2, 2), (3, 3)]
    assert [type(s.trouble) for s in found] == [type(None), type(None), UserError]
    assert found[-1].cursor.data == {"next": 3}
    assert [s.metrics().get("sync/version") for s in found] == [1, 2, None]


def test_a_record_that_cannot_be_written_does_not_lose_the_step_under_way():
    def full():
        raise UserError("no room")

    (only,) = steps(Sampler(), meanwhile=full)
    assert (only.state.params, str(only.trouble)) == (1, "no room")


def test_a_signal_in_a_rollout_leaves_the_last_step_as_it_was():
    stop = Stop()

    def sample(step, examples):
        if step == 2:
            stop.ask()
        return ROLLOUT

    found = steps(Sampler(), sample=sample, droppable=stop.droppable)
    last = [next(found), next(found)][-1]
    with pytest.raises(Leaving):
        next(found)
    assert (last.number, last.state.params, last.cursor.data) == (2, 2, {"next": 2})


@pytest.mark.parametrize(
    ("gap", "tolerance", "lag", "learned"),
    [(0.1, 1e-3, 0, 1), (float("nan"), 1e-3, 0, 1), (1e-4, 1e-3, 0, 3), (0.1, 1e-3, 1, 3), (0.1, None, 0, 3)],
)  # fmt: skip
def test_responses_of_another_policy_are_not_learned_from(gap, tolerance, lag, learned):
    """A lie that is well-formed: other tokens, or other log-probs."""
    programs, found = Programs(), []

    def sample(step, examples):
        programs.gap = gap if step == 1 else 0.0
        return replace(ROLLOUT, version=step - lag, tolerance=tolerance)

    ends = (
        pytest.raises(UserError, match="step 2: the log-probs") if learned == 1 else nullcontext()
    )
    with ends:
        for step in steps(Sampler(), sample=sample, programs=programs):
            found.append(step)
            if step.number == 3:
                break
    assert (found[-1].number, found[-1].state.params) == (learned, learned)


def test_what_a_signal_in_look_ahead_interrupts_is_not_in_the_cursor():
    released = threading.Event()

    @contextmanager
    def interrupted():
        if begun:
            raise Leaving
        yield

    begun = []

    def sample(step, examples):
        if step == 1:
            begun.append(step)
            released.wait(20)
        return ROLLOUT

    (only,) = steps(Sampler(), sample=sample, droppable=interrupted, look_ahead=True)
    released.set()
    assert isinstance(only.trouble, Leaving)
    assert only.cursor.ahead is None
    assert only.cursor.data == {"next": 1}
