"""A model without its parameters, for callers that do not know how it is built.

`Policy` gives log-probs to the trainer, a generator to the embedded engine, and tensors to servers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import families, hf, int8, logprobs, lora, qwen2, sharding, tokenizer
from jaxrl_llm.models.hf import EMBEDDING, HEAD
from jaxrl_llm.models.logprobs import PerToken
from jaxrl_llm.models.primitives import Inputs
from jaxrl_llm.models.sharding import AXES
from jaxrl_llm.models.tokenizer import Tokenizer

if TYPE_CHECKING:  # generation is read by whoever generates here
    from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator

APART = 4 * 2**20  # bytes of a layer from which a CPU has layers apart: a scan would copy each
TRAINER = 12  # bytes per parameter beside the reference policy: itself and Adam's two moments


class ModelFolder(NamedTuple):
    """Shape and tokenizer of a model folder, read before its parameters."""

    folder: Path
    shape: qwen2.Shape
    tokenizer: Tokenizer


def pretrained(
    name: str | Path,
    revision: str | None = None,
    *,
    chat: bool | None = False,
    day: date | None = None,
) -> ModelFolder:
    """A model folder, or that of a hub name, downloaded; a UserError says what is wrong with it."""
    folder = hf.resolve(name, revision)
    return ModelFolder(folder, hf.load_shape(folder), tokenizer.load(folder, chat=chat, day=day))


@dataclass(frozen=True)
class Served:
    """The model for servers: config.json, Hugging Face tensors, and log-probs to verify a server.

    Batches of `score` are split over `shards` devices. A tied model is served untied, its embedding
    repeated as `lm_head.weight`: some backends keep a stale head when tied weights are reloaded.
    """

    definition: Any
    shards: int = 1

    def config(self, dtype: str) -> dict[str, Any]:
        """The config.json of the untied model."""
        shape, _ = qwen2.settings(self.definition)
        # null, for where a family has a default that a small vocabulary lacks
        return families.config_of(replace(shape, tied=False), dtype) | {"pad_token_id": None}

    @property
    def adapter(self) -> "ServedAdapter | None":
        """The adapters beside the model, which then are brought over alone."""
        shape, _ = qwen2.settings(self.definition)
        return shape.lora and ServedAdapter(shape.lora)

    def tensors(self, params, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) pairs of the untied model without adapters, one at a time."""
        params = int8.dequantize(lora.base_of(params), dtype)
        tied = HEAD.split(".")[0] not in params
        for name, array in hf.named_tensors(params, dtype):
            yield name, array
            if tied and name == EMBEDDING:
                yield HEAD, array

    def checksums(self, params, dtype: str) -> dict[str, int]:
        """A checksum of each of `tensors`, by name."""
        found = hf.named_checksums(int8.dequantize(lora.base_of(params), dtype), dtype)
        return {HEAD: found[EMBEDDING], **found}

    def score(self, params, sequences: Sequence[Sequence[int]]) -> list[Any]:
        """Log-probs of every token but the first of each sequence, computed as in training."""
        rows = -(-len(sequences) // self.shards) * self.shards
        inputs = logprobs.of_sequences(sequences, rows, max(map(len, sequences)))
        scores = sharding.on_host(self._logp(params, inputs))
        return [row[: len(s) - 1] for row, s in zip(scores, sequences, strict=False)]

    @cached_property
    def _logp(self):
        return jax.jit(partial(logprobs.of_responses, self.definition))


@dataclass(frozen=True)
class ServedAdapter:
    """Adapters for servers: as `Served`, but B is multiplied by alpha / rank.

    Servers would do so after rounding it.
    """

    lora: qwen2.Lora

    @property
    def rank(self) -> int:
        """The rank of the adapters."""
        return self.lora.rank

    def config(self, dtype: str) -> dict[str, Any]:
        """The adapter_config.json, with the dtype."""
        return lora.config_of(replace(self.lora, alpha=float(self.lora.rank))) | {"dtype": dtype}

    def tensors(self, params, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) pairs, one at a time."""
        return lora.named_tensors(self._scaled(params), dtype)

    def checksums(self, params, dtype: str) -> dict[str, int]:
        """A checksum of each tensor, by its name in the model."""
        return hf.named_checksums(self._scaled(params), dtype)

    def _scaled(self, params):
        own = lora.adapters(params)
        scale = lambda path, x: self.lora.scale * x if path[-2].key == "lora_B" else x
        return jax.tree_util.tree_map_with_path(scale, own)


@dataclass(frozen=True)
class Policy:
    """Functions of a model's parameters; temperature 0 (greedy) is trained as 1."""

    definition: Any

    @property
    def experts(self) -> tuple[int, int, int] | None:
        """`(layers, experts of a token, experts)`, of a mixture."""
        shape, _ = qwen2.settings(self.definition)
        mixture = shape.mixture
        return mixture and (shape.num_layers, mixture.chosen, mixture.experts)

    def logp(self, temperature: float = 1.0) -> Callable[[Any, Inputs], PerToken]:
        """`(params, inputs) -> [R,C]`, the log-probs that are trained."""
        return partial(logprobs.of_responses, self.definition, temperature=temperature or 1.0)

    def scores(
        self, temperature: float = 1.0, *, proxy: float = 0.0, top: logprobs.Top | None = None
    ) -> Callable[[Any, Inputs], Any]:
        """`(params, inputs) -> logprobs.Scores`; `proxy` above 0 adds `proxy_logp`, `top` itself."""
        return partial(
            logprobs.scores, self.definition, temperature=temperature or 1.0, proxy=proxy, top=top
        )

    def cast_frozen(self, params: Any) -> Any:
        """Parameters that are not trained, in the model's dtype: same log-probs, less memory."""
        dtype = jnp.dtype(qwen2.settings(self.definition)[1].dtype)
        return jax.tree.map(lambda x: x if x.dtype == dtype else x.astype(dtype), params)

    def generator(
        self, mesh: Mesh, *, block: int, devices_a_copy: int | None = None, routed: bool = False
    ) -> "ScannedGenerator | UnrolledGenerator":
        """Generation on the trainer's devices; `devices_a_copy` (None: the fewest) share one copy.

        `block` is the number of cache columns in a block, which only small models on CPUs have. If
        `routed`, a mixture's experts are kept. Adapters are merged into weights of float32 alone: a
        weight of bfloat16 would round away most of what young ones add, which the trainer computes.
        """
        from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator

        shared = devices_a_copy or fewest_devices(self.definition, mesh)
        there = mesh_of_copies(mesh, shared)
        shape, compute = qwen2.settings(self.definition)
        merges = shape.lora is not None and jnp.dtype(compute.dtype) == jnp.float32
        adapted, routed = shape.lora if merges else None, routed and self.experts is not None
        sampled = replace(shape, lora=None) if merges else shape
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        # until JAX 0.12 a CPU widened narrow weights at every use (docs/benchmarks.md)
        wide = on_cpu and jax.__version_info__ < (0, 12)
        dtype = jnp.float32 if wide else compute.dtype
        definition, shapes = qwen2.graph(sampled, replace(compute, dtype=dtype))
        numbers = sum(x.size for x in jax.tree.leaves(shapes["layers"]))
        small = jnp.dtype(dtype).itemsize * numbers < APART * shape.num_layers
        if on_cpu and (small or jnp.dtype(dtype) != compute.dtype):
            return ScannedGenerator(definition, block, there, adapted, compute.dtype, routed)
        return UnrolledGenerator(definition, there, adapted, routed)

    def served(self, shards: int) -> Served:
        """The model for servers, with scoring batches split over `shards` devices."""
        return Served(self.definition, shards)


def mesh_of_copies(mesh: Mesh, devices_a_copy: int) -> Mesh:
    """The same devices in order: neighbours, on the fastest links, share a copy of the weights."""
    count = mesh.size
    if devices_a_copy < 1 or count % devices_a_copy:
        raise UserError(
            f"engine: devices_a_copy = {devices_a_copy} does not divide the {count} devices of the mesh"
        )
    return Mesh(mesh.devices.reshape(count // devices_a_copy, 1, devices_a_copy), AXES)


def fewest_devices(definition: Any, mesh: Mesh | AbstractMesh, memory: int | None = None) -> int:
    """The fewest devices per copy so that it takes at most half of the memory left by the trainer.

    The other half is for the cache. `memory` is bytes per device (None: as the device reports); if
    it is unknown, every device has a copy.
    """
    memory = memory or _memory(mesh)
    if memory is None:
        return 1
    shape, compute = qwen2.settings(definition)
    count = qwen2.parameter_count(replace(shape, lora=None))
    trained = qwen2.parameter_count(shape) - count if shape.lora else count
    width = jnp.dtype(compute.dtype).itemsize
    copy = count * width
    held = count if shape.lora and shape.lora.base == "int8" else copy
    taken = TRAINER * trained + held
    room = memory - taken / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    sizes = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
    return next((n for n in sizes if copy / n <= room / 2), mesh.size)


def _memory(mesh: Mesh | AbstractMesh) -> int | None:
    """Memory in bytes of one of the mesh's devices in this process, if it reports any."""
    if isinstance(mesh, AbstractMesh):
        return None
    here = set(jax.local_devices())
    stats = next((device.memory_stats() for device in mesh.devices.flat if device in here), None)
    return (stats or {}).get("bytes_limit")
