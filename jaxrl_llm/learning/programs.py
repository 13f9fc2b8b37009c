"""The jitted programs of a training step, for one policy, objective and optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.learning import update
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.logprobs import Top
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import Objective


class Programs(NamedTuple):
    """The programs of a step on the devices; `learning/update.py` has each.

    `score(params, inputs)` are log-probs and entropies, `credit(batch, reward, **scores)` all that
    is constant in the parameters, `update(state, credited, frozen)` the new state and metrics.
    """

    score: Any
    credit: Callable[..., update.Credited]
    update: Callable[..., tuple[update.TrainState, Any]]


def programs(
    policy: Policy,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    like: update.TrainState,
    temperature: float = 1.0,
    order: Callable[[int, int], np.ndarray] = update.interleaved,
) -> Programs:
    """The programs for states sharded like `like`; proxy log-probs are scored where they are read."""
    proxy = objective.proxy if objective.reads("proxy_logp") else 0.0
    return Programs(
        update.make_score(policy.scores(temperature, proxy=proxy)),
        update.make_credit(objective),
        update.make_train_step(
            policy.logp(temperature),
            objective,
            optimizer,
            order=order,
            shardings=jax.tree.map(lambda x: x.sharding, like),
        ),
    )


def teacher_score(policy: Policy, temperature: float, objective: Objective, tokens: int) -> Any:
    """The program of a teacher's log-probs, `(params, inputs) -> ([M,m,R,C], top)`.

    `top` are ids and log-probs of its `Objective.top` likeliest tokens, of the policy's `tokens`, where the
    objective reads them, else None. Ids that its vocabulary ends before, which stand for no token, count as
    its last one.
    """
    top = Top(objective.top, tokens) if objective.reads("teacher_top", "top_logp") else None
    scores = policy.scores(temperature, top=top)
    last = qwen2.settings(policy.definition)[0].vocab_size - 1

    def score(params, inputs):
        tokens, target = (jnp.minimum(x, last) for x in (inputs.tokens, inputs.target))
        found = scores(params, inputs._replace(tokens=tokens, target=target))
        return found.logp, found.top

    return update.make_score(score)
