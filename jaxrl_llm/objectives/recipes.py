"""Recipes: published methods, each as one complete objective. Copy one to make your own.

Settings are those of the papers; where published code differs from its paper, the functions'
docstrings say so. `length` is the longest response in tokens, which a few recipes need.
`with_ar_and_lopti` adds the two methods of arXiv:2505.12929 to any of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

from jaxrl_llm.objectives import advantages, aggregation, factors, kl, losses, partition, selections
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.token_data import sampler

Recipe = Callable[[int], Objective]


def grpo(length: int) -> Objective:
    """GRPO (arXiv:2402.03300) as in arXiv:2505.12929: wider upper bound, dual clip, token mean."""
    return Objective(
        advantage=advantages.grpo,
        surrogate=partial(losses.clipped, low=0.2, high=0.24, dual=10.0),
        penalties=((1e-3, kl.k3),),
    )


def reinforce_plus_plus(length: int) -> Objective:
    """REINFORCE++ (arXiv:2501.03262): no groups; the KL is in the reward, advantages whitened."""
    return Objective(
        advantage=partial(advantages.reinforce_plus_plus, kl_coef=1e-3, gamma=1.0),
        surrogate=partial(losses.clipped, low=0.2, high=0.24, dual=10.0),
    )


def rloo(length: int) -> Objective:
    """RLOO (arXiv:2402.14740): leave-one-out baseline; on-policy, so one mini-batch a step."""
    return Objective(
        advantage=advantages.rloo,
        surrogate=losses.reinforce,
        aggregate=aggregation.seq_mean_token_sum,
    )


def dr_grpo(length: int) -> Objective:
    """Dr. GRPO (arXiv:2503.20783): no division by deviation or length."""
    return Objective(
        advantage=advantages.dr_grpo,
        surrogate=partial(losses.clipped, low=0.2, high=0.2),
        aggregate=partial(aggregation.constant_length, length=length),
    )


def dapo(length: int) -> Objective:
    """DAPO (arXiv:2503.14476): higher upper bound, overlong penalty; config `drop_constant_groups`."""
    shape = partial(advantages.overlong, longest=length, buffer=max(1, length // 5))
    return Objective(
        advantage=partial(advantages.shaped, by=shape, then=advantages.grpo),
        surrogate=partial(losses.clipped, low=0.2, high=0.28),
    )


def gspo(length: int) -> Objective:
    """GSPO (arXiv:2507.18071): one ratio a response."""
    return Objective(
        advantage=advantages.grpo,
        surrogate=partial(losses.gspo, low=3e-4, high=4e-4),
        aggregate=aggregation.seq_mean_token_mean,
    )


def cispo(length: int) -> Objective:
    """CISPO (arXiv:2506.13585): the ratio is a clipped weight, so no token loses its gradient."""
    return Objective(advantage=advantages.grpo, surrogate=partial(losses.cispo, low=1.0, high=4.0))


def dppo(length: int) -> Objective:
    """DPPO, Binary-TV (arXiv:2602.04879): a trust region of probabilities around the sampler's."""
    return Objective(
        advantage=advantages.dr_grpo,
        surrogate=partial(
            losses.dppo_tv, anchor=sampler, then=partial(losses.cispo, high=9.0, anchor=sampler)
        ),
    )


def dppo_kl(length: int) -> Objective:
    """DPPO, Binary-KL (arXiv:2602.04879): the trust region bounds the KL of {token, any other}."""
    return Objective(
        advantage=advantages.dr_grpo,
        surrogate=partial(
            losses.dppo_kl, anchor=sampler, then=partial(losses.cispo, high=9.0, anchor=sampler)
        ),
    )


def gmpo(length: int) -> Objective:
    """GMPO (arXiv:2507.20673): the geometric mean of a response's ratios."""
    return Objective(
        advantage=advantages.grpo, surrogate=losses.gmpo, aggregate=aggregation.seq_mean_token_mean
    )


def sapo(length: int) -> Objective:
    """SAPO (arXiv:2511.20347): a sigmoid of the ratio in place of clipping."""
    return Objective(
        advantage=advantages.grpo, surrogate=losses.sapo, aggregate=aggregation.seq_mean_token_mean
    )


def ce_gppo(length: int) -> Objective:
    """CE-GPPO (arXiv:2509.20712): clipped tokens keep a scaled gradient."""
    return Objective(advantage=advantages.grpo, surrogate=losses.ce_gppo)


def aspo(length: int) -> Objective:
    """ASPO (arXiv:2510.06062): 1 / ratio where A >= 0; tighter bounds on tokens of low entropy."""
    return Objective(advantage=advantages.grpo, select=selections.calm, surrogate=losses.aspo)


def topr(length: int) -> Objective:
    """TOPR (arXiv:2503.14286): off-policy; the ratio, at most 1, weighs bad responses only."""
    return Objective(advantage=advantages.dr_grpo, surrogate=losses.topr)


def kl_cov(length: int) -> Objective:
    """KL-Cov (arXiv:2505.22617): a penalty on the tokens that drive entropy down."""
    return Objective(
        advantage=advantages.grpo,
        select=partial(selections.covariance, share=2e-3),
        surrogate=losses.importance,
        penalties=((1.0, kl.drift_of_selected),),
    )


