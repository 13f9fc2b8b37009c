"""`jaxrl-llm bench NAME`: time a part of a step; the flags are a function's parameters."""

from jaxrl_llm.cli import parse
from jaxrl_llm.errors import UserError
from jaxrl_llm.research.accelerator import accelerator
from jaxrl_llm.research.bench import compilation, growth, rollout, update
from jaxrl_llm.research.versus import against

COMMANDS = {
    "update": update,
    "rollout": rollout,
    "compile": compilation,
    "growth": growth,
    "accelerator": accelerator,
    "against": against,
}


def run(words: list[str]) -> None:
    """Parse the words after `bench`, the name and its flags, and run that benchmark."""
    name = words[0].removeprefix("--") if words else ""  # `bench --against torch` reads well
    if name in COMMANDS:
        parse.call(COMMANDS[name], words[1:], f"bench {name}")
    elif {*words} & {"-h", "--help"}:
        for known, command in COMMANDS.items():
            print(f"  {known:12} {(command.__doc__ or '').splitlines()[0]}")
    else:
        raise UserError(f"bench wants the name of one: {', '.join(COMMANDS)}")
