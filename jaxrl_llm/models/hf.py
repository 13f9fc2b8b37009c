"""Hugging Face model folders in and out: safetensors only, one name map, no second host copy.

Folders are read as if nobody had vetted them: a fault is a UserError that names the file.
"""

import hashlib
import itertools
import json
import logging
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, UInt32

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models import families, sharding
from jaxrl_llm.models.qwen2 import Shape, graph

logger = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUMS = "SHA256SUMS"
COMMIT = "commit "  # what `version` begins with for a folder from the hub
SAMPLES, SAMPLE = 256, 4096  # of a file for `version`, and the bytes of each
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
INNER = "model.language_model.", "model."  # a name's beginning among parts for images, and else
EXPONENT = 0x7F800000  # bits of a float32
# the axis that counts heads, in weights, biases and factors of adapters
HEADS = dict.fromkeys(
    (f"{x}_proj{factor}" for x in "qkv" for factor in ("", ".lora_B")), 0
) | dict.fromkeys(("o_proj", "o_proj.lora_A"), 1)
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


def resolve(model: str | pathlib.Path, revision: str | None = None) -> pathlib.Path:
    """A local model folder, or that of a URL or hub name, downloaded; a UserError if there is none.

    `revision` is a commit, branch or tag at the hub.
    """
    folder = storage.local(model) if storage.is_url(model) else pathlib.Path(model)
    try:
        folder = folder.expanduser()
        if folder.is_dir():
            if revision not in (None, folder.name):  # that of a commit in the hub's cache
                raise UserError(f"{folder} is a folder, which has no revision {revision}")
            return folder
    except (OSError, RuntimeError) as error:  # the name is too long, or there is no home of ~user
        raise UserError(f"no model folder {folder}: {error}") from error
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        raise UserError(
            f"no model folder {folder}: give a folder, or a hub name such as Qwen/Qwen2.5-3B"
        )
    import huggingface_hub

    try:
        configs = ("config.json", "adapter_config.json", "*processor_config.json")
        there = huggingface_hub.snapshot_download(
            str(model),
            revision=revision,
            allow_patterns=["*.safetensors", INDEX, *configs, *TOKENIZER],
            ignore_patterns=["consolidated*", "original/*"],  # the same weights once more
        )
        return pathlib.Path(there)
    except Exception as error:  # from the name, the hub, the disk or the HTTP library
        reason = first_line(error)
        raise UserError(
            f"no folder {folder} and the hub gave no model {model} ({reason}): check the name, the network "
            "and, for a model that asks for consent, HF_TOKEN"
        ) from error


def version(folder: pathlib.Path) -> str:
    """The commit of a folder from the hub; of any other a checksum of config, index and weights.

    Of large files it covers size and evenly spaced samples, so that it takes no time.
    """
    if re.fullmatch("[0-9a-f]{40}", folder.name):
        return COMMIT + folder.name
    digest = hashlib.sha256()
    paths = [folder / "config.json", folder / INDEX, *sorted(folder.glob("*.safetensors"))]
    for path in filter(pathlib.Path.is_file, paths):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in range(0, size, max(SAMPLE, size // SAMPLES)):
                file.seek(start)
                digest.update(file.read(SAMPLE))
    return f"sha256 {digest.hexdigest()}"


def load_shape(folder: pathlib.Path) -> Shape:
    """The architecture in config.json; a UserError names what is missing or not supported."""
    return families.shape_of(read_config(folder), folder / "config.json")


def read_config(folder: pathlib.Path) -> dict:
    """config.json as a dict."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder / 'config.json'} is missing: {folder} is not a model folder")
    return read_json(folder / "config.json")


def stop_tokens(folder: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a response, by generation_config.json or else config.json: often several."""
    paths = [folder / "generation_config.json", folder / "config.json"]
    said = {path: read_json(path) for path in paths if path.exists()}
    named = [
        (path, config.get("eos_token_id"))
        for path, whole in said.items()
        for config in (whole, families.text_of(whole, path))
    ]
    path, found = next((pair for pair in named if pair[1] is not None), (folder, None))
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise UserError(
                f"{path}: eos_token_id {token!r} is no token of a vocabulary of {vocab_size}: "
                "download it again, or correct it"
            )
    return tuple(dict.fromkeys(tokens))


def read_json(path: pathlib.Path) -> dict:
    """The JSON object in a file; a UserError if it holds anything else."""
    try:
        content = json.loads(regular(path).read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}): download it again") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not text in UTF-8, or no JSON: download it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a record: download it again")
    return content


