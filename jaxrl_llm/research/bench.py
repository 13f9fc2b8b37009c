"""Times an optimizer step, generation and compilation on this machine, against a floor.

The floor is the unavoidable arithmetic over the measured rate of a large matrix product. Programs
to compare run in turn (A B C A B C ...), so that the load of the machine is the same for all.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import tyro
from jax.typing import DTypeLike

from jaxrl_llm.errors import UserError, flags_at_least
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning import update as updates
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, logprobs, qwen2, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.primitives import precision
from jaxrl_llm.objectives import Objective, advantages, kl, partition
from jaxrl_llm.planning import flops
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.training import terminal

SMALL = qwen2.Shape(8192, 256, 704, 6, 4, 2, tied=True)
KEPT = jax.checkpoint_policies.save_only_these_names("product")
REMAT = partial(jax.checkpoint, policy=KEPT)
GRPO = Objective(advantage=advantages.grpo, penalties=((1e-3, kl.k3),))
TWO_STAGES = replace(GRPO, partition=partial(partition.random, share=0.5))
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
) -> None:
    """Time the train step: plain GRPO against Lopti, and its parts.

    Args:
        model: a folder or hub name; without it a small random model (about 6M parameters).
        rows: sequences in the batch.
        prompt_length: tokens of each prompt.
        response_length: tokens of each response.
        microbatches: gradient-accumulation slices.
        repeats: timed steps of each kind, after one that compiles; the median is shown.
        devices: how many to split the rows over; a CPU is cut into as many virtual ones.
        bfloat16: compute in bfloat16 instead of float32.
    """
    flags_at_least(1, rows=rows, prompt_length=prompt_length, response_length=response_length,
                 microbatches=microbatches, repeats=repeats, devices=devices)  # fmt: skip
    if rows % microbatches:
        raise UserError(f"{rows} rows do not divide into {microbatches} micro-batches")
    console = terminal.plain(soft_wrap=False)
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    if devices > len(jax.devices()):
        raise UserError(f"--devices {devices}: this machine has {len(jax.devices())}")
    mesh = sharding.make_mesh(devices, 1, 1, jax.devices()[:devices])
    length = prompt_length + response_length
    with jax.set_mesh(mesh):
        subject = load_subject(model, mesh, bfloat16)
        parameters = sum(x.size for x in jax.tree.leaves(subject.params))
        work = flops.update(
            subject.shape, tokens=rows * length, scored=rows * response_length, length=length
        )
        rate = matmul_rate(subject.dtype)
        console.print(
            f"{parameters / 1e6:.1f}M parameters, {rows} x ({prompt_length} + {response_length}) "
            f"tokens, {jax.devices()[0].device_kind}, "
            f"matmul {rate / 1e9:.0f} GFLOP/s, arithmetic of a step {work / 1e12:.2f} TFLOP"
        )
        collate = Collator(
            prompt_length, response_length, microbatches=microbatches, shards=devices
        )
        trainer = Trainer(subject, mesh, collate, rows)
        del subject  # the steps donate its parameters
        steps = {PLAIN: trainer.steps(GRPO), LOPTI: trainer.steps(TWO_STAGES)}
        seconds = in_turn({**steps, **_parts(trainer)}, repeats, console)
    plain = np.median(seconds[PLAIN])
    columns: Columns = {
        "tokens/s": lambda name, s: f"{rows * length / s:,.0f}" if name in steps else "",
        "x floor": lambda name, s: f"{s * rate / work:.2f}" if name in steps else "",
        "x plain": lambda _, s: f"{s / plain:.2f}",
    }
    console.print(table("", seconds, columns))


def _parts(trainer: "Trainer") -> dict[str, Callable[[], Any]]:
    """The parts of a train step, by name."""
    batch = trainer.batch
    micro, count = jax.tree.map(lambda x: x[0, 0], batch.inputs), batch.inputs.tokens.shape[1]
    model = lambda params: qwen2.nnx.merge(trainer.definition, params)
    size = (*micro.index.shape, model(trainer.state.params).shape.hidden_size)
    hidden = jax.random.normal(jax.random.key(0), size)
    layers = jax.jit(
        jax.grad(lambda p: model(p)(micro.tokens, micro.positions, micro.segments).sum())
    )
    scored = lambda h, w: logprobs.chunked(h, w, micro.target, micro.scored).logp.sum()
    head = jax.jit(jax.grad(scored, argnums=(0, 1)))
    move = trainer.optimizer.update
    adam = jax.jit(lambda s: move(s.params, s.opt_state, s.params, step=s.step)[1])
    return {
        "scoring (forward)": lambda: trainer.score(trainer.state.params, batch.inputs),
        f"layers (1 of {count} micro-batches)": lambda: layers(trainer.state.params),
        f"log-probs (1 of {count} micro-batches)": lambda: head(
            hidden, model(trainer.state.params).head
        ),
        "AdamW": lambda: adam(trainer.state),
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
) -> None:
    """Time generation by the embedded engine: greedy, sampled, top-p.

    Args:
        model: a folder or hub name; without it a small random model (about 6M parameters).
        sequences: how many prompts, all different, one response each.
        prompt_length: tokens of each prompt.
        new_tokens: tokens of each response.
        slots: sequences that decode at a time.
        repeats: timed rounds of each kind, after one that compiles; the median is shown.
        bfloat16: compute in bfloat16 instead of float32.
    """
    flags_at_least(1, sequences=sequences, prompt_length=prompt_length, new_tokens=new_tokens,
                 slots=slots, repeats=repeats)  # fmt: skip
    console = terminal.plain(soft_wrap=False)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        subject = load_subject(model, mesh, bfloat16)
        length, total = prompt_length + new_tokens, sequences * new_tokens
        work = flops.forward(subject.shape, tokens=sequences * length, scored=total, length=length)
        rate = matmul_rate(subject.dtype)
        console.print(
            f"{sequences} x ({prompt_length} + {new_tokens}) tokens, {jax.devices()[0].device_kind}, matmul "
            f"{rate / 1e9:.0f} GFLOP/s: arithmetic alone allows {total * rate / work:,.0f} tokens/s"
        )
        kinds = {
            "greedy": Sampling(temperature=0.0, max_tokens=new_tokens),
            "temperature 1": Sampling(max_tokens=new_tokens),
            "top-p 0.95": Sampling(top_p=0.95, max_tokens=new_tokens),
        }
        with generating(subject, mesh, slots, sequences, prompt_length) as generate:
            ours = {name: partial(generate, sampling) for name, sampling in kinds.items()}
            seconds = in_turn(ours, repeats, console)
    columns: Columns = {
        "tokens/s": lambda _, s: f"{total / s:,.0f}",
        "x floor": lambda _, s: f"{s * rate / work:.2f}",
    }
    console.print(table("", seconds, columns))


def compilation(*, layers: tuple[int, ...] = (4, 28), repeats: int = 3) -> None:
    """Time tracing and compiling the train step at several depths.

    Args:
        layers: depths, taken in turn; ratios are against the first.
        repeats: compilations of each depth; the median is shown.
    """
    if not layers:
        raise UserError("--layers wants at least one depth")
    flags_at_least(1, layers=min(layers), repeats=repeats)
    console, mesh = terminal.plain(soft_wrap=False), sharding.make_mesh(devices=jax.devices()[:1])
    runs: dict[str, Callable[[], Any]] = {}
    with jax.set_mesh(mesh):
        for depth in layers:
            subject = random_subject(replace(SMALL, num_layers=depth), mesh, jnp.float32)
            trainer = Trainer(subject, mesh, Collator(128, 128), rows=4)
            runs[str(depth)] = partial(trainer.compiled, TWO_STAGES, trainer.credited(TWO_STAGES))
        seconds = in_turn(runs, repeats, console, warm=False)
    first = np.median(seconds[str(layers[0])])
    ratio: Columns = {f"x {layers[0]} layers": lambda _, s: f"{s / first:.2f}"}
    console.print(table("layers", seconds, ratio))


Quantity = Literal["response", "depth", "width", "vocabulary", "group", "prompts"]
GROWN = {  # fields of a shape that double, where a quantity is no field of a `Load`
    "depth": ("num_layers",),
    "width": ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
    "vocabulary": ("vocab_size",),
}
FIRST = qwen2.Shape(2048, 128, 352, 4, 4, 2, tied=True)
VISIBLE = 0.15  # of an exponent


@dataclass(frozen=True)
class Load:
    """Prompts, responses to each, and tokens of each prompt and response; at first, if they grow."""

    prompts: int = 4
    group: int = 4
    prompt: int = 32
    response: int = 128


def growth(
    model: str | None = None,
    /,
    *,
    load: Annotated[Load, tyro.conf.arg(name="")] = Load(),
    quantities: tuple[Quantity, ...] = get_args(Quantity),
    doublings: int = 3,
    repeats: int = 3,
) -> None:
    """Time updates and rollouts as one size doubles: their exponents, and that of arithmetic.

    An update is all from a rollout on: collation, old log-probs, the train step.

    Args:
        model: a folder or hub name whose shape is the first, else a small one; weights are random.
        quantities: what doubles, one after the other.
        doublings: of each; exponents are fitted to the upper three sizes.
        repeats: timed rounds, after one that compiles; medians are shown.
    """
    flags_at_least(1, **vars(load), doublings=doublings, repeats=repeats)
    first: Any = (hf.load_shape(hf.resolve(model)) if model else FIRST, load)
    console, mesh = terminal.plain(soft_wrap=False), sharding.make_mesh(devices=jax.devices()[:1])
    heads = ("", "sizes", "update, s", "exponent", "rollout, s", "exponent", "of arithmetic")
    table = rich.table.Table(*heads, caption=f"* above arithmetic's by more than {VISIBLE}")
    known, slots = vars(first[0]) | vars(load), load.prompts * load.group
    for quantity in quantities:
        names, sizes, floors, runs = GROWN.get(quantity, (quantity,)), [], [], {}
        with jax.set_mesh(mesh):
            for i in range(doublings + 1):
                now = known | {name: 2**i * known[name] for name in names}
                shape, more = (replace(x, **{name: now[name] for name in vars(x)}) for x in first)
                rows, length = more.prompts * more.group, more.prompt + more.response
                size = {"tokens": rows * length, "scored": rows * more.response, "length": length}
                sizes.append(now[names[0]])
                floors.append(flops.forward(shape, **size))
                runs[f"update {i}"], runs[f"rollout {i}"] = _programs(shape, more, mesh, slots)
            seconds = [float(np.median(each)) for each in in_turn(runs, repeats, console).values()]
        cells, least = [], exponent(sizes, floors)
        for medians in (seconds[::2], seconds[1::2]):
            p, shown = exponent(sizes, medians), "  ".join(f"{x:.2g}" for x in medians)
            cells += [shown, f"{p:.2f}{' *' * (p > least + VISIBLE)}"]
        table.add_row(quantity, "  ".join(map(str, sizes)), *cells, f"{least:.2f}")
    console.print(table)


def _programs(shape: qwen2.Shape, load: Load, mesh: Any, slots: int) -> Any:
    """Functions that make an update and a rollout."""
    subject = random_subject(shape, mesh, jnp.float32, remat=REMAT)
    copied = subject._replace(params=jax.tree.map(jnp.copy, subject.params))  # steps donate them
    rows, collate = load.prompts * load.group, Collator(load.prompt, load.response, microbatches=4)
    trainer = Trainer(copied, mesh, collate, rows)
    made = random_responses(shape.vocab_size, rows, load.prompt, load.response)
    reward, sampling = trainer.reward.reshape(-1, load.group), Sampling(max_tokens=load.response)
    with generating(subject, mesh, slots, load.prompts, load.prompt, load.group) as generate:
        return partial(trainer.updates(GRPO), made, reward), partial(generate, sampling)


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """p of costs ~ sizes^p: least squares of the logarithms, over the upper three."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(costs[-3:]), 1)[0])


