"""Checkpoints in and out."""

import json
import pathlib
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, qwen2, sharding
from tests import tiny
from tests.reference import peer

HERE = pathlib.Path(__file__).parent


def written(folder, shape=tiny.SHAPE, **how):
    _, params = tiny.policy(shape)
    hf.export(params, shape, folder, **how)
    return params


def loaded(folder, sizes=(1, 1, 1), dtype=None):
    shape = hf.load_shape(folder)
    _, shapes = qwen2.graph(shape)
    return hf.load(folder, shape, sharding.param_shardings(shapes, tiny.mesh_of(*sizes)), dtype)


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


SHAPES = [
    tiny.SHAPE,
    tiny.shape(tied=False),
    tiny.shape(vocab_size=97, hidden_size=72, num_heads=9, num_kv_heads=3),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2), (2, 2, 2)])
@pytest.mark.parametrize("shard_bytes", [10_000, 2**30])
def test_export_then_load_is_the_identity(tmp_path, shape, sizes, shard_bytes):
    params = written(tmp_path / "m", shape, shard_bytes=shard_bytes)
    assert hf.load_shape(tmp_path / "m") == shape
    assert equal(loaded(tmp_path / "m", sizes), params)
    assert (tmp_path / "m" / hf.INDEX).exists() == (shard_bytes < 2**30)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)])
def test_load_then_export_gives_back_every_tensor(tmp_path, sizes):
    written(tmp_path / "a", dtype=jnp.bfloat16)
    hf.export(loaded(tmp_path / "a", sizes), tiny.SHAPE, tmp_path / "b", source=tmp_path / "a")
    one = safetensors.numpy.load_file(tmp_path / "a" / hf.SINGLE)
    other = safetensors.numpy.load_file(tmp_path / "b" / hf.SINGLE)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype == ml_dtypes.bfloat16
        assert np.array_equal(tensor, other[name])


def test_every_device_reads_only_its_slice(tmp_path, monkeypatch):
    """No host buffer is larger than what one device holds of the largest parameter."""
    written(tmp_path / "m")
    largest = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *a, **k: largest.append(empty(*a, **k)) or largest[-1])
    params = loaded(tmp_path / "m", (1, 4, 2))
    shard = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert max(x.nbytes for x in largest) <= shard


def test_dtype_on_load(tmp_path):
    written(tmp_path / "m", dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(loaded(tmp_path / "m"))} == {jnp.dtype(jnp.bfloat16)}
    wide = loaded(tmp_path / "m", dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}


def test_tokenizer_files_travel(tmp_path):
    params = written(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    hf.export(params, tiny.SHAPE, tmp_path / "b", source=tmp_path / "a")
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"


def change(folder, edit):
    tensors = safetensors.numpy.load_file(folder / hf.SINGLE)
    edit(tensors)
    safetensors.numpy.save_file(tensors, folder / hf.SINGLE)


def cut(folder):
    path = folder / hf.SINGLE
    path.write_bytes(path.read_bytes()[:-1000])


def config(**values):
    def edit(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f, lambda t: t.pop(BIAS)), f"no tensor {BIAS}"),
        (lambda f: change(f, lambda t: t.update(x=np.zeros(1))), "1 tensors too many, first x"),
        (
            lambda f: change(f, lambda t: t.update({BIAS: np.zeros(3, np.float32)})),
            f"{BIAS} has shape (3,), config.json asks for (64,)",
        ),
        (cut, "damaged or cut short"),
        (lambda f: (f / hf.SINGLE).unlink(), "only safetensors are read"),
        (lambda f: (f / "config.json").unlink(), "is not a model folder"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (config(model_type="llama"), "model_type 'llama' is not supported"),
        (config(use_sliding_window=True), "use_sliding_window is not supported"),
        (config(hidden_act="gelu"), "hidden_act 'gelu'"),
        (config(rope_parameters={"rope_type": "yarn"}), "rope type 'yarn'"),
        (config(rope_scaling={"type": "linear"}), "rope type 'linear'"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, damage, message):
    folder = tmp_path / "m"
    written(folder)
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        loaded(folder)
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(tmp_path):
    written(tmp_path / "m", shard_bytes=10_000)
    first = sorted((tmp_path / "m").glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(UserError, match=first.name):
        loaded(tmp_path / "m")


def test_unknown_places_are_refused(tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        hf.resolve(tmp_path / "nowhere")


def test_export_does_not_overwrite(tmp_path):
    params = written(tmp_path / "m")
    with pytest.raises(UserError, match="is not empty"):
        hf.export(params, tiny.SHAPE, tmp_path / "m")


def test_who_may_read_the_config_may_read_the_weights(tmp_path):
    written(tmp_path / "m")
    modes = {(tmp_path / "m" / name).stat().st_mode for name in (hf.SINGLE, "config.json")}
    assert len(modes) == 1


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        said = "Error while serializing: I/O error: No space left on device (os error 28)"
        raise safetensors.SafetensorError(said)

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(UserError, match=r"cannot export to.*No space left.*nothing is left"):
        written(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def reference_logits(folder, tokens):
    """Logits of transformers in PyTorch, float32, computed in an environment of their own."""
    np.save(folder / "tokens.npy", tokens)
    peer.transformers("logits", folder)
    return np.load(folder / "logits.npy")


def our_logits(folder, tokens):
    shape = hf.load_shape(folder)
    definition, _ = qwen2.graph(shape)
    model = jax.jit(lambda p, t, at: logits(definition, p, t, at))
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model(loaded(folder), jnp.asarray(tokens), jnp.asarray(positions)))


def logits(definition, params, tokens, positions):
    model = qwen2.nnx.merge(definition, params)
    return jnp.einsum("rld,vd->rlv", model(tokens, positions), model.head)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(tmp_path, shape):
    written(tmp_path / "m", shape)
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, (3, 40))
    want = reference_logits(tmp_path / "m", tokens)
    np.testing.assert_allclose(our_logits(tmp_path / "m", tokens), want, atol=1e-4)


def test_a_real_model(tmp_path):
    """A pretrained 135M model: logits to 1e-3, and load then export gives back every tensor."""
    source = peer.real_model(tmp_path / "source")
    tokens = np.random.default_rng(0).integers(0, hf.load_shape(source).vocab_size, (2, 64))
    difference = np.abs(our_logits(source, tokens) - reference_logits(source, tokens)).max()
    print(f"max abs difference of logits {difference:.2e}")
    assert difference <= 1e-3
    hf.export(loaded(source, (1, 4, 2)), hf.load_shape(source), tmp_path / "out", source=source)
    one = safetensors.numpy.load_file(source / hf.SINGLE)
    other = safetensors.numpy.load_file(tmp_path / "out" / hf.SINGLE)
    assert one.keys() == other.keys()
    assert all(np.array_equal(x, other[name]) for name, x in one.items())
