"""What one optimizer step costs, where the time goes, and what a peer needs for the same step."""

import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from jaxrl_llm.cli.bench.turns import Peer, in_turn, least_one
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, logprobs, qwen2, sharding
from jaxrl_llm.objectives import Objective, advantages, kl, partition
from jaxrl_llm.planning import flops
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.runs import terminal

PEER = pathlib.Path(__file__).with_name("peer_transformers.py")
SMALL = qwen2.Shape(8192, 256, 704, 6, 4, 2, tied=True)
REMAT = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def main(
    model: str | None = None,
    /,
    *,
    rows: int = 8,
    prompt_length: int = 128,
    response_length: int = 384,
    microbatches: int = 4,
    repeats: int = 3,
    devices: int = 1,
    bfloat16: bool = False,
    peer_python: pathlib.Path | None = None,
) -> None:
    """Time the train step: plain GRPO against Lopti, its parts, and PyTorch with transformers.

    Args:
        model: a Qwen2 folder or hub name; without it a small random model (about 6M parameters).
        rows: sequences in the batch.
        prompt_length: tokens of each prompt.
        response_length: tokens of each response.
        microbatches: gradient-accumulation slices.
        repeats: timed steps of each kind, after one that compiles; the median is shown.
        devices: to split the rows over; a CPU is cut into as many virtual ones.
        bfloat16: compute in bfloat16 instead of float32.
        peer_python: an interpreter with torch and transformers, timed in turn with ours (needs a model).
    """
    least_one(rows=rows, prompt_length=prompt_length, response_length=response_length,
              microbatches=microbatches, repeats=repeats, devices=devices)  # fmt: skip
    if rows % microbatches:
        raise UserError(f"{rows} rows do not divide into {microbatches} micro-batches")
    if peer_python and not model:
        raise UserError("the peer needs a model folder: give one before --peer-python")
    console = terminal.plain(soft_wrap=False)
    dtype = jnp.bfloat16 if bfloat16 else jnp.float32
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    if devices > len(jax.devices()):
        raise UserError(f"--devices {devices}: this machine has {len(jax.devices())}")
    mesh = sharding.make_mesh(devices, 1, 1, jax.devices()[:devices])
    with jax.set_mesh(mesh):
        shape, definition, params = policy(model, mesh, dtype)
        size = {
            "tokens": rows * (prompt_length + response_length),
            "scored": rows * response_length,
        }
        work = flops.update(shape, **size, length=prompt_length + response_length)
        rate = flops.matmul_rate(dtype)
        console.print(
            f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f}M parameters, {rows} x "
            f"({prompt_length} + {response_length}) tokens, {jax.devices()[0].device_kind}, "
            f"matmul {rate / 1e9:.0f} GFLOP/s, arithmetic of a step {work / 1e12:.2f} TFLOP"
        )
        rollout = random_rollout(shape.vocab_size, rows, prompt_length, response_length)
        batch = update.place(
            Collator(prompt_length, response_length, microbatches=microbatches, shards=devices)(
                rollout
            ),
            mesh,
        )
        runs = _programs(definition, params, batch, rows)
        del params
        peers = {}
        if peer_python:
            arguments = [str(x) for x in (rows, prompt_length, response_length)]
            peers["transformers"] = Peer(PEER, peer_python, hf.resolve(str(model)), arguments)
        seconds = in_turn(runs | peers, repeats, console)
        for peer in peers.values():
            peer.close()
    _report(console, seconds, work / rate, size["tokens"])


def policy(model, mesh, dtype):
    """Shape, definition and parameters of a model folder, or of a small one."""
    shape = hf.load_shape(hf.resolve(model)) if model else SMALL
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=dtype, remat=REMAT))
    where = sharding.param_shardings(shapes, mesh)
    if model:
        return shape, definition, hf.load(hf.resolve(model), shape, where, jnp.float32)
    return shape, definition, qwen2.init(shape, shardings=where)


def random_rollout(vocab: int, rows: int, prompt: int, response: int) -> Rollout:
    """Responses of random tokens, all of full length."""
    rng = np.random.default_rng(0)
    draw = lambda n: [rng.integers(0, vocab, n).tolist() for _ in range(rows)]
    return Rollout(draw(prompt), draw(response), [[0.0] * response] * rows)


def _programs(definition, params, batch, rows) -> dict[str, Callable[[], Any]]:
    """The timed programs by name; the two kinds of step share and hand on one state."""
    policy = partial(logprobs.of_responses, definition)
    score, optimizer = update.make_score(policy), optimizers.adamw(1e-6)
    reward = jnp.arange(float(rows))[None]
    old = score(params, batch.inputs)
    held = {"state": update.init_state(params, optimizer)}
    where = jax.tree.map(lambda x: x.sharding, held["state"])

    def stepper(split):
        objective = Objective(
            advantage=advantages.grpo,
            penalties=((1e-3, kl.k3),),
            partition=split,
        )
        credited = update.make_credit(objective)(batch, reward, old_logp=old, ref_logp=old)
        step = update.make_train_step(policy, objective, optimizer, shardings=where)

        def run():
            held["state"], metrics = step(held["state"], credited)
            return held["state"], metrics

        return run

    def parts():
        micro = jax.tree.map(lambda x: x[0, 0], batch.inputs)
        model = lambda p: qwen2.nnx.merge(definition, p)
        hidden = jax.random.normal(
            jax.random.key(0), (*micro.index.shape, model(held["state"].params).shape.hidden_size)
        )
        trunk = jax.jit(
            jax.grad(lambda p: model(p)(micro.tokens, micro.positions, micro.segments).sum())
        )
        head = jax.jit(
            jax.grad(
                lambda h, w: logprobs.chunked(h, w, micro.target, micro.scored).logp.sum(),
                argnums=(0, 1),
            )
        )
        adam = jax.jit(lambda s: optimizer.update(s.params, s.opt_state, s.params, step=s.step)[1])
        count = batch.inputs.tokens.shape[1]
        return {
            f"layers (1 of {count} micro-batches)": lambda: trunk(held["state"].params),
            f"log-probs (1 of {count} micro-batches)": lambda: head(
                hidden, model(held["state"].params).head
            ),
            "AdamW": lambda: adam(held["state"]),
        }

    return {
        "plain GRPO": stepper(partition.together),
        "Lopti (2 stages)": stepper(partial(partition.random, share=0.5)),
        "scoring (forward)": lambda: score(held["state"].params, batch.inputs),
        **parts(),
    }


def _report(console, seconds, floor, tokens):
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    table = rich.table.Table("", "seconds", "range", "tokens/s", "x floor", "x plain")
    table.add_row("floor (arithmetic / matmul rate)", f"{floor:.3f}", "", "", "1.00", "")
    for name, value in median.items():
        spread = f"{min(seconds[name]):.3f} - {max(seconds[name]):.3f}"
        whole = name in ("plain GRPO", "Lopti (2 stages)", "transformers")
        table.add_row(
            name,
            f"{value:.3f}",
            spread,
            f"{tokens / value:,.0f}" if whole else "",
            f"{value / floor:.2f}" if whole else "",
            f"{value / median['plain GRPO']:.2f}",
        )
    console.print(table)
