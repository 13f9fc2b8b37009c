"""Adapters of low rank (LoRA) in a tree of parameters, and in the two files of PEFT's format.

The layers compute with them in qwen2.py.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, int8, qwen2, sharding
from jaxrl_llm.models.int8 import dequantize
from jaxrl_llm.models.primitives import merge_params
from jaxrl_llm.models.qwen2 import Lora

ADAPTER = ("lora_A", "lora_B")
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# fields that change no number, and values of others under which they do not, beside None and no
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode"),
    *("layers_pattern", "lora_alpha", "lora_dropout", "megatron_core", "peft_version", "r"),
    *("qalora_group_size", "revision", "target_modules", "task_type", "use_rslora"),
}
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),  # others change the base
}


def adapters(params):
    """The part of a tree of parameters that belongs to adapters; empty without any."""
    inner = {
        key: value if key in ADAPTER else adapters(value)
        for key, value in params.items()
        if isinstance(value, dict)
    }
    return {key: value for key, value in inner.items() if value}


def base_quantizer(shape: qwen2.Shape) -> Callable[[Any, Any], Any]:
    """`(path, array) -> ` what is kept of a parameter that is not trained: the array, or an `Int8`."""
    return _rounded if shape.lora and shape.lora.base == "int8" else lambda path, x: x


def _rounded(path, weight):
    """A product's weight in 8 bits, others as they are."""
    product = path[0].key == "layers" and re.fullmatch(r"\w+_proj(_qkv|_z)?", path[-2].key)
    if not (product and path[-1].key == "weight"):
        return weight
    places = int8.placed(weight, weight.sharding)
    if isinstance(weight, jax.ShapeDtypeStruct):
        like = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        return jax.tree.map(like, jax.eval_shape(int8.rounded, weight), places)
    return jax.jit(int8.rounded, out_shardings=places)(weight)


def base_of(params):
    """The other part of a tree."""
    inner = {
        key: base_of(value) if isinstance(value, dict) else value for key, value in params.items()
    }
    return {key: value for key, value in inner.items() if key not in ADAPTER}


def merged(params, lora: Lora | None) -> Any:
    """The parameters of a model without adapters that computes the same: W + scale B A."""
    if lora is None or not isinstance(params, dict):
        return dequantize(params, jnp.float32)
    rest = {key: merged(value, lora) for key, value in params.items() if key not in ADAPTER}
    if not params.keys() >= {*ADAPTER}:
        return rest
    a, b = (params[key]["weight"].astype(jnp.float32) for key in ADAPTER)  # [N,r,*in], [N,*out,r]
    exact = jax.lax.Precision.HIGHEST
    product = jax.lax.dot_general(b, a, (((b.ndim - 1,), (1,)), ((0,), (0,))), exact)
    weight = rest["weight"]
    return rest | {"weight": (weight + lora.scale * product).astype(weight.dtype)}


def trained(shape: qwen2.Shape):
    """Shapes of the parameters that are trained: of adapters if there are any, else all."""
    shapes = qwen2.graph(shape)[1]
    return adapters(shapes) if shape.lora else shapes


def shape_with_adapters(shape: qwen2.Shape, lora: Lora | None) -> qwen2.Shape:
    """The shape with these adapters; a UserError if they are of experts, which have none, or of nothing.

    Those of a model with experts are by default the ones of its attention.
    """
    if lora and shape.mixture and lora.targets == qwen2.LINEAR:
        lora = replace(lora, targets=qwen2.LINEAR[:4])
    of_delta = [name for name in lora.targets if name in qwen2.OF_DELTA] if lora else []
    if of_delta and shape.delta is None:
        raise UserError(f"lora: this model has no {', '.join(of_delta)}: leave them out of targets")
    of_mlp = [name for name in lora.targets if name in qwen2.LINEAR[4:]] if lora else []
    if shape.mixture and of_mlp:
        raise UserError(
            f"lora: a model with experts has no adapters of {', '.join(of_mlp)}: leave them out of targets"
        )
    adapted = replace(shape, lora=lora)
    if lora and not trained(adapted):
        raise UserError(f"lora: no layer of this model has {', '.join(lora.targets)}")
    return adapted


def config_of(lora: Lora, base: str = "", revision: str | None = None) -> dict[str, Any]:
    """adapter_config.json; `base` is the name of the model that the adapters belong to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_config(folder: Path) -> tuple[Lora, dict[str, Any]]:
    """Settings of the adapters in a folder, and its config; a UserError for what is not computed here."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{path} is missing: {folder} is no folder of adapters")
    config = hf.read_json(path)
    for name, value in config.items():
        if name not in HARMLESS and value and value not in PLAIN.get(name, ()):
            raise UserError(f"{path}: {name} = {value!r} is not supported")
    rank, alpha, named = (config.get(x) for x in ("r", "lora_alpha", "target_modules"))
    targets: Any = [*qwen2.LINEAR] if named == "all-linear" else named
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and isinstance(targets, list)):
        raise UserError(
            f"{path}: r, lora_alpha and target_modules must be a number, a number and a list of names"
        )
    if not (0 < rank < 2**31 and 0 < alpha < 2**31):
        raise UserError(
            f"{path}: r = {rank} and lora_alpha = {alpha} must be above 0 and below 2^31"
        )
    scaled = alpha * rank**0.5 if config.get("use_rslora") else alpha
    targets = {str(name).rpartition(".")[2] for name in targets}  # PEFT may write whole paths
    order = [name for name in (*qwen2.LINEAR, *qwen2.OF_DELTA) if name in targets]
    return Lora(rank, float(scaled), (*order, *sorted(targets - {*order}))), config


def load(folder: Path, shape: qwen2.Shape, mesh: Mesh) -> tuple[Lora, Any]:
    """`(lora, parameters)` of the adapters in a folder, sharded, in float32."""
    lora, _ = read_config(folder)
    shapes = trained(shape_with_adapters(shape, lora))
    places = sharding.param_shardings(shapes, mesh)
    hf.check_sums(folder)
    return lora, hf.read(hf.Tensors(folder, TENSORS, PREFIX), shapes, places, "float32")


def named_tensors(params: Any, dtype: DTypeLike) -> Iterator[tuple[str, np.ndarray]]:
    """(PEFT's name, array) pairs of adapters; all processes must iterate."""
    for name, array in hf.named_tensors(params, dtype):
        yield PREFIX + name, array


def merge(params: Any, lora: Lora, added: Any) -> Any:
    """A model's parameters with adapters merged into them; consumes the former."""
    together = lambda params, added: merged(merge_params(added, params), lora)
    return jax.jit(together, donate_argnums=0)(params, added)


def export(params: Any, folder: Path, *, source: Path, dtype: DTypeLike) -> None:
    """Writes adapters with the config and the tokenizer of `source`; complete or not at all."""
    with hf.new_folder(folder, source) as there:
        tensors = dict(named_tensors(params, dtype))
        safetensors.numpy.save_file(tensors, there / TENSORS, metadata={"format": "pt"})
        config = hf.read_json(source / CONFIG)
        (there / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
