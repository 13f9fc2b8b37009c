"""What waits in the memory of the hosts: the same numbers, and room on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.models import sharding
from tests import tiny


def equal(a, b):
    same = jax.tree.map(lambda x, y: bool(np.array_equal(x, y)), a, b)
    return all(jax.tree.leaves(same)) and jax.tree.structure(a) == jax.tree.structure(b)


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@pytest.mark.parametrize("sizes", [tiny.slow((1, 1, 1)), (2, 2, 2)])
def test_an_optimizer_on_the_hosts_computes_the_same_to_the_bit(sizes):
    mesh = tiny.mesh_of(*sizes)
    optimizer, objective = optimizers.adamw(1e-2), tiny.objective()
    with jax.set_mesh(mesh):
        policy, params = tiny.policy(mesh=mesh)
        batch = update.place(
            tiny.collator(minibatches=2, microbatches=2, shards=4)(tiny.responses()), mesh
        )
        reward = sharding.replicated(np.arange(8.0, dtype=np.float32).reshape(2, 4) % 3, mesh)
        old = update.make_score(policy)(params, batch.inputs)
        credited = update.make_credit(objective)(batch, reward, old_logp=old, ref_logp=old - 0.1)
        ends = []
        for offload in (False, True):
            state = update.init_state(jax.tree.map(jnp.copy, params), optimizer, offload=offload)
            places = jax.tree.map(lambda x: x.sharding, state)
            step = update.make_train_step(policy, objective, optimizer, shardings=places)
            for _ in range(2):
                state, metrics = step(state, credited)
            ends.append((state, metrics))
            assert kinds(state.opt_state) == {"pinned_host" if offload else "device"}
            assert kinds(state.params) == {"device"}
    assert equal(*ends)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), params, ends[0][0].params)
    assert min(jax.tree.leaves(moved)) > 0
