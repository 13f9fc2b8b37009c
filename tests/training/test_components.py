"""What is learned from, what chooses the best checkpoint, and what is read once at the end."""

import itertools
import sys
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxrl_llm import storage
from jaxrl_llm.config import Evaluation
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import groups, imitate
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import tokenizer
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks import builders
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves.generate import Recipe
from jaxrl_llm.tasks.task import Mapped
from jaxrl_llm.training import stream
from jaxrl_llm.training.components import DATA_OF_TASK, Components, askable, readable
from jaxrl_llm.training.fingerprint import written_out
from tests.training import quick
from tests.training.conftest import forget

CONFIG = quick.config()
TWO_ASIDE = replace(CONFIG, evaluation=Evaluation(validation=2))


def made_of(train, test=(-1,), *, config=CONFIG, longest=1000) -> Any:
    """Components whose prompts are as many tokens as they have digits."""
    task = SimpleNamespace(train=train, test=test, prompt=str)
    tokenizer = SimpleNamespace(prompt=lambda text: [0] * len(text))
    shape: Any = SimpleNamespace(max_length=longest)
    nothing: Any = None
    return Components(config, task, tokenizer, shape, nothing, nothing, None)  # pyright: ignore[reportArgumentType]


def divided(train, validation, test=(-1,)):
    config = replace(CONFIG, evaluation=Evaluation(validation=validation))
    found = made_of(train, test, config=config).splits
    return [[source[i] for i in range(len(source))] for source in found[:3]]


def test_validation_comes_out_of_the_training_data_evenly():
    """One of every ten in a row, where the data are sorted; and of each kind, where they go in cycles."""
    train, validation, test = divided(range(100), 10, range(100, 107))
    assert [number // 10 for number in validation] == [*range(10)]
    kinds = Counter(number % 5 for number in divided(range(5000), 500)[1])
    assert sorted(kinds) == [0, 1, 2, 3, 4]
    assert all(70 < count < 130 for count in kinds.values())
    assert validation == divided(range(100), 10)[1]
    assert sorted(train + validation) == [*range(100)]
    assert test == [*range(100, 107)]


def test_other_data_of_the_same_length_have_another_checksum():
    checksum = lambda *data: made_of(*data).splits.checksums[DATA_OF_TASK]
    known = range(10, 30), range(30, 40)
    assert checksum(*known) == checksum(*known)
    assert checksum(*known) != checksum(range(11, 31), known[1])
    assert checksum(*known) != checksum(known[0], range(31, 41))


@dataclass
class Puzzle:
    words: Any


class Named(NamedTuple):
    words: Any


class Image(int):
    def __repr__(self):
        return f"<Image of 2 x 2 at 0x{int(self):X}>"


EQUAL = [
    ({0, 8}, {8, 0}),
    (frozenset([0, 8]), frozenset([8, 0])),
    *(
        (hold({0, 8}), hold({8, 0}))
        for hold in (
            lambda x: [x],
            lambda x: (x,),
            lambda x: {"a": {1: x}},
            lambda x: SimpleNamespace(a=x),
            Puzzle,
            Named,
        )
    ),
    (Image(0x7F1B), Image(0xA)),
    (object(), object()),
]
OTHER = [
    ({0, 8}, {0, 9}),
    ([0, 8], [8, 0]),
    ([0, 8], (0, 8)),
    ("ab", "ba"),
    (1, 1.0),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    (Puzzle({1}), Puzzle({2})),
    (np.zeros(2000), np.arange(2000) == 1000),
    (SimpleNamespace(a=1), SimpleNamespace(a=2)),
]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [*((*pair, True) for pair in EQUAL), *((*pair, False) for pair in OTHER)],
)
def test_a_checksum_of_data_is_that_of_their_content(one, other, same):
    """Neither the order of sets nor addresses are the same in any two processes."""
    known = []
    for thing in (one, other):
        made = made_of([(i, thing) for i in range(4)], [(4, thing)])
        made.task.prompt = lambda example: str(example[0])
        known.append(made.splits.checksums[DATA_OF_TASK])
    assert (known[0] == known[1]) == same


@pytest.mark.parametrize(
    "example",
    ["a'b", ["a", 1.0], ("a",), (1, None), {"a": [True, b"{"]}, Puzzle({1}), 1e-7],
    ids=str,
)
def test_plain_data_have_the_checksum_of_their_repr(example):
    assert written_out(example) == repr(example)


