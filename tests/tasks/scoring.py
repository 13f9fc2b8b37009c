"""Rewards of one response to each example."""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.task import RewardSettings, Task, score_groups


def score_responses(
    task: Task[Any],
    examples: Sequence[Any],
    responses: Sequence[str],
    settings: RewardSettings | None = None,
) -> list[Reward]:
    """As `score_groups` of groups of one."""
    groups = score_groups(task, examples, [[response] for response in responses], settings)
    return [reward for [reward] in groups]
