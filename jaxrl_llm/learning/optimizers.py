"""Optimizers with the paper's settings; their schedules count batches, not optimizer steps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array

from jaxrl_llm.errors import UserError


def scale_by_batches(
    schedule: Callable[[Array], Array] | float,
) -> optax.GradientTransformationExtraArgs:
    """Multiplies by -schedule(step); `step` counts batches and is an extra argument of `update`."""

    if not (callable(schedule) or 0 <= schedule < math.inf):
        raise UserError(f"optimizer: learning rate = {schedule} must be a number from 0 on")

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, **extra):
        del params
        if callable(schedule) and "step" not in extra:
            raise UserError(
                "optimizer: a wrapper (optax.MultiSteps?) passes no step on to the schedule: give "
                "optax.GradientTransformationExtraArgs(wrapper.init, wrapper.update)"
            )
        rate = schedule(extra["step"]) if callable(schedule) else schedule
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def adamw(
    schedule: Callable[[Array], Array] | float = 1e-6,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_norm: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """AdamW on all parameters after clipping the global norm; the paper's settings."""
    return optax.chain(
        optax.clip_by_global_norm(max_norm),
        optax.scale_by_adam(b1, b2, eps),
        _decay(weight_decay),
        scale_by_batches(schedule),
    )


def _decay(rate: float) -> optax.GradientTransformation:
    """Adds `rate` times the parameters, but for a model's constants, which are no weights.

    Its state is that of `optax.add_decayed_weights` without a mask, so that checkpoints stay readable.
    """

    def update(updates, state, params=None):
        assert params is not None
        constant = lambda path: jax.tree_util.keystr(path).endswith("['layer_scalar']")
        add = lambda path, u, p: u if constant(path) else u + rate * p
        return jax.tree_util.tree_map_with_path(add, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def muon(
    schedule: Callable[[Array], Array] | float,
    matrices: Callable[[Any], Any],
    *,
    b1: float = 0.9,
    b2: float = 0.98,
    rms: float = 0.2,
    max_norm: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Muon (Jordan 2024) on what `matrices` selects, Adam on the rest, after clipping the norm.

    `matrices` maps each parameter to `(inputs, outputs)`, the axes of its matrices, or None.
    Updates have the root mean square `rms`, close to Adam's, so one schedule serves both.
    """
    numbers = optax.contrib.MuonDimensionNumbers
    dimensions = lambda axes: None if axes is None else numbers(*axes)
    leaf = lambda axes: axes is None or isinstance(axes, tuple)
    unscaled = optax.contrib.muon(
        learning_rate=-1.0,  # sign and schedule are applied last
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=lambda p: jax.tree.map(dimensions, matrices(p), is_leaf=leaf),
        consistent_rms=rms,
    )
    return optax.chain(optax.clip_by_global_norm(max_norm), unscaled, scale_by_batches(schedule))
