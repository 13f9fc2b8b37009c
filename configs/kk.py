"""Knights and Knaves with Qwen2.5-3B-Instruct: the setting of arXiv:2505.12929 and its 2 x 4 grid of variants.

    jaxrl-llm train configs/kk.py
    jaxrl-llm train configs/kk.py --algo reinforce_plus_plus --alpha 0 --eta 0 --out runs/plain
    jaxrl-llm train configs/kk.py --model Qwen/Qwen2.5-7B-Instruct-1M --out runs/kk-7b
    jaxrl-llm train configs/kk.py --lora 16 --learning-rate 1e-5 --out runs/kk-lora   # fits 24 GB
    jaxrl-llm eval runs/kk --last 3

64 prompts x 8 responses a step in 2 mini-batches, temperature 0.7, up to 400 + 4096 tokens; AdamW at 1e-6; five
epochs. The paper reports, on 8 GPUs, 0.39 for GRPO and 0.57 for GRPO with both methods (3B), each the mean of
the last three checkpoints, one every 20 steps. How many responses are sampled and learned from at a time follows
from the memory of the devices: by its plans (`jaxrl-llm plan`: compiled, not run) it fits one H100 or eight and
v5e-16; docs/planning.md has what is chosen there.

The puzzles here are our own (the published ones: `knights_knaves.read_published`). Of 5,000 to train on 500 are
set aside for validation.
"""

from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Evaluation, Mesh, Pretrained
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2
from jaxrl_llm.objectives import Objective, advantages, factors, kl, losses, partition
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import builders
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves.generate import Recipe

PUZZLES = Recipe(people=(3, 4, 5, 6, 7), depth=2, train=5_000, test=500)


def task(data: Path):
    """The puzzles in English, under the paper's prompt."""
    return knights_knaves.english(*builders.knights_knaves(PUZZLES, data))


def config(
    algo: Literal["grpo", "reinforce_plus_plus"] = "grpo",
    *,
    alpha: float = 0.3,
    eta: float = 0.5,
    model: str = "Qwen/Qwen2.5-3B-Instruct",
    learning_rate: float = 1e-6,
    steps: int = 350,
    tensor: int = 1,
    lora: int = 0,
    slots: int = 0,
    microbatches: int = 0,
    seed: int = 0,
) -> Config:
    """The paper's run on an accelerator.

    Args:
        algo: how rewards become advantages.
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        model: a Qwen2.5 folder or hub name.
        learning_rate: of AdamW.
        steps: batches of 64 x 8 responses.
        tensor: devices that share a layer; the others share the parameters (fsdp).
        lora: rank of adapters, which are then trained in place of the weights; 0 for none.
        slots: responses that are sampled at a time; 0 for as many as fit into the devices' memory.
        microbatches: pieces of a mini-batch, one after the other; fewer send less and take more memory, 0 for
            as few as fit.
        seed: of the order of the data and of sampling.
    """
    advantage = {
        "grpo": advantages.grpo,
        "reinforce_plus_plus": partial(advantages.reinforce_plus_plus, kl_coef=1e-3, gamma=1.0),
    }
    return Config(
        task=task,
        model=Pretrained(model, lora=qwen2.Lora(rank=lora, alpha=2.0 * lora) if lora else None),
        objective=Objective(
            advantage=advantage[algo],
            factors=(partial(factors.linear_in_probability, alpha=alpha),) if alpha else (),
            surrogate=partial(losses.clipped, low=0.2, high=0.24, dual=10.0),
            penalties=((1e-3, kl.k3),) if algo == "grpo" else (),
            partition=partial(partition.lopti, eta=eta) if eta else partition.together,
        ),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(400, 4096, minibatches=2, microbatches=microbatches, pack=True),
        steps=steps,
        prompts=64,
        group_size=8,
        sampling=Sampling(temperature=0.7),
        engine=Native(slots=slots),
        evaluation=Evaluation(every=20, validation=500, by="people"),
        compute=qwen2.Compute(dtype=jnp.bfloat16, remat=jax.checkpoint),
        mesh=Mesh(tensor=tensor),
        long_prompts="skip",
        keep_checkpoints=3,
        seed=seed,
    )
