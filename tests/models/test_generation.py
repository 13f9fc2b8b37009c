"""Generation with a cache computes what the training forward computes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import experts, families, int8, lora, primitives, qwen2, sharding
from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.policy import Policy, fewest_devices, mesh_of_copies
from jaxrl_llm.models.primitives import merge_params
from tests import tiny

# before JAX 0.12 a CPU computes with weights that are widened beforehand, in a scan
NARROW = UnrolledGenerator if jax.__version_info__ >= (0, 12) else ScannedGenerator
PROMPTS = ([5, 3, 9], [17], list(range(40, 57)), [1, 2, 3, 4, 5, 6, 7, 8])


def recomputed(definition, params, rows):
    """float32 logits `[L,V]` of each row, by the training forward."""
    longest = max(map(len, rows))
    tokens = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    positions = np.broadcast_to(np.arange(longest)[None], tokens.shape)

    @jax.jit
    def forward(params):
        model = nnx.merge(definition, params)
        hidden = model(jnp.asarray(tokens), jnp.asarray(positions))
        logits = jnp.einsum("rld,vd->rlv", hidden, model.head)
        return primitives.capped(logits, model.shape.logit_cap)

    return np.asarray(forward(params))


class Generation:
    """Prompts in the cache of a jitted model, one slot each."""

    def __init__(self, generator, params, prompts, *, columns, slots=None, length=32):
        self.params, self.generator = params, generator
        self.step = jax.jit(generator.decode)
        tokens = np.zeros((len(prompts), length), np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
        slots = list(range(len(prompts))) if slots is None else slots
        cache = generator.empty(max(slots) + 1, columns)
        lengths = jnp.asarray([*map(len, prompts)])
        filled = jax.jit(generator.prefill)(params, tokens, lengths)
        which = jnp.arange(len(prompts))
        self.cache = jax.jit(generator.insert)(cache, filled, jnp.asarray(slots), which)

    def logits(self, tokens, positions):
        tokens, positions = (jnp.asarray(x, jnp.int32) for x in (tokens, positions))
        logits, self.cache = self.step(self.params, self.cache, tokens, positions)
        return np.asarray(logits)

    def greedy(self, prompts, count):
        """`(logits [S,T,V], prompts and responses)`."""
        rows, steps = [list(p) for p in prompts], []
        for _ in range(count):
            logits = self.logits([r[-1] for r in rows], [len(r) - 1 for r in rows])
            steps.append(logits)
            for row, token in zip(rows, logits.argmax(-1), strict=True):
                row.append(int(token))
        return np.stack(steps, 1), rows


def model(shape=tiny.SHAPE):
    return qwen2.graph(shape)[0], tiny.policy(shape)[1]


def agree(definition, params, prompts, logits, rows):
    """Every step's logits are those of a full recomputation, and each token is their largest."""
    full = recomputed(definition, params, rows)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        expected = full[i, len(prompt) - 1 : len(row) - 1]
        np.testing.assert_allclose(logits[i], expected, atol=1e-4)
        assert row[len(prompt) :] == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("family", "block"), [*map(tiny.tiered, tiny.FAMILIES, itertools.cycle((8, 128)))]
)
def test_greedy_generation_is_a_full_recomputation(family, block):
    """Prompts shorter and longer than a window, 20 tokens each: the logits of every step, and the tokens."""
    definition, params = model(tiny.FAMILIES[family])
    generation = Generation(
        ScannedGenerator(definition, block, tiny.mesh_of()), params, PROMPTS, columns=40
    )
    agree(definition, params, PROMPTS, *generation.greedy(PROMPTS, 20))


SHARED = {
    "qwen2 of odd sizes": (4, 4),
    "gemma3": (8, 2),
    "gemma4": (8, 2),
    "qwen3_moe": (8, 4),
    "qwen3_5": (8, 2),
}  # devices, and of these to a copy of the weights


@pytest.mark.parametrize(
    "family",
    [
        (pytest.param if family in ("gemma4", "qwen2") else tiny.slow)(family)
        for family in tiny.FAMILIES
    ],
)
def test_unrolled_generation_is_a_full_recomputation(family, monkeypatch):
    """As on accelerators: out of a cache that grows, the weights on so many devices, or shared by some."""
    definition, params = model(tiny.FAMILIES[family])
    monkeypatch.setitem(experts.FEW, "cpu", experts.FEW["gpu"])
    devices, share = SHARED.get(family, (1, 1))
    trainers = tiny.mesh_of(1, devices, 1)
    params = jax.device_put(params, sharding.param_shardings(params, trainers))
    generator = UnrolledGenerator(definition, mesh_of_copies(trainers, share))
    prompts = PROMPTS * 2
    with jax.set_mesh(generator.mesh):
        weights = generator.weights(params)
        made = Generation(generator, weights, prompts, columns=24)
        first, rows = made.greedy(prompts, 6)
        made.cache = generator.grow(made.cache, 40)
        second, rows = made.greedy(rows, 8)
    agree(definition, params, prompts, np.concatenate([first, second], 1), rows)
    mlp = weights["layers"][0]["mlp"]
    for kept in jax.tree.leaves(made.cache):
        assert kept.addressable_shards[0].data.size * devices == kept.size
    mlp = mlp.get("experts", mlp)
    table = mlp["fused_down_proj" if "fused_down_proj" in mlp else "up_proj"]["weight"]
    assert table.sharding.shard_shape(table.shape)[0] == table.shape[0] // share


