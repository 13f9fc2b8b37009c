"""Gradient norms of a single token's log-prob: at the logits, at each layer, over all parameters.

Proposition 4.2 of arXiv:2505.12929: at the logits the norm lies between sqrt(V/(V-1)) (1 - pi) and
sqrt(2) (1 - pi); at a layer, between these times the least and greatest singular value of the
Jacobian of the logits with respect to that layer's input.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.primitives import capped, einsum
from jaxrl_llm.research.statistics import correlation
from jaxrl_llm.rollouts.trajectory import Trajectory

JACOBIAN_FLOATS = 2**25  # largest Jacobian of a token's logits for which bounds are computed
PIECE = 16  # tokens in one call
FOLLOWED = 24  # tokens whose bounds at the layers are computed
TOLERANCE = 1e-4  # relative error of float32 sums


class Offsets(NamedTuple):
    """Added to the input of each layer, at every position, and to the hidden state of the head.

    The gradient with respect to an offset, at zero, is the gradient at that activation.
    """

    layers: Float[Array, "N L D"]
    head: Float[Array, " D"]


Logits = Callable[[Any, Offsets, Array, Array], Float[Array, " V"]]
"""(params, offsets, tokens [L], index) -> logits of the token that follows the index"""


class Chosen(NamedTuple):
    """Sampled tokens `target`, each with the sequence before it, which ends at `tokens[index]`."""

    tokens: Int[np.ndarray, "N L"]
    index: Int[np.ndarray, " N"]
    target: Int[np.ndarray, " N"]


class Norms(NamedTuple):
    """1 - pi (exact near 0 too) and gradient norms of the log-prob of N tokens, `[N]` each."""

    rest: Any
    at_logits: Any
    at_layers: Any
    """`[N, layers + 1]`: at the input of each layer, and last at the input of the head"""
    over_params: Any


def choose(responses: Sequence[Trajectory], where: Sequence[tuple[int, int]]) -> Chosen:
    """The tokens at these (response, number among its sampled tokens), with what is before them."""
    where = [(i, responses[i].sampled[t]) for i, t in where]
    within = [[s for s in responses[i].segments if s[1] <= t][-1] for i, t in where]
    before = [
        [*prompt, *responses[i].tokens[start:t]]
        for (i, t), (prompt, start, _) in zip(where, within, strict=True)
    ]
    tokens = np.zeros((len(where), max(map(len, before))), np.int32)
    for row, sequence in zip(tokens, before, strict=True):
        row[: len(sequence)] = sequence
    index = np.asarray([len(sequence) - 1 for sequence in before], np.int32)
    return Chosen(tokens, index, np.asarray([responses[i].tokens[t] for i, t in where], np.int32))


def spread(bins: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of up to `count` tokens, drawn as evenly as possible from the bins (-1 is no bin)."""
    rng = np.random.default_rng(seed)
    queues = [rng.permutation(np.flatnonzero(bins == b)) for b in np.unique(bins[bins >= 0])]
    rank = np.concatenate([np.arange(len(queue)) for queue in queues])
    return np.sort(np.concatenate(queues)[np.argsort(rank, kind="stable")][:count])


def slope(logits: Float[Array, " V"], target: Int[Array, ""]) -> tuple[Array, Array]:
    """The log-prob's gradient at the logits, onehot - softmax, divided by 1 - pi `[V]`; and 1 - pi.

    Nothing cancels or underflows where pi is nearly 1: the first is 1 at the target and, at the
    others, minus the softmax among them; the second is the sum of their probabilities.
    """
    is_target = jnp.arange(logits.shape[0]) == target
    among_others = jax.nn.softmax(jnp.where(is_target, -jnp.inf, logits))
    rest = jnp.where(is_target, 0.0, jax.nn.softmax(logits)).sum()
    return jnp.where(is_target, 1.0, -among_others), rest


def bounds(rest: Any, vocab: int) -> tuple[Any, Any]:
    """The lower and upper bound of Proposition 4.2 at the logits; `rest` is 1 - pi."""
    return np.sqrt(vocab / (vocab - 1)) * rest, np.sqrt(2.0) * rest


def make_norms(logits: Logits) -> Callable[[Any, Offsets, Chosen], Norms]:
    """`(params, zero offsets, chosen) -> Norms`: one forward and backward pass for each token."""

    def norms(params, offsets, chosen):
        def one(token):
            of_token = lambda params, offsets: logits(params, offsets, token.tokens, token.index)
            z, pull = jax.vjp(of_token, params, offsets)
            unit, rest = slope(z, token.target)
            # pulled back at size 1 and multiplied after: nothing underflows where pi is nearly 1
            of_params, of_offsets = pull(unit)
            layers = jnp.sqrt(jnp.square(of_offsets.layers).sum((1, 2)))
            at = jnp.append(layers, jnp.linalg.norm(of_offsets.head))
            over = optax.tree.norm(of_params)
            return Norms(rest, rest * jnp.linalg.norm(unit), rest * at, rest * over)

        return jax.lax.map(one, chosen)

    return jax.jit(norms)


