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


class Top(NamedTuple):
    """How many of the likeliest tokens are wanted, among ids below which."""

    count: int
    among: int


class Settings(NamedTuple):
    """Static arguments of `chunked`: logits stay below `cap`, and are divided by the temperature.

    Rows of the head from `tokens` on are padding (None: none).
    """

    temperature: float = 1.0
    proxy: float = 0.0
    top: Top | None = None
    cap: float | None = None
    tokens: int | None = None


class Scores(NamedTuple):
    """Values of the distributions that tokens were drawn from; all 0 where a token is not scored.

    Only `logp` and `others` have gradients. `proxy_logp` is the log-prob under the policy without the tokens
    less likely than `proxy` times the most likely one (arXiv:2510.03222); None where `proxy` is 0. `others`
    are log-probs of `Inputs.others`, `top` ids and log-probs of the likeliest tokens.
    """

    logp: PerToken
    entropy: PerToken
    proxy_logp: PerToken | None = None
    others: Float[Array, "R C K"] | None = None
    top: tuple[Int[Array, "R C K"], Float[Array, "R C K"]] | None = None


def of_responses(definition, params, inputs: Inputs, *, temperature: float = 1.0) -> Any:
    """log softmax(logits / temperature) of each scored token, else 0; NaN beside an unknown id.

    With `inputs.others` a pair, whose second are those tokens' `[R,C,K]`.
    """
    found = scores(definition, params, inputs, temperature=temperature)
    return found.logp if inputs.others is None else (found.logp, found.others)


def scores(
    definition,
    params,
    inputs: Inputs,
    *,
    temperature: float = 1.0,
    proxy: float = 0.0,
    top: Top | None = None,
) -> Scores:
    """`Scores` of the response tokens in `inputs`, with `proxy_logp` if `proxy` is above 0, and `top`."""
    model = nnx.merge(definition, params)
    hidden = model(
        inputs.tokens,
        inputs.positions,
        inputs.segments,
        experts=inputs.experts,
        prompts=inputs.prompts,
    )
    scored_first = jnp.argsort(~inputs.scored, axis=1)  # so that `chunked` can stop early
    index, target, scored, others = jax.tree.map(
        lambda x: _columns(x, scored_first),
        (inputs.index, inputs.target, inputs.scored, inputs.others),
    )
    scores = chunked(
        _columns(hidden, index),
        model.head,
        target,
        scored,
        Settings(temperature, proxy, top, model.shape.logit_cap),
        others=others,
    )
    back = jnp.argsort(scored_first, axis=1)
    in_vocabulary = (inputs.tokens >= 0) & (inputs.tokens < len(model.head))
    wrong = inputs.scored & ~in_vocabulary.all(1, keepdims=True)
    scores = jax.tree.map(lambda x: _columns(x, back), scores)
    nan = lambda x: jnp.where(_beside(wrong, x), jnp.nan, x)
    return jax.tree.map(lambda x: nan(x) if x.dtype == jnp.float32 else x, scores)


def _columns(x, index):
    """The columns of x `[R,C,...]` at `index` `[R,C]`."""
    return jnp.take_along_axis(x, _beside(index, x), axis=1)