def load(folder: pathlib.Path, shape: Shape, mesh: Mesh, dtype: DTypeLike | None = None, **how):
    """Sharded parameters, without adapters; a device reads only its slices. `dtype` None keeps the file's."""
    shapes = graph(replace(shape, lora=None))[1]
    places = sharding.param_shardings(shapes, mesh)
    check_sums(folder)
    tensors = Tensors(folder, beside=families.beside(shape))
    return read(tensors, shapes, places, dtype, tied=shape.tied, **how)


def read(
    tensors: "Tensors",
    shapes,
    shardings,
    dtype: DTypeLike | None = None,
    *,
    tied: bool = False,
    keep: Callable[..., Any] = lambda path, array: array,
):
    """Parameters of these shapes; that tensors beside them are left out is said once.

    `keep(path, array)` says what to keep of each, as soon as it is read.
    """
    if tensors.beside:
        _say_left_out(tensors.folder, len(tensors.beside))
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = {
        name: _file_shape(name, leaf.shape[stacked(path) :])
        for path, leaf in leaves
        for name in hf_names(path, leaf.shape)
    }
    tensors.check(wanted, tied)
    arrays = [
        keep(path, _read(tensors, path, leaf.shape, where, dtype))
        for (path, leaf), where in zip(leaves, jax.tree.leaves(shardings), strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


@cache
def _say_left_out(folder: pathlib.Path, number: int) -> None:
    logger.warning("%s: the language model alone is read, without %d other tensors", folder, number)


def stacked(path) -> int:
    """How many leading axes of the parameter at this tree path count layers, then experts."""
    keys = [key.key for key in path]
    return (keys[0] == "layers") + ("experts" in keys and "fused_" not in keys[-2])


def hf_names(path, shape: tuple[int, ...]) -> Iterator[str]:
    """The file's names for the parameter at this tree path, one per layer and expert if stacked."""
    keys = [key.key for key in path]
    if keys[0] == "layers":
        first, step = 0, 1
        if "_mod_" in keys[1]:  # of some layers only
            first, step = map(int, keys.pop(1).split("_mod_"))
        for layer, *expert in np.ndindex(shape[: stacked(path)]):
            name = ".".join(["model", "layers", str(first + step * layer), *keys[1:]])
            name = re.sub(r"\.fused_(\w+)\.weight$", r".\1", name)
            yield name.replace(".experts.", f".experts.{expert[0]}.") if expert else name
    else:
        yield ".".join(keys if keys[0] == "lm_head" else ["model", *keys])


def named_tensors(params, dtype: DTypeLike | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, array in the file's shape) pairs, gathered to the host one at a time.

    With `dtype` they are cast before the transfer. All processes must iterate: it is collective.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names, lead = hf_names(path, leaf.shape), stacked(path)
        for part in (leaf[i] for i in range(len(leaf))) if lead else [leaf]:
            array = sharding.on_host(part if dtype is None else part.astype(dtype))
            for one in array if lead > 1 else [array]:
                name = next(names)
                yield name, one.reshape(_file_shape(name, one.shape))


def named_checksums(params, dtype: DTypeLike) -> dict[str, int]:
    """A checksum of each tensor of `named_tensors` in `dtype`, computed where the parameters lie.

    All processes must call it. Bits count as those of float32, so a server may keep a tensor wider;
    numbers below the smallest normal one count as 0, as some of its products take them for that.
    """
    flat = jax.tree_util.tree_flatten_with_path(_checksums(params, jnp.dtype(dtype)))[0]
    return {
        name: int(number)
        for (path, found), leaf in zip(flat, jax.tree.leaves(params), strict=True)
        for name, number in zip(
            hf_names(path, leaf.shape), np.ravel(sharding.on_host(found)), strict=True
        )
    }


@partial(jax.jit, static_argnums=1)
def _checksums(params, dtype):
    """`[layers]` checksums for each parameter that is stacked, one for each other."""

    def one(path, x):
        bits = bits_of(x.astype(dtype))
        bits = jnp.where(bits & np.uint32(EXPONENT), bits, 0)
        name, lead = next(hf_names(path, x.shape)), stacked(path)
        bits = bits.reshape(*x.shape[:lead], *_file_shape(name, x.shape[lead:]))
        return checksum(bits, lead)

    return jax.tree_util.tree_map_with_path(one, sharding.on_devices(params))


def checksum(bits: UInt32[Array, "..."], lead: int = 0) -> UInt32[Array, "..."]:
    """The sum, modulo 2^32, of hashed bits times odd numbers; one an index of the `lead` axes.

    Odd factors make each altered number count. A product of one factor an axis, by the position
    there, they differ: that shows what is exchanged. Parts may be summed, on devices or servers, in
    any order.
    """
    words, stride = hash_bits(hash_bits(bits)), 1  # once, two signs could change unseen
    for axis in reversed(range(lead, bits.ndim)):
        place = jnp.arange(bits.shape[axis], dtype=jnp.uint32) * np.uint32(stride % 2**32)
        words = words * jnp.expand_dims(
            hash_bits(place) | 1, [i for i in range(bits.ndim) if i != axis]
        )
        stride *= bits.shape[axis]
    return jnp.sum(words, tuple(range(lead, bits.ndim)), dtype=jnp.uint32)


def bits_of(x: Array) -> UInt32[Array, "..."]:
    """The bits of each number, those of a narrower one on top: a bfloat16 has those of its float32."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    width = 8 * x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    return bits << np.uint32(32 - width)


def hash_bits(words: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Another word for each, far from its neighbours'."""
    spread = words * np.uint32(2_654_435_761)
    return spread ^ (spread >> np.uint32(16))


def export(
    params,
    shape: Shape,
    folder: pathlib.Path,
    *,
    source: pathlib.Path | None = None,
    dtype: DTypeLike | None = None,
    shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes safetensors, config.json and the tokenizer of `source`; complete or not at all.

    A `source` with parts for images gives these too, as they are.
    """
    with new_folder(folder, source) as there:
        config, tensors = read_config(source) if source else {}, named_tensors(params, dtype)
        if source and config.get("model_type") in families.WHOLE:
            others = Tensors(source, beside=families.beside(shape)).beside
            named = ((name.replace(INNER[1], INNER[0], 1), x) for name, x in tensors)
            kept = ((name, handle.get_tensor(name)) for name, handle in others.items())
            tensors = itertools.chain(kept, named)
            for path in source.glob("*processor_config.json"):
                shutil.copyfile(regular(path), there / path.name)
        kind = write_safetensors(tensors, there, shard_bytes)
        config = {"pad_token_id": None} | families.with_text(
            config, families.config_of(shape, kind)
        )
        (there / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def new_folder(folder: pathlib.Path, source: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """A folder to write to, which becomes `folder` at the end, with the tokenizer of `source`.

    A UserError leaves nothing.
    """
    folder = folder.absolute()
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: export to a new folder")
        there = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
        there.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot export to {folder}: {error.strerror}") from error
    try:
        yield there
        if source:
            for path in filter(pathlib.Path.exists, (source / name for name in TOKENIZER)):
                shutil.copyfile(regular(path), there / path.name)
        for path in there.glob("*.safetensors"):  # safetensors creates them with mode 600
            shutil.copymode(next(there.glob("*config.json")), path)
        write_sums(there)
        storage.sync_tree(there)
        there.rename(folder)  # also replaces an empty folder
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"cannot export to {folder}: {error}; nothing is left there") from error
    finally:
        shutil.rmtree(there, ignore_errors=True)


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


def _heads_axis(name: str, shape: tuple[int, ...]) -> int | None:
    """The axis of heads; in the file it is one axis with the next, the width of a head."""
    found = re.search(r"(\w+_proj(\.lora_[AB])?)\.\w+$", name)
    axis = HEADS.get(found[1]) if found else None
    return None if axis is None or len(shape) < axis + 2 else axis


def _file_shape(name, shape):
    """The shape that a parameter has in the file."""
    axis = _heads_axis(name, shape)
    if axis is None:
        return tuple(shape)
    return (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _file_index(name, index, shape):
    """An index into the parameter as one into the file's tensor; head width is never sharded."""
    spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    axis = _heads_axis(name, shape)
    if axis is not None:
        (start, stop), width = spans[axis], shape[axis + 1]
        spans[axis : axis + 2] = [(start * width, stop * width)]
    return tuple(slice(*span) for span in spans)


def _read(tensors, path, shape, where, dtype):
    """A sharded parameter; each shard is read from the file on its own."""
    lead = stacked(path)
    names, inner = np.reshape(list(hf_names(path, shape)), shape[:lead]), shape[lead:]

    def read(index):
        some, rest = np.asarray(names[index[:lead]]), index[lead:]
        size = [len(range(*s.indices(d))) for s, d in zip(rest, inner, strict=True)]
        parts = (tensors.slice(str(n))[_file_index(str(n), rest, inner)] for n in some.flat)
        first = next(parts)
        out = np.empty((some.size, *size), first.dtype if dtype is None else jnp.dtype(dtype))
        for n, part in enumerate(itertools.chain([first], parts)):
            out[n] = part.reshape(size)
        return out.reshape(*some.shape, *size)

    return jax.make_array_from_callback(shape, where, read)


class Tensors:
    """The tensors of a folder by name, less a prefix; none is read before a slice is indexed.

    With `beside`, those whose names begin so are apart, and others may be named as among them.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        single: str = SINGLE,
        prefix: str = "",
        beside: tuple[str, ...] = (),
    ):
        self.folder, self.handles, self.beside, self.names = folder, {}, {}, {}
        index = folder / INDEX
        alone = (folder / single).exists()  # it goes before an index, as for transformers
        where = _weight_map(index) if single == SINGLE and index.exists() and not alone else None
        if where is None and not alone:
            neither = f"neither {single} nor {INDEX}" if single == SINGLE else f"no {single}"
            raise UserError(f"{folder} has {neither}: only safetensors are read")
        for name in [single] if where is None else sorted(set(where.values())):
            handle = _opened(folder / name)
            for tensor in handle.keys():  # noqa: SIM118, it is no dictionary
                if where is not None and where.get(tensor) != name:
                    raise UserError(
                        f"{folder / name} holds {tensor}, which {INDEX} files elsewhere: download "
                        "both again"
                    )
                if tensor.startswith(beside):
                    self.beside[tensor] = handle
                    continue
                ours = tensor.removeprefix(prefix)
                if beside and ours.startswith(INNER[0]):
                    ours = ours.replace(*INNER)
                self.handles[ours], self.names[ours] = handle, tensor

    def check(self, expected: dict[str, tuple[int, ...]], tied: bool):
        """A UserError unless exactly these tensors exist in these shapes, or a `tied` head too."""
        for name, want in expected.items():
            if name not in self.handles:
                raise UserError(f"{self.folder} has no tensor {name}")
            have = tuple(self.slice(name).get_shape())
            if have != want:
                raise UserError(
                    f"{self.folder}: {name} has shape {have}, config.json asks for {want}"
                )
            kind = self.slice(name).get_dtype()
            if kind not in ("F32", "BF16", "F16", "F64"):
                raise UserError(f"{self.folder}: {name} holds {kind}, not floating-point numbers")
        if tied and HEAD in self.handles:
            if not np.array_equal(*(self.slice(name)[:] for name in (HEAD, EMBEDDING))):
                raise UserError(
                    f"{self.folder}: {HEAD} is another than the embedding: set tie_word_embeddings to false"
                )
            expected = {**expected, HEAD: ()}
        extra = sorted(set(self.handles) - set(expected))
        if extra:
            raise UserError(f"{self.folder} has {len(extra)} tensors too many, first {extra[0]}")

    def slice(self, name):
        """A view of a tensor that reads only what is indexed."""
        return self.handles[name].get_slice(self.names[name])


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    """The file of each tensor by the index; all must lie in the folder of the index."""
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise UserError(f"{index} has no weight_map: download it again")
    for tensor, name in where.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise UserError(f"{index}: {tensor} is filed under {name!r}, not a file of this folder")
    return where


def _opened(path: pathlib.Path) -> Any:
    if not path.exists():
        raise UserError(f"{path} is missing though the index names it: download it again")
    try:
        return safetensors.safe_open(regular(path), framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}): download it again") from error


def regular(path: pathlib.Path) -> pathlib.Path:
    """The path; a UserError unless it is a file in its folder, or in the hub's cache beside it."""
    folder, there = path.parent.resolve(), path.resolve()
    homes = [folder]
    if folder.parent.name == "snapshots":  # in the hub's cache files are links to ../../blobs
        homes.append(folder.parent.parent / "blobs")
    if not any(there.is_relative_to(home) for home in homes):
        raise UserError(
            f"{path} is a link to {there}, out of its folder: put the file itself there"
        )
    if not there.is_file():
        raise UserError(f"{path} is not a file")
    return path


def write_sums(folder: pathlib.Path) -> None:
    """Writes SHA256SUMS for every file in the folder, as `sha256sum --check` reads it."""
    lines = [f"{storage.sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))


def check_sums(folder: pathlib.Path) -> None:
    """A UserError if the folder has a SHA256SUMS and a file does not match it."""
    noted = folder / SUMS
    if not noted.exists():
        return
    for line in regular(noted).read_text(errors="replace").splitlines():
        said, _, name = line.partition("  ")
        path = folder / name
        if not re.fullmatch(r"[\w-][\w.-]*", name) or not path.is_file():
            raise UserError(f"{noted} names {name!r}, which is no file here: copy the folder again")
        if storage.sha256(regular(path)) != said:
            raise UserError(
                f"{path} is not the file that was written: copy the folder again, or delete {noted} if "
                "you changed the file yourself"
            )