@pytest.mark.parametrize(
    ("name", "devices", "memory", "expected"),
    [
        ("Qwen2.5-3B", 16, 16, 1),
        ("Qwen2.5-7B", 16, 16, 4),
        ("Qwen2.5-7B", 8, 80, 1),
        ("Qwen2.5-32B", 32, 80, 2),
        ("Qwen2.5-72B", 4, 80, 4),
    ],
)
def test_a_copy_of_the_weights_leaves_room_for_the_cache(name, devices, memory, expected):
    """On so many devices of so many gigabytes, beside the trainer's state; as few as have room share it."""
    definition, _ = qwen2.graph(families.PRESETS[name], qwen2.Compute(dtype=jnp.bfloat16))
    mesh = AbstractMesh((1, devices, 1), sharding.AXES)
    assert fewest_devices(definition, mesh, memory * 10**9) == expected
    assert fewest_devices(definition, tiny.mesh_of(1, 8, 1)) == 1  # which report no memory


def test_devices_that_cannot_share_evenly_are_an_error():
    with pytest.raises(UserError, match="devices_a_copy = 3 does not divide the 8 devices"):
        mesh_of_copies(tiny.mesh_of(2, 4, 1), 3)


def test_a_slot_out_of_range_gets_nothing():
    definition, params = model()
    generator = ScannedGenerator(definition, 8, tiny.mesh_of())
    ones = lambda *shape: jnp.ones(shape, jnp.int32)
    [filled] = generator.prefill(params, ones(2, 8), ones(2))
    slots = jnp.asarray([2, 3]), jnp.asarray([1, 0])
    [out] = generator.insert(generator.empty(3, 16), [filled], *slots)
    assert not np.asarray(out.k[:, :, :2]).any()
    assert np.array_equal(out.v[:, 0, 2], filled.v[:, 0, 1])
    assert np.asarray(out.k[:, 0, 2]).all()
    generator = UnrolledGenerator(definition, tiny.mesh_of(4, 1, 2))
    with jax.set_mesh(generator.mesh):
        filled = jax.jit(generator.prefill)(generator.weights(params), ones(4, 8), ones(4))
        cache = generator.empty(8, 16)
        out = jax.jit(generator.insert)(cache, filled, jnp.asarray([6, 8]), jnp.asarray([1, 0]))
    for layer, source in zip(out, filled, strict=True):
        assert not np.delete(np.asarray(layer.k), 6, 0).any()
        assert np.array_equal(layer.v[6, :, :8], source.v[1])
        assert not np.asarray(layer.v[6, :, 8:]).any()


def test_a_copy_of_the_weights_is_compiled_once():
    """Every push makes one: on accelerators, with the layers apart, that is a program of seconds."""
    definition, params = model()
    mesh = tiny.mesh_of(1, 1, 1)
    with jax.set_mesh(mesh):
        UnrolledGenerator(definition, mesh).weights(params)
        with tiny.compilations() as compiled:
            UnrolledGenerator(definition, mesh).weights(params)
    assert compiled == []


def test_weights_are_the_same_arrays_where_the_precision_is_the_same():
    definition, params = model()
    same = ScannedGenerator(definition, 8, tiny.mesh_of()).weights(params)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (same, params)), strict=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        (tiny.SHAPE, jnp.float32, ScannedGenerator),
        (families.PRESETS["Qwen2.5-0.5B"], jnp.float32, UnrolledGenerator),
        (families.PRESETS["Qwen2.5-0.5B"], jnp.bfloat16, NARROW),
    ],
)
def test_on_a_cpu_small_layers_are_scanned_and_large_ones_are_apart(shape, dtype, kind):
    """A scan copies each for every token, which took a third of one of Qwen2.5-0.5B."""
    policy = Policy(qwen2.graph(shape, qwen2.Compute(dtype=dtype))[0])
    assert type(policy.generator(tiny.mesh_of(), block=8)) is kind


