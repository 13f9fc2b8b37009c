"""The programs of a run's step, compiled for a mesh from shapes alone, without any data."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import storage
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.learning import imitate, update
from jaxrl_llm.learning.programs import Programs
from jaxrl_llm.models import families, hf, logprobs, lora, qwen2, sharding
from jaxrl_llm.models.policy import Policy, fewest_devices
from jaxrl_llm.models.primitives import merge_params
from jaxrl_llm.planning import flops
from jaxrl_llm.planning.machines import compiling_for
from jaxrl_llm.rollouts import native, slots
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.trajectory import Trajectory

BESIDE = ("optimizer", "reference", "teacher")  # arrays that may wait in the memory of the host


@runtime_checkable
class OfRows(Protocol):
    """Makes a `Supervised` task, and says before it reads any data whether that is `graded`."""

    graded: bool


@dataclass(frozen=True)
class Program:
    """A program of a step, with facts that its compiler does not know."""

    name: str
    compile: Callable[[], jax.stages.Compiled]
    beside: int = 0  # bytes of a device's memory taken meanwhile by arrays of other programs
    runs: float = 1  # how often it runs in a step; an average
    flops: int = 0  # of a step, on all devices
    moved: float = 0  # bytes that a device must read or write a run: weights, state, cache
    copied: int = 0  # bytes of a step between a device and the memory of its host, both ways
    recomputed: float = 0.0  # the share of `flops` that repeats some


@dataclass(frozen=True)
class Step:
    """The arrays of a step, as shapes with shardings, and its programs.

    `memory` is what a device has, in bytes.
    """

    config: Config
    shape: qwen2.Shape
    mesh: Mesh
    memory: int

    @property
    def samples(self) -> bool:
        """True if the run samples responses by the embedded engine, in steps or to validate."""
        config = self.config
        validates = not isinstance(config.task, OfRows) or config.task.graded
        return isinstance(config.engine, Native) and (config.steps > 0 or validates)

    @property
    def sharing_positions(self) -> int:
        """How many devices share the positions of hidden states between layers."""
        return self.mesh.shape["tensor"] if self.config.compute.sequence_parallel else 1

    @property
    def policy(self) -> Policy:
        """The model without its parameters."""
        return Policy(qwen2.graph(self.shape, self.config.compute)[0])

    @cached_property
    def state(self) -> update.TrainState:
        """Parameters that are trained, and optimizer state."""
        params = sharding.params_like(lora.trained(self.shape), self.mesh)
        offload = self.config.offloads("optimizer")
        return update.state_like(params, self.config.optimizer, offload=offload)

    @cached_property
    def frozen(self) -> Any:
        """The parameters that are not trained, None if all are."""
        if self.shape.lora is None:
            return None
        shapes = qwen2.graph(replace(self.shape, lora=None))[1]
        plain = jax.eval_shape(self.policy.cast_frozen, sharding.params_like(shapes, self.mesh))
        held = jax.tree.map(like, plain, sharding.param_shardings(shapes, self.mesh))
        return jax.tree_util.tree_map_with_path(lora.base_quantizer(self.shape), held)

    @cached_property
    def params(self) -> Any:
        """All parameters."""
        return merge_params(self.state.params, self.frozen)

    @cached_property
    def reference(self) -> Any:
        """The parameters of the reference policy; None where there is none."""
        if not self.config.keeps_reference:
            return None
        narrowed = jax.eval_shape(self.policy.cast_frozen, self.state.params)
        return jax.tree.map(
            lambda x, p: like(x, self._placed(p.sharding)), narrowed, self.state.params
        )

    @cached_property
    def teacher(self) -> tuple[qwen2.Shape, Any] | None:
        """The teacher's architecture and parameters; None where there is none."""
        if self.config.teacher is None:
            return None
        shape = model_shape(self.config.teacher)
        shapes, dtype = qwen2.graph(shape)[1], self.config.compute.dtype
        places = jax.tree.map(self._placed, sharding.param_shardings(shapes, self.mesh))
        return shape, jax.tree.map(partial(like, dtype=dtype), shapes, places)

    def _placed(self, place: NamedSharding) -> NamedSharding:
        """The sharding of a parameter, where those of a policy that only scores are kept."""
        return sharding.in_host_memory(place) if self.config.offloads("reference") else place

    @cached_property
    def batch(self) -> Any:
        """A batch in which every prompt and response has its longest length."""
        limit, rows = self.config.collate, self.config.prompts * self.config.group_size
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        tokens, logps = [0] * limit.response_length, [0.0] * limit.response_length
        longest = [Trajectory([0] * limit.prompt_length, tokens, logps)] * rows
        batch = update.place(replace(limit, shards=shards)(longest), self.mesh, like)
        if self.policy.experts is None or not self.config.engine.replay:
            return batch
        tokens, (layers, chosen, _) = batch.inputs.tokens, self.policy.experts
        experts = jax.ShapeDtypeStruct((*tokens.shape, layers, chosen), jnp.int16)
        inputs = batch.inputs._replace(experts=like(experts, tokens.sharding))
        return batch._replace(inputs=inputs)

    @cached_property
    def credited(self) -> update.Credited:
        """The batch with advantages and weights, as the update takes it."""
        return jax.tree.map(like, self._credit.out_info, self._credit.output_shardings)

    @cached_property
    def engine(self) -> Native:
        """The embedded engine, with numbers of slots and prompts that devices share evenly."""
        engine, devices = cast(Native, self.config.engine), self.mesh.size
        slots, rows = native.shared_out(engine.slots, engine.prefill_prompts, devices, devices)
        return replace(engine, slots=slots, prefill_prompts=rows)

    @property
    def prompt_columns(self) -> int:
        """Tokens of the longest prompt as the embedded engine pads it."""
        longest = self.config.longest_prompt(rows=isinstance(self.config.task, OfRows))
        return native.padded(longest, native.SHORTEST)

    @property
    def cache_columns(self) -> int:
        """Tokens of a slot for which the cache has room in the end."""
        return self.prompt_columns + self.config.collate.response_length

    @cached_property
    def generator(self) -> Any:
        definition, engine = self.policy.definition, self.engine
        shared = engine.devices_a_copy or fewest_devices(definition, self.mesh, self.memory)
        return self.policy.generator(
            self.mesh, block=engine.block, devices_a_copy=shared, routed=engine.replay
        )

    @cached_property
    def weights(self) -> Any:
        """The weights that the embedded engine reads."""
        params, generator = self.params, self.generator
        if generator.static:
            return generator.weights_like(params)
        plain = jax.eval_shape(partial(lora.merged, lora=generator.adapted), params)
        dtype = qwen2.settings(generator.definition)[1].dtype
        places = sharding.param_shardings(plain, generator.mesh)
        return jax.tree.map(partial(like, dtype=dtype), plain, places)

    @property
    def copies_weights(self) -> bool:
        """True if those are a copy, in another precision or sharding than the trainer's."""
        leaves = jax.tree.leaves(self.weights), jax.tree.leaves(self.params)
        same = lambda a, b: a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        return not (len(leaves[0]) == len(leaves[1]) and all(map(same, *leaves)))

    @property
    def beside_sampler(self) -> int:
        """Bytes of the trainer's arrays on a device while the engine reads its weights."""
        held = self._bytes("parameters", "frozen") if self.copies_weights else 0
        return self._bytes(*BESIDE) + held

    @cached_property
    def cache(self) -> Any:
        """Keys and values of all slots for the longest prompts and responses."""
        size = self.engine.slots, self.cache_columns
        with compiling_for(self.generator.mesh):
            empty = jax.jit(lambda weights: self.generator.empty(*size), keep_unused=True)
            shapes = jax.eval_shape(empty, self.weights)
            return jax.tree.map(like, shapes, empty.lower(self.weights).compile().output_shardings)

    @cached_property
    def prompts_read(self) -> int:
        """Bytes on a device of the prompts that were read together, until each response has a slot."""
        with compiling_for(self.generator.mesh):
            read = jax.eval_shape(self.generator.prefill, self.weights, *self._prompts)
        share = lambda slots, x: local_bytes(slots) * x.size // slots.size
        return sum(jax.tree.leaves(jax.tree.map(share, self.cache, read)))

    @property
    def _prompts(self) -> Any:
        """Tokens and lengths of prompts that are read together."""
        shape = (self.engine.prefill_prompts, self.prompt_columns)
        where = NamedSharding(self.generator.mesh, P())
        return [like(np.zeros(x, np.int32), where) for x in (shape, shape[:1])]

    @cached_property
    def on_hosts(self) -> dict[str, int]:
        """Bytes in a host's memory for each device, by the name of the arrays."""
        return {name: size for name, tree in self._beside.items() if (size := host_bytes(tree))}

    @property
    def _beside(self) -> dict[str, Any]:
        teacher = self.teacher and self.teacher[1]
        return dict(zip(BESIDE, (self.state.opt_state, self.reference, teacher), strict=True))

    @cached_property
    def on_device(self) -> dict[str, int]:
        """Bytes on one device by the name of the arrays, as far as shapes say."""
        config, params = self.config, local_bytes(self.state.params)
        parts = {"parameters": params, "frozen": local_bytes(self.frozen)}
        parts |= {name: local_bytes(x) - host_bytes(x) for name, x in self._beside.items()}
        parts = {name: size for name, size in parts.items() if size}
        if self.samples:
            parts["cache"] = local_bytes(self.cache)
            if self.copies_weights:
                parts["sampler's copy"] = local_bytes(self.weights)
        bins = self.batch.inputs.tokens
        sums = 2 if bins.shape[1] > 1 else 1  # a micro-batch's, and their sum
        parts["gradients"] = sums * params
        rows, length = bins.sharding.shard_shape(bins.shape)[2:]
        if config.compute.remat is jax.checkpoint:
            width = self.shape.hidden_size * jnp.dtype(config.compute.dtype).itemsize
            inputs = self.shape.num_layers * rows * length * width
            parts["inputs of layers"] = inputs // self.sharing_positions
        whole = 4 * rows * length * self.shape.vocab_size
        parts["logits at a time"] = min(logprobs.logit_bytes(), whole)
        return parts

    def programs(self, tokens: int = 0) -> list[Program]:
        """In the order of a step; `tokens` is the mean length of a response (0: the limit)."""
        tokens = tokens or self.config.collate.response_length
        work = flops.of_step(self.config, self.shape, tokens)
        sampling = self._sampling(tokens, work) if self.samples else []
        if self.config.steps:
            return sampling + self._learning(tokens, work)
        # a warm start scores nothing, and samples only to validate, which is no part of its steps
        sampling = [replace(program, runs=0, flops=0) for program in sampling]
        return sampling + self._learning(tokens, work)[-2:]

    def _sampling(self, tokens: int, work: Mapping[str, int]) -> list[Program]:
        config, limit, engine = self.config, self.config.collate, self.engine
        weights, cache = local_bytes(self.weights), local_bytes(self.cache)
        others, learned = self._bytes(*BESIDE), self.beside_sampler
        stride = native.STRIDE if self.generator.static else 1  # tokens a run
        turns = -(-config.prompts * config.group_size // engine.slots)
        filled = (limit.prompt_length + tokens / 2) / self.cache_columns
        gather = Program("gather", self._gather, beside=others)
        prefill = Program(
            "prefill",
            self._prefill,
            beside=learned + cache,
            runs=-(-config.prompts // engine.prefill_prompts),
            flops=work["prefill"],
            moved=weights,
        )
        decode = Program(
            "decode",
            partial(self._decode, stride),
            beside=learned + (self.prompts_read if turns > 1 else 0),
            runs=turns * tokens / stride,
            flops=work["decode"],
            moved=stride * (weights + filled * cache),
        )
        return [gather, prefill, decode] if self.generator.static else [prefill, decode]

    def _learning(self, tokens: int, work: Mapping[str, int]) -> list[Program]:
        config, limit = self.config, self.config.collate
        params, state = local_bytes(self.params), local_bytes(self.state[:2])
        frozen, moving = local_bytes(self.frozen), local_bytes(self.state.params)
        others, waiting = self._bytes(*BESIDE), self.on_hosts.get("reference", 0)
        filled = flops.read(config, tokens) / (limit.prompt_length + limit.response_length)
        share = filled if limit.pack else 1.0  # with packing, empty micro-batches are skipped
        steps = limit.minibatches * config.loss.stages
        slices = self.batch.inputs.tokens.shape[1]
        score = Program(
            "score",
            self._score,
            beside=others + waiting,
            runs=(1 + config.keeps_reference) * share,
            flops=work["score"],
            moved=limit.minibatches * slices * params,
            copied=waiting,
        )
        scores = [score, self._teaching(tokens, share)] if self.teacher else [score]
        credit = Program("credit", lambda: self._credit, beside=others)
        update = Program(
            "update",
            self._update,
            beside=self._bytes("reference", "teacher"),
            runs=share,
            flops=work["update"],
            # a micro-batch reads the weights twice and adds its gradients up: 2 reads, 1 write
            moved=steps * (2 * state + slices * (5 * moving + 2 * frozen)),
            copied=steps * 2 * host_bytes(self.state),
            recomputed=1 - work["update, nothing twice"] / work["update"],
        )
        return [*scores, credit, update]

    def _teaching(self, tokens: int, share: float) -> Program:
        assert self.teacher is not None
        (shape, params), waiting = self.teacher, self.on_hosts.get("teacher", 0)
        slices = math.prod(self.batch.inputs.tokens.shape[:2])
        return Program(
            "teacher",
            lambda: self._teacher.lower(params, self.batch.inputs).compile(),
            beside=self._bytes("parameters", "frozen", "optimizer", "reference") + waiting,
            runs=share,
            flops=flops.scoring(self.config, shape, tokens),
            moved=slices * local_bytes(params),
            copied=waiting,
        )

    @cached_property
    def _teacher(self) -> Any:
        """The program of the teacher's scores."""
        assert self.teacher is not None
        return self.config.teacher_score(self.teacher[0], self.shape.vocab_size)

    def _bytes(self, *parts: str) -> int:
        return sum(self.on_device.get(part, 0) for part in parts)

    def _sampled_by(self, program: Any, *arguments: Any) -> jax.stages.Compiled:
        """The program compiled for the mesh of the embedded engine."""
        with compiling_for(self.generator.mesh):
            return program.lower(*arguments).compile()

    def _gather(self) -> jax.stages.Compiled:
        return self._sampled_by(jax.jit(self.generator.weights), self.params)

    def _prefill(self) -> jax.stages.Compiled:
        return self._sampled_by(jax.jit(self.generator.prefill), self.weights, *self._prompts)

    def _decode(self, stride: int) -> jax.stages.Compiled:
        sampling, one = self.config.sampling, np.zeros((), np.int32)
        idle = slots.idle_slots(self.engine.slots, self.config.collate.response_length)
        everywhere = lambda x: like(x, NamedSharding(self.generator.mesh, P()))
        host = jax.tree.map(everywhere, (idle, slots.rules_of(sampling), one, one))
        program = slots.program(self.generator.decode, stride)
        return self._sampled_by(program, self.weights, self.cache, *host)

    @cached_property
    def _programs(self) -> Programs:
        return self.config.programs(self.policy, self.state)

    def _score(self) -> jax.stages.Compiled:
        return self._programs.score.lower(self.params, self.batch.inputs).compile()

    @cached_property
    def _credit(self) -> jax.stages.Compiled:
        config, objective, batch = self.config, self.config.loss, self.batch
        names = ["entropy"] + ["ref_logp"] * config.keeps_reference  # as a run scores them
        names += ["proxy_logp"] * objective.reads("proxy_logp")
        names += ["trainer_logp"] * (config.ratios == "sampler")
        place = batch.inputs.scored.sharding
        fields = dict.fromkeys(
            ["old_logp", *names], like(batch.layout.in_rows, place, dtype="float32")
        )
        if self.teacher:
            taught = jax.eval_shape(self._teacher, self.teacher[1], batch.inputs)
            taught = jax.tree.map(partial(like, sharding=place), taught)
            fields |= dict(zip(("teacher_logp", "teacher_top"), taught, strict=True))
        shape = (config.prompts, config.group_size)
        reward = jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(self.mesh, P()))
        program: Any = self._programs.credit
        return program.lower(batch, reward, **fields).compile()

    def _update(self) -> jax.stages.Compiled:
        program: Any = self._programs.update
        frozen = () if self.frozen is None else (self.frozen,)
        return program.lower(self.state, self.credited, *frozen).compile()


def first_phase(config: Config) -> Config:
    """The config, or if it has no steps of reinforcement its warm start's, as steps like those."""
    warm = config.warm_start
    if config.steps or warm is None:
        return config
    return replace(
        config,
        objective=imitate.IMITATION,
        optimizer=warm.optimizer,
        collate=warm.collate,
        prompts=warm.batch,
        group_size=1,
        reference=False,
        teacher=None,
        max_lag=0,
        max_resamples=0,
    )


def model_shape(model: Pretrained) -> qwen2.Shape:
    """The architecture of a pretrained model; for a preset without any file.

    A folder, which may have a preset's name, is read.
    """
    where, presets = Path(model.name).expanduser(), families.PRESETS
    known = presets.get(where.name) or presets.get(where.name.removesuffix("-Instruct"))
    if known is None or storage.is_url(model.name) or where.is_dir():
        known = hf.load_shape(hf.resolve(model.name, model.revision))
    return lora.shape_with_adapters(known, model.lora)


def like(x: Any, sharding: Any = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, with a sharding."""
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def local_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays or shapes on the first device, or in its host's memory for it."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def host_bytes(tree: Any) -> int:
    """Bytes of those that are in the host's memory for the first device."""
    waiting = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == sharding.HOST]
    return local_bytes(waiting)
