import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.pipeline import Batches

SOURCE = [f"example {i}" for i in range(23)]


def take(batches, count):
    return list(islice(batches, count))


def flat(batches):
    return [example for batch in batches for example in batch]


def test_every_epoch_is_a_new_order_of_all_examples():
    stream = flat(take(Batches(SOURCE, 1, seed=3), 3 * 23))
    epochs = [stream[i : i + 23] for i in (0, 23, 46)]
    assert all(sorted(epoch) == sorted(SOURCE) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, SOURCE]}) == 4


def test_order_depends_on_the_seed_alone():
    first, again, other = (take(Batches(SOURCE, 4, seed=s), 12) for s in (5, 5, 6))
    assert first == again
    assert first != other
    shifted = flat(first)[23:46]  # seeds next to one another must not share their epochs either
    assert flat(other)[:23] != shifted


@settings(max_examples=30)
@given(st.integers(0, 30), st.integers(0, 12), st.integers(1, 7))
def test_resume_continues_with_exactly_the_next_examples(stop, more, batch_size):
    """30 batches of up to 7 out of 23 examples: the stop falls on all sides of epoch ends."""
    uninterrupted = Batches(SOURCE, batch_size, seed=1)
    take(uninterrupted, stop)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    resumed = Batches(SOURCE, batch_size, seed=1)
    take(resumed, 2)  # whatever it did before must not matter
    resumed.set_state(state)
    assert take(resumed, more) == take(uninterrupted, more)
    assert resumed.get_state() == uninterrupted.get_state()


def test_more_may_be_drawn_between_batches():
    batches, plain = Batches(SOURCE, 4, seed=1), flat(take(Batches(SOURCE, 1, seed=1), 40))
    taken = [*next(batches), *batches.draw(3), *next(batches), *batches.draw(17)]
    resumed = Batches(SOURCE, 4, seed=1)
    resumed.set_state(json.loads(json.dumps(batches.get_state())))
    assert [*taken, *next(resumed), *resumed.draw(5)] == plain[:37]


def test_an_epoch_ends_within_a_batch():
    everything = take(Batches(SOURCE, 12, seed=0), 2 * len(SOURCE) // 12)
    assert [len(batch) for batch in everything] == [12] * 3
    counts = Counter(flat(everything))
    assert set(counts) == set(SOURCE)
    assert max(counts.values()) == 2


@pytest.mark.parametrize("change", [{"seed": 8}, {"batch_size": 3}, {"source": SOURCE[:-1]}])
def test_state_of_another_stream_is_refused(change):
    state = Batches(SOURCE, 4, seed=7).get_state()
    other = Batches(**({"source": SOURCE, "batch_size": 4, "seed": 7} | change))
    with pytest.raises(UserError, match="cannot resume the data"):
        other.set_state(state)


def test_too_few_examples_is_a_one_line_error():
    with pytest.raises(UserError, match="empty"):
        Batches([], 1, seed=0)
