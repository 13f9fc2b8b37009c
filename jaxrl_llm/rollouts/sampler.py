"""The interface of engines: a sampler takes token ids and returns trajectories, by way of drafts."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.trajectory import Span, Trajectory

Said: TypeAlias = tuple[Sequence[int], bool] | None
Reply: TypeAlias = Callable[[int, Sequence[int] | None, Sequence[float]], Future[Said]]


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


class Sampler:
    """Answers prompts with the newest weights that it was given; the base of engines.

    `Trajectory.logps` are log softmax(logits / temperature) of the sampled tokens (of the logits at
    temperature 0), before top-k and top-p: as a trainer computes them. `finished` is False where a
    response was cut. With `reply` a response is an episode: `reply(index, tokens, logps)` is
    called with each turn, also with one that was cut, and its result is what the environment says
    next, and whether that takes the place of all before it; None at the end. Before the first turn of an
    episode whose prompt is hidden it is called with None, for what the policy sees first. Nothing
    else waits for it. `counters` are figures of the last responses, `sync` of the last `push` (empty where nothing
    is sent). `tolerance` is how far, on average, log-probs may be from the trainer's (None: they come
    from the same devices). `prompt_length` is what a plan of memory takes for the longest (0: any).
    """

    tolerance: float | None = None
    prompt_length = 0

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        self.sync: dict[str, float] = {}

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Future[Trajectory]]:
        """Asks for `n` responses to each prompt; a prompt given twice gets twice as many.

        An engine with weights of its own answers meanwhile, in the order in which it was asked.
        """
        raise NotImplementedError

    def wait(self, responses: Sequence[Future[Trajectory]]) -> list[Trajectory]:
        """The responses, once all are there."""
        return [response.result() for response in responses]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Trajectory]:
        """`n` responses to each prompt, as one asks for them by `submit`."""
        return self.wait(self.submit(prompts, n=n, sampling=sampling, reply=reply))

    def push(self, params: Any, version: int) -> None:
        """From now on tokens come from these weights, also those of responses under way."""
        raise NotImplementedError

    def release(self) -> None:
        """Frees the trainer's memory that weights take, if they take any; push before the next `submit`."""


class Request(NamedTuple):
    """One requested response: its `number` among those to the prompt, its `index` in the result.

    A segment of an episode begins `used` tokens later than the episode: so many fewer may come.
    """

    prompt: tuple[int, ...]
    number: int
    index: int
    used: int = 0


def enumerate_requests(prompts: Sequence[Sequence[int]], n: int) -> list[Request]:
    """The requests in the order of the result; a repeated prompt continues its numbers."""
    if n < 1 or not prompts or not all(map(len, prompts)):
        raise UserError("sampling wants at least one prompt, none of them empty, and n >= 1")
    numbers, requests = Counter[tuple[int, ...]](), list[Request]()
    for index in range(n * len(prompts)):
        prompt = tuple(map(int, prompts[index // n]))
        requests.append(Request(prompt, numbers[prompt], index))
        numbers[prompt] += 1
    return requests


@dataclass
class Draft:
    """A response to `prompt` while an engine makes it: what is sampled, and what is given.

    `restarts` are the spans of what was given in place of all before it. These do not count in
    `max_tokens`, but no context gets longer than the prompt and that. `versions` are the weights
    of each part that was sampled, `experts` as in `Trajectory`.
    """

    sampling: Sampling
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)
    restarts: list[Span] = field(default_factory=list)
    finished: bool = False
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    in_turn: bool = False  # the last turn is not over

    def add(
        self,
        tokens: Sequence[int],
        logps: Sequence[float],
        stopped: bool,
        version: int = 0,
        *,
        whole: bool = True,
    ) -> None:
        """Adds a turn, `stopped` if it ends with a stop token, or a part of one that goes on."""
        start = self.turns.pop()[0] if self.in_turn else len(self.tokens)
        self.turns.append((start, len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.logps += logps
        self.finished, self.in_turn = stopped, not whole
        if tokens:  # what was interrupted before its first token is the next weights'
            self.versions.append(version)

    def send(self, experts: np.ndarray) -> None:
        """Notes the experts of all that was read of the newest context."""
        hidden = bool(self.restarts) and self.restarts[0][0] == 0  # nothing was read of the prompt
        self.experts[len(self.restarts) - hidden :] = [experts]

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        most, size = self.sampling.max_tokens, len(self.tokens)
        left = most + sum(end - start for start, end in self.restarts) - size
        longest = len(self.prompt) + most
        return min([left, *(longest + start - size for start, _ in self.restarts[-1:])])

    def goes_on(self, reply: Said) -> bool:
        """Adds what the environment replies, if that (not None) leaves room for another turn.

        Before the first turn this is what the policy sees first; without it a token ends the episode.
        UserError if that leaves no room.
        """
        begins = not self.turns
        if begins and reply is None:
            self.sampling = replace(self.sampling, max_tokens=1)
            return True
        if reply is None or not (self.finished or begins):
            return False
        self.finished = False
        (tokens, anew), size = reply, len(self.tokens)
        anew = anew or begins
        spans = [*self.restarts, (size, size + len(tokens))] if anew else self.restarts
        longer = replace(self, tokens=[*self.tokens, *tokens], restarts=spans)
        if begins and longer.room < 1:
            raise UserError(
                f"an episode begins with {len(tokens)} tokens, which leaves no room for a turn in "
                f"{longer.room + len(tokens)}: raise response_length"
            )
        if longer.room < 1 or len(self.turns) == self.sampling.max_turns:
            return False
        self.tokens, self.restarts = longer.tokens, spans
        self.logps += [0.0] * len(tokens)
        return True

    def done(self, *, episode: bool) -> Trajectory:
        """The response; of an `episode` with its turns."""
        turns, restarts = (tuple(self.turns), tuple(self.restarts)) if episode else ((), ())
        versions = min(self.versions), max(self.versions)
        return Trajectory(
            self.prompt,
            self.tokens,
            self.logps,
            self.finished,
            turns,
            restarts,
            versions,
            experts=tuple(self.experts),
        )
