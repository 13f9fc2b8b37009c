"""Times an optimizer step, generation and compilation on this machine, against a floor and a peer.

The floor is the unavoidable arithmetic over the measured rate of a large matrix product. Programs
to compare run in turn (A B C A B C ...), so that the load of the machine is the same for all.
"""

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning import update as updates
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, logprobs, qwen2, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import Objective, advantages, kl, partition
from jaxrl_llm.planning import flops
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Rollout, Sampling
from jaxrl_llm.training import terminal

PEER = Path(__file__).with_name("peer.py")
SMALL = qwen2.Shape(8192, 256, 704, 6, 4, 2, tied=True)
REMAT = partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
PLAIN, LOPTI = "plain GRPO", "Lopti (2 stages)"


def update(
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
    peer_python: Path | None = None,
) -> None:
    """Time the train step: plain GRPO against Lopti, its parts, and PyTorch with transformers.

    Args:
        model: a Qwen2 folder or hub name; without it a small random model (about 6M parameters).
        rows: sequences in the batch.
        prompt_length: tokens of each prompt.
        response_length: tokens of each response.
        microbatches: gradient-accumulation slices.
        repeats: timed steps of each kind, after one that compiles; the median is shown.
        devices: how many to split the rows over; a CPU is cut into as many virtual ones.
        bfloat16: compute in bfloat16 instead of float32.
        peer_python: an interpreter with torch and transformers, to time in turn (needs a model).
    """
    at_least_one(rows=rows, prompt_length=prompt_length, response_length=response_length,
                 microbatches=microbatches, repeats=repeats, devices=devices)  # fmt: skip
    if rows % microbatches:
        raise UserError(f"{rows} rows do not divide into {microbatches} micro-batches")
    dtype, console = _dtype(bfloat16), terminal.plain(soft_wrap=False)
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    if devices > len(jax.devices()):
        raise UserError(f"--devices {devices}: this machine has {len(jax.devices())}")
    mesh = sharding.make_mesh(devices, 1, 1, jax.devices()[:devices])
    sizes = (rows, prompt_length, response_length)
    with _peer("update", model, peer_python, sizes) as peers, jax.set_mesh(mesh):
        shape, definition, params = _policy(model, mesh, dtype)
        length, tokens = prompt_length + response_length, rows * (prompt_length + response_length)
        work = flops.update(shape, tokens=tokens, scored=rows * response_length, length=length)
        rate = flops.matmul_rate(dtype)
        console.print(
            f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f}M parameters, {rows} x "
            f"({prompt_length} + {response_length}) tokens, {jax.devices()[0].device_kind}, "
            f"matmul {rate / 1e9:.0f} GFLOP/s, arithmetic of a step {work / 1e12:.2f} TFLOP"
        )
        collate = Collator(
            prompt_length, response_length, microbatches=microbatches, shards=devices
        )
        batch = updates.place(collate(random_rollout(shape.vocab_size, *sizes)), mesh)
        runs = _steps(definition, params, batch, rows)
        del params  # the steps donate them
        seconds = in_turn({**runs, **peers}, repeats, console)
    table = rich.table.Table("", "seconds", "range", "tokens/s", "x floor", "x plain")
    plain = np.median(seconds[PLAIN])
    for name, values in seconds.items():
        middle, whole = np.median(values), name in (PLAIN, LOPTI, *peers)
        floor = (f"{tokens / middle:,.0f}", f"{middle * rate / work:.2f}") if whole else ("", "")
        table.add_row(name, *_spread(values), *floor, f"{middle / plain:.2f}")
    console.print(table)


