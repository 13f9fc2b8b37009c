"""The shares of the processes in a batch of prompts, without processes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm import distributed
from jaxrl_llm.learning.groups import TokenTask, from_note, noted, pack, together, trajectories
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.training.leaving import Stop
from tests import tiny

PROMPTS = [[1, 2], [3], [1, 2], [4], [5], [3]]


ROWS = range(2 * len(PROMPTS))
EPISODES = {
    "turns": [((0, 1),) for _ in ROWS],
    "restarts": [((0, 0),) * (i % 2) for i in ROWS],
    "turn_rewards": [(0.1 * i,) for i in ROWS],
    "reward": [Reward(0.5 * i, True, {"a": i}) for i in ROWS],
}


def of_all(episodes):
    """Two responses to each prompt."""
    made = tiny.trajectories(
        [p for p in PROMPTS for _ in range(2)], [[i] * (1 + i % 3) for i in ROWS],
        [[-0.5 * i] * (1 + i % 3) for i in ROWS], [i % 2 > 0 for i in ROWS],
        versions=[(3, 3 + i // 4) for i in ROWS], **episodes,
    )  # fmt: skip
    return tiny.groups(made, examples=PROMPTS)


@pytest.mark.parametrize("episodes", [{}, EPISODES], ids=["one turn", "episodes"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_the_shares_of_all_are_the_whole(monkeypatch, count, episodes):
    """Every prompt belongs to one process, equal ones to the same; what is gathered is in the order of prompts."""
    job, payloads, owners = distributed._Job(count=count), [], {}
    words = SimpleNamespace(prompt=list, encode=list)  # a task and its tokenizer
    monkeypatch.setattr(distributed, "_JOB", job)
    monkeypatch.setattr(distributed, "check", lambda stop: None)
    whole, places = of_all(episodes), range(len(PROMPTS))
    pending = TokenTask(words, words).pending(PROMPTS, places, [0] * len(PROMPTS))
    for job.index in range(count):
        share = [group for one, group in zip(pending, whole, strict=True) if one.is_mine]
        for one in trajectories(share):
            assert owners.setdefault(tuple(one.prompt), job.index) == job.index
        payloads.append(pack(share))
    monkeypatch.setattr(distributed, "gather", lambda payload: payloads)
    assert len(owners) == 4
    found = together(pending, lambda: whole, Stop())
    assert found == whole
    assert [group.example for group in found] == PROMPTS


@pytest.mark.parametrize("episodes", [{}, EPISODES], ids=["one turn", "episodes"])
def test_what_a_note_keeps_of_responses_comes_back(episodes):
    """Through JSON; log-probs in float32, as they are learned from."""
    whole = of_all(episodes)
    rewards = [Reward(0.5 * i, i % 2 > 0, {"a": 1.0}, i > 3) for i in ROWS]
    for groups in (whole, tiny.groups(trajectories(whole), rewards)):
        assert from_note(json.loads(json.dumps(noted(groups)))) == groups


def test_a_note_takes_a_few_bytes_a_token():
    """Digits of numbers would take thirty: a checkpoint has millions of tokens that were sampled ahead."""
    rng, size = np.random.default_rng(0), 1000
    tokens, logps = rng.integers(0, 150_000, size), rng.normal(size=size).astype(np.float32)
    made = tiny.trajectories([[1]], [tokens.tolist()], [logps.tolist()])
    assert len(json.dumps(noted(tiny.groups(made, n=1)))) < 13 * size
