"""`jaxrl-llm data`: what is in the data sets of a config."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rich.console
import rich.markup
import rich.status

from jaxrl_llm.config import Config
from jaxrl_llm.runs import assemble, folder, terminal
from jaxrl_llm.tasks.task import Demonstrator


@dataclass(frozen=True)
class Options:
    """What to show of a config's data."""

    show: int = 2
    """how many training examples to print"""
    data: Path = folder.DATA
    """where data sets are kept"""


def main(options: Options, config: Config) -> None:
    """Builds the data sets of a config unless they are there, and shows what is in them."""
    console = terminal.plain()
    with building(console, options.data):
        parts = assemble.parts(config, options.data)
    train_set = assemble.readable(parts, parts.task.train, config, "training")
    test_set = assemble.askable(parts, parts.task.test, config)
    too_long = f", {train_set.skipped} with too long a prompt"
    for name, source, left_out in (("train", train_set, too_long), ("test", test_set, "")):
        console.print(f"{name}: {len(source)} examples{left_out}")
        encode, step = parts.tokenizer.encode, max(1, len(source) // 1000)
        lengths = [len(encode(parts.task.prompt(source[i]))) for i in range(0, len(source), step)]
        console.print(
            f"  tokens a prompt: {min(lengths)} to {max(lengths)}, median {np.median(lengths):.0f}"
        )
        for i in range(min(options.show, len(source)) if name == "train" else 0):
            console.rule(f"train {i}")
            console.print(parts.task.prompt(source[i]), highlight=False)
            if isinstance(parts.task, Demonstrator):
                console.print(parts.task.demonstration(source[i]), style="dim")


def building(console: rich.console.Console, where: Path) -> rich.status.Status:
    """What is shown while data sets are looked for and made."""
    said = rich.markup.escape(str(where))
    return console.status(f"data sets, in {said}; they are made if they are not there yet")