def test_on_a_cpu_bfloat16_weights_are_widened_once_where_xla_would_at_every_use():
    _, params = model()
    dtype = jnp.bfloat16 if jax.__version_info__ >= (0, 12) else jnp.float32
    definition = qwen2.graph(tiny.SHAPE, qwen2.Compute(dtype=jnp.bfloat16))[0]
    generator = Policy(definition).generator(tiny.mesh_of(), block=8)
    rounded = generator.weights(params)
    exact = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16).astype(dtype), params)
    for a, b in zip(*map(jax.tree.leaves, (rounded, exact)), strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b)
    at = [p[-1] for p in PROMPTS], [len(p) - 1 for p in PROMPTS]
    found = Generation(generator, rounded, PROMPTS, columns=40).logits(*at)
    wide = qwen2.graph(tiny.SHAPE, qwen2.Compute(dtype=dtype))[0]
    same = Generation(ScannedGenerator(wide, 8, tiny.mesh_of()), exact, PROMPTS, columns=40)
    np.testing.assert_array_equal(found, same.logits(*at))


def test_half_precision_stays_near_full():
    """bfloat16 with its cache: logits within rounding of the float32 model's."""
    _, params = model()
    definition = qwen2.graph(tiny.SHAPE, qwen2.Compute(dtype=jnp.bfloat16))[0]
    at = [p[-1] for p in PROMPTS], [len(p) - 1 for p in PROMPTS]
    with jax.set_mesh(mesh := tiny.mesh_of(1, 1, 1)):
        generator = UnrolledGenerator(definition, mesh)
        half = Generation(generator, generator.weights(params), PROMPTS, columns=40)
        assert {x.dtype for x in jax.tree.leaves(half.cache)} == {jnp.dtype(jnp.bfloat16)}
        found = half.logits(*at)
    full = Generation(ScannedGenerator(model()[0], 8, tiny.mesh_of()), params, PROMPTS, columns=40)
    exact = full.logits(*at)
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("kind", [ScannedGenerator, UnrolledGenerator])
@pytest.mark.parametrize("base", ["compute", "int8"])
def test_what_adapters_add_is_not_rounded_away_in_half_precision(base, kind, monkeypatch):
    """Merged, most of a young adapter's would be less than half of a weight's last digit."""
    one = qwen2.Lora(rank=4, alpha=8.0, base=base)
    shape = dataclasses.replace(tiny.SHAPE, lora=one)
    _, params = tiny.policy(shape, seed=1)
    size = 0 if kind is UnrolledGenerator else 2**40
    monkeypatch.setattr("jaxrl_llm.models.policy.APART", size)
    monkeypatch.setattr("jaxrl_llm.models.policy.jax.__version_info__", (0, 12))
    policy = Policy(qwen2.graph(shape, qwen2.Compute(dtype=jnp.bfloat16))[0])
    params = jax.device_put(params, sharding.param_shardings(params, tiny.mesh_of()))
    keep, half = lora.base_quantizer(shape), lambda x: x.astype(jnp.bfloat16)
    frozen = jax.tree_util.tree_map_with_path(keep, lora.base_of(jax.tree.map(half, params)))
    generator = policy.generator(tiny.mesh_of(), block=8)
    assert type(generator) is kind

    def sampled_with(scale):
        """The engine's weights, where each number of the adapters' second factor has this size."""
        signs = lambda x: scale * jnp.sign(x)
        added = jax.tree_util.tree_map_with_path(
            lambda path, x: signs(x) if "lora_B" in str(path) else x, lora.adapters(params)
        )
        whole = merge_params(added, frozen)
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), int8.dequantize(whole, jnp.float32))
        return generator.weights(whole), lora.merged(wide, one)

    def up(weights):
        """The product that the first layer's `up_proj` is, in float64."""
        layers = weights["layers"]
        leaf = layers[0] if isinstance(layers, list) else jax.tree.map(lambda x: x[0], layers)
        leaf = jax.tree.map(lambda x: np.asarray(x, np.float64), leaf["mlp"]["up_proj"])
        if "lora_A" not in leaf:
            return leaf["weight"]
        return leaf["weight"] + one.scale * leaf["lora_B"]["weight"] @ leaf["lora_A"]["weight"]

    (none, _), (young, exact) = sampled_with(0.0), sampled_with(1e-5)
    added, expected = up(young) - up(none), up(exact) - up(sampled_with(0.0)[1])
    assert np.linalg.norm(added - expected) < 0.02 * np.linalg.norm(expected)

    # and it is computed with
    at = [p[-1] for p in PROMPTS], [len(p) - 1 for p in PROMPTS]
    weights, exact = sampled_with(0.3)
    with jax.set_mesh(tiny.mesh_of(1, 1, 1)):
        found = Generation(generator, weights, PROMPTS, columns=40).logits(*at)
        plain = Generation(generator, none, PROMPTS, columns=40).logits(*at)
    definition, _ = model()
    full = Generation(ScannedGenerator(definition, 8, tiny.mesh_of()), exact, PROMPTS, columns=40)
    expected = full.logits(*at)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert np.abs(plain - expected).max() > 0.2 * np.abs(expected).max()
