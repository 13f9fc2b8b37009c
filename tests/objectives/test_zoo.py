"""Methods against numbers recorded by running published code: 49 implementations, 117 cases.

On rows and on bins that hold several responses. What the code divides by the kept tokens is compared so, too.
"""

import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import logprobs
from jaxrl_llm.objectives import (
    Objective,
    TokenData,
    advantages,
    aggregation,
    factors,
    kl,
    losses,
    selections,
)
from jaxrl_llm.objectives.token_data import sampler
from tests.shared import GOLDEN

CLIP = ("low", "high", "dual")


@cache
def golden():
    with np.load(GOLDEN / "zoo.npz") as found:
        return json.loads(str(found["params"])), {name: found[name] for name in found.files}


def pick(p, *names):
    return {name: p[name] for name in names}


def clip(p, **more):
    """PPO with the bounds of a case; without a dual clip unless it has one."""
    return partial(losses.clipped, **({"dual": np.inf} | {k: p[k] for k in CLIP if k in p} | more))


def capped(p, **more):
    return partial(losses.cispo, high=p["cap"] - 1.0, **more)


def bounded(loss):
    return lambda p: partial(loss, **pick(p, "low", "high"))


def tv(then, **where):
    return lambda p: partial(losses.dppo_tv, **pick(p, "low", "high"), then=then(p), **where)


def band(p):
    low, _, high = str(p["threshold"]).rpartition("_")
    return {"low": float(low or 0), "high": float(high)}


of_sampler = {"anchor": sampler}
sampler_capped = partial(capped, **of_sampler)
sampler_ratio = lambda p: partial(losses.importance, **of_sampler)
token, response = factors.token_ratio, factors.response_ratio

SURROGATES = {
    "dppo_tv_verl": tv(capped),
    "dppo_kl_verl": lambda p: partial(losses.dppo_kl, **pick(p, "low", "high"), then=capped(p)),
    "dppo_tv_authors": tv(sampler_capped, **of_sampler),
    "dppo_tv_recompute_authors": tv(sampler_capped),
    "dppo_tv_skyrl": tv(sampler_ratio, **of_sampler),
    "dppo_tv_prime": tv(sampler_ratio, **of_sampler),
    "cispo_verl": bounded(losses.cispo),
    "cispo_skyrl": bounded(losses.cispo),
    "cispo_trl": capped,
    "gspo_verl": bounded(losses.gspo),
    "gspo_trl": bounded(losses.gspo),
    "gmpo_verl": bounded(losses.gmpo),
    "gmpo_authors": lambda p: partial(losses.gmpo, low=p["low"], high=p["low"]),
    "sapo_verl": lambda p: partial(
        losses.sapo, tau_positive=p["tau_pos"], tau_negative=p["tau_neg"]
    ),
    "ce_gppo_authors": lambda p: partial(
        losses.ce_gppo, **pick(p, "low", "high", "dual", "beta1", "beta2")
    ),
    "topr_roll": lambda p: partial(
        losses.topr, weights=(p["positive_weight"], p["negative_weight"])
    ),
    "topr_trinity": lambda p: partial(
        losses.topr, positive=lambda advantage, data: advantage > p["threshold"]
    ),
    "opsm_slime": lambda p: partial(losses.opsm, delta=p["delta"], then=clip(p)),
    "opsm_trl": lambda p: partial(losses.opsm, delta=p["delta"], then=clip(p), **of_sampler),
}


def truncated(weight, cap="threshold"):
    return lambda p: partial(factors.truncated, weight=weight, cap=p[cap])


def masked(weight):
    return lambda p: partial(factors.masked, weight=weight, low=0.0, high=p["clip_max"])


WEIGHTS = {
    "tis_slime": lambda p: partial(factors.truncated, cap=p["clip"], floor=p["clip_low"]),
    "tis_token_verl": truncated(token),
    "tis_sequence_verl": truncated(response),
    "tis_normalised_verl": lambda p: partial(factors.normalised, by=truncated(token)(p)),
    "icepop_slime": lambda p: partial(factors.masked, low=p["clip_low"], high=p["clip"]),
    "icepop_verl": lambda p: partial(factors.masked, **band(p)),
    "mis_sequence_mask_trl": masked(response),
    "mis_sequence_truncate_trl": truncated(response, "clip_max"),
    "mis_token_mask_trl": masked(token),
    "mis_token_truncate_trl": truncated(token, "clip_max"),
}
KEPT = {
    "reject_token_k1_verl": lambda p: partial(selections.near_token, **band(p)),
    "reject_seq_mean_k1_verl": lambda p: partial(selections.near_response, **band(p)),
    "reject_seq_mean_k3_verl": lambda p: partial(
        selections.near_response_k3, high=float(p["threshold"])
    ),
    "entropy_mask_trl": lambda p: partial(selections.highest_entropy, share=p["share"]),
    "entropy_8020_lpreg": lambda p: selections.top_entropy,
}


