"""Laws that hold for any data."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.objectives import (
    Objective,
    advantages,
    aggregation,
    correction,
    kl,
    losses,
    partition,
    reweighting,
)

close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
AGGREGATIONS = [
    aggregation.token_mean,
    aggregation.seq_mean_token_mean,
    aggregation.seq_mean_token_sum,
    partial(aggregation.constant_length, length=9),
]
PARTITIONS = [
    partition.together,
    partition.lopti,
    partition.reversed,
    partial(partition.quantile, share=0.3),
    partial(partition.random, share=0.3),
    partition.random_matched,
]
GROUPED = [advantages.grpo, advantages.dr_grpo, advantages.rloo]


def data(seed, rows=8, width=7):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, rows)
    mask = np.arange(width)[None] < lengths[:, None]

    def logp():
        return jnp.asarray(np.where(mask, -rng.exponential(1.0, mask.shape), 0), jnp.float32)

    reward = jnp.asarray(rng.choice([-3.0, -1.0, -0.5, 3.0], rows), jnp.float32)
    return reward, logp(), logp(), logp(), jnp.asarray(mask)


@pytest.mark.parametrize("function", GROUPED)
def test_group_advantages_by_hand(function):
    reward, old, ref, _, mask = data(0)
    got = np.asarray(function(reward, old, ref, mask, group_size=4))[:, 0]
    for start in (0, 4):
        r = np.asarray(reward[start : start + 4], np.float64)
        want = {
            advantages.grpo: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
            advantages.dr_grpo: r - r.mean(),
            advantages.rloo: [r[i] - np.delete(r, i).mean() for i in range(4)],
        }[function]
        close(got[start : start + 4], want)


@pytest.mark.parametrize("function", GROUPED)
@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.7, 1e6])
def test_equal_rewards_give_exactly_zero(function, value):
    _, old, ref, _, mask = data(1, rows=7)
    got = function(jnp.full(7, value), old, ref, mask, group_size=7)
    assert np.all(np.asarray(got) == 0)


def test_a_group_of_one_keeps_its_reward():
    reward, old, ref, _, mask = data(2)
    for function in (advantages.grpo, advantages.rloo):
        got = function(reward, old, ref, mask, group_size=1)
        close(got[:, 0], reward)


@pytest.mark.parametrize("function", [*GROUPED, advantages.reinforce_plus_plus])
def test_padding_rows_count_nowhere(function):
    reward, old, ref, _, mask = data(3)
    mask = mask.at[jnp.asarray([2, 7])].set(False)
    old, ref = jnp.where(mask, old, 0), jnp.where(mask, ref, 0)
    grouped = {} if function is advantages.reinforce_plus_plus else {"group_size": 4}
    one = function(reward, old, ref, mask, **grouped)
    other = function(reward.at[2].set(1e4), old, ref, mask, **grouped)
    assert np.array_equal(one, other)
    keep = np.asarray([0, 1, 3, 4, 5, 6])
    if grouped:
        grouped = {"group_size": 3}
    alone = function(reward[keep], old[keep], ref[keep], mask[keep], **grouped)
    close(one[keep], alone)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns_by_recursion(gamma):
    rewards = np.asarray(data(4)[1])
    want = np.zeros_like(rewards)
    later = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        later = want[:, t] = rewards[:, t] + gamma * later
    close(advantages.discounted_returns(jnp.asarray(rewards), gamma=gamma), want)


def test_reinforce_plus_plus_puts_the_reward_on_the_last_token_and_is_white():
    reward, old, ref, _, mask = data(5)
    rewards = advantages.token_rewards(reward, old, ref, mask, kl_coef=0.0)
    last = np.asarray(mask).sum(1) - 1
    close(np.asarray(rewards)[np.arange(8), last], reward)
    assert np.count_nonzero(rewards) == np.count_nonzero(reward)
    white = np.asarray(advantages.reinforce_plus_plus(reward, old, ref, mask, kl_coef=0.1))
    tokens = white[np.asarray(mask)]
    close(tokens.mean(), 0)
    close(tokens.std(ddof=1), 1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_reweighting_is_the_formula(alpha):
    _, old, _, advantage, _ = data(6)
    got = reweighting.linear_in_probability(advantage, old, alpha=alpha)
    close(got, np.asarray(advantage) * (alpha * np.exp(np.asarray(old)) + 1 - alpha))
    close(reweighting.linear_in_probability(advantage, old, alpha=0.0), advantage)


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [
        (1.0, 1.1, -1.1),  # inside the bounds: the plain policy gradient
        (1.0, 1.25, 0.0),  # good and already pushed up past 1 + high
        (1.0, 0.5, -0.5),  # good but pushed down: still pulled back
        (-1.0, 0.7, 0.0),  # bad and already pushed down past 1 - low
        (-1.0, 1.5, 1.5),  # bad but pushed up: still pushed down
        (-1.0, 11.0, 0.0),  # bad beyond the dual clip
    ],
)
def test_clip_acts_on_the_right_side(advantage, ratio, gradient):
    x = jnp.log(jnp.full((1, 1), ratio))
    grad = jax.grad(lambda x: losses.clipped(x, 0 * x, jnp.full((1, 1), advantage)).sum())(x)
    close(grad, [[gradient]])


def test_k1_as_a_loss_pulls_to_the_reference():
    """The plain k1 has gradient 1 whatever the reference is; ours has log pi - log ref."""
    _, logp, ref, _, mask = data(7)
    gradient = jax.grad(lambda x: kl.k1(x, ref).sum())(logp)
    close(jnp.where(mask, gradient, 0), jnp.where(mask, logp - ref, 0))
    assert np.array_equal(kl.k1(logp, ref), logp - ref)


def test_kl_estimators_agree_with_the_kl_in_expectation():
    rng = np.random.default_rng(0)
    logits, ref_logits = jnp.asarray(rng.normal(size=(2, 6)), jnp.float32) * 0.3
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    exact = jnp.sum(jnp.exp(p) * (p - q))
    expected = lambda f: jnp.sum(jnp.exp(p) * f(p[None], q[None])[0])
    close(expected(kl.k1), exact)
    close(expected(kl.k3), exact, rtol=1e-4)
    exact_pull = jax.grad(
        lambda x: jnp.sum(jnp.exp(jax.nn.log_softmax(x)) * (jax.nn.log_softmax(x) - q))
    )(logits)
    for estimator in (kl.k1, kl.k2):
        pull = jax.grad(
            lambda x, f=estimator: jnp.sum(jnp.exp(p) * f(jax.nn.log_softmax(x)[None], q[None])[0])
        )(logits)
        close(pull, exact_pull, atol=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_slices_of_rows_add_up(aggregate):
    """The loss of a mini-batch is the sum over its micro-batches, however it is cut."""
    _, x, _, _, mask = data(8)
    weight = aggregate(mask)
    whole = jnp.sum(weight * x)
    for cuts in ([4], [1, 6], [2, 3, 5]):
        parts = np.split(np.arange(8), cuts)
        close(sum(jnp.sum(weight[i] * x[i]) for i in parts), whole)


def test_aggregations_are_the_means_they_are_named_after():
    _, x, _, _, mask = data(9)
    rows = [np.asarray(x)[b][np.asarray(mask)[b]] for b in range(8)]
    want = [
        np.concatenate(rows).mean(),
        np.mean([r.mean() for r in rows]),
        np.mean([r.sum() for r in rows]),
        np.mean([r.sum() / 9 for r in rows]),
    ]
    close([jnp.sum(f(mask) * x) for f in AGGREGATIONS], want)


@pytest.mark.parametrize("split", PARTITIONS)
@pytest.mark.parametrize("seed", range(3))
def test_partitions_cover_the_mask_once(split, seed):
    _, old, _, _, mask = data(seed)
    assert np.array_equal(split(old, mask).sum(0), np.asarray(mask, int))


def test_lopti_is_low_first_and_strict():
    old = jnp.log(jnp.asarray([[0.49, 0.5, 0.51, 0.1]]))
    old = old.at[0, 1].set(jnp.log(0.5))
    mask = jnp.asarray([[True, True, True, False]])
    low, high = partition.lopti(old, mask, eta=0.5)
    assert low.tolist() == [[True, bool(jnp.exp(old[0, 1]) < 0.5), False, False]]
    assert np.array_equal(partition.reversed(old, mask), jnp.stack([high, low]))
    assert np.array_equal(partition.drop_high(old, mask), low[None])
    assert np.array_equal(partition.drop_low(old, mask), high[None])
    assert partition.together(old, mask, steps=2).shape[0] == 2


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_shares_are_exact(share):
    _, old, _, _, mask = data(10, rows=12)
    count = int(share * int(mask.sum()))
    assert int(partition.quantile(old, mask, share=share)[0].sum()) == count
    assert int(partition.random(old, mask, share=share)[0].sum()) == count
    low = partition.lopti(old, mask)[0].sum()
    assert int(partition.random_matched(old, mask)[0].sum()) == int(low)


def test_quantile_takes_the_least_likely():
    _, old, _, _, mask = data(11)
    low, high = partition.quantile(old, mask, share=0.4)
    assert float(old[low].max()) <= float(old[high].min())


def test_random_split_changes_with_the_data_and_repeats_on_it():
    _, old, _, _, mask = data(12)
    split = partial(partition.random, share=0.5)
    assert np.array_equal(split(old, mask), split(old, mask))
    assert not np.array_equal(split(old, mask), split(jnp.where(mask, old - 0.1, 0), mask))
    assert not np.array_equal(split(old, mask), split(old, mask, seed=1))


def objective(**changes):
    parts = {"advantage": partial(advantages.grpo, group_size=4), "penalties": ((1e-3, kl.k3),)}
    return Objective(**(parts | changes))


@pytest.mark.parametrize("split", PARTITIONS)
def test_stages_split_the_loss_without_renormalising_it(split):
    reward, old, ref, logp, mask = data(13)
    o = objective(partition=split)
    advantage, weight = o.credit(reward, old, ref, old, mask)
    per_token = sum(o.per_token(logp, old, ref, advantage))
    stages = jnp.sum(weight * per_token[None], (1, 2))
    whole = jnp.sum(aggregation.token_mean(mask) * per_token)
    close(stages.sum(), whole)
    assert o.stages == len(stages)


def test_minibatches_have_denominators_of_their_own():
    reward, old, ref, _, mask = data(14)
    o = objective()
    advantage, weight = o.credit(reward, old, ref, old, mask, minibatches=2)
    close(weight[0].reshape(2, -1).sum(1), [1, 1])
    close(advantage, o.credit(reward, old, ref, old, mask)[0])


def test_corrections_scale_every_surrogate():
    reward, old, ref, logp, mask = data(15)
    sampler = jnp.where(mask, old + 0.3 * jnp.sin(jnp.arange(7.0))[None], 0)
    cut = partial(correction.truncated_importance, cap=1.1)
    factor = np.minimum(np.exp(np.asarray(old - sampler)), 1.1)
    for surrogate in (losses.clipped, losses.reinforce):
        plain, corrected = (
            objective(surrogate=surrogate),
            objective(surrogate=surrogate, correct=cut),
        )
        a, _ = plain.credit(reward, old, ref, sampler, mask)
        b, _ = corrected.credit(reward, old, ref, sampler, mask)
        close(surrogate(logp, old, b), factor * np.asarray(surrogate(logp, old, a)))
    inside = correction.masked_importance(old, sampler, low=0.9, high=1.1)
    ratio = np.exp(np.asarray(old - sampler))
    close(inside, np.where((ratio >= 0.9) & (ratio <= 1.1), ratio, 0))


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 50), st.floats(-3, 3), st.floats(0.05, 8), st.integers(0, 2**31 - 1))
def test_gradient_at_the_logits_is_bounded_by_one_minus_pi(vocab, weight, scale, seed):
    """Prop. 4.2: |w| sqrt(V/(V-1)) (1-pi) <= |dJ/dlogits| <= sqrt(2) |w| (1-pi)."""
    rng = np.random.default_rng(seed)
    logits = np.full(
        50, -np.inf, np.float32
    )  # one size, one compilation: what is not there has π = 0
    logits[:vocab] = scale * rng.normal(size=vocab)
    token = int(rng.integers(vocab))

    def loss(logits):
        logp = jax.nn.log_softmax(logits)[token].reshape(1, 1)
        advantage = jnp.full((1, 1), weight, jnp.float32)
        return losses.clipped(logp, jax.lax.stop_gradient(logp), advantage).sum()

    norm = float(jnp.linalg.norm(jax.grad(loss)(jnp.asarray(logits))))
    others = np.delete(np.asarray(jax.nn.softmax(logits), np.float64), token).sum()
    slack = 1e-5 * (1 + abs(weight))
    assert norm >= abs(weight) * np.sqrt(vocab / (vocab - 1)) * others - slack
    assert norm <= np.sqrt(2) * abs(weight) * others + slack


@pytest.mark.parametrize("jitted", [False, True])
def test_credit_is_the_same_jitted(jitted):
    reward, old, ref, _, mask = data(16)
    credit = objective(partition=partition.lopti).credit
    with jax.disable_jit(not jitted):
        advantage, weight = credit(reward, old, ref, old, mask)
    other, other_weight = jax.jit(credit)(reward, old, ref, old, mask)
    close(advantage, other)
    close(weight, other_weight)
