"""Log-probabilities of sampled tokens: the only place that knows a token is predicted one column before it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.batch import Inputs
from jaxrl_llm.models.sharding import BATCH, constrain, local_size

LOGIT_BYTES = 10**8  # float32 logits that exist at the same time on one device


def of_responses(
    definition, params, inputs: Inputs, *, temperature: float = 1.0, chunk: int | None = None
) -> Float[Array, "R C"]:
    """log softmax(logits / temperature) of each response token; 0 is not special on unused slots."""
    return _scored(definition, params, inputs, temperature, chunk, entropy=False)


def with_entropy(
    definition, params, inputs: Inputs, *, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Float[Array, "R C"], Float[Array, "R C"]]:
    """The same, and the entropy of the distribution each token was drawn from, in one pass."""
    return _scored(definition, params, inputs, temperature, chunk, entropy=True)


def _scored(definition, params, inputs, temperature, chunk, *, entropy):
    model = nnx.merge(definition, params)
    hidden = model(inputs.tokens, inputs.positions, inputs.segments)
    hidden = jnp.take_along_axis(hidden, inputs.index[..., None], axis=1)
    return chunked(
        hidden, model.head, inputs.target, temperature=temperature, chunk=chunk, entropy=entropy
    )


def chunked(
    hidden: Float[Array, "R C D"],
    head: Float[Array, "V D"],
    target: Int[Array, "R C"],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
):
    """Scores about `chunk` tokens of a device at a time; their logits are made again in the backward pass.

    The default is as many as fit into LOGIT_BYTES.
    """
    rows, columns, _ = hidden.shape
    chunk = chunk or max(1, LOGIT_BYTES // (4 * local_size(head.shape[0], "tensor")))
    steps = -(-local_size(rows, BATCH) * columns // chunk)
    width = -(-columns // steps)
    tail = -columns % width

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, -1, width, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :columns]

    def score(_, piece):
        h, t = piece
        both: Any = _log_softmax_at(h, head, t, temperature)
        return None, both if entropy else both[0]

    _, scores = jax.lax.scan(score, None, (split(hidden), split(target)))
    return jax.tree.map(join, scores)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _log_softmax_at(hidden, head, target, temperature):
    """(log-prob of the target, entropy) of a few tokens; the entropy is a metric, it has no gradient."""
    return _forward(hidden, head, target, temperature)[0]


def _forward(hidden, head, target, temperature):
    logits = _logits(hidden, head, temperature)
    top = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = weights.sum(-1)
    norm = top[..., 0] + jnp.log(total)
    chosen = jnp.where(_is_target(logits, target), logits, 0.0).sum(-1)
    entropy = norm - (weights * logits).sum(-1) / total
    return (chosen - norm, entropy), (hidden, head, target, norm)


def _backward(temperature, saved, gradient):
    """d logp / d logits = onehot - softmax, from logits that are made again: `[B,T,V]` never exists."""
    hidden, head, target, norm = saved
    logits = _logits(hidden, head, temperature)
    g = (gradient[0] / temperature)[..., None]
    softmax = jnp.exp(logits - norm[..., None])
    d_logits = jnp.where(_is_target(logits, target), g, 0.0) - g * softmax
    d_logits = d_logits.astype(hidden.dtype)
    wide = {"preferred_element_type": jnp.float32}
    d_hidden = jnp.einsum("rcv,vd->rcd", d_logits, head.astype(hidden.dtype), **wide)
    d_head = jnp.einsum("rcv,rcd->vd", d_logits, hidden, **wide)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype), None


_log_softmax_at.defvjp(_forward, _backward)


def _logits(hidden, head, temperature):
    """float32 logits / temperature of a few tokens, sharded over the vocabulary."""
    logits = jnp.einsum(
        "rcd,vd->rcv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    return constrain(logits, BATCH, None, "tensor") / temperature


def _is_target(logits, target):
    return jnp.arange(logits.shape[-1])[None, None] == target[..., None]
