"""The slots of the embedded engine, and the jitted loop that decodes them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_llm.models.generation import Chosen
from jaxrl_llm.models.sharding import AXES, constrain, on_each_device
from jaxrl_llm.rollouts import draw
from jaxrl_llm.rollouts.sampler import Sampling


class Slots(NamedTuple):
    """The state of S slots: `last` is the token to read at `position`, `count` tokens are drawn.

    `prompt` and `number` identify the response; `done` is idle, `stopped` ended on a stop token.
    With turns the first `forced` tokens are read instead of drawn ones; a slot that is
    done keeps its place, to go on from there.
    """

    prompt: UInt32[Array, "S"]
    number: UInt32[Array, "S"]
    last: Int[Array, "S"]
    position: Int[Array, "S"]
    count: Int[Array, "S"]
    done: Bool[Array, "S"]
    stopped: Bool[Array, "S"]
    tokens: Int[Array, "S T"]
    logps: Float[Array, "S T"]
    forced: Int[Array, "S"] | None = None


class Rules(NamedTuple):
    """`Sampling` as arrays; None, which is another program, where it does nothing."""

    seed: UInt32[Array, ""]
    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    top_k: Int[Array, ""] | None
    stop: Int[Array, "E"]


def idle_slots(slots: int, limit: int, *, turns: bool = False) -> Slots:
    """Host arrays of idle slots, with room for `limit` tokens each, in turns or not."""
    shapes = ((slots,),) * 7 + ((slots, limit),) * 2
    types = (np.uint32,) * 2 + (np.int32,) * 3 + (bool,) * 2 + (np.int32, np.float32)
    arrays: Any = list(map(np.zeros, shapes, types))
    forced: Any = np.zeros(slots, np.int32) if turns else None
    return Slots(*arrays)._replace(done=np.ones(slots, bool), forced=forced)


def rules_of(sampling: Sampling) -> Rules:
    """Host arrays of these settings."""
    rules: Any = {
        "seed": np.uint32(sampling.seed),
        "temperature": np.float32(sampling.temperature) if sampling.temperature else None,
        "top_p": np.float32(sampling.top_p) if sampling.top_p < 1 else None,
        "top_k": np.int32(sampling.top_k) if sampling.top_k else None,
        "stop": np.asarray(sampling.stop or (-1,), np.int32),  # -1 is no token
    }
    return Rules(**rules)


def program(decode, stride: int):
    """`run`, jitted; it takes over the memory of cache and slots."""
    return jax.jit(partial(run, decode, stride=stride), donate_argnums=(1, 2))


def run(
    decode,
    params,
    cache,
    slots: Slots,
    rules: Rules,
    quota: Int[Array, ""],
    steps: Int[Array, ""],
    *,
    stride: int = 1,
):
    """Decodes until `quota` more slots are done, all are, or `steps` are over.

    Returns `(cache, slots, steps made)`; the condition is checked every `stride` tokens.
    """
    before = slots.done.sum()
    routed = any(isinstance(x, Chosen) for x in cache)

    def going(carry):
        _, slots, step = carry
        done = slots.done.sum()
        return (done < slots.done.size) & (done - before < quota) & (step + stride <= steps)

    def advance(_, carry):
        cache, slots = carry
        # a slot that waits for its next turn writes where that will begin, and keeps its state
        idle = 0 if slots.forced is None else slots.position
        live = None if slots.forced is None and not routed else ~slots.done
        position = jnp.where(slots.done, idle, slots.position)
        logits, cache = decode(params, cache, slots.last, position, live)
        return cache, record(slots, rules, logits)

    def several(carry):
        now, step = carry[:2], carry[2]
        now = advance(0, now) if stride == 1 else jax.lax.fori_loop(0, stride, advance, now)
        return *now, step + stride

    shard = lambda *spec: jax.tree.map(lambda x: constrain(x, *spec), slots)
    start = cache, shard(AXES), jnp.zeros((), jnp.int32)
    cache, slots, step = jax.lax.while_loop(going, several, start)
    return cache, shard(), step


def record(slots: Slots, rules: Rules, logits: Float[Array, "S V"]) -> Slots:
    """Draws the next token of every slot, and stores it where the slot is live."""
    seed = jnp.broadcast_to(rules.seed, slots.prompt.shape)
    identity = jnp.stack([seed, slots.prompt, slots.number, slots.count.astype(jnp.uint32)], 1)
    how = {"temperature": rules.temperature, "top_p": rules.top_p, "top_k": rules.top_k}
    token, logp = _by_row(partial(draw.token, **how))(logits, identity)
    limit, position = slots.tokens.shape[1], slots.position + 1
    column = jnp.where(slots.done, limit, slots.count)  # `limit` is out of range: no write
    count = jnp.where(slots.done, slots.count, slots.count + 1)
    stops = ~slots.done & (token[:, None] == rules.stop[None]).any(1)
    if slots.forced is not None:
        known = slots.count < slots.forced
        token = jnp.where(known, _by_row(_get)(slots.tokens, column), token)
        logp, stops = jnp.where(known, 0.0, logp), stops & ~known
        token = jnp.where(slots.done, slots.last, token)
        position = jnp.where(slots.done, slots.position, position)
    return slots._replace(
        last=token,
        position=position,
        count=count,
        done=slots.done | stops | (count == limit),
        stopped=slots.stopped | stops,
        tokens=_by_row(_put)(slots.tokens, column, token),
        logps=_by_row(_put)(slots.logps, column, logp),
    )


def _get(rows, column):
    """One value of each row."""
    return rows.at[jnp.arange(len(rows)), column].get(mode="clip")


def _put(rows, column, value):
    """Writes one value to each row, none where the column is out of range."""
    return rows.at[jnp.arange(len(rows)), column].set(value, mode="drop")


def _by_row(function):
    """A function of rows, applied on the device that has them."""
    return on_each_device(function, P(AXES), P(AXES))
