"""The train step: a jitted scan of ordinary optax steps over visits, the pairs (mini-batch, stage).

`policy_logp: (params, inputs) -> [R,C]` is an argument, so nothing here knows the model. With
`inputs.others` it returns a pair, whose second are the log-probs of those tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.learning import metrics
from jaxrl_llm.learning.batch import Batch, Layout
from jaxrl_llm.models import sharding
from jaxrl_llm.models.primitives import Inputs, merge_params, up_to
from jaxrl_llm.models.sharding import BATCH, fit
from jaxrl_llm.objectives import Objective, TokenData

PolicyLogp = Callable[[Any, Inputs], Any]
Binned = Float[Array, "M m R C"]


class TrainState(NamedTuple):
    """All that a step changes; `step` counts batches, `skipped` updates with a non-finite gradient."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    skipped: Int[Array, ""]


class Credited(NamedTuple):
    """A batch with advantages and weights, constant in the parameters, in the model's layout."""

    inputs: Inputs
    advantage: Binned
    weight: Float[Array, "S M m R C"]
    data: TokenData
    trainer_logp: Binned | None = None  # to look at, where `data.old_logp` is the sampler's


# Orders in which a step visits the pairs (mini-batch, stage).


def interleaved(minibatches: int, stages: int) -> Int[np.ndarray, "K 2"]:
    """All stages of a mini-batch, then the next mini-batch (the default)."""
    return np.asarray([(m, s) for m in range(minibatches) for s in range(stages)], np.int32)


def stage_major(minibatches: int, stages: int) -> Int[np.ndarray, "K 2"]:
    """A stage over all mini-batches, then the next stage."""
    return np.asarray([(m, s) for s in range(stages) for m in range(minibatches)], np.int32)


def state_like(
    params, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> TrainState:
    """Shapes and shardings of the state for `params`: arrays, or shapes with shardings.

    Allocates nothing. Optimizer state of a parameter's shape is sharded like it, with `offload` in
    host memory; state of another shape (such as factored moments) is replicated.
    """
    beside = sharding.in_host_memory if offload else lambda place: place
    like = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    everywhere = jax.tree.leaves(params)[0].sharding
    if isinstance(everywhere, NamedSharding):
        everywhere = NamedSharding(everywhere.mesh, P())
    params = jax.tree.map(lambda x: like(x, x.sharding), params)
    masked = lambda x: isinstance(x, optax.MaskedNode)  # where an optimizer leaves a parameter out
    opt_state = optax.tree_map_params(
        optimizer,
        lambda x, p: (
            x if masked(x) else like(x, beside(p.sharding) if x.shape == p.shape else everywhere)
        ),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda x: like(x, everywhere),
        is_leaf=masked,
    )
    count: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(params, opt_state, count, count)


def init_state(
    params, optimizer: optax.GradientTransformation, *, offload: bool = False
) -> TrainState:
    """A fresh state, sharded as `state_like` says.

    It takes the parameters over, and the first train step consumes them. To keep them pass a copy,
    `jax.tree.map(jnp.copy, params)`.
    """
    like = state_like(params, optimizer, offload=offload)
    places = jax.tree.map(lambda x: x.sharding, like)
    params = jax.device_put(params, places.params)
    opt_state = jax.jit(optimizer.init, out_shardings=places.opt_state)(params)
    step, skipped = (sharding.put(np.zeros((), np.int32), places.step) for _ in range(2))
    return TrainState(params, opt_state, step, skipped)


def place(batch: Batch, mesh: Mesh, put: Callable[..., Any] = sharding.put) -> Batch:
    """The batch on the mesh, rows sharded over its batch axes, by `put(array, sharding)`."""

    def by(spec):
        return lambda x: put(x, NamedSharding(mesh, fit(spec, x.shape, mesh)))

    model_side, credit_side = by(P(None, None, BATCH)), by(P(BATCH))
    layout = Layout(credit_side(batch.layout.in_bins), *map(model_side, batch.layout[1:]))
    inputs = jax.tree.map(model_side, batch.inputs)
    rows = batch[2:]
    return Batch(inputs, layout, *jax.tree.map(credit_side, rows))


# The three jitted programs of a training step: score, credit, update.


def make_score(of_tokens: Callable[[Any, Inputs], Any]) -> Callable[[Any, Inputs], Any]:
    """`(params, inputs) -> [M,m,R,C]` what `of_tokens` gives (log-probs, say), a micro-batch at a time.

    0 without a token.
    """

    @jax.jit
    def score(params, inputs):
        params = sharding.on_devices(params)
        lead = inputs.tokens.shape[:2]
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), inputs)
        shapes = jax.eval_shape(of_tokens, params, jax.tree.map(lambda x: x[0], flat))

        def one(micro):
            return jax.lax.cond(
                jnp.any(micro.scored), lambda: of_tokens(params, micro), lambda: _zeros(shapes)
            )

        out = jax.lax.map(one, flat)
        return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), out)

    return score