def method(name, p, a):
    """The parts of an objective that are this method, as a user would write them."""
    logp = jnp.asarray(a["in/logp"])
    if name in SURROGATES:
        penalty = {"penalties": ((2 * p["kl_tau"], kl.from_sampler),)} if "kl_tau" in p else {}
        return {"surrogate": SURROGATES[name](p)} | penalty
    if name in WEIGHTS:
        return {"surrogate": clip(p), "factor": WEIGHTS[name](p)}
    if name in KEPT:
        keep = KEPT[name](p)
        return {"surrogate": clip(p), "factor": partial(factors.only, select=keep), "peer": keep}
    if name.startswith("kl_cov"):
        share = p["share"] if "share" in p else p["k_percent"] / 100
        return {
            "surrogate": losses.importance,
            "select": partial(selections.covariance, share=share, logp=logp),
            "penalties": ((p["coef"], kl.drift_of_selected),),
        }
    if name.startswith("clip_cov"):
        chosen = lambda advantage, data: jnp.asarray(a["out/chosen"])
        bounds = pick(p, "lower", "upper", "low", "high") | {"logp": logp}
        return {
            "surrogate": clip(p),
            "factor": partial(factors.without, select=chosen),
            "candidates": partial(selections.band, **bounds),
            "count": partial(selections.covariance_band, **bounds, share=p["share"]),
        }
    if name == "lp_reg_authors":
        shares = {"share": p["neg_share"], "positive_share": p["pos_share"]}
        return {
            "surrogate": partial(losses.lp_reg, **pick(p, "low", "high", "coef")),
            "select": partial(selections.lowest_probability, **shares, logp=logp),
        }
    assert name == "aspo_authors"
    return {
        "surrogate": partial(losses.aspo, **pick(p, "calm", "open", "dual")),
        "select": partial(selections.calm, quantile=p["quantile"]),
    }


def load(case):
    params, arrays = golden()
    prefix = f"{case}/"
    found = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
    return params[case], found


def seen_of(a):
    field = lambda name: jnp.asarray(a[f"in/{name}"]) if f"in/{name}" in a else None
    names = ("ref_logp", "sampler_logp", "entropy", "proxy_logp")
    mask = field("mask")
    old = field("old_logp")
    old = jnp.zeros(mask.shape, jnp.float32) if old is None else old
    return TokenData(mask, old, **{name: field(name) for name in names})


def pack(x, lengths, columns=48):
    """Rows of responses to as many bins, of which each takes what it has room for; the last ones stay empty."""
    bins = []
    for row, length in enumerate(lengths):
        for b in bins:
            if sum(lengths[r] for r in b) + length <= columns:
                b.append(row)
                break
        else:
            bins.append([row])
    out = np.zeros((len(lengths), columns), x.dtype)  # one shape for all cases, compiled once
    number = np.zeros(out.shape, np.int32)
    for i, b in enumerate(bins):
        at = 0
        for n, row in enumerate(b, 1):
            out[i, at : at + lengths[row]] = x[row, : lengths[row]]
            number[i, at : at + lengths[row]] = n
            at += lengths[row]
    return jnp.asarray(out), jnp.asarray(number)


def near(got, want, scale=1.0):
    got, want = np.asarray(got, np.float64) * scale, np.asarray(want, np.float64) * scale
    error = np.abs(got - want) - 1e-5 * np.maximum(1, np.abs(want))
    assert error.max() <= 0, f"off by {np.abs(got - want).max():.2e}"


CASES = sorted(golden()[0])
LOSSES = [case for case in CASES if f"{case}/in/logp" in golden()[1]]
OTHERS = [case for case in CASES if case not in LOSSES]


