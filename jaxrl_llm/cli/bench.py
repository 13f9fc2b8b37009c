"""`jaxrl-llm bench`: times the parts of a step on this machine; each function is a command with its flags."""

from jaxrl_llm.cli import parse
from jaxrl_llm.errors import UserError
from jaxrl_llm.research.accelerator import accelerator
from jaxrl_llm.research.bench import compilation, rollout, update

COMMANDS = {
    "update": update,
    "rollout": rollout,
    "compile": compilation,
    "accelerator": accelerator,
}


def run(words: list[str]) -> None:
    """`bench NAME` and its flags."""
    name = words[0] if words else ""
    if name in COMMANDS:
        parse.call(COMMANDS[name], words[1:], f"bench {name}")
    elif {*words} & {"-h", "--help"}:
        for known, command in COMMANDS.items():
            print(f"  {known:12} {(command.__doc__ or '').splitlines()[0]}")
    else:
        raise UserError(f"bench wants the name of one: {', '.join(COMMANDS)}")
