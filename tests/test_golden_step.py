"""The authors' own optimizer steps: four plans, on one device and on eight, micro-batched, packed."""

import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.models import hf, logprobs, qwen2
from jaxrl_llm.objectives import factors, partition
from tests import tiny
from tests.shared import GOLDEN

PLANS = {
    "plain": (partition.together, update.interleaved),
    "lopti_minibatch": (partition.lopti, update.interleaved),
    "lopti_batch": (partition.lopti, update.stage_major),
    "lopti_minibatch_reversed": (partition.reversed, update.interleaved),
}
MESHES = {"1-device": (1, 1, 1), "8-devices": (2, 2, 2), "fsdp-8": (1, 8, 1), "tensor-4": (2, 1, 4)}
FAST = {("1-device", 1, False), ("8-devices", 4, True)}
SLOW = {
    ("1-device", 4, True),
    ("8-devices", 2, False),
    ("fsdp-8", 2, True),
    ("tensor-4", 1, True),
}


def tier(case):
    return () if case in FAST else pytest.mark.slow if case in SLOW else pytest.mark.long


@pytest.mark.parametrize(
    ("mesh", "micro", "pack"),
    [
        pytest.param(*case, marks=tier(case))
        for case in itertools.product(MESHES, (1, 2, 4), (False, True))
    ],
)
def test_four_plans(mesh, micro, pack):
    spec = json.loads((GOLDEN / "step" / "step.json").read_text())
    golden = np.load(GOLDEN / "step" / "step.npz")
    folder, p = GOLDEN / "step" / "model", spec["params"]
    mask, width = golden["mask"] > 0, golden["mask"].shape[1]
    shape, sizes = hf.load_shape(folder), MESHES[mesh]
    mesh = tiny.mesh_of(*sizes)
    definition, _ = qwen2.graph(shape)
    policy = partial(logprobs.of_responses, definition, temperature=p["temperature"])
    collate = tiny.collator(
        minibatches=2, microbatches=micro, shards=sizes[0] * sizes[1], pack=pack
    )
    optimizer = optimizers.adamw(p["lr"])
    objective = tiny.objective(factors=(partial(factors.linear_in_probability, alpha=0.3),))
    responses = tiny.trajectories(spec["prompts"], spec["responses"])
    with jax.set_mesh(mesh):
        batch = update.place(collate(responses), mesh)
        score, to_rows = update.make_score(policy), batch.layout.to_rows
        old = score(hf.load(folder, shape, mesh), batch.inputs)
        np.testing.assert_allclose(
            to_rows(old)[:, :width][mask], golden["old_logp"][mask], atol=1e-4
        )
        tail = ((0, 0), (0, batch.mask.shape[1] - width))
        ref = batch.layout.to_bins(jnp.pad(jnp.asarray(golden["ref_logp"]), tail))
        steps = {}
        for plan, (split, order) in PLANS.items():
            state = update.init_state(hf.load(folder, shape, mesh), optimizer)
            where = jax.tree.map(lambda x: x.sharding, state)
            if order not in steps:
                steps[order] = update.make_train_step(
                    policy, objective, optimizer, order=order, shardings=where
                )
            changed = tiny.objective(factors=objective.factors, partition=split)
            credit = update.make_credit(changed)
            reward = jnp.asarray(golden["rewards"]).reshape(-1, 4)
            credited = credit(batch, reward, old_logp=old, ref_logp=ref)
            advantage = to_rows(credited.advantage)[:, :width]
            np.testing.assert_allclose(advantage, golden["advantages"], atol=1e-4)
            state, metrics = steps[order](state, credited)
            after = to_rows(score(state.params, batch.inputs))[:, :width]
            np.testing.assert_allclose(
                after[mask], golden[f"{plan}/logp_after"][mask], atol=1e-4, err_msg=plan
            )
            got = np.stack([metrics["loss"], metrics["grad_norm"]], 1)
            np.testing.assert_allclose(got, golden[f"{plan}/loss_gradnorm"], atol=1e-4)
            assert jax.tree.map(lambda x: x.sharding, state) == where
