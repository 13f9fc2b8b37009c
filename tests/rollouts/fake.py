"""A sampler without a model, for tests of what surrounds it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.models.policy import Served, ServedAdapter
from jaxrl_llm.rollouts.sampler import Reply, Sampler, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory


@dataclass
class Scripted(Sampler):
    """Answers with `reply(prompt, number)`, each token with log-prob -1; remembers what was pushed."""

    reply: Callable[[Sequence[int], int], Sequence[int]]
    version: int = 0
    params: Any = None

    def __post_init__(self):
        super().__init__()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Future[Trajectory]]:
        assert reply is None
        made = []
        for prompt in prompts:
            for number in range(n):
                tokens = list(self.reply(prompt, number))[: sampling.max_tokens]
                logps, finished = [-1.0] * len(tokens), tokens[-1] in sampling.stop
                versions = self.version, self.version
                response = Trajectory(prompt, tokens, logps, finished, versions=versions)
                made.append(Future())
                made[-1].set_result(response)
        return made

    def push(self, params: Any, version: int) -> None:
        self.params, self.version = params, version

    def release(self) -> None:
        self.params = None


class OfTests(Served):
    """A model for servers that has what a test gives it."""

    adapter: Any = None

    def __init__(self, **given: Any):
        vars(self).update(given)


class AdapterOfTests(ServedAdapter):
    """Adapters for servers that have what a test gives them."""

    rank: Any = 0

    def __init__(self, **given: Any):
        vars(self).update(given)
