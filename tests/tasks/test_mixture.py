"""Several tasks as one: what is drawn of each, who answers for an example, what cannot be mixed or wrapped."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_llm.config import Evaluation
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import evaluate, reinforce
from jaxrl_llm.learning.groups import Group, TokenTask
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.agents import Agent
from jaxrl_llm.tasks.mixture import Mixture
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.reflection import WithReflection
from jaxrl_llm.tasks.task import (
    Demonstrator,
    Interactive,
    Reward,
    TeacherPrompter,
)
from jaxrl_llm.tasks.tools import Toolbox
from jaxrl_llm.tasks.transfer import Transfer
from jaxrl_llm.training import tables
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.leaving import Stop
from tests import tiny
from tests.rollouts.fake import Scripted
from tests.tasks.scoring import score_responses
from tests.training.quick import config as quick
from tests.training.test_components import CONFIG, made_of
from tests.training.test_evaluate import WORDS


class Numbers:
    """Pays `pay` for a response that is the number."""

    name = "numbers"

    def __init__(self, train, test=(), pay=1.0):
        self.train, self.test, self.pay = train, test, pay

    def prompt(self, example):
        return str(example)

    def reward(self, example, response):
        right = response == str(example)
        return Reward(self.pay * right, right)


SMALL, LARGE = Numbers(range(10, 30), range(5), pay=2.0), Numbers(range(100, 300), range(5, 9))
MIXED = Mixture({"small": (SMALL, 3), "large": (LARGE, 1)})


def splits(mixture=MIXED, validation=20):
    config = replace(CONFIG, evaluation=Evaluation(validation=validation))
    return replace(made_of([], config=config), task=mixture).splits


def first(mixture, name):
    return next(one for one in mixture.train if one.name == name)


def batches(made, size, seed):
    return Batches(made.train, size, seed=seed, parts=made.parts)


def drawn(batches, count):
    return list(islice(batches, count))


@pytest.mark.parametrize(("weights", "share"), [((3, 1), 0.75), ((0.2, 0.3), 0.4)])
def test_of_all_that_is_drawn_each_task_has_its_share(weights, share):
    mixture = Mixture({"small": (SMALL, weights[0]), "large": (LARGE, weights[1])})
    assert mixture.shares["small"] == pytest.approx(share)
    made = splits(mixture)
    stream = [one for batch in drawn(batches(made, 4, 3), 100) for one in batch]
    for count in (4, 40, 400):
        small = sum(one.name == "small" for one in stream[:count])
        assert abs(small - share * count) <= 1
    numbers = [one.example for one in stream if one.name == "small"]
    trained = {one.example for one in made.train if one.name == "small"}
    assert trained == {*numbers[: len(trained)]}  # each once, before any comes again
    assert numbers[: len(trained)] != numbers[len(trained) : 2 * len(trained)]


def test_the_stream_is_one_of_its_seed_and_goes_on_anywhere():
    made = splits()
    first, again, other = (drawn(batches(made, 5, seed), 30) for seed in (1, 1, 2))
    assert first == again != other
    for stop in (0, 1, 7, 29):
        before = batches(made, 5, 1)
        drawn(before, stop)
        after = batches(made, 5, 1)
        after.set_state(json.loads(json.dumps(before.get_state())))
        assert drawn(after, 30 - stop) == first[stop:]
    reweighted = splits(Mixture({"small": (SMALL, 1), "large": (LARGE, 1)}))
    with pytest.raises(UserError, match="cannot resume the data"):
        batches(reweighted, 5, 1).set_state(batches(made, 5, 1).get_state())


def test_validation_has_the_shares_and_the_test_all_tests():
    made = splits(validation=8)
    assert Counter(one.name for one in made.validation) == {
        "small": 5,
        "large": 2,
    }  # a quarter of 20
    assert Counter(one.name for one in made.test) == {"small": 5, "large": 4}
    assert {one.name for one in list(made.test)[:2]} == {"small", "large"}
    assert not {*made.train} & {*made.validation}
    assert len(made.train) + len(made.validation) == 220


def test_a_prompt_that_is_held_out_is_trained_on_for_no_task():
    alike = Mixture({"one": (Numbers(range(20), [900]), 1), "two": (Numbers(range(20), [901]), 1)})
    made = splits(alike, validation=8)
    assert not {one.example for one in made.train} & {one.example for one in made.validation}
    two = Numbers([*range(40)], [901])
    held = [one.example for one in splits(Mixture({"two": (two, 1)})).validation]
    lost = Mixture({"one": (Numbers(held[:2] * 2, [900]), 1), "two": (two, 1e6)})
    with pytest.raises(UserError, match="mixture: all prompts of 'one' are in the validation of"):
        splits(lost)


def test_who_answers_for_an_example():
    small, large = (first(MIXED, name) for name in ("small", "large"))
    assert (MIXED.prompt(small), MIXED.prompt(large)) == ("10", str(large.example))
    scored = score_responses(MIXED, [small, small, large], ["10", "1", str(large.example)])
    assert [one.score for one in scored] == [2.0, 0.0, 1.0]
    assert not isinstance(MIXED, Interactive | Demonstrator | TeacherPrompter)
    shown = Numbers([1]), Numbers([2])
    for i, task in enumerate(shown):
        task.demonstration = lambda example, i=i: f"{i}: {example}"
        task.environment = lambda example, tokenizer, i=i: (i, example, tokenizer)
    both: Any = Mixture({"a": (shown[0], 1), "b": (shown[1], 1)})
    assert [*map(both.demonstration, both.train)] == ["0: 1", "1: 2"]
    assert [both.environment(one, "words") for one in both.train] == [
        (0, 1, "words"),
        (1, 2, "words"),
    ]
    shown[1].teacher_prompt = lambda example: f"{example} is 2"
    told: Any = Mixture({"a": (shown[0], 1), "b": (shown[1], 1)})
    assert [*map(told.teacher_prompt, told.train)] == [None, "2 is 2"]


PARTS = {"name": "any", "train": [1], "test": [1], "prompt": str}
PLAYED: Any = SimpleNamespace(**PARTS, environment=lambda *_: None)
GROUPED: Any = SimpleNamespace(**PARTS, reward=str, rewards=lambda *_: [])
IMITATED: Any = SimpleNamespace(**PARTS, reward=str, graded=True, row=lambda *_: None)
REFLECTED: Any = WithReflection(Numbers([1]))
REPLACED: Any = SimpleNamespace(**PARTS, reward=str, evaluated=SMALL)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({}, "it has no tasks"),
        ({"a": (SMALL, 0)}, "the weight of 'a' is 0: it must be above 0"),
        ({"a": (SMALL, -1.0)}, "the weight of 'a' is -1.0"),
        ({"a": (SMALL, float("nan"))}, "the weight of 'a' is nan"),
        ({"a": (Numbers([]), 1)}, "'a' has no examples to train on"),
        ({"a": (SMALL, 1), "b": (PLAYED, 1)}, "'b' has an environment and 'a' has none"),
        ({"a": (MIXED, 1)}, "'a' is a mixture itself"),
        ({"a": (IMITATED, 1)}, "'a' has rows to imitate"),
        ({"a": (REFLECTED, 1)}, "'a' changes what is learned from"),
        ({"a": (REPLACED, 1)}, "'a' remembers .*, or is another task in evaluations"),
        ({"a": (SimpleNamespace(name="x"), 1)}, "mixture: 'a': it has no 'train'"),
        ({"all": (SMALL, 1)}, "'all' is no name for a task"),
        ({"a/b": (SMALL, 1)}, "'a/b' is no name for a task"),
    ],
)
def test_what_cannot_be_mixed_is_one_line(tasks, said):
    with pytest.raises(UserError, match=f"^mixture: .*{said}|^{said}") as caught:
        Mixture(tasks)
    assert "\n" not in str(caught.value)


WRAPPERS = {
    "agent": Agent(print).for_task,
    "reflection": WithReflection,
    "tools": Toolbox([]).for_task,
    "transfer": lambda task: Transfer(task, lambda: None),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (object(), ": it has no 'name'"),
        (MIXED, " is a mixture: wrap each of its tasks"),
        (IMITATED, " has rows to imitate"),
        (GROUPED, " grades groups"),
        (REFLECTED, " has an environment of its own"),
        (PLAYED, " has an environment of its own"),
        (REPLACED, " remembers .*, or is another task in evaluations"),
    ],
    ids=["no task", "mixture", "rows", "groups", "reflection", "environment", "evaluated"],
)
def test_a_task_whose_responses_are_not_graded_alone_is_not_wrapped(wrapper, task, said):
    refused = pytest.raises(UserError, match=f"^{wrapper}: the task{said}")
    with nullcontext() if wrapper == "reflection" and task is PLAYED else refused:
        WRAPPERS[wrapper](task)


@pytest.mark.parametrize(
    ("mixed", "best_by", "known"), [(True, "kq", "kk, short"), (False, "kk", "none")]
)
def test_a_best_checkpoint_by_a_task_that_is_none_is_refused(mixed, best_by, known):
    config = quick(mixed=mixed)
    config = replace(config, evaluation=replace(config.evaluation, best_by=best_by))
    with pytest.raises(UserError, match=f"best_by = '{best_by}' is no task .* has {known}"):
        Components.make(config)


def test_metrics_and_the_table_tell_the_tasks_apart():
    mixture = Mixture({"small": (SMALL, 3), "even": (Numbers([1], [6, 7, 8, 9]), 1)})
    sampler = Scripted(
        lambda prompt, number: [prompt[0] - prompt[0] % 2, WORDS.eos]
    )  # even digits are right
    result = evaluate.evaluate(
        sampler, TokenTask(mixture, WORDS), mixture.test, Sampling(max_tokens=4, stop=(WORDS.eos,)), stop=Stop()
    )  # fmt: skip
    figures = result.metrics()
    assert [line.name for line in result.lines] == ["even", "small", "all"]
    assert (figures["accuracy/small"], figures["accuracy/even"]) == (3 / 5, 1 / 2)
    assert figures["accuracy"] == 5 / 9
    scores = [result.score(name) for name in ("", "small", "even")]
    assert [accuracy for accuracy, _ in scores] == [0.55, 0.6, 0.5]
    by_name = {line.name: line.score for line in result.lines}
    both = (by_name["small"] + by_name["even"]) / 2
    assert [reward for _, reward in scores] == [both, by_name["small"], by_name["even"]]
    assert tables.accuracies("", result, "").columns[0].header == "task"


def test_a_task_that_nobody_could_grade_has_no_figures():
    class Unknown(Numbers):
        def reward(self, example, response):
            return replace(super().reward(example, response), graded=False)

    mixture = Mixture({"small": (SMALL, 1), "lost": (Unknown([1], [6, 7, 8, 9]), 1)})
    sampler, how = (
        Scripted(lambda prompt, _: [prompt[0], WORDS.eos]),
        Sampling(max_tokens=4, stop=(WORDS.eos,)),
    )
    task, samples = TokenTask(mixture, WORDS), 2
    result = evaluate.evaluate(sampler, task, mixture.test, how, samples=samples, stop=Stop())
    figures = result.metrics()
    assert figures["accuracy/small"] == figures["pass@2/small"] == 1.0
    assert not [name for name in figures if name.endswith("/lost")]


def test_the_metrics_of_a_step_tell_the_tasks_apart():
    right, wrong = Reward(2.0, True), Reward(0.0, False)
    made = tiny.groups(tiny.responses(rows=6), [right, wrong, wrong, wrong, right, right])
    names = ("small", "large", "small")
    examples = [first(MIXED, name) for name in names]
    groups = [Group(example, one.trajectories) for example, one in zip(examples, made, strict=True)]
    said, plain = reinforce.describe_answers(groups, 0.0), reinforce.describe_answers(made, 0.0)
    assert {name: x for name, x in said.items() if not name.startswith("task/")} == plain
    of = lambda name: [
        said[f"task/{name}/{figure}"] for figure in ("reward", "accuracy", "constant_groups")
    ]
    assert (of("small"), of("large")) == ([1.5, 0.75, 0.5], [0.0, 0.0, 1.0])
