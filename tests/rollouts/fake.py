"""A sampler without a model, for tests of what surrounds it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.rollouts.sampler import Rollout, Sampling


@dataclass
class Scripted:
    """Answers with `reply(prompt, number)`, each token with log-prob -1; remembers what was pushed."""

    reply: Callable[[Sequence[int], int], Sequence[int]]
    version: int = 0
    params: Any = None

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling) -> Rollout:
        repeated = [p for p in prompts for _ in range(n)]
        replies = [list(self.reply(p, i % n)) for i, p in enumerate(repeated)]
        responses = [r[: sampling.max_tokens] for r in replies]
        return Rollout(
            prompts=repeated,
            responses=responses,
            logps=[[-1.0] * len(r) for r in responses],
            finished=[r[-1] in sampling.stop for r in responses],
            version=self.version,
        )

    def push(self, params: Any, version: int) -> None:
        self.params, self.version = params, version

    def release(self) -> None:
        self.params = None
