"""The checks of `bench accelerator` on the devices that are here: each check is a generator of lines.

It judges what has one right answer, and memory by its plan; other figures it only tells.
"""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import accelerators, distributed, storage
from jaxrl_llm.config import Config, Scratch
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning import update as updates
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, families, qwen2, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.objectives import partition
from jaxrl_llm.planning import flops, hlo, machines
from jaxrl_llm.planning.plan import peak_of
from jaxrl_llm.planning.programs import Step, local_bytes
from jaxrl_llm.research import bench
from jaxrl_llm.research.bench import GRPO, Subject, Trainer, generating, random_subject
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE
from jaxrl_llm.training import terminal
from jaxrl_llm.training.checkpoint import Checkpoints
from jaxrl_llm.training.fingerprint import describe

SHAPES = {
    "tiny": qwen2.Shape(512, 128, 256, 2, 2, 1, tied=True),  # narrower heads vLLM refuses
    "small": qwen2.Shape(1024, 256, 704, 2, 4, 2, tied=True),
    **families.PRESETS,
}
STEPS = 20
AFTER_STEPS = 6  # times the limit: Adam makes a full step even of a gradient that is rounding error
# tuning Triton's products takes a minute for attention alone
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
A_PARAMETER = 20  # bytes of an update: it, two moments, two sums of gradients
MEMORY = 0.1  # largest error of a plan, as a share of the memory used, or half a GiB
SHARE = 0.4  # of a GPU that a vLLM server takes
LOPTI = replace(GRPO, partition=partial(partition.lopti, eta=1 / 1024))
GIB = 2**30


class Line(NamedTuple):
    """A measured value; `fine`: whether it is within its limit, None if it has none.

    `why` there is no value: it was not measured (`fine` None), or that failed.
    """

    name: str
    value: str = ""
    limit: str = ""
    fine: bool | None = None
    why: str = ""


class Settings(NamedTuple):
    """The settings of checks: how much, with which models (names in SHAPES), on what."""

    rehearse: bool = False
    quick: bool = False
    vllm: str = ""
    small: str = "small"
    real: str = "small"
    platform: str = ""
    devices: int = 1
    model: str = ""
    dtype: str = ""


def at_most(name: str, value: float, limit: float, what: str = "") -> Line:
    """An error, which is right up to a limit."""
    return Line(name, f"{value:.1e}", f"{what}at most {limit:.0e}", bool(value <= limit))


def timed(run: Callable[[], Any], repeats: int = 3) -> float:
    """The median of seconds, after a call that compiles."""
    return float(np.median(bench.in_turn({"": run}, repeats, terminal.plain(quiet=True))[""]))


