"""Environments as TRL's trainers take them (`environment_factory`), as tasks; needs no TRL."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.tasks.task import Environment, Prompt, Reward
from jaxrl_llm.tasks.tools import Toolbox, WithTools

Row = Mapping[str, Any]


def own_reward(environment: Any, response: str) -> float:
    """The environment's attribute `reward`."""
    del response
    return environment.reward


@dataclass(frozen=True)
class Environments:
    """A task of rows, and of objects whose public methods are the tools of an episode.

    `factory()` makes an object for every response. Its `reset(**row)` may return a text, which
    follows the row's `prompt` (a text or messages). `score(environment, response)`, called after a
    turn with all of its calls, is the reward so far; from 1 on it is correct. `limits` go to
    `Toolbox`, which raises UserError for methods without annotations or docstrings.
    """

    name: str
    factory: Callable[[], Any]
    train: Sequence[Row]
    test: Sequence[Row]
    score: Callable[[Any, str], float] = own_reward
    limits: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, row: Row) -> Prompt:
        """The row's prompt, what an environment says to it, and its tools."""
        return self._begun(row).prompt(row)

    def environment(self, row: Row, tokenizer: Any) -> Environment:
        """An environment that was reset with the row."""
        return self._begun(row).environment(row, tokenizer)

    def _begun(self, row: Row) -> WithTools:
        made = self.factory()
        said = made.reset(**row)
        prompt = _followed(row["prompt"], f"\n\n{said}" if said else "")

        def reward(row: Row, response: str) -> Reward:
            del row
            score = float(self.score(made, response))
            return Reward(score, score >= 1)

        task: Any = SimpleNamespace(
            name=self.name,
            train=self.train,
            test=self.test,
            prompt=lambda row: prompt,
            reward=reward,
        )
        public = [getattr(made, name) for name in dir(made) if not name.startswith("_")]
        tools = [one for one in public if callable(one) and one.__name__ != "reset"]
        return Toolbox(tools, **self.limits).for_task(task)


def _followed(prompt: Prompt, text: str) -> Prompt:
    """A prompt with a text behind its last message."""
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