def _steps(definition: Any, params: Any, batch: Any, rows: int) -> dict[str, Callable[[], Any]]:
    """The programs to time, by name; the two train steps share one state, which each donates."""
    policy = partial(logprobs.of_responses, definition)
    score, optimizer = updates.make_score(policy), optimizers.adamw(1e-6)
    reward = jnp.arange(float(rows))[None]
    old = score(params, batch.inputs)
    state = updates.init_state(params, optimizer)
    where = jax.tree.map(lambda x: x.sharding, state)

    def stepper(split: Any) -> Callable[[], Any]:
        objective = Objective(
            advantage=advantages.grpo, penalties=((1e-3, kl.k3),), partition=split
        )
        credited = updates.make_credit(objective)(batch, reward, old_logp=old, ref_logp=old)
        step = updates.make_train_step(policy, objective, optimizer, shardings=where)

        def run() -> Any:
            nonlocal state
            state, metrics = step(state, credited)
            return state, metrics

        return run

    micro = jax.tree.map(lambda x: x[0, 0], batch.inputs)
    model = lambda params: qwen2.nnx.merge(definition, params)
    size = (*micro.index.shape, model(params).shape.hidden_size)
    hidden = jax.random.normal(jax.random.key(0), size)
    layers = jax.jit(
        jax.grad(lambda p: model(p)(micro.tokens, micro.positions, micro.segments).sum())
    )
    scored = lambda h, w: logprobs.chunked(h, w, micro.target, micro.scored).logp.sum()
    head = jax.jit(jax.grad(scored, argnums=(0, 1)))
    adam = jax.jit(lambda s: optimizer.update(s.params, s.opt_state, s.params, step=s.step)[1])
    count = batch.inputs.tokens.shape[1]
    return {
        PLAIN: stepper(partition.together),
        LOPTI: stepper(partial(partition.random, share=0.5)),
        "scoring (forward)": lambda: score(state.params, batch.inputs),
        f"layers (1 of {count} micro-batches)": lambda: layers(state.params),
        f"log-probs (1 of {count} micro-batches)": lambda: head(hidden, model(state.params).head),
        "AdamW": lambda: adam(state),
    }


def rollout(
    model: str | None = None,
    /,
    *,
    sequences: int = 64,
    prompt_length: int = 64,
    new_tokens: int = 64,
    slots: int = 64,
    repeats: int = 3,
    bfloat16: bool = False,
    peer_python: Path | None = None,
) -> None:
    """Time generation: the embedded engine greedy, sampled, top-p; PyTorch with transformers.

    Args:
        model: a Qwen2 folder or hub name; without it a small random model (about 6M parameters).
        sequences: how many prompts, all different, one response each.
        prompt_length: tokens of each prompt.
        new_tokens: tokens of each response.
        slots: sequences that decode at a time.
        repeats: timed rounds of each kind, after one that compiles; the median is shown.
        bfloat16: compute in bfloat16 instead of float32.
        peer_python: an interpreter with torch and transformers, to time in turn (needs a model).
    """
    at_least_one(sequences=sequences, prompt_length=prompt_length, new_tokens=new_tokens,
                 slots=slots, repeats=repeats)  # fmt: skip
    dtype, console = _dtype(bfloat16), terminal.plain(soft_wrap=False)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    sizes = (sequences, prompt_length, new_tokens)
    with _peer("rollout", model, peer_python, sizes) as peers, jax.set_mesh(mesh):
        shape, definition, params = _policy(model, mesh, dtype)
        prompts = random_rollout(shape.vocab_size, *sizes).prompts
        length, total = prompt_length + new_tokens, sequences * new_tokens
        work = flops.forward(shape, tokens=sequences * length, scored=total, length=length)
        rate = flops.matmul_rate(dtype)
        console.print(
            f"{sequences} x ({prompt_length} + {new_tokens}) tokens, {jax.devices()[0].device_kind}, matmul "
            f"{rate / 1e9:.0f} GFLOP/s: arithmetic alone allows {total * rate / work:,.0f} tokens/s"
        )
        kinds = {
            "greedy": Sampling(temperature=0.0, max_tokens=new_tokens),
            "temperature 1": Sampling(max_tokens=new_tokens),
            "top-p 0.95": Sampling(top_p=0.95, max_tokens=new_tokens),
        }
        with engines.Native(slots=slots).start(Policy(definition), mesh) as sampler:
            sampler.push(params, 0)

            def generate(sampling: Sampling) -> int:
                return len(sampler.generate(prompts, n=1, sampling=sampling).responses)

            runs = {name: partial(generate, sampling) for name, sampling in kinds.items()}
            seconds = in_turn({**runs, **peers}, repeats, console)
    table = rich.table.Table("", "seconds", "range", "tokens/s", "x floor")
    for name, values in seconds.items():
        middle = np.median(values)
        table.add_row(
            name, *_spread(values), f"{total / middle:,.0f}", f"{middle * rate / work:.2f}"
        )
    console.print(table)


def compilation(*, layers: tuple[int, ...] = (4, 28), repeats: int = 3) -> None:
    """Time tracing and compiling the train step at several depths.

    Args:
        layers: depths, taken in turn; ratios are against the first.
        repeats: compilations of each depth; the median is shown.
    """
    if not layers:
        raise UserError("--layers wants at least one depth")
    at_least_one(layers=min(layers), repeats=repeats)
    console = terminal.plain(soft_wrap=False)
    runs = {str(depth): _compiler(depth) for depth in layers}
    seconds = in_turn(runs, repeats, console, warm=False)
    first = np.median(seconds[str(layers[0])])
    table = rich.table.Table("layers", "seconds", "range", f"x {layers[0]} layers")
    for depth, values in seconds.items():
        table.add_row(depth, *_spread(values), f"{np.median(values) / first:.2f}")
    console.print(table)