def environment(settings: Settings) -> Iterator[Line]:
    """Devices, versions and limits; compiles nothing."""
    used = accelerators.ask_driver("memory.used", "memory.total")  # before JAX takes its share
    device, *others = jax.devices()
    yield Line("devices", accelerators.described([device, *others]))
    yield Line("platform", device.platform)
    yield Line("number of devices", str(1 + len(others)))
    found = {package.name.lower(): package.version for package in metadata.distributions()}
    for name in sorted(found):
        if name.startswith(("jaxrl", "jaxlib", "jax-cuda", "libtpu", "nvidia-cudnn")):
            yield Line(name, found[name])
    plugins = [name for name in found if name.startswith("jax-cuda") and name.endswith("-plugin")]
    if device.platform == "gpu":
        yield Line("plugins for CUDA", str(len(plugins)), "1", len(plugins) == 1)
        least, driver = 580 if "jax-cuda13-plugin" in plugins else 525, accelerators.driver()
        enough = int(driver.partition(".")[0]) >= least if driver else None  # some hosts hide it
        yield Line("driver", driver or "unknown", f"at least {least}", enough)
        yield Line("compute capability", str(device.compute_capability))
    for taken, whole in used:
        most = (1 - accelerators.OF_A_GPU) * whole
        yield Line("MiB used by others", f"{taken:,.0f}", f"at most {most:,.0f}", taken <= most)
    pool, chip = (device.memory_stats() or {}).get("bytes_limit", 0), machines.chip_of(device)
    if chip and device.platform == "gpu":
        least = 0.98 * accelerators.share_of_a_gpu() * chip.memory
        fits = pool >= least
        yield Line("memory for JAX, GiB", f"{pool / GIB:.1f}", f"at least {least / GIB:.1f}", fits)
    yield Line("memory of the host, GiB", f"{accelerators.host_memory() / GIB:.1f}")
    room = shutil.disk_usage(storage.memory()).free
    yield Line(f"{storage.memory()}, free, GiB", f"{room / GIB:.1f}")
    yield Line("locked memory, bytes", str(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    for name in sorted(os.environ):
        if name.startswith(("XLA", "JAX", "CUDA", "NCCL")):
            yield Line(name, os.environ[name])


def kernels(settings: Settings) -> Iterator[Line]:
    """Attention in bfloat16 and its gradients against plain attention in float32."""
    groups = (7,) if settings.quick else (1, 7)
    cases = [*product((1024,), (64, 128), groups), (4496, 128, 7)]
    cases = [(128, 64, 7)] if settings.rehearse else cases
    options = BY_CUBLAS if settings.platform == "gpu" else None
    for (length, size, group), layout in product(cases, ("packed", "padded", "window")):
        shapes = [(1, length, heads, size) for heads in (2 * group, 2, 2)]
        inputs = [jax.random.normal(jax.random.key(i), x, "bfloat16") for i, x in enumerate(shapes)]
        segments = 1 + jnp.arange(length)[None] * 3 // length if layout == "packed" else None
        where = {"segments": segments, "window": length // 4 if layout == "window" else None}

        def run(attend: Any, q: Any, k: Any, v: Any, where: Any = where) -> Any:
            out, back = jax.vjp(partial(attend, **where), q, k, v)
            return out, *back(q)

        def compiled(attend: Any, inputs: Any, options: Any = None, run: Any = run) -> Any:
            return jax.jit(partial(run, attend)).lower(*inputs).compile(compiler_options=options)

        fused = compiled(attention.for_platform, inputs)
        exact = [x.astype(jnp.float32) for x in inputs]
        truth = compiled(attention.xla, exact, options)(*exact)
        pairs = zip(_on_host(fused(*inputs)), _on_host(truth), strict=True)
        targets = " ".join(hlo.Module(fused.as_text() or "").kernels()).lower()
        kernel = next((x for x in ("cudnn", "triton", "tpu") if x in targets), "XLA")
        name = f"{layout}, {length:,} x {size}, {group} queries a key: {kernel}"
        yield at_most(name, max(difference([a], [b]) for a, b in pairs), 2e-2)
        if length != 1024:
            plain = compiled(attention.xla, inputs, options)
            fast, slow = (timed(partial(program, *inputs)) for program in (fused, plain))
            fine, limit = None if kernel == "XLA" else fast <= slow, f"plain {1e3 * slow:.2f}"
            yield Line(f"{name}, ms", f"{1e3 * fast:.2f}", limit, fine)


def against_cpu(settings: Settings) -> Iterator[Line]:
    """Relative errors of a small model's log-probs, gradient and steps against a CPU's float32."""
    shape, steps = SHAPES[settings.small], 2 if settings.rehearse else STEPS
    device, [cpu, *_] = jax.devices()[0], jax.devices("cpu")
    with jax.default_device(cpu):
        start = jax.device_get(qwen2.init(shape))
    truth = numbers([cpu], shape, start, steps)
    half: dict[str, Any] = {"dtype": jnp.bfloat16, "attend": attention.for_platform}
    kinds: dict[str, tuple[float, dict[str, Any]]] = {
        "float32": (2e-4, {}),
        "bfloat16, plain attention": (5e-2, {"dtype": jnp.bfloat16}),
        "bfloat16, fused attention": (5e-2, half),
        "bfloat16, fused, padded rows": (5e-2, {**half, "pack": False}),
    }
    for name, (limit, setting) in kinds.items():
        found = numbers([device], shape, start, steps, **setting)
        for what, most in zip(truth, (limit, limit, AFTER_STEPS * limit), strict=True):
            yield at_most(f"{name}: {what}", difference(found[what], truth[what]), most)


def numbers(
    devices: list[Any],
    shape: qwen2.Shape,
    start: Any,
    steps: int,
    *,
    dtype: Any = jnp.float32,
    attend: Callable[..., Any] = attention.xla,
    pack: bool = True,
) -> dict[str, list[np.ndarray]]:
    """Log-probs, a gradient, and the change of parameters by some steps, on fixed inputs."""
    mesh = sharding.make_mesh(devices=devices)
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=dtype, attend=attend))
    with jax.set_mesh(mesh):
        params = jax.device_put(start, sharding.param_shardings(shapes, mesh))
        collate = Collator(32, 96, minibatches=2, microbatches=2, pack=pack, shards=len(devices))
        subject = Subject(shape, definition, params, dtype)
        trainer = Trainer(subject, mesh, collate, rows=16, rate=1e-4)
        micro = jax.tree.map(lambda x: x[0, 0], trainer.batch.inputs)
        gradient = jax.jit(jax.grad(lambda p: trainer.policy(p, micro).sum()))(params)
        step = trainer.steps(LOPTI)
        for _ in range(steps):
            step()
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, trainer.state.params, start)
        logp = trainer.batch.layout.to_rows(trainer.old_logp)
    found = {"log-probs": logp, "gradient": gradient, f"{steps} steps": moved}
    return {name: _on_host(tree) for name, tree in found.items()}


