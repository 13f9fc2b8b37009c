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


def test_hosts_share_the_stream_that_one_host_would_have():
    alone = take(Batches(SOURCE, 6, seed=2), 9)
    hosts = [
        take(Batches(SOURCE, 2, seed=2, process_index=i, process_count=3), 9) for i in range(3)
    ]
    for step in range(9):
        assert Counter(flat(host[step] for host in hosts)) == Counter(alone[step])


def test_resume_on_another_number_of_hosts_goes_on_with_the_same_stream():
    alone = Batches(SOURCE, 6, seed=2)
    take(alone, 5)
    halves = [Batches(SOURCE, 3, seed=2, process_index=i, process_count=2) for i in range(2)]
    for half in halves:
        half.set_state(alone.get_state())
    assert Counter(flat(next(half) for half in halves)) == Counter(next(alone))


def test_epochs_bound_the_stream_alike_on_every_host():
    hosts = [
        Batches(SOURCE, 4, seed=0, epochs=2, process_index=i, process_count=3) for i in range(3)
    ]
    batches = [list(host) for host in hosts]
    assert [len(b) for b in batches] == [len(host) for host in hosts] == [46 // 12] * 3
    assert {len(batch) for host in batches for batch in host} == {4}
    counts = Counter(example for host in batches for example in flat(host))
    assert sum(counts.values()) == 36
    assert set(counts) == set(SOURCE)
    assert max(counts.values()) == 2
    with pytest.raises(StopIteration):
        next(hosts[0])


@pytest.mark.parametrize("change", [{"seed": 8}, {"batch_size": 3}, {"source": SOURCE[:-1]}])
def test_state_of_another_stream_is_refused(change):
    state = Batches(SOURCE, 4, seed=7).get_state()
    other = Batches(**({"source": SOURCE, "batch_size": 4, "seed": 7} | change))
    with pytest.raises(UserError, match="cannot resume the data"):
        other.set_state(state)


def test_too_few_examples_is_a_one_line_error():
    with pytest.raises(UserError, match="empty"):
        Batches([], 1, seed=0)
    with pytest.raises(UserError, match="do not fill one batch of 30"):
        Batches(SOURCE, 10, seed=0, epochs=1, process_count=3)
    with pytest.raises(ValueError, match="process 2 of 2"):
        Batches(SOURCE, 1, seed=0, process_index=2, process_count=2)
