"""A response: as it is learned from, and while an engine makes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.sampler import Said, Sampling

Span = tuple[int, int]


@dataclass(frozen=True)
class Trajectory:
    """One response: the tokens that were sampled, and those that an environment gave between them.

    `logps` are 0 where tokens were given. `finished` is False where it was cut at a limit. `turns`
    are the spans of an episode that were sampled; without any it is one turn, all of it. `restarts`
    are given spans that began a new context: a prompt in place of all before it. `version` is the
    step of the weights that sampled it, `reward` None until it is graded.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Sequence[float]
    finished: bool = True
    turns: Sequence[Span] = ()
    restarts: Sequence[Span] = ()
    version: int = 0
    reward: Reward | None = None

    @property
    def sampled(self) -> list[int]:
        """Where its sampled tokens are."""
        return [
            t for start, end in self.turns or [(0, len(self.tokens))] for t in range(start, end)
        ]

    @property
    def length(self) -> int:
        """How many tokens were sampled."""
        return sum(end - start for start, end in self.turns or [(0, len(self.tokens))])

    @property
    def segments(self) -> list[tuple[Sequence[int], int, int]]:
        """The prompt of each context, and where in the response what follows it starts and ends."""
        prompts = [self.prompt, *(self.tokens[start:end] for start, end in self.restarts)]
        starts = [0, *(end for _, end in self.restarts)]
        ends = [*(start for start, _ in self.restarts), len(self.tokens)]
        return list(zip(prompts, starts, ends, strict=True))


@dataclass
class Draft:
    """A response to `prompt` while an engine makes it: what is sampled, and what is given.

    `restarts` are the spans of what was given in place of all before it. These do not count in
    `max_tokens`, but no context gets longer than the prompt and that.
    """

    sampling: Sampling
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[Span] = field(default_factory=list)
    restarts: list[Span] = field(default_factory=list)
    finished: bool = False

    def add(self, tokens: Sequence[int], logps: Sequence[float], stopped: bool) -> None:
        """Adds a turn; `stopped` if it ends with a stop token."""
        self.turns.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.logps += logps
        self.finished = stopped

    @property
    def room(self) -> int:
        """How many tokens may still come."""
        most, size = self.sampling.max_tokens, len(self.tokens)
        left = most + sum(end - start for start, end in self.restarts) - size
        longest = len(self.prompt) + most
        return min([left, *(longest + start - size for start, _ in self.restarts[-1:])])

    def goes_on(self, said: Said) -> bool:
        """Adds what the environment replies, if that (not None) leaves room for another turn."""
        if said is None or not self.finished:
            return False
        self.finished = False
        (given, anew), size = said, len(self.tokens)
        spans = [*self.restarts, (size, size + len(given))] if anew else self.restarts
        longer = replace(self, tokens=[*self.tokens, *given], restarts=spans)
        if longer.room < 1 or len(self.turns) == self.sampling.max_turns:
            return False
        self.tokens, self.restarts = longer.tokens, spans
        self.logps += [0.0] * len(given)
        return True

    def done(self, version: int, *, episode: bool) -> Trajectory:
        """The response; of an `episode` with its turns."""
        turns, restarts = (tuple(self.turns), tuple(self.restarts)) if episode else ((), ())
        return Trajectory(
            self.prompt, self.tokens, self.logps, self.finished, turns, restarts, version
        )
