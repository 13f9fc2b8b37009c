"""`jaxrl-llm sample`: generate with a run's policy."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from jaxrl_llm.cli.open_run import open_run
from jaxrl_llm.errors import UserError
from jaxrl_llm.model import require_room
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Prompt, as_text
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA
from jaxrl_llm.training.leaving import Stop


@dataclass(frozen=True)
class Options:
    """The checkpoint, and how it answers."""

    example: int | None = None
    """the number of a test example; its reward is shown too"""
    n: int = 1
    """how many responses to each prompt"""
    temperature: float = 0.0
    """0 is greedy"""
    max_tokens: int | None = None
    """the limit of a response; if not given, the config's, or what the prompt leaves of the context"""
    step: int | None = None
    """which checkpoint; if not given, the best"""
    seed: int = 0
    """changes every draw"""
    data_folder: str = DATA
    """where data sets are kept"""


def main(
    run: str,
    prompt: str | None = None,
    /,
    options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
) -> None:
    """Talk to a run's policy: give a prompt, an --example of its test set, or type prompts.

    It executes the folder's config.py: talk only to runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        prompt: the text to continue, as the task writes prompts; if not given, lines typed.
    """
    example, n = options.example, options.n
    if prompt is not None and example is not None:
        raise UserError("a prompt and --example were given: choose one")
    console = terminal.plain()
    with open_run(run, options.data_folder, options.step) as (components, sampler, _):
        if example is not None and not 0 <= example < len(components.task.test):
            raise UserError(
                f"--example {example}: the test set has {len(components.task.test)} examples"
            )
        chosen = None if example is None else components.task.test[example]
        sampling = components.sampling(temperature=options.temperature, seed=options.seed)
        if options.max_tokens is not None:
            sampling = replace(sampling, max_tokens=options.max_tokens)
        room = components.shape.max_length

        def limited(prompt: Sequence[int]) -> Sampling:
            """The sampling of a response to a prompt, which both have to fit into the model's context."""
            limit = sampling.max_tokens
            if options.max_tokens is None:  # rows to imitate may fill the context alone
                limit = max(1, min(limit, room - len(prompt)))
            require_room("sample", len(prompt), limit, room)
            return replace(sampling, max_tokens=limit)

        def answer(prompt: Prompt) -> None:
            tokens = components.tokenizer.prompt(prompt)
            for one in sampler.generate([tokens], n=n, sampling=limited(tokens)):
                console.print(components.tokenizer.decode(one.tokens))

        if chosen is not None:
            console.print(as_text(components.task.prompt(chosen)), style="dim")
            task = components.token_task(evaluates=True)
            how = limited(*task.prompts([chosen]))
            [group] = task.answer(sampler, [chosen], n=n, sampling=how, stop=Stop())
            for one in group.trajectories:
                console.print(components.tokenizer.decode(one.tokens))
                console.print(str(one.reward))
            return
        if prompt is not None:
            answer(prompt)
            return
        console.print(
            "one prompt a line, as in: " + as_text(components.task.prompt(components.task.test[0])),
            style="dim",
        )
        for line in sys.stdin:
            try:
                answer(line.strip())
            except UserError as error:
                console.print(str(error), style="red")
