"""Policy-gradient reinforcement learning for language models in JAX.

`import jaxrl_llm as jl` gives the names below, each imported when it is first used. A run is a
`Config`, and `train` runs it; `load`, `token_logps` and `generate` use a model outside a run.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm import objectives as objectives
    from jaxrl_llm.config import Config as Config
    from jaxrl_llm.config import Evaluation as Evaluation
    from jaxrl_llm.config import Mesh as Mesh
    from jaxrl_llm.config import Pretrained as Pretrained
    from jaxrl_llm.config import Scratch as Scratch
    from jaxrl_llm.config import WarmStart as WarmStart
    from jaxrl_llm.errors import UserError as UserError
    from jaxrl_llm.learning import optimizers as optimizers
    from jaxrl_llm.learning.batch import Collator as Collator
    from jaxrl_llm.model import Model as Model
    from jaxrl_llm.model import Response as Response
    from jaxrl_llm.model import generate as generate
    from jaxrl_llm.model import load as load
    from jaxrl_llm.model import token_logps as token_logps
    from jaxrl_llm.models import attention as attention
    from jaxrl_llm.models.qwen2 import Compute as Compute
    from jaxrl_llm.models.qwen2 import Delta as Delta
    from jaxrl_llm.models.qwen2 import LayerKind as LayerKind
    from jaxrl_llm.models.qwen2 import Lora as Lora
    from jaxrl_llm.models.qwen2 import MoE as MoE
    from jaxrl_llm.models.qwen2 import Shape as Shape
    from jaxrl_llm.objectives import Objective as Objective
    from jaxrl_llm.objectives import recipes as recipes
    from jaxrl_llm.reward import Reward as Reward
    from jaxrl_llm.rollouts.engines import Native as Native
    from jaxrl_llm.rollouts.engines import Vllm as Vllm
    from jaxrl_llm.rollouts.sampler import Sampling as Sampling
    from jaxrl_llm.start import grpo as grpo
    from jaxrl_llm.tasks import builders as builders
    from jaxrl_llm.tasks.mixture import Mixture as Mixture
    from jaxrl_llm.training.run import Session as Session
    from jaxrl_llm.training.run import train as train

__version__ = "0.1.0"

_MODULES = {  # public names that are modules
    "attention": "jaxrl_llm.models.attention",
    "builders": "jaxrl_llm.tasks.builders",
    "objectives": "jaxrl_llm.objectives",
    "optimizers": "jaxrl_llm.learning.optimizers",
    "recipes": "jaxrl_llm.objectives.recipes",
}
_HOMES = {  # module: the public names it defines
    "jaxrl_llm.config": ("Config", "Evaluation", "Mesh", "Pretrained", "Scratch", "WarmStart"),
    "jaxrl_llm.errors": ("UserError",),
    "jaxrl_llm.learning.batch": ("Collator",),
    "jaxrl_llm.model": ("Model", "Response", "generate", "load", "token_logps"),
    "jaxrl_llm.models.qwen2": ("Compute", "Delta", "LayerKind", "Lora", "MoE", "Shape"),
    "jaxrl_llm.objectives": ("Objective",),
    "jaxrl_llm.rollouts.engines": ("Native", "Vllm"),
    "jaxrl_llm.rollouts.sampler": ("Sampling",),
    "jaxrl_llm.reward": ("Reward",),
    "jaxrl_llm.start": ("grpo",),
    "jaxrl_llm.tasks.mixture": ("Mixture",),
    "jaxrl_llm.training.run": ("Session", "train"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_MODULES, *_HOME])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
