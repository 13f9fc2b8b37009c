"""Small random models and responses that the tests share."""

import dataclasses
import math
import re
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learning import reinforce, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import Group
from jaxrl_llm.learning.programs import programs
from jaxrl_llm.models import families, logprobs, qwen2, sharding
from jaxrl_llm.models.qwen2 import Delta, LayerKind, MoE
from jaxrl_llm.objectives import Objective, advantages, kl
from jaxrl_llm.objectives import token_data as per_response
from jaxrl_llm.rollouts.trajectory import Trajectory

SHAPE = qwen2.Shape(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tied=True,
    max_length=256,
)


def shape(**changes):
    return dataclasses.replace(SHAPE, **changes)


class Nameless:
    """A task that nobody asks."""

    name, train, test = "nameless", [1], [2]
    prompt = reward = staticmethod(str)


NAMELESS = Nameless()
LLAMA3 = LayerKind(1e4, None, 8.0, (1.0, 4.0, 16))
YARN = LayerKind(1e4, None, 4.0, ramp=(32.0, 1.0, 4096), amplitude=1.0 + 0.1 * math.log(4.0))
ALL = (*families.QKV, "o_proj")
MOE = {"family": "qwen3_moe", "biases": (), "norms_of_heads": True, "tied": False}
FAMILIES = {  # a shape of each, which has all that sets it apart
    "qwen2": shape(kinds=(LayerKind(1e6), LayerKind(1e6, 5))),
    "qwen2 of odd sizes": shape(
        vocab_size=97, hidden_size=72, num_heads=9, num_kv_heads=3, tied=False
    ),
    "qwen3": shape(family="qwen3", biases=(), norms_of_heads=True, head_size=32),
    "qwen3 with biases": shape(family="qwen3", biases=ALL, norms_of_heads=True, kinds=(YARN,)),
    "qwen3_moe": shape(**MOE, mixture=MoE(8, 2, 48), head_size=32),
    "qwen3_moe of six": shape(**MOE, mixture=MoE(6, 3, 40, rescaled=False)),
    "llama": shape(family="llama", biases=(), kinds=(LLAMA3,), tied=False),
    "llama with biases": shape(family="llama", biases=(*ALL, *families.MLP)),
    "mistral": shape(family="mistral", biases=(), kinds=(LayerKind(1e4, 7),), tied=False),
    "smollm3": shape(
        family="smollm3", biases=(), kinds=(*[LayerKind(2e6)] * 3, LayerKind(None)), num_layers=5
    ),
    "exaone4": shape(
        family="exaone4", biases=(), tied=False, num_layers=4,
        kinds=(*[dataclasses.replace(LLAMA3, window=6)] * 2, LayerKind(None)),
        **families.FAMILIES["exaone4"].fixed,
    ),
    "gemma3": shape(
        family="gemma3_text", biases=(), query_scalar=48, activation="gelu", num_layers=4,
        kinds=(LayerKind(1e4, 6), LayerKind(1e4, 6), LayerKind(1e6, None, 8.0)),
        **families.FAMILIES["gemma3_text"].fixed,
    ),
    "gemma4": shape(  # two periods of layers with keys, and two of layers that read those
        family="gemma4_text", biases=(), activation="gelu", num_layers=6, shared_layers=2, shared_wide=True,
        kinds=(LayerKind(1e4, 6), LayerKind(1e5, None, 2.0, turned=4, head_size=32)), per_layer=8, logit_cap=2.0,
        **families.FAMILIES["gemma4_text"].fixed,
    ),
    "gemma4 of one product": shape(
        family="gemma4_text", biases=ALL, activation="gelu", num_layers=3, tied=False,
        kinds=(*[LayerKind(1e4, 6)] * 2, LayerKind(1e6, kv_heads=1, keys_as_values=True)),
        **families.FAMILIES["gemma4_text"].fixed,
    ),
    "qwen3_5": shape(
        family="qwen3_5_text", biases=(), num_layers=4, head_size=32, rotary_size=16,
        kinds=(LayerKind(None, delta=True), LayerKind(1e7)), delta=Delta(2, 4, 16, 24, 3),
        **families.FAMILIES["qwen3_5_text"].fixed,
    ),
    "qwen3_5_moe": shape(
        family="qwen3_5_moe_text", biases=(), num_layers=4, head_size=32, rotary_size=16, tied=False,
        kinds=(LayerKind(None, delta=True), LayerKind(1e7)), delta=Delta(2, 4, 16, 24, 3),
        mixture=MoE(8, 2, 48, shared=40, fused=True),
        **families.FAMILIES["qwen3_5_moe_text"].fixed,
    ),
    "gemma4 with experts": shape(
        family="gemma4_text", biases=(), activation="gelu", num_layers=4, per_layer=0,
        kinds=(LayerKind(1e4, 6), LayerKind(1e5, None, turned=4, head_size=32)),
        mixture=MoE(8, 2, 48, beside=True, fused=True),
        **families.FAMILIES["gemma4_text"].fixed,
    ),
    "qwen3_5 of three layers": shape(
        family="qwen3_5_text", biases=ALL, num_layers=3, rotary_size=4, tied=False,
        kinds=(*[LayerKind(None, delta=True)] * 2, LayerKind(1e4)), delta=Delta(4, 4, 16, 16),
        **families.FAMILIES["qwen3_5_text"].fixed,
    ),
}  # fmt: skip

