"""Counts of FLOPs: the least a model needs (for model FLOPs utilisation) and those of a step."""

from jaxrl_llm.config import Config
from jaxrl_llm.models.qwen2 import Shape


def forward(shape: Shape, *, tokens: int, scored: int, length: int) -> int:
    """FLOPs of a forward pass over `tokens` in sequences of `length`, with `scored` tokens' logits.

    A multiply-add is 2. Attention a token and layer is the causal half of 2 (scores, values) x 2 x
    length x width; within a window of what a token sees on average.
    """
    layers = sum(_layer(shape, layer, length) for layer in range(shape.num_layers))
    if size := shape.per_layer:
        layers += 2 * shape.num_layers * size * shape.hidden_size
    return tokens * layers + scored * 2 * shape.vocab_size * shape.hidden_size


def _layer(shape: Shape, layer: int, length: int) -> int:
    """FLOPs of a layer a token."""
    kind, shared = shape.distinct[shape.kind_of[layer]], shape.source(layer) != layer
    kv_heads, size = shape.heads_of(kind)
    heads = shape.num_heads * size
    mlp = 3 * shape.hidden_size * shape.intermediate_size * (1 + (shared and shape.shared_wide))
    if mixture := shape.mixture:
        experts = shape.hidden_size * (mixture.experts + bool(mixture.shared) + 3 * mixture.width)
        mlp = mlp + experts if mixture.beside else experts
    rest = 2 * (mlp + 2 * shape.per_layer * shape.hidden_size)
    if kind.delta and (delta := shape.delta):  # its memory is read twice and written once
        values = delta.heads * delta.value_size
        products = shape.hidden_size * (delta.channels + 2 * values + 2 * delta.heads)
        rule = delta.channels * delta.width + 3 * values * delta.key_size
        return rest + 2 * (products + rule)
    keys_and_values = 0 if shared else (2 - kind.keys_as_values) * kv_heads * size
    products = shape.hidden_size * ((2 + shape.gated) * heads + keys_and_values)
    window = min(kind.window or length, length)
    seen = window * (2 - window / length)  # twice the mean: all of the length without a window
    return rest + round(2 * (products + seen * heads))


def update(shape: Shape, *, tokens: int, scored: int, length: int) -> int:
    """FLOPs of forward and backward (twice the forward), without recomputation."""
    return 3 * forward(shape, tokens=tokens, scored=scored, length=length)


def read(config: Config, tokens: int) -> float:
    """Tokens that are read for a response of `tokens`: with its prompt, or its part of a shared one."""
    together = config.group_size if config.collate.share_prompts else 1
    return config.collate.prompt_length / together + tokens


def scoring(config: Config, shape: Shape, tokens: int) -> int:
    """FLOPs of scoring a step's responses of `tokens` by a model of this shape, on all devices."""
    rows, length = config.prompts * config.group_size, config.collate.prompt_length + tokens
    there = round(rows * read(config, tokens))
    return forward(shape, tokens=there, scored=rows * tokens, length=length)


def of_step(config: Config, shape: Shape, tokens: int) -> dict[str, int]:
    """FLOPs of a step by program, on all devices, recomputation included; responses of `tokens`."""
    prompt, rows = config.collate.prompt_length, config.prompts * config.group_size
    whole = scoring(config, shape, tokens)
    passes = 2 if shape.lora else 3  # forward, back to the inputs, and to the weights if trained
    return {
        "prefill": forward(shape, tokens=config.prompts * prompt, scored=0, length=prompt),
        # a token sees the whole prompt, and half of the response
        "decode": forward(
            shape, tokens=rows * tokens, scored=rows * tokens, length=2 * prompt + tokens
        ),
        "score": (1 + config.keeps_reference) * whole,
        "update": config.loss.stages * (passes + bool(config.compute.remat)) * whole,
        "update, nothing twice": config.loss.stages * passes * whole,
    }
