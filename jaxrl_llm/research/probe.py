"""Tries updates on a batch: how far they move the tokens they were made from, and the others.

Every update is the train step on a copy of the state. An update "on some tokens" keeps their
weights and sets the others' to 0, so that the gradients of bins add up to that of all.
"""

from collections.abc import Callable, Sequence
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
from jaxrl_llm.research.statistics import mean

RESOLUTION = 1e-6  # log-probs that differ by less are the same in float32


class Moved(NamedTuple):
    """Gradient norms by stage, norm of the parameters' change, new log-probs `[M,m,R,C]`."""

    grad_norm: np.ndarray
    distance: float
    logp: np.ndarray


@dataclass(frozen=True)
class Probe:
    """A state, a train step to try on it, and `score(params, inputs)` for log-probs after it."""

    state: TrainState
    step: Callable[[TrainState, Credited], tuple[TrainState, Any]]
    score: Callable[[Any, Any], jax.Array]

    def __call__(self, credited: Credited) -> Moved:
        """The effect of one train step on the batch; the state stays as it is."""
        state, visits = self.step(jax.tree.map(jnp.copy, self.state), credited)
        distance = float(optax.tree.norm(optax.tree.sub(state.params, self.state.params)))
        logp = self.score(state.params, credited.inputs)
        return Moved(np.asarray(visits["grad_norm"]), distance, np.asarray(logp))


def make_gradient(
    policy_logp: PolicyLogp, objective: Objective, params: Any
) -> Callable[[Credited], Any]:
    """A function that gives a train step's gradient, for one mini-batch and one stage."""

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
    """The effect of a gradient-descent step, `params - rate * gradient`."""
    found = gradient(credited)
    norm = float(optax.tree.norm(found))
    stepped = jax.tree.map(lambda x, g: x - rate * g, params, found)
    return Moved(np.asarray([norm]), rate * norm, np.asarray(score(stepped, credited.inputs)))


def only(credited: Credited, where: Any) -> Credited:
    """The batch with the weights of tokens outside `where` set to 0; the others keep theirs."""
    return credited._replace(weight=jnp.where(jnp.asarray(where)[None], credited.weight, 0.0))


def stage(credited: Credited, number: int) -> Credited:
    """The batch with only this stage."""
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


def by_probability(logp: np.ndarray, mask: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """The bin of each token, -1 on padding; bin b is [edges[b - 1], edges[b]) in probability."""
    return np.where(mask, np.searchsorted(np.log(edges), logp, side="right"), -1)


def described(
    names: Sequence[str], bins: np.ndarray, logp: np.ndarray, advantage: np.ndarray
) -> list[dict[str, Any]]:
    """A record for each bin: tokens, share, mean probability and advantage (None if empty)."""
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
        for name, here in ((name, bins == b) for b, name in enumerate(names))
    ]


def direction(
    bins: np.ndarray, count: int, advantage: np.ndarray, before: np.ndarray, after: np.ndarray
) -> dict[str, list]:
    """Of the tokens that moved, the share in their advantage's direction, by bin, then in all bins.

    Also the number of tokens that moved, and the share of those with an advantage that did not.
    """
    up, moved = after > before, np.abs(after - before) > RESOLUTION
    of_bins = [bins == b for b in range(count)]
    inside = [here & (advantage != 0) for here in (*of_bins, bins >= 0)]
    good, bad = moved & (advantage > 0), moved & (advantage < 0)
    return {
        "rising": [mean(up[here & good]) for here in inside],
        "falling": [mean(~up[here & bad]) for here in inside],
        "good_tokens": [int((here & good).sum()) for here in inside],
        "bad_tokens": [int((here & bad).sum()) for here in inside],
        "unmoved": [mean(~moved[here]) for here in inside],
    }


def cosine(x: Any, y: Any) -> float | None:
    """The cosine of two gradients; None if one of them is 0."""
    size = (_dot(x, x) * _dot(y, y)) ** 0.5
    return _dot(x, y) / size if size else None


def along(part: Any, whole: Any) -> float | None:
    """part.whole / whole.whole, a part's share of a gradient; None if the whole is 0."""
    size = _dot(whole, whole)
    return _dot(part, whole) / size if size else None


def _dot(x: Any, y: Any) -> float:
    return float(np.asarray(optax.tree.vdot(x, y)))
