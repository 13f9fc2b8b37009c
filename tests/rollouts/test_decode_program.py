"""The compiled loop of the embedded engine: what travels for a token, what is copied, what waits for the host."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.models.generation import UnrolledGenerator
from jaxrl_llm.models.policy import mesh_of_copies
from jaxrl_llm.planning.machines import compiling_for, machine
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.slots import idle_slots, rules_of
from tests import tiny

SHAPE = tiny.shape(hidden_size=256, num_heads=4, vocab_size=1000)
SLOTS, COLUMNS, RESPONSE = 16, 256, 32
COLLECTIVE = (
    r"= (\S+|\(.*?\)) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
)


def placed(tree: Any, mesh, spec: P):
    """Shapes of these arrays, where they would lie."""

    def one(x):
        where = NamedSharding(mesh, sharding.fit(spec, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(one, tree)


@functools.cache
def program(name: str, share: int = 1) -> str:
    """The text of the loop, compiled for devices of which so many share a copy of the weights."""
    devices, sampling = machines(name), Sampling(top_p=0.9, top_k=5)
    mesh = sharding.make_mesh(1, len(devices), 1, devices=devices)
    definition, shapes = qwen2.graph(SHAPE, qwen2.Compute(dtype=jnp.bfloat16))
    generator = UnrolledGenerator(definition, mesh_of_copies(mesh, share))
    engine = NativeSampler(generator, slots=SLOTS, prefill_prompts=8)
    with compiling_for(generator.mesh):
        trained = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to),
                               shapes, sharding.param_shardings(shapes, mesh))  # fmt: skip
        params = generator.weights_like(trained)
        empty = jax.eval_shape(lambda: generator.empty(SLOTS, COLUMNS))
        cache = placed(empty, generator.mesh, P(sharding.BATCH, "tensor"))
        slots, rules, number = (
            placed(tree, generator.mesh, P())
            for tree in (idle_slots(SLOTS, RESPONSE), rules_of(sampling), np.int32(0))
        )
        lowered = engine._run.lower(params, cache, slots, rules, number, number)
        return str(lowered.compile().as_text())


def machines(name: str):
    """Eight devices: of this process, or of a machine whose compiler is installed."""
    if name == "here":
        return jax.devices()[:8]
    try:
        return list(machine(name).devices)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["here", "h100x8", "v5e-8"])
def test_a_token_costs_no_communication(name):
    """With a copy of the weights on every device one number travels, the count of finished slots."""
    text = program(name)
    loops, entry = text.split("\nENTRY ")
    assert {re.sub(r"\{.*?\}", "", kind) for kind in re.findall(COLLECTIVE, loops)} <= {"s32[]"}
    assert len(re.findall(COLLECTIVE, entry)) <= len(idle_slots(1, 1))  # once a call


@pytest.mark.parametrize("name", ["here", "h100x8"])
def test_one_loop_asks_whether_to_go_on(name):
    """The others have as many rounds as they had when they were compiled; nothing branches."""
    text = program(name)
    loops = [line for line in text.splitlines() if re.search(r" while\(", line)]
    assert len([line for line in loops if "known_trip_count" not in line]) == 1
    assert len(loops) > 2
    assert " conditional(" not in text


@pytest.mark.parametrize("name", ["h100x8", "v5e-8"])
def test_nothing_of_the_size_of_a_layer_is_copied(name):
    """Neither weights nor cache: no copy, slice or transpose of as many elements inside the loop."""
    text = program(name)
    loops = text.split("\nENTRY ")[0]
    kinds = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|dynamic-slice|transpose)\(", loops)
    smallest = SHAPE.hidden_size * SHAPE.num_kv_heads * SHAPE.head_dim
    assert [kind for kind in kinds if np.prod([int(n) for n in kind.split(",")]) >= smallest] == []


@pytest.mark.parametrize("name", ["here", "h100x8", "v5e-8"])
def test_weights_that_are_shared_stay_where_they_are(name):
    """Two devices a copy: what travels for a token is of the size of hidden states, or of one row of logits."""
    loops = program(name, 2).split("\nENTRY ")[0]
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(re.findall(COLLECTIVE, loops)))
    sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]
    assert SLOTS // 4 * SHAPE.hidden_size in sizes
    assert max(sizes) <= SLOTS // 4 * SHAPE.vocab_size
