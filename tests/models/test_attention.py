"""The kernels of the accelerators: which is taken, what it computes, and that their compilers take it."""

import re
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import attention, sharding
from jaxrl_llm.planning.machines import compiling_for, machine
from tests import tiny

SPEC = P(sharding.BATCH, None, "tensor", None)


def slopes(attend, q, k, v, segments, weight):
    """Weighted values, and their gradients; padding (segment 0) does not count."""

    def loss(q, k, v):
        out = attend(q, k, v, segments).astype(jnp.float32) * weight
        return (
            out if segments is None else jnp.where((segments > 0)[..., None, None], out, 0.0)
        ).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def inputs(length, heads=4, kv_heads=2, size=16, rows=4):
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        rng.normal(size=(rows, length, n, size)).astype(np.float32)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    ends = np.sort(rng.choice(length, (rows, 3), replace=True), 1)
    column = np.arange(length)
    segments = 1 + sum((column >= end[:, None]).astype(np.int32) for end in ends.T)
    return q, k, v, np.where(segments == 4, 0, segments), weight


KERNELS = [
    (kernel, packed, (2, 1, tensor), {"length": length})
    for kernel, length in ((attention.splash, 601), (attention.triton, 131))
    for packed, tensor in ((False, 4), (True, 1), (True, 4))
]
WHOLE = (attention.triton, True, (1, 2, 2), {"length": 40, "heads": 3, "kv_heads": 1})


@pytest.mark.parametrize(("kernel", "packed", "sizes", "shape"), [*KERNELS, WHOLE])
def test_a_kernel_agrees_with_plain_xla(kernel, packed, sizes, shape):
    """Values and gradients: an odd length of several blocks, more devices than key heads, heads left whole."""
    q, k, v, segments, weight = inputs(**shape)
    segments = segments if packed else None
    expected = jax.jit(partial(slopes, attention.xla))(q, k, v, segments, weight)
    with jax.set_mesh(tiny.mesh_of(*sizes)):
        got = jax.jit(partial(slopes, partial(kernel, interpret=True)))(q, k, v, segments, weight)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 128, 300, 512, 513, 1100, 4496, 32_768])
def test_splash_blocks(length):
    """Multiples of 128 that do not pad a row by more than one of 512 would."""
    block = attention._splash_block(length)
    assert block % 128 == 0
    assert 128 <= block <= 1024
    assert -(-length // block) * block <= max(block, -(-length // 512) * 512)


@pytest.mark.parametrize(
    ("platform", "expected"), [("gpu", "gpu"), ("tpu", "splash"), ("cpu", "xla")]
)
@pytest.mark.parametrize("default", ["cpu", "gpu"])
def test_the_devices_of_the_mesh_choose(platform, expected, default, monkeypatch):
    """Whatever is the default here: a CPU's mesh on a machine with a GPU, a GPU's mesh on one without."""
    taken = []
    for name in ("gpu", "splash", "xla"):
        kernel = lambda q, k, v, segments, window, name=name: taken.append(name) or q
        monkeypatch.setattr(attention, name, kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: default)
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = AbstractMesh((1, 1, 1), sharding.AXES, abstract_device=device)
    q, k, v = map(jnp.asarray, inputs(8)[:3])
    with jax.sharding.use_abstract_mesh(mesh):
        attention.for_platform(q, k, v, None)
    attention.for_platform(q, k, v, None)
    assert taken == [expected, {"cpu": "xla", "gpu": "gpu"}[default]]


@pytest.mark.parametrize(
    ("capability", "expected"), [("7.5", "xla"), ("8.0", "gpu"), ("12.0", "gpu")]
)
def test_gpus_without_kernels_go_by_xla(capability, expected, monkeypatch, caplog):
    """Before Ampere neither Triton nor cuDNN takes them; it is said once, by a device that is there or is not."""
    taken = []
    for name in ("gpu", "xla"):
        kernel = lambda q, k, v, segments, window, name=name: taken.append(name) or q
        monkeypatch.setattr(attention, name, kernel)
    attention._say_plain.cache_clear()
    kind = jax.sharding.AbstractDevice(device_kind="Some GPU", num_cores=1, platform="gpu")
    mesh = AbstractMesh((1, 1, 1), sharding.AXES, abstract_device=kind)
    device = SimpleNamespace(device_kind="Some GPU", platform="gpu", compute_capability=capability)
    q, k, v = map(jnp.asarray, inputs(8)[:3])
    with jax.sharding.use_abstract_mesh(mesh):
        monkeypatch.setattr(jax, "devices", lambda: [device])
        attention.for_platform(q, k, v, None)
        monkeypatch.setattr(jax, "devices", list)
        token = sharding.ELSEWHERE.set(device)
        attention.for_platform(q, k, v, None)
        sharding.ELSEWHERE.reset(token)
        attention.for_platform(q, k, v, None)  # of which nothing is known
    assert taken == [expected, expected, "gpu"]
    assert len(caplog.records) == (expected == "xla")


@pytest.mark.parametrize(("platform", "blocks"), [("cpu", (8, 8, 8)), ("gpu", (1, 4, 8))])
def test_plain_attention_has_few_shapes_on_gpus(platform, blocks, monkeypatch):
    """Where XLA tunes each for seconds; but not within a window, where small blocks save work."""
    monkeypatch.setattr(attention, "platform", lambda: platform)
    for (length, window), count in zip(
        ((1024, None), (4496, None), (1024, 64)), blocks, strict=True
    ):
        shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), "float32") for heads in (4, 2, 2)]
        traced = jax.make_jaxpr(partial(attention.xla, segments=None, window=window))(*shapes)
        assert str(traced).count("dot_general[") == 2 * count


