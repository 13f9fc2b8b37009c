"""How generation lies on the trainer's devices: whole copies of the weights, sequences spread over them.

A token then costs no communication, or that of the few devices that share a copy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.sharding import AXES

TRAINER = 12  # bytes of a parameter that stay, beside its reference: itself and Adam's two moments


def mesh_of_copies(mesh: Mesh, devices_a_copy: int) -> Mesh:
    """The same devices in the same order: neighbours, on the fastest links, share a copy of the weights."""
    count = mesh.size
    if devices_a_copy < 1 or count % devices_a_copy:
        raise UserError(
            f"engine: devices_a_copy = {devices_a_copy} does not divide the {count} devices of the mesh"
        )
    return Mesh(mesh.devices.reshape(count // devices_a_copy, 1, devices_a_copy), AXES)


def devices_a_copy(definition: Any, mesh: Mesh | AbstractMesh, memory: int | None = None) -> int:
    """The fewest devices on which a copy takes at most half of what the trainer leaves of their memory.

    The other half is for the cache. `memory` is that of a device in bytes (None: as it says itself); if nobody
    knows, each has a copy.
    """
    memory = memory or _memory(mesh)
    if memory is None:
        return 1
    settings = dict(definition.attributes)  # of the model: shape and compute
    shape, compute = settings["shape"].value, settings["compute"].value
    count = qwen2.parameter_count(shape)
    width = jnp.dtype(compute.dtype).itemsize
    room = memory - (TRAINER + width) * count / (mesh.shape["fsdp"] * mesh.shape["tensor"])
    copy = count * width
    sizes = [n for n in range(1, mesh.size + 1) if mesh.size % n == 0]
    return next((n for n in sizes if copy / n <= room / 2), mesh.size)


def _memory(mesh: Mesh | AbstractMesh) -> int | None:
    """Bytes of a device of this process that the mesh has, if it says."""
    if isinstance(mesh, AbstractMesh):
        return None
    here = set(jax.local_devices())
    stats = next((device.memory_stats() for device in mesh.devices.flat if device in here), None)
    return (stats or {}).get("bytes_limit")
