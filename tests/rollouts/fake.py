"""A sampler without a model, for tests of what surrounds it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory


@dataclass
class Scripted:
    """Answers with `reply(prompt, number)`, each token with log-prob -1; remembers what was pushed."""

    reply: Callable[[Sequence[int], int], Sequence[int]]
    version: int = 0
    params: Any = None
    tolerance = None

    def generate(
        self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling
    ) -> list[Trajectory]:
        made = []
        for prompt in prompts:
            for number in range(n):
                tokens = list(self.reply(prompt, number))[: sampling.max_tokens]
                logps, finished = [-1.0] * len(tokens), tokens[-1] in sampling.stop
                made.append(Trajectory(prompt, tokens, logps, finished, version=self.version))
        return made

    def push(self, params: Any, version: int) -> None:
        self.params, self.version = params, version

    def release(self) -> None:
        self.params = None
