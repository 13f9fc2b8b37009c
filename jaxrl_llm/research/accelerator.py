"""Checks an accelerator in minutes: numbers against a CPU's, speed, memory against the plan's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, families, qwen2, sharding
from jaxrl_llm.objectives import partition
from jaxrl_llm.planning import flops, machines
from jaxrl_llm.planning.programs import local_bytes
from jaxrl_llm.research.bench import (
    GRPO,
    Subject,
    Trainer,
    at_least_one,
    generating,
    in_turn,
    random_subject,
)
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.training import terminal

SMALL = qwen2.Shape(1024, 256, 704, 2, 4, 2, tied=True)
SHAPES = {"small": SMALL, **families.PRESETS}
STEPS = 20
AFTER_STEPS = 6  # times the limit: Adam makes a full step even of a gradient that is rounding error
MEMORY = 0.1  # largest error of a plan, as a share of the memory used
LOPTI = replace(GRPO, partition=partial(partition.lopti, eta=1 / 1024))


class Line(NamedTuple):
    """A measured value; `fine`: whether it is within its limit, None if it has none."""

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
    at_least_one(rows=rows, prompt_length=prompt_length, response_length=response_length,
                 slots=slots, new_tokens=new_tokens)  # fmt: skip
    console, begun, wrong = terminal.plain(), time.monotonic(), 0
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    collate = Collator(prompt_length, response_length, microbatches=2, pack=True)

    def lines() -> Iterator[Line]:
        yield from correctness(jax.devices()[0])
        with jax.set_mesh(mesh):
            for name in models:
                yield from training(name, mesh, collate, rows, console)
                yield from decoding(name, mesh, slots, prompt_length, new_tokens, console)

    console.print(jax.devices()[0].device_kind)
    for line in lines():
        verdict = {None: "", True: "right", False: "WRONG"}[line.fine]
        console.print(f"{line.name:45} {line.value:>10} {line.limit:15} {verdict}".rstrip())
        wrong += line.fine is False
        if time.monotonic() - begun > 60 * minutes:
            console.print(f"{minutes:g} minutes are over: what is not above was not begun")
            break
    if wrong:
        raise UserError(f"{wrong} figures are not what they must be: they are marked above")


def correctness(device: Any) -> Iterator[Line]:
    """Relative errors of a small model's log-probs, gradient and steps against a CPU's float32."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        start = jax.device_get(qwen2.init(SMALL))
    truth = numbers(cpu, start)
    half: dict[str, Any] = {"dtype": jnp.bfloat16, "attend": attention.for_platform}
    settings: dict[str, tuple[float, dict[str, Any]]] = {
        "float32": (2e-4, {}),
        "bfloat16, plain attention": (5e-2, {"dtype": jnp.bfloat16}),
        "bfloat16, fused attention": (5e-2, half),
        "bfloat16, fused, padded rows": (5e-2, {**half, "pack": False}),
    }
    for name, (limit, setting) in settings.items():
        found = numbers(device, start, **setting)
        for what, most in zip(truth, (limit, limit, AFTER_STEPS * limit), strict=True):
            apart = difference(found[what], truth[what])
            yield Line(f"{name}: {what}", f"{apart:.1e}", f"at most {most:.0e}", apart <= most)


def numbers(
    device: Any,
    start: Any,
    *,
    dtype: Any = jnp.float32,
    attend: Callable[..., Any] = attention.xla,
    pack: bool = True,
) -> dict[str, list[np.ndarray]]:
    """Log-probs, a gradient, and the change of parameters by `STEPS` steps, on fixed inputs."""
    mesh = sharding.make_mesh(devices=[device])
    definition, shapes = qwen2.graph(SMALL, qwen2.Compute(dtype=dtype, attend=attend))
    with jax.set_mesh(mesh):
        params = jax.device_put(start, sharding.param_shardings(shapes, mesh))
        collate = Collator(32, 96, minibatches=2, microbatches=2, pack=pack)
        subject = Subject(SMALL, definition, params, dtype)
        trainer = Trainer(subject, mesh, collate, rows=16, rate=1e-4)
        micro = jax.tree.map(lambda x: x[0, 0], trainer.batch.inputs)
        gradient = jax.jit(jax.grad(lambda p: trainer.policy(p, micro).sum()))(params)
        step = trainer.steps(LOPTI)
        for _ in range(STEPS):
            step()
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, trainer.state.params, start)
        logp = trainer.batch.layout.to_rows(trainer.old_logp)
    arrays = lambda tree: [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]
    found = {"log-probs": logp, "gradient": gradient, f"{STEPS} steps": moved}
    return {name: arrays(tree) for name, tree in found.items()}


def difference(found: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The norm of the difference over the norm of the truth."""
    apart = sum(float(np.sum((a - b) ** 2)) for a, b in zip(found, truth, strict=True))
    return (apart / sum(float(np.sum(b**2)) for b in truth)) ** 0.5


def training(
    name: str, mesh: Any, collate: Collator, rows: int, console: rich.console.Console
) -> Iterator[Line]:
    """Speed and memory of optimizer steps in bfloat16 with recomputed layers."""
    shape, count = SHAPES[name], rows * collate.microbatches
    trainer = Trainer(random_subject(shape, mesh, jnp.bfloat16), mesh, collate, count)
    credited, device = trainer.credited(GRPO), mesh.devices.flat[0]
    compiled = trainer.compiled(GRPO, credited)
    planned = compiled.memory_analysis().temp_size_in_bytes
    planned += local_bytes((trainer.state, trainer.batch, credited))
    step = partial(trainer.step, compiled, credited)
    seconds = float(np.median(in_turn({name: step}, 3, console)[name]))
    length, scored = (
        collate.prompt_length + collate.response_length,
        count * collate.response_length,
    )
    work = flops.update(shape, tokens=count * length, scored=scored, length=length)
    yield Line(f"{name}: update, tokens/s", f"{count * length / seconds:,.0f}")
    if chip := machines.chip_of(device):
        used = f"{work / seconds / chip.flops:.1%}"
        yield Line(f"{name}: update, model FLOPs utilisation", used)
    if real := (device.memory_stats() or {}).get("peak_bytes_in_use"):
        near, limit = abs(real - planned) <= MEMORY * real, f"planned {planned / 2**30:.1f}"
        yield Line(f"{name}: memory, GiB", f"{real / 2**30:.1f}", limit, near)


def decoding(
    name: str, mesh: Any, slots: int, prompt: int, tokens: int, console: rich.console.Console
) -> Iterator[Line]:
    """Speed of the embedded engine with all slots busy, and its share of the memory bandwidth."""
    shape = SHAPES[name]
    subject = random_subject(shape, mesh, jnp.bfloat16, stored=jnp.bfloat16)
    with generating(subject, mesh, slots, slots, prompt) as generate:
        run = partial(generate, Sampling(max_tokens=tokens))
        [seconds] = in_turn({name: run}, 1, console)[name]
    yield Line(f"{name}: decoding, tokens/s", f"{slots * tokens / seconds:,.0f}")
    if chip := machines.chip_of(mesh.devices.flat[0]):
        cache = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 2 * slots
        read = (local_bytes(subject.params) + cache * (prompt + tokens / 2)) * tokens
        share = f"{read / seconds / chip.bandwidth:.1%}"
        yield Line(f"{name}: decoding, share of bandwidth", share)
