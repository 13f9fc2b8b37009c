"""Laws that hold for any data."""

from dataclasses import replace
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.objectives import (
    Objective,
    advantages,
    aggregation,
    factors,
    kl,
    losses,
    partition,
    recipes,
    selections,
)
from jaxrl_llm.objectives import token_data as per_response
from jaxrl_llm.objectives.token_data import TokenData
from jaxrl_llm.tasks.task import LARGEST
from tests import tiny

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


def random_batch(seed, rows=8, width=7):
    """Rewards `[P,G]` in two groups, what is seen of their tokens, and log-probs after an update."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, width + 1, rows)
    mask = np.arange(width)[None] < lengths[:, None]

    def logp():
        return jnp.asarray(np.where(mask, -rng.exponential(1.0, mask.shape), 0), jnp.float32)

    reward = jnp.asarray(rng.choice([-3.0, -1.0, -0.5, 3.0], rows), jnp.float32)
    old, ref, new = logp(), logp(), logp()
    data = TokenData(jnp.asarray(mask), old, ref, old, response=jnp.asarray(mask, jnp.int32))
    data = data._replace(reward=jnp.where(data.mask, reward[:, None], 0))
    return reward.reshape(2, -1), data, new


@pytest.mark.parametrize("function", GROUPED)
def test_group_advantages_by_hand(function):
    reward, data, _ = random_batch(0)
    got = np.asarray(function(reward, data))[:, 0]
    for start in (0, 4):
        r = np.asarray(reward.ravel()[start : start + 4], np.float64)
        want = {
            advantages.grpo: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
            advantages.dr_grpo: r - r.mean(),
            advantages.rloo: [r[i] - np.delete(r, i).mean() for i in range(4)],
        }[function]
        close(got[start : start + 4], want)


OTHERS = [advantages.opo, advantages.maxrl, advantages.reinforce_plus_plus]


@pytest.mark.parametrize("function", [*GROUPED, *OTHERS])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, -0.7, 1e6])
def test_equal_rewards_give_exactly_zero(function, value):
    """In groups of any size; the reference is the policy, so the KL in REINFORCE++ is 0 too."""
    _, data, _ = random_batch(1, rows=24)
    data = data._replace(ref_logp=data.old_logp)
    for size in (3, 8, 24):
        got = function(jnp.full((24 // size, size), value), data)
        assert np.all(np.asarray(got) == 0), size


@pytest.mark.parametrize("function", [*GROUPED, *OTHERS])
def test_the_largest_reward_that_a_task_may_give_is_one_of_any_size(function):
    """Nothing overflows: what differs from rewards of a thousand is a factor of the whole batch."""
    reward, data, _ = random_batch(22)
    data = data._replace(ref_logp=data.old_logp)
    reward = jnp.abs(reward) / 3
    usual, largest = (np.asarray(function(reward * x, data)) for x in (1e3, LARGEST))
    close(largest / np.abs(largest).max(), usual / np.abs(usual).max(), rtol=1e-4)


def test_lengths_are_counted_in_whole_numbers_of_any_kind_of_reward_and_mask(monkeypatch):
    """By hand a reward may be a boolean, a mask of small integers."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    _, data, _ = random_batch(23)
    right = jnp.asarray([[True, False, False, True], [False, False, True, False]])
    close(advantages.opo(right, data), advantages.opo(right.astype(jnp.float32), data))
    small = data._replace(mask=data.mask.astype(jnp.uint8))
    got, want = (advantages.overlong(jnp.ones((2, 4)), x, longest=5) for x in (small, data))
    close(got, want)


