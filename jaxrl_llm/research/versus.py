"""Times the same work here and in other packages, in turn, after comparing what they compute."""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import tyro

from jaxrl_llm import accelerators, storage
from jaxrl_llm.errors import UserError, first_line, flags_at_least
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.planning import flops
from jaxrl_llm.research import peers as others
from jaxrl_llm.research import pool
from jaxrl_llm.research.bench import (
    GRPO,
    LOPTI,
    PLAIN,
    TWO_STAGES,
    Columns,
    Trainer,
    generating,
    in_turn,
    load_subject,
    matmul_rate,
    random_prompts,
    table,
)
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.training import curves, terminal

OURS = "jaxrl_llm"
SHARE = 0.4  # of a GPU, for a vLLM server beside JAX
CLOSE = {False: 1e-3, True: 0.1}  # True: computed in bfloat16


@dataclass(frozen=True)
class Sizes:
    """Rows of tokens of an update; prompts and new tokens of all else."""

    rows: int = 8
    """sequences of an update"""
    prompt_length: int = 128
    """tokens of each of their prompts; half of it in rollouts and steps"""
    response_length: int = 384
    """tokens of each of their responses"""
    microbatches: int = 4
    """gradient-accumulation slices"""
    sequences: int = 64
    """responses of a rollout; a step has a quarter of them"""
    new_tokens: int = 64
    """tokens of each"""
    group: int = 4
    """responses to a prompt in a step"""
    bfloat16: bool = False
    """compute in bfloat16 instead of float32"""

    def __post_init__(self):
        flags_at_least(1, **{name: n for name, n in asdict(self).items() if name != "bfloat16"})