def make_stretch(logits: Logits) -> Callable[[Any, Offsets, Chosen], np.ndarray]:
    """`(params, zero offsets, chosen) -> [N, layers + 1, 2]`: least and greatest singular value.

    Of the transposed Jacobian of each token's logits, on vectors whose sum is 0, as the gradient of
    a log-prob is: V backward passes for each token, so only for small vocabularies.
    """

    @jax.jit
    def jacobian(params, offsets, tokens, index):
        z, pull = jax.vjp(lambda offsets: logits(params, offsets, tokens, index), offsets)
        [rows] = jax.vmap(pull)(jnp.eye(z.shape[0]))
        return rows

    def stretch(params, offsets, chosen):
        found = []
        for tokens, index in zip(chosen.tokens, chosen.index, strict=True):
            rows = jax.device_get(jacobian(params, offsets, tokens, index))
            below = [*np.moveaxis(rows.layers, 1, 0), rows.head]
            found.append([_extremes(x.reshape(x.shape[0], -1)) for x in below])
        return np.asarray(found)

    return stretch


def _extremes(jacobian: np.ndarray) -> tuple[float, float]:
    centred = jacobian.astype(np.float64)
    centred -= centred.mean(0)
    squares = np.linalg.eigvalsh(centred @ centred.T)  # the first is that of the constant vector
    return float(np.sqrt(max(squares[1], 0.0))), float(np.sqrt(squares[-1]))


def single_tokens(
    params: Any, chosen: Chosen, logits: Logits, offsets: Offsets, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fig. 2: gradient norms of single tokens' log-probs against 1 - pi, and bounds of Prop. 4.2.

    The bounds of the layers are computed for some of the tokens, if the vocabulary is small.
    """
    norms, pieces = make_norms(logits), []
    count = len(chosen.index)
    for start in range(0, count, PIECE):
        say(f"gradients of single tokens, {start} of {count}")
        piece = Chosen(*(x[np.arange(start, start + PIECE) % count] for x in chosen))  # one shape
        pieces.append(jax.device_get(norms(params, offsets, piece)))
    every = Norms(*(np.concatenate(x)[:count] for x in zip(*pieces, strict=True)))
    vocab = jax.eval_shape(logits, params, offsets, chosen.tokens[0], chosen.index[0]).shape[0]
    low, high = bounds(every.rest, vocab)
    out: dict[str, Any] = {
        "vocabulary": vocab,
        "one_minus_p": every.rest.tolist(),
        "at_logits": every.at_logits.tolist(),
        "at_layers": every.at_layers.T.tolist(),
        "over_parameters": every.over_params.tolist(),
        "outside_at_logits": _outside(every.at_logits, low, high),
        "correlation": {
            "at_logits": correlation(every.rest, every.at_logits),
            "at_layers": [correlation(every.rest, x) for x in every.at_layers.T],
            "over_parameters": correlation(every.rest, every.over_params),
        },
    }
    if vocab * offsets.layers.size <= JACOBIAN_FLOATS:
        some = np.linspace(0, count - 1, min(FOLLOWED, count)).astype(int)
        say(f"bounds at the layers of {len(some)} tokens")
        stretch = make_stretch(logits)(params, offsets, Chosen(*(x[some] for x in chosen)))
        least, most = stretch[..., 0].min(0), stretch[..., 1].max(0)
        out["stretch"] = {"tokens": len(some), "least": least.tolist(), "most": most.tolist()}
        out["outside_at_layers"] = [
            _outside(norms, a * low[some], b * high[some])
            for norms, a, b in zip(every.at_layers[some].T, least, most, strict=True)
        ]
    return out


def _outside(norms: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    """The number of norms outside their bounds."""
    return int(((norms < low * (1 - TOLERANCE)) | (norms > high * (1 + TOLERANCE))).sum())


def no_offsets(shape: Any, length: int) -> Offsets:
    """Zero offsets for a sequence of `length` tokens in a model of this shape."""
    layers = jnp.zeros((shape.num_layers, length, shape.hidden_size))
    return Offsets(layers, jnp.zeros(shape.hidden_size))


def next_logits(
    definition: Any,
    params: Any,
    offsets: Offsets,
    tokens: Int[Array, " L"],
    index: Int[Array, ""],
    *,
    temperature: float = 1.0,
) -> Float[Array, " V"]:
    """float32 logits / temperature for the token after column `index` of a right-padded row."""
    model = nnx.merge(definition, params)
    positions = jnp.arange(tokens.shape[0])[None]
    hidden = model(tokens[None], positions, offsets=offsets.layers)[0, index]
    hidden = hidden + offsets.head.astype(hidden.dtype)
    logits = einsum("d,vd->v", hidden, model.head.astype(hidden.dtype))
    return capped(logits, model.shape.logit_cap) / temperature
