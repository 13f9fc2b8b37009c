"""Families of models: what config.json says of each as fields of a Shape, and back.

A new family is a row of FAMILIES, and a field of Shape for what no other has.
"""

import math
import pathlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.qwen2 import Delta, LayerKind, MoE, Shape

SIZES = {  # fields of a Shape that are whole numbers, by their names in config.json
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
FLAGS = {"attention_bias": (*QKV, "o_proj"), "mlp_bias": MLP}  # what has a bias, if one is true
ACTIVATIONS: dict[str, Literal["silu", "gelu"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # layers
DELTA = {  # fields of a Delta, by their names in config.json, and what they are if absent
    "key_heads": ("linear_num_key_heads", 16),
    "heads": ("linear_num_value_heads", 32),
    "key_size": ("linear_key_head_dim", 128),
    "value_size": ("linear_value_head_dim", 128),
    "width": ("linear_conv_kernel_dim", 4),
}
LARGEST = 2.0**53  # of what a config may say
REFUSED = (  # fields that have to be absent, null or false
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "quantization_config",
    "use_bidirectional_attention",
    "enable_moe_block",
)
GEMMA4_ROPES = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
GEMMAS = ("gemma3_text", "gemma4_text")
KV_HEADS = {  # where a config leaves them out
    **dict.fromkeys(("qwen2", "qwen3", "exaone4"), 32),
    **dict.fromkeys(("qwen3_moe", "smollm3", *GEMMAS, "qwen3_5_text"), 4),
    **{"mistral": 8, "qwen3_5_moe_text": 2},
}
LENGTHS = {"llama": 2048, "exaone4": 2048, **dict.fromkeys(("mistral", *GEMMAS), 131_072)}


class Family(NamedTuple):
    """A row: fields of its Shapes that no config changes, and what absent fields of one mean."""

    architecture: str
    fixed: Mapping[str, Any] = {}
    biases: tuple[str, ...] = ()  # of every model
    flags: tuple[str, ...] = ()  # those of FLAGS that are read
    tied: bool = False
    head_dim: int = 0
    theta: float = 1e4
    eps: float = 1e-6
    scalar: int | None = None  # of queries; None: it is head_dim, whatever a config says
    window: int | None = 4096  # 0: no layer has one, whatever a config says
    pattern: int = 0  # every so-manyth layer has none
    types: tuple[str, ...] = (FULL, SLIDING)
    whole: str = ""  # the type of its models with parts for images; they have a `text_config`
    beside: tuple[str, ...] = ()  # what tensors begin with that are not of the language model
    bears: Mapping[str, Any] = {}  # values of REFUSED that it has, None for any


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", biases=QKV),
    "qwen3": Family(
        "Qwen3ForCausalLM", {"norms_of_heads": True}, flags=("attention_bias",), head_dim=128
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"norms_of_heads": True}, flags=("attention_bias",), window=0
    ),
    "llama": Family("LlamaForCausalLM", flags=("attention_bias", "mlp_bias"), window=0),
    "mistral": Family("MistralForCausalLM"),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        flags=("attention_bias", "mlp_bias"),
        tied=True,
        theta=2e6,
        window=None,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {"norms_of_heads": True, "norms_before": False, "norms_after": True},
        eps=1e-5,
        pattern=4,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            "norms_of_heads": True,
            "norms_after": True,
            "norm_offset": True,
            "scaled_embedding": True,
        },
        flags=("attention_bias",),
        tied=True,
        head_dim=256,
        theta=1e6,
        scalar=256,
        pattern=6,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        {
            "norms_of_heads": True,
            "norms_after": True,
            "norm_wide": True,
            "norm_values": True,
            "scaled_embedding": True,
            "query_scalar": 1,
            "layer_scalars": True,
        },
        flags=("attention_bias",),
        tied=True,
        head_dim=256,
        theta=1e6,
        window=512,
        pattern=6,
        whole="gemma4",
        beside=(
            "model.vision_tower.",
            "model.audio_tower.",
            "model.embed_vision.",
            "model.embed_audio.",
        ),
        bears={
            "final_logit_softcapping": None,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": None,
        },
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        {"norms_of_heads": True, "norm_offset": True, "gated": True},
        flags=("attention_bias",),
        head_dim=256,
        window=None,
        pattern=4,
        types=(FULL, LINEAR),
        whole="qwen3_5",
        beside=("model.visual.", "mtp."),
    ),
}
FAMILIES["qwen3_5_moe_text"] = FAMILIES["qwen3_5_text"]._replace(
    architecture="Qwen3_5MoeForCausalLM", whole="qwen3_5_moe"
)
MIXED = {  # families with experts: what absent fields of a config mean
    "qwen3_moe": MoE(128, 8, 768, rescaled=False),
    "qwen3_5_moe_text": MoE(256, 8, 512, shared=512, fused=True),
    "gemma4_text": MoE(128, 8, 704, beside=True, fused=True),
}
WHOLE = {row.whole: name for name, row in FAMILIES.items() if row.whole}