class Subject(NamedTuple):
    """The model to measure, and the precision that it computes in."""

    shape: qwen2.Shape
    definition: Any
    params: Any
    dtype: Any


class Trainer:
    """Train steps on one batch, of random tokens if not given; they share a state, which each donates."""

    def __init__(
        self, subject: Subject, mesh: Any, collate: Collator, rows: int, rate: float = 1e-6,
        responses: Sequence[Trajectory] = (), offload: bool = False,
    ):  # fmt: skip
        sizes = (rows, collate.prompt_length, collate.response_length)
        self.definition, self.optimizer = subject.definition, optimizers.adamw(rate)
        self.policy = partial(logprobs.of_responses, subject.definition)
        self.score = updates.make_score(self.policy)
        self.place = lambda responses: updates.place(collate(responses), mesh)
        self.batch = self.place(responses or random_responses(subject.shape.vocab_size, *sizes))
        self.old_logp = self.score(subject.params, self.batch.inputs)
        reward = np.random.default_rng(0).normal(size=(1, rows)).astype(np.float32)
        self.reward = sharding.replicated(reward, mesh)
        self.state = updates.init_state(subject.params, self.optimizer, offload=offload)

    def credited(self, objective: Objective) -> updates.Credited:
        """The batch with the credit of an objective; the policy is its own reference."""
        old = self.old_logp
        return updates.make_credit(objective)(self.batch, self.reward, old_logp=old, ref_logp=old)

    def compiled(self, objective: Objective, credited: updates.Credited) -> Any:
        """The train step of an objective, traced and compiled anew."""
        where = jax.tree.map(lambda x: x.sharding, self.state)
        step: Any = updates.make_train_step(self.policy, objective, self.optimizer, shardings=where)
        return step.lower(self.state, credited).compile()

    def step(self, compiled: Any, credited: updates.Credited) -> Any:
        """Makes the next step of the shared state by a compiled one; state and metrics."""
        self.state, metrics = compiled(self.state, credited)
        return self.state, metrics

    def steps(self, objective: Objective) -> Callable[[], Any]:
        """A function that makes the next step by an objective."""
        credited = self.credited(objective)
        return partial(self.step, self.compiled(objective, credited), credited)

    def updates(self, objective: Objective) -> Callable[[Sequence[Trajectory], Any], Any]:
        """A function of responses and their rewards `[P,G]`: collates, scores and makes a step."""
        program = self.compiled(objective, self.credited(objective))
        credit = updates.make_credit(objective)

        def update(responses: Sequence[Trajectory], reward: Any) -> Any:
            batch = self.place(responses)
            old = self.score(self.state.params, batch.inputs)
            return self.step(program, credit(batch, reward, old_logp=old, ref_logp=old))[1]

        return update


