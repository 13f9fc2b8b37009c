"""RLTR (arXiv:2602.08489) on the laptop's puzzles: a thought is worth more if another model can go on from it.

    jaxrl-llm train configs/kk_tiny.py --careless 0 --steps 0 --out runs/receiver
    jaxrl-llm export runs/receiver receiver
    jaxrl-llm train rltr --receiver receiver

Each response is cut at a random place, the frozen receiver goes on from there, and its right answer is worth
`weight` beside the puzzle's own reward. A larger receiver is a vLLM server: `tasks.transfer.served` in place of
`embedded`. The paper publishes neither its weights nor the receiver's settings.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax

import jaxrl_llm as jl
from jaxrl_llm.config import Config, load
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.tasks.transfer import Receiver, Transfer

kk_tiny = load(Path(__file__).parent / "kk_tiny.py")


def embedded(folder: str, max_tokens: int) -> Receiver:
    """A model of this folder, by the embedded engine; it decodes greedily."""
    if jax.process_count() > 1:  # each of which grades groups of its own
        raise UserError("rltr: with several processes the receiver is a server: transfer.served")
    model, greedy = jl.load(folder), jl.Sampling(temperature=0.0, max_tokens=max_tokens)

    def go_on(prompt: Sequence[int], begun: Sequence[Sequence[int]]) -> list[str]:
        made = jl.generate(model, [[*prompt, *part] for part in begun], greedy)
        pairs = zip(begun, made, strict=True)
        return [model.tokenizer.decode([*part, *one.tokens]) for part, one in pairs]

    return Receiver(model.tokenizer, go_on)


def config(
    receiver: str,
    *,
    weight: float = 1.0,
    alpha: float | None = None,
    eta: float | None = None,
    steps: int = 40,
    warm_steps: int = 600,
    model: str = "",
    seed: int = 0,
) -> Config:
    """kk_tiny with GRPO and the reward of transfer.

    Args:
        receiver: folder of the model that goes on, as exported from a run.
        weight: of its right answer; 0 is GRPO, at the same cost.
        alpha: strength of Advantage Reweighting; 0 switches it off. If not given, 0.3.
        eta: probability that separates Lopti's two stages; 0 switches it off. If not given, 0.5.
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        model: folder of a model to begin with instead of a warm start.
        seed: of everything: initial weights, order of the data, sampling, cuts.
    """
    made = kk_tiny(alpha=alpha, eta=eta, steps=steps, warm_steps=warm_steps, model=model, seed=seed)

    def task(folder: Path) -> Transfer:
        found = hf.resolve(receiver)  # now, and not after the warm start
        make = partial(embedded, str(found), made.collate.response_length)
        return Transfer(made.task(folder), make, weight, seed)

    return replace(made, task=task)
