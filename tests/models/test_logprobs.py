"""Log-probs and tables of the vocabulary: the same numbers on every mesh, and what does not travel."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import families, logprobs, primitives, qwen2, sharding
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
        total = lambda table: primitives.rows(table, tokens, jnp.bfloat16).astype(jnp.float32).sum()
        gradient = jax.jit(jax.grad(total))(table)
    want = np.zeros((97, 8), np.float32)
    want[5] = 4096
    np.testing.assert_array_equal(gradient, want)


@meshes
@pytest.mark.parametrize(("vocab", "count"), [(96, 8), (97, 3), (16, 8), (15, 7)])
def test_rows_are_those_of_the_table(sizes, vocab, count):
    mesh = tiny.mesh_of(*sizes)
    table = jax.random.normal(jax.random.key(0), (vocab, 8))
    tokens = jax.random.randint(jax.random.key(1), (count, 5), 0, vocab)
    with jax.set_mesh(mesh):
        get = jax.jit(partial(primitives.rows, dtype=jnp.bfloat16))
        np.testing.assert_array_equal(
            get(on(mesh, table), tokens), table.astype(jnp.bfloat16)[tokens]
        )


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_ids_that_are_none_have_no_log_prob(sizes):
    """Neither they nor what stands beside them in a row: a batch made by hand is not learned from."""
    rows = [[1, 2, 96, 3], [-1, 4, 5], [5, 6, 7], [95, 0]]
    mesh = tiny.mesh_of(*sizes)
    with jax.set_mesh(mesh):
        policy, params = tiny.policy(mesh=mesh)
        inputs = jax.tree.map(jnp.asarray, logprobs.of_sequences(rows, 4, 4))
        found = np.asarray(jax.jit(policy)(params, inputs))
    assert np.array_equal(np.isnan(found).any(1), [True, True, False, False])
    assert (found[~inputs.scored] == 0).all()


TOP = logprobs.Top(5, 14)  # the ids of fewer words than some of the vocabularies have


def plain_scores(hidden, head, target, others, temperature, proxy):
    """From all logits at once."""
    logits = jnp.einsum("rcd,vd->rcv", hidden, head) / temperature
    logp = jax.nn.log_softmax(logits)
    likely = logits >= logits.max(-1, keepdims=True) + jnp.log(proxy)
    kept = jax.nn.logsumexp(logits, -1, where=likely)
    of_target = lambda x: jnp.take_along_axis(x, target[..., None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return logprobs.Scores(
        of_target(logp),
        entropy,
        of_target(jnp.where(likely, logits, logprobs.REMOVED)) - kept,
        jnp.take_along_axis(logp, others, -1),
        jax.lax.top_k(logp[..., : TOP.among], TOP.count)[::-1],
    )


@pytest.mark.parametrize(
    ("sizes", "vocab", "rows", "chunk", "temperature", "share"),
    [
        ((1, 1, 1), 31, 3, 1, 0.7, 0.4),
        ((1, 1, 1), 31, 3, 7, 1.0, 0.0),
        ((1, 1, 1), 31, 3, 1000, 0.7, 1.0),
        ((1, 8, 1), 64, 8, 6, 0.7, 0.7),
        ((1, 2, 4), 97, 3, 6, 0.7, 0.7),
        ((2, 2, 2), 64, 8, 6, 0.7, 0.7),
        ((1, 8, 1), 16, 8, 3, 0.7, 0.7),  # from here on fewer words than tokens
        ((1, 2, 4), 16, 3, 6, 0.7, 0.7),
        ((2, 2, 2), 15, 8, 3, 0.7, 0.7),
    ],
)
def test_chunked_scores_are_log_softmax(sizes, vocab, rows, chunk, temperature, share):
    """Values, those of the proxy, of other tokens and of the likeliest ones too, and gradients, on every mesh."""
    keys = jax.random.split(jax.random.key(0), 7)
    hidden = jax.random.normal(keys[0], (rows, 7, 8))
    head = jax.random.normal(keys[1], (vocab, 8))
    target = jax.random.randint(keys[2], (rows, 7), 0, vocab)
    scored = jax.random.uniform(keys[3], (rows, 7)) < share
    slope = jax.random.normal(keys[4], (rows, 7))
    others = jax.random.randint(keys[5], (rows, 7, 4), 0, vocab)
    slopes = jax.random.normal(keys[6], others.shape)
    how = {"others": others, "temperature": temperature, "proxy": 0.1}
    settings = logprobs.Settings(temperature, 0.1, TOP)

    def ours(hidden, head):
        found = logprobs.chunked(hidden, head, target, scored, settings, others=others, chunk=chunk)
        return (slope * found.logp).sum() + (slopes * found.others).sum(), found

    def plain(hidden, head):
        found = plain_scores(hidden, head, target, **how)
        only = lambda x: jnp.where(scored.reshape(scored.shape + (1,) * (x.ndim - 2)), x, 0)
        found = jax.tree.map(only, found)
        return (slope * found.logp).sum() + (slopes * found.others).sum(), found

    (_, want), want_grads = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, head)
    mesh = tiny.mesh_of(*sizes)
    with jax.set_mesh(mesh):
        both = jax.jit(jax.grad(ours, (0, 1), has_aux=True))
        got_grads, got = jax.tree.map(np.asarray, both(hidden, on(mesh, head)))
    for a, b in zip(*map(jax.tree.leaves, ((got, got_grads), (want, want_grads))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 2, 4)], ids=["fsdp-8", "tensor-4"])
def test_what_is_as_large_as_the_vocabulary_stays_at_home(sizes):
    """Of few tokens, for head and embedding: no collective is as large as a tenth of a table."""
    mesh, shape = tiny.mesh_of(*sizes), tiny.shape(vocab_size=4096, num_layers=1)
    with jax.set_mesh(mesh):
        policy, params = tiny.policy(shape, mesh=mesh)
        batch = tiny.collator(shards=8)(tiny.responses())
        inputs = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch.inputs)
        gradient = jax.jit(jax.grad(lambda p: policy(p, inputs).sum()))
        sent = hlo.collectives(gradient.lower(params).compile())
    assert sent
    assert max(s.size for s in sent) < 4096 * 64 / 10


def test_of_many_tokens_no_hidden_state_leaves_its_device():
    """With more tokens in a group than the table has rows, the table is gathered, its gradient summed."""
    mesh = tiny.mesh_of(1, 8, 1)
    table, tokens = jnp.ones((16, 64)), jnp.zeros((8, 32), jnp.int32)

    def total(table):
        states = primitives.rows(table, tokens, jnp.float32)
        return logprobs.chunked(states, table, tokens, tokens == 0).logp.sum()

    with jax.set_mesh(mesh):
        sent = hlo.collectives(jax.jit(jax.grad(total)).lower(on(mesh, table)).compile())
    assert max(s.size for s in sent) == table.size < 8 * 32 * 64


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
    assert sharding.left_whole(qwen2.graph(families.PRESETS["Qwen2.5-7B"])[1], mesh) == []
