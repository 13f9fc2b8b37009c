"""A response while an engine makes it, in one turn or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_llm.rollouts.sampler import Rollout, Said, Sampling


@dataclass
class Episode:
    """A response to `prompt` tokens while an engine makes it: what is sampled, and what is given.

    `restarts` are the spans of what was given in place of all before it. These do not count in
    `max_tokens`, but no segment gets longer than `prompt` and that.
    """

    sampling: Sampling
    prompt: int
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    finished: bool = False

    def sampled(self, tokens: Sequence[int], logps: Sequence[float], stopped: bool) -> None:
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
        return min([left, *(self.prompt + most + start - size for start, _ in self.restarts[-1:])])

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
        restarts=[one.restarts for one in made] if turns else (),
        **known,
    )
