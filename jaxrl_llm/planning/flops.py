"""The arithmetic that a step cannot avoid: what model FLOPs utilisation is measured against."""

import time

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxrl_llm.config import Config
from jaxrl_llm.models.qwen2 import Shape


def forward(shape: Shape, *, tokens: int, scored: int, length: int) -> int:
    """Multiply-adds x 2 of one forward pass: `tokens` in sequences of `length`, logits for `scored` of them.

    Attention counts the causal half: 2 (scores, mix) x 2 x length / 2 x width a token and layer.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * 2 * (heads + kv_heads)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    layers = shape.num_layers * (2 * (attention + mlp) + 2 * length * heads)
    return tokens * layers + scored * 2 * shape.vocab_size * shape.hidden_size


def update(shape: Shape, *, tokens: int, scored: int, length: int) -> int:
    """Forward and backward (twice the forward), nothing recomputed."""
    return 3 * forward(shape, tokens=tokens, scored=scored, length=length)


def of_step(config: Config, shape: Shape, tokens: int) -> dict[str, int]:
    """Of a step's programs on all devices, with responses of `tokens` tokens; what is recomputed included."""
    prompt, rows = config.collate.prompt_length, config.prompts * config.group_size
    size = {"scored": rows * tokens, "length": prompt + tokens}
    whole = forward(shape, tokens=rows * (prompt + tokens), **size)
    return {
        "prefill": forward(shape, tokens=config.prompts * prompt, scored=0, length=prompt),
        "decode": forward(shape, tokens=rows * tokens, **size),
        "score": (1 + config.keeps_reference) * whole,
        "update": config.objective.stages * (3 + bool(config.compute.remat)) * whole,
    }


def matmul_rate(dtype: DTypeLike) -> float:
    """FLOP/s of a 2048-cubed product on random data: the ceiling of the arithmetic."""
    n = 2048
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = np.inf
    for _ in range(8):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