@pytest.mark.parametrize("case", LOSSES)
def test_losses(case):
    p, a = load(case)
    name = case.split("/")[0]
    data, logp = seen_of(a), jnp.asarray(a["in/logp"])
    reward = jnp.asarray(a.get("in/rewards", np.zeros(16)), jnp.float32).reshape(4, 4)
    parts = method(name, p, a)
    objective = Objective(
        advantage=lambda reward, data: jnp.asarray(a["in/advantages"]),
        factors=(parts["factor"],) if "factor" in parts else (),
        **{k: parts[k] for k in ("surrogate", "select", "penalties") if k in parts},
    )
    advantage, weight, data = objective.credit(reward, data)
    tokens, mask = a["in/mask"].sum(), a["in/mask"]

    def loss(logp, advantage, weight, data):
        surrogate, penalty = objective.per_token(logp, advantage, data)
        return jnp.sum(weight * (surrogate + penalty)), surrogate + penalty

    def check(loss, gradient, per_token):
        near(loss, a["out/loss"])
        near(gradient, a["out/grad_logp"], tokens)
        if "out/per_token" in a:
            near(np.where(mask, per_token, 0), np.where(mask, a["out/per_token"], 0))

    slope = jax.value_and_grad(loss, has_aux=True)
    (value, per_token), gradient = slope(logp, advantage, weight[0], data)
    check(value, gradient, per_token)

    lengths = mask.sum(1).tolist()
    packed = lambda x: None if x is None else pack(np.asarray(x), lengths)[0]
    bins = TokenData(*map(packed, data))._replace(response=pack(mask, lengths)[1])
    there = [packed(x) for x in (logp, advantage, weight[0])]
    (value, _), slopes = slope(*there, bins)
    near(value, a["out/loss"])
    near(slopes, packed(a["out/grad_logp"]), tokens)

    if "out/weight" in a:
        near(np.where(mask, parts["factor"](advantage, data), 0), a["out/weight"])
    if "out/calm" in a:
        np.testing.assert_array_equal(np.asarray(data.selected), a["out/calm"])
    if "peer" in parts:
        kept = parts["peer"](advantage, data)
        np.testing.assert_array_equal(np.asarray(kept), a["out/keep"])
    if "peer" in parts and "out/peer_loss" in a:
        full = partial(factors.renormalised, select=parts["peer"])
        again = Objective(
            advantage=objective.advantage, factors=(full,), surrogate=objective.surrogate
        )
        advantage, weight, data = again.credit(reward, data)
        (value, _), gradient = slope(logp, advantage, weight[0], data)
        near(value, a["out/peer_loss"])
        near(gradient, a["out/peer_grad_logp"], tokens)
    if "candidates" in parts:
        near(parts["candidates"](jnp.asarray(a["in/advantages"]), data), a["out/candidates"])
        drawn = parts["count"](jnp.asarray(a["in/advantages"]), data)
        assert drawn.sum() == a["out/chosen"].sum()
        assert not np.any(np.asarray(drawn) & ~a["out/candidates"])


ADVANTAGES = {
    "w_reinforce_authors": lambda p: partial(advantages.w_reinforce, positive=p["weight"]),
    "maxrl_authors": lambda p: advantages.maxrl,
    "maxrl_prime": lambda p: advantages.maxrl,
    "opo_verl": lambda p: advantages.opo,
    "asymre_trinity": lambda p: partial(advantages.asymre, shift=p["shift"]),
    "unlikeliness_authors": lambda p: partial(
        advantages.shaped, by=partial(advantages.unlikeliness, beta=p["beta"])
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_advantages_and_rewards(case):
    p, a = load(case)
    name = case.split("/")[0]
    if name == "lp_reg_proxy_authors":
        logits, token = jnp.asarray(a["in/logits"]), jnp.asarray(a["in/token"], jnp.int32)
        there = jnp.ones((1, len(token)), bool)
        head = jnp.eye(logits.shape[1])  # the model's readout, of hidden states that are logits
        found = logprobs.chunked(
            logits[None], head, token[None], there, logprobs.Settings(p["temperature"], p["kappa"])
        )
        near(found.proxy_logp[0], a["out/proxy_logp"])
        return
    if "in/lengths" in a:
        lengths = a["in/lengths"]
        mask = jnp.arange(max(lengths.max(), p["longest"]))[None] < lengths[:, None]
        reward = jnp.asarray(a.get("in/rewards", np.zeros(len(lengths))), jnp.float32)[:, None]
        floor = -jnp.inf if name == "overlong_verl" else -1.0
        shaped = advantages.overlong(
            reward,
            TokenData(mask, jnp.zeros(mask.shape)),
            longest=p["longest"],
            buffer=p["buffer"],
            factor=p.get("factor", 1.0),
            floor=floor,
        )
        near(shaped[:, 0], a["out/shaped" if "out/shaped" in a else "out/penalty"])
        return
    assert np.array_equal(a["in/group_ids"], np.repeat(np.arange(4), 4))
    reward = jnp.asarray(a["in/rewards"]).reshape(4, 4)
    near(ADVANTAGES[name](p)(reward, seen_of(a)), a["out/advantages"])


@pytest.mark.parametrize("case", ["tis_sequence_verl/binary", "tis_sequence_verl/graded"])
def test_weights_of_responses_are_normalised_over_responses(case):
    """verl divides the recorded weights by their mean over responses, each counted once."""
    p, a = load(case)
    recorded, mask = a["out/weight"], a["in/mask"]
    want = recorded / recorded[mask.any(1), 0].mean()
    by = WEIGHTS["tis_sequence_verl"](p)
    data = seen_of(a)._replace(response=jnp.asarray(mask, jnp.int32))
    average = aggregation.seq_mean_token_mean
    found = factors.normalised(jnp.asarray(a["in/advantages"]), data, by=by, average=average)
    near(np.where(mask, found, 0), want)
    others = factors.normalised(jnp.asarray(a["in/advantages"]), data, by=by)
    near(np.sum(others, where=mask) / mask.sum(), 1.0)
    assert np.abs(np.where(mask, others, 0) - want).max() > 1e-3


def test_all_cases_are_here():
    assert len(CASES) == 117
    assert len({case.split("/")[0] for case in CASES}) == 49
