"""`jaxrl-llm data`: build the data sets of a config and show examples and lengths."""

from dataclasses import dataclass

import numpy as np

from jaxrl_llm.cli import parse
from jaxrl_llm.config import Config
from jaxrl_llm.learning import imitate
from jaxrl_llm.tasks.task import Demonstrator, as_text
from jaxrl_llm.training import terminal
from jaxrl_llm.training.components import DATA, Components, askable, readable


@dataclass(frozen=True)
class Options:
    """How many examples to show, and the folder of data sets."""

    show: int = 2
    """how many training examples to print"""
    data_folder: str = DATA
    """where data sets are kept"""


def run(words: list[str]) -> None:
    """Parse the words after `data` and run `main`."""
    options, config, _ = parse.with_config("data", words, Options, main.__doc__)
    main(options, config)


def main(options: Options, config: Config) -> None:
    """Build the data sets of a config unless they exist, and show examples and prompt lengths."""
    console = terminal.plain()
    said = f"data sets, in {options.data_folder}; they are made if they are not there yet"
    with console.status(said):
        components = Components.make(config, options.data_folder)
    train_set = readable(components, components.task.train, "training")
    test_set = askable(components, components.task.test)
    too_long = f", {train_set.skipped} with too long a prompt"
    for name, source, left_out in (("train", train_set, too_long), ("test", test_set, "")):
        console.print(f"{name}: {len(source)} examples{left_out}")
        encode, step = components.tokenizer.prompt, max(1, len(source) // 1000)
        lengths = [
            len(encode(components.task.prompt(source[i]))) for i in range(0, len(source), step)
        ]
        console.print(
            f"  tokens a prompt: {min(lengths)} to {max(lengths)}, median {np.median(lengths):.0f}"
        )
        for i in range(min(options.show, len(source)) if name == "train" else 0):
            console.rule(f"train {i}")
            console.print(as_text(components.task.prompt(source[i])))
            if isinstance(components.task, Demonstrator):
                shown = imitate.demonstration(None, components.task)(source[i])
                console.print(shown, style="dim")
