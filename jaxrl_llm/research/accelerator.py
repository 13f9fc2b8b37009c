"""Checks an accelerator in minutes: numbers against a CPU's, speed, memory against the plan's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from rich.box import SIMPLE

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, logprobs, qwen2, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import Objective, advantages, kl, partition
from jaxrl_llm.planning import flops, machines
from jaxrl_llm.planning.programs import local_bytes
from jaxrl_llm.research.bench import random_rollout
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.training import terminal

SMALL = qwen2.Shape(1024, 256, 704, 2, 4, 2, tied=True)
SHAPES = {"small": SMALL, **qwen2.PRESETS}
STEPS = 20
AFTER_STEPS = 6  # times the limit: Adam makes a full step even of a gradient that is rounding error
MEMORY = 0.1  # largest error of a plan, as a share of the memory used
OBJECTIVE = Objective(
    advantage=advantages.grpo,
    penalties=((1e-3, kl.k3),),
    partition=partial(partition.lopti, eta=1 / 1024),
)


@dataclass(frozen=True)
class Setting:
    """The device, dtype, attention kernel and packing that `numbers` computes with."""

    device: Any
    dtype: Any = jnp.float32
    attend: Callable[..., Any] = attention.xla
    pack: bool = True


@dataclass(frozen=True)
class Line:
    """A row of the table; `fine`: whether the value is within its limit, None if it has none."""

    name: str
    value: str
    limit: str = ""
    fine: bool | None = None


def accelerator(
    *,
    models: tuple[str, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"),
    rows: int = 8,
    prompt_length: int = 128,
    response_length: int = 896,
    slots: int = 256,
    new_tokens: int = 256,
    minutes: float = 8.0,
) -> None:
    """Check and time the first device: numbers against a CPU's, updates, decoding, memory.

    Args:
        models: names of the shapes to time, with random weights, smallest first.
        rows: sequences of a micro-batch.
        prompt_length: tokens of each prompt.
        response_length: tokens of each response.
        slots: sequences that decode at a time.
        new_tokens: tokens that each of them decodes.
        minutes: after this many, nothing new is started.
    """
    if unknown := [name for name in models if name not in SHAPES]:
        raise UserError(f"--models {unknown[0]}: known are {', '.join(SHAPES)}")
    console, begun = terminal.plain(), time.monotonic()
    device = jax.devices()[0]
    chip = _chip(device)
    collate = Collator(prompt_length, response_length, microbatches=2, pack=True)

    def lines() -> Iterator[Line]:
        yield from correctness(device)
        for name in models:
            yield from training(name, device, chip, collate, rows)
            yield from decoding(name, device, chip, slots, prompt_length, new_tokens)

    table = rich.table.Table("", "measured", "limit", "", title=device.device_kind, box=SIMPLE)
    wrong, left = 0, False
    with console.status("correctness") as status:
        for line in lines():
            status.update(f"after {line.name}")
            verdict = {None: "", True: "right", False: "WRONG"}[line.fine]
            table.add_row(line.name, line.value, line.limit, verdict)
            wrong += line.fine is False
            if left := time.monotonic() - begun > 60 * minutes:
                break
    console.print(table)
    if left:
        console.print(f"{minutes:g} minutes are over: what is not in the table was not begun")
    if wrong:
        raise UserError(f"{wrong} figures are not what they must be: see the table")


def correctness(device: Any) -> Iterator[Line]:
    """Relative errors of a small model's log-probs, gradient and steps against a CPU's float32."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        start = jax.device_get(qwen2.init(SMALL))
    truth = numbers(Setting(cpu), start)
    fused = Setting(device, jnp.bfloat16, attention.for_platform)
    for name, setting, limit in (
        ("float32", Setting(device), 2e-4),
        ("bfloat16, plain attention", Setting(device, jnp.bfloat16), 5e-2),
        ("bfloat16, fused attention", fused, 5e-2),
        ("bfloat16, fused, padded rows", replace(fused, pack=False), 5e-2),
    ):
        found = numbers(setting, start)
        for what, most in zip(truth, (limit, limit, AFTER_STEPS * limit), strict=True):
            apart = difference(found[what], truth[what])
            yield Line(f"{name}: {what}", f"{apart:.1e}", f"{most:.0e}", apart <= most)


def numbers(setting: Setting, start: Any) -> dict[str, list[np.ndarray]]:
    """Log-probs, a gradient, and the change of parameters by `STEPS` steps, on fixed inputs."""
    mesh = sharding.make_mesh(1, 1, 1, [setting.device])
    compute = qwen2.Compute(dtype=setting.dtype, attend=setting.attend)
    definition, shapes = qwen2.graph(SMALL, compute)
    with jax.set_mesh(mesh):
        params = jax.device_put(start, sharding.param_shardings(shapes, mesh))
        collate = Collator(32, 96, minibatches=2, microbatches=2, pack=setting.pack)
        batch = update.place(collate(random_rollout(SMALL.vocab_size, 16, 32, 96)), mesh)
        policy = partial(logprobs.of_responses, definition)
        optimizer = optimizers.adamw(1e-4)
        old = update.make_score(policy)(params, batch.inputs)
        reward = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
        reward = sharding.replicated(reward, mesh)
        credited = update.make_credit(OBJECTIVE)(batch, reward, old_logp=old, ref_logp=old)
        micro = jax.tree.map(lambda x: x[0, 0], batch.inputs)
        gradient = jax.jit(jax.grad(lambda p: policy(p, micro).sum()))(params)
        state = update.init_state(params, optimizer)
        where = jax.tree.map(lambda x: x.sharding, state)
        step = update.make_train_step(policy, OBJECTIVE, optimizer, shardings=where)
        rows = batch.layout.to_rows(old)
        before = jax.tree.map(np.asarray, params)
        for _ in range(STEPS):
            state, _ = step(state, credited)
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
        arrays = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
        found = {"log-probs": rows, "gradient": gradient, f"{STEPS} steps": moved}
        return {name: arrays(tree) for name, tree in found.items()}


