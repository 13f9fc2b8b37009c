"""The gated delta rule in chunks, against the recurrence itself; and what layers of it keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import delta
from tests.tiny import slow


def drawn(length, seed=0, rows=2, heads=2, size=8, values=12):
    """Queries, keys, values, log decays and rates of random rows."""
    rng = np.random.default_rng(seed)
    draw = lambda *more: jnp.asarray(rng.normal(size=(rows, length, heads, *more)), jnp.float32)
    q, k = delta.units(draw(size), draw(size), heads)
    return [q, k, draw(values), -jnp.abs(draw()), jax.nn.sigmoid(draw())]


def one_by_one(q, k, v, g, beta):
    """What tokens read, and the memory after the last."""

    def one(memory, token):
        read, memory = delta.recurrent(*token, memory)
        return memory, read

    empty = jnp.zeros((len(q), *q.shape[2:], v.shape[-1]))
    each = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    memory, read = jax.lax.scan(one, empty, each)
    return jnp.moveaxis(read, 0, 1), memory


def close(ours, theirs, atol=2e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("length", [63, 64, 300, *map(slow, (1, 2, 3, 17, 65, 127, 130, 200, 257))])
def test_chunks_are_the_recurrence(length):
    parts = drawn(length, seed=length)
    close(delta.chunked(*parts, None), one_by_one(*parts))


@pytest.mark.parametrize("hard", ["keys alike", "decays of all sizes", "nothing fades"])
def test_hard_numbers_lose_nothing(hard):
    """Alike keys, which powers of a matrix would cancel; decays of 1e-11 beside some of almost 1."""
    q, k, v, g, beta = drawn(150)
    if hard == "keys alike":
        k, g, beta = jnp.broadcast_to(k[:, :1], k.shape), 0 * g, 0 * beta + 1
    elif hard == "decays of all sizes":
        g = jnp.where(v[..., 0] > 0, -25.0, -1e-3)
    else:
        g = 0 * g
    parts = q, k, v, g, beta
    close(delta.chunked(*parts, None), one_by_one(*parts))


def test_gradients_are_those_of_the_recurrence():
    parts = drawn(100)
    weights = jnp.cos(jnp.arange(parts[2].size, dtype=jnp.float32)).reshape(parts[2].shape)
    of = lambda rule: jax.grad(lambda parts: (rule(*parts)[0] * weights).sum())(parts)
    close(of(lambda *parts: delta.chunked(*parts, None)), of(one_by_one), atol=1e-5)


@pytest.mark.parametrize("cuts", [(1, 2, 70), (64, 128), (40, 41, 42, 43), (149,)])
def test_each_sequence_of_a_row_begins_empty(cuts):
    """Wherever the cuts are; the convolution too."""
    parts, weight = drawn(150), jnp.asarray(np.random.default_rng(1).normal(size=(5, 1, 4)))
    numbers = 1 + np.searchsorted(cuts, np.arange(150), side="right")
    segments = jnp.asarray(np.stack([numbers, np.ones(150, int)]))
    pieces = np.split(np.arange(150), cuts)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 150, 5)), jnp.float32)
    found = delta.chunked(*parts, segments)[0], delta.convolved(x, weight, segments)
    alone = lambda one, row: jnp.concatenate([one(row, piece) for piece in pieces], 1)
    close(found[0][:1], alone(lambda _, at: one_by_one(*(y[:1, at] for y in parts))[0], 0))
    close(found[0][1:], one_by_one(*(y[1:] for y in parts))[0])
    close(found[1][:1], alone(lambda _, at: delta.convolved(x[:1, at], weight, None), 0))
    close(found[1][1:], delta.convolved(x[1:], weight, None))


@pytest.mark.parametrize("lengths", [(0, 1), (5, 64), (65, 90)])
def test_a_memory_stops_where_it_is_told_to(lengths):
    parts, x = drawn(90), jnp.asarray(np.random.default_rng(2).normal(size=(2, 90, 5)), jnp.float32)
    _, memory = delta.chunked(*delta.until(*parts, jnp.asarray(lengths)), None)
    inputs = delta.last(x, jnp.asarray(lengths), 3)
    for row, length in enumerate(lengths):
        before = jnp.pad(x[row, max(0, length - 3) : length], ((max(0, 3 - length), 0), (0, 0)))
        np.testing.assert_array_equal(inputs[row], before)
        if length:
            close(memory[row], one_by_one(*(y[row : row + 1, :length] for y in parts))[1][0])
        else:
            assert not memory[row].any()


def test_memory_for_gradients_grows_with_the_length():
    def needed(length):
        loss = lambda parts: delta.chunked(*parts, None)[0].sum()
        parts = jax.eval_shape(lambda: drawn(length))
        return jax.jit(jax.grad(loss)).lower(parts).compile().memory_analysis().temp_size_in_bytes

    assert needed(2048) < 4.2 * needed(512)
