"""Every number of the authors' own implementation: 4 cases x 3 stages x 2 algorithms."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learning import metrics
from jaxrl_llm.objectives import (
    Objective,
    advantages,
    aggregation,
    factors,
    kl,
    losses,
    partition,
)
from jaxrl_llm.objectives.token_data import TokenData
from tests.shared import GOLDEN

AGGREGATE = {
    "token-mean": aggregation.token_mean,
    "seq-mean-token-sum": aggregation.seq_mean_token_sum,
    "seq-mean-token-mean": aggregation.seq_mean_token_mean,
}
STAGES = {"full": partition.together, "low": partition.drop_high, "high": partition.drop_low}
close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


def case(i):
    golden = np.load(GOLDEN / "objectives.npz")
    names = [name for name in golden.files if name.startswith(f"{i}/")]
    arrays = {name.split("/", 1)[1]: jnp.asarray(golden[name]) for name in names}
    return json.loads(str(golden["params"]))[i], arrays


def build(algorithm, p, stage):
    if algorithm == "grpo":
        advantage = advantages.grpo
        penalties = ((p["kl_loss_coef"], kl.k3),)
    else:
        advantage = partial(
            advantages.reinforce_plus_plus, kl_coef=p["kl_reward_coef"], gamma=p["gamma"]
        )
        penalties = ()
    split = STAGES[stage]
    return Objective(
        advantage=advantage,
        factors=(partial(factors.linear_in_probability, alpha=p["alpha"]),),
        surrogate=partial(
            losses.clipped, low=p["clip_low"], high=p["clip_high"], dual=p["dual_clip"]
        ),
        penalties=penalties,
        aggregate=AGGREGATE[p["aggregation"]],
        partition=split if stage == "full" else partial(split, eta=p["eta"]),
    )


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("algorithm", ["grpo", "rpp"])
@pytest.mark.parametrize("i", range(4))
def test_every_array(i, algorithm, stage):
    p, a = case(i)
    objective = build(algorithm, p, stage)
    logp, reward = a["in/logp"], a["in/rewards"].reshape(-1, p["group_size"])
    data = TokenData(a["in/mask"] > 0, a["in/old_logp"], a["in/ref_logp"])
    want = {k.removeprefix(f"out/{algorithm}_"): v for k, v in a.items()}

    close(objective.advantage(reward, data), want["advantages"])
    if algorithm == "rpp":
        rewards = advantages.token_rewards(reward, data, kl_coef=p["kl_reward_coef"])
        returns = advantages.discounted_returns(rewards, gamma=p["gamma"])
        close(jnp.where(data.mask, returns, 0), jnp.where(data.mask, want["returns"], 0))

    advantage, weight, data = objective.credit(reward, data)
    close(advantage, want["reweighted"])

    def loss(x):
        surrogate, penalty = objective.per_token(x, advantage, data)
        return jnp.sum(weight[0] * (surrogate + penalty))

    value, gradient = jax.value_and_grad(loss)(logp)
    close(value, want[f"{stage}_loss"])
    close(gradient, want[f"{stage}_grad_logp"])

    sums = metrics.token_sums(objective, logp, advantage, weight[0], data)
    got = metrics.as_means(sums, data.mask.sum())
    names = {"policy": "pg", "kl": "kl", "clip": "clipfrac", "clip_dual": "clipfrac_lower"}
    for ours, theirs in names.items():
        close(got[ours], want[f"{stage}_{theirs}"])
    every = metrics.token_sums(objective, logp, advantage, data.mask.astype(float), data)
    moved = metrics.as_means(every, data.mask.sum())["moved"]
    close(moved, want[f"{stage}_ppo_kl"])  # theirs of a stage is that of all tokens
