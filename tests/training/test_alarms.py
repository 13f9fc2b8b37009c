"""The figures that give a run away."""

import jax.numpy as jnp
import pytest

from jaxrl_llm.objectives import Objective, advantages, recipes
from jaxrl_llm.training.alarms import alarms, equal_rewards_teach, reason_to_stop

FINE = {
    "ungraded_share": 0.0, "updates": 4, "skipped": 0, "constant_groups": 0.2, "entropy": 1.0,
    "length": 80.0,
}  # fmt: skip


SAME = {"constant_groups": 1.0, "reward": 0.0, "accuracy": 0.0, "truncated": 0.1}


def steps(count, **changes):
    return [FINE | changes] * count


def test_nothing_is_wrong_with_a_run_in_order():
    for count in range(1, 12):
        assert alarms(steps(count)) == {}
        assert reason_to_stop(steps(count), 0.5) == ""
    assert alarms([{}]) == {}


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        (steps(1, ungraded_share=0.2), "ungraded"),
        (steps(4) + steps(1, updates=0, skipped=4), "skipped"),
        (steps(3) + steps(5, constant_groups=1.0), "flat"),
        (steps(2, **SAME), "reward"),
        (steps(3) + steps(3, entropy=0.09), "entropy"),
        (steps(3) + steps(3, length=7.0), "length"),
    ],
)
def test_each_alarm(records, kind):
    assert list(alarms(records)) == [kind]
    assert alarms([*records, *steps(9)]) == {}  # it is over


@pytest.mark.parametrize(
    "records",
    [
        steps(6) + steps(1, ungraded_share=0.25),  # of three steps: 8%
        steps(3) + steps(3, updates=3, skipped=1),
        steps(3) + steps(4, constant_groups=1.0),
        steps(3) + steps(3, entropy=0.11),
        steps(3) + steps(3, updates=0, entropy=0.0),  # of an empty batch
        steps(1, entropy=0.01) + steps(9),
        steps(4, constant_groups=1.0),  # a few steps are none
        steps(1, **SAME),
        steps(3, **SAME),  # told once
        steps(1, **SAME) + steps(1, **SAME | {"reward": 0.1}),
        steps(2, **SAME | {"constant_groups": 0.9}),
        steps(2, constant_groups=1.0),  # nothing was graded
        steps(2) + steps(3, entropy=0.01),
        steps(1, ungraded_share=0.1),
    ],
)
def test_no_false_alarm(records):
    assert alarms(records) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "has the reward 0: likely true answers have another form"),
        ({"reward": 1.0, "accuracy": 1.0, "truncated": 0.6}, "has the reward 1: all are right"),
        ({"truncated": 0.6}, "60% are cut at response_length"),
        *(
            ({f"reward/{x}": 0.0}, "none has the format")
            for x in ("format", "math_format", "boxed", "answered")
        ),
        ({"reward/format": 1.0}, "likely true answers"),
    ],
)
def test_a_reward_that_never_differs_is_explained(changes, said):
    assert said in alarms(steps(2, **SAME | changes))["reward"]


def test_where_equal_rewards_teach():
    """Not by a teacher, nor where responses are compared with those to other prompts, or with none."""
    learns = {name for name, make in recipes.BY_NAME.items() if equal_rewards_teach(make(7))}
    others = {"reinforce_plus_plus", "w_reinforce", "asymre", "unlikeliness"}
    assert learns == {*others, "distillation", "gkd", "erl"}
    assert equal_rewards_teach(Objective(advantage=advantages.by_turn))


@pytest.mark.parametrize(
    ("advantage", "teach"),
    [
        (lambda reward, data: data.reward - data.reward.mean(), True),
        (lambda reward, data: data.mask * (0.0 / (reward - reward)).reshape(-1, 1), False),
        (lambda reward, data: jnp.zeros((16, 64, 32)).reshape(data.mask.shape), False),
    ],
)
def test_an_advantage_of_one_s_own_is_asked_on_its_shapes(advantage, teach):
    assert equal_rewards_teach(Objective(advantage=advantage)) is teach


def test_equal_rewards_are_no_alarm_where_something_else_teaches():
    assert alarms(steps(2, **SAME), equal_rewards_teach=True) == {}
    assert alarms(steps(5, constant_groups=1.0), equal_rewards_teach=True) == {}
    assert list(alarms(steps(5, ungraded_share=0.2), equal_rewards_teach=True)) == ["ungraded"]


class Counting(list):
    """Records that count how many of them are read."""

    read = 0

    def __iter__(self):
        for record in super().__iter__():
            self.read += 1
            yield record

    def __reversed__(self):
        for record in super().__reversed__():
            self.read += 1
            yield record


@pytest.mark.parametrize("record", [FINE, {"loss": 0.5, "updates": 1}], ids=["reinforce", "warm"])
def test_a_long_run_reads_no_more(record):
    records = Counting([record] * 10_000)
    assert alarms(records) == {}
    assert records.read < 100


def test_when_to_stop():
    assert "67% of the responses" in reason_to_stop(steps(1) + steps(2, ungraded_share=1.0), 0.5)
    assert reason_to_stop(steps(2) + steps(1, ungraded_share=1.0), 0.5) == ""
    assert reason_to_stop(steps(2, ungraded_share=1.0), 0.5) == ""  # too early to tell
    assert reason_to_stop(steps(3, ungraded_share=1.0), 1.0) == ""
    skipped = steps(3, updates=0, skipped=4)
    said = reason_to_stop(skipped, 0.5)
    assert "no gradient of the last 3 steps was finite" in said
    assert "jaxrl-llm export RUN FOLDER --step N" in said
    assert reason_to_stop(steps(1) + skipped[1:], 0.5) == ""
    assert reason_to_stop(steps(3, updates=0), 0.5) == ""  # nothing was tried
