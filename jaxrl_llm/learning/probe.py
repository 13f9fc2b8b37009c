"""What an update does to the tokens of a batch: to those that it was made from, and to the others.

Every update here is the train step, on a copy of the state. An update "on some tokens" keeps their weights and
sets the others' to 0, so the gradients of bins add up to that of all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.learning.update import (
    Credited,
    PolicyLogp,
    TrainState,
    init_state,
    make_train_step,
)
from jaxrl_llm.objectives import Objective, factors, partition, recipes


class Moved(NamedTuple):
    """The gradient's norm in each stage, how far the parameters went, and the new log-probs of all tokens."""

    grad_norm: np.ndarray
    distance: float
    logp: np.ndarray


@dataclass(frozen=True)
class Probe:
    """A state and a train step to try on it; `score(params, inputs)` gives log-probs as `Credited` has tokens."""

    state: TrainState
    step: Callable[[TrainState, Credited], tuple[TrainState, Any]]
    score: Callable[[Any, Any], jax.Array]

    def __call__(self, credited: Credited) -> Moved:
        """What one step on the batch does."""
        state, visits = self.step(jax.tree.map(jnp.copy, self.state), credited)
        distance = float(optax.tree.norm(optax.tree.sub(state.params, self.state.params)))
        logp = self.score(state.params, credited.inputs)
        return Moved(np.asarray(visits["grad_norm"]), distance, np.asarray(logp))


def make_gradient(
    policy_logp: PolicyLogp, objective: Objective, params: Any
) -> Callable[[Credited], Any]:
    """The gradient of a batch of one mini-batch and one stage: what a train step would hand to its optimizer."""

    def keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), updates

    keeps = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), keep)
    step = make_train_step(policy_logp, objective, keeps)
    state = init_state(params, keeps)
    return lambda credited: step(jax.tree.map(jnp.copy, state), credited)[0].opt_state


def step_along(
    params: Any,
    gradient: Callable[[Credited], Any],
    score: Callable[[Any, Any], jax.Array],
    rate: float,
    credited: Credited,
) -> Moved:
    """What a plain step along the gradient does."""
    found = gradient(credited)
    norm = float(optax.tree.norm(found))
    stepped = jax.tree.map(lambda x, g: x - rate * g, params, found)
    return Moved(np.asarray([norm]), rate * norm, np.asarray(score(stepped, credited.inputs)))


def only(credited: Credited, where: Any) -> Credited:
    """The batch with the weights of other tokens set to 0; the denominator stays."""
    return credited._replace(weight=jnp.where(jnp.asarray(where)[None], credited.weight, 0.0))


def stage(credited: Credited, number: int) -> Credited:
    """The batch with one stage alone."""
    return credited._replace(weight=credited.weight[number : number + 1])


def variants(objective: Objective, *, alpha: float, eta: float) -> dict[str, Objective]:
    """The objective without the paper's two methods, with each, and with both."""
    methods = (factors.linear_in_probability,)
    others = (f for f in objective.factors if getattr(f, "func", f) not in methods)
    plain = replace(objective, factors=tuple(others), partition=partition.together)
    tamed = partial(recipes.with_rare_tokens_tamed, plain)
    return {
        "plain": plain,
        "reweighting": tamed(alpha=alpha, eta=0.0),
        "Lopti": tamed(alpha=0.0, eta=eta),
        "both": tamed(alpha=alpha, eta=eta),
    }


# Bins: an integer a token, -1 on padding.


def by_probability(logp: np.ndarray, mask: np.ndarray, edges: tuple[float, ...]) -> np.ndarray:
    """Bin b holds the probabilities from edge b - 1 (included) to edge b."""
    return np.where(mask, np.searchsorted(np.log(edges), logp, side="right"), -1)


def by_share(logp: np.ndarray, mask: np.ndarray, count: int) -> np.ndarray:
    """`count` bins of as many tokens each, to within one, the least likely first."""
    bins = np.full(mask.shape, -1)
    order = np.argsort(logp[mask], kind="stable")
    ranked = np.empty(len(order), int)
    ranked[order] = np.arange(len(order)) * count // max(len(order), 1)
    bins[mask] = ranked
    return bins


# Figures: plain numbers, None where there is no token to speak of.


def mean(x: np.ndarray) -> float | None:
    """The mean, None of nothing."""
    return float(np.mean(x, dtype=np.float64)) if x.size else None


def correlation(x: Any, y: Any) -> float | None:
    """Pearson's correlation; None where one of the two does not vary."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(x) < 2 or not (np.ptp(x) and np.ptp(y)):
        return None
    return float(np.corrcoef(x, y)[0, 1])


def described(names: list[str], bins: np.ndarray, logp: np.ndarray, advantage: np.ndarray) -> list:
    """A record a bin: how many tokens, what share, their mean probability and advantages."""
    tokens = max(int((bins >= 0).sum()), 1)
    return [
        {
            "name": name,
            "tokens": int(here.sum()),
            "share": float(here.sum()) / tokens,
            "probability": mean(np.exp(logp[here])),
            "advantage": mean(advantage[here]),
            "advantage_size": mean(np.abs(advantage[here])),
        }
        for b, name in enumerate(names)
        for here in [bins == b]
    ]


def change(bins: np.ndarray, count: int, before: np.ndarray, after: np.ndarray) -> dict[str, list]:
    """By bin: the mean change of log-prob and of probability, and of the sizes of both."""
    logp, probability = after - before, np.exp(after) - np.exp(before)
    kinds = {
        "logp": logp,
        "logp_size": np.abs(logp),
        "probability": probability,
        "probability_size": np.abs(probability),
    }
    return {name: [mean(x[bins == b]) for b in range(count)] for name, x in kinds.items()}


RESOLUTION = 1e-6  # log-probs that differ by less are the same in float32


def direction(
    bins: np.ndarray, count: int, advantage: np.ndarray, before: np.ndarray, after: np.ndarray
) -> dict[str, list]:
    """By bin, and of all last: of the tokens that moved, the share that did so as their advantage says.

    How many tokens moved, and what share of those with an advantage did not, is said too.
    """
    up, moved = after > before, np.abs(after - before) > RESOLUTION
    inside = [
        *((bins == b) & (advantage != 0) for b in range(count)),
        (bins >= 0) & (advantage != 0),
    ]
    good, bad = moved & (advantage > 0), moved & (advantage < 0)
    return {
        "rising": [mean(up[here & good]) for here in inside],
        "falling": [mean(~up[here & bad]) for here in inside],
        "good_tokens": [int((here & good).sum()) for here in inside],
        "bad_tokens": [int((here & bad).sum()) for here in inside],
        "unmoved": [mean(~moved[here]) for here in inside],
    }


def cosine(x: Any, y: Any) -> float | None:
    """Of two gradients; None where one of them is nothing."""
    size = (_dot(x, x) * _dot(y, y)) ** 0.5
    return _dot(x, y) / size if size else None


def along(part: Any, whole: Any) -> float | None:
    """How far a part of a gradient goes along the whole, whose length is 1."""
    size = _dot(whole, whole)
    return _dot(part, whole) / size if size else None


def _dot(x: Any, y: Any) -> float:
    return float(np.asarray(optax.tree.vdot(x, y)))
