"""Classes in the style of TRL's `environment_factory`, used as they are."""

import asyncio
import functools
import gc
import random

import pytest

from jaxrl_llm.adapters.trl import Environments, own_reward
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer

WORDS = tokenizer.of_words(
    [*map(str, range(10)), "higher", "lower", "guess", "is", "?", ";", "done", "error"]
)


class Guessing:
    """A number is guessed; the object remembers what was tried."""

    def reset(self, number, **row):
        self.number, self.tried, self.reward = number, 0, 0.0
        return " is ?" if number > 4 else None

    def guess(self, value: str) -> str:
        """Try a number.

        Args:
            value: The number.
        """
        self.tried += 1
        if int(value) == self.number:
            self.reward = 1.0 / self.tried
        return "lower" if int(value) > self.number else "higher"

    def _private(self):
        raise AssertionError("not a tool")


def rows(*numbers):
    return [{"prompt": "guess", "number": number} for number in numbers]


TASK = Environments("guessing", Guessing, rows(3, 7), rows(5))


def test_a_reset_may_say_something_behind_the_prompt():
    task = TokenTask(TASK, WORDS)
    assert [WORDS.decode(p) for p in task.prompts(TASK.train)] == ["guess", "guess is ?"]


def test_a_row_may_have_no_prompt():
    """The environment says it all, as TRL allows."""
    task = Environments("own", Guessing, [{"number": 5}], [])
    assert [*task.prompt(task.train[0])] == [{"role": "user", "content": " is ?"}]


def test_an_object_is_made_for_every_response_and_one_for_each_rows_prompt():
    made = []

    class Counted(Guessing):
        def __init__(self):
            made.append(1)

    task = Environments("counted", Counted, rows(3, 7), [])
    task.prompt(task.train[0])
    beforehand = len(made)
    for _ in range(3):
        task.prompt(task.train[0])
    assert len(made) == beforehand
    for _ in range(3):
        task.environment(task.train[0], WORDS)
    assert len(made) == beforehand + 3
    task.prompt(task.train[1])
    assert len(made) == beforehand + 4
    gc.collect()
    assert sum(type(one) is Counted for one in gc.get_objects()) == 1  # whose methods are told


class Doors:
    """Draws a door and says which."""

    def reset(self, prompt):
        self.door, self.reward = random.choice("0123456789"), 0.0
        return f" {self.door}"

    def guess(self, value: str) -> str:
        """Open a door.

        Args:
            value: Which.
        """
        self.reward = float(value == self.door)
        return "done"


def test_a_policy_is_judged_by_what_it_was_told():
    task = TokenTask(Environments("doors", Doors, [{"prompt": "is"}], []), WORDS)
    [prompt] = task.prompts(task.task.train)
    told = WORDS.decode(prompt).split()[1]
    tried = lambda: task.try_reward(task.task.train[0], [f"guess {told} ;", "done"]).score
    with pytest.raises(UserError, match=r"doors: reset\(\) says .* let it draw from the row"):
        assert [tried() for _ in range(20)] == [1.0] * 20


def test_what_reset_says_is_a_text():
    class Pictures(Guessing):
        def reset(self, number, **row):
            return [{"type": "image"}]

    with pytest.raises(UserError, match=r"pictures: reset\(\) returned a list"):
        Environments("pictures", Pictures, rows(3), []).prompt(rows(3)[0])


def test_a_reset_that_changes_its_row_changes_no_data():
    class Marking(Guessing):
        def reset(self, prompt, **row):
            prompt[-1]["content"] += " ;"
            return Guessing.reset(self, **row)

    data = [{"prompt": [{"role": "user", "content": "guess"}], "number": 3}]
    prompt = Environments("marking", Marking, data, []).prompt(data[0])
    assert prompt[-1]["content"] == data[0]["prompt"][0]["content"] == "guess"


class Owning(Guessing):
    """Says its reward as TRL has it, and has attributes that are no tools."""

    def __init__(self):
        self.helper = functools.partial(print)

    @property
    def opened(self):
        raise RuntimeError("before reset")

    def get_reward(self):
        return float(self.tried == 1)

    def reset(self, number, **row):
        return Guessing.reset(self, number)

    reset.__name__ = "begin"


class Later(Owning):
    async def get_reward(self):
        return float(self.tried == 2)


@pytest.mark.parametrize(("kind", "scores"), [(Owning, (1.0, 0.0)), (Later, (0.0, 1.0))])
def test_get_reward_is_the_reward_and_no_tool(kind, scores):
    task = TokenTask(Environments("own", kind, rows(3), []), WORDS)
    once, twice = (["guess 4 ;"] * count + ["done"] for count in (1, 2))
    tried = [task.try_reward(task.task.train[0], turns) for turns in (once, twice)]
    assert tuple(one.score for one in tried) == scores
    assert all(one.graded for one in tried)
    assert [*task.task.prompt(task.task.train[0]).tools.schemas] == ["guess"]


def test_get_reward_may_wait_where_an_event_loop_runs():
    """As one does in a notebook."""
    world = Later()
    world.reset(3)
    world.guess("3"), world.guess("3")

    async def cell():
        return own_reward(world, "")

    assert asyncio.run(cell()) == own_reward(world, "") == 1.0


def test_methods_are_tools_and_each_response_has_an_object_of_its_own():
    task = TokenTask(TASK, WORDS)
    said = [["guess 3 ;", "done"], ["guess 9 ;", "guess 7 ;", "done"]]
    played = task.replay(TASK.train, said)
    heard = [WORDS.decode(one.tokens).replace("<eos> ", "") for one in played]
    assert heard == ["guess 3 ; higher done", "guess 9 ; lower guess 7 ; higher done"]
    assert [one.reward.score for one in played] == [1.0, 0.5]
    assert [one.reward.correct for one in played] == [True, False]
    first, second = (task.try_reward(TASK.train[0], turns) for turns in (["done"], ["guess 3 ;"]))
    assert (first.score, second.score) == (0.0, 1.0)
    assert second.fields["tool_calls"] == 1


def test_a_score_of_ones_own():
    task = Environments("g", Guessing, rows(3), rows(5), score=lambda made, said: made.tried / 4)
    assert (
        TokenTask(task, WORDS).try_reward(task.train[0], ["guess 1 ;", "guess 2 ;", "done"]).score
        == 0.5
    )


def test_a_method_without_a_description_is_one_line():
    class Bare(Guessing):
        def act(self, x):
            return x

    with pytest.raises(UserError, match="tools"):
        Environments("bare", Bare, rows(3), rows(5)).prompt(rows(3)[0])
