"""In the form that TRL's documentation gives for prompts that are messages."""

import re


def format_reward(completions, **kwargs):
    """Whether thoughts and an answer stand between their tags."""
    contents = [completion[0]["content"] for completion in completions]
    tagged = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL)
    return [1.0 if tagged.match(content) else 0.0 for content in contents]
