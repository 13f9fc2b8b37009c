"""Batches sampled ahead are the same batches, and survive a checkpoint."""

import json
import threading

import pytest

from jaxrl_llm.learning.stream import Cursor, Stream
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.runs.notes import Notes
from jaxrl_llm.tasks.pipeline import Batches


def data():
    return Batches(list(range(20)), 2, seed=3)


def answer(step, examples):
    return Rollout([[e] for e in examples], [[step, e] for e in examples], [[-0.1 * step, -0.2]] * 2,
                   [True, False], version=step)  # fmt: skip


def test_sampled_ahead_or_not_the_batches_are_the_same():
    plain, ahead = Stream(data(), answer), Stream(data(), answer)
    for step in range(6):
        examples, rollout, _ = plain.take(step)
        assert ahead.take(step)[:2] == (examples, rollout)
        ahead.begin(step + 1)


def test_the_next_batch_is_sampled_while_the_caller_goes_on():
    entered, leave = threading.Event(), threading.Event()

    def slow(step, examples):
        entered.set()
        assert leave.wait(60)
        return answer(step, examples)

    stream = Stream(data(), slow)
    stream.begin(0)
    assert entered.wait(60)
    leave.set()
    stream.settle()
    assert stream.take(0).rollout.responses[0][0] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_stream_goes_on_from_the_notes_of_a_checkpoint(ahead):
    whole, stream = Stream(data(), answer), Stream(data(), answer)
    for step in range(3):
        whole.take(step)
        stream.take(step)
    if ahead:
        stream.begin(3)
        stream.settle()
    notes = Notes("reinforce", 0.5, stream.cursor())
    again = Notes.from_json(json.loads(json.dumps(notes.to_json() | {"fingerprint": {}})))
    assert (again.phase, again.best) == (notes.phase, notes.best)
    unused = lambda step, examples: pytest.fail("sampled again")
    resumed = Stream(data(), unused if ahead else answer, again.cursor)
    assert resumed.take(3)[:2] == whole.take(3)[:2]


def test_what_goes_wrong_in_the_background_is_raised():
    def broken(step, examples):
        raise ValueError(f"step {step}")

    stream = Stream(data(), broken)
    stream.begin(7)
    with pytest.raises(ValueError, match="step 7"):
        stream.settle()


def test_the_cursor_of_a_failed_batch_is_before_it():
    def broken(step, examples):
        raise ZeroDivisionError

    stream = Stream(data(), broken)
    stream.begin(0)
    with pytest.raises(ZeroDivisionError):
        stream.settle()
    assert stream.cursor() == Cursor(data().get_state())


def test_responses_are_brought_together_once():
    calls = []

    def whole(examples, rollout):
        calls.append(len(examples))
        return rollout

    stream = Stream(data(), answer, whole=whole)
    stream.begin(0)
    stream.settle()
    cursor = stream.cursor()
    stream.take(0)
    assert len(calls) == 1
    again = Stream(data(), answer, cursor, whole)
    again.take(0)
    assert len(calls) == 1
    again.begin(1)
    again.take(1)
    assert len(calls) == 2