def with_turns(data, seed):
    """The data in up to four turns, with rewards."""
    rng, mask = np.random.default_rng(seed), np.asarray(data.mask)
    turn = np.minimum(1 + np.cumsum(rng.random(mask.shape) < 0.4, 1), 4)
    turn = np.where(mask, turn - turn[:, :1] + 1, 0)
    of_turns = rng.choice([-1.0, 0.0, 0.5, 2.0], (len(mask), 5))
    reward = np.take_along_axis(of_turns, turn, 1) * mask
    return data._replace(turn=jnp.asarray(turn), turn_reward=jnp.asarray(reward, jnp.float32))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_turns_by_hand(seed, discount, share):
    reward, data, _ = random_batch(seed)
    data = with_turns(data, seed)
    got = advantages.by_turn(reward, data, discount=discount, episode_share=share)
    turn, given = np.asarray(data.turn), np.asarray(data.turn_reward, np.float64)
    want = share * np.asarray(advantages.grpo(reward, data), np.float64)
    returns = np.full((8, 5), np.nan)
    for i in range(8):
        rewards = [given[i, turn[i] == k][0] for k in range(1, turn[i].max() + 1)]
        for t in range(len(rewards)):
            returns[i, t + 1] = sum(discount**k * x for k, x in enumerate(rewards[t:]))
    for i, t in zip(*np.nonzero(turn), strict=True):
        group = returns[i // 4 * 4 :][:4, turn[i, t]]
        group = group[~np.isnan(group)]
        if len(group) > 1 and np.ptp(group) > 0:
            own = returns[i, turn[i, t]] - group.mean()
            want[i, t] += (1 - share) * own / (group.std(ddof=1) + 1e-6)
    assert turn.max() > 2
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_of_responses_in_one_turn_it_is_grpo():
    reward, data, _ = random_batch(1)
    data = data._replace(turn=data.mask.astype(jnp.int32), turn_reward=data.reward)
    close(advantages.by_turn(reward, data), advantages.grpo(reward, data))


def test_a_group_of_one_keeps_its_reward():
    reward, data, _ = random_batch(2)
    for function in (*GROUPED, advantages.opo, advantages.asymre):
        got = function(reward.reshape(8, 1), data)
        close(got[:, 0], reward.ravel())


@pytest.mark.parametrize(("coef", "share"), [(1.0, 0.0), (0.25, 2.0)])
def test_distillation_by_hand(coef, share):
    """In float64: each token has its own advantage, and the task's as often as it is asked for."""
    reward, data, new = random_batch(24)
    data = data._replace(sampler_logp=new, teacher_logp=data.ref_logp)
    mask, sampler, teacher = (
        np.asarray(x, np.float64) for x in (data.mask, new, data.teacher_logp)
    )
    r = np.asarray(reward, np.float64)
    own = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-6)
    want = mask * (share * own.reshape(-1, 1) - coef * (sampler - teacher))
    got = advantages.distilled(reward, data, coef=coef, reward_coef=share)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(want).max() > 0.1


def test_distillation_is_reweighted_and_staged_as_any_advantage():
    """Advantage Reweighting multiplies it, Lopti divides its tokens, and neither looks at the teacher."""
    reward, data, new = random_batch(25)
    data = data._replace(sampler_logp=new, teacher_logp=data.ref_logp)
    plain = recipes.distillation(7)
    both = recipes.with_ar_and_lopti(plain, alpha=0.3, eta=0.5)
    base, _, _ = plain.credit(reward, data)
    advantage, weight, _ = both.credit(reward, data)
    p = np.exp(np.asarray(data.old_logp, np.float64))
    np.testing.assert_allclose(advantage, base * (0.3 * p + 0.7), atol=1e-5)
    rare = np.asarray(data.mask) & (p <= 0.5)
    assert np.array_equal(weight > 0, [rare, np.asarray(data.mask) & ~rare])
    assert rare.any(1).sum() > 4


def test_a_penalty_by_the_teacher_pulls_as_the_reward_does():
    """The slope of its k1 is log pi - log teacher: that of the reward's loss on policy, turned round."""
    reward, data, _ = random_batch(26)
    data = data._replace(teacher_logp=data.ref_logp, ref_logp=data.old_logp + 1.0)
    objective = recipes.distillation(7)
    advantage, _, data = objective.credit(reward, data._replace(sampler_logp=data.old_logp))
    slope = lambda loss: jax.grad(lambda x: jnp.where(data.mask, loss(x), 0.0).sum())(data.old_logp)
    by_penalty = slope(lambda x: kl.from_teacher(x, data))
    close(by_penalty, slope(lambda x: objective.surrogate(x, advantage, data)))
    close(by_penalty, np.where(data.mask, data.old_logp - data.teacher_logp, 0.0))


