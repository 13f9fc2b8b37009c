"""`jaxrl-llm configs`: the configs that come with the package, and have names."""

import ast

from jaxrl_llm import config as configs
from jaxrl_llm import userfile
from jaxrl_llm.cli import parse


def run(words: list[str]) -> None:
    """Parse the words after `configs` and run `listed` or `show`."""
    if words[:1] == ["show"]:
        parse.call(show, words[1:], "configs show")
    else:
        parse.call(listed, words, "configs")


def listed() -> None:
    """List the configs that come with the package; `configs show NAME` prints one, to copy and change."""
    for path in sorted(configs.shipped().glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(f"{path.stem:12} {about.partition(chr(10))[0]}")


def show(name: str, /) -> None:
    """Print a config: jaxrl-llm configs show kk_tiny > mine.py.

    Args:
        name: one that `jaxrl-llm configs` lists.
    """
    print(userfile.read(configs.named(name), "config"), end="")
