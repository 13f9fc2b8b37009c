"""The boundary to whatever generates: a sampler takes token ids and returns a `Rollout`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_llm.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 truncate nothing. A response ends with the first
    token in `stop`, which belongs to it, or is cut after `max_tokens`. `seed` changes every draw.

    >>> jl.Sampling(temperature=0.7, top_p=0.95, max_tokens=64).stop
    ()
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name, fine in (
            ("temperature", self.temperature >= 0),
            ("top_p", 1e-6 <= self.top_p <= 1),
            ("top_k", self.top_k >= 0),
            ("max_tokens", self.max_tokens >= 1),
            ("seed", 0 <= self.seed < 2**32),
        ):
            if not fine:
                raise UserError(f"sampling: {name} = {getattr(self, name)} is out of range")


@dataclass(frozen=True)
class Rollout:
    """What a sampler returns, on the host: B prompts with one response each, groups side by side.

    `tolerance` is how far its log-probs may be from the trainer's, on the mean, if it computes elsewhere.
    """

    prompts: Sequence[Sequence[int]]
    responses: Sequence[Sequence[int]]
    logps: Sequence[Sequence[float]]
    finished: Sequence[bool] = ()
    version: int = 0
    tolerance: float | None = None


class Sampler(Protocol):
    """Anything that answers prompts with the newest weights it was given.

    `Rollout.logps` are log softmax(logits / temperature) of the sampled tokens (of the logits themselves
    at temperature 0), before top-k and top-p: what a trainer computes for the same tokens. `finished`
    tells a response that stopped from one that was cut. `counters` are figures of the last `generate`,
    `sync` of the last `push` (empty where nothing travels).
    """

    counters: dict[str, Any]
    sync: dict[str, float]

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling) -> Rollout:
        """`n` responses to each prompt, side by side; a prompt given twice gets twice as many."""
        ...

    def push(self, params: Any, version: int) -> None:
        """Every later response comes from these weights."""
        ...

    def release(self) -> None:
        """Gives back the memory that weights take on the trainer's devices; `generate` wants a push before."""
        ...
