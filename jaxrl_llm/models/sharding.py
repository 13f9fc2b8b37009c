"""Placement of arrays: a mesh of named axes, and one sharding rule per parameter."""

import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import accelerators
from jaxrl_llm.errors import UserError

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
HOST = "pinned_host"  # JAX's name for host memory
PIECE = 2**28  # bytes of an array that are gathered to a host at a time
VOCAB = ("tensor", "fsdp")  # tables of the vocabulary; `primitives.moved` says who travels
# a device that programs are compiled for though it is not here
ELSEWHERE: ContextVar[Any] = ContextVar("a device that is not here", default=None)

INTO = r"(self_attn/[qkv]|mlp/(gate|up))_proj|linear_attn/in_proj_\w+"
OUT_OF = r"(self_attn/o|mlp/down|linear_attn/out)_proj"
# Name and specs: the first spec whose axes all divide; else the first, less those that do not.
RULES = (
    (r"(embed_tokens(_per_layer)?|lm_head)/weight", P(VOCAB, None), P(None, VOCAB)),
    (r"(per_layer_projection_)?norm/weight", P()),
    (r"per_layer_model_projection/weight", P(None, "fsdp")),
    (r"layers/per_layer_input_gate/weight", P(None, None, "fsdp")),
    (r"layers/per_layer_projection/weight", P(None, "fsdp")),
    (r"layers/layer_scalar", P()),
    (
        r"layers/(\w+_layernorm(_\d)?|post_per_layer_input_norm|self_attn/[qk]_norm|linear_attn/norm)/weight",
        P(),
    ),
    (r"layers/self_attn/[qkv]_proj/weight", P(None, "tensor", None, "fsdp")),
    (r"layers/(self_attn/[qkv]|mlp/(gate|up))_proj/bias", P(None, "tensor")),
    (r"layers/(self_attn/o|mlp/down)_proj/bias", P()),
    (r"layers/self_attn/o_proj/weight", P(None, "fsdp", "tensor")),
    # the rows of qkv are queries, keys, values: no slice is one of heads, so what it gives moves
    (r"layers/linear_attn/in_proj_\w+/weight", P(None, "tensor", "fsdp")),
    (r"layers/linear_attn/(conv1d/weight|A_log|dt_bias)", P(None, "tensor")),
    (r"layers/linear_attn/out_proj/weight", P(None, "fsdp", "tensor")),
    (r"layers/(mlp/gate|mlp/shared_expert_gate|router/proj)/weight|layers/router/\w*scale", P()),
    (r"layers/(mlp/)?experts/\w+/weight", P(None, VOCAB)),  # see models/experts.py
    (r"layers/mlp/(shared_expert/)?(gate|up)_proj/weight", P(None, "tensor", "fsdp")),
    (r"layers/mlp/(shared_expert/)?down_proj/weight", P(None, "fsdp", "tensor")),
    (rf"layers/({INTO})/lora_A/weight", P(None, None, "fsdp")),
    (rf"layers/({INTO})/lora_B/weight", P(None, "tensor")),
    (rf"layers/({OUT_OF})/lora_A/weight", P(None, None, "tensor")),
    (rf"layers/({OUT_OF})/lora_B/weight", P(None, "fsdp")),
)


