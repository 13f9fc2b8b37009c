"""Reads and checks model folders that nobody has vetted; a fault is a UserError naming the file."""

import hashlib
import json
import math
import pathlib
import re
from typing import Any

import safetensors

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.qwen2 import Shape

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUMS = "SHA256SUMS"


def load_shape(folder: pathlib.Path) -> Shape:
    """The architecture in config.json; a UserError names what is missing or not supported."""
    config, where = read_config(folder), folder / "config.json"

    def need(fine: bool, reason: str) -> None:
        if not fine:
            raise UserError(f"{where}: {reason}")

    def number(key: str, default: Any = None, *, whole: bool = True) -> Any:
        value = config.get(key, default)
        known = default is not None or key in config
        need(known, f"{key} is missing: is this a Qwen2 model folder?")
        kinds, wanted = (
            (int, "whole number from 1 on") if whole else (int | float, "number above 0")
        )
        fine = isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < math.inf
        need(fine, f"{key} is {value!r}, not a {wanted}")
        return value

    def record(key):
        value = config.get(key) or {}
        need(isinstance(value, dict), f"{key} is {value!r}, not a record")
        return value

    need("model_type" in config, "model_type is missing: is this a Qwen2 model folder?")
    model, act = config["model_type"], config.get("hidden_act", "silu")
    need(model == "qwen2", f"model_type {model!r} is not supported, only 'qwen2'")
    need(act == "silu", f"hidden_act {act!r} is not supported, only 'silu'")
    slides = bool(config.get("use_sliding_window"))
    need(not slides, "use_sliding_window is not supported: set it to false")
    rope = record("rope_parameters")
    scaling = record("rope_scaling") or rope
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    need(kind == "default", f"rope type {kind!r} is not supported: remove the rope scaling")
    heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads")
    hidden = number("hidden_size")
    fits = hidden % heads == 0 and config.get("head_dim") in (None, hidden // heads)
    need(fits, "head_dim x num_attention_heads is not hidden_size")
    need(
        heads % kv_heads == 0 and (hidden // heads) % 2 == 0,
        f"{heads} heads of {hidden // heads} for {kv_heads} key-value heads cannot be: heads share "
        "key-value heads evenly, and a head has an even size",
    )
    tied = config.get("tie_word_embeddings", False)
    need(isinstance(tied, bool), f"tie_word_embeddings is {tied!r}, not true or false")
    return Shape(
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        tied=tied,
        rms_norm_eps=number("rms_norm_eps", 1e-6, whole=False),
        rope_theta=number("rope_theta", rope.get("rope_theta", 10_000.0), whole=False),
        max_length=number("max_position_embeddings", 32_768),
    )


def read_config(folder: pathlib.Path) -> dict:
    """config.json as a dict."""
    if not (folder / "config.json").exists():
        raise UserError(f"{folder / 'config.json'} is missing: {folder} is not a model folder")
    return _record(folder / "config.json")


def stop_tokens(folder: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a response, by generation_config.json: chat models have several."""
    path = folder / "generation_config.json"
    found = _record(path).get("eos_token_id") if path.exists() else None
    tokens = found if isinstance(found, list) else [] if found is None else [found]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise UserError(
                f"{path}: eos_token_id {token!r} is no token of a vocabulary of {vocab_size}: "
                "download it again, or correct it"
            )
    return tuple(dict.fromkeys(tokens))


def _record(path: pathlib.Path) -> dict:
    """The JSON object in a file; a UserError if it holds anything else."""
    try:
        found = json.loads(regular(path).read_bytes().decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}): download it again") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not text in UTF-8, or no JSON: download it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not a record: download it again")
    return found


class Tensors:
    """The tensors of a folder by name; no data are read before a slice is indexed."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        index = folder / INDEX
        if index.exists():
            where = self._named(index)
        elif (folder / SINGLE).exists():
            where = None
        else:
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}: only safetensors are read")
        self.handles = {}
        for name in [SINGLE] if where is None else sorted(set(where.values())):
            handle = self._open(folder / name)
            for tensor in handle.keys():  # noqa: SIM118, it is no dictionary
                if where is not None and where.get(tensor) != name:
                    raise UserError(
                        f"{folder / name} holds {tensor}, which {index.name} files elsewhere: download both again"
                    )
                self.handles[tensor] = handle

    @staticmethod
    def _named(index):
        """The file of each tensor by the index; all must lie in the folder of the index."""
        where = _record(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise UserError(f"{index} has no weight_map: download it again")
        for tensor, name in where.items():
            if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
                raise UserError(
                    f"{index}: {tensor} is filed under {name!r}, not a file of this folder"
                )
        return where

    @staticmethod
    def _open(path):
        if not path.exists():
            raise UserError(f"{path} is missing though the index names it: download it again")
        try:
            return safetensors.safe_open(regular(path), framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(
                f"{path} is damaged or cut short ({error}): download it again"
            ) from error

    def check(self, expected: dict[str, tuple[int, ...]], ignore: set[str]):
        """A UserError unless exactly these tensors, or `ignore` too, exist in these shapes."""
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
        extra = sorted(set(self.handles) - set(expected) - ignore)
        if extra:
            raise UserError(f"{self.folder} has {len(extra)} tensors too many, first {extra[0]}")

    def slice(self, name):
        """A view of a tensor that reads only what is indexed."""
        return self.handles[name].get_slice(name)


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
    lines = [f"{_sum(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
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
        if _sum(regular(path)) != said:
            raise UserError(
                f"{path} is not the file that was written: copy the folder again, or delete {noted} if "
                "you changed the file yourself"
            )


def _sum(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
