"""Machines to plan for: their data sheets, and their devices as described by their compilers.

The machine need not be there: programs are compiled for it on a CPU, and nothing is allocated.
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.typing import DTypeLike

from jaxrl_llm.accelerators import host_memory, require_used
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models import sharding

GB, GIB = 10**9, 2**30
PASSES = 6  # over bfloat16, by which a TPU multiplies float32 with all bits


@dataclass(frozen=True)
class Chip:
    """One device by its data sheet: bytes of memory, FLOP/s in bfloat16, bytes/s; 0 is unknown.

    `memory` is what its driver gives to programs. `bandwidth` is that of the memory, `link` to the
    other devices of its slice or node, `network` to devices beyond, `host` to the memory of its
    host (not published for TPUs: a guess). Drivers and compilers call it `kind`; of GPUs they ask
    the compute capability too, and the numbers of cores and bytes of their cache. `whole` is FLOP/s
    in float32 with all bits, without tensor cores (0: as a TPU has them).
    """

    platform: Literal["tpu", "cuda", "here"]
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float = 0.0
    kind: str = ""
    capability: float = 0.0
    cores: int = 0
    cache: int = 0
    whole: float = 0.0

    def computing(self, dtype: DTypeLike) -> "Chip":
        """The chip with the FLOP/s of the models' products in this precision."""
        if jnp.dtype(dtype) != jnp.float32:
            return self
        return replace(self, flops=self.whole or self.flops / PASSES)


def _gpu(kind: str, capability: float, cores: int, cache: int, memory: float, flops: tuple[float, float],
         bandwidth: float, link: float, host: float, network: float = 6e9) -> Chip:  # fmt: skip
    """Cache in MiB, memory in GiB, FLOP/s in T (in bfloat16, in float32), bytes/s in G."""
    size, (half, whole) = int(memory * GIB), (rate * 1e12 for rate in flops)
    rates = (half, bandwidth * GB, link * GB, network, host * GB)
    return Chip("cuda", size, *rates, kind, capability, cores, cache * 2**20, whole)


CHIPS = {
    "v5e": Chip("tpu", int(15.75 * GIB), 197e12, 0.82e12, 100e9, 6e9, 16e9, "TPU v5 lite"),
    "v5p": Chip("tpu", 95 * GIB, 459e12, 2.77e12, 300e9, 6e9, 16e9, "TPU v5"),
    "v6e": Chip("tpu", int(31.24 * GIB), 918e12, 1.64e12, 200e9, 12e9, 16e9, "TPU v6 lite"),
    "t4": _gpu("Tesla T4", 7.5, 40, 4, 14.6, (65, 8.1), 320, 16, 16),
    "a10": _gpu("NVIDIA A10", 8.6, 72, 6, 22.0, (125, 31.2), 600, 32, 32),
    "a100-40": _gpu("NVIDIA A100-SXM4-40GB", 8.0, 108, 40, 39.4, (312, 19.5), 1555, 300, 32, 25e9),
    "a100-80": _gpu("NVIDIA A100-SXM4-80GB", 8.0, 108, 40, 79.1, (312, 19.5), 2039, 300, 32, 25e9),
    "l4": _gpu("NVIDIA L4", 8.9, 58, 48, 22.0, (121, 30.3), 300, 32, 32),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", 8.9, 128, 72, 23.5, (165, 82.6), 1008, 32, 32),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", 12.0, 170, 96, 31.3, (209, 104.8), 1792, 64, 64),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 9.0, 132, 50, 79.1, (989, 67), 3350, 450, 64, 50e9),
    "h200": _gpu("NVIDIA H200", 9.0, 132, 50, 139.8, (989, 67), 4800, 450, 64, 50e9),
    "gh200": _gpu("NVIDIA GH200 480GB", 9.0, 132, 50, 94.5, (989, 67), 4000, 450, 450, 50e9),
    "b200": _gpu("NVIDIA B200", 10.0, 148, 126, 178.3, (2250, 75), 7700, 900, 64, 50e9),
}
# shared memory in KiB and threads of a core, by compute capability
CORE = {7.5: (64, 1024), 8.0: (164, 2048), 8.6: (100, 1536), 8.9: (100, 1536), 9.0: (228, 2048),
        10.0: (228, 2048), 12.0: (100, 1536)}  # fmt: skip
SLICES = {  # the topologies that slices of a kind come in
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v5p": "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8",
}
SLICES["v6e"] = SLICES["v5e"]
CORES = {"v5p": 2}  # cores a chip, where names count cores: v5p-8 has four chips
NAMES = "v5e-16, v5p-8, v6e-8, v5p:2x2x2, h100x8, 4xh100x8, or here; GPUs are " + ", ".join(
    name for name, chip in CHIPS.items() if chip.platform == "cuda"
)

TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: {cache}
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""
# Since JAX 0.12 Pallas knows GPUs by name: this one only by that of another of its generation
ALIAS = {"NVIDIA GeForce RTX 5090": "NVIDIA RTX PRO 6000"}


@dataclass(frozen=True)
class Machine:
    """Devices of one kind; each `together` of them (a node, or a whole slice) share fast links."""

    name: str
    devices: tuple[Any, ...]
    together: int
    chip: Chip


