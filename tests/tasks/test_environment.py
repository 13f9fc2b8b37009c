"""Environments: what a step says goes on, what fails ends its episode ungraded, and nothing else waits."""

import asyncio
import gc
import re
import threading
import time
import weakref
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.reward import UNGRADED
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks import deadline
from jaxrl_llm.tasks import task as tasks
from jaxrl_llm.tasks.task import Episodes, Interactive, Reward, RewardSettings, check_members
from tests.tasks.test_task import said

WORDS = tokenizer.of_words(("a", "b"))


class Of:
    """A task whose environments take steps by a function of (example, tokens)."""

    name, train, test = "of", (1, 2, 3), (4,)

    def __init__(self, step):
        self.made, self.taken = [], step

    def prompt(self, example):
        return "a"

    def environment(self, example, words):
        assert words is WORDS
        self.made.append(example)
        return Stepping(self.taken, example)


class Stepping:
    def __init__(self, taken, example):
        self.taken, self.example = taken, example

    def step(self, tokens):
        return self.taken(self.example, tokens)


def echo(example, tokens):
    return None if len(tokens) > 2 else [*tokens, 2], Reward(
        float(len(tokens)), True, {"at": example}
    )


def test_a_step_gives_the_next_tokens_and_the_reward_so_far():
    task = Of(echo)
    with Episodes(task, WORDS, [1, 2]) as episodes:
        assert episodes(0, [3, 1]).result() == ([3, 1, 2], False)
        assert episodes.rewards == [Reward(2.0, True, {"at": 1.0}), tasks.UNGRADED]
        assert episodes(0, [3, 1, 1]).result() is None
        assert episodes(1, []).result() == ([2], False)
    assert task.made == [1, 2]
    assert [reward.score for reward in episodes.rewards] == [3.0, 0.0]
    assert episodes.turn_rewards == [[2.0, 3.0], [0.0]]  # the newest is the episode's


@pytest.mark.parametrize("given", [(1, 2, 0), iter([1, 2, 0]), (t for t in (1, 2, 0))])
def test_tokens_may_come_in_whatever_can_be_gone_through_once(given):
    with Episodes(Of(lambda *_: (given, Reward(1.0, True))), WORDS, [1]) as episodes:
        assert episodes(0, [3]).result() == ([1, 2, 0], False)


def test_a_coroutine_holds_no_thread():
    """One thread, sixteen steps that wait for one another."""
    begun, all_began = [], asyncio.Event()

    async def wait(example, tokens):
        begun.append(example)
        if len(begun) == 16:
            all_began.set()
        await asyncio.wait_for(all_began.wait(), 120)
        return [example], Reward(1.0, True)

    with Episodes(Of(wait), WORDS, [1] * 16) as episodes:
        replies = [episodes(i, [2]) for i in range(16)]
        assert [reply.result() for reply in replies] == [([1], False)] * 16


def test_what_is_said_anew_is_marked_and_log_probs_are_told_to_who_asks():
    class Rewrites:
        def step_with_logps(self, tokens, logps):
            return tasks.NewContext(tokens[:1]), Reward(logps[0], True)

    task = Of(echo)
    task.environment = lambda example, tokenizer: Rewrites()
    with Episodes(task, WORDS, [1]) as episodes:
        assert episodes(0, [3, 1], [-0.5, -1.0]).result() == ([3], True)
    assert episodes.rewards[0].score == -0.5


def test_environments_end_with_the_block():
    """Not when Python looks for cycles: one may hold a process, or an episode elsewhere."""
    ended, task = [], Of(echo)

    class Held(Stepping):
        def __del__(self):
            ended.append(self.example)

    task.environment = lambda example, tokenizer: Held(echo, example)
    gc.disable()
    try:
        with Episodes(task, WORDS, [1, 2]) as episodes:
            assert [episodes(i, [3]).result() for i in (0, 1)] == [([3, 2], False)] * 2
            assert not ended
        assert sorted(ended) == [1, 2]
    finally:
        gc.enable()


def fails(example, tokens):
    raise ValueError("no such tool")


async def fails_later(example, tokens):
    await asyncio.sleep(0)
    raise ValueError("no such tool")


def hangs(example, tokens):
    time.sleep(3600)


async def hangs_too(example, tokens):
    await asyncio.sleep(3600)


def leaves(example, tokens):
    raise SystemExit(0)


async def leaves_later(example, tokens):
    raise SystemExit(0)


async def cancelled(example, tokens):
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (leaves_later, r"RuntimeError in leaves_later .*: it called exit\(0\)"),
        (cancelled, r"RuntimeError in .*: it was cancelled"),
        (fails, r"ValueError in fails \(.*test_environment.py:\d+\): no such tool; 1 of 3"),
        (
            fails_later,
            r"ValueError in fails_later \(.*test_environment.py:\d+\): no such tool; 1 of 3",
        ),
        (hangs, r"TimeoutError in .*: no result after 1 s; 1 of 3"),
        (hangs_too, r"TimeoutError in .*: no result after 1 s; 1 of 3"),
        (leaves, r"RuntimeError in leaves .*: it called exit\(0\)"),
        (lambda *_: ([1, 99], Reward(1.0, True)), r"ValueError in .*99, which is no token of 4"),
        (lambda *_: (["a"], Reward(1.0, True)), r"ValueError in .*'a', which is no token of 4"),
        (lambda *_: (None, 1.0), r"TypeError in .*returned float, not Reward"),
        (lambda *_: (None, Reward(float("nan"), True)), r"ValueError in .*not finite"),
        (lambda *_: (tasks.NewContext(), Reward(1.0, True)), r"ValueError in .*without a token"),
        (lambda *_: None, r"TypeError in "),
    ],
)
def test_a_step_that_fails_leaves_its_episode_ungraded(bad, message, caplog):
    step = lambda example, tokens: bad(example, tokens) if example == 2 else echo(example, tokens)
    with Episodes(Of(step), WORDS, [1, 2, 3], RewardSettings(seconds=1.0, threads=2)) as episodes:
        replies = [episodes(i, [1]) for i in range(3)]
        assert [reply.result() for reply in replies] == [([1, 2], False), None, ([1, 2], False)]
    assert [reward.graded for reward in episodes.rewards] == [True, False, True]
    [line] = said(caplog)
    assert re.search(message, line), line