UNLIKELY = partial(advantages.shaped, by=advantages.unlikeliness)
LONG = partial(advantages.shaped, by=partial(advantages.overlong, longest=7, buffer=4))


@pytest.mark.parametrize(
    "function",
    [*GROUPED, advantages.reinforce_plus_plus, advantages.opo, advantages.maxrl, advantages.asymre,
     advantages.w_reinforce, UNLIKELY, LONG, advantages.by_turn],
)  # fmt: skip
def test_padding_rows_count_nowhere(function):
    reward, data, _ = random_batch(3)
    data = with_turns(data, 3)
    mask = data.mask.at[jnp.asarray([2, 7])].set(False)
    data = data._replace(
        mask=mask, old_logp=jnp.where(mask, data.old_logp, 0), turn=jnp.where(mask, data.turn, 0)
    )
    one = function(reward, data)
    other = function(reward.at[0, 2].set(1e4), data)
    assert np.array_equal(one, other)
    keep = np.asarray([0, 1, 3, 4, 5, 6])
    alone = function(reward.ravel()[keep].reshape(2, 3), jax.tree.map(lambda x: x[keep], data))
    if function is UNLIKELY:  # ranks are of 3, not of 4
        assert not np.any(np.asarray(one)[np.asarray([2, 7])])
    close(one[keep], alone)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_discounted_returns_by_recursion(gamma):
    rewards = np.asarray(random_batch(4)[1].old_logp)
    want = np.zeros_like(rewards)
    later = np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        later = want[:, t] = rewards[:, t] + gamma * later
    close(advantages.discounted_returns(jnp.asarray(rewards), gamma=gamma), want)


