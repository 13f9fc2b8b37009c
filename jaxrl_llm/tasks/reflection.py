"""Second attempts, under instructions that the policy has rewritten itself (ERL, arXiv:2602.13949)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.mixture import check_single
from jaxrl_llm.tasks.rewards import final_part
from jaxrl_llm.tasks.task import (
    Begins,
    Demonstrator,
    Environment,
    Interactive,
    NewContext,
    Prompt,
    Step,
    Task,
    as_text,
)
from jaxrl_llm.tasks.tools import Asked

REFLECTION = """\
Somebody attempted a task under these instructions:

{instructions}

The task:

{task}

The attempt:

{attempt}

What came of it:

{feedback}

Write better instructions for tasks like this one. Answer with the instructions alone."""


def reflection_prompt(instructions: str, task: str, attempt: str, feedback: str) -> Prompt:
    """The prompt of a reflection, after a first attempt that failed."""
    named = {"instructions": instructions or "(none)", "task": task}
    return REFLECTION.format(**named, attempt=attempt, feedback=feedback)


def wrong(example: Any, attempt: str, reward: Reward) -> str:
    """Feedback on an attempt, where the task says no more than its reward."""
    del example, attempt
    return f"The attempt failed, with a reward of {reward.score:g}."


def under(instructions: str, prompt: Prompt) -> Prompt:
    """A prompt under instructions: text before it, or a system message before the others."""
    if not instructions:
        return prompt
    if isinstance(prompt, Asked):
        return Asked.of(under(instructions, prompt.prompt), prompt.tools)
    if isinstance(prompt, str):
        return f"{instructions}\n\n{prompt}"
    messages = [*prompt]
    if messages[0]["role"] == "system":  # templates take one
        instructions = f"{instructions}\n\n{messages.pop(0)['content']}"
    return [{"role": "system", "content": instructions}, *messages]


class WithReflection:
    """A task of episodes: a first attempt and, where that fails, a reflection and a second attempt.

    The reflection is asked for by `ask(instructions, task, attempt, feedback)`, and what it says are the
    instructions of the second attempt. It sees the newest ones by which such an attempt was right, at
    first `instructions`, under which first attempts are made, and all of validation and tests. What is
    learned from has good second attempts once more, under the first instructions
    (`advantages.erl`); a fourth context without room in a response is left out. `feedback(example,
    attempt, reward)` says what came of an attempt. With `attempts` 1 it is the task under instructions.
    """

    def __init__(
        self,
        task: Task[Any],
        instructions: str = "",
        *,
        ask: Callable[[str, str, str, str], Prompt] = reflection_prompt,
        feedback: Callable[[Any, str, Reward], str] = wrong,
        attempts: Literal[1, 2] = 2,
    ):
        check_single(task, "reflection", episodes=True)
        self.name, self.train, self.test = task.name, task.train, task.test
        self.task, self.instructions, self.attempts = task, instructions, attempts
        self.ask, self.feedback, self.memory = ask, feedback, instructions
        if isinstance(task, Demonstrator):
            self.demonstration = task.demonstration

    @property
    def evaluated(self) -> "WithReflection":
        """First attempts alone: what was learned has to do without reflection."""
        return WithReflection(self.task, self.instructions, attempts=1)

    def prompt(self, example: Any) -> Prompt:
        return under(self.instructions, self.task.prompt(example))

    def environment(self, example: Any, tokenizer: Tokenizer) -> "_Episode":
        return _Episode(self, example, tokenizer)

    def learned(self, one: Any, /, limit: int) -> Any:
        """A response with its second attempt again, after its own prompt, if that was worth something."""
        if len(one.restarts) < 2 or one.reward is None or one.reward.score <= 0:
            return one
        start, size = one.restarts[1][1], len(one.tokens)
        turns = [(a, b) for a, b in one.turns if a >= start]
        if one.length + sum(b - a for a, b in turns) > limit or size - start > limit:
            return one
        moved = size + len(one.prompt) - start
        again = [(a + moved, b + moved) for a, b in turns]
        logps = [0.0] * (len(one.prompt) + size - start)
        for a, b in again:  # nobody has sampled them after this prompt
            logps[a - size : b - size] = [math.nan] * (b - a)
        unknown = [np.full_like(chosen[:0], -1) for chosen in one.experts[:1]]
        return replace(
            one,
            experts=(*one.experts, *unknown),  # layers choose for themselves there
            tokens=[*one.tokens, *one.prompt, *one.tokens[start:]],
            logps=[*one.logps, *logps],
            turns=[*one.turns, *again],
            restarts=[*one.restarts, (size, size + len(one.prompt))],
            turn_rewards=[*one.turn_rewards, *one.turn_rewards[-len(turns) :]],
        )

    def remember(self, groups: Sequence[Any], tokenizer: Tokenizer) -> None:
        """The next reflections see the last instructions of these that led to a right attempt."""
        for one in (one for group in groups for one in group.trajectories):
            if len(one.restarts) > 1 and one.reward is not None and one.reward.correct:
                (start, begun), (end, _) = one.restarts[:2]
                written = _instructions(tokenizer, one.tokens[start:begun], one.tokens[begun:end])
                self.memory = written or self.memory

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory = state["memory"]


def _instructions(tokenizer: Tokenizer, prompt: Sequence[int], written: Sequence[int]) -> str:
    """The part of a reflection after its thoughts, if it has any; `prompt` are the tokens before it."""
    return final_part(tokenizer.opened((), prompt) + tokenizer.decode(written))


class _Graded:
    """An attempt in one turn, as an environment."""

    def __init__(self, task: Task[Any], example: Any, tokenizer: Tokenizer):
        self._task, self._example, self._tokenizer = task, example, tokenizer

    def step(self, tokens: Sequence[int]) -> Step:
        prompt = self._task.prompt(self._example)
        opened = self._tokenizer.opened(prompt, self._tokenizer.prompt(prompt))
        return None, self._task.reward(self._example, opened + self._tokenizer.decode(tokens))


class _Episode:
    """An episode: where it is, and what was said in the first attempt."""

    def __init__(self, task: WithReflection, example: Any, tokenizer: Tokenizer):
        self._whole, self._example, self._tokenizer = task, example, tokenizer
        self._memory = task.memory  # as it was when the episode began
        self._attempt, self._number, self._texts = self._begun(), 1, list[str]()
        self._first: Reward | None = None  # the reward of a first attempt that failed
        self._context: Sequence[int] = ()  # the tokens that ask for the reflection

    def _begun(self) -> Environment:
        """The other side of an attempt."""
        task = self._whole.task
        if not isinstance(task, Interactive):
            return _Graded(task, self._example, self._tokenizer)
        environment = task.environment(self._example, self._tokenizer)
        if not isinstance(environment, Environment) or isinstance(environment, Begins):
            raise UserError(
                "reflection: the task's environment has to have `step`, and no `begin`: change that one"
            )
        return environment

    def step(self, tokens: Sequence[int]) -> Step:
        if self._first is not None and self._number == 1:  # the reflection
            self._attempt, self._number = self._begun(), 2
            written = _instructions(self._tokenizer, self._context, tokens)
            return self._anew(under(written, self._prompt)), self._first
        self._texts.append(self._tokenizer.decode(tokens))
        result = self._attempt.step(tokens)
        if not isinstance(result, tuple):
            raise UserError("reflection: the task's environment has to answer at once, not later")
        reply, reward = result
        if isinstance(reply, NewContext):
            raise UserError("reflection: the task's environment may not begin contexts of its own")
        if reply is not None:
            self._texts.append(self._tokenizer.decode(reply))
            return reply, reward
        fields = {**reward.fields, "first": (self._first or reward).score}
        if self._number == 2:
            return None, replace(reward, fields={**fields, "second": reward.score})
        if reward.correct or not reward.graded or self._whole.attempts == 1:
            return None, replace(reward, fields=fields)
        self._first = replace(reward, fields=fields)
        attempt, prompt = "\n".join(self._texts), as_text(self._prompt)
        feedback = self._whole.feedback(self._example, attempt, reward)
        asked = self._anew(self._whole.ask(self._memory, prompt, attempt, feedback))
        self._context = asked or ()
        return asked, self._first

    @property
    def _prompt(self) -> Prompt:
        return self._whole.task.prompt(self._example)

    def _anew(self, prompt: Prompt) -> NewContext | None:
        """A prompt as a new context; None, the end, where the policy has written what are no words."""
        try:
            return NewContext(self._tokenizer.prompt(prompt))
        except UserError:
            return None
