"""A response as it is learned from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from jaxrl_llm.reward import Reward

Span = tuple[int, int]


@dataclass(frozen=True)
class Trajectory:
    """One response: the tokens that were sampled, and those that an environment gave between them.

    `logps` are 0 where tokens were given. `finished` is False where it was cut at a limit. `turns`
    are the spans of an episode that were sampled; without any it is one turn, all of it. `restarts`
    are given spans that began a new context: a prompt in place of all before it, at 0 of the
    episode's own. `versions` are the steps of the oldest and of the newest weights that sampled it,
    `reward` None until it is graded, `turn_rewards` what the environment gave for each turn. `experts`
    are, for each of the `segments`, those that a mixture sent its tokens to, -1 where that is not known;
    () where the sampler does not say.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logps: Sequence[float]
    finished: bool = True
    turns: Sequence[Span] = ()
    restarts: Sequence[Span] = ()
    versions: tuple[int, int] = (0, 0)
    reward: Reward | None = None
    turn_rewards: Sequence[float] = ()
    experts: Sequence[Int[np.ndarray, "_ N K"]] = field(default=(), compare=False)

    @property
    def sampled(self) -> list[int]:
        """The places of its sampled tokens."""
        return [
            t for start, end in self.turns or [(0, len(self.tokens))] for t in range(start, end)
        ]

    @property
    def length(self) -> int:
        """How many tokens were sampled."""
        return sum(end - start for start, end in self.turns or [(0, len(self.tokens))])

    @property
    def size(self) -> int:
        """The tokens that it needs room for behind a prompt: of its longest context, or all that were sampled."""
        longest = max(len(prompt) + end - start for prompt, start, end in self.segments)
        return max(longest - len(self.prompt), self.length)

    @property
    def segments(self) -> list[tuple[Sequence[int], int, int]]:
        """The prompt of each context, and where in the response what follows it starts and ends."""
        hidden = bool(self.restarts) and self.restarts[0][0] == 0  # nothing follows the prompt
        prompts = [self.prompt, *(self.tokens[start:end] for start, end in self.restarts)]
        starts = [0, *(end for _, end in self.restarts)]
        ends = [*(start for start, _ in self.restarts), len(self.tokens)]
        return list(zip(prompts, starts, ends, strict=True))[hidden:]
