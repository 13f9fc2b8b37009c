"""What is said about a batch of log-probs, on numbers that can be checked by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learning import metrics
from jaxrl_llm.objectives import Objective, TokenData, advantages, losses
from jaxrl_llm.objectives.token_data import batch_mean

MASK = jnp.asarray([[True, True, True], [True, False, False]])
OLD = jnp.log(jnp.asarray([[0.9, 0.4, 0.2], [0.3, 1.0, 1.0]]))


def test_the_policy_is_described_over_its_tokens_only():
    entropy = jnp.asarray([[1.0, 2.0, 3.0], [6.0, 100.0, 100.0]])
    found = metrics.describe_policy(OLD, entropy, MASK, OLD)
    assert found["entropy"] == 3.0
    assert found["rare_half"] == 0.75
    assert found["rare_quarter"] == 0.25
    assert found["kl_reference"] == 0.0
    assert found["logp"] == pytest.approx(np.log([0.9, 0.4, 0.2, 0.3]).mean(), rel=1e-6)


def test_the_mismatch_of_a_sampler():
    sampler = jnp.where(MASK, OLD - jnp.asarray([[0.0, 0.0, 0.0], [0.5, 9.0, 9.0]]), 0.0)
    found = metrics.describe_mismatch(OLD, sampler, MASK)
    weights = np.asarray([1.0, 1.0, 1.0, np.exp(0.5)])
    assert found["mismatch_mean"] == pytest.approx(0.125, rel=1e-6)
    assert found["mismatch_max"] == pytest.approx(0.5, rel=1e-6)
    ess = weights.sum() ** 2 / (4 * (weights**2).sum())
    assert found["mismatch_ess"] == pytest.approx(ess, rel=1e-6)


def test_a_mean_over_a_batch_is_one_over_its_tokens_in_which_signs_count():
    gap = jnp.asarray([[0.2, -0.4, 0.0], [1.0, 9.0, jnp.nan]])
    assert batch_mean(gap, MASK) == pytest.approx(0.2, rel=1e-5)
    assert batch_mean(gap, MASK & False) == 0.0


def test_imitation_is_the_mean_negative_log_likelihood():
    objective = Objective(advantage=advantages.imitation, surrogate=losses.reinforce)
    zero = jnp.zeros_like(OLD)
    advantage, weight, data = objective.credit(jnp.ones((2, 1)), TokenData(MASK, zero))
    surrogate, penalty = objective.per_token(OLD, advantage, data)
    loss = jnp.sum(weight[0] * (surrogate + penalty))
    assert loss == pytest.approx(-np.log([0.9, 0.4, 0.2, 0.3]).mean(), rel=1e-6)


def test_gaps_of_both_signs_do_not_cancel():
    ours, theirs = jnp.asarray([[-1.0, -1.0]]), jnp.asarray([[-1.5, -0.5]])
    figures = metrics.describe_mismatch(ours, theirs, jnp.ones((1, 2), bool))
    assert figures["mismatch_mean"] == pytest.approx(0.5)


def test_an_update_whose_norm_is_not_finite_was_skipped():
    visits = {"share": np.ones(2), "loss": np.ones(2), "grad_norm": np.asarray([np.inf, 1.0])}
    assert metrics.count_updates(visits) == {"updates": 1, "skipped": 1}
