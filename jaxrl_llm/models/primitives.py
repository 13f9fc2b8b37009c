"""Parts of programs: a policy's inputs, products of fixed precision, tables' rows.

A table `[V,D]` of the vocabulary is split over devices along V: it or the hidden states move.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.sharding import (
    BATCH,
    VOCAB,
    constrain,
    count,
    on_each_device,
    platform,
    split_over,
)

T = TypeVar("T")


class Inputs(NamedTuple):
    """Tokens for a policy, and which of them are scored; mini- and micro-batch axes may lead.

    The R rows are bins. `segments` is None where a bin is one right-padded sequence (causality is exact
    then), else the number of each token's sequence, 0 on padding. Where responses share a prompt, that
    is a sequence without its last token, with which each response begins, and `prompts` has its number
    for all of them. `index[r,c]` is the column whose hidden state predicts the c-th response token of
    bin r, `target` is that token, and `scored` says whether it counts. `others` are further tokens
    whose log-probs there are wanted. `experts` are those that a mixture's layers send each token to, -1
    where they choose themselves.
    """

    tokens: Int[Array, "*lead R L"]
    positions: Int[Array, "*lead R L"]
    segments: Int[Array, "*lead R L"] | None
    index: Int[Array, "*lead R C"]
    target: Int[Array, "*lead R C"]
    scored: Bool[Array, "*lead R C"]
    others: Int[Array, "*lead R C K"] | None = None
    experts: Int[Array, "*lead R L N K"] | None = None
    prompts: Int[Array, "*lead R L"] | None = None


def merge_params(params: Any, frozen: Any) -> Any:
    """A model's parameters, from those that are trained and the others, if there are any."""
    if params is None or frozen is None or not isinstance(params, dict):
        return frozen if params is None else params
    keys = params.keys() | frozen.keys()
    return {key: merge_params(params.get(key), frozen.get(key)) for key in sorted(keys)}


