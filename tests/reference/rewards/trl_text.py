"""In the form that TRL's documentation gives for prompts that are texts."""

import re


def length(completions, **kwargs):
    """Longer is better, in characters."""
    return [len(completion) / 100 for completion in completions]


def matches(completions, ground_truth, **kwargs):
    """Whether the first box holds what a column says."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    inside = [one.group(1) if one else "" for one in found]
    return [float(one == truth) for one, truth in zip(inside, ground_truth, strict=True)]