def test_a_beginning_without_a_token_is_none(caplog):
    """The first token is then drawn after nothing: its log-prob would be another response's."""

    class Nothing(Stepping):
        def begin(self):
            return [], UNGRADED

    class Begun(Of):
        def environment(self, example, words):
            return Nothing(self.taken, example)

    with Episodes(Begun(echo), WORDS, [1]) as episodes:
        assert episodes(0, None).result() is None
        assert episodes(0, [1]).result() is None
    assert not episodes.rewards[0].graded
    assert "begin() returned a context without a token" in said(caplog)[0]


def test_tokens_may_be_numbers_of_numpy():
    """`in range` would compare each with all that the tokenizer has, while everything stands still."""

    class Many:
        def __len__(self):
            return 10**9

    answer = [np.int64(10**9 - 1), np.int32(3)]
    step = lambda example, tokens: (answer, Reward(1.0, True))
    task = Of(step)
    task.environment = lambda example, words: Stepping(step, example)
    with Episodes(task, Many(), [1]) as episodes:
        assert episodes(0, [1]).result() == ([10**9 - 1, 3], False)


def test_errors_of_the_task_and_a_stop_are_for_the_caller():
    def refuse(example, tokens):
        raise UserError("the tool is not installed")

    with Episodes(Of(refuse), WORDS, [1]) as episodes, pytest.raises(UserError):
        episodes(0, [1]).result()
    with (
        Episodes(Of(echo), WORDS, [1], RewardSettings(stop_requested=lambda: True)) as episodes,
        pytest.raises(StopRequested),
    ):
        episodes(0, [1]).result()


def test_episodes_end_where_sampling_is_stopped():
    """The embedded engine samples while it is asked, before anybody waits for the responses."""
    ended = []

    class Stopped:
        def submit(self, prompts, **how):
            how["reply"](0, [1], [0.0]).result()
            raise StopRequested

    class Turns:
        def step(self, tokens):
            weakref.finalize(self, ended.append, 1)
            return [1, 2], False

    of = Of(echo)
    of.environment = lambda example, tokenizer: Turns()
    task = TokenTask(of, WORDS)
    groups = task.pending([1, 2], range(2), [0, 0])
    with pytest.raises(StopRequested) as error:
        task.submit(Stopped(), groups, n=1, sampling=Sampling())
    assert ended == [1], error


def test_an_environment_ends_with_its_response_and_not_with_all():
    """As one that is cut: its agent would hold processes until the longest of all has ended."""
    ended, made = [], []

    class Sampler:
        def submit(self, prompts, *, n, sampling, reply):
            made.extend(Future() for _ in range(len(prompts) * n))
            for i in range(len(made)):
                reply(i, [1], [0.0]).result()
            return made

    class Turns:
        def __init__(self, example):
            weakref.finalize(self, lambda: ended.append((example, threading.get_ident())))

        def step(self, tokens):
            return [1, 2], Reward(0.5, False)

    of = Of(echo)
    of.environment = lambda example, tokenizer: Turns(example)
    task = TokenTask(of, WORDS)
    groups = task.pending([1, 2], range(2), [0, 0])
    sampler: Any = Sampler()
    task.submit(sampler, groups, n=2, sampling=Sampling())
    assert ended == []
    made[2].set_result(Trajectory([1], [1], [0.0]))
    until = time.monotonic() + 60
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    [(example, thread)] = ended
    assert example == 2
    assert thread != threading.get_ident()  # who asks servers may not wait for it
    made[3].set_result(Trajectory([1], [1], [0.0]))
    assert [one.score for one in groups[1].group().rewards] == [0.5, 0.5]
    for one in groups:
        one.call_off()


def test_a_call_for_which_there_is_no_thread_has_that_as_its_outcome(monkeypatch):
    def none(work):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(deadline, "in_background", none)
    threads = deadline.Threads(1)
    call = deadline.Call(partial(int), lambda x: x, None, "a call", RewardSettings())
    for _ in range(2):  # whoever works goes on
        result, error = threads.submit(call).result(timeout=5)
        assert (result, str(error)) == (None, "can't start new thread")
    threads.close()


def test_an_interactive_task_needs_no_reward():
    assert isinstance(Of(echo), Interactive)
    check_members(Of(echo), "task")

    class Neither:
        name, train, test, prompt = "neither", (1,), (1,), Of.prompt

    with pytest.raises(UserError, match="has no 'reward'"):
        check_members(Neither(), "task")