def test_an_example_that_holds_itself_has_a_checksum():
    loop = Puzzle([])
    loop.words.append(loop)
    made = made_of([loop] * 4, [0])
    count = itertools.count()
    made.task.prompt = lambda example: str(next(count))
    assert made.splits.checksums[DATA_OF_TASK]


def test_no_prompt_of_validation_is_trained_on():
    """However often it is in the data; none is asked twice."""
    numbers = [n % 20 if n < 50 else n for n in range(100)]
    train, validation, _ = divided(numbers, 10)
    assert len({*validation}) == len(validation) == 10
    assert {*train} | {*validation} == {*numbers}
    assert not {*train} & {*validation}
    assert Counter(train) == Counter(n for n in numbers if n not in validation)


def test_an_example_is_read_once_and_its_prompt_made_once():
    """Either may take longer than all else that a run begins with."""
    read, prompts, encoded = Counter(), Counter(), Counter()
    noted = lambda i: read.update([i]) or i
    components = made_of(Mapped(range(40), noted), Mapped(range(40, 50), noted))
    components.task.prompt = lambda i: prompts.update([i]) or str(i)
    components.tokenizer.prompt = lambda text: encoded.update([int(text)]) or [0]
    components.splits  # noqa: B018
    assert read == prompts == encoded == Counter(range(50))


def test_an_example_that_cannot_be_read_is_one_line():
    def read(i):
        raise OSError(5, "Input/output error", "data.jsonl")

    made = made_of(Mapped(range(40), read), range(3))
    with pytest.raises(UserError, match=r"an example cannot be read: OSError: .*data\.jsonl"):
        made.splits  # noqa: B018


@pytest.mark.parametrize("prompt", ["1 \ud83d", [{"role": "user", "content": "1 \ud83d"}]])
def test_a_prompt_that_is_no_unicode_is_told_with_its_example(prompt):
    words = tokenizer.of_words(["0", "1"])
    words._inner.chat_template = "{{ messages[0]['content'] }}"
    made = replace(made_of([0, 1], [2]), tokenizer=words)
    for wrong, said in ((1, "training example 1"), (2, "test example 0")):
        made.task.prompt = lambda i, wrong=wrong: prompt if i == wrong else str(i)
        with pytest.raises(UserError, match=f"^{said}: a text has half a surrogate pair, '.ud83d'"):
            readable(made, [0, 1], "training"), askable(made, [2])


def test_small_training_data_keep_three_quarters():
    assert [len(source) for source in divided(range(10), 500, range(10, 13))] == [8, 2, 3]
    assert divided([1, 2] * 4, 500)[0] in ([1] * 4, [2] * 4)
    for few in (range(3), [1] * 9):
        with pytest.raises(UserError, match="at least 4 are needed, of two prompts"):
            divided(few, 500)


@pytest.mark.parametrize(
    ("split", "test", "warning"),
    [
        (0, [0, 0], ""),
        (0, [0, 1], "warning: 1 test prompts are in the training data"),
        (1, [1, 0], "warning: 1 test prompts are in the validation data"),
    ],
)
def test_overlap_of_splits_is_a_warning(split, test, warning):
    examples = divided(range(1, 9), 2)[split][:2]
    test = [n * examples[i] for i, n in enumerate(test)]
    assert made_of(range(1, 9), test, config=TWO_ASIDE).splits.overlap == warning


def test_a_test_set_that_is_trained_on_is_refused():
    examples = divided(range(1, 9), 2)[0][:2]
    for test in (examples, range(1, 9)):  # the same data: of these some were set aside
        with pytest.raises(UserError, match="test examples are in the training data"):
            made_of(range(1, 9), test, config=TWO_ASIDE).splits  # noqa: B018


def test_prompts_that_are_too_long_to_learn_from():
    numbers = [10**n for n in range(60)]  # of 1 to 60 digits
    made = made_of(numbers)
    found = readable(made, numbers, "training")
    assert (len(found), found.skipped, found[39]) == (40, 20, 10**39)
    strict = replace(CONFIG, long_prompts="refuse")
    for config, source, said in (
        (strict, numbers, "training example 40 has a prompt of 41 tokens, the limit is 1 to 40"),
        (CONFIG, numbers[40:], "is empty: 20 examples were skipped for prompts of more than 40"),
        (CONFIG, [], "the training data is empty"),
    ):
        with pytest.raises(UserError, match=said):
            readable(made_of(numbers, config=config), source, "training")


