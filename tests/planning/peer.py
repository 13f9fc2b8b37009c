"""One optimizer step of this package and of tunix through the same compiler, for TPUs that are not here.

    python -m tests.machines.peer ours --model 0.5B     (in an environment with the extra plan-tpu)
    python -m tests.machines.peer tunix --model 0.5B    (in one of its own: google-tunix, jax[tpu])

GRPO with a reference, AdamW, parameters in float32, arithmetic in bfloat16, fused attention, layers made again in
the backward pass; 16 rows of 1,024 tokens of which 768 are scored. Prints memory a chip in GiB, the time of the
compiler, GB that a chip sends, and the compiler's own cycles.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.machines import hlo, topologies

ROWS, PROMPT, RESPONSE = 16, 256, 768


def ours(model: str, devices: Any) -> Any:
    """The update of `configs/kk.py`, one stage and one micro-batch."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.learning.batch import Collator
    from jaxrl_llm.machines.plan import shape_of
    from jaxrl_llm.machines.programs import Planned
    from jaxrl_llm.models import sharding

    made = configs.load(Path("configs/kk.py"))(model=f"Qwen/Qwen2.5-{model}", eta=0.0, alpha=0.0)
    made = replace(made, prompts=2, collate=Collator(PROMPT, RESPONSE))
    mesh = sharding.make_mesh(1, -1, 1, devices)

    def compiled() -> Any:
        with topologies.compiling_for(mesh):
            return Planned(made, shape_of(made), mesh, 2**40).programs()["update"]()

    return compiled


def tunix(model: str, devices: Any) -> Any:
    """Its train step with its own model and loss."""
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2
    from tunix.rl import algo_core
    from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
    from tunix.sft.peft_trainer import PeftTrainer

    shape = {"0.5B": qwen2.ModelConfig.qwen2p5_0p5b, "3B": qwen2.ModelConfig.qwen2p5_3b}[model]()
    shape.dtype, shape.remat_config = jnp.bfloat16, qwen2.RematConfig.DECODER
    shape.use_flash_attention = True
    mesh = Mesh(np.asarray(devices).reshape(-1, 1), ("fsdp", "tp"))
    algorithm: Any = GRPOConfig(beta=1e-3)
    algorithm.temperature = 1.0  # as its learner sets it
    loss = lambda model, example: algo_core.grpo_loss_fn(model, example, algorithm, 0, 1)
    trainer: Any = SimpleNamespace(
        loss_fn=loss,
        gen_model_input_fn=lambda example: {"example": example},
        _lora_enabled=False,
        _has_aux=True,
    )

    def everything():
        made = qwen2.Qwen2(shape, rngs=nnx.Rngs(0))
        return made, nnx.Optimizer(made, optax.adamw(1e-6), wrt=nnx.Param)

    with mesh:
        graph, state = nnx.split(nnx.eval_shape(everything))
        places = nnx.get_partition_spec(state)
    state = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        places,
    )

    def rows(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("fsdp")))

    example = TrainExample(
        prompt_ids=rows(ROWS, PROMPT, dtype=jnp.int32),
        prompt_mask=rows(ROWS, PROMPT, dtype=jnp.bool_),
        completion_ids=rows(ROWS, RESPONSE, dtype=jnp.int32),
        completion_mask=rows(ROWS, RESPONSE, dtype=jnp.bool_),
        advantages=rows(ROWS),
        ref_per_token_logps=rows(ROWS, RESPONSE),
        old_per_token_logps=rows(ROWS, RESPONSE),
    )

    def step(state: Any, example: Any) -> Any:
        made, optimizer = nnx.merge(graph, state)
        loss, _, norm = PeftTrainer._train_step(trainer, made, optimizer, example)
        return nnx.state((made, optimizer)), loss, norm

    out = (jax.tree.map(lambda x: x.sharding, state), None, None)

    def compiled() -> Any:
        with mesh:
            return (
                jax.jit(step, donate_argnums=0, out_shardings=out).lower(state, example).compile()
            )

    return compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "tunix"))
    parser.add_argument("--model", choices=("0.5B", "3B"), default="0.5B")
    parser.add_argument("--on", default="v5e-16")
    given = parser.parse_args()
    devices = list(topologies.machine(given.on).devices)
    compile_it = {"ours": ours, "tunix": tunix}[given.side](given.model, devices)
    start = time.perf_counter()
    compiled: Any = compile_it()
    took = time.perf_counter() - start
    memory, module = compiled.memory_analysis(), hlo.Module(compiled.as_text())
    print(
        json.dumps(
            {
                "side": given.side,
                "model": given.model,
                "GiB": memory.peak_memory_in_bytes / 2**30,
                "seconds": took,
                "GB sent": sum(c.sent for c in module.collectives()) / 1e9,
                "collectives": sum(c.times for c in module.collectives()),
                "Mcycles": module.cycles() / 1e6,
                "kernels": module.kernels(),
                "unbounded": module.unbounded,
            }
        )
    )


if __name__ == "__main__":
    main()
