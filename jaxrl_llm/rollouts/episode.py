"""A response while an engine makes it, in one turn or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.rollouts.sampler import Rollout, Sampling


@dataclass
class Episode:
    """A response while an engine makes it: what is sampled, and between that what is given."""

    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    def sampled(self, tokens: Sequence[int], logps: Sequence[float], stopped: bool) -> None:
        """Adds a turn; `stopped` if it ends with a stop token."""
        self.turns.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.logps += logps
        self.finished = stopped

    def goes_on(self, given: Sequence[int] | None) -> bool:
        """Adds what the environment replies, if that (not None) leaves room for another turn."""
        if given is None or not self.finished:
            return False
        self.finished = False
        room = self.sampling.max_tokens - len(self.tokens) - len(given)
        if room < 1 or len(self.turns) == self.sampling.max_turns:
            return False
        self.tokens += given
        self.logps += [0.0] * len(given)
        return True


def rollout(
    prompts: Sequence[Sequence[int]], made: Sequence[Episode], *, turns: bool, **known: Any
) -> Rollout:
    """The episodes, equally many to each prompt, as a rollout: with `turns`, or plain responses."""
    n = len(made) // len(prompts)
    return Rollout(
        prompts=[prompt for prompt in prompts for _ in range(n)],
        responses=[one.tokens for one in made],
        logps=[one.logps for one in made],
        finished=[one.finished for one in made],
        turns=[one.turns for one in made] if turns else (),
        **known,
    )