def _on_host(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def difference(values: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """The norm of the difference over the norm of the truth."""
    apart = sum(float(np.sum((a - b) ** 2)) for a, b in zip(values, truth, strict=True))
    return (apart / sum(float(np.sum(b**2)) for b in truth)) ** 0.5


def decoded(settings: Settings) -> Iterator[Line]:
    """The log-probs of what the embedded engine samples against the trainer's."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    prompts, tokens = (8, 16) if settings.rehearse else (64, 64)
    for dtype, model in (("float32", settings.small), ("bfloat16", settings.real)):
        with jax.set_mesh(mesh):
            subject = random_subject(SHAPES[model], mesh, jnp.dtype(dtype), **_exact(dtype))
            with generating(subject, mesh, prompts, prompts, 32) as generate:
                for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
                    found = generate(Sampling(max_tokens=tokens, temperature=temperature))
                    yield mismatch(f"{dtype}, {kind}: log-probs", subject, mesh, found, dtype)


def _exact(dtype: str) -> dict[str, Any]:
    """Fused attention is in bfloat16, whatever the rest is."""
    return {"attend": attention.xla} if dtype == "float32" else {}


def mismatch(
    name: str, subject: Subject, mesh: Any, responses: Sequence[Trajectory], dtype: str
) -> Line:
    """How far responses' log-probs are from the trainer's, judged as a server's are after a sync."""
    longest = max(len(one.prompt) for one in responses), max(len(one.tokens) for one in responses)
    batch = updates.place(Collator(*longest)(responses), mesh)
    score = updates.make_score(Policy(subject.definition).logp())
    ours = batch.layout.to_rows(score(subject.params, batch.inputs))
    apart = np.abs(np.asarray(ours) - np.asarray(batch.sampler_logp))[np.asarray(batch.mask)]
    kind, value = ("max", apart.max()) if dtype == "float32" else ("mean", apart.mean())
    return at_most(name, value, TOLERANCE[dtype], f"{kind} ")


def offload(settings: Settings) -> Iterator[Line]:
    """Steps with moments in the host's memory, and a checkpoint that is written meanwhile."""
    mesh, moved = sharding.make_mesh(devices=jax.devices()[:1]), []
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        for beside in (False, True):
            trainer: Any = None  # the one before makes room
            step: Any = None
            subject = random_subject(SHAPES[settings.real], mesh, jnp.bfloat16)
            start, collate = _on_host(subject.params), Collator(32, 96, microbatches=2)
            trainer = Trainer(subject, mesh, collate, 8, rate=1e-4, offload=beside)
            step = trainer.steps(GRPO)
            for _ in range(2):
                step()
            ends = _on_host(trainer.state.params)
            moved.append([a - b for a, b in zip(ends, start, strict=True)])
        # two programs on a GPU, in bfloat16: roundings differ, and Adam makes full steps of them
        yield at_most("two steps, with offload or without", difference(*moved), 0.1)
        size, before = sum(x.nbytes for x in jax.tree.leaves(trainer.state)), _resident()
        saved, began = describe(trainer.state), time.monotonic()
        checkpoints = Checkpoints(Path(folder) / "run" / "checkpoints")
        checkpoints.save(1, trainer.state, {})
        yield Line("a checkpoint, until steps go on, s", f"{time.monotonic() - began:.1f}")
        step()
        checkpoints.wait()
        yield Line("a checkpoint, until it is on disk, s", f"{time.monotonic() - began:.1f}")
        same = describe(checkpoints.restore(1, trainer.state)) == saved
        yield Line("a checkpoint, restored", "same" if same else "other", "to the bit", same)
        held = f"state {size / GIB:.1f}"
        yield Line("memory of the host for it, GiB", f"{(_resident() - before) / GIB:.1f}", held)


def _resident() -> int:
    """The most bytes of the host's memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def training(settings: Settings) -> Iterator[Line]:
    """Compilation, speed and memory of optimizer steps in bfloat16 with recomputed layers."""
    name, shape = settings.model, SHAPES[settings.model]
    mesh, device = sharding.make_mesh(devices=jax.devices()[:1]), jax.devices()[0]
    rows, prompt, response = (4, 16, 48) if settings.rehearse else (16, 128, 896)
    if (needed := A_PARAMETER * qwen2.parameter_count(shape)) > (room := _room(device)):
        yield Line(f"{name}: update", why=f"{needed / GIB:.0f} GiB of {room / GIB:.0f} are needed")
        return
    with jax.set_mesh(mesh):
        collate = Collator(prompt, response, microbatches=2, pack=True)
        trainer = Trainer(random_subject(shape, mesh, jnp.bfloat16), mesh, collate, rows)
        credited, began = trainer.credited(GRPO), time.monotonic()
        compiled = trainer.compiled(GRPO, credited)
        yield Line(f"{name}: compiling an update, s", f"{time.monotonic() - began:.1f}")
        planned = compiled.memory_analysis().temp_size_in_bytes
        planned += local_bytes((trainer.state, trainer.batch, credited))
        seconds = timed(partial(trainer.step, compiled, credited))
    length = prompt + response
    work = flops.update(shape, tokens=rows * length, scored=rows * response, length=length)
    yield Line(f"{name}: update, tokens/s", f"{rows * length / seconds:,.0f}")
    if chip := machines.chip_of(device):
        used = f"{work / seconds / chip.flops:.1%}"
        yield Line(f"{name}: update, model FLOPs utilisation", used)
    yield peak(f"{name}: update, memory, GiB", device, planned)


def decoding(settings: Settings) -> Iterator[Line]:
    """Speed and memory of the embedded engine with all slots busy, its share of the bandwidth."""
    name, shape = settings.model, SHAPES[settings.model]
    mesh, device = sharding.make_mesh(devices=jax.devices()[:1]), jax.devices()[0]
    slots, prompt, tokens = (8, 32, 32) if settings.rehearse else (256, 128, 384)
    half, none = qwen2.Compute(dtype=jnp.bfloat16), cast(Any, None)
    limits, adam = Collator(prompt, tokens), optimizers.adamw(1e-6)
    config = Config(lambda folder: none, Scratch(shape, ()), GRPO, adam, limits, 1, slots, 1,
                    engine=Native(slots), compute=half)  # fmt: skip
    step = Step(config, shape, mesh, _room(device))
    weights, cache = local_bytes(step.weights), local_bytes(step.cache)
    [decode] = [program for program in step.programs() if program.name == "decode"]
    planned = peak_of(decode.compile().memory_analysis(), device.platform)
    planned += step.generator.static * weights  # the engine has a copy, with its layers apart
    with jax.set_mesh(mesh):
        subject = random_subject(shape, mesh, jnp.bfloat16, stored=jnp.bfloat16)
        with generating(subject, mesh, slots, slots, prompt) as generate:
            seconds = timed(partial(generate, Sampling(max_tokens=tokens)), 1)
    yield Line(f"{name}: decoding, tokens/s", f"{slots * tokens / seconds:,.0f}")
    if chip := machines.chip_of(device):
        filled = (prompt + tokens / 2) / (prompt + tokens)
        share = (weights + filled * cache) * tokens / seconds / chip.bandwidth
        yield Line(f"{name}: decoding, share of bandwidth", f"{share:.1%}")
    yield peak(f"{name}: decoding, memory, GiB", device, planned)


def _room(device: Any) -> int:
    """Bytes of memory that JAX has of a device."""
    return (device.memory_stats() or {}).get("bytes_limit", accelerators.host_memory())


def peak(name: str, device: Any, planned: int) -> Line:
    """The most memory that this process has had of a device, beside the plan."""
    if not (real := (device.memory_stats() or {}).get("peak_bytes_in_use")):
        return Line(name, why=f"a {device.platform} does not tell")
    near = abs(real - planned) <= max(MEMORY * real, GIB / 2)
    return Line(name, f"{real / GIB:.1f}", f"planned {planned / GIB:.1f}", near)


def served(settings: Settings) -> Iterator[Line]:
    """A vLLM server that shares the GPU: three syncs, each proved; log-probs and speed."""
    dtype, on_cpu = settings.dtype, settings.platform == "cpu"
    if not settings.vllm:
        yield Line(f"vLLM, {dtype}", why="no --vllm PYTHON")
        return
    accelerators.leave(SHARE)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    count, tokens = (16, 16) if settings.rehearse else (256, 256)
    shape = SHAPES[settings.small if dtype == "float32" else settings.real]
    variables = (("VLLM_CPU_KVCACHE_SPACE", "1"),) if on_cpu else ()
    eager = ("--enforce-eager",) if on_cpu else ()
    engine = Vllm(settings.vllm, dtype=dtype, max_model_len=512, share=SHARE, arguments=eager,
                  environment=variables)  # fmt: skip
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as logs:
        subject = random_subject(shape, mesh, jnp.dtype(dtype), **_exact(dtype))
        with engine.start(Policy(subject.definition), mesh, Path(logs)) as sampler:
            for i, what in enumerate(("start and sync", "sync 2", "sync 3")):
                params = jax.tree.map(lambda x, i=i: x * (1 + i / 64), subject.params)
                subject, began = subject._replace(params=params), time.monotonic()
                sampler.push(params, i)
                seconds, sync = time.monotonic() - began, sampler.sync
                rate = f"{sync['sync/bytes'] / seconds / 1e9:.2f} GB/s" if i else ""
                yield Line(f"{dtype}: {what}, s", f"{seconds:.1f}", rate)
                proved = sync["sync/proof"] == 1
                said = "proved" if proved else "not told"
                yield Line(f"{dtype}: {what}, all weights", said, "to the bit", proved)
            prompts = bench.random_prompts(shape.vocab_size, count, 32)
            began = time.monotonic()
            found = sampler.generate(prompts, n=1, sampling=Sampling(max_tokens=tokens))
            speed = count * tokens / (time.monotonic() - began)
            yield Line(f"{dtype}: sampling, tokens/s", f"{speed:,.0f}")
            yield mismatch(f"{dtype}: log-probs", subject, mesh, found, dtype)


def together(settings: Settings) -> Iterator[Line]:
    """A sum over all devices, and steps on all of them against steps on one."""
    if settings.rehearse:  # programs that queue up starve each other's sums where cores are few
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    devices, shape = jax.devices(), SHAPES[settings.small]
    if (count := len(devices)) == 1:
        yield Line("several devices", why="there is one")
        return
    mesh = sharding.make_mesh(devices=devices)
    size = 2**18 if settings.rehearse else 2**28  # numbers on a device
    with jax.set_mesh(mesh):
        apart, add = jax.P(mesh.axis_names), partial(jax.lax.psum, axis_name=mesh.axis_names)
        ones = jax.jit(
            partial(jnp.ones, count * size), out_shardings=jax.NamedSharding(mesh, apart)
        )()
        added = jax.jit(jax.shard_map(add, in_specs=apart, out_specs=jax.P()))
        seconds, right = timed(partial(added, ones)), bool((added(ones) == count).all())
    chip, sent = machines.chip_of(devices[0]), 2 * (count - 1) / count * 4 * size
    link = f"link {chip.link / 1e9:.0f}" if chip else ""
    yield Line(f"a sum over {count} devices, GB/s", f"{sent / seconds / 1e9:.1f}", link, right)
    start, steps = jax.device_get(qwen2.init(shape)), 2 if settings.rehearse else STEPS
    one, many = (numbers(some, shape, start, steps) for some in (devices[:1], devices))
    for what, most in (("log-probs", 1e-3), (f"{steps} steps", AFTER_STEPS * 1e-3)):
        yield at_most(f"{count} devices as one: {what}", difference(many[what], one[what]), most)


def meeting(settings: Settings) -> Iterator[Line]:
    """Two processes of this host, each with a device, join and gather; this one leaves JAX alone."""
    if settings.platform == "tpu" or (settings.platform == "gpu" and settings.devices == 1):
        yield Line("two processes", why="they need a GPU each")
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    began, anew = time.monotonic(), get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=anew) as pool:
        heard = [*pool.map(_member, range(2), [where] * 2)]
    seconds, right = f"{time.monotonic() - began:.1f}", heard == [[b"0", b"1"]] * 2
    yield Line("two processes meet and gather, s", seconds, "", right)


def _member(i: int, where: str) -> list[bytes]:
    """The bytes that one of them gathers."""
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[i % len(visible)]
    stop: Any = SimpleNamespace(requested=False, wants_save=False, save_is_due=False)
    with distributed.initialize(f"{i}/2@{where}", stop):
        return distributed.gather(str(i).encode())