def _compiler(depth: int) -> Callable[[], None]:
    """A function that traces and compiles the train step of `depth` layers anew."""
    definition, params = qwen2.graph(replace(SMALL, num_layers=depth))
    policy, optimizer = partial(logprobs.of_responses, definition), optimizers.adamw()
    split = partial(partition.random, share=0.5)
    objective = Objective(advantage=advantages.grpo, penalties=((1e-3, kl.k3),), partition=split)
    batch = Collator(128, 128)(random_rollout(SMALL.vocab_size, 4, 128, 128))
    old = jax.ShapeDtypeStruct(batch.inputs.target.shape, jnp.float32)
    reward = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    credit = updates.make_credit(objective)
    credited = jax.eval_shape(partial(credit, batch), reward, old_logp=old, ref_logp=old)
    count: Any = jax.ShapeDtypeStruct((), jnp.int32)
    state = updates.TrainState(params, jax.eval_shape(optimizer.init, params), count, count)

    def compile_step() -> None:
        step: Any = updates.make_train_step(policy, objective, optimizer)
        step.lower(state, credited).compile()

    return compile_step


def at_least_one(**counts: int) -> None:
    """Raises a UserError for the first count that is less than one."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"--{name.replace('_', '-')} {count}: at least 1")


def random_rollout(vocab: int, rows: int, prompt: int, response: int) -> Rollout:
    """Prompts and responses of random tokens, all of full length."""
    rng = np.random.default_rng(0)
    prompts, responses = (rng.integers(0, vocab, (rows, n)).tolist() for n in (prompt, response))
    return Rollout(prompts, responses, [[0.0] * response] * rows)


def in_turn(
    runs: Mapping[str, Callable[[], Any]],
    repeats: int,
    console: rich.console.Console,
    *,
    warm: bool = True,
) -> dict[str, list[float]]:
    """Seconds of `repeats` calls of each, in turn; `warm`: after one untimed call that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with console.status("") as status:
        for repeat in range(0 if warm else 1, repeats + 1):
            for name, run in runs.items():
                status.update(f"round {repeat} of {repeats}: {name}" if repeat else f"first {name}")
                start = time.perf_counter()
                jax.block_until_ready(run())
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


class _Peer(NamedTuple):
    process: subprocess.Popen[str]

    def __call__(self) -> None:
        print("step", file=self.process.stdin, flush=True)
        if next(iter(self.process.stdout or ()), "").strip() != "done":
            code = self.process.wait()
            raise UserError(f"the peer stopped (exit {code}): its message stands above")


@contextmanager
def _peer(
    kind: str, model: str | None, python: Path | None, sizes: tuple[int, ...]
) -> Iterator[dict[str, _Peer]]:
    """The peer (peer.py) in a process of its own; none without an interpreter."""
    if python is None:
        yield {}
        return
    if not model:
        raise UserError("the peer needs a model folder: give one before --peer-python")
    words = [str(python), str(PEER), kind, str(hf.resolve(model)), *map(str, sizes)]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)  # noqa: S603
    except OSError as error:
        raise UserError(f"--peer-python {python}: {error.strerror}") from error
    with process:  # closes its input, which ends it, and waits
        yield {"PyTorch with transformers": _Peer(process)}


def _policy(model: str | None, mesh: Any, dtype: Any) -> tuple[qwen2.Shape, Any, Any]:
    """Shape, definition and parameters of a model, or of a small random one."""
    folder = hf.resolve(model) if model else None
    shape = hf.load_shape(folder) if folder else SMALL
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=dtype, remat=REMAT))
    where = sharding.param_shardings(shapes, mesh)
    if folder:
        return shape, definition, hf.load(folder, shape, where, jnp.float32)
    return shape, definition, qwen2.init(shape, shardings=where)


def _dtype(bfloat16: bool) -> Any:
    return jnp.bfloat16 if bfloat16 else jnp.float32


def _spread(values: list[float]) -> tuple[str, str]:
    """The median, and the range, as texts."""
    return f"{np.median(values):.3f}", f"{min(values):.3f} - {max(values):.3f}"
