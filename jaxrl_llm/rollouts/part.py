"""The part of a mesh and of arrays that lies on the devices of this process, as a mesh and arrays of its own."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.errors import UserError


def of_mesh(mesh: Mesh) -> Mesh:
    """The copies (first axis) on the devices of this process; a copy that several share is refused."""
    copies = mesh.devices.reshape(len(mesh.devices), -1)
    here = np.vectorize(lambda device: device.process_index == jax.process_index())(copies)
    if (here.any(1) != here.all(1)).any():
        raise UserError(
            f"engine: {copies.shape[1]} devices share a copy of the weights, and a host has fewer: use Vllm, or a "
            "devices_a_copy that divides the devices of a host"
        )
    return mesh if here.all() else Mesh(mesh.devices[here.all(1)], mesh.axis_names)


def of_array(array: Any, mesh: Mesh) -> jax.Array:
    """What this process has of an array that is whole on each copy; `mesh` is its part of the array's."""
    if array.is_fully_addressable:
        return array
    mine = [shard.data for shard in array.addressable_shards]
    place = NamedSharding(mesh, array.sharding.spec)
    return jax.make_array_from_single_device_arrays(array.shape, place, mine)
