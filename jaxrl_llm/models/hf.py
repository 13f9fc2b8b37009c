"""Hugging Face checkpoints in and out: safetensors only, one name map, no second host copy."""

import itertools
import json
import pathlib
import re
import shutil
import uuid
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.typing import DTypeLike

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models import sharding
from jaxrl_llm.models.hf_folder import (
    INDEX,
    SINGLE,
    Tensors,
    check_sums,
    load_shape,
    read_config,
    regular,
    stop_tokens,
    write_sums,
)
from jaxrl_llm.models.qwen2 import Shape, graph

__all__ = ["load_shape", "read_config", "stop_tokens"]  # re-exported from hf_folder
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def resolve(model: str | pathlib.Path) -> pathlib.Path:
    """A local model folder, or that of a hub name, downloaded; a UserError if there is neither."""
    folder = pathlib.Path(model)
    try:
        folder = folder.expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:  # the name is too long, or there is no home of ~user
        raise UserError(f"no model folder {folder}: {error}") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        raise UserError(
            f"no model folder {folder}: give a folder, or a hub name such as Qwen/Qwen2.5-3B"
        )
    import huggingface_hub

    try:
        patterns = ["*.safetensors", INDEX, "config.json", *TOKENIZER]
        return pathlib.Path(huggingface_hub.snapshot_download(str(model), allow_patterns=patterns))
    except Exception as error:  # from the name, the hub, the disk or the HTTP library
        reason = first_line(error)
        raise UserError(
            f"no folder {folder} and the hub gave no model {model} ({reason}): check the name or the network"
        ) from error


def load(folder: pathlib.Path, shape: Shape, shardings, dtype: DTypeLike | None = None):
    """Parameters of a folder; a device reads only its slices. `dtype` None keeps the file's."""
    check_sums(folder)
    tensors = Tensors(folder)
    _, shapes = graph(shape)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    names = {path: list(hf_names(path, leaf.shape)) for path, leaf in leaves}
    tensors.check(
        {name: _file_shape(name, leaf.shape[1:] if stacked(path) else leaf.shape)
         for path, leaf in leaves for name in names[path]},
        ignore={"lm_head.weight"} if shape.tied else set(),
    )  # fmt: skip
    arrays = [
        _read(tensors, names[path], stacked(path), leaf.shape, sharding, dtype)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def stacked(path) -> bool:
    """Whether the parameter at this tree path holds all layers, on axis 0."""
    return path[0].key == "layers"


def hf_names(path, shape: tuple[int, ...]) -> Iterator[str]:
    """The file's names for the parameter at this tree path, one per layer if it is stacked."""
    keys = [key.key for key in path]
    if keys[0] == "layers":
        for i in range(shape[0]):
            yield ".".join(["model", "layers", str(i), *keys[1:]])
    else:
        yield ".".join(keys if keys[0] == "lm_head" else ["model", *keys])


def named_tensors(params, dtype: DTypeLike | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array in the file's shape) pairs, gathered to the host one at a time.

    With `dtype` they are cast before the transfer. All processes must iterate: it is collective.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = list(hf_names(path, leaf.shape))
        parts = (leaf[i] for i in range(len(names))) if stacked(path) else iter([leaf])
        for name, part in zip(names, parts, strict=True):
            array = sharding.on_host(part if dtype is None else part.astype(dtype))
            yield name, array.reshape(_file_shape(name, array.shape))


def export(
    params,
    shape: Shape,
    folder: pathlib.Path,
    *,
    source: pathlib.Path | None = None,
    dtype: DTypeLike | None = None,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes safetensors, config.json and the tokenizer of `source`; complete or not at all."""
    folder = folder.absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: export to a new folder")
        partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot export to {folder}: {error.strerror}") from error
    try:
        kind = write_safetensors(named_tensors(params, dtype), partial, shard_bytes)
        config = read_config(source) if source else {}
        description = partial / "config.json"
        description.write_text(json.dumps(config | hf_config(shape, kind), indent=2) + "\n")
        if source:
            for path in filter(pathlib.Path.exists, (source / name for name in TOKENIZER)):
                shutil.copyfile(regular(path), partial / path.name)
        for path in partial.glob("*.safetensors"):  # safetensors creates them with mode 600
            shutil.copymode(description, path)
        write_sums(partial)
        storage.sync_tree(partial)
        partial.rename(folder)  # also replaces an empty folder
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot export to {folder}: {error}; nothing is left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def hf_config(shape: Shape, dtype: str) -> dict:
    """The config.json that describes this architecture."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_length,
        "use_sliding_window": False,
    }


def write_safetensors(
    tensors: Iterator[tuple[str, np.ndarray]], folder: pathlib.Path, shard_bytes: int
) -> str:
    """Writes files of at most `shard_bytes` (or one tensor) and an index; returns the dtype."""
    shard, size, total, written, kind = {}, 0, 0, [], ""

    def flush():
        path = folder / f"part-{len(written):05d}.safetensors"
        safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        shard.clear()

    for name, array in tensors:
        if shard and size + array.nbytes > shard_bytes:
            flush()
            size = 0
        shard[name] = np.ascontiguousarray(array)
        size, total, kind = size + array.nbytes, total + array.nbytes, str(array.dtype)
    flush()
    if len(written) == 1:
        written[0][0].rename(folder / SINGLE)
        return kind
    weight_map = {}
    for i, (path, names) in enumerate(written, 1):
        final = f"model-{i:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return kind


def _file_shape(name, shape):
    """The shape in the file, where heads and head width are fused into one axis."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return (shape[0] * shape[1], shape[2])
    if name.endswith("o_proj.weight"):
        return (shape[0], shape[1] * shape[2])
    if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
        return (shape[0] * shape[1],)
    return tuple(shape)


def _file_index(name, index, shape):
    """An index into the parameter as one into the file's tensor; head width is never sharded."""
    spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    fused = 1 if name.endswith("o_proj.weight") else 0
    if len(_file_shape(name, shape)) < len(shape):
        (start, stop), width = spans[fused], shape[fused + 1]
        spans[fused : fused + 2] = [(start * width, stop * width)]
    return tuple(slice(*span) for span in spans)


def _read(tensors, names, is_stacked, shape, sharding, dtype):
    """A sharded parameter; each shard is read from the file on its own."""
    inner = shape[1:] if is_stacked else shape

    def read(index):
        layers = range(*index[0].indices(shape[0])) if is_stacked else [0]
        rest = index[1:] if is_stacked else index
        size = [len(range(*s.indices(d))) for s, d in zip(rest, inner, strict=True)]
        parts = (tensors.slice(names[i])[_file_index(names[i], rest, inner)] for i in layers)
        first = next(parts)
        out = np.empty((len(layers), *size), first.dtype if dtype is None else jnp.dtype(dtype))
        for n, part in enumerate(itertools.chain([first], parts)):
            out[n] = part.reshape(size)
        return out if is_stacked else out[0]

    return jax.make_array_from_callback(shape, sharding, read)
