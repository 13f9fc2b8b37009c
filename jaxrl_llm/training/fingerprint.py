"""Fingerprints of arrays, in one pass on their devices: dtype, shape and a checksum; and of data."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from reprlib import recursive_repr
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, sharding


def describe(tree: Any, *, values: bool = True) -> dict[str, list[Any]]:
    """`[dtype, shape, checksum]` of each array by its path in the tree; 0 without `values`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    arrays = [leaf for _, leaf in leaves]
    numbers = jax.device_get(_numbers(arrays)) if values else [0] * len(arrays)
    return {
        jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape), int(number)]
        for (path, leaf), number in zip(leaves, numbers, strict=True)
    }


def same_form(what: str, saved: dict[str, Any], like: Any) -> None:
    """A UserError for the first array whose dtype or shape is not that of `like`."""
    wanted = describe(like, values=False)
    for name in sorted(saved.keys() | wanted.keys()):
        has, wants = (
            " ".join(map(str, forms[name][1::-1])) if name in forms else "no such array"
            for forms in (saved, wanted)
        )
        if has != wants:
            raise UserError(
                f"{what} is of another model or optimizer: {name} is {has} there and {wants} here; "
                f"nothing was changed: resume with the config and flags that the run was started with"
            )


def not_finite(tree: Any) -> str | None:
    """The path of the first array in the tree with an infinity or NaN; None if all are finite."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    fine = jax.device_get(_finite([leaf for _, leaf in leaves]))
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
    return next((name for name, whole in zip(names, fine, strict=True) if not whole), None)


def checksum(entry: Any) -> str:
    """SHA-256 of what JSON makes of an entry, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()


@recursive_repr()
def written_out(x: Any) -> str:
    """The repr of a value as it is in every process: sets in order, arrays whole, no addresses."""
    if isinstance(x, str | bytes):
        return repr(x)
    if isinstance(x, set | frozenset):
        return f"{{{', '.join(sorted(map(written_out, x)))}}}"
    if isinstance(x, dict):
        inner = ", ".join(f"{written_out(key)}: {written_out(one)}" for key, one in x.items())
        return f"{{{inner}}}"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        shown = [field.name for field in dataclasses.fields(x) if field.repr]
        inner = ", ".join(f"{name}={written_out(getattr(x, name))}" for name in shown)
        return f"{type(x).__qualname__}({inner})"
    if isinstance(x, list | tuple):
        inner = ", ".join(map(written_out, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
    if (listed := getattr(x, "tolist", None)) is not None:
        return written_out(listed())
    text = re.sub(" at 0x[0-9a-fA-F]+", "", repr(x))
    return "".join(sorted(text)) if "{" in text else text  # there may be a set in it


@jax.jit
def _finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.isfinite(x).all() for x in sharding.on_devices(arrays)]


def _numbers(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Checksums of the bits of each element.

    What waits in the memory of the hosts comes to the devices an array at a time: they may have no
    room for all.
    """
    together = iter(_checksums([x for x in arrays if not sharding.waits(x)]))
    return [_checksums([x])[0] if sharding.waits(x) else next(together) for x in arrays]


@jax.jit
def _checksums(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [hf.checksum(hf.bits_of(x)) for x in sharding.on_devices(arrays)]
