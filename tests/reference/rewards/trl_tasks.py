"""In the form that TRL's documentation gives for data of several tasks: None where one is not meant."""

import asyncio


def math_reward(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, kind in zip(prompts, completions, task, strict=True):
        if kind != "math":
            rewards.append(None)
        else:
            rewards.append(1.0 if prompt.partition(" ")[0] in completion else -1.0)
    return rewards


async def code_reward(prompts, completions, task, **kwargs):
    await asyncio.sleep(0)
    return [
        0.5 * completion.count("def ") if kind == "code" else None
        for completion, kind in zip(completions, task, strict=True)
    ]
