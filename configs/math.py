"""Math with Qwen2.5-7B: the setting of arXiv:2505.12929 on DSR-Uniform and on ORZ, and its variants.

    jaxrl-llm train configs/math.py --problems dsr_uniform.parquet
    jaxrl-llm train configs/math.py --collection orz --problems orz_math_57k_collected.json --out runs/orz
    jaxrl-llm eval runs/math --suite math500 minerva olympiad amc aime24 --last 3

128 prompts x 8 responses a step in 2 mini-batches, temperature 1, up to 400 + 4096 tokens; AdamW at 1e-6; five
epochs of DSR-Uniform, one of ORZ. The paper reports the mean of the last three checkpoints, one every 20 steps.
`--algo`, `--alpha` and `--eta` are its eight variants. How many responses are sampled and learned from at a time
follows from the memory of the devices: by its plans (`jaxrl-llm plan`: compiled, not run) it fits eight H100,
where a step of responses of full length takes 2 to 3 minutes, and with `--lora 16 --learning-rate 1e-5` one.

500 problems are set aside for validation; those of MATH-500 are not learned from, and are the test at the end.
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
from jaxrl_llm.tasks.math.records import suite, without
from jaxrl_llm.tasks.math.task import MathTask
from jaxrl_llm.tasks.math.worker import AnswerChecker

STEPS = {"dsr_uniform": 371, "orz": 440}  # epochs of what is left of 10,000 and 57,000 problems


def task(data: Path, collection: str, problems: str, test: str) -> MathTask:
    """The problems of a training set, and MATH-500 to test on."""
    held_out = suite("math500").load(test)
    train = without(suite(collection).load(problems), held_out)
    return MathTask(*builders.math_problems(train, held_out, data), AnswerChecker(workers=4))


def config(
    algo: Literal["grpo", "reinforce_plus_plus"] = "grpo",
    *,
    collection: Literal["dsr_uniform", "orz"] = "dsr_uniform",
    problems: str = "",
    test: str = "",
    alpha: float = 0.1,
    eta: float = 0.5,
    model: str = "Qwen/Qwen2.5-7B",
    learning_rate: float = 1e-6,
    steps: int = 0,
    tensor: int = 1,
    lora: int = 0,
    slots: int = 0,
    microbatches: int = 0,
    seed: int = 0,
) -> Config:
    """The paper's run on an accelerator.

    Args:
        algo: how rewards become advantages.
        collection: what is learned from, and for how long.
        problems: a parquet, JSONL or JSON file, or a hub name; needed. Columns: problem, question or prompt, and
            answer, final_answer, ground_truth or target; or verl's prompt and reward_model.
        test: the same for MATH-500 (default: its own hub name).
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        model: a Qwen2.5 folder or hub name.
        learning_rate: of AdamW.
        steps: batches of 128 x 8 responses (default: the paper's epochs).
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
        task=partial(task, collection=collection, problems=problems, test=test),
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
        steps=steps or STEPS[collection],
        prompts=128,
        group_size=8,
        sampling=Sampling(temperature=1.0),
        engine=Native(slots=slots),
        evaluation=Evaluation(every=20, validation=500),
        compute=qwen2.Compute(dtype=jnp.bfloat16, remat=jax.checkpoint),
        mesh=Mesh(tensor=tensor),
        long_prompts="skip",
        reward_threads=8,
        keep_checkpoints=3,
        seed=seed,
    )
