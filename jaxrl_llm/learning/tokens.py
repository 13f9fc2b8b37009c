"""Figures of the tokens of a few responses, before and after a step: numbers for people to look at."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.learning import metrics
from jaxrl_llm.learning.batch import Batch, Layout
from jaxrl_llm.learning.update import Credited
from jaxrl_llm.models.sharding import BATCH, constrain
from jaxrl_llm.objectives import Objective


def token_stats(
    objective: Objective, score: Callable[[Any, Any], Any], mesh: Mesh
) -> Callable[..., dict[str, np.ndarray]]:
    """`(params, batch, reward, credited, rows) -> numbers`, each `[rows,T]`, NaN where nothing is learned.

    `score(params, inputs)` is the program of the step's scores; `params` are those after the
    update. The numbers are log-probs (the trainer's `old` and `new`, `sampler`, `reference` and `teacher` if
    there is one), `entropy` if it was computed, the `advantage`, the product of its factors (`factor`), the weight
    in each stage's loss (`weight1`, ...), and `clip`: 1 where the surrogate has no slope left.
    """

    @jax.jit
    def only(batch: Batch, rows: Int[Array, " k"]):
        """The bins of these rows first, so that few micro-batches are computed; and their order."""
        here = jnp.isin(_row(batch.layout), rows)
        order = jnp.argsort(~here.any(-1).ravel())
        inputs = batch.inputs._replace(scored=batch.inputs.scored & here)
        sort = lambda x: constrain(_bins(x)[order].reshape(x.shape), None, None, BATCH)
        return jax.tree.map(sort, inputs), order

    everywhere = NamedSharding(mesh, P())

    @jax.jit(out_shardings=everywhere)
    def numbers(
        batch: Batch,
        reward: Float[Array, "P G"],
        credited: Credited,
        after: Float[Array, "M m R C"],
        order: Int[Array, " N"],
        rows: Int[Array, " k"],
    ):
        after = _bins(after)[jnp.argsort(order)].reshape(after.shape)
        to_rows = batch.layout.to_rows
        # what only penalties look at is not shown
        data, here = credited.data._replace(teacher_top=None), jnp.isin(_row(batch.layout), rows)
        new = jnp.where(here, after, data.old_logp)
        whole = jax.tree.map(to_rows, data)._replace(response=batch.mask.astype(jnp.int32))
        flat = partial(jax.tree.map, lambda x: x.reshape(-1, x.shape[-1]))
        of = (new, credited.advantage, data)
        base, final = objective.advantage(reward, whole), to_rows(credited.advantage)
        old = data.old_logp if credited.trainer_logp is None else credited.trainer_logp
        figures = {
            "old": to_rows(old),
            "new": to_rows(new),
            "sampler": whole.sampler_logp,
            "advantage": base,
            "factor": jnp.where(base == 0, 1.0, final / jnp.where(base == 0, 1.0, base)),
            "clip": to_rows(metrics.without_slope(objective, *map(flat, of)).reshape(new.shape)),
        }
        figures |= {f"weight{s + 1}": to_rows(x) for s, x in enumerate(credited.weight)}
        extra = whole.ref_logp, whole.teacher_logp, whole.entropy
        extra = dict(zip(("reference", "teacher", "entropy"), extra, strict=True))
        figures |= {name: x for name, x in extra.items() if x is not None}
        return {name: jnp.where(batch.mask, x, jnp.nan)[rows] for name, x in figures.items()}

    def look(params: Any, batch: Batch, reward: Any, credited: Credited, rows: Sequence[int]):
        at = np.asarray(rows, np.int32)
        inputs, order = only(batch, at)
        after = score(params, inputs).logp
        return jax.device_get(numbers(batch, reward, credited, after, order, at))

    return look


def _row(layout: Layout) -> Int[Array, "M m R C"]:
    """The response, in the batch, of each token of the bins; -1 without one."""
    return layout.in_rows // layout.in_bins.shape[1]


def _bins(x: Array) -> Array:
    """All bins in a row: `[M,m,R,...]` as `[N,...]`."""
    return x.reshape(-1, *x.shape[3:])


def rounded(numbers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In 16 bits, log-probs but `old` as differences from it, which then keep their digits.

    `moved` is `new` less `old`; `less_sampler` and others such are `old` less those. Weights
    may be too small for 16 bits, advantages too large: they stay as they are.
    """
    rest = dict(numbers)
    rest["moved"] = rest.pop("new") - numbers["old"]
    for name in rest.keys() & {"sampler", "reference", "teacher"}:
        rest[f"less_{name}"] = numbers["old"] - rest.pop(name)
    wide = ("weight", "advantage")
    return {k: x if k.startswith(wide) else x.astype(np.float16) for k, x in rest.items()}
