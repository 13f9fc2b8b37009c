"""Machines to plan for: their data sheets, and their devices as described by their compilers.

The machine need not be there: programs are compiled for it on a CPU, and nothing is allocated.
"""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies

from jaxrl_llm.errors import UserError, first_line

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Chip:
    """One device by its data sheet: bytes of memory, FLOP/s in bfloat16, bytes/s; 0 is unknown.

    `bandwidth` is that of the memory, `link` to the other devices of its slice or node, `network`
    to devices beyond, `host` to the memory of its host (not published for TPUs: a guess).
    """

    platform: Literal["tpu", "cuda", "here"]
    memory: int
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float = 0.0


CHIPS = {
    "v5e": Chip("tpu", 16 * GIB, 197e12, 0.82e12, 100e9, 6e9, 16e9),
    "v5p": Chip("tpu", 95 * GIB, 459e12, 2.77e12, 300e9, 6e9, 16e9),
    "v6e": Chip("tpu", 32 * GIB, 918e12, 1.64e12, 200e9, 12e9, 16e9),
    "h100": Chip("cuda", 80 * GIB, 989e12, 3.35e12, 450e9, 50e9, 64e9),
    "h200": Chip("cuda", 141 * GB, 989e12, 4.8e12, 450e9, 50e9, 64e9),
}
SLICES = {  # the topologies that slices of a kind come in
    "v5e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "v5p": "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8",
}
SLICES["v6e"] = SLICES["v5e"]
CORES = {"v5p": 2}  # cores a chip, where names count cores: v5p-8 has four chips
NAMES = "v5e-16, v5p-8, v6e-8, v5p:2x2x2, h100x8, h200x1, 4xh100x8, or here"

HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""


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
    elif match := re.fullmatch(r"(v\d\w):(\d+x\d+(?:x\d+)?)", name):
        if match[1] in SLICES:
            return _slice(name, match[1], match[2])
    elif (match := re.fullmatch(r"(?:([1-9]\d*)x)?(h\d00)x([1-9]\d*)", name)) and match[2] in CHIPS:
        return _nodes(name, match[2], int(match[1] or 1), int(match[3]))
    raise UserError(f"--on {name}: no such machine is known: name one like {NAMES}")


@contextmanager
def compiling_for(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """A context that lowers programs for the devices of the mesh, whether they exist or not."""
    device = mesh.devices.flat[0]
    here = device in jax.devices()
    with ExitStack() as stack:
        if not (here and device.platform == "gpu"):
            # lowering asks for cuDNN's version and the GPU's generation, and there is neither
            answers = {"check_cudnn_version": 91200, "check_compute_capability": None}
            for check, answer in answers.items():
                patch = mock.patch.object(fused_attention_stablehlo, check, return_value=answer)
                stack.enter_context(patch)
        # with `set_mesh`, JAX would place eager constants on devices that do not exist
        meshes = jax.set_mesh(mesh) if here else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        stack.enter_context(meshes)
        yield


def _here() -> Machine:
    devices = tuple(jax.devices())
    stats = devices[0].memory_stats() or {}
    everything = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    chip = Chip("here", stats.get("bytes_limit", everything), 0.0, 0.0, 0.0, 0.0)
    return Machine("here", devices, jax.local_device_count(), chip)


def _slice(name: str, kind: str, layout: str) -> Machine:
    _installed("libtpu", "plan-tpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server here
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    sizes = [int(size) for size in layout.split("x")]
    host = {"chips_per_host_bounds": (1, 1, 1)} if set(sizes) == {1} else {}
    try:
        found = topologies.get_topology_desc(f"{kind}:{layout}", "tpu", **host)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--on {name}: {first_line(error)}") from error
    return Machine(name, tuple(found.devices), len(found.devices), CHIPS[kind])


def _nodes(name: str, kind: str, nodes: int, each: int) -> Machine:
    _installed("jax_plugins.xla_cuda13", "plan-gpu")
    chip = CHIPS[kind]
    config = HOPPER.format(name=kind.upper(), bandwidth=int(chip.bandwidth), memory=chip.memory)
    found = topologies.get_topology_desc(
        f"{nodes}x1x{each}", "cuda", target_config=config, topology=f"{nodes}x1x{each}"
    )
    return Machine(name, tuple(found.devices), each, chip)


def _installed(module: str, extra: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UserError(f"the compiler is not here: pip install 'jaxrl-llm[{extra}]'")