def _beside(x, like):
    """x `[R,C]` with the axes that `like` has more."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def chunked(
    hidden: Float[Array, "R C D"],
    head: Float[Array, "V D"],
    target: Int[Array, "R C"],
    scored: Bool[Array, "R C"],
    settings: Settings = Settings(),  # noqa: B008 (a constant)
    *,
    others: Int[Array, "R C K"] | None = None,
    chunk: int | None = None,
) -> Scores:
    """`Scores` computed in chunks of about `chunk` tokens, up to the last scored column.

    A chunk's tokens are those of a group: the devices that have one whole head between them. By
    default a chunk makes `logit_bytes` of logits on each of these devices.
    """
    rows, columns, _ = hidden.shape
    tokens = len(head)
    hidden, target, scored, others = jax.tree.map(whole_rows, (hidden, target, scored, others))
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
        return jnp.moveaxis(x, 0, 1).reshape(len(scored), -1, *x.shape[3:])[:, :columns]

    last = jnp.max(jnp.where(scored, jnp.arange(1, columns + 1)[None], 0))
    used = pmax_over_mesh(-(-last // width))  # equal on all devices, as the loop has collectives
    if (top := settings.top) is not None:
        settings = settings._replace(top=Top(min(top.count, top.among, tokens), top.among))
    settings = settings._replace(tokens=tokens if tokens < len(head) else None)
    wanted = split(target), jax.tree.map(split, others)
    scores: Any = jax.tree.map(join, _pieces(settings, split(hidden), head, wanted, used))
    return jax.tree.map(lambda x: jnp.where(_beside(scored, x), x, 0)[:rows], scores)


def logit_bytes() -> int:
    """Bytes of float32 logits per device at a time: fewer on a CPU, to suit its caches."""
    return 10**8 if platform() == "cpu" else 10**9


ROWS, HEAD = P(None, BATCH), P(VOCAB)  # chunks `[N,R,W]`, each row on one device; the head


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pieces(settings, hidden, head, wanted, used) -> Scores:
    """`Scores` `[N,R,W]` of the first `used` chunks, 0 for the others; `wanted`: target and others."""
    return _forward(settings, hidden, head, wanted, used)[0]


def _forward(settings, hidden, head, wanted, used):
    proxy, top = settings.proxy, settings.top
    of_table, of_states, vocab = moved(head, wanted[0].size)

    def local(hidden, head, wanted, used):
        target, others = wanted
        weight = jax.lax.all_gather(head.astype(hidden.dtype), of_table, tiled=True)
        ids = _ids(weight, vocab)

        def one(i, out):
            group = jax.lax.all_gather(hidden[i], of_states, tiled=True)
            logits, _ = _logits(group, weight, ids, settings)
            highest = jax.lax.pmax(logits.max(-1), vocab)
            weights = jnp.exp(logits - highest[..., None])
            chosen = jnp.where(ids == target[i][..., None], logits, 0.0)
            sums = [weights, weights * logits, chosen]
            if proxy:
                sums.append(jnp.where(weights >= proxy, weights, 0.0))
            total, weighted, chosen, *likely_sum = jax.lax.psum([x.sum(-1) for x in sums], vocab)
            norm = highest + jnp.log(total)
            scores = Scores(chosen - norm, norm - weighted / total)
            if proxy:
                likely = jnp.where(jnp.exp(chosen - highest) >= proxy, chosen, REMOVED)
                scores = scores._replace(proxy_logp=likely - highest - jnp.log(likely_sum[0]))
            if others is not None:
                at, here = _places(others[i], ids)
                mine = jnp.where(here, jnp.take_along_axis(logits, at, -1), 0.0)
                scores = scores._replace(others=jax.lax.psum(mine, vocab) - norm[..., None])
            if top:
                tokens, theirs = _likeliest(logits, ids, top, vocab)
                scores = scores._replace(top=(tokens, theirs - norm[..., None]))
            return jax.tree.map(lambda all_, x: all_.at[i].set(x), out, (scores, norm))

        zeros = jnp.zeros(target.shape, jnp.float32)
        widened = lambda k, kind=jnp.float32: jnp.zeros((*target.shape, k), kind)
        empty = Scores(
            zeros,
            zeros,
            zeros if proxy else None,
            None if others is None else widened(others.shape[-1]),
            (widened(top.count, jnp.int32), widened(top.count)) if top else None,
        )
        return up_to(len(hidden), used, one, (empty, zeros))

    group: Any = P(None, ("data", *of_table))
    there = proxy, wanted[1] is not None, top
    out = Scores(group, group, *(group if x else None for x in there)), group
    apply = on_each_device(local, (ROWS, HEAD, group, P()), out)
    scores, norm = apply(hidden, head, wanted, used)
    return scores, (hidden, head, wanted, used, norm)


def _backward(settings, saved, gradient):
    """d logp / d logits = onehot - softmax, from logits that are computed again."""
    of_table, of_states, vocab = moved(saved[1], saved[2][0].size)
    data, tensor, group = split_over("data"), split_over("tensor"), P(None, ("data", *of_table))

    def local(hidden, head, wanted, used, norm, gradient):
        (target, others), (slope, of_others) = wanted, gradient
        weight = jax.lax.all_gather(head.astype(hidden.dtype), of_table, tiled=True)
        ids = _ids(weight, vocab)

        def one(i, out):
            d_hidden, d_head = out
            group = jax.lax.all_gather(hidden[i], of_states, tiled=True)
            logits, slopes = _logits(group, weight, ids, settings)
            g = slope[i][..., None]
            softmax = jnp.exp(logits - norm[i][..., None])
            d_logits = jnp.where(ids == target[i][..., None], g, 0.0)
            if others is not None:
                at, here = _places(others[i], ids)
                more = jnp.where(here, of_others[i], 0.0)
                row, column, _ = jnp.indices(at.shape)
                d_logits = d_logits.at[row, column, at].add(more)
                g += of_others[i].sum(-1, keepdims=True)
            d_logits -= g * softmax
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
    slopes = jax.tree.map(lambda x: x / settings.temperature, (gradient.logp, gradient.others))
    return *apply(*saved, slopes), None, None


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


def _places(tokens, ids):
    """The places of tokens in this device's slice of the vocabulary, and whether they are there."""
    at = tokens - ids[0, 0, 0]
    return jnp.clip(at, 0, ids.size - 1), (at >= 0) & (at < ids.size)


def _likeliest(logits, ids, top, vocab):
    """Ids and logits of the likeliest tokens: of each device's slice, then of all of those."""
    logits = jnp.where(ids < top.among, logits, NO_TOKEN)
    logits, at = jax.lax.top_k(logits, min(top.count, ids.size))
    every = jnp.take(ids.ravel(), at), logits
    tokens, logits = (jax.lax.all_gather(x, vocab, axis=-1, tiled=True) for x in every)
    logits, at = jax.lax.top_k(logits, top.count)
    return jnp.take_along_axis(tokens, at, -1), logits
