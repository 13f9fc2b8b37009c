"""The table of the vocabulary, cut over devices: the same numbers on every mesh, and what does not travel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import logprobs, qwen2, sharding, vocabulary
from tests import hlo, tiny

MESHES = {
    "1-device": (1, 1, 1),
    "fsdp-8": (1, 8, 1),
    "tensor-4": (1, 2, 4),
    "data-2": (2, 2, 2),
}
meshes = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


def on(mesh, table):
    shapes = {"embed_tokens": {"weight": table}}
    return jax.device_put(table, sharding.param_shardings(shapes, mesh)["embed_tokens"]["weight"])


@meshes
def test_a_row_adds_up_its_gradients_in_float32(sizes):
    """4,096 tokens 5, each with a gradient of one: bfloat16 would stop at 256."""
    mesh = tiny.mesh_of(*sizes)
    with jax.set_mesh(mesh):
        table = on(mesh, jnp.ones((97, 8)))
        tokens = jnp.full((8, 512), 5, jnp.int32)
        total = lambda table: vocabulary.rows(table, tokens, jnp.bfloat16).astype(jnp.float32).sum()
        gradient = jax.jit(jax.grad(total))(table)
    want = np.zeros((97, 8), np.float32)
    want[5] = 4096
    np.testing.assert_array_equal(gradient, want)


@meshes
@pytest.mark.parametrize(("vocab", "count"), [(96, 8), (97, 3)])
def test_rows_are_those_of_the_table(sizes, vocab, count):
    mesh = tiny.mesh_of(*sizes)
    table = jax.random.normal(jax.random.key(0), (vocab, 8))
    tokens = jax.random.randint(jax.random.key(1), (count, 5), 0, vocab)
    with jax.set_mesh(mesh):
        get = jax.jit(partial(vocabulary.rows, dtype=jnp.bfloat16))
        np.testing.assert_array_equal(
            get(on(mesh, table), tokens), table.astype(jnp.bfloat16)[tokens]
        )


def scores_and_gradients(mesh, arrays, chunk):
    def loss(hidden, head):
        found = logprobs.chunked(
            hidden,
            head,
            arrays["target"],
            arrays["scored"],
            temperature=0.7,
            chunk=chunk,
            proxy=0.1,
        )
        return (arrays["slope"] * found.logp).sum(), found

    with jax.set_mesh(mesh):
        both = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        return jax.tree.map(np.asarray, both(arrays["hidden"], on(mesh, arrays["head"])))


@pytest.mark.parametrize(
    ("sizes", "vocab", "rows"),
    [((1, 1, 1), 97, 3), ((1, 8, 1), 64, 8), ((1, 2, 4), 97, 3), ((2, 2, 2), 64, 8)],
)
def test_scores_are_the_same_on_every_mesh(sizes, vocab, rows):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    arrays = {
        "hidden": jax.random.normal(next(keys), (rows, 7, 8)),
        "head": jax.random.normal(next(keys), (vocab, 8)),
        "target": jax.random.randint(next(keys), (rows, 7), 0, vocab),
        "scored": jax.random.uniform(next(keys), (rows, 7)) < 0.7,
        "slope": jax.random.normal(next(keys), (rows, 7)),
    }
    want = scores_and_gradients(tiny.mesh_of(), arrays, 1000)
    got = scores_and_gradients(tiny.mesh_of(*sizes), arrays, 6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 2, 4)], ids=["fsdp-8", "tensor-4"])
def test_what_is_as_large_as_the_vocabulary_stays_at_home(sizes):
    """The gradient of head and embedding: no collective is as large as a tenth of a table."""
    mesh, shape = tiny.mesh_of(*sizes), tiny.shape(vocab_size=4096, num_layers=1)
    with jax.set_mesh(mesh):
        policy, params = tiny.policy(shape, mesh=mesh)
        batch = tiny.collator(shards=8)(tiny.rollout())
        inputs = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch.inputs)
        gradient = jax.jit(jax.grad(lambda p: policy(p, inputs).sum()))
        sent = hlo.collectives(gradient.lower(params).compile())
    assert sent
    assert max(s.size for s in sent) < 4096 * 64 / 10


def test_what_does_not_divide_is_said_and_the_vocabulary_finds_another_place():
    mesh = tiny.mesh_of(2, 2, 2)
    _, shapes = qwen2.graph(tiny.shape(vocab_size=97, num_heads=9, num_kv_heads=3, hidden_size=72))
    table = sharding.param_shardings(shapes, mesh)["embed_tokens"]["weight"]
    assert table.shard_shape((97, 72)) == (97, 18)
    said = sharding.left_whole(shapes, mesh)
    assert {line.split(":")[0] for line in said} == {
        f"layers/self_attn/{name}_proj/weight" for name in "qkvo"
    }
    assert "k_proj/weight: 3 does not divide over 2 (tensor)" in " ".join(said)
    assert sharding.left_whole(qwen2.graph(qwen2.PRESETS["Qwen2.5-7B"])[1], mesh) == []