@contextmanager
def generating(
    subject: Subject, mesh: Any, slots: int, sequences: int, prompt: int, n: int = 1
) -> Iterator[Callable[[Sampling], list[Trajectory]]]:
    """A function that answers `sequences` random prompts with the embedded engine, each n times."""
    prompts = random_prompts(subject.shape.vocab_size, sequences, prompt)
    with engines.Native(slots=slots).start(Policy(subject.definition), mesh) as sampler:
        sampler.push(subject.params, 0)
        yield lambda sampling: sampler.generate(prompts, n=n, sampling=sampling)


def random_prompts(vocab: int, rows: int, length: int) -> list[list[int]]:
    """Prompts of random tokens."""
    return np.random.default_rng(0).integers(0, vocab, (rows, length)).tolist()


def random_responses(vocab: int, rows: int, prompt: int, response: int) -> list[Trajectory]:
    """Prompts and responses of random tokens, all of full length."""
    rng = np.random.default_rng(0)
    both = (rng.integers(0, vocab, (rows, n)).tolist() for n in (prompt, response))
    return [
        Trajectory(asked, tokens, [0.0] * response) for asked, tokens in zip(*both, strict=True)
    ]


def random_subject(
    shape: qwen2.Shape, mesh: Any, dtype: Any, *, stored: Any = jnp.float32, **compute: Any
) -> Subject:
    """A model of random parameters, which are of the dtype `stored`."""
    definition, shapes = qwen2.graph(shape, qwen2.Compute(dtype=dtype, **compute))
    where = sharding.param_shardings(shapes, mesh)
    return Subject(shape, definition, qwen2.init(shape, dtype=stored, shardings=where), dtype)