def clip_cov(length: int) -> Objective:
    """Clip-Cov (arXiv:2505.22617): a few of the tokens that drive entropy down are left out."""
    left_out = partial(selections.covariance_band, share=2e-4, lower=1.0, upper=5.0)
    return Objective(
        advantage=advantages.grpo,
        factors=(partial(factors.without, select=left_out),),
        surrogate=partial(losses.clipped, low=1.0, high=1.0),
    )


def entropy_80_20(length: int) -> Objective:
    """80/20 (arXiv:2506.01939): DAPO on the fifth of the tokens with the highest entropy."""
    forks = partial(selections.highest_entropy, share=0.2)
    return replace(dapo(length), factors=(partial(factors.only, select=forks),))


def lp_reg(length: int) -> Objective:
    """Lp-Reg (arXiv:2510.03222): a KL to a filtered policy protects some unlikely tokens."""
    return Objective(
        advantage=advantages.grpo,
        select=partial(selections.lowest_probability, share=0.01),
        surrogate=partial(losses.lp_reg, low=1.0, high=9.0, coef=1.0),
        proxy=0.02,
    )


def w_reinforce(length: int) -> Objective:
    """W-REINFORCE (arXiv:2506.01347): bad responses weigh 1, good ones 0.1."""
    return Objective(
        advantage=partial(advantages.w_reinforce, positive=0.1),
        surrogate=partial(losses.clipped, low=0.2, high=0.2),
    )


def maxrl(length: int) -> Objective:
    """MaxRL (arXiv:2602.02710): successes weigh more where rare; for rewards of 0 and 1."""
    return Objective(advantage=advantages.maxrl, surrogate=losses.importance)


def opo(length: int) -> Objective:
    """OPO (arXiv:2505.23585): length-weighted baseline; no clip, no KL: one mini-batch a step."""
    return Objective(advantage=advantages.opo, surrogate=losses.importance)


def asymre(length: int) -> Objective:
    """AsymRE (arXiv:2506.20520): off-policy, no ratio, the baseline a little below the mean."""
    return Objective(advantage=advantages.asymre, surrogate=losses.reinforce)


def unlikeliness(length: int) -> Objective:
    """GRPO with the unlikeliness reward (arXiv:2506.02355): for rewards of 0 and 1."""
    shape = partial(advantages.unlikeliness, beta=0.25)
    return replace(grpo(length), advantage=partial(advantages.shaped, by=shape))


def tis(length: int) -> Objective:
    """GRPO with truncated importance sampling (Yao et al. 2025): weights capped at 2."""
    return replace(grpo(length), factors=(partial(factors.truncated, cap=2.0),))


def icepop(length: int) -> Objective:
    """GRPO with IcePop (arXiv:2510.18855): tokens on which the sampler disagrees are left out."""
    return replace(grpo(length), factors=(partial(factors.masked, low=0.5, high=5.0),))


def mis(length: int) -> Objective:
    """GRPO with masked importance sampling of whole responses (Liu et al. 2025)."""
    whole = partial(factors.masked, low=0.0, high=3.0, weight=factors.response_ratio)
    return replace(grpo(length), factors=(whole,))


def opsm(length: int) -> Objective:
    """GRPO with off-policy sequence masking (arXiv:2512.02556) of bad responses that drifted."""
    return replace(grpo(length), surrogate=losses.opsm)


def distillation(length: int) -> Objective:
    """On-policy distillation (Thinking Machines 2025): a teacher scores each token sampled; no reward."""
    return Objective(
        advantage=partial(advantages.distilled, coef=1.0),
        surrogate=partial(losses.importance, anchor=sampler),
    )


def gkd(length: int) -> Objective:
    """GKD on the policy's own samples (arXiv:2306.13649): the divergence to a teacher's distribution."""
    return Objective(advantage=advantages.nothing, penalties=((1.0, partial(kl.of_top, beta=0.5)),))


def erl(length: int) -> Objective:
    """ERL (arXiv:2602.13949): attempt, reflection, attempt; the task is `WithReflection`."""
    return Objective(
        advantage=advantages.erl,
        surrogate=partial(losses.clipped, low=0.2, high=0.28),
        aggregate=aggregation.seq_mean_token_sum,
        penalties=((1e-3, kl.k3),),
    )


def with_ar_and_lopti(objective: Objective, *, alpha: float = 0.3, eta: float = 0.5) -> Objective:
    """Adds Advantage Reweighting (alpha) and Lopti (eta), arXiv:2505.12929; 0 leaves one out."""
    reweighting = partial(factors.linear_in_probability, alpha=alpha)
    return replace(
        objective,
        factors=(*objective.factors, reweighting) if alpha else objective.factors,
        partition=partial(partition.lopti, eta=eta) if eta else objective.partition,
    )


# The recipes by name, for the command line; the literal type lets tyro list the choices.

Name = Literal[
    "grpo", "reinforce_plus_plus", "rloo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "dppo_kl",
    "gmpo", "sapo", "ce_gppo", "aspo", "topr", "kl_cov", "clip_cov", "entropy_80_20", "lp_reg",
    "w_reinforce", "maxrl", "opo", "asymre", "unlikeliness", "tis", "icepop", "mis", "opsm",
    "distillation", "gkd", "erl",
]  # fmt: skip
BY_NAME: dict[str, Recipe] = {name: globals()[name] for name in get_args(Name)}