def machine(name: str) -> Machine:
    """The machine named like v5e-16, v5p:2x2x2, 4xh100x8 (nodes x kind x devices); or UserError."""
    if name == "here":
        return _here()
    if match := re.fullmatch(r"(v\d\w)-(\d+)", name):
        kind, count = match[1], int(match[2])
        for layout in SLICES.get(kind, "").split():
            if count == math.prod(map(int, layout.split("x"))) * CORES.get(kind, 1):
                return _slice(name, kind, layout)
    elif match := re.fullmatch(r"(v\d\w):([1-9]\d*x[1-9]\d*(?:x[1-9]\d*)?)", name):
        if match[2].count("x") == SLICES.get(match[1], "").partition(" ")[0].count("x"):
            return _slice(name, match[1], match[2])
    elif match := re.fullmatch(rf"(?:([1-9]\d*)x)?({'|'.join(CHIPS)})x([1-9]\d*)", name):
        return _nodes(name, match[2], int(match[1] or 1), int(match[3]))
    raise UserError(f"--on {name}: no such machine is known: name one like {NAMES}")


@contextmanager
def compiling_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """A context that lowers programs for the devices of the mesh, whether they exist or not."""
    device = mesh.devices.flat[0]
    here = device in jax.devices()
    with ExitStack() as stack:
        if not (here and device.platform == "gpu"):
            stack.enter_context(_cudnn_without_a_gpu())
        elsewhere = sharding.ELSEWHERE.set(None if here else device)
        stack.callback(sharding.ELSEWHERE.reset, elsewhere)
        # with `set_mesh`, JAX would place eager constants on devices that do not exist
        meshes = jax.set_mesh(mesh) if here else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        stack.enter_context(meshes)
        yield


@contextmanager
def _cudnn_without_a_gpu() -> Iterator[None]:
    """For the block, JAX lowers cuDNN's attention by 9.12, and not for one GPU's generation.

    It asks the driver for both in functions of a module of its own, with no public way to tell it.
    """
    answers = {"check_cudnn_version": lambda: 91200, "check_compute_capability": lambda _: False}
    module = fused_attention_stablehlo.__dict__
    theirs = {name: module[name] for name in answers}  # a KeyError once JAX has renamed them
    module.update(answers)
    try:
        yield
    finally:
        module.update(theirs)


def chip_of(device: Any) -> Chip | None:
    """The data sheet of a device that is here; None where there is none, as for an H100 PCIe."""
    kind = device.device_kind
    for other, same in (("PCIE", "SXM4"), ("v5p", "v5"), ("v5e", "v5 lite"), ("v6e", "v6 lite")):
        kind = kind.replace(other, same)  # an A100 but for its links; names in newer JAX
    return next((chip for chip in CHIPS.values() if chip.kind == kind), None)


def _here() -> Machine:
    require_used(devices := tuple(jax.devices()))
    own = jax.local_devices()  # others tell nothing of their memory
    everything = host_memory() // len(own)
    memory = (own[0].memory_stats() or {}).get("bytes_limit", everything)
    chip = Chip("here", memory, 0.0, 0.0, 0.0, 0.0)
    return Machine("here", devices, jax.local_device_count(), chip)


def _slice(name: str, kind: str, layout: str) -> Machine:
    _installed("libtpu", "plan-tpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server here
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    sizes = [int(size) for size in layout.split("x")]
    # or in JAX 0.10 a host has four chips
    host = {"chips_per_host_bounds": (1, 1, 1)} if set(sizes) == {1} else {}
    try:
        found = topologies.get_topology_desc(f"{kind}:{layout}", "tpu", **host)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--on {name}: {first_line(error)}") from error
    return Machine(name, tuple(found.devices), len(found.devices), CHIPS[kind])


def _nodes(name: str, kind: str, nodes: int, each: int) -> Machine:
    _installed("jax_plugins.xla_cuda13", "plan-gpu")
    chip = CHIPS[kind]
    found = topologies.get_topology_desc(
        f"{nodes}x1x{each}", "cuda", target_config=_target(chip), topology=f"{nodes}x1x{each}"
    )
    return Machine(name, tuple(found.devices), each, chip)


def _target(chip: Chip) -> str:
    """A device as XLA's compiler for GPUs wants it described."""
    shared, threads = CORE[chip.capability]
    major, _, minor = str(chip.capability).partition(".")
    return TARGET.format(
        shared=shared * 1024,
        optin=(shared - (major != "7")) * 1024,  # since Ampere a block leaves 1 KiB to the system
        threads=threads,
        cores=chip.cores,
        fpus=64 if chip.capability <= 8.0 else 128,
        cache=chip.cache,
        bandwidth=int(chip.bandwidth),
        memory=chip.memory,
        major=major,
        minor=minor,
        features="feature_extension: ACCELERATED_FEATURES" * (chip.capability >= 9.0),
        kind=ALIAS.get(chip.kind, chip.kind),
    )


def _installed(module: str, extra: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UserError(f"the compiler is not here: pip install 'jaxrl-llm[{extra}]'")