def test_reinforce_plus_plus_puts_the_reward_on_the_last_token_and_is_white():
    reward, data, _ = random_batch(5)
    rewards = advantages.token_rewards(reward, data, kl_coef=0.0)
    last = np.asarray(data.mask).sum(1) - 1
    close(np.asarray(rewards)[np.arange(8), last], reward.ravel())
    assert np.count_nonzero(rewards) == np.count_nonzero(reward)
    white = np.asarray(advantages.reinforce_plus_plus(reward, data, kl_coef=0.1))
    tokens = white[np.asarray(data.mask)]
    close(tokens.mean(), 0)
    close(tokens.std(ddof=1), 1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_reweighting_is_the_formula(alpha):
    _, data, advantage = random_batch(6)
    got = factors.linear_in_probability(advantage, data, alpha=alpha)
    close(got, alpha * np.exp(np.asarray(data.old_logp)) + 1 - alpha)
    assert np.all(np.asarray(factors.linear_in_probability(advantage, data, alpha=0.0)) == 1)


def expected_where_all_earn_the_same(logits, weight):
    """The gradient over the logits, in the mean over all words, at a place where each has advantage 1."""
    probabilities = jax.nn.softmax(logits)
    return jax.grad(lambda x: jnp.sum(probabilities * weight * jax.nn.log_softmax(x)))(logits)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_reweighting_sharpens_where_no_word_is_better_than_another(alpha):
    """By alpha/2 times the gradient of sum p^2; without it nothing is pushed."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float32)
    data = TokenData(jnp.ones((1, 9), bool), jax.nn.log_softmax(logits)[None])
    [weight] = factors.linear_in_probability(jnp.ones((1, 9)), data, alpha=alpha)
    sharper = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2))(logits)
    close(expected_where_all_earn_the_same(logits, weight), alpha / 2 * sharper)


def test_stages_of_lopti_pull_against_each_other_where_no_word_is_better_than_another():
    """The unlikely words first, and the likely ones then: two steps that add up to none."""
    logits = jnp.asarray([2.0, 0.3, 0.1, -0.2, -1.0], jnp.float32)
    data = TokenData(jnp.ones((1, 5), bool), jax.nn.log_softmax(logits)[None])
    first, second = (
        expected_where_all_earn_the_same(logits, stage[0])
        for stage in partition.lopti(data, eta=0.5)
    )
    sharper = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2))(logits)
    close(first, -second)
    assert second @ sharper > 0.1 * jnp.linalg.norm(sharper) ** 2


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
    data = TokenData(jnp.ones((1, 1), bool), jnp.zeros((1, 1)))
    grad = jax.grad(lambda x: losses.clipped(x, jnp.full((1, 1), advantage), data).sum())(x)
    close(grad, [[gradient]])


def test_k1_as_a_loss_pulls_to_the_reference():
    """The plain k1 has gradient 1 whatever the reference is; ours has log pi - log ref."""
    _, data, logp = random_batch(7)
    gradient = jax.grad(lambda x: kl.k1(x, data).sum())(logp)
    close(jnp.where(data.mask, gradient - (logp - data.ref_logp), 0), jnp.zeros(logp.shape))
    assert np.array_equal(kl.k1(logp, data), logp - data.ref_logp)


def test_kl_estimators_agree_with_the_kl_in_expectation():
    rng = np.random.default_rng(0)
    logits, ref_logits = jnp.asarray(rng.normal(size=(2, 6)), jnp.float32) * 0.3
    p, q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref_logits)
    exact = jnp.sum(jnp.exp(p) * (p - q))
    data = TokenData(jnp.ones((1, 6), bool), p[None], q[None])
    expected = lambda f: jnp.sum(jnp.exp(p) * f(p[None], data)[0])
    close(expected(kl.k1), exact)
    close(expected(kl.k3), exact, rtol=1e-4)
    exact_pull = jax.grad(
        lambda x: jnp.sum(jnp.exp(jax.nn.log_softmax(x)) * (jax.nn.log_softmax(x) - q))
    )(logits)
    for estimator in (kl.k1, kl.k2):
        pull = jax.grad(
            lambda x, f=estimator: jnp.sum(jnp.exp(p) * f(jax.nn.log_softmax(x)[None], data)[0])
        )(logits)
        close(pull, exact_pull, atol=1e-5)


@pytest.mark.parametrize("aggregate", AGGREGATIONS)
def test_slices_of_rows_add_up(aggregate):
    """The loss of a mini-batch is the sum over its micro-batches, however it is cut."""
    _, data, x = random_batch(8)
    weight = aggregate(data.mask)
    whole = jnp.sum(weight * x)
    for cuts in ([4], [1, 6], [2, 3, 5]):
        parts = np.split(np.arange(8), cuts)
        close(sum(jnp.sum(weight[i] * x[i]) for i in parts), whole)


def test_aggregations_are_the_means_they_are_named_after():
    _, data, x = random_batch(9)
    mask = data.mask
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
    _, data, _ = random_batch(seed)
    assert np.array_equal(split(data).sum(0), np.asarray(data.mask, int))


def test_lopti_is_low_first_and_strict():
    old = jnp.log(jnp.asarray([[0.49, 0.5, 0.51, 0.1]]))
    old = old.at[0, 1].set(jnp.log(0.5))
    mask = jnp.asarray([[True, True, True, False]])
    data = TokenData(mask, old)
    low, high = partition.lopti(data, eta=0.5)
    assert low.tolist() == [[True, bool(jnp.exp(old[0, 1]) < 0.5), False, False]]
    assert np.array_equal(partition.reversed(data), jnp.stack([high, low]))
    assert np.array_equal(partition.drop_high(data), low[None])
    assert np.array_equal(partition.drop_low(data), high[None])
    assert partition.together(data, steps=2).shape[0] == 2


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_shares_are_exact(share):
    _, data, _ = random_batch(10, rows=12)
    count = int(share * int(data.mask.sum()))
    tied = data._replace(old_logp=jnp.round(data.old_logp))
    for one in (data, tied):
        assert int(partition.quantile(one, share=share)[0].sum()) == count
        assert int(partition.random(one, share=share)[0].sum()) == count
    assert int(partition.random_matched(data)[0].sum()) == int(partition.lopti(data)[0].sum())
    least, others = (data.old_logp[x] for x in partition.quantile(data, share=0.4))
    assert float(least.max()) <= float(others.min())


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.29, 0.3, 2e-3, 1 / 3, 0.123])
def test_a_part_is_counted_in_double_precision(share, jitted):
    part = jax.jit(selections.part, static_argnums=0) if jitted else selections.part
    for count in (0, 1, 10, 99, 100, 300, 500, 1000, 65_537, 2_097_152):
        assert int(part(share, jnp.asarray(count))) == int(np.floor(share * count))


def test_sums_over_responses_do_not_depend_on_the_layout():
    _, data, x = random_batch(17)
    rows = per_response.total(x, data)
    close(rows[:, 0], jnp.sum(x, 1, where=data.mask))
    one_bin = lambda y: y.reshape(1, -1)
    number = data.response * jnp.arange(1, 9)[:, None]
    binned = TokenData(one_bin(data.mask), one_bin(data.old_logp), response=one_bin(number))
    close(per_response.total(one_bin(x), binned).reshape(x.shape), rows)
    length = np.asarray(data.mask).sum(1, keepdims=True)
    close(per_response.mean(one_bin(x), binned).reshape(x.shape), rows / length)


RANDOM = [
    partial(partition.random, share=0.5),
    partition.random_matched,
    lambda data, **how: selections.covariance_band(
        jnp.ones_like(data.old_logp), data, share=0.3, lower=-9.0, upper=9.0, **how
    ),
]


@pytest.mark.parametrize("draw", RANDOM)
def test_draws_do_not_depend_on_the_layout(draw):
    """Neither on padding or devices, nor on the last bits of log-probs, which these change."""
    _, data, _ = random_batch(12)
    drawn = np.asarray(draw(data))
    assert np.array_equal(draw(data), drawn)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 5))), data)
    assert np.array_equal(draw(padded)[..., :7], drawn)
    spread = jax.sharding.NamedSharding(tiny.mesh_of(8), jax.sharding.PartitionSpec("data"))
    nearly = jnp.where(data.mask, data.old_logp * (1 + 1e-6), 0)
    eight = jax.device_put(data._replace(old_logp=nearly), spread)
    assert np.array_equal(jax.jit(draw)(eight), drawn)
    assert not np.array_equal(draw(data, seed=1), drawn)


def test_a_selection_and_a_partition_draw_apart():
    """Of what Clip-Cov drew a random half holds about half."""
    _, data, _ = random_batch(24, rows=64)
    half, _, drawn = (draw(data) for draw in RANDOM)
    shared = np.asarray(drawn & half[0]).sum() / np.asarray(drawn).sum()
    assert 0.3 < shared < 0.7


def test_draws_are_fresh_in_every_batch():
    _, data, _ = random_batch(12)
    shorter = data._replace(mask=data.mask.at[jnp.argmax(data.mask[:, -1]), -1].set(False))
    better = data._replace(reward=jnp.where(data.mask, data.reward + 0.5, 0))
    for other in (shorter, better):
        assert not np.isclose(selections.noise(other, 0), selections.noise(data, 0)).any()


@pytest.mark.parametrize("split", PARTITIONS)
def test_stages_split_the_loss_without_renormalising_it(split):
    reward, data, logp = random_batch(13)
    o = tiny.objective(partition=split)
    advantage, weight, data = o.credit(reward, data)
    per_token = sum(o.per_token(logp, advantage, data))
    stages = jnp.sum(weight * per_token[None], (1, 2))
    whole = jnp.sum(aggregation.token_mean(data.mask) * per_token)
    close(stages.sum(), whole)
    assert o.stages == len(stages)


def test_minibatches_have_denominators_of_their_own():
    reward, data, _ = random_batch(14)
    select = partial(selections.covariance, share=0.2)
    o = tiny.objective(select=select)
    advantage, weight, both = o.credit(reward, data, minibatches=2)
    close(weight[0].reshape(2, -1).sum(1), [1, 1])
    close(advantage, o.credit(reward, data)[0])
    for half in (slice(0, 4), slice(4, 8)):
        alone = select(advantage[half], jax.tree.map(itemgetter(half), data))
        assert np.array_equal(both.selected[half], alone)
        assert int(alone.sum()) == int(0.2 * int(data.mask[half].sum()))


SURROGATES = (
    losses.reinforce, losses.importance, losses.clipped, losses.cispo, losses.dppo_tv, losses.dppo_kl,
    losses.gspo, losses.gmpo, losses.sapo, losses.ce_gppo, losses.aspo, losses.topr, losses.opsm,
)  # fmt: skip


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_factor_of_the_advantage_is_a_factor_of_every_surrogate(surrogate):
    """Homogeneous in the advantage: what makes reweighting, corrections and selections one kind of thing."""
    reward, data, logp = random_batch(15)
    sampler = jnp.where(data.mask, data.old_logp + 0.3 * jnp.sin(jnp.arange(7.0))[None], 0)
    data = data._replace(sampler_logp=sampler)
    cut = partial(factors.truncated, cap=1.1)
    factor = np.minimum(np.exp(np.asarray(data.old_logp - sampler)), 1.1)
    both = [tiny.objective(surrogate=surrogate, factors=fs) for fs in ((), (cut,))]
    (plain, _, more), (scaled, _, _) = (o.credit(reward, data) for o in both)
    want = factor * np.asarray(surrogate(logp, plain, more))
    close(surrogate(logp, scaled, more), want, rtol=1e-4)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 50), st.floats(-3, 3), st.floats(0.05, 8), st.integers(0, 2**31 - 1))
def test_gradient_at_the_logits_is_bounded_by_one_minus_pi(vocab, weight, scale, seed):
    """Prop. 4.2: |w| sqrt(V/(V-1)) (1-pi) <= |dJ/dlogits| <= sqrt(2) |w| (1-pi)."""
    rng = np.random.default_rng(seed)
    logits = np.full(50, -np.inf, np.float32)  # one size, one compilation; absent words have π = 0
    logits[:vocab] = scale * rng.normal(size=vocab)
    token = int(rng.integers(vocab))

    def loss(logits):
        logp = jax.nn.log_softmax(logits)[token].reshape(1, 1)
        advantage = jnp.full((1, 1), weight, jnp.float32)
        data = TokenData(jnp.ones((1, 1), bool), jax.lax.stop_gradient(logp))
        return losses.clipped(logp, advantage, data).sum()

    norm = float(jnp.linalg.norm(jax.grad(loss)(jnp.asarray(logits))))
    others = np.delete(np.asarray(jax.nn.softmax(logits), np.float64), token).sum()
    slack = 1e-5 * (1 + abs(weight))
    assert norm >= abs(weight) * np.sqrt(vocab / (vocab - 1)) * others - slack
    assert norm <= np.sqrt(2) * abs(weight) * others + slack


def test_credit_is_the_same_jitted():
    reward, data, _ = random_batch(16)
    credit = tiny.objective(partition=partition.lopti).credit
    with jax.disable_jit():
        advantage, weight, _ = credit(reward, data)
    other, other_weight, _ = jax.jit(credit)(reward, data)
    close(advantage, other)
    close(weight, other_weight)


def test_an_objective_knows_what_it_reads():
    plain = Objective(advantage=advantages.grpo)
    assert not any(plain.reads(name) for name in ("ref_logp", "entropy", "proxy_logp", "selected"))
    assert plain.reads("old_logp")
    assert tiny.objective().reads("ref_logp")
    assert Objective(advantage=advantages.reinforce_plus_plus).reads("ref_logp")
    assert tiny.objective(select=selections.calm, surrogate=losses.aspo).reads("entropy")
    corrected = tiny.objective(factors=(factors.truncated,))
    assert corrected.reads("sampler_logp")
    assert Objective(advantages.grpo, surrogate=losses.lp_reg).reads("proxy_logp")
    held = Objective(advantages.grpo, penalties=((1.0, kl.from_sampler),))
    assert held.reads("sampler_logp")
    assert not held.reads("ref_logp")


MISSHAPEN = {
    "a figure a response": {"advantage": lambda reward, data: reward},
    "in a row": {"advantage": lambda reward, data: reward.ravel()},
    "in a column": {"advantage": lambda reward, data: reward.reshape(-1, 1)},
    "select": {"select": lambda advantage, data: data.mask[:, :1]},
    "surrogate": {"surrogate": lambda logp, advantage, data: -(advantage * logp).mean()},
    "penalty": {"penalties": ((1.0, lambda logp, data: logp.sum(1)),)},
    "aggregate": {"aggregate": lambda mask: 1.0 / mask.sum(1)},
    "nothing": {"select": lambda advantage, data: None},
    "partition": {"partition": lambda data: jnp.ones((2, 1, 1), bool)},
}


@pytest.mark.parametrize("parts", MISSHAPEN.values(), ids=MISSHAPEN)
def test_what_is_no_figure_of_each_token_is_refused(parts):
    """Indexing by token would take some other token's, and say nothing."""
    reward, data, logp = random_batch(21)
    one = Objective(**{"advantage": advantages.grpo, **parts})
    with pytest.raises(TypeError, match=r"has the shape .* not that of the tokens"):
        one.try_out()
    with pytest.raises(TypeError, match=r"has the shape .* not that of the tokens"):
        one.per_token(logp, *one.credit(reward, data)[::2])


def test_a_factor_of_each_response_is_refused_where_it_would_fit_the_tokens():
    """As many rows as columns: NumPy's broadcasting would take a response's factor for a column's."""
    square = Objective(
        advantages.grpo, factors=(lambda _, data: 1.0 / data.mask.sum(1),), tried_on=(2, 4, 8)
    )
    with jax.numpy_rank_promotion("allow"), pytest.raises(TypeError, match=r"factor has the shape"):
        square.try_out()


def test_an_objective_is_tried_on_groups_and_not_on_a_token():
    def of_the_best(reward, data):
        best = jax.lax.top_k(reward, 4)[0].mean(1)
        return (reward - best[:, None]).reshape(-1, 1) * data.mask

    Objective(advantage=of_the_best, select=selections.highest_entropy).try_out()


def test_one_number_does_for_the_weight_of_all_tokens():
    reward, data, _ = random_batch(21)
    one, each = (
        Objective(advantages.grpo, aggregate=aggregate)
        for aggregate in (lambda mask: 1.0 / mask.sum(), aggregation.token_mean)
    )
    one.try_out()
    assert one.stages == 1
    alone, usual = (np.where(data.mask, o.credit(reward, data)[1], 0.0) for o in (one, each))
    np.testing.assert_allclose(alone, usual, rtol=1e-6)


def test_an_objective_is_tried_on_the_batch_of_its_config():
    """What knows its config's group and response, as it may, is refused by no made-up shape."""

    def of_rank(reward, data):
        weights = jnp.array([[-1.0, -0.5, 0.5, 1.0]])
        return (jnp.sort(reward, 1) * weights).sum(1).repeat(4)[:, None] * data.mask

    late = lambda advantage, data: 0.99 ** jnp.arange(48.0)[None]
    made = Objective(of_rank, factors=(late,), tried_on=(6, 4, 48))
    made.try_out()
    assert not made.reads("ref_logp")
    assert made == replace(made, tried_on=(16, 64, 32))
    with pytest.raises((TypeError, ValueError)):
        replace(made, tried_on=(16, 64, 32)).try_out()


def from_unpacked(logp, data):
    _, _, ref, *_ = data
    return logp - ref


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
def test_what_is_read_is_known_within_a_transformation(wrap):
    def surrogate(logp, advantage, data):
        return -advantage * jnp.where(data.response > 0, jnp.exp(logp - data.old_logp), 0.0)

    def chosen(advantage, data):
        return data.old_logp < advantage

    parts = {"surrogate": surrogate, "select": chosen}
    plain = tiny.objective(**parts, penalties=())
    wrapped = tiny.objective(**{name: wrap(part) for name, part in parts.items()}, penalties=())
    for one in (plain, wrapped):
        assert one.whole_responses
        assert not one.reads("ref_logp")
    assert tiny.objective(penalties=((1.0, wrap(from_unpacked)),)).reads("ref_logp")
    reward, data, logp = random_batch(19)
    (advantage, _, data), (_, _, same) = (one.credit(reward, data) for one in (plain, wrapped))
    assert np.array_equal(data.selected, same.selected)
    close(wrapped.surrogate(logp, advantage, data), plain.surrogate(logp, advantage, data))


@pytest.mark.parametrize("surrogate", [*SURROGATES, tiny.by_turn])
def test_whole_responses_are_scored_where_a_token_depends_on_the_others(surrogate):
    """Found by what a surrogate reads; here against the derivative by another token's log-prob."""
    reward, data, logp = random_batch(18)
    data = data._replace(turn=data.response)
    advantage, _, data = tiny.objective().credit(reward, data)
    value = lambda x: surrogate(x, advantage, data)[:, 0].sum()
    bumped = [value(logp.at[:, 1:].add(step)) for step in (0.0, 0.5)]
    depends = not np.allclose(*bumped, rtol=1e-6)
    assert tiny.objective(surrogate=surrogate).whole_responses == depends


@pytest.mark.parametrize("function", AGGREGATIONS)
def test_rows_without_tokens_count_in_no_aggregation(function):
    mask = jnp.asarray([[True, True, False], [False] * 3, [True, False, False]])
    some = np.asarray([0, 2])
    assert np.array_equal(function(mask)[some], function(mask[some]))
    assert not np.any(function(jnp.zeros((2, 3), bool)))


def test_a_small_share_is_one_token_at_least():
    likely = jnp.asarray([[0.1, 0.5, 0.9], [0.2, 0.6, 0.8]])
    data = TokenData(jnp.ones((2, 3), bool), jnp.log(likely))
    advantage = jnp.asarray([[1.0, 1.0, 1.0], [-1.0, -1.0, -1.0]])
    assert selections.covariance(advantage, data, share=1e-4).sum() == 1
    lowest = selections.lowest_probability(advantage, data, share=1e-4, positive_share=1e-4)
    assert lowest.tolist() == [[True, False, False]] * 2


def test_where_nothing_is_kept_nothing_is_learned():
    data = TokenData(jnp.ones((2, 3), bool), jnp.zeros((2, 3)))
    factor = factors.renormalised(jnp.ones((2, 3)), data, select=selections.nothing)
    assert not np.any(factor)


def test_rewards_of_other_rows_are_refused():
    with pytest.raises(ValueError, match="rewards"):
        advantages.grpo(jnp.ones((2, 3)), TokenData(jnp.ones((4, 2), bool), jnp.zeros((4, 2))))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_a_divergence_of_distributions_is_that_of_its_definition(beta):
    """In float64 over likely tokens and the rest; of fewer tokens it is less, of equals 0."""
    rng = np.random.default_rng(0)
    q, p = (
        np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in 2 * rng.normal(size=(2, 3, 5, 32))
    )

    def of(count):
        likely = np.argsort(-q, -1)[..., :count]
        some = [np.take_along_axis(x, likely, -1) for x in (q, p)]
        logs = [jnp.asarray(np.log(x), jnp.float32) for x in some]
        data = TokenData(None, None, teacher_top=logs[0], top_logp=logs[1])
        whole = [np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in some]
        return kl.of_top(jnp.zeros(some[0].shape[:2]), data, beta=beta), whole

    values = []
    for count in (4, 8, 16):
        found, (teacher, policy) = of(count)
        middle = beta * teacher + (1 - beta) * policy
        one = lambda a, b: (a * np.log(a / b)).sum(-1)
        want = beta * one(teacher, middle) + (1 - beta) * one(policy, middle)
        if beta in (0.0, 1.0):
            want = one(policy, teacher) if beta else one(teacher, policy)
        close(found, want, atol=1e-5)
        values.append(want)
    assert np.all(np.diff(values, axis=0) > 0)
    same = jnp.asarray(np.log(q[..., :4]), jnp.float32)
    alike = TokenData(None, None, teacher_top=same, top_logp=same)
    assert np.abs(kl.of_top(jnp.zeros((3, 5)), alike, beta=beta)).max() < 1e-6


def test_k3_is_bounded():
    ref = jnp.asarray([[3.0, 20.0, -20.0]])
    data = TokenData(jnp.ones((1, 3), bool), jnp.zeros((1, 3)), ref)
    close(kl.k3(jnp.zeros((1, 3)), data), [[10.0, 10.0, np.exp(-5) + 4]])