def make_credit(objective: Objective) -> Callable[..., Credited]:
    """`(batch, reward [P,G], **scores) -> Credited`, with statistics over the whole global batch.

    The scores are fields of `TokenData` in the model's layout: `old_logp`, and others as they are read;
    `teacher_top` are ids and log-probs. `trainer_logp` is passed on.
    """

    read = {name for name in ("turn", "turn_reward", "segment") if objective.reads(name)}

    @jax.jit
    def credit(
        batch: Batch, reward: Float[Array, "P G"], teacher_top=None, trainer_logp=None, **scores
    ):
        layout: Layout = batch.layout
        of_turns: dict[str, Any] = {name: getattr(batch, name) for name in read}
        if batch.turn is None:  # all responses are one turn
            of_turns["turn"] = of_turns["segment"] = batch.mask.astype(jnp.int32)
            of_turns["turn_reward"] = jnp.where(batch.mask, reward.reshape(-1, 1), 0.0)
        known = {name: layout.to_rows(x) for name, x in scores.items() if x is not None}
        known = {"sampler_logp": batch.sampler_logp} | known
        data = TokenData(mask=batch.mask, **{name: of_turns[name] for name in read}, **known)
        rows = objective.credit(reward, data, minibatches=layout.in_rows.shape[0])
        advantage, weight, data = rows
        data = jax.tree.map(layout.to_bins, data)._replace(response=layout.response)
        inputs = batch.inputs
        if teacher_top is not None:
            inputs = inputs._replace(others=teacher_top[0])
            data = data._replace(teacher_top=teacher_top[1])
        weight = jax.vmap(layout.to_bins)(weight)
        return Credited(inputs, layout.to_bins(advantage), weight, data, trainer_logp)

    return credit