# those that can have one prompt for several responses
SHARING = [name for name, one in FAMILIES.items() if one.delta is None]
slow = partial(pytest.param, marks=pytest.mark.slow)
VARIED = ("qwen2", "gemma3", "gemma4", "qwen3_moe", "qwen3_5")  # one of each kind of layers


def tiered(family, *more):
    """Parameters of a test that is in the fast tier for VARIED, in the slow one for the other families."""
    return (pytest.param if family in VARIED else slow)(family, *more)


def mesh_of(data=1, fsdp=1, tensor=1):
    return sharding.make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor])


@contextmanager
def compilations():
    """A list of the programs that are compiled within the block."""
    found = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def policy(shape=SHAPE, *, seed=0, mesh=None, **compute):
    """`(policy_logp, params)`; all random, so that nothing is neutral."""
    definition, shapes = qwen2.graph(shape, qwen2.Compute(**compute))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        from_zero = shape.delta is not None and "linear_attn" not in name  # its other norms add 1
        centre = 1.0 if ("norm" in name and not from_zero) or "layer_scalar" in name else 0.0
        if shape.query_scalar == 1 and re.search("[qk]_norm", name):
            centre = 0.4  # else softmax is so sharp that rounding is amplified
        return jnp.asarray(centre + 0.1 * rng.normal(size=leaf.shape), leaf.dtype)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    if mesh is not None:
        params = jax.device_put(params, sharding.param_shardings(shapes, mesh))
    return partial(logprobs.of_responses, definition), params


def trajectories(prompts, responses, logps=None, finished=None, **each):
    """Responses to these prompts; `each` has further fields, a value a response."""
    columns = {
        "prompt": prompts,
        "tokens": responses,
        "logps": [[-1.0] * len(tokens) for tokens in responses] if logps is None else logps,
        "finished": [True] * len(responses) if finished is None else finished,
    } | each
    rows = zip(*columns.values(), strict=True)
    return [Trajectory(**dict(zip(columns, row, strict=True))) for row in rows]


def groups(trajectories, rewards=None, n=2, examples=None):
    """Groups of `n` adjacent responses each, with a reward a response if they have none."""
    if rewards is not None:
        pairs = zip(trajectories, rewards, strict=True)
        trajectories = [dataclasses.replace(one, reward=reward) for one, reward in pairs]
    parts = [tuple(trajectories[i : i + n]) for i in range(0, len(trajectories), n)]
    assert all(len(part) == n for part in parts)
    examples = [None] * len(parts) if examples is None else examples
    return [Group(example, part) for example, part in zip(examples, parts, strict=True)]


def responses(seed=0, rows=8, vocab=96, prompt=8, response=14):
    rng = np.random.default_rng(seed)
    texts = [
        rng.integers(0, vocab, rng.integers(1, n + 1)).tolist()
        for n in (prompt, response)
        for _ in range(rows)
    ]
    return trajectories(texts[:rows], texts[rows:])


def sharing(seed=0, rows=8, n=4, **sizes):
    """The same, of which each `n` have one prompt."""
    every = responses(seed, rows, **sizes)
    return [
        dataclasses.replace(one, prompt=every[i // n * n].prompt) for i, one in enumerate(every)
    ]


collator = partial(Collator, prompt_length=8, response_length=14, round_to=4)


def objective(**changes):
    parts = {"advantage": advantages.grpo, "penalties": ((1e-3, kl.k3),)}
    return Objective(**(parts | changes))


def run_step(
    policy_logp, params, batch, reward, *, objective, optimizer, order=None, steps=1, teacher=None
):
    """`(state, metrics)` after `steps` steps on one batch, with the reference a little off.

    `teacher(inputs)` are fields of `TokenData` by another policy.
    """
    old = update.make_score(policy_logp)(params, batch.inputs)
    more = teacher(batch.inputs) if teacher else {}
    credited = update.make_credit(objective)(
        batch, reward, old_logp=old, ref_logp=old - 0.1, **more
    )
    state = update.init_state(params, optimizer)
    step = update.make_train_step(
        policy_logp,
        objective,
        optimizer,
        order=order or update.interleaved,
        shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    metrics = {}
    for _ in range(steps):
        state, metrics = step(state, credited)
    return state, metrics


def by_turn(logp, advantage, data):
    """A surrogate with a ratio a turn: the mean over its tokens."""
    return -advantage * jnp.exp(
        per_response.mean(logp - data.old_logp, data._replace(response=data.turn))
    )


def step(policy, objective, optimizer, collate, mesh, state, **settings):
    """A step of reinforcement."""
    made = programs(policy, objective, optimizer, like=state)
    return reinforce.Step(made, objective, collate, mesh, **settings)
