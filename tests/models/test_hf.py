"""Checkpoints in and out."""

import dataclasses
import json
import pathlib
import random
import re
import subprocess

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub.utils import filter_repo_objects

from jaxrl_llm import storage
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, qwen2, tokenizer
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.training import run, terminal
from tests import tiny
from tests.reference import peer
from tests.training import quick

HERE = pathlib.Path(__file__).parent


def written(folder, shape=tiny.SHAPE, **how):
    _, params = tiny.policy(shape)
    hf.export(params, shape, folder, **how)
    return params


def loaded(folder, sizes=(1, 1, 1), dtype=None):
    return hf.load(folder, hf.load_shape(folder), tiny.mesh_of(*sizes), dtype)


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("shape", tiny.FAMILIES.values(), ids=tiny.FAMILIES)
@pytest.mark.parametrize(("sizes", "shard_bytes"), [((1, 1, 1), 2**30), ((2, 2, 2), 10_000)])
def test_export_then_load_is_the_identity(tmp_path, shape, sizes, shard_bytes):
    params = written(tmp_path / "m", shape, shard_bytes=shard_bytes)
    assert hf.load_shape(tmp_path / "m") == shape
    assert equal(loaded(tmp_path / "m", sizes), params)
    assert (tmp_path / "m" / hf.INDEX).exists() == (shard_bytes < 2**30)


def test_half_precision_is_exported_loaded_and_widened(tmp_path):
    params = written(tmp_path / "m", dtype=jnp.bfloat16)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert equal(loaded(tmp_path / "m"), half)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    assert equal(loaded(tmp_path / "m", dtype=jnp.float32), wide)


def test_every_device_reads_only_its_slice(tmp_path, monkeypatch):
    """No host buffer is larger than what one device holds of the largest parameter."""
    written(tmp_path / "m")
    largest = []
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *a, **k: largest.append(empty(*a, **k)) or largest[-1])
    params = loaded(tmp_path / "m", (1, 4, 2))
    shard = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    assert max(x.nbytes for x in largest) <= shard


OTHERS = {  # tensors that are not read of a model with parts for images
    "qwen3_5_text": ("model.visual.blocks.0.norm1.weight", "mtp.fc.weight"),
    "gemma4_text": (
        "model.vision_tower.patch_embedder.input_proj.weight",
        "model.language_model.layers.5.self_attn.k_proj.weight",
    ),
}


def with_images(folder, shape):
    """A folder as models with parts for images are published, of random numbers; the language model's."""
    params = written(folder / "text", shape, dtype=jnp.bfloat16)
    tensors = safetensors.numpy.load_file(folder / "text" / hf.SINGLE)
    text = json.loads((folder / "text" / "config.json").read_text())
    tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    first, second = OTHERS[shape.family]
    tensors |= {first: np.arange(5, dtype=np.float32), second: np.ones((3, 2), np.float32)}
    text["rope_parameters"] |= {"mrope_section": [3, 3, 2]}
    tied, text["eos_token_id"] = text.pop("tie_word_embeddings"), [7, 9]
    config = {"model_type": shape.family.removesuffix("_text"), "dtype": "bfloat16",
              "architectures": ["Qwen3_5ForConditionalGeneration"],
              "image_token_id": 90, "tie_word_embeddings": tied, "vision_config": {"depth": 1},
              "text_config": text}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    safetensors.numpy.save_file(tensors, folder / hf.SINGLE)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tensors, config


