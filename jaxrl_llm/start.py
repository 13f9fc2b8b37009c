"""The shortest way to a run in Python: the config `grpo`, as a function."""

from collections.abc import Sequence
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError


def grpo(model: str, data: str, reward: str | Sequence[str] = (), **settings: Any) -> Config:
    """A pretrained model, a table of questions and a reward: the config of `jaxrl-llm train grpo`.

    `jaxrl-llm train grpo --help` lists the settings; `dataclasses.replace` changes anything else.

    >>> config = jl.grpo("Qwen/Qwen2.5-0.5B-Instruct", data="openai/gsm8k:main", lora=32, steps=100)
    >>> config.prompts * config.group_size
    256
    """
    path = configs.shipped() / "grpo.py"
    rewards = (reward,) if isinstance(reward, str) else reward
    if not isinstance(rewards, Sequence) or not all(isinstance(one, str) for one in rewards):
        raise UserError(
            f"grpo: a reward is a name, several names, or FILE.py:FUNCTION, not {reward!r:.60}: "
            "a run keeps a copy of the file"
        )
    return configs.build(configs.load(path), path, model, data, tuple(rewards), **settings)