def test_plain_attention_is_the_same_in_any_blocks(monkeypatch):
    q, k, v, segments = map(jnp.asarray, inputs(300)[:4])
    seen = (segments > 0)[..., None, None]  # padding sees what it likes
    found = attention.xla(q, k, v, segments) * seen
    monkeypatch.setattr(attention, "platform", lambda: "gpu")
    whole = attention.xla(q, k, v, segments) * seen
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


def squares(text, length):
    """Types with two dimensions of that length, as it is or padded."""
    lengths = {length, length + length % 2, -(-length // 128) * 128}
    found = set(re.findall(r"(?:tensor<|\w+\[)([\dx,]+)", text))
    return [name for name in found if sum(int(n) in lengths for n in re.findall(r"\d+", name)) > 1]


def program(attend, mesh, length, packed):
    """Traced for a mesh: values and gradients of bfloat16 rows, 8 heads on 2 of keys."""

    def like(*shape, dtype="bfloat16"):
        where = NamedSharding(mesh, sharding.fit(SPEC, shape, mesh))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    q, k = like(4, length, 8, 64), like(4, length, 2, 64)
    segments = like(4, length, dtype="int32") if packed else None
    step = partial(slopes, attend)
    return jax.jit(step).trace(q, k, k, segments, jax.ShapeDtypeStruct((), "float32"))


def test_a_square_is_seen():
    mesh = tiny.mesh_of()
    q, k, v, segments, weight = inputs(64)
    with jax.set_mesh(mesh):
        text = jax.jit(partial(slopes, attention.xla)).lower(q, k, v, segments, weight).as_text()
    assert squares(text, 64)


@pytest.fixture
def hopper(monkeypatch):
    """Newer JAX asks which GPU it lowers for: an H100, where the devices are a CPU's."""
    if find_spec("jax._src.pallas.triton.gpu_info"):
        info = import_module("jax._src.pallas.triton.gpu_info")
        h100 = info.get_gpu_info_from_version(info.GpuVersion.H100)
        monkeypatch.setitem(info.registry, "cpu", lambda: h100)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("length", [383, 384])
def test_it_is_lowered_for_nvidia(length, packed, tensor):
    """cuDNN for padded rows, Triton for packed ones, and no array of length x length."""
    mesh = tiny.mesh_of(1, 2, tensor)
    with compiling_for(mesh):
        lowered = program(attention.gpu, mesh, length, packed).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    kernels = set(re.findall(r"custom_call @([\w$.]+)", text)) - {"Sharding"}
    cudnn = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert kernels == ({"__gpu$xla.gpu.triton"} if packed else cudnn)
    assert not squares(text, length)


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["h100x8", "rtx5090x8", "t4x8", "v5e-8"])
def test_the_compiler_of_an_accelerator_takes_it(name, packed, tensor):
    """Its own kernels (a T4 has none) and no length x length; of attention keys' gradients alone travel."""
    try:
        devices = list(machine(name).devices)
    except UserError as error:
        pytest.skip(str(error))
    mesh = sharding.make_mesh(1, 8 // tensor, tensor, devices=devices)
    with compiling_for(mesh):
        compiled = program(attention.for_platform, mesh, 601, packed).lower().compile()
    text = str(compiled.as_text())
    nvidia = "__gpu$xla.gpu.triton" if packed else "__cudnn$fmha"
    expected = {"v5e-8": ["tpu_custom_call"], "t4x8": []}.get(name, [nvidia])
    known = ("tpu_custom_call", "__gpu$xla.gpu.triton", "__cudnn$fmha")
    assert [x for x in known if f'custom_call_target="{x}' in text] == expected
    assert bool(squares(text, 601)) == (not expected)  # plain attention has blocks of 1,024
    if tensor == 1:
        assert not re.findall(r"all-gather|all-to-all|collective-permute|reduce-scatter", text)


@pytest.mark.parametrize(
    ("size", "window", "packed"),
    [(256, None, False), (36, None, False), (256, 9, True), (16, 9, True)],
)
def test_what_the_kernels_of_gpus_lack_goes_by_xla(size, window, packed):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 24, h, size)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray(np.repeat([[1, 2, 3]], 8, 1).repeat(2, 0)) if packed else None
    found = attention.gpu(q, k, v, segments, window=window)
    assert np.array_equal(found, attention.xla(q, k, v, segments, window=window))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_a_window_hides_what_is_further_back(window, packed):
    """Against scores written out in full; the kernel of TPUs in its interpreter."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 130, h, 16)), jnp.float32) for h in (4, 2, 2))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (2, 130)), 1)) if packed else None
    behind = np.arange(130)[:, None] - np.arange(130)[None]
    seen = (behind >= 0) & (behind < window)
    seen = np.broadcast_to(seen, (2, 130, 130))
    if segments is not None:
        seen = seen & np.asarray(segments[:, :, None] == segments[:, None])
    wide = [np.repeat(x, 2, 2) for x in (k, v)]
    scores = np.einsum("rqhd,rkhd->rhqk", q, wide[0]) / 4 + np.where(seen, 0, -1e30)[:, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("rhqk,rkhd->rqhd", weights / weights.sum(-1, keepdims=True), wide[1])
    np.testing.assert_allclose(attention.xla(q, k, v, segments, window=window), want, atol=2e-5)
    found = attention.splash(q, k, v, segments, window=window, interpret=True)
    np.testing.assert_allclose(found, want, atol=2e-5)