@pytest.mark.parametrize("name", ["qwen3_5", tiny.slow("qwen3_5 of three layers"), "gemma4"])
def test_parts_for_images_are_left_out_and_exported_as_they_were(tmp_path, name, caplog):
    shape = tiny.FAMILIES[name]
    (tmp_path / "m").mkdir()
    params, tensors, config = with_images(tmp_path / "m", shape)
    assert hf.load_shape(tmp_path / "m") == shape
    assert hf.stop_tokens(tmp_path / "m", 96) == (7, 9)
    (tmp_path / "above").mkdir()  # which goes first, as for transformers
    (tmp_path / "above" / "config.json").write_text(json.dumps(config | {"eos_token_id": [3]}))
    assert hf.stop_tokens(tmp_path / "above", 96) == (3,)
    for _ in range(2):
        assert equal(loaded(tmp_path / "m"), params)
    assert [one.getMessage() for one in caplog.records] == [
        f"{tmp_path / 'm'}: the language model alone is read, without 2 other tensors"
    ]
    changed = jax.tree.map(lambda x: 2 * x.astype(jnp.float32), params)
    for given, there in ((params, "same"), (changed, "changed")):
        hf.export(given, shape, tmp_path / there, source=tmp_path / "m")
        assert equal(loaded(tmp_path / there), given)
        assert (tmp_path / there / "preprocessor_config.json").exists()
    found = safetensors.numpy.load_file(tmp_path / "same" / hf.SINGLE)
    assert equal(dict(sorted(found.items())), dict(sorted(tensors.items())))
    again = json.loads((tmp_path / "same" / "config.json").read_text())
    assert {"pad_token_id": None} | config == again
    found = safetensors.numpy.load_file(tmp_path / "changed" / hf.SINGLE)
    assert all(np.array_equal(found[x], tensors[x]) for x in OTHERS[shape.family])
    assert json.loads((tmp_path / "changed" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_a_run_of_such_a_model_is_exported_with_them_by_base(tmp_path):
    """Without `--base` the language model comes alone."""
    model, out = tmp_path / "m", tmp_path / "run"
    model.mkdir()
    _, tensors, _ = with_images(model, dataclasses.replace(tiny.FAMILIES["qwen3_5"], vocab_size=64))
    tokenizer.of_words(kk_tiny.vocabulary()).save(model)
    config = quick.config(steps=1, warm_steps=0)
    config = dataclasses.replace(config, model=Pretrained(str(model)))
    run.train(config, out, session=run.Session(console=terminal.console(quiet=True)))
    main(["export", str(out), str(tmp_path / "whole"), "--base", str(model)])
    main(["export", str(out), str(tmp_path / "alone")])
    whole, alone = (
        safetensors.numpy.load_file(tmp_path / name / hf.SINGLE) for name in ("whole", "alone")
    )
    others = OTHERS["qwen3_5_text"]
    assert all(np.array_equal(whole.pop(name), tensors.pop(name)) for name in others)
    assert whole.keys() == tensors.keys()
    assert equal(loaded(tmp_path / "whole"), loaded(tmp_path / "alone"))
    assert {name.replace("language_model.", "") for name in whole} == alone.keys()


def test_other_tensors_too_many_are_refused_there_too(tmp_path):
    with_images(tmp_path, tiny.FAMILIES["qwen3_5"])
    tensors = safetensors.numpy.load_file(tmp_path / hf.SINGLE)
    tensors["model.audio.weight"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / hf.SINGLE)
    with pytest.raises(UserError, match=r"1 tensors too many, first model\.audio\.weight"):
        loaded(tmp_path)


BIAS = "model.layers.1.self_attn.q_proj.bias"


def tensors(edit):
    """Changes the tensors of the one file."""

    def damage(folder):
        found = safetensors.numpy.load_file(folder / hf.SINGLE)
        edit(found)
        safetensors.numpy.save_file(found, folder / hf.SINGLE)

    return damage


def config(**values):
    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def text(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def gone(pattern):
    return lambda folder: min(folder.glob(pattern)).unlink()


def cut(folder):
    path = folder / hf.SINGLE
    path.write_bytes(path.read_bytes()[:-1000])


def filed_under(where):
    """The index names this file for every tensor."""

    def damage(folder):
        path = folder / hf.INDEX
        names = json.loads(path.read_text())["weight_map"]
        path.write_text(json.dumps({"weight_map": dict.fromkeys(names, where)}))

    return damage


def linked(folder):
    """The first shard is a link to somebody else's file."""
    path = min(folder.glob("*.safetensors"))
    path.rename(folder.parent / "theirs")
    path.symlink_to(folder.parent / "theirs")


DAMAGED = [
    (tensors(lambda t: t.pop(BIAS)), f"no tensor {BIAS}"),
    (tensors(lambda t: t.update(x=np.zeros(1))), "1 tensors too many, first x"),
    (
        tensors(lambda t: t.update({BIAS: t[BIAS][:3]})),
        "has shape (3,), config.json asks for (64,)",
    ),
    (tensors(lambda t: t.update({BIAS: np.zeros(64, np.int32)})), "holds I32, not floating-point"),
    (cut, "damaged or cut short"),
    (gone(hf.SINGLE), "only safetensors are read"),
    (gone("config.json"), "is not a model folder"),
    (config(model_type="mamba"), "model_type 'mamba' is not supported"),
    (config(layer_types=["sliding_attention"] * 2, sliding_window=0), "sliding_window is 0"),
    (config(layer_types=["chunked"] * 2), "layers of type 'chunked'"),
    (config(final_logit_softcapping=30.0), "final_logit_softcapping is not supported"),
    (config(hidden_act="gelu"), "hidden_act 'gelu'"),
    (config(head_dim=7), "4 heads of 7"),
    (config(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'"),
    (config(rope_parameters={"rope_type": "yarn"}), "factor is missing"),
    (config(rope_scaling={"type": "dynamic"}), "rope type 'dynamic'"),
    (config(rope_scaling={"type": "linear"}), "factor is missing"),
    (config(num_attention_heads=0), "num_attention_heads is 0, not a whole number from 1 on"),
    (config(num_key_value_heads=3), "heads share key-value heads evenly"),
    (config(hidden_size="64"), "hidden_size is '64'"),
    (config(num_hidden_layers=True), "num_hidden_layers is True"),
    (config(rope_theta=-1), "rope_theta is -1"),
    (config(rms_norm_eps="x"), "rms_norm_eps is 'x'"),
    (config(rope_parameters=[1]), "rope_parameters is [1], not a record"),
    (config(tie_word_embeddings="no"), "tie_word_embeddings is 'no'"),
    (text("config.json", b"{"), "is not JSON"),
    (text("config.json", b"\xff\xfe{}"), "config.json is not text in UTF-8"),
    (text("config.json", b"[" * 100_000), "config.json is not text in UTF-8, or no JSON"),
    (text("config.json", b"[]"), "config.json holds a list, not a record"),
]
DAMAGED_SHARDS = [
    (text(hf.INDEX, b'{"weight_map": {'), f"{hf.INDEX} is not JSON"),
    (text(hf.INDEX, b"{}"), "has no weight_map"),
    *((filed_under(x), "not a file of this folder") for x in ("../x.safetensors", "/x", "..", 3)),
    (linked, "is a link to"),
    (gone("*.safetensors"), "00001-of-"),
]


@pytest.mark.parametrize(
    ("size", "damage", "message"),
    [*((2**30, *case) for case in DAMAGED), *((10_000, *case) for case in DAMAGED_SHARDS)],
)
def test_damaged_and_hostile_folders_are_refused_in_one_line(tmp_path, size, damage, message):
    folder = tmp_path / "m"
    written(folder, shard_bytes=size)
    (folder / hf.SUMS).unlink()  # as a stranger's folder has none
    damage(folder)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        loaded(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("edit", ["other", "shorter"])
def test_a_head_that_is_not_the_embedding_is_not_tied_to_it(tmp_path, edit):
    """Whatever config.json says: a head of one's own may have been trained. The same one is no matter."""
    folder, name = tmp_path / "m", "model.embed_tokens.weight"
    params = written(folder)
    (folder / hf.SUMS).unlink()
    same = lambda t: t.update({"lm_head.weight": t[name].astype(np.float64)})
    tensors(same)(folder)
    assert equal(loaded(folder), params)
    other = {
        "other": lambda x: np.where(np.arange(x.size).reshape(x.shape) == x.size - 1, 1, x),
        "shorter": lambda x: x[:-1],
    }[edit]
    tensors(lambda t: t.update({"lm_head.weight": other(t[name])}))(folder)
    with pytest.raises(UserError, match=r"lm_head\.weight is another than the embedding") as error:
        loaded(folder)
    assert "set tie_word_embeddings to false" in str(error.value)


def test_one_file_goes_before_an_index(tmp_path):
    """As transformers reads a folder with both."""
    params = written(tmp_path / "m")
    hf.export(tiny.policy(seed=5)[1], tiny.SHAPE, tmp_path / "other", shard_bytes=10_000)
    for path in (tmp_path / "other").glob("model*"):
        path.rename(tmp_path / "m" / path.name)
    assert (tmp_path / "m" / hf.INDEX).exists()
    assert equal(loaded(tmp_path / "m"), params)


def test_links_as_the_hub_makes_them_are_followed(tmp_path):
    params = written(tmp_path / "m")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "m").rename(tmp_path / "blobs")
    (tmp_path / "snapshots" / "main").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshots" / "main" / path.name).symlink_to(f"../../blobs/{path.name}")
    assert equal(loaded(tmp_path / "snapshots" / "main"), params)


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [10_000, 2**30])
def test_no_damage_is_a_traceback_or_gives_other_weights(tmp_path, shard_bytes):
    """200 ways to damage a file of an exported folder: one line, or exactly what was exported."""
    params = written(tmp_path / "m", shard_bytes=shard_bytes)
    draw, refused = random.Random(shard_bytes), 0
    originals = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    for _ in range(100):
        name = draw.choice(sorted(originals))
        how = draw.choice(["flip", "cut", "noise", "other", "gone"])
        content, path = bytearray(originals[name]), tmp_path / "m" / name
        if how == "flip":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        elif how == "cut":
            content = content[: draw.randrange(len(content))]
        elif how == "noise":
            at = draw.randrange(len(content))
            content[at : at + 8] = draw.randbytes(len(content[at : at + 8]))
        elif how == "other":
            content = originals[draw.choice(sorted(originals))]
        path.write_bytes(content)
        if how == "gone":
            path.unlink()
        try:
            found = loaded(tmp_path / "m")
        except UserError:
            refused += 1
        else:
            assert equal(found, params), (name, how)
        path.write_bytes(originals[name])
    assert refused > 60


def test_every_token_that_ends_a_response_is_listed(tmp_path):
    """In generation_config.json, or where that has none in config.json."""
    path, other = (tmp_path / name for name in ("generation_config.json", "config.json"))
    other.write_text("{}")
    assert hf.stop_tokens(tmp_path, 96) == ()
    other.write_text('{"eos_token_id": [1, 5, 6]}')
    assert hf.stop_tokens(tmp_path, 96) == (1, 5, 6)
    path.write_text('{"do_sample": true}')
    assert hf.stop_tokens(tmp_path, 96) == (1, 5, 6)
    path.write_text('{"eos_token_id": 7}')
    assert hf.stop_tokens(tmp_path, 96) == (7,)
    path.unlink()
    with pytest.raises(UserError, match=r"config.json: eos_token_id 6 is no token"):
        hf.stop_tokens(tmp_path, 6)
    other.write_text("{}")
    for value, wanted in ([7, 5, 7], (7, 5)), (3, (3,)), (None, ()):
        path.write_text(json.dumps({"eos_token_id": value}))
        assert hf.stop_tokens(tmp_path, 96) == wanted
    for value in (96, -1, "5", [5, None], True):
        path.write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(UserError, match="is no token of a vocabulary of 96"):
            hf.stop_tokens(tmp_path, 96)


def test_export_leaves_what_is_there_alone(tmp_path):
    _, params = tiny.policy()
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "mine").write_text("work of weeks")
    hf.export(params, tiny.SHAPE, tmp_path / "m")
    assert (tmp_path / "m.partial" / "mine").read_text() == "work of weeks"
    (tmp_path / "file").write_text("")
    for target in ("file", "file/below", "m"):
        with pytest.raises(UserError, match=r"cannot export to|is not empty"):
            hf.export(params, tiny.SHAPE, tmp_path / target)
    assert {p.name for p in tmp_path.iterdir()} == {"m", "m.partial", "file"}


def test_what_is_exported_can_be_checked_by_anybody(tmp_path):
    written(tmp_path / "m")
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(command, cwd=tmp_path / "m", check=True)


@pytest.mark.parametrize(
    "name", ["/no", "Qwen/x--3B", "Qwen/x-", "Qwen/x.git", "a/" + "b" * 97, "~nosuch/x", "a" * 300]
)
def test_a_name_that_can_be_none_is_one_line(name):
    with pytest.raises(UserError, match=r"no (model )?folder") as error:
        hf.resolve(name)
    assert "\n" not in str(error.value)


def test_a_model_is_known_by_its_commit_or_by_what_it_is(tmp_path, monkeypatch):
    """Another training of the same size is another model, though config and names are the same."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        hf.export(tiny.policy(seed=seed)[1], tiny.SHAPE, tmp_path / name)
    first, same, other = (hf.version(tmp_path / name) for name in "abc")
    assert first == same != other
    with (tmp_path / "b" / "config.json").open("a") as file:
        file.write(" ")
    assert hf.version(tmp_path / "b") != first
    asked, commit = [], "0" * 39 + "f"

    def download(name, *, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision))
        files = ["adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors",
                 "original/x.safetensors", "consolidated.safetensors", "x.bin"]  # fmt: skip
        kept = filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert [*kept] == files[:3]
        return str(tmp_path / "snapshots" / commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hf.version(hf.resolve("Qwen/x", "v1")) == f"commit {commit}"
    assert asked == [("Qwen/x", "v1")]
    with pytest.raises(UserError, match="is a folder, which has no revision v1"):
        hf.resolve(tmp_path / "a", "v1")


def test_export_into_the_folder_that_one_is_in(tmp_path, monkeypatch):
    _, params = tiny.policy()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    hf.export(params, tiny.SHAPE, pathlib.Path())
    assert (tmp_path / "here" / "config.json").exists()


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
    """Logits of transformers in PyTorch, float64 as far as it goes, computed in an environment of their own."""
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


@pytest.mark.slow
def test_a_real_model(tmp_path):
    """A pretrained 135M Llama: log-probs to rounding, and load then export gives back every tensor.

    transformers is 6e-6 from its own float64 in the mean, 7e-5 at the farthest of six million.
    """
    source = peer.real_model(tmp_path / "source")
    tokens = np.random.default_rng(0).integers(0, hf.load_shape(source).vocab_size, (2, 64))
    ours, theirs = our_logits(source, tokens), reference_logits(source, tokens)
    difference = np.abs(jax.nn.log_softmax(ours) - jax.nn.log_softmax(theirs))
    print(f"differences of log-probs: mean {difference.mean():.2e}, largest {difference.max():.2e}")
    assert difference.mean() <= 2e-5
    assert difference.max() <= 3e-4
    hf.export(loaded(source, (1, 4, 2)), hf.load_shape(source), tmp_path / "out", source=source)
    one = safetensors.numpy.load_file(source / hf.SINGLE)
    other = safetensors.numpy.load_file(tmp_path / "out" / hf.SINGLE)
    assert one.keys() == other.keys()
    assert all(np.array_equal(x, other[name]) for name, x in one.items())


def test_a_model_may_lie_in_a_bucket(tmp_path, monkeypatch):
    """Wherever one is named, as by `jl.load`."""
    monkeypatch.setattr(storage, "local", lambda url: tmp_path / str(url).rpartition("/")[2])
    (tmp_path / "model").mkdir()
    assert hf.resolve("s3://bucket/model") == tmp_path / "model"
    with pytest.raises(UserError, match="write a URL as s3://bucket/name"):
        hf.resolve("https://host/model")
