"""The decoder and its log-probs: causal, blind to padding and packing, the same on every attention backend."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxrl_llm.learning import update
from jaxrl_llm.models import attention, families, primitives, qwen2, sharding
from tests import tiny

CPU = Path("/proc/cpuinfo")
MULTIPLIES_BFLOAT16 = CPU.exists() and "avx512_bf16" in CPU.read_text()
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen2.5-7B-Instruct-1M": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "SmolLM2-135M": 134_515_008,
    "gemma-3-1b-it": 999_885_952,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_have_the_published_number_of_parameters(name):
    _, shapes = qwen2.graph(families.PRESETS[name])
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name]
    sharding.param_shardings(shapes, tiny.mesh_of(2, 2, 2))


@cache
def score(family):
    """The log-probs of a random model, compiled once for each shape of batch."""
    policy, params = tiny.policy(tiny.FAMILIES[family])
    return partial(update.make_score(policy), params)


def scored(responses, family, **how):
    batch = tiny.collator(**how)(responses)
    return np.asarray(batch.layout.to_rows(score(family)(batch.inputs)))


@pytest.mark.parametrize("family", [*map(tiny.tiered, tiny.FAMILIES)])
@pytest.mark.parametrize("how", [{}, {"pack": True}], ids=["padded", "packed"])
def test_future_tokens_do_not_matter(how, family):
    """Changing token t leaves every log-prob before t as it was, bit for bit; so do other rows.

    With experts to rounding: a token is multiplied beside others of its expert.
    """
    responses = tiny.responses(5)
    near = partial(np.allclose, rtol=0, atol=1e-5 if tiny.FAMILIES[family].mixture else 0)
    base = scored(responses, family, **how)
    for row, t in ((0, 0), (1, len(responses[1].tokens) - 1), (4, 3)):
        tokens = list(responses[row].tokens)
        t = min(t, len(tokens) - 1)
        tokens[t] = (tokens[t] + 1) % 96
        other = replace(responses[row], tokens=tokens)
        changed = scored([*responses[:row], other, *responses[row + 1 :]], family, **how)
        assert near(changed[row, :t], base[row, :t])
        assert not near(changed[row, t:], base[row, t:])
        others = np.arange(len(base)) != row
        assert near(changed[others], base[others])


@pytest.mark.parametrize("family", [*map(tiny.tiered, tiny.FAMILIES)])
def test_packed_is_padded(family):
    responses = tiny.responses(5)
    padded, packed = scored(responses, family), scored(responses, family, pack=True)
    for i, one in enumerate(responses):
        n = len(one.tokens)
        np.testing.assert_allclose(padded[i, :n], packed[i, :n], atol=1e-5)


@pytest.mark.parametrize("family", [*map(tiny.tiered, tiny.SHARING)])
def test_a_shared_prompt_changes_no_log_prob(family):
    responses = tiny.sharing(5, rows=12)
    padded, shared = (
        scored(responses, family),
        scored(responses, family, pack=True, share_prompts=True),
    )
    for i, one in enumerate(responses):
        n = len(one.tokens)
        np.testing.assert_allclose(padded[i, :n], shared[i, :n], atol=1e-5)


def test_remat_changes_nothing():
    batch = tiny.collator()(tiny.responses(9))
    inputs = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch.inputs)
    some = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    results = []
    for remat in (None, jax.checkpoint, some):
        policy, params = tiny.policy(remat=remat)
        results.append(jax.jit(jax.grad(lambda p, f=policy: f(p, inputs).sum()))(params))
    for a, b, c in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
        np.testing.assert_allclose(a, c, atol=1e-4)


@pytest.mark.parametrize("pack", [tiny.slow(False), True])
def test_a_token_scores_the_same_whoever_else_is_scored(pack):
    policy, params = tiny.policy()
    batch = tiny.collator(pack=pack)(tiny.responses(12))
    inputs = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch.inputs)
    everyone = policy(params, inputs)
    some = inputs.scored & (jax.random.uniform(jax.random.key(0), inputs.scored.shape) < 0.4)
    np.testing.assert_allclose(
        policy(params, inputs._replace(scored=some)), jnp.where(some, everyone, 0), atol=1e-5
    )


def products(jaxpr):
    """Every product of matrices in a program, those of the programs within it among them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float32_is_multiplied_whole_on_every_device_and_half_precision_as_the_device_likes(dtype):
    policy, params = tiny.policy(dtype=dtype, attend=attention.xla)
    inputs = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), tiny.collator()(tiny.responses(5)).inputs)
    program = jax.make_jaxpr(jax.grad(lambda p: policy(p, inputs).sum()))(params)
    found = [*products(program.jaxpr)]
    assert len(found) > 20
    for equation in found:
        whole = {x.aval.dtype for x in equation.invars} == {jnp.dtype("float32")}
        assert (equation.params["precision"] is not None) == whole, equation
        assert whole == (dtype == jnp.float32), equation


