"""One token from logits: the right distribution, the right truncation, noise that belongs to the request."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollouts import draw
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.slots import rules_of

SETTINGS = ((0.5, 0), (0.9, 0), (1.0, 1), (1.0, 7), (0.8, 12), (0.3, 3), (1.0, 1000), (1e-6, 0))


def numpy_kept(probability, top_p, top_k):
    """By sorting: the top k, then the fewest of them that hold the share p."""
    order = np.argsort(-probability, kind="stable")[: top_k or None]
    share = np.cumsum(probability[order]) / probability[order].sum()
    kept = np.zeros(probability.size, bool)
    fewest = np.searchsorted(share, top_p) + 1 if top_p < 1 else None
    kept[order[:fewest]] = True
    return kept


@pytest.mark.parametrize(("top_p", "top_k"), SETTINGS)
def test_truncation_is_that_of_a_sort(top_p, top_k):
    logits = np.random.default_rng(0).normal(0, 3, (32, 101)).astype(np.float32)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    rules = rules_of(Sampling(top_p=top_p, top_k=top_k))
    out = jax.jit(draw.truncate)(weights, rules.top_p, rules.top_k)
    probability = weights.astype(np.float64)
    kept = np.stack([numpy_kept(row / row.sum(), top_p, top_k) for row in probability])
    assert np.array_equal(out, np.where(kept, weights, 0))


def test_ties_with_the_last_one_stay():
    weights = jnp.asarray([[1.0, 0.5, 0.5, 0.5, 0.1]])
    kept = draw.truncate(weights, None, jnp.int32(2))
    assert np.array_equal(kept, [[1.0, 0.5, 0.5, 0.5, 0.0]])


def draws(logits, rows, **how):
    """Tokens and log-probs of as many rows of these logits."""
    identity = np.stack([np.zeros(rows), np.arange(rows)], 1).astype(np.uint32)
    rules = rules_of(Sampling(**how))._asdict()
    how = {name: rules[name] for name in ("temperature", "top_p", "top_k")}
    return jax.jit(draw.token)(np.broadcast_to(logits, (rows, len(logits))), identity, **how)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.9, 5)]
)
def test_the_sampled_distribution(temperature, top_p, top_k):
    """Chi-square of 40,000 draws against the exact probabilities (99.9% quantile at most)."""
    logits = np.random.default_rng(1).normal(0, 1, 9).astype(np.float32)
    how = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    tokens, logps = map(np.asarray, draws(logits, 40_000, **how))
    full = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    np.testing.assert_allclose(logps, np.log(full)[tokens], atol=1e-5)
    kept = np.where(numpy_kept(full, top_p, top_k), full, 0.0)
    expected = kept / kept.sum() * tokens.size
    counts = np.bincount(tokens, minlength=full.size)
    assert not counts[kept == 0].any()
    live = kept > 0
    chi2 = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    quantile = (10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12)[live.sum() - 2]
    assert chi2 < quantile


def test_a_vocabulary_of_many_blocks():
    """600 tokens, three blocks, the last one not full: all 40,000 draws fall where the weights are."""
    weights = np.zeros(600, np.float32)
    weights[[3, 255, 256, 300, 599]] = 1, 2, 3, 4, 5
    identity = np.arange(40_000, dtype=np.uint32)[:, None]
    tokens = jax.jit(draw.categorical)(np.broadcast_to(weights, (40_000, 600)), identity)
    counts = np.bincount(tokens, minlength=600)
    expected = weights / weights.sum() * 40_000
    live = weights > 0
    assert counts[live].sum() == 40_000
    assert ((counts[live] - expected[live]) ** 2 / expected[live]).sum() < 18.47


def test_greedy_is_the_first_maximum_and_its_plain_log_probability():
    logits = np.asarray([0.5, 2.0, -1.0, 2.0], np.float32)
    tokens, logps = map(np.asarray, draws(logits, 3, temperature=0.0, top_p=0.5, top_k=1))
    assert tokens.tolist() == [1, 1, 1]
    np.testing.assert_allclose(logps, 2.0 - np.log(np.exp(logits).sum()), atol=1e-6)


def test_noise_belongs_to_the_identity():
    """A row moved elsewhere draws the same token; another seed draws others."""
    logits = np.random.default_rng(2).normal(0, 1, (50, 40)).astype(np.float32)
    identity = np.random.default_rng(3).integers(0, 2**32, (50, 3), np.uint32)
    draw_one = partial(jax.jit(draw.token), temperature=jnp.float32(1))
    token = lambda logits, identity: np.asarray(draw_one(logits, identity)[0])
    move = np.random.default_rng(4).permutation(50)
    base = token(logits, identity)
    assert np.array_equal(token(logits[move], identity[move]), base[move])
    assert not np.array_equal(token(logits, identity + np.uint32(1)), base)
