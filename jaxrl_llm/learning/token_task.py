"""A task as a sampler sees it: prompts and responses are token ids."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_llm import hosts
from jaxrl_llm.learning import shares
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.tasks.task import Reward, Task, score_responses


class Answers(NamedTuple):
    """Responses as text, each with the example that it answers and what it earned."""

    examples: Sequence[Any]
    texts: Sequence[str]
    rewards: Sequence[Reward]

    @property
    def checked(self) -> list[Reward]:
        """What the responses earned whose reward is known."""
        return [reward for reward in self.rewards if reward.checked]


def remark(reward: Reward) -> str:
    """A reward in words."""
    known = f"reward {reward.score:g}, {'correct' if reward.correct else 'wrong'}"
    return known if reward.checked else "unchecked"


@dataclass(frozen=True)
class TokenTask:
    """A task in the tokens of a tokenizer; a reward that takes `seconds` is given up."""

    task: Task[Any]
    tokenizer: Tokenizer
    threads: int = 1
    seconds: float = 300.0

    def prompts(self, examples: Sequence[Any]) -> list[list[int]]:
        """The prompt of each example."""
        return [self.tokenizer.encode(self.task.prompt(example)) for example in examples]

    def answers(self, examples: Sequence[Any], rollout: Rollout) -> Answers:
        """Text and reward of each response; each example has as many, side by side.

        Every process judges its own share.
        """
        n = len(rollout.responses) // len(examples)
        repeated = [example for example in examples for _ in range(n)]
        texts = [self.tokenizer.decode(response) for response in rollout.responses]
        here = shares.mine(rollout.prompts)
        scored = score_responses(
            self.task,
            [repeated[i] for i in here],
            [texts[i] for i in here],
            threads=self.threads,
            seconds=self.seconds,
        )
        if hosts.count() == 1:
            return Answers(repeated, texts, scored.rewards)
        said = json.dumps([dataclasses.astuple(reward) for reward in scored.rewards])
        parts = [json.loads(part) for part in hosts.exchange(said.encode())]
        rewards = [Reward(*one) for one in shares.merged(rollout.prompts, parts)]
        return Answers(repeated, texts, rewards)