def einsum(subscripts: str, a: Array, b: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """The product, accumulated and returned in `dtype`; float32 inputs keep all bits everywhere."""
    return jnp.einsum(subscripts, a, b, precision=precision(a, b), preferred_element_type=dtype)


def capped(logits: Float[Array, "*B V"], cap: float | None) -> Float[Array, "*B V"]:
    """Logits between -cap and cap; as they are where there is no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def precision(a: Array, b: Array) -> jax.lax.Precision | None:
    """All bits where both are float32, else None: the device's default.

    By default NVIDIA GPUs multiply float32 as TF32 and TPUs as bfloat16: 10 and 7 bits of 23.
    """
    whole = a.dtype == b.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if whole else None


def product(x: Float[Array, "..."], w: Float[Array, "..."], contracted: int) -> Float[Array, "..."]:
    """`x` times `w`'s transpose, over the last `contracted` axes; `jax.checkpoint` knows it as "product"."""
    multiply = _product_on_cpu if platform() == "cpu" else _product
    return checkpoint_name(multiply(x, w, contracted), "product")


def _product(x, w, contracted):
    last = lambda a: tuple(range(a.ndim - contracted, a.ndim))
    return _contract(x, w, last(x), last(w))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product_on_cpu(x, w, contracted):
    """The same of two matrices, which spares copies, with a backward pass of its own.

    Of the two factors of a weight's gradient XLA transposes the left one, often within the
    activation's derivative: a fifth of an update, if that is not the smaller one.
    """
    out = (*x.shape[: x.ndim - contracted], *w.shape[: w.ndim - contracted])
    x, w = (_matrix(a, a.ndim - contracted) for a in (x, w))
    return _contract(x, w, (1,), (1,)).reshape(out)


def _product_backward(contracted, saved, gradient):
    into, of = (a.shape for a in saved)
    x, w = (_matrix(a, a.ndim - contracted) for a in saved)
    gradient = _matrix(gradient, len(into) - contracted)
    d_x = _contract(gradient, w, (1,), (0,)).reshape(into)
    if x.dtype != jnp.float32:
        return d_x, summed(gradient, x).reshape(of)
    if len(w) < w.shape[1]:
        return d_x, _contract(gradient, x, (0,), (0,)).reshape(of)
    return d_x, _contract(x, gradient, (0,), (0,)).T.reshape(of)


def summed(a: Float[Array, "*B N I"], b: Float[Array, "*B N J"]) -> Float[Array, "*B I J"]:
    """Products `a[n,i] b[n,j]`, summed over n.

    XLA makes one product of the transposition of a matrix and a product, and CPUs that multiply bfloat16
    cannot do that one: it would be of float32, or number by number. Of rows as two axes, where their
    number is even, it does not.
    """
    lead = tuple(range(a.ndim - 2))
    two = 2 if a.shape[-2] % 2 == 0 else 1
    a, b = (x.reshape(*x.shape[:-2], two, -1, x.shape[-1]) for x in (a, b))
    rows = (len(lead), len(lead) + 1)
    return jax.lax.dot_general(a, b, ((rows, rows), (lead, lead)), precision(a, b))


_product_on_cpu.defvjp(lambda x, w, n: (_product_on_cpu(x, w, n), (x, w)), _product_backward)


def _matrix(a, lead: int):
    return a.reshape(math.prod(a.shape[:lead]), math.prod(a.shape[lead:]))


def _contract(a, b, of_a, of_b):
    return jax.lax.dot_general(a, b, ((of_a, of_b), ((), ())), precision(a, b))


def up_to(most: int, used: jax.Array, body: Callable[..., T], start: T) -> T:
    """`fori_loop(0, used, body, start)` with `used <= most`, and that limit in the program's text.

    The analysis of compiled programs (`jaxrl_llm.planning.hlo`) could not know it otherwise.
    """
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.fori_loop(0, used, body, start)


def whole_shards(table: Float[Array, "V *rest"]) -> Float[Array, "W *rest"]:
    """A table sharded as those of the vocabulary are, with zero rows appended until it divides."""
    return constrain(_filled_up(table, VOCAB), VOCAB, None)


def whole_rows(x: Array) -> Array:
    """The array with zero rows appended until axis 0 divides over the batch axes."""
    return _filled_up(x, BATCH)


def _filled_up(x, axes):
    rest = -len(x) % count(split_over(*axes))
    return jnp.pad(x, ((0, rest),) + ((0, 0),) * (x.ndim - 1)) if rest else x


def rows(
    table: Float[Array, "V D"], tokens: Int[Array, "R L"], dtype: DTypeLike
) -> Float[Array, "R L D"]:
    """The table's rows for these tokens, in `dtype`; their gradients are added up in float32."""
    found: Any = _rows(whole_shards(table), whole_rows(tokens), jnp.dtype(dtype))
    return constrain(found[: len(tokens)], BATCH, None, None)


def moved(table, tokens: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Axes that a table is gathered over, those that states are, and those it stays split over.

    The smaller moves over fsdp: the states, unless a group has more `tokens` than the table rows.
    """
    fsdp, tensor = split_over("fsdp"), split_over("tensor")
    few = tokens // count(split_over("data")) <= len(table)
    return ((), fsdp, split_over(*VOCAB)) if few else (fsdp, (), tensor)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows(table, tokens, dtype):
    of_table, of_states, vocab = moved(table, tokens.size)
    tensor = split_over("tensor")

    def local(table, tokens):
        if of_table:
            table = jax.lax.all_gather(table.astype(dtype), of_table, tiled=True)
        here, mine = _here(len(table), tokens, vocab)
        found = jnp.where(mine[..., None], table[jnp.where(mine, here, 0)].astype(dtype), 0)
        found = jax.lax.psum_scatter(found, of_states, tiled=True)  # exact: one term is not 0
        return jax.lax.psum(found, tensor)

    return on_each_device(local, (P(VOCAB), P(("data", *of_table))), P(BATCH))(table, tokens)


def _rows_backward(dtype, saved, gradient):
    del dtype
    of_table, of_states, vocab = moved(saved[0], saved[1].size)
    data, shards = split_over("data"), count(of_table)

    def local(table, tokens, gradient):
        size = len(table) * shards
        here, mine = _here(size, tokens, vocab)
        gradient = jax.lax.all_gather(gradient, of_states, tiled=True).astype(jnp.float32)
        d_table = jnp.zeros((size, table.shape[1]), jnp.float32)
        d_table = d_table.at[jnp.where(mine, here, size)].add(gradient, mode="drop")
        d_table = jax.lax.psum_scatter(d_table, of_table, tiled=True)
        return jax.lax.psum(d_table, data).astype(table.dtype)

    in_specs = (P(VOCAB), P(("data", *of_table)), P(BATCH))
    return on_each_device(local, in_specs, P(VOCAB))(*saved, gradient), None


def _here(size, tokens, vocab):
    """The tokens' rows in this device's slice of the table, and whether they lie in it."""
    here = tokens - jax.lax.axis_index(vocab) * size
    return here, (here >= 0) & (here < size)


_rows.defvjp(
    lambda table, tokens, dtype: (_rows(table, tokens, dtype), (table, tokens)), _rows_backward
)