def shape_of(config: dict[str, Any], where: pathlib.Path | str = "config.json") -> Shape:
    """The architecture in a config; a UserError names what is missing or not supported."""
    config = text_of(config, where)
    read = _Reader(config, where)
    name = read.need("model_type", str)
    read.require(
        name in FAMILIES, f"model_type {name!r} is not supported: one of {', '.join(FAMILIES)} is"
    )
    family = FAMILIES[name]
    for key in REFUSED:
        fine = key in family.bears and family.bears[key] in (None, config.get(key))
        read.require(fine or not config.get(key), f"{key} is not supported: only without it")
    mixture = _mixture(name, read) if name in MIXED else None
    narrow = {"intermediate_size": mixture.size} if mixture and mixture.shared else {}
    usual = {"num_key_value_heads": KV_HEADS.get(name), **narrow}
    if name in GEMMAS:
        usual |= {"num_attention_heads": 8, "vocab_size": 262_208 if name == GEMMAS[0] else 262_144}
    if name == "llama" or "num_key_value_heads" in config:  # null: each head has its own
        usual["num_key_value_heads"] = config.get("num_attention_heads")
    sizes = {field: read.number(key, usual.get(key)) for field, key in SIZES.items()}
    hidden, heads, kv_heads = (sizes[k] for k in ("hidden_size", "num_heads", "num_kv_heads"))
    given = config.get("head_dim") or family.head_dim
    read.require(given or hidden % heads == 0, "num_attention_heads does not divide hidden_size")
    width = read.number("head_dim", given or hidden // heads)
    read.require(
        heads % kv_heads == 0 and width % 2 == 0,
        f"{heads} heads of {width} for {kv_heads} key-value heads cannot be: heads share key-value heads "
        "evenly, and a head has an even size",
    )
    key = _activation_key(name)
    act = config.get(key, "gelu_pytorch_tanh" if name in GEMMAS else "silu")
    read.require(
        isinstance(act, str) and act in ACTIVATIONS,
        f"{key} {act!r} is not supported, only {', '.join(ACTIVATIONS)}",
    )
    flagged = [FLAGS[flag] for flag in family.flags if read.truth(flag, False)]
    scalar = read.number("query_pre_attn_scalar", family.scalar) if family.scalar else width
    scalar = {} if scalar == width else {"query_scalar": scalar}
    delta = _delta(read) if LINEAR in family.types else None
    turned = _rotary_size(read, width) if delta else width
    kinds = _kinds(name, family, sizes["num_layers"], width, read)
    return Shape(
        **sizes,
        **family.fixed,
        family=name,
        tied=read.truth("tie_word_embeddings", family.tied),
        head_size=None if width * heads == hidden else width,
        rms_norm_eps=read.number("rms_norm_eps", family.eps, float),
        max_length=_longest(name, read),
        kinds=kinds,
        biases=(*family.biases, *(one for some in flagged for one in some)),
        **scalar,
        **(_gemma4(sizes, kinds, read) if name == "gemma4_text" else {}),
        activation=ACTIVATIONS[act],
        mixture=mixture,
        rotary_size=None if turned == width else turned,
        delta=delta,
    )


def beside(shape: Shape) -> tuple[str, ...]:
    """Prefixes of tensors that are not of the language model, or that no layer of it reads."""
    own = range(shape.num_layers - shape.shared_layers, shape.num_layers)
    unread = (
        f"model.{part}layers.{i}.self_attn.{x}"
        for part in ("", "language_model.")
        for i in own
        for x in "kv"
    )
    return *FAMILIES[shape.family].beside, *(
        name + end for name in unread for end in ("_proj", "_norm")
    )


def text_of(config: dict[str, Any], where: pathlib.Path | str = "config.json") -> dict[str, Any]:
    """The part for the language model of a config that has one for images too, else all of it."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in WHOLE:
        return config
    text = _Reader(config, where).record("text_config").config
    tied = "tie_word_embeddings"
    return {"model_type": WHOLE[name], **text, **({tied: config[tied]} if tied in config else {})}


def with_text(config: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """A config with this one for its language model, `text`, and all else in it as it was."""
    if config.get("model_type") not in WHOLE:
        return config | text
    before = config["text_config"]
    above = {key: text[key] for key in ("dtype", "tie_word_embeddings")}
    of_all = {"architectures", "tie_word_embeddings"} - {*before}
    text = {key: value for key, value in text.items() if key not in of_all}
    text["rope_parameters"] = (before.get("rope_parameters") or {}) | text["rope_parameters"]
    return config | above | {"text_config": before | text}


def config_of(shape: Shape, dtype: str) -> dict[str, Any]:
    """The config.json of an architecture without adapters; a UserError if its family has none."""
    shape = replace(shape, lora=None)
    family = FAMILIES[shape.family]
    layers = [shape.distinct[kind] for kind in shape.kind_of]
    windows = [kind.window for kind in layers]
    types = [LINEAR if kind.delta else SLIDING if kind.window else FULL for kind in layers]
    full = next((kind for kind in layers if kind.window is None and kind.theta), layers[0])
    window = next(filter(None, windows), None)
    out: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": shape.family,
        _activation_key(shape.family): {b: a for a, b in ACTIVATIONS.items()}[shape.activation],
        "dtype": dtype,
        **{key: getattr(shape, field) for field, key in SIZES.items()},
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": full.theta,
        "rope_parameters": _rope(full, shape.head_dim),
        "max_position_embeddings": shape.max_length,
        **{flag: FLAGS[flag][0] in shape.biases for flag in family.flags},
    }
    if shape.family in ("qwen2", "qwen3", "smollm3"):
        out["use_sliding_window"] = window is not None
    if window is not None or shape.family in ("mistral", "exaone4"):
        out["sliding_window"] = window
    if (window is not None and shape.family != "mistral") or shape.family == "exaone4":
        out["layer_types"] = types
    if mixture := shape.mixture:
        out |= {
            "num_experts": mixture.experts,
            _chosen_key(shape.family): mixture.chosen,
            "moe_intermediate_size": mixture.size,
            **({"norm_topk_prob": mixture.rescaled} if shape.family == "qwen3_moe" else {}),
            **({"shared_expert_intermediate_size": mixture.shared} if mixture.shared else {}),
            **({"enable_moe_block": True} if mixture.beside else {}),
        }
    if delta := shape.delta:
        turned = _share(shape.rotary_size or shape.head_dim, shape.head_dim)
        out |= {key: getattr(delta, field) for field, (key, _) in DELTA.items()}
        out |= {"layer_types": types}
        out["rope_parameters"] |= {"partial_rotary_factor": turned}
    if shape.family == "smollm3":
        out["no_rope_layers"] = [int(kind.theta is not None) for kind in layers]
    if shape.family in GEMMAS:
        local = next((kind for kind in layers if kind.window is not None), full)
        ropes = {
            name: _rope(kind, shape.head_dim) for name, kind in ((FULL, full), (SLIDING, local))
        }
        out |= {"rope_parameters": ropes, "layer_types": types}
        if shape.family == "gemma3_text":
            out["query_pre_attn_scalar"] = shape.query_scalar or shape.head_dim
            out["rope_local_base_freq"] = local.theta
        else:
            del out["rope_theta"]
            out |= {
                "global_head_dim": full.head_size or shape.head_dim,
                "attention_k_eq_v": full.keys_as_values,
                "num_global_key_value_heads": full.kv_heads,
                "num_kv_shared_layers": shape.shared_layers,
                "use_double_wide_mlp": shape.shared_wide,
                "hidden_size_per_layer_input": shape.per_layer,
                "vocab_size_per_layer_input": shape.vocab_size,
                "final_logit_softcapping": shape.logit_cap,
            }
    rope = out["rope_parameters"].get(FULL, out["rope_parameters"])
    if rope["rope_type"] not in ("default", "proportional"):  # the name that transformers 4 knows
        out["rope_scaling"] = {name: x for name, x in rope.items() if name != "rope_theta"}
    found, wanted = asdict(_written_out(shape_of(out))), asdict(_written_out(shape))
    other = [name for name, value in wanted.items() if found[name] != value]
    if other:
        raise UserError(
            f"no {shape.family} has {other[0]} = {getattr(shape, other[0])!r}: choose another family"
        )
    return out


def _mixture(name: str, read: "_Reader") -> MoE | None:
    """The experts of every layer; some layers without are refused, as no public model has them."""
    usual, key = MIXED[name], _chosen_key(name)
    if usual.beside and not read.truth("enable_moe_block", False):
        return None
    for option, only in (
        ("decoder_sparse_step", 1),
        ("mlp_only_layers", []),
        ("use_sliding_window", False),
    ):
        given = read.config.get(option)
        read.require(given in (None, only), f"{option} = {given!r} is not supported, only {only!r}")
    older = read.number("num_local_experts", usual.experts)  # as transformers 5 calls num_experts
    number, chosen = read.number("num_experts", older), read.number(key, usual.chosen)
    read.require(chosen <= number, f"{key} {chosen} of {number} experts cannot be")
    shared = usual.shared and read.number("shared_expert_intermediate_size", usual.shared)
    rescaled = read.truth("norm_topk_prob", False) if name == "qwen3_moe" else True
    size = read.number("moe_intermediate_size", usual.size)
    return replace(
        usual, experts=number, chosen=chosen, size=size, shared=shared, rescaled=rescaled
    )


def _chosen_key(family: str) -> str:
    return "top_k_experts" if family == "gemma4_text" else "num_experts_per_tok"


def _delta(read: "_Reader") -> Delta:
    """The recurrence of linear layers."""
    delta = Delta(**{field: read.number(*key) for field, key in DELTA.items()})
    read.require(
        delta.heads % delta.key_heads == 0,
        f"{delta.heads} heads of values for {delta.key_heads} of keys cannot be: they share them evenly",
    )
    gate = read.config.get("output_gate_type")
    read.require(gate in (None, "silu", "swish"), f"output_gate_type {gate!r} is not supported")
    read.require(
        read.truth("attn_output_gate", True), "attn_output_gate is false: only with a gate"
    )
    return delta


def _gemma4(sizes: dict[str, int], kinds: tuple[LayerKind, ...], read: "_Reader") -> dict[str, Any]:
    """Fields of a Shape that Gemma 4 alone has."""
    inputs = read.count("hidden_size_per_layer_input", 256)
    shared = read.count("num_kv_shared_layers", 0)
    if inputs:
        known, vocabulary = read.number("vocab_size_per_layer_input", 262_144), sizes["vocab_size"]
        read.require(
            known == vocabulary,
            f"vocab_size_per_layer_input {known} is not supported: only vocab_size, {vocabulary}",
        )
    own = sizes["num_layers"] - shared
    every = [kinds[i % len(kinds)] for i in range(sizes["num_layers"])]
    read.require(
        own > 0 and {*every} <= {*every[:own]},
        f"num_kv_shared_layers {shared} cannot be: no layer before them has the keys of each",
    )
    cap = read.config.get("final_logit_softcapping")
    return {
        "shared_layers": shared,
        "shared_wide": bool(shared) and read.truth("use_double_wide_mlp", False),
        "per_layer": inputs,
        "logit_cap": None if cap is None else read.number("final_logit_softcapping", kind=float),
    }


def _whole_heads(width: int, read: "_Reader") -> dict[str, Any]:
    """Fields of Gemma 4's whole layers, whose heads have sizes of their own."""
    alike = read.truth("attention_k_eq_v", False)
    kv_heads = read.number("num_key_value_heads", KV_HEADS["gemma4_text"])
    size = read.number("global_head_dim", 512)
    heads = read.number("num_global_key_value_heads", kv_heads) if alike else kv_heads
    if "per_layer_config" in read.config:  # as transformers 5 writes it: what differs, by layer
        each = [*read.record("per_layer_config").config.values()] or [{}]
        read.require(
            all(isinstance(one, dict) and one == each[0] for one in each)
            and {*each[0]} <= {"head_dim", "num_key_value_heads"},
            "per_layer_config is not supported: only heads that are alike in whole layers",
        )
        own = _Reader(each[0], read.where)
        size, heads = own.number("head_dim", width), own.number("num_key_value_heads", kv_heads)
    return {
        "head_size": None if size == width else size,
        "kv_heads": None if heads == kv_heads else heads,
        "keys_as_values": alike,
    }


def _rotary_size(read: "_Reader", width: int) -> int:
    """How many numbers of a head are turned."""
    share = read.number("partial_rotary_factor", 0.25, float)
    within = read.record("rope_scaling" if read.config.get("rope_scaling") else "rope_parameters")
    size = int(width * within.number("partial_rotary_factor", share, float))
    read.require(
        0 < size <= width and size % 2 == 0,
        f"partial_rotary_factor turns {size} numbers of a head's {width}, not an even part",
    )
    return size


def _written_out(shape: Shape) -> Shape:
    """The shape with the size of its heads, and a kind for each layer."""
    kinds = tuple(shape.distinct[kind] for kind in shape.kind_of)
    return replace(shape, head_size=shape.head_dim, kinds=kinds)


def _activation_key(family: str) -> str:
    return "hidden_activation" if family in GEMMAS else "hidden_act"


def _kinds(
    name: str, family: Family, layers: int, width: int, read: "_Reader"
) -> tuple[LayerKind, ...]:
    """The kinds of the layers, as few as repeat."""
    config, window = read.config, _window(name, family, read)
    listed = None if family.window == 0 else config.get("layer_types")
    types = listed or _types(name, layers, window, read)
    rotated = [True] * layers
    if name == "smollm3":
        every = read.number("no_rope_layer_interval", 4)
        absent = [(i + 1) % every != 0 for i in range(layers)]
        rotated = config.get("no_rope_layers") or absent
    for what, given in (("layer_types", types), ("no_rope_layers", rotated)):
        fine = isinstance(given, list) and len(given) >= layers
        read.require(fine, f"{what} is not a list of the {layers} layers")
    windows_turn = name == "exaone4" and window  # and whole layers do not
    if name == "gemma4_text":  # the last layer sees all, whatever is listed
        types = [*types[: layers - 1], FULL]
    kinds = []
    for kind, turns in zip(types[:layers], rotated[:layers], strict=True):
        read.require(kind in family.types, f"layers of type {kind!r} are not supported")
        read.require(window or kind != SLIDING, "sliding layers without a window are not supported")
        if kind == LINEAR:
            kinds.append(LayerKind(None, delta=True))
            continue
        within = window if kind == SLIDING else None
        turns = bool(turns) and not (windows_turn and within is None)
        heads = _whole_heads(width, read) if name == "gemma4_text" and kind == FULL else {}
        kinds.append(LayerKind(None, within, **heads))
        if turns:
            kinds[-1] = _rotary(name, family, kind, read, kinds[-1], width)
    period = next(
        p for p in range(1, layers + 1) if all(x == kinds[i % p] for i, x in enumerate(kinds))
    )
    return tuple(kinds[:period])


def _longest(name: str, read: "_Reader") -> int:
    """The longest sequence in tokens; families differ where a config does not say it."""
    return read.number("max_position_embeddings", LENGTHS.get(name, 32_768))


def _window(name: str, family: Family, read: "_Reader") -> int | None:
    """The window of the layers that have one."""
    if family.window == 0 or read.config.get("sliding_window", family.window) is None:
        return None
    window = read.number("sliding_window", family.window)
    asked = name not in ("qwen2", "qwen3") or read.truth("use_sliding_window", False)
    return window if asked else None


def _types(name: str, layers: int, window: int | None, read: "_Reader") -> list[str]:
    """The types of layers where a config does not list them."""
    if LINEAR in FAMILIES[name].types:
        every = read.number("full_attention_interval", FAMILIES[name].pattern)
        return [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    if (pattern := FAMILIES[name].pattern) and (window or name != "exaone4"):
        every = read.number("sliding_window_pattern", pattern)
        return [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    if window is None or (name == "smollm3" and not read.truth("use_sliding_window", False)):
        return [FULL] * layers
    if name == "mistral":
        return [SLIDING] * layers
    read.require(name != "smollm3", "use_sliding_window without layer_types is not supported")
    first = read.config.get("max_window_layers", 28)
    read.require(isinstance(first, int), f"max_window_layers is {first!r}, not a number")
    return [SLIDING if i >= first else FULL for i in range(layers)]


def _rotary(
    name: str, family: Family, layers: str, read: "_Reader", kind: LayerKind, width: int
) -> LayerKind:
    """The kind, as one whose layers, of this type, turn queries and keys."""
    inner, outer = read.record("rope_parameters"), read.record("rope_scaling").config
    default, key = family.theta, "rope_theta"
    if name == "gemma3_text":  # `rope_scaling` is added to what whole layers have
        scaling = inner.record(layers).config | (outer if layers == FULL else {})
        if layers == SLIDING:
            default, key = 1e4, "rope_local_base_freq"
    elif name == "gemma4_text":
        read.require(not outer, "rope_scaling is not supported")
        typed = not inner.config or {FULL, SLIDING} & inner.config.keys()
        read.require(bool(typed), "rope_parameters without layer types are not supported")
        ropes = _Reader(inner.config or GEMMA4_ROPES, read.where)
        scaling, default = ropes.record(layers).config, 1e4
    else:
        scaling = outer or inner.record(layers).config or inner.config
    scaling = _Reader(scaling, read.where)
    theta = scaling.number("rope_theta", read.number(key, default, float), float)
    how = scaling.config.get("rope_type", scaling.config.get("type", "default"))
    kind = replace(kind, theta=theta)
    if how == "default":
        return kind
    if how == "proportional" and name == "gemma4_text":
        pairs = (kind.head_size or width) // 2
        turned = int(scaling.number("partial_rotary_factor", 1.0, float) * 2 * pairs // 2)
        factor = scaling.number("factor", 1.0, float)
        return replace(kind, turned=None if turned == pairs else turned, factor=factor)
    read.require(how in ("linear", "llama3", "yarn"), f"rope type {how!r} is not supported")
    kind = replace(kind, factor=scaling.number("factor", kind=float))
    if how == "linear":
        return kind
    key = "original_max_position_embeddings"  # beside the record it goes before what is in it
    length = read.number(key, scaling.number(key, _longest(name, read)))
    if how == "llama3":
        low, high = (scaling.number(f"{side}_freq_factor", kind=float) for side in ("low", "high"))
        return replace(kind, bands=(low, high, length))
    read.require(scaling.truth("truncate", True), "yarn with truncate = false is not supported")
    fast, slow = scaling.number("beta_fast", 32.0, float), scaling.number("beta_slow", 1.0, float)
    read.require(fast > slow, f"yarn's beta_fast {fast} is not above its beta_slow {slow}")
    grown = lambda scale: 1.0 + 0.1 * scale * math.log(max(kind.factor, 1.0))
    named = [one for one in ("mscale", "mscale_all_dim") if scaling.config.get(one)]
    scales = [scaling.number(one, kind=float) for one in named]
    amplitude = grown(scales[0]) / grown(scales[1]) if len(scales) == 2 else grown(1.0)
    amplitude = scaling.number("attention_factor", amplitude, float)
    return replace(kind, ramp=(fast, slow, length), amplitude=amplitude)


def _rope(kind: LayerKind, width: int) -> dict[str, Any]:
    """A kind's `rope_parameters`."""
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": kind.theta}
    if kind.bands is not None:
        low, high, length = kind.bands
        out |= {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high}
        out |= {"original_max_position_embeddings": length}
    elif kind.ramp is not None:
        fast, slow, length = kind.ramp
        out |= {"rope_type": "yarn", "beta_fast": fast, "beta_slow": slow}
        out |= {"original_max_position_embeddings": length, "attention_factor": kind.amplitude}
    elif kind.turned is not None:
        share = _share(2 * kind.turned, kind.head_size or width)
        out |= {"rope_type": "proportional", "partial_rotary_factor": share}
    elif kind.factor != 1.0:
        out["rope_type"] = "linear"
    return out if out["rope_type"] == "default" else out | {"factor": kind.factor}


def _share(part: int, whole: int) -> float:
    """A part of a whole that is this number again once it is multiplied and cut to a whole number."""
    share = part / whole
    return share if int(whole * share) == part else math.nextafter(share, math.inf)


class _Reader:
    """Typed fields of a config; a UserError says where one is wrong."""

    def __init__(self, config: dict[str, Any], where: pathlib.Path | str):
        self.config, self.where = config, where

    def require(self, fine: Any, reason: str) -> None:
        if not fine:
            raise UserError(f"{self.where}: {reason}")

    def need(self, key: str, kind: type) -> Any:
        self.require(key in self.config, f"{key} is missing: is this a folder of a model?")
        self.require(isinstance(self.config[key], kind), f"{key} is {self.config[key]!r}")
        return self.config[key]

    def number(self, key: str, default: Any = None, kind: type = int) -> Any:
        value: Any = self.config.get(key)
        value = default if value is None else value
        self.require(value is not None, f"{key} is missing: is this a folder of a model?")
        fine = isinstance(value, (int, kind)) and not isinstance(value, bool)
        wanted = "whole number from 1 on" if kind is int else "number above 0"
        self.require(fine and 0 < value < LARGEST, f"{key} is {value!r}, not a {wanted}")
        return kind(value)

    def count(self, key: str, default: int) -> int:
        """A whole number from 0 on."""
        return 0 if self.config.get(key, default) == 0 else self.number(key, default)

    def truth(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        self.require(isinstance(value, bool), f"{key} is {value!r}, not true or false")
        return value

    def record(self, key: str) -> "_Reader":
        value = self.config.get(key) or {}
        self.require(isinstance(value, dict), f"{key} is {value!r}, not a record")
        return _Reader(value, self.where)


def _preset(family: str, *sizes: Any, kinds: tuple[LayerKind, ...], **other: Any) -> Shape:
    row = FAMILIES[family]
    return Shape(*sizes, family=family, kinds=kinds, biases=row.biases, **row.fixed, **other)


def _qwen2_5(*sizes: int, vocab: int = 152_064, theta: float = 1e6, **other: Any) -> Shape:
    return _preset("qwen2", vocab, *sizes, kinds=(LayerKind(theta),), **other)


def _qwen3(*sizes: int, **other: Any) -> Shape:
    size = None if sizes[0] == 128 * sizes[3] else 128
    kinds = (LayerKind(1e6),)
    return _preset(
        "qwen3", 151_936, *sizes, kinds=kinds, head_size=size, max_length=40_960, **other
    )


def _llama3(*sizes: int, factor: float, **other: Any) -> Shape:
    kinds = (LayerKind(5e5, None, factor, (1.0, 4.0, 8192)),)
    return _preset(
        "llama", 128_256, *sizes, kinds=kinds, rms_norm_eps=1e-5, max_length=131_072, **other
    )


def _qwen3_5(*sizes: int, heads: int, family: str = "qwen3_5_text", **other: Any) -> Shape:
    linear, whole = LayerKind(None, delta=True), LayerKind(1e7)
    return _preset(
        family, 248_320, *sizes, kinds=(linear, linear, linear, whole), head_size=256,
        rotary_size=64, delta=Delta(16, heads), max_length=262_144, **other,
    )  # fmt: skip


PRESETS = {
    "Qwen2.5-0.5B": _qwen2_5(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "Qwen2.5-1.5B": _qwen2_5(1536, 8960, 28, 12, 2, vocab=151_936, tied=True, max_length=131_072),
    "Qwen2.5-3B": _qwen2_5(2048, 11_008, 36, 16, 2, vocab=151_936, tied=True),
    "Qwen2.5-7B": _qwen2_5(3584, 18_944, 28, 28, 4, tied=False, max_length=131_072),
    "Qwen2.5-14B": _qwen2_5(5120, 13_824, 48, 40, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072),
    "Qwen2.5-32B": _qwen2_5(5120, 27_648, 64, 40, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072),
    "Qwen2.5-72B": _qwen2_5(8192, 29_568, 80, 64, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072),
    "Qwen2.5-7B-Instruct-1M": _qwen2_5(
        3584, 18_944, 28, 28, 4, tied=False, rms_norm_eps=1e-5, theta=1e7, max_length=1_010_000
    ),
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "Qwen3-8B": _qwen3(4096, 12_288, 36, 32, 8, tied=False),
    "Qwen3-14B": _qwen3(5120, 17_408, 40, 40, 8, tied=False),
    "Qwen3-32B": _qwen3(5120, 25_600, 64, 64, 8, tied=False),
    "Qwen3-30B-A3B": _preset(
        "qwen3_moe", 151_936, 2048, 6144, 48, 32, 4, tied=False, head_size=128,
        kinds=(LayerKind(1e6),), max_length=40_960, mixture=MoE(128, 8, 768),
    ),
    "Qwen3.5-27B": _qwen3_5(5120, 17_408, 64, 24, 4, heads=48, tied=False),
    "Qwen3.5-35B-A3B": _qwen3_5(
        2048, 512, 40, 16, 2, heads=32, tied=False, family="qwen3_5_moe_text",
        mixture=MIXED["qwen3_5_moe_text"],
    ),
    "Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 8, tied=True, factor=32.0),
    "Llama-3.2-3B": _llama3(3072, 8192, 28, 24, 8, tied=True, factor=32.0),
    "Llama-3.1-8B": _llama3(4096, 14_336, 32, 32, 8, tied=False, factor=8.0),
    "SmolLM2-135M": _preset(
        "llama", 49_152, 576, 1536, 30, 9, 3, tied=True,
        kinds=(LayerKind(1e5),), rms_norm_eps=1e-5, max_length=8192,
    ),
    "gemma-3-1b-it": _preset(
        "gemma3_text", 262_144, 1152, 6912, 26, 4, 1, tied=True, head_size=256, activation="gelu",
        kinds=(*[LayerKind(1e4, 512)] * 5, LayerKind(1e6)),
    ),
}  # fmt: skip