@pytest.mark.parametrize("make", [
    lambda: qwen2.Linear((4, 16), (64,), bias=True, rngs=nnx.Rngs(0)),
    lambda: qwen2.RMSNorm(64, eps=1e-6),
], ids=["bias", "norm"])  # fmt: skip
def test_what_all_tokens_share_adds_up_its_gradients_in_float32(make):
    """Of 16,384 tokens whose gradients nearly cancel; in bfloat16 the sum is off by a tenth."""
    layer = make()
    definition, weights = nnx.split(layer)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 4096, 64)), jnp.bfloat16)
    out = layer(x)
    sent = jnp.asarray(rng.normal(size=out.shape), jnp.bfloat16)
    total = lambda weights: (nnx.merge(definition, weights)(x) * sent).astype(jnp.float32).sum()
    gradient = jax.jit(jax.grad(total))(weights)
    if isinstance(layer, qwen2.Linear):
        found, want = gradient.bias[...], np.sum(np.asarray(sent, np.float64), (0, 1))
    else:
        wide = np.asarray(x, np.float64)
        normed = jnp.asarray(wide / np.sqrt(np.mean(wide**2, -1, keepdims=True)), jnp.bfloat16)
        products = np.asarray(normed * sent, np.float64)  # as the model rounds them
        found, want = gradient.weight[...], products.sum((0, 1))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("contracted", [1, 2])
@pytest.mark.parametrize("out", [(2,), (3, 8)])
def test_a_product_has_the_gradients_of_its_sum(contracted, out):
    """On a CPU its backward pass is our own, in one order or the other by the weight's sides."""
    into = (3, 4)[-contracted:]
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 6, *into), (*out, *into)))
    slope = jnp.asarray(rng.normal(size=(5, 6, *out)), jnp.float32)
    axes = "ab"[:contracted], "cd"[: len(out)]

    def summed(x, w):
        return jnp.einsum(f"rl{axes[0]},{axes[1]}{axes[0]}->rl{axes[1]}", x, w)

    ours, back = jax.vjp(lambda x, w: primitives.product(x, w, contracted), x, w)
    theirs, back_of_sum = jax.vjp(summed, x, w)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(back(slope), back_of_sum(slope), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_rows_are_summed_one_product_at_a_time(rows, lead):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(*lead, rows, n)), jnp.float32) for n in (4, 5))
    want = jnp.einsum("...ni,...nj->...ij", a, b)
    np.testing.assert_allclose(primitives.summed(a, b), want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12) or not MULTIPLIES_BFLOAT16,
    reason="products of bfloat16 are of float32 here",
)
def test_in_bfloat16_all_products_of_a_backward_pass_are():
    """One over the first axis of both would be of float32, or be made number by number."""
    shape = replace(tiny.SHAPE, num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2)
    _, params = tiny.policy(shape)
    model = lambda p: qwen2.nnx.merge(qwen2.graph(shape, qwen2.Compute(dtype=jnp.bfloat16))[0], p)
    tokens = jnp.zeros((2, 64), jnp.int32)
    loss = lambda p: model(p)(tokens, jnp.broadcast_to(jnp.arange(64), (2, 64))).sum()
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    products = [line for line in text.splitlines() if " dot(" in line]
    of_weights = [line for line in products if "rkgqd,rkld->rkgql" not in line]
    assert len(of_weights) > 15
    for line in of_weights:
        kind, rank = re.search(r"= (\w+)\[([\d,]*)\]", line).groups()
        [last] = re.findall(r"lhs_contracting_dims=\{(\d+)\}", line)
        assert kind == "bf16", line
        assert int(last) == rank.count(","), line