def test_prompts_leave_the_room_of_the_model_to_responses():
    """Those of the warm start too, which may be longer."""
    numbers, warm = [10**n for n in range(60)], CONFIG.warm_start
    assert warm is not None
    longer = replace(CONFIG, warm_start=replace(warm, collate=Collator(40, 52)))
    for config, limit in ((CONFIG, 12), (longer, 8)):
        made = made_of(numbers, config=config, longest=60)
        assert len(readable(made, numbers, "training")) == limit
        strict = replace(config, long_prompts="refuse")
        with pytest.raises(
            UserError, match=f"the limit is 1 to {limit}: .*: lower response_length"
        ):
            readable(replace(made, config=strict), numbers, "training")
    for longest, most in ((48, 0), (53, 5)):
        said = (
            f"skipped for prompts of more than {most} tokens: the model reads {longest}, 48 of them for "
            "responses: lower response_length"
        )
        with pytest.raises(UserError, match=said):
            readable(made_of(numbers, longest=longest), numbers[5:], "training")


def test_no_test_example_is_dropped_for_its_length():
    """It is only answered, not collated: what is too long to learn from may be asked, as far as the model goes."""
    made = made_of([], longest=99)
    assert len(askable(made, [10**50])) == 1
    served = replace(CONFIG, engine=Vllm(max_model_len=98))
    for config, source, said in (
        (
            CONFIG,
            [1, 10**51],
            "test example 1 has a prompt of 52 tokens, and 99 is room for it and 48 to come",
        ),
        (
            served,
            [10**50],
            "98 is room for it and 48 to come: lower response_length, raise the engine's max_model",
        ),
        (CONFIG, [], r"the test data is empty: .* \(of a table: --test, or --held-out above 0\)"),
    ):
        with pytest.raises(UserError, match=said):
            askable(replace(made, config=config), source)


def test_data_sets_in_a_bucket_are_built_once(url):
    recipe = Recipe(people=(3,), depth=1, train=8, test=4)
    config = replace(
        CONFIG, task=lambda data: knights_knaves.tiny(*builders.knights_knaves(recipe, data))
    )
    prompts, built = [], []
    for _ in range(2):
        forget()
        task = Components.make(config, url).task
        prompts.append([task.prompt(task.train[i]) for i in range(8)])
        found = storage._file_system("s3").find(url, detail=True)
        built.append({name: about["LastModified"] for name, about in found.items()})
    assert prompts[0] == prompts[1]
    assert built[0] == built[1]
    assert any(name.endswith("dataset_info.json") for name in built[0])


class Leaving:
    """A task of which one method ends the program, as if the run were finished."""

    name, train, test = "leaving", [1, 2], [3]

    def __init__(self, method):
        def leave(*_, **__):
            sys.exit(0)

        for name in (
            "prompt",
            "reward",
            "row",
            "learned",
            "remember",
            "state_dict",
            "load_state_dict",
        ):
            setattr(self, name, leave if name == method else lambda *_, **__: {})


class LeavingEvaluation(Leaving):
    @property
    def evaluated(self):
        sys.exit(0)


def test_a_task_that_ends_the_program_is_one_line():
    """Whatever of it is called: exit code 0 would tell launchers that the run is complete."""
    data, group = SimpleNamespace(get_state=dict, set_state=dict), groups.Group(1, ())

    def made(task) -> Any:
        return Components(CONFIG, task, *[None] * 5)  # pyright: ignore[reportArgumentType]

    def rollouts(method) -> Any:
        one: Any = stream.Rollouts.__new__(stream.Rollouts)
        one.task, one._data = SimpleNamespace(task=Leaving(method), tokenizer=None), data
        one._config, one._queue = SimpleNamespace(max_resamples=0, prompts=0), [None]
        return one

    with_one = replace(group, trajectories=(Trajectory([1], [2], [0.0]),))
    for call, said in (
        (lambda: imitate.of_row(Leaving("row"), None, 1), "a row cannot be made"),  # pyright: ignore
        (
            lambda: made(LeavingEvaluation("")).token_task(evaluates=True),
            "evaluations cannot be made",
        ),
        (
            lambda: made(Leaving("learned")).as_learned([with_one]),
            "a response cannot be learned from",
        ),
        (lambda: rollouts("remember").next(1), "the task cannot remember"),
        (lambda: rollouts("state_dict").next(1), "the task cannot say what it remembers"),
        (
            lambda: rollouts("load_state_dict").load_state_dict({"data": {}, "task": {}}),
            "the task cannot be told what it remembered",
        ),
    ):
        with pytest.raises(UserError, match=f"{said}: .*SystemExit"):
            call()