def make_train_step(
    policy_logp: PolicyLogp,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    order: Callable[[int, int], Int[np.ndarray, "K 2"]] = interleaved,
    shardings: TrainState | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Float[Array, "K"]]]]:
    """`(state, credited) -> (state, metrics)`, jitted; donates the state; metrics `[K]` by visit.

    A third argument, `frozen`, has parameters of the model that are not trained. A stage without
    tokens is skipped. A gradient that is not finite changes nothing and is counted. `shardings`
    fixes where the state lies; what is in host memory is fetched for each update.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    pinned = lambda state: state
    if shardings is not None:
        pinned = partial(sharding.pinned, places=shardings)

    whole = objective.whole_responses

    def sums_and_loss(frozen, params, micro: Credited):
        stage, data = micro.weight > 0, micro.data
        scored = data.mask if whole else stage
        logp = policy_logp(merge_params(params, frozen), micro.inputs._replace(scored=scored))
        if data.teacher_top is not None:
            logp, top = logp
            data = data._replace(top_logp=jnp.where(scored[..., None], top, data.teacher_top))
        logp = jnp.where(scored, logp, data.old_logp)  # unscored: a ratio of 1
        surrogate, penalty = objective.per_token(logp, micro.advantage, data)
        # padding has p = 1, where a loss may be infinite
        loss = jnp.sum(jnp.where(stage, micro.weight * (surrogate + penalty), 0.0))
        logp = jax.lax.stop_gradient(logp)
        return loss, metrics.token_sums(objective, logp, micro.advantage, micro.weight, data)

    def visit(credited: Credited, frozen, state: TrainState, which):
        m, s = which
        weight = credited.weight[s, m]
        rest = jax.tree.map(lambda x: x[m], credited._replace(weight=None, trainer_logp=None))
        minibatch = rest._replace(weight=weight)
        (loss, sums), grads = accumulate(partial(sums_and_loss, frozen), state.params, minibatch)
        norm = optax.tree.norm(grads)
        # offloaded moments are fetched only now: earlier they would take memory from the gradient
        opt_state, norm = sharding.to_device_after(state.opt_state, after=norm)
        state = state._replace(opt_state=opt_state)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, step=state.step)
        params = optax.apply_updates(state.params, updates)
        stepped = state._replace(params=params, opt_state=opt_state)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        # a selection: with `lax.cond` the compiler keeps a second copy of the state
        state = pinned(
            jax.tree.map(partial(jnp.where, finite & jnp.any(weight > 0)), stepped, state)
        )
        state = state._replace(skipped=state.skipped + ~finite)
        return state, (sums, {"loss": loss, "grad_norm": norm})

    def train_step(state: TrainState, credited: Credited, frozen=None):
        stages, minibatches = credited.weight.shape[:2]
        plan = order(minibatches, stages)
        state, (sums, rows) = jax.lax.scan(partial(visit, credited, frozen), state, plan)
        rows |= {"minibatch": jnp.asarray(plan[:, 0]), "stage": jnp.asarray(plan[:, 1])}
        tokens = jnp.sum(credited.data.mask, axis=(1, 2, 3))[rows["minibatch"]]
        return state._replace(step=state.step + 1), rows | metrics.as_means(sums, tokens)

    out = None if shardings is None else (shardings, None)
    return jax.jit(train_step, donate_argnums=0, out_shardings=out)


def accumulate(loss_and_sums, params, minibatch: Credited):
    """Loss, sums and gradient of a mini-batch, added up to the last micro-batch with a weight.

    Each part of the `data` axis adds up its own rows; they are reduced once, at the end.
    """
    count, rows = minibatch.weight.shape[:2]
    weighted = jnp.any(minibatch.weight > 0, axis=(1, 2))
    used = jnp.max(jnp.where(weighted, jnp.arange(1, count + 1), 0))
    parts = sharding.split_over("data")
    if not parts or rows % sharding.count(parts):
        return _added_up(loss_and_sums, params, minibatch, used)

    def apart(params, minibatch, used):
        return jax.lax.psum(_added_up(loss_and_sums, params, minibatch, used), parts)

    apart = jax.shard_map(
        apart,
        in_specs=(P(), P(None, parts), P()),
        out_specs=P(),
        axis_names=set(parts),
        check_vma=False,
    )
    return apart(params, minibatch, used)


def _added_up(loss_and_sums, params, minibatch, used):
    value_and_grad = jax.value_and_grad(loss_and_sums, has_aux=True)
    one = lambda i: value_and_grad(params, jax.tree.map(lambda x: x[i], minibatch))
    zeros, count = _zeros(jax.eval_shape(one, 0)), minibatch.weight.shape[0]
    if count == 1:
        return jax.lax.cond(used > 0, lambda: one(0), lambda: zeros)
    return up_to(count, used, lambda i, total: jax.tree.map(jnp.add, total, one(i)), zeros)


def _zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
