"""Classes in the style of TRL's `environment_factory`, used as they are."""

import pytest

from jaxrl_llm.adapters.trl import Environments
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.answers import TokenTask
from jaxrl_llm.models import tokenizer

WORDS = tokenizer.of_words(
    [*map(str, range(10)), "higher", "lower", "guess", "is", "?", ";", "done"]
)


class Guessing:
    """A number is guessed; the object remembers what was tried."""

    def reset(self, number, **row):
        self.number, self.tried, self.reward = number, 0, 0.0
        return "is ?" if number > 4 else None

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


def test_methods_are_tools_and_each_response_has_an_object_of_its_own():
    task = TokenTask(TASK, WORDS)
    said = [["guess 3 ;", "done"], ["guess 9 ;", "guess 7 ;", "done"]]
    played = task.played(TASK.train, said)
    heard = [WORDS.decode(tokens).replace("<eos> ", "") for tokens in played.responses]
    assert heard == ["guess 3 ; higher done", "guess 9 ; lower guess 7 ; higher done"]
    assert [r[0] for r in played.rewards] == [1.0, 0.5]
    assert [r[1] for r in played.rewards] == [True, False]
    first, second = (task.tried(TASK.train[0], turns) for turns in (["done"], ["guess 3 ;"]))
    assert (first.score, second.score) == (0.0, 1.0)
    assert second.fields["tool_calls"] == 1


def test_a_score_of_ones_own():
    task = Environments("g", Guessing, rows(3), rows(5), score=lambda made, said: made.tried / 4)
    assert (
        TokenTask(task, WORDS).tried(task.train[0], ["guess 1 ;", "guess 2 ;", "done"]).score == 0.5
    )


def test_a_method_without_a_description_is_one_line():
    class Bare(Guessing):
        def act(self, x):
            return x

    with pytest.raises(UserError, match="tools"):
        Environments("bare", Bare, rows(3), rows(5)).prompt(rows(3)[0])
