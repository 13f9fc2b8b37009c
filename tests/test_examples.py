"""The files of examples/ learn, and a step of theirs is a step of a run."""

import importlib.util
import pathlib
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm.learning import update
from jaxrl_llm.objectives import partition
from jaxrl_llm.tasks.task import Reward
from tests import public, tiny

GRPO = pathlib.Path(__file__).parents[1] / "examples" / "grpo.py"


@pytest.fixture
def grpo():
    spec = importlib.util.spec_from_file_location("grpo", GRPO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("examples") / "model"
    public.write_model(where, words=[*map(str, range(19)), "+", "="])
    return where


def test_a_step_of_the_example_is_a_step_of_a_run(grpo, folder, monkeypatch, capsys):
    """What it prints too: the second stage has most of the KL, of tokens that the first has moved."""
    monkeypatch.setattr(grpo, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(grpo, "reward", lambda _, text: float(len(text) % 2))
    apart = partial(partition.lopti, eta=0.05)  # by which its random weights have tokens in both
    monkeypatch.setattr(grpo, "OBJECTIVE", replace(grpo.OBJECTIVE, partition=apart))
    responses, rewards, states = [], [], []
    collate, credit, make = jl.Collator.__call__, update.make_credit, update.make_train_step

    def noted(list_of, call):
        def called(*args, **named):
            made = call(*args, **named)
            list_of.append(jax.tree.map(jnp.copy, made[0]) if list_of is states else args[1])
            return made

        return called

    monkeypatch.setattr(jl.Collator, "__call__", noted(responses, collate))
    monkeypatch.setattr(update, "make_credit", lambda objective: noted(rewards, credit(objective)))
    monkeypatch.setattr(update, "make_train_step", lambda *a, **n: noted(states, make(*a, **n)))
    made = []
    monkeypatch.setattr(
        jl, "Objective", lambda **named: made.append(jl.objectives.Objective(**named)) or made[0]
    )
    means = grpo.main(str(folder), steps=1, prompts=4, group=4)
    assert len(means) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"step 1: reward {means[0]:.2f}, loss ")

    model = jl.load(str(folder))
    optimizer, reference = (
        jl.optimizers.adamw(grpo.LEARNING_RATE),
        jax.tree.map(jnp.copy, model.params),
    )
    state = update.init_state(model.params, optimizer)
    collate = jl.Collator(grpo.PROMPT_LENGTH, grpo.RESPONSE_LENGTH, microbatches=2, pack=True)
    step = tiny.step(
        model.policy,
        grpo.OBJECTIVE,
        optimizer,
        collate,
        model.mesh,
        state,
        reference=reference,
    )
    given = [Reward(float(r), bool(r)) for r in np.asarray(rewards[0]).flat]
    with jax.set_mesh(model.mesh):
        groups = tiny.groups(responses[0], given, n=4)
        batch, reward = step.batch(groups)
        scores, _ = step.score(state.params, batch, groups)
        credited = step.programs.credit(batch, reward, **scores)
        after, visits = step.programs.update(state, credited)
    loss, drift = (float(np.asarray(visits[name]).sum()) for name in ("loss", "kl"))
    assert abs(loss) > 0.01 < drift
    assert out.endswith(f", loss {loss:+.3f}, KL {drift:.4f}\n")
    jax.tree.map(np.testing.assert_array_equal, after, states[0])
    assert int(after.step) == 1


@pytest.mark.slow
def test_the_example_learns(grpo, folder, monkeypatch):
    """That responses begin with a seven, which a model of random weights can find in seconds."""
    monkeypatch.setattr(grpo, "LEARNING_RATE", 1e-2)
    monkeypatch.setattr(grpo, "reward", lambda _, text: float(text.split()[:1] == ["7"]))
    means = grpo.main(str(folder), steps=12)
    assert np.mean(means[:3]) < 0.3
    assert np.mean(means[-3:]) > 0.7
