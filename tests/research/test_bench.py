"""The floor that programs are timed against."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.models.primitives import precision
from jaxrl_llm.research import bench


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_floor_is_measured_in_the_precision_of_the_models_products(dtype, monkeypatch):
    """Where a device has a faster one for float32, such as TF32, a model does not use it."""
    programs = []

    def jit(program):
        programs.append(program)
        return lambda x: x

    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        bench.matmul_rate(dtype)
    x = jnp.ones((2, 2), dtype)
    [product] = [one for one in jax.make_jaxpr(programs[0])(x).eqns if one.outvars[0].aval.ndim]
    wanted = precision(x, x)
    assert product.params["precision"] == (wanted and (wanted, wanted))
