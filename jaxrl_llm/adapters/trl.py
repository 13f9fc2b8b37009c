"""Environments as TRL's trainers take them (`environment_factory`), as tasks; needs no TRL."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.rewards import copied, waited_for
from jaxrl_llm.tasks.task import Environment, Prompt
from jaxrl_llm.tasks.tools import Toolbox, WithTools

Row = Mapping[str, Any]


def own_reward(environment: Any, response: str) -> float:
    """The environment's `get_reward()`, or its attribute `reward`."""
    del response
    if not hasattr(environment, "get_reward"):
        return environment.reward
    return waited_for(environment.get_reward())


@dataclass(frozen=True)
class Environments:
    """A task of rows, and of objects whose public methods are the tools of an episode.

    `factory()` makes an object for every response, and one for each row's prompt. Its
    `reset(**row)` may return a text, always the same for a row, which follows the row's `prompt` (a
    text or messages). `score(environment, response)`, called after every turn with all of its
    calls, is the reward so far; from 1 on it is correct. `limits` go to `Toolbox`, which raises
    UserError for methods without annotations or docstrings.
    """

    name: str
    factory: Callable[[], Any]
    train: Sequence[Row]
    test: Sequence[Row]
    score: Callable[[Any, str], float] = own_reward
    limits: Mapping[str, Any] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # by row

    def prompt(self, row: Row) -> Prompt:
        """The row's prompt, what an environment says to it, and its tools."""
        if repr(row) not in self._texts:
            self._begun(row)
        return self._with(self._toolbox, row).prompt(row)

    def environment(self, row: Row, tokenizer: Any) -> Environment:
        """An environment that was reset with the row."""
        made = self._begun(row)
        return self._with(self._methods(made), row, made).environment(row, tokenizer)

    @cached_property
    def _toolbox(self) -> Toolbox:
        return self._methods(self.factory())

    def _begun(self, row: Row) -> Any:
        """An object that was reset; UserError if it says something else than those before it."""
        environment = self.factory()
        said = environment.reset(**copied(row))
        if not isinstance(said, str | None):
            kind = type(said).__name__
            raise UserError(f"{self.name}: reset() returned a {kind}: let it return a text or None")
        if self._texts.setdefault(repr(row), said or "") != (said or ""):
            raise UserError(
                f"{self.name}: reset() says something else each time, so a policy is not judged by "
                f"what it was told: let it draw from the row {row!r:.80}"
            )
        return environment

    def _methods(self, world: Any) -> Toolbox:
        """The public functions of the object's class, as TRL lists them."""
        names = [name for name, _ in inspect.getmembers(type(world), inspect.isfunction)]
        public = [name for name in names if not name.startswith("_")]
        tools = [getattr(world, name) for name in public if name not in ("reset", "get_reward")]
        return Toolbox(tools, **self.limits)

    def _with(self, tools: Toolbox, row: Row, environment: Any = None) -> WithTools:
        given = row.get("prompt", [{"role": "user", "content": ""}])  # or reset() says it all
        prompt = _followed(given, self._texts[repr(row)])

        def reward(row: Row, response: str) -> Reward:
            del row
            score = float(self.score(environment, response))
            return Reward(score, score >= 1)

        task: Any = SimpleNamespace(
            name=self.name,
            train=self.train,
            test=self.test,
            prompt=lambda row: prompt,
            reward=reward,
        )
        return tools.for_task(task)


def _followed(prompt: Prompt, text: str) -> Prompt:
    """A prompt with a text behind its last message."""
    if isinstance(prompt, str):
        return prompt + text
    return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + text}]