@dataclass
class Result:
    """Seconds of each program, what it works on, and how far its values are from ours."""

    tokens: int = 0
    floor: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    difference: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def against(
    names: str = "torch,trl,tunix,vllm",
    /,
    *,
    model: str | None = None,
    kinds: tuple[str, ...] = ("update", "rollout", "step", "sync"),
    sizes: Annotated[Sizes, tyro.conf.arg(name="")] = Sizes(),
    repeats: int = 3,
    out: Path | None = None,
) -> None:
    """Time the same work in other packages, in turn with ours: torch, trl, tunix, vllm.

    Args:
        names: packages, with commas between; NAME=PYTHON uses that interpreter, else an environment
            is made once from PyPI, in ~/.cache/jaxrl_llm/peers.
        model: a model folder or hub name that all can load; without it a small random one.
        kinds: of work: an update, a greedy rollout, a whole step, a sync of weights to vLLM.
        repeats: timed rounds, after one that compiles; the median is shown.
        out: a folder for against.json and against.svg.
    """
    flags_at_least(1, repeats=repeats)
    interpreters = others.parse(names)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--kinds {unknown[0]}: known are {', '.join(KINDS)}")
    quarter = f"a quarter of --sequences {sizes.sequences}"
    for kind, flag, count, into in (
        ("update", f"--rows {sizes.rows}", sizes.rows, sizes.microbatches),
        ("step", quarter, sizes.sequences // 4, sizes.group * sizes.microbatches),
    ):
        if kind in kinds and (count % into or not count):
            raise UserError(f"{flag} does not divide by {into} for the micro-batches")
    if out:
        out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers need room, too
    if "vllm" in interpreters and "sync" in kinds:
        accelerators.leave(SHARE)
    console, mesh = terminal.plain(), sharding.make_mesh(devices=jax.devices()[:1])
    pythons = dict(_interpreters(interpreters, kinds, console))
    results: dict[str, Result] = {}
    with _folder(model, mesh) as folder, jax.set_mesh(mesh):
        rate = matmul_rate(jnp.bfloat16 if sizes.bfloat16 else jnp.float32)
        console.print(f"{jax.devices()[0].device_kind}, a matrix product {rate / 1e9:.0f} GFLOP/s")
        for kind in kinds:
            results[kind] = result = Result()
            here = {n: p for n, p in pythons.items() if kind in others.PEERS[n].kinds}
            result.absent |= {n: str(p) for n, p in here.items() if not isinstance(p, Path)}
            usable = {n: p for n, p in here.items() if isinstance(p, Path)}
            KINDS[kind](
                folder,
                mesh,
                sizes,
                usable,
                result,
                partial(in_turn, repeats=repeats, console=console),
            )
            result.floor /= rate
            result.seconds = {n: s for n, s in result.seconds.items() if n not in result.absent}
            console.print(_table(kind, result), soft_wrap=False)
            for name, difference in result.difference.items():
                console.print(f"{kind}: {name}: {difference}")
            for name, reason in result.absent.items():
                console.print(f"{kind}: {name} is left out: {reason}")
            if out:
                _write(out, sizes, results)
    if out:
        console.print(f"wrote {out / 'against.json'} and {out / 'against.svg'}")


Timed = Callable[[Mapping[str, Callable[[], Any]]], dict[str, list[float]]]


def _update(
    folder: Path, mesh: Any, sizes: Sizes, pythons: dict[str, Path], result: Result, timed: Timed
) -> None:
    """An optimizer step on the same responses, the model's own, and ours in two stages."""
    subject = load_subject(folder, mesh, sizes.bfloat16)
    length = sizes.prompt_length + sizes.response_length
    result.tokens = sizes.rows * length
    result.floor = flops.update(
        subject.shape,
        tokens=result.tokens,
        scored=sizes.rows * sizes.response_length,
        length=length,
    )
    collate = Collator(sizes.prompt_length, sizes.response_length, microbatches=sizes.microbatches)
    with generating(subject, mesh, sizes.rows, sizes.rows, sizes.prompt_length) as generate:
        responses = generate(Sampling(max_tokens=sizes.response_length))
    trainer = Trainer(subject, mesh, collate, sizes.rows, responses=responses)
    del subject
    credited, rows = trainer.credited(GRPO), trainer.batch.layout.to_rows
    ours = {
        "logp": np.asarray(rows(trainer.old_logp)),
        "advantages": np.asarray(rows(credited.advantage))[:, 0],
    }
    steps = {PLAIN: trainer.steps(GRPO), LOPTI: trainer.steps(TWO_STAGES)}
    ours["grad_norm"] = np.asarray(steps[PLAIN]()[1]["grad_norm"])[0]
    job = _job("update", folder, sizes) | {
        "prompts": [one.prompt for one in responses],
        "responses": [one.tokens for one in responses],
        "advantages": ours["advantages"].tolist(),
    }

    compared = partial(alike, ours, bfloat16=sizes.bfloat16)
    with _peers(job, pythons, result, compared) as works:
        result.seconds = timed({**steps, **works})


def alike(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, bfloat16: bool) -> str:
    """How near another's log-probs and norm of the gradient are to ours; `Absent` if they are others.

    In float32 the farthest log-prob counts; in bfloat16 single ones are far from anything, so their mean.
    """
    apart = np.abs(np.asarray(theirs["logp"]) - ours["logp"])
    logp = float(apart.mean() if bfloat16 else apart.max())
    norm = abs(theirs["grad_norm"] / float(ours["grad_norm"]) - 1)
    mean = " in the mean" if bfloat16 else ""
    if not (logp <= CLOSE[bfloat16] and norm <= CLOSE[bfloat16]):
        raise others.Absent(
            f"it computes something else: a log-prob differs by {logp:.2g}{mean}, the norm of the "
            f"gradient by {norm:.2g} of it"
        )
    return f"log-probs as here to {logp:.0e}{mean}, the norm of the gradient to {norm:.0e} of it"


def _rollout(
    folder: Path, mesh: Any, sizes: Sizes, pythons: dict[str, Path], result: Result, timed: Timed
) -> None:
    """Greedy answers to the same prompts."""
    subject, prompt = load_subject(folder, mesh, sizes.bfloat16), max(1, sizes.prompt_length // 2)
    length, result.tokens = prompt + sizes.new_tokens, sizes.sequences * sizes.new_tokens
    result.floor = flops.forward(
        subject.shape, tokens=sizes.sequences * length, scored=result.tokens, length=length
    )
    prompts = random_prompts(subject.shape.vocab_size, sizes.sequences, prompt)
    job = _job("rollout", folder, sizes) | {"prompts": prompts}
    greedy = Sampling(temperature=0.0, max_tokens=sizes.new_tokens)
    slots = sizes.sequences
    with generating(subject, mesh, slots, slots, prompt) as generate:
        first = np.asarray([one.tokens for one in generate(greedy)])

        def compared(values: Mapping[str, Any]) -> str:
            same = float((np.asarray(values["tokens"]) == first).mean())
            if same < 0.5:
                raise others.Absent(f"it computes something else: {same:.0%} of tokens are ours")
            return f"{same:.1%} of its tokens are ours"

        with _peers(job, pythons, result, compared) as works:
            result.seconds = timed({OURS: partial(generate, greedy), **works})


def _step(
    folder: Path, mesh: Any, sizes: Sizes, pythons: dict[str, Path], result: Result, timed: Timed
) -> None:
    """Sampling, rewards, and an optimizer step."""
    subject, prompt = load_subject(folder, mesh, sizes.bfloat16), max(1, sizes.prompt_length // 2)
    rows = sizes.sequences // 4
    length, result.tokens = prompt + sizes.new_tokens, rows * sizes.new_tokens
    amounts = {"tokens": rows * length, "scored": result.tokens, "length": length}
    result.floor = flops.forward(subject.shape, **amounts) + flops.update(subject.shape, **amounts)
    count = rows // sizes.group
    prompts = random_prompts(subject.shape.vocab_size, count, prompt)
    collate = Collator(prompt, sizes.new_tokens, microbatches=sizes.microbatches)
    trainer, sampling = Trainer(subject, mesh, collate, rows), Sampling(max_tokens=sizes.new_tokens)
    del subject
    update = trainer.updates(GRPO)
    with engines.Native(slots=rows).start(Policy(trainer.definition), mesh) as sampler:

        def whole() -> Any:
            sampler.push(trainer.state.params, 0)
            found = sampler.generate(prompts, n=sizes.group, sampling=sampling)
            share = [np.mean(np.asarray(one.tokens) % 2 == 0) for one in found]
            reward = np.asarray(share, np.float32).reshape(count, sizes.group)
            return update(found, sharding.replicated(reward, mesh))

        job = _job("step", folder, sizes) | {"prompts": prompts}
        with _peers(job, pythons, result, lambda values: "sampled, so not compared") as works:
            result.seconds = timed({OURS: whole, **works})


def _sync(
    folder: Path, mesh: Any, sizes: Sizes, pythons: dict[str, Path], result: Result, timed: Timed
) -> None:
    """Weights to a vLLM server, and the proof that it has them: ours alone."""
    if "vllm" not in pythons:
        return
    subject = load_subject(folder, mesh, sizes.bfloat16)
    dtype = "bfloat16" if sizes.bfloat16 else "float32"
    variables = () if jax.default_backend() != "cpu" else (("VLLM_CPU_KVCACHE_SPACE", "1"),)
    engine = engines.Vllm(
        str(pythons["vllm"]), dtype=dtype, max_model_len=256, share=SHARE, environment=variables
    )
    parts: list[dict[str, float]] = []
    try:
        with (
            tempfile.TemporaryDirectory() as logs,
            engine.start(Policy(subject.definition), mesh, Path(logs)) as sampler,
        ):

            def push() -> None:
                sampler.push(subject.params, len(parts))
                parts.append(sampler.sync)

            result.seconds = timed({OURS: push})
    except UserError as error:
        result.absent["vllm"] = str(error)
        return
    later = parts[1:] or parts
    names = [name for name in later[0] if isinstance(later[0][name], float)]
    result.difference[OURS] = ", ".join(
        f"{name.removeprefix('sync/')} {np.median([one[name] for one in later]):.2g}"
        for name in names
    )


KINDS = {"update": _update, "rollout": _rollout, "step": _step, "sync": _sync}


def _interpreters(
    interpreters: Mapping[str, Path | None], kinds: tuple[str, ...], console: rich.console.Console
) -> Iterator[tuple[str, Path | others.Absent]]:
    """The Python of each peer that has something to do, or why there is none."""
    for name, python in interpreters.items():
        if not {*kinds} & {*others.PEERS[name].kinds}:
            continue
        try:
            with console.status(f"the environment of {name}"):
                yield name, python or others.environment(name)
        except others.Absent as reason:
            yield name, reason


@contextmanager
def _peers(
    job: Mapping[str, Any],
    pythons: Mapping[str, Path],
    result: Result,
    compared: Callable[[Mapping[str, Any]], str],
) -> Iterator[dict[str, Callable[[], Any]]]:
    """The work of each peer whose values are right, by name; notes why others are left out."""
    with ExitStack() as stack:
        works: dict[str, Callable[[], Any]] = {}
        for name, python in pythons.items():
            try:
                running = stack.enter_context(others.running(name, python, job))
                result.difference[name] = compared(running.values)
            except others.Absent as reason:
                result.absent[name] = str(reason)
            except (ValueError, LookupError) as error:
                result.absent[name] = f"its values cannot be read: {first_line(error)}"
            else:
                works[name] = partial(_worked, name, running, result)
        yield works


def _worked(name: str, running: others.Running, result: Result) -> None:
    """Has a peer work once; nothing any more after it has failed, which is noted."""
    if name not in result.absent:
        try:
            running.work()
        except others.Absent as reason:
            result.absent[name] = str(reason)


@contextmanager
def _folder(model: str | None, mesh: Any) -> Iterator[Path]:
    """The model's folder; a small random one is written for all to load."""
    if model is not None:
        yield hf.resolve(model)
        return
    subject = load_subject(None, mesh, bfloat16=False)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        hf.export(subject.params, subject.shape, folder)
        yield folder


def _job(kind: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    return asdict(sizes) | {"kind": kind, "model": str(folder.absolute())}


def _table(kind: str, result: Result) -> Any:
    first = next(iter(result.seconds), None)
    ours = float(np.median(result.seconds[first])) if first else 0.0
    columns: Columns = {
        "tokens/s": lambda _, s: f"{result.tokens / s:,.0f}" if result.tokens else "",
        "x floor": lambda _, s: f"{s / result.floor:.2f}" if result.floor else "",
        "x ours": lambda _, s: f"{s / ours:.2f}",
    }
    return table(kind, result.seconds, columns)


def _write(out: Path, sizes: Sizes, results: Mapping[str, Result]) -> None:
    """against.json and against.svg."""
    machine = {
        "device": jax.devices()[0].device_kind,
        "processor": platform.processor() or platform.machine(),
        "cores": len(pool.available()),
        "jax": jax.__version__,
        "peers": {name: " ".join(needs.packages) for name, needs in others.PEERS.items()},
    }
    kinds = {kind: asdict(result) for kind, result in results.items()}
    content = {"machine": machine, "sizes": asdict(sizes), "kinds": kinds}
    storage.write(out / "against.json", json.dumps(content, indent=2) + "\n")
    shown = {kind: result.seconds for kind, result in results.items() if len(result.seconds) > 1}
    if shown:
        curves.save(partial(_drawn, shown), out / "against.svg")


def _drawn(shown: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """A row of bars for each kind of work: medians, and the ranges."""
    heights = [*map(len, shown.values())]
    figure, axes = curves.sheet(len(shown), 1, (7, 0.6 + 0.45 * sum(heights)))
    axes[0, 0].get_gridspec().set_height_ratios(heights)
    for axis, (kind, seconds) in zip(axes[:, 0], shown.items(), strict=True):
        names, middles = [*seconds], [float(np.median(x)) for x in seconds.values()]
        errors = [(m - min(x), max(x) - m) for m, x in zip(middles, seconds.values(), strict=True)]
        colors = ["C0" if name in (OURS, PLAIN, LOPTI) else "0.6" for name in names]
        axis.barh(names, middles, xerr=np.transpose(errors), color=colors)
        axis.invert_yaxis()
        axis.set_title(f"{kind}, seconds", loc="left", fontsize=10)
    return figure
