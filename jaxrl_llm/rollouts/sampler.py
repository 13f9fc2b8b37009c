"""The interface of engines: a sampler takes token ids and returns trajectories."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from jaxrl_llm.errors import UserError

if TYPE_CHECKING:
    from jaxrl_llm.rollouts.trajectory import Trajectory

Said: TypeAlias = tuple[Sequence[int], bool] | None
Reply: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], Future[Said]]


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 truncate nothing. A turn ends with the first
    token in `stop`, which belongs to it. A response, which is one turn or an episode of up to
    `max_turns`, ends after `max_tokens` at the latest. `seed` changes every draw.

    >>> jl.Sampling(temperature=0.7, top_p=0.95, max_tokens=64).stop
    ()
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    max_turns: int = 16
    stop: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self):
        for name, fine in (
            ("temperature", self.temperature >= 0),
            ("top_p", 1e-6 <= self.top_p <= 1),
            ("top_k", self.top_k >= 0),
            ("max_tokens", self.max_tokens >= 1),
            ("max_turns", self.max_turns >= 1),
            ("seed", 0 <= self.seed < 2**32),
        ):
            if not fine:
                raise UserError(f"sampling: {name} = {getattr(self, name)} is out of range")


class Sampler(Protocol):
    """Answers prompts with the newest weights that it was given.

    `Trajectory.logps` are log softmax(logits / temperature) of the sampled tokens (of the logits at
    temperature 0), before top-k and top-p: as a trainer computes them. `finished` is False where a
    response was cut. With `reply` a response is an episode: `reply(index, tokens, logps)` is
    called with each turn, also with one that was cut, and its result is what the environment says
    next, and whether that takes the place of all before it; None at the end. Nothing else waits for
    it. `counters` are figures of the last `generate`, `sync` of the last `push` (empty where nothing
    is sent). `tolerance` is how far, on average, log-probs may be from the trainer's (None: they come
    from the same devices).
    """

    counters: dict[str, Any]
    sync: dict[str, float]

    @property
    def tolerance(self) -> float | None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> "list[Trajectory]":
        """`n` responses to each prompt, side by side; a prompt given twice gets twice as many."""
        ...

    def push(self, params: Any, version: int) -> None:
        """Every later response comes from these weights; `version` marks it."""
        ...

    def release(self) -> None:
        """Frees the trainer's memory that weights take; push before the next `generate`."""
        ...
