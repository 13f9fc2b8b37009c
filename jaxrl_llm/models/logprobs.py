"""Log-probs of sampled tokens. Only this module shifts by one: a column predicts the next token.

Logits `[B,T,V]` never exist as a whole: they are computed for a chunk of tokens at a time, and
again in the backward pass. Only the tokens in `inputs.scored` are computed: padding costs nothing,
and the stages of a step divide the work of the vocabulary instead of repeating it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.primitives import (
    Inputs,
    capped,
    einsum,
    moved,
    up_to,
    whole_rows,
    whole_shards,
)
from jaxrl_llm.models.sharding import (
    BATCH,
    VOCAB,
    count,
    on_each_device,
    platform,
    pmax_over_mesh,
    split_over,
)

PerToken = Float[Array, "R C"]
REMOVED = -1e4  # the logit of a token that the proxy policy excludes
NO_TOKEN = -1e30  # the logit of padding rows, which make the head divide over devices


def of_sequences(sequences: Sequence[Any], rows: int, length: int) -> Inputs:
    """Host arrays: a right-padded sequence per row, scored from its second token; others empty."""
    tokens: Any = np.zeros((rows, length), np.int32)
    sizes = np.zeros((rows, 1), np.int32)
    for i, sequence in enumerate(sequences):
        tokens[i, : len(sequence)], sizes[i] = sequence, len(sequence)
    columns = np.arange(length, dtype=np.int32)[None]
    positions: Any = np.where(columns < sizes, columns, 0)
    scored: Any = columns[:, 1:] < sizes
    index: Any = np.where(scored, columns[:, :-1], 0)
    return Inputs(tokens, positions, None, index, tokens[:, 1:], scored)


class Scores(NamedTuple):
    """Values of the distributions that tokens were drawn from; all 0 where a token is not scored.

    Only `logp` has a gradient. `proxy_logp` is the log-prob under the policy without the tokens
    less likely than `proxy` times the most likely one (arXiv:2510.03222); None where `proxy` is 0.
    """

    logp: PerToken
    entropy: PerToken
    proxy_logp: PerToken | None = None


def of_responses(definition, params, inputs: Inputs, *, temperature: float = 1.0) -> PerToken:
    """log softmax(logits / temperature) of each scored token, else 0; NaN beside an unknown id."""
    return scores(definition, params, inputs, temperature=temperature).logp


def scores(
    definition,
    params,
    inputs: Inputs,
    *,
    temperature: float = 1.0,
    proxy: float = 0.0,
) -> Scores:
    """`Scores` of the response tokens in `inputs`, with `proxy_logp` if `proxy` is above 0."""
    model = nnx.merge(definition, params)
    hidden = model(inputs.tokens, inputs.positions, inputs.segments)
    scored_first = jnp.argsort(~inputs.scored, axis=1)  # so that `chunked` can stop early
    index = jnp.take_along_axis(inputs.index, scored_first, axis=1)
    scores = chunked(
        jnp.take_along_axis(hidden, index[..., None], axis=1),
        model.head,
        jnp.take_along_axis(inputs.target, scored_first, axis=1),
        jnp.take_along_axis(inputs.scored, scored_first, axis=1),
        temperature=temperature,
        proxy=proxy,
        cap=model.shape.logit_cap,
    )
    back = jnp.argsort(scored_first, axis=1)
    in_vocabulary = (inputs.tokens >= 0) & (inputs.tokens < len(model.head))
    wrong = inputs.scored & ~in_vocabulary.all(1, keepdims=True)
    scores = jax.tree.map(lambda x: jnp.take_along_axis(x, back, axis=1), scores)
    return jax.tree.map(lambda x: jnp.where(wrong, jnp.nan, x), scores)


def chunked(
    hidden: Float[Array, "R C D"],
    head: Float[Array, "V D"],
    target: Int[Array, "R C"],
    scored: Bool[Array, "R C"],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    proxy: float = 0.0,
    cap: float | None = None,
) -> Scores:
    """`Scores` computed in chunks of about `chunk` tokens, up to the last scored column.

    A chunk's tokens are those of a group: the devices that have one whole head between them. By
    default a chunk makes `logit_bytes` of logits on each of these devices. Logits stay below `cap`.
    """
    rows, columns, _ = hidden.shape
    tokens = len(head)
    hidden, target, scored = map(whole_rows, (hidden, target, scored))
    head = whole_shards(head)
    of_table, of_states, vocab = moved(head, target.size)
    widest = max(len(head) // count(vocab), hidden.shape[2] if of_states else 0)
    chunk = chunk or max(1, logit_bytes() // (4 * widest))
    steps = -(-len(hidden) // count(split_over("data") + of_table) * columns // chunk)
    width = -(-columns // steps)
    tail = -columns % width

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, tail)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(len(x), -1, width, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(len(scored), -1)[:, :columns]

    last = jnp.max(jnp.where(scored, jnp.arange(1, columns + 1)[None], 0))
    used = pmax_over_mesh(-(-last // width))  # equal on all devices, as the loop has collectives
    settings = Settings(temperature, proxy, tokens if tokens < len(head) else None, cap)
    found: Any = _pieces(settings, split(hidden), head, split(target), used)
    return jax.tree.map(lambda x: jnp.where(scored, join(x), 0.0)[:rows], found)


def logit_bytes() -> int:
    """Bytes of float32 logits per device at a time: fewer on a CPU, to suit its caches."""
    return 10**8 if platform() == "cpu" else 10**9


class Settings(NamedTuple):
    """Static arguments of `_pieces`; rows of the head from `tokens` on are padding (None: none)."""

    temperature: float
    proxy: float
    tokens: int | None
    cap: float | None


ROWS, HEAD = P(None, BATCH), P(VOCAB)  # chunks `[N,R,W]`, each row on one device; the head


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(settings, hidden, head, target, used) -> Scores:
    """`Scores` `[N,R,W]` of the first `used` chunks, 0 for the others."""
    return _forward(settings, hidden, head, target, used)[0]


def _forward(settings, hidden, head, target, used):
    proxy = settings.proxy
    of_table, of_states, vocab = moved(head, target.size)

    def local(hidden, head, target, used):
        weight = jax.lax.all_gather(head.astype(hidden.dtype), of_table, tiled=True)
        ids = _ids(weight, vocab)

        def one(i, out):
            group = jax.lax.all_gather(hidden[i], of_states, tiled=True)
            logits, _ = _logits(group, weight, ids, settings)
            top = jax.lax.pmax(logits.max(-1), vocab)
            weights = jnp.exp(logits - top[..., None])
            chosen = jnp.where(ids == target[i][..., None], logits, 0.0)
            sums = [weights, weights * logits, chosen]
            if proxy:
                sums.append(jnp.where(weights >= proxy, weights, 0.0))
            total, weighted, chosen, *likely_sum = jax.lax.psum([x.sum(-1) for x in sums], vocab)
            norm = top + jnp.log(total)
            scores = Scores(chosen - norm, norm - weighted / total)
            if proxy:
                likely = jnp.where(jnp.exp(chosen - top) >= proxy, chosen, REMOVED)
                scores = scores._replace(proxy_logp=likely - top - jnp.log(likely_sum[0]))
            return jax.tree.map(lambda all_, x: all_.at[i].set(x), out, (scores, norm))

        zeros = jnp.zeros(target.shape, jnp.float32)
        empty = Scores(zeros, zeros, zeros if proxy else None)
        return up_to(len(hidden), used, one, (empty, zeros))

    group: Any = P(None, ("data", *of_table))
    out = Scores(group, group, group if proxy else None), group
    apply = on_each_device(local, (ROWS, HEAD, group, P()), out)
    scores, norm = apply(hidden, head, target, used)
    return scores, (hidden, head, target, used, norm)


def _backward(settings, saved, gradient):
    """d logp / d logits = onehot - softmax, from logits that are computed again."""
    of_table, of_states, vocab = moved(saved[1], saved[2].size)
    data, tensor, group = split_over("data"), split_over("tensor"), P(None, ("data", *of_table))

    def local(hidden, head, target, used, norm, slope):
        weight = jax.lax.all_gather(head.astype(hidden.dtype), of_table, tiled=True)
        ids = _ids(weight, vocab)

        def one(i, out):
            d_hidden, d_head = out
            group = jax.lax.all_gather(hidden[i], of_states, tiled=True)
            logits, slopes = _logits(group, weight, ids, settings)
            g = slope[i][..., None]
            softmax = jnp.exp(logits - norm[i][..., None])
            d_logits = jnp.where(ids == target[i][..., None], g, 0.0) - g * softmax
            d_logits = (d_logits if slopes is None else d_logits * slopes).astype(hidden.dtype)
            mine = einsum("rcv,vd->rcd", d_logits, weight)
            mine = jax.lax.psum(jax.lax.psum_scatter(mine, of_states, tiled=True), tensor)
            d_hidden = d_hidden.at[i].set(mine.astype(hidden.dtype))
            return d_hidden, d_head + einsum("rcv,rcd->vd", d_logits, group)

        zeros = (jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32))
        d_hidden, d_head = up_to(len(hidden), used, one, zeros)
        d_head = jax.lax.psum_scatter(d_head, of_table, tiled=True)
        return d_hidden, jax.lax.psum(d_head, data).astype(head.dtype)

    apply = on_each_device(local, (ROWS, HEAD, group, P(), group, group), (ROWS, HEAD))
    return *apply(*saved, gradient.logp / settings.temperature), None, None


_pieces.defvjp(_forward, _backward)


def _logits(hidden, weight, ids, settings):
    """float32 logits / temperature for this device's slice of the vocabulary; slopes of the cap."""
    logits, slopes = einsum("rcd,vd->rcv", hidden, weight), None
    if settings.cap is not None:
        logits = capped(logits, settings.cap)
        slopes = 1 - jnp.square(logits / settings.cap)
    logits = logits / settings.temperature
    if settings.tokens is not None:
        logits = jnp.where(ids < settings.tokens, logits, NO_TOKEN)
    return logits, slopes


def _ids(head, vocab):
    """The token ids of this device's slice of the head."""
    size = len(head)
    return (jax.lax.axis_index(vocab) * size + jnp.arange(size))[None, None]