def load_subject(model: str | Path | None, mesh: Any, bfloat16: bool) -> Subject:
    """A pretrained model, or a small random one."""
    dtype: Any = jnp.bfloat16 if bfloat16 else jnp.float32
    if model is None:
        return random_subject(SMALL, mesh, dtype, remat=REMAT)
    folder = hf.resolve(model)
    shape = hf.load_shape(folder)
    definition, _ = qwen2.graph(shape, qwen2.Compute(dtype=dtype, remat=REMAT))
    return Subject(shape, definition, hf.load(folder, shape, mesh, jnp.float32), dtype)


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
                result = run()
                jax.block_until_ready(result)
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


Columns = Mapping[str, Callable[[str, float], str]]
"""the cell of a program, by its name and median of seconds"""


def table(title: str, seconds: Mapping[str, list[float]], columns: Columns) -> rich.table.Table:
    """A row for each program: median and range of its seconds, and the columns."""
    table = rich.table.Table(title, "seconds", "range", *columns)
    for name, values in seconds.items():
        middle = float(np.median(values))
        cells = [cell(name, middle) for cell in columns.values()]
        table.add_row(name, f"{middle:.3f}", f"{min(values):.3f} - {max(values):.3f}", *cells)
    return table


def matmul_rate(dtype: DTypeLike) -> float:
    """Measured FLOP/s of a 2048-cubed matrix product, as models have them: a practical ceiling here."""
    n = 2048
    x = jax.random.normal(jax.random.key(0), (n, n), dtype)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision=precision(x, x)))
    product(x).block_until_ready()
    best = np.inf
    for _ in range(8):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
