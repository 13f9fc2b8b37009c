"""Rewards for what another model makes of a part of a response (RLTR, arXiv:2602.08489)."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

from jaxrl_llm.background import once
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.judges import HERE
from jaxrl_llm.tasks.mixture import check_single
from jaxrl_llm.tasks.task import Demonstrator, Prompt, Task, TeacherPrompter, as_text

KEY = "JAXRL_RECEIVER_KEY"  # the environment variable with the server's key


class Receiver(NamedTuple):
    """A model that goes on with the beginnings of responses.

    `go_on(prompt, begun)` gives the text of each whole response, beginning included; both are token
    ids of its own tokenizer.
    """

    tokenizer: Tokenizer
    go_on: Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[str]]


class Transfer:
    """A task whose score is higher by `weight` where a frozen receiver, going on from a part, is right.

    A response is cut after ⌊τ · its tokens⌋ with τ uniform in (0, 1], drawn by `seed` from the prompt
    and the number of the response, so a resumed run repeats it. A response that stands alone, as in
    validation, has the task's own reward. `receiver()` is called once, for the first group.
    """

    def __init__(
        self, task: Task[Any], receiver: Callable[[], Receiver], weight: float = 1.0, seed: int = 0
    ):
        check_single(task, "transfer")
        self.name, self.train, self.test = task.name, task.train, task.test
        self.task, self.weight, self._seed = task, weight, seed
        self._receiver = once(receiver)  # whatever thread is first
        if isinstance(task, Demonstrator):
            self.demonstration = task.demonstration
        if isinstance(task, TeacherPrompter):
            self.teacher_prompt = task.teacher_prompt

    def prompt(self, example: Any) -> Prompt:
        return self.task.prompt(example)

    def rewards(self, example: Any, responses: Sequence[str]) -> list[Reward]:
        graded = [self.task.reward(example, response) for response in responses]
        if len(graded) == 1:
            return graded
        receiver = self._receiver()
        prompt, begun = self.prompt(example), dict[int, Sequence[int]]()
        tokens = receiver.tokenizer.prompt(prompt)
        opened = receiver.tokenizer.opened(prompt, tokens)
        for i, text in enumerate(responses):
            with suppress(UserError):  # the receiver has no token for it: nothing to go on from
                said = text.removeprefix(opened)
                begun[i] = self.begun(prompt, i, receiver.tokenizer.encode(said))
        whole = receiver.go_on(tokens, [*begun.values()]) if begun else []
        passed = {
            i: self.task.reward(example, opened + x) for i, x in zip(begun, whole, strict=True)
        }
        nothing = Reward(0.0, False)
        return [self._together(one, passed.get(i, nothing)) for i, one in enumerate(graded)]

    def _together(self, reward: Reward, passed: Reward) -> Reward:
        """The reward of a response, and of what the receiver made of its beginning."""
        return replace(
            reward,
            score=reward.score + self.weight * passed.correct,
            fields={**reward.fields, "transfer": float(passed.correct)},
            graded=reward.graded and passed.graded,
        )

    def begun(self, prompt: Prompt, number: int, tokens: Sequence[int]) -> Sequence[int]:
        """The part of a response, of this number, that the receiver is given."""
        drawn = Random(f"{self._seed} {number} {as_text(prompt)}").random()  # noqa: S311
        return tokens[: int((1.0 - drawn) * len(tokens))]


def served(
    url: str, model: str, tokenizer: Tokenizer, *, max_tokens: int, seconds: float = 300.0
) -> Receiver:
    """A model at a server that completes token ids, as vLLM's `/v1/completions`; it decodes greedily."""
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    past_proxies = urlsplit(url).hostname in HERE
    client = httpx.Client(headers=headers, timeout=seconds, trust_env=not past_proxies)

    def go_on(prompt: Sequence[int], begun: Sequence[Sequence[int]]) -> list[str]:
        body = {
            "model": model,
            "prompt": [[*prompt, *part] for part in begun],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        reply = client.post(f"{url.rstrip('/')}/v1/completions", json=body)
        if not reply.is_success:
            raise ConnectionError(f"the receiver at {url} refuses: status {reply.status_code}")
        more = {one["index"]: one["text"] for one in reply.json()["choices"]}
        return [tokenizer.decode(part, False) + more[i] for i, part in enumerate(begun)]

    return Receiver(tokenizer, go_on)
