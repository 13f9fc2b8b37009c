"""What a step of reinforcement learns from, and what it says when that is nothing."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, reinforce, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.objectives import Objective, advantages, kl
from jaxrl_llm.tasks.task import UNGRADED, Reward
from tests import tiny

RIGHT, WRONG = Reward(1.0, True, {"x": 2.0}), Reward(0.0, False, {"x": 0.0})
MESH = tiny.mesh_of()


def graded(*rewards, n=2):
    """Groups of `n` responses with these rewards."""
    return tiny.groups(tiny.responses(rows=len(rewards)), rewards, n)


class Policy:
    """The tiny model, as a step asks for it."""

    def logp(self, temperature=1.0):
        return partial(tiny.policy()[0], temperature=temperature)

    def scores(self, temperature=1.0, *, proxy=0.0):
        del proxy
        logp = self.logp(temperature)

        def score(params, inputs):
            found = logp(params, inputs)
            return Scores(found, -found, None)

        return score


class Scores(NamedTuple):
    logp: Any
    entropy: Any
    proxy_logp: Any


HOLES = [RIGHT, UNGRADED, WRONG, UNGRADED, RIGHT, RIGHT]


@pytest.mark.parametrize(
    ("rewards", "group", "drop_even", "kept"),
    [
        ([RIGHT, WRONG, RIGHT, RIGHT], 2, False, [1, 1, 1, 1]),
        ([RIGHT, WRONG, RIGHT, RIGHT], 2, True, [1, 1, 0, 0]),
        ([RIGHT, RIGHT, WRONG, WRONG], 2, True, [0, 0, 0, 0]),
        ([RIGHT, UNGRADED, RIGHT, WRONG], 2, False, [0, 0, 1, 1]),  # alone: compared to nothing
        ([UNGRADED] * 4, 2, False, [0, 0, 0, 0]),
        (HOLES, 3, False, [1, 0, 1, 0, 1, 1]),  # ungraded: the others of the group stay
        (HOLES, 3, True, [1, 0, 1, 0, 0, 0]),
        ([RIGHT, WRONG], 1, True, [1, 1]),  # a group of one is not even
    ],
)
def test_what_is_learned_from(rewards, group, drop_even, kept):
    found = reinforce.learned_from(graded(*rewards, n=group), drop_even)
    assert found.tolist() == list(map(bool, kept))


@pytest.mark.parametrize(
    ("advantage", "kept"),
    [(advantages.grpo, [0, 0, 0, 0]), (advantages.by_turn, [1, 1, 0, 0])],
)
def test_a_group_whose_turns_differ_is_kept_where_the_objective_reads_them(advantage, kept):
    """The rewards of its episodes are equal."""
    first, second = graded(RIGHT, RIGHT, RIGHT, RIGHT)
    with_turns = lambda group, *given: replace(
        group,
        trajectories=tuple(
            replace(one, turns=((0, 1), (1, len(one.tokens))), turn_rewards=(reward, 1.0))
            for one, reward in zip(group.trajectories, given, strict=True)
        ),
    )
    groups = [with_turns(first, 0.0, 0.5), with_turns(second, 0.25, 0.25 + 1e-12)]
    step = tiny.step(
        Policy(), Objective(advantage=advantage), optimizers.adamw(1e-2), Collator(8, 14), MESH,
        update.init_state(tiny.policy()[1], optimizers.adamw(1e-2)), drop_constant_groups=True,
    )  # fmt: skip
    mask = np.asarray(jax.device_get(step.batch(groups)[0].mask))
    assert mask.any(1).tolist() == [*map(bool, kept)]
    said = reinforce.describe_answers(groups, 1.0, turns=advantage is advantages.by_turn)
    assert said["constant_groups"] == 1 - np.mean(kept)


def test_unchecked_rewards_are_in_no_mean():
    describe = lambda *rewards: reinforce.describe_answers(graded(*rewards), 1.0)
    said = describe(RIGHT, UNGRADED, WRONG, RIGHT)
    assert (said["reward"], said["accuracy"], said["reward/x"]) == pytest.approx(
        (2 / 3, 2 / 3, 4 / 3)
    )
    assert (said["ungraded"], said["ungraded_share"], said["constant_groups"]) == (1, 0.25, 0.0)
    said = describe(RIGHT, Reward(0.0, False, {"y": 3.0}), WRONG, UNGRADED)
    assert said["reward/y"] == 3.0  # of those that have it
    nothing = describe(*[UNGRADED] * 4)
    assert nothing["ungraded_share"] == 1.0
    assert not {"reward", "accuracy", "constant_groups"} & set(nothing)


@pytest.mark.parametrize("pack", [True, tiny.slow(False)])
def test_nothing_to_learn_from_changes_nothing_and_has_no_nan(pack):
    objective = Objective(advantage=advantages.grpo, penalties=((1e-3, kl.k3),))
    params = tiny.policy()[1]
    state = update.init_state(params, optimizer := optimizers.adamw(1e-2))
    made = tiny.step(
        Policy(), objective, optimizer, Collator(8, 14, minibatches=2, pack=pack, round_to=4), MESH, state,
        reference=jax.tree.map(lambda x: 1.01 * x, params), drop_constant_groups=True,
    )  # fmt: skip

    def step(state, rewards):
        groups = graded(*rewards)
        batch, reward = made.batch(groups)
        scores, described = made.score(state.params, batch, groups)
        state, visits = made.programs.update(state, made.programs.credit(batch, reward, **scores))
        return state, reinforce.describe_update(visits, described, {})

    before = jax.device_get(state.params)
    for rewards in ([UNGRADED] * 8, [RIGHT] * 8, [RIGHT, UNGRADED] * 4):
        state, said = step(state, rewards)
        assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.params)))
        assert all(np.isfinite(value) for value in said.values()), said
        assert (said["updates"], said["skipped"]) == (0, 0)
    state, said = step(state, [RIGHT, WRONG] * 4)
    assert said["updates"] == 2
    assert not jax.tree.all(jax.tree.map(np.array_equal, before, jax.device_get(state.params)))


def test_a_gradient_that_is_not_finite_is_counted_and_kept_out_of_the_figures():
    visits = {
        name: np.asarray(values)
        for name, values in {
            "stage": [0, 0, 0], "share": [1.0, 1.0, 0.0], "loss": [np.nan, 2.0, 0.0],
            "grad_norm": [np.nan, 1.0, 0.0],
        }.items()
    }  # fmt: skip
    said = reinforce.describe_update(visits, {}, {})
    assert (said["updates"], said["skipped"], said["loss"]) == (1, 1, 2.0)


def test_with_ratios_of_the_sampler_its_log_probs_are_the_old_ones():
    optimizer = optimizers.adamw(1e-2)
    state = update.init_state(tiny.policy()[1], optimizer)
    for its_own in (False, True):
        made = tiny.step(
            Policy(), Objective(advantages.grpo), optimizer, Collator(8, 14, round_to=4), MESH, state,
            sampler_ratios=its_own,
        )  # fmt: skip
        groups = graded(*[RIGHT, WRONG] * 4)
        batch, _ = made.batch(groups)
        old = batch.layout.to_rows(made.score(state.params, batch, groups)[0]["old_logp"])
        assert np.array_equal(old, batch.sampler_logp) == its_own


def test_what_the_responses_of_a_step_say():
    whole = [True, False, True, True]
    made = tiny.trajectories([[1]] * 4, [[1], [1, 2, 3], [1], [1]], finished=whole)
    said = reinforce.describe_answers(tiny.groups(made, [RIGHT] * 4), 2.0)
    assert (said["truncated"], said["length"], said["time/tokens_per_second"]) == (0.25, 1.5, 3.0)


@pytest.mark.parametrize(
    ("gap", "tolerance", "lag", "refused"),
    [(0.1, 1e-3, 0, True), (np.nan, 1e-3, 0, True), (1e-4, 1e-3, 0, False), (0.1, 1e-3, 1, False),
     (0.1, None, 0, False)],
)  # fmt: skip
def test_responses_of_another_policy_are_refused(gap, tolerance, lag, refused):
    """A lie that is well-formed: other tokens, or other log-probs."""
    [one] = tiny.responses(rows=1)
    groups = tiny.groups([replace(one, versions=(7 - lag, 7))], n=1)
    with pytest.raises(UserError, match="step 8: the log-probs") if refused else nullcontext():
        reinforce.require_our_policy(groups, 7, {"mismatch_mean": np.float32(gap)}, tolerance)