def difference(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The norm of the difference over the norm of the truth."""
    apart = sum(float(np.sum((a - b) ** 2)) for a, b in zip(found, truth, strict=True))
    return (apart / sum(float(np.sum(b**2)) for b in truth)) ** 0.5


def training(name: str, device: Any, chip: Any, collate: Collator, rows: int) -> Iterator[Line]:
    """Speed and memory of optimizer steps in bfloat16 with recomputed layers."""
    shape, mesh = SHAPES[name], sharding.make_mesh(1, 1, 1, [device])
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=jnp.bfloat16))
    policy, optimizer = partial(logprobs.of_responses, definition), optimizers.adamw(1e-6)
    objective = Objective(advantage=advantages.grpo)
    count, limits = rows * collate.microbatches, (collate.prompt_length, collate.response_length)
    with jax.set_mesh(mesh):
        params = qwen2.init(shape, shardings=sharding.param_shardings(shapes, mesh))
        state = update.init_state(params, optimizer)
        del params
        where = jax.tree.map(lambda x: x.sharding, state)
        batch = update.place(collate(random_rollout(shape.vocab_size, count, *limits)), mesh)
        old = update.make_score(policy)(state.params, batch.inputs)
        reward = sharding.replicated(np.arange(float(count), dtype=np.float32)[None], mesh)
        credited = update.make_credit(objective)(batch, reward, old_logp=old)
        step: Any = update.make_train_step(policy, objective, optimizer, shardings=where)
        planned = step.lower(state, credited).compile().memory_analysis().temp_size_in_bytes
        planned += local_bytes(state) + local_bytes((batch, credited))
        times = []
        for _ in range(4):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(step(state, credited))
            times.append(time.perf_counter() - start)
    tokens, seconds = count * sum(limits), float(np.median(times[1:]))
    work = flops.update(shape, tokens=tokens, scored=count * limits[1], length=sum(limits))
    yield Line(f"{name}: update, tokens/s", f"{tokens / seconds:,.0f}")
    used = f"{work / seconds / chip.flops:.1%}"
    yield Line(f"{name}: update, model FLOPs utilisation", used)
    if real := (device.memory_stats() or {}).get("peak_bytes_in_use"):
        near, limit = abs(real - planned) <= MEMORY * real, f"planned {planned / 2**30:.1f}"
        yield Line(f"{name}: memory, GiB", f"{real / 2**30:.1f}", limit, near)


def decoding(
    name: str, device: Any, chip: Any, slots: int, prompt: int, tokens: int
) -> Iterator[Line]:
    """Speed of the embedded engine with all slots busy, and its share of the memory bandwidth."""
    shape, mesh = SHAPES[name], sharding.make_mesh(1, 1, 1, [device])
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=jnp.bfloat16))
    prompts = random_rollout(shape.vocab_size, slots, prompt, 0).prompts
    where = sharding.param_shardings(shapes, mesh)
    with (
        jax.set_mesh(mesh),
        engines.Native(slots=slots).start(Policy(definition), mesh) as sampler,
    ):
        params = qwen2.init(shape, dtype=jnp.bfloat16, shardings=where)
        sampler.push(params, 0)
        sampler.generate(prompts, n=1, sampling=Sampling(max_tokens=tokens))
        start = time.perf_counter()
        sampler.generate(prompts, n=1, sampling=Sampling(max_tokens=tokens, seed=1))
        seconds = time.perf_counter() - start
    cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * slots
    read = (local_bytes(params) + cache * (prompt + tokens / 2)) * tokens
    yield Line(f"{name}: decoding, tokens/s", f"{slots * tokens / seconds:,.0f}")
    yield Line(f"{name}: decoding, share of bandwidth", f"{read / seconds / chip.bandwidth:.1%}")


def _chip(device: Any) -> machines.Chip:
    """The data sheet of a device; measured rates if there is none."""
    kind = device.device_kind.lower().replace(" lite", "e").replace("tpu ", "")
    for name, chip in machines.CHIPS.items():
        if name in kind:
            return chip
    rate = flops.matmul_rate(jnp.bfloat16)
    return replace(machines.CHIPS["h100"], flops=rate, bandwidth=_bandwidth())


def _bandwidth() -> float:
    """Bytes/s read by a sum over 256 MiB."""
    x, total = jnp.ones(2**26, jnp.float32), jax.jit(jnp.sum)
    total(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(5):
        total(x).block_until_ready()
    return 5 * x.nbytes / (time.perf_counter() - start)