def make_mesh(data: int = 1, fsdp: int = -1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over all devices; one size may be -1 (the rest). A UserError if they do not fit."""
    if devices is None:
        accelerators.begin()
        accelerators.require_used(devices := jax.devices())
    devices = list(devices)
    devices.sort(key=lambda device: device.process_index)  # so that those of a host are neighbours
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"mesh {_show(sizes)}: sizes are positive, at most one of them -1")
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // -math.prod(sizes)
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh {_show(sizes)} does not make {len(devices)} devices: change the sizes, or use -1 once"
        )
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def param_shardings(shapes, mesh: Mesh):
    """The sharding of every array or shape in a tree; a UserError for a name without a rule."""

    def one(path, leaf):
        return NamedSharding(mesh, fit(_spec(path, leaf, mesh), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(one, shapes)


def params_like(shapes, mesh: Mesh):
    """float32 parameters as shapes with shardings, nothing allocated."""
    like = lambda x, place: jax.ShapeDtypeStruct(x.shape, "float32", sharding=place)
    return jax.tree.map(like, shapes, param_shardings(shapes, mesh))


def in_host_memory(place: NamedSharding) -> NamedSharding:
    """The same sharding in host memory; a UserError where the device cannot use that."""
    device = next(iter(place.device_set))
    known = [memory.kind for memory in device.addressable_memories()]
    if HOST in known:
        return place.with_memory_kind(HOST)
    if known:
        raise UserError(
            f"offload: a {device.device_kind} has no {HOST} memory in this JAX: set offload to 'none'"
        )
    # GPUs that are only compiled for list no memories; a concrete mesh would drop the memory kind
    return NamedSharding(place.mesh.abstract_mesh, place.spec, memory_kind=HOST)


def to_hosts(tree):
    """Moves arrays to host memory."""
    return jax.device_put(tree, jax.tree.map(lambda x: in_host_memory(x.sharding), tree))


def on_devices(tree):
    """Inside jit: moves arrays from host memory to the devices; others stay as they are."""
    device = jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, device) if waits(x) else x, tree)


def to_device_after(tree, after):
    """`on_devices(tree)`, no sooner than `after` is there: else the compiler starts with it."""
    if any(map(waits, jax.tree.leaves(tree))):
        tree, after = jax.lax.optimization_barrier((tree, after))
    return on_devices(tree), after


def pinned(tree, places):
    """Inside jit: keeps arrays in their shardings, and sends those of host memory back there."""

    def one(x, place):
        if place.memory_kind == HOST:
            return jax.device_put(x, jax.memory.Space.Host)
        return jax.lax.with_sharding_constraint(x, place)

    return jax.tree.map(one, tree, places)


def gathered(layer, dtype):
    """The weights of one layer in `dtype`, gathered over fsdp but still sharded over tensor.

    Gradients are sharded again as the weights are. Left to itself, the compiler for TPUs gathers a
    weight piece by piece within its product, and passes over the sums once for each piece.
    """

    if not split_over("fsdp"):
        return jax.tree.map(lambda weight: weight.astype(dtype), layer)

    def one(path, weight):
        spec = P(*_specs(f"layers/{_name(path)}")[0][1:])
        whole = P(*(None if axes == "fsdp" else axes for axes in spec))
        return _gathered(weight.astype(dtype), whole, spec)

    return jax.tree_util.tree_map_with_path(one, layer)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(weight, whole, spec):
    del spec
    # else the compiler may cast after the transfer, which then moves more bytes
    weight = jax.lax.optimization_barrier(weight)
    return constrain(weight, *whole)


_gathered.defvjp(
    lambda *args: (_gathered(*args), None),
    lambda whole, spec, saved, gradient: (constrain(gradient, *spec),),
)


def left_whole(shapes, mesh: Mesh) -> list[str]:
    """A sentence for each weight that an axis replicates because a dimension does not divide."""
    return [
        f"{_name(path)}: {size} does not divide over {_shards(axes, mesh)} ({', '.join(_names(axes, mesh))}), "
        "so each of these devices holds and computes all of it"
        for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
        if _name(path).endswith("weight")
        for size, axes in zip(leaf.shape, _spec(path, leaf, mesh), strict=False)
        if not divides(size, axes, mesh)
    ]


def _spec(path, leaf, mesh) -> P:
    """The spec that the rule table gives a parameter."""
    fits = lambda spec: all(
        divides(size, axes, mesh) for size, axes in zip(leaf.shape, spec, strict=False)
    )
    specs = _specs(_name(path))
    return next(filter(fits, specs), specs[0])


def _specs(name: str) -> list[P]:
    """Those of the rule for a parameter of this name."""
    for pattern, *specs in RULES:
        if re.fullmatch(pattern, name):
            return specs
    raise UserError(f"no sharding rule covers the parameter {name}: add one to the rule table")


def _name(path) -> str:
    """Without the stack of layers, where there are several."""
    return "/".join(key.key for key in path if "_mod_" not in key.key)


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A sharded array, from a host array that every process has in full."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def replicated(array: np.ndarray, mesh: Mesh) -> jax.Array:
    """The whole array on every device of the mesh."""
    return put(array, NamedSharding(mesh, P()))


def on_host(array: jax.Array) -> np.ndarray:
    """The whole array as numpy on every process; all processes must call it."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def on_first_host(array: jax.Array) -> np.ndarray:
    """The whole array as numpy on process 0, gathered in pieces; others may get an empty one."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    first, rows = jax.process_index() == 0, max(1, PIECE * len(array) // array.nbytes)
    out = np.empty(array.shape if first else 0, array.dtype)
    for i in range(0, len(array), rows):
        piece = on_host(array[i : i + rows])
        if first:
            out[i : i + rows] = piece
    return out


def fit(spec: P, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
    """The spec without the axes that do not divide their dimension, which is then replicated.

    Axes of a `shard_map` around the call are dropped too: there each device sees its slice already.
    """
    free = [_names(a, mesh) for a in spec]
    return P(
        *(
            (a or None) if divides(size, a, mesh) else None
            for a, size in zip(free, shape, strict=False)
        )
    )


def divides(size: int, axes, mesh) -> bool:
    """True if a dimension of this size splits evenly over the mesh axes."""
    return size % _shards(axes, mesh) == 0


def current_mesh():
    """The mesh set around the call, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def platform() -> str:
    """The platform of the current mesh's devices, or of the default ones: cpu, gpu or tpu."""
    mesh = current_mesh()
    device = None if mesh is None else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def capability() -> float:
    """CUDA's compute capability of the current mesh's GPUs, such as 7.5; infinity if unknown."""
    mesh = current_mesh()
    kind = (
        None if mesh is None or mesh.abstract_device is None else mesh.abstract_device.device_kind
    )
    known = (device for device in (*jax.devices(), ELSEWHERE.get()) if device is not None)
    device = next((d for d in known if kind in (None, d.device_kind)), None)
    return float(getattr(device, "compute_capability", math.inf))


def split_over(*axes: str) -> tuple[str, ...]:
    """Those of the axes with more than one device, less those of a `shard_map` around the call."""
    mesh = current_mesh()
    return () if mesh is None else tuple(a for a in _names(axes, mesh) if mesh.shape[a] > 1)


def count(axes: tuple[str, ...]) -> int:
    """Over how many shards these axes of the current mesh split a dimension."""
    mesh = current_mesh()
    return 1 if mesh is None else _shards(axes, mesh)


def pmax_over_mesh(x):
    """The maximum over the devices of a `shard_map` around the call, so that they agree."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.pmax(x, tuple(mesh.manual_axes))


def on_each_device(local: Callable[..., Any], in_specs, out_specs) -> Callable[..., Any]:
    """`local` on every device's slices, by `shard_map`; `local` itself on a single device."""
    if not split_over(*AXES):
        return local
    free = lambda specs: jax.tree.map(
        lambda spec: P(*((_names(axes, current_mesh()) or None) for axes in spec)),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.shard_map(local, in_specs=free(in_specs), out_specs=free(out_specs), check_vma=False)


def constrain(x, *spec):
    """Constrains the sharding of an intermediate array where a mesh is set, by `fit`."""
    mesh = current_mesh()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, fit(P(*spec), x.shape, mesh))


def waits(x) -> bool:
    """True if an array lies in the memory of the hosts."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def _shards(axes, mesh):
    return math.prod(mesh.shape[name] for name in _names(axes, mesh))


def _names(axes, mesh) -> tuple[str, ...]:
    taken = getattr(mesh, "manual_axes", ())
    return tuple(a for a in ((axes,) if isinstance(axes, str) else axes or ()) if a not in taken)


def _show(sizes):
    return " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
