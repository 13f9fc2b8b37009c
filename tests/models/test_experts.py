"""The sum over experts against all experts on all tokens, where blocks, devices and padding could lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import experts, qwen2, sharding
from jaxrl_llm.models.qwen2 import MoE
from tests import tiny

MIXTURE = MoE(8, 3, 24)
SHAPE = tiny.shape(family="qwen3_moe", biases=(), norms_of_heads=True, mixture=MIXTURE)


def made(gate=0.3):
    """`(definition, weights, x, live)` of one layer's experts; the router's weights times `gate`."""
    module = qwen2.Experts(SHAPE, MIXTURE, rngs=qwen2.nnx.Rngs(0))
    definition, state = qwen2.nnx.split(module)
    weights = qwen2.nnx.to_pure_dict(state)
    weights["gate"]["weight"] = gate * weights["gate"]["weight"]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 30, SHAPE.hidden_size)), jnp.float32)
    return definition, weights, x, jnp.asarray(rng.random((4, 30)) < 0.7)


def plain(weights, x, live):
    """Every expert on every token, weighted by 0 where it is not chosen."""
    logits = jnp.einsum("rld,ed->rle", x, weights["gate"]["weight"])
    chosen, weight = qwen2.choice(logits, MIXTURE)
    spread = (jax.nn.one_hot(chosen, MIXTURE.experts) * weight[..., None]).sum(2)
    gate, up, down = (weights["experts"][f"{n}_proj"]["weight"] for n in ("gate", "up", "down"))
    wide = jax.nn.silu(jnp.einsum("rld,efd->rlef", x, gate)) * jnp.einsum("rld,efd->rlef", x, up)
    return jnp.einsum("rlef,edf,rle->rld", wide, down, spread) * live[..., None]


@pytest.mark.parametrize("gate", [1.0, 0.0], ids=["spread", "all tokens choose the same"])
@pytest.mark.parametrize("block", [8, 512, "all experts on all tokens"])
@pytest.mark.parametrize(
    "mesh",
    [(1, 1, 1), (2, 2, 2), *map(tiny.slow, ((1, 2, 2), (1, 4, 1)))],
    ids=str,
)
def test_no_token_is_dropped_and_gradients_are_right(gate, block, mesh, monkeypatch):
    if isinstance(block, int):
        monkeypatch.setattr(experts, "BLOCK", block)
    else:
        monkeypatch.setitem(experts.FEW, "cpu", 512)
    definition, weights, x, live = made(gate)

    def ours(weights, x):
        return qwen2.nnx.merge(definition, weights)(x, live)[0]

    def both(sum_of):
        loss = lambda weights, x: jnp.sum(
            jnp.sin(sum_of(weights, x)) * jnp.arange(30)[None, :, None]
        )
        return sum_of(weights, x), jax.grad(loss, (0, 1))(weights, x)

    want = both(lambda weights, x: plain(weights, x, live))
    with jax.set_mesh(tiny.mesh_of(*mesh)):
        found = jax.jit(lambda: both(ours))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4, rtol=2e-4), found, want)
    assert np.abs(want[1][0]["gate"]["weight"]).max() > 0.1  # the router learns


def test_padding_changes_nothing_and_learns_nothing():
    definition, _ = qwen2.graph(SHAPE)
    _, params = tiny.policy(SHAPE)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 24))
    positions = jnp.asarray(np.where(np.arange(24) < np.array([[10], [24]]), np.arange(24), 0))

    @jax.jit
    def run(tokens):
        live = np.arange(24) < np.array([[10], [24]])
        loss = lambda p: jnp.sum(
            jnp.where(live[..., None], qwen2.nnx.merge(definition, p)(tokens, positions), 0)
        )
        return jax.value_and_grad(loss)(params)

    other = tokens.copy()
    other[0, 10:] = 5
    a, b = run(jnp.asarray(tokens)), run(jnp.asarray(other))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_experts_lie_apart_and_are_never_gathered():
    mesh = tiny.mesh_of(1, 4, 2)
    definition, shapes = qwen2.graph(SHAPE)
    places = sharding.param_shardings(shapes, mesh)
    where = places["layers"]["mlp"]["experts"]["gate_proj"]["weight"]
    assert where.shard_shape((2, 8, 24, 64)) == (2, 1, 24, 64)
    with jax.set_mesh(mesh):
        like = sharding.params_like(shapes, mesh)
        tokens = jnp.zeros((8, 16), jnp.int32)
        loss = lambda p: qwen2.nnx.merge(definition, p)(tokens, tokens).sum()
        text = jax.jit(jax.grad(loss)).lower(like).compile().as_text()
    assert re.search(r"f32\[(\d,)?1,(24,64|64,24)\]", text)
    assert not re.search(r"f32\[(\d,)?8,(24,64|64,24)\]", text)  # all experts in one place
