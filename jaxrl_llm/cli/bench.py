"""`jaxrl-llm bench`: times the parts of a step on this machine; each function is a command with its flags."""

from jaxrl_llm.research.accelerator import accelerator
from jaxrl_llm.research.bench import compilation, rollout, update

COMMANDS = {
    "update": update,
    "rollout": rollout,
    "compile": compilation,
    "accelerator": accelerator,
}
