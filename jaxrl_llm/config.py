"""The configuration of a run: one frozen tree of dataclasses, built by `config()` in a user's file.

Choices of kind (objective, optimizer, engine, task) are functions or records of functions, amounts
are numbers. The defaults here are the only ones.
"""

import dataclasses
import datetime
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np
import optax

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError, at_least
from jaxrl_llm.learning import update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.programs import Programs, programs, teacher_score
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.tokenizer import EOS, PAD
from jaxrl_llm.objectives import Objective
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pretrained:
    """A model and its tokenizer, from a Hugging Face folder or hub name; families: docs/models.md.

    With `chat` a prompt is what the user says, put into the model's chat template (None: if it has
    one). With `lora` its
    weights stay as they are, in the precision of `Compute`, and adapters beside them are trained.

    `revision` is a commit, branch or tag at the hub (None: the newest; a resumed run takes the
    commit it began with, which is in its run.json). `day` is what a chat template takes for today
    (None: the day on which the run began).

    >>> jl.Pretrained("Qwen/Qwen2.5-3B").name
    'Qwen/Qwen2.5-3B'
    """

    name: str
    revision: str | None = None
    chat: bool | None = False
    lora: qwen2.Lora | None = None
    day: datetime.date | None = None


@dataclass(frozen=True)
class Scratch:
    """A randomly initialised model; its tokenizer knows `words`, a padding token and an end token.

    >>> tiny = jl.Shape(64, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, tied=True)
    >>> len(jl.Scratch(tiny, words=("yes", "no")).words)
    2
    """

    shape: qwen2.Shape
    words: tuple[str, ...]

    def __post_init__(self):
        if twice := [word for word, n in Counter((PAD, EOS, *self.words)).items() if n > 1]:
            raise UserError(f"model: the word {twice[0]!r} is there twice: name it once")
        if self.shape.lora:
            raise UserError("model: a model from scratch has no adapters: leave out lora")
        if len(self.words) + 2 > self.shape.vocab_size:
            raise UserError(
                f"model: {len(self.words)} words and 2 special tokens do not fit into "
                f"vocab_size={self.shape.vocab_size}"
            )


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh's axes; at most one may be -1: it takes the remaining devices.

    >>> jl.Mesh(data=2, tensor=4)  # fsdp is what is left: 2 of 16 devices
    Mesh(data=2, fsdp=-1, tensor=4)
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1


Offload = Literal["none", "optimizer", "reference", "both"]


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps before reinforcement, on demonstrations by the task or by `demonstration`.

    `steps` of 0 are as many as go through the examples so many `epochs`. It is evaluated every
    `evaluate_every` steps (0: only when it is over).

    >>> rows = jl.Collator(prompt_length=32, response_length=112)
    >>> jl.WarmStart(steps=600, collate=rows, optimizer=jl.optimizers.adamw(3e-4)).batch
    64
    """

    steps: int
    collate: Collator
    optimizer: optax.GradientTransformation
    batch: int = 64
    demonstration: Callable[[Any], str | Sequence[str]] | None = None
    evaluate_every: int = 0
    epochs: float = 0.0

    def __post_init__(self):
        at_least(0, "warm_start", self, "steps", "evaluate_every")
        if not 0 <= self.epochs < math.inf:
            raise UserError(f"warm_start: epochs = {self.epochs} must be a number from 0 on")
        at_least(1, "warm_start", self, "batch")
        at_least(1, "warm_start: collate", self.collate, "microbatches")
        if self.batch % self.collate.minibatches:
            raise UserError(
                f"warm_start: batch = {self.batch} does not divide into {self.collate.minibatches} mini-batches"
            )


@dataclass(frozen=True)
class Evaluation:
    """When and on which examples to measure accuracy (greedy decoding).

    Validation: every `every` steps (0: only before the first) and at the end, on `validation`
    examples held out of the training set (at most a quarter of it); they choose the best
    checkpoint. Test: once, at the end, by that checkpoint, on the first `examples` of the test set
    (0: all). `samples` = k > 0 adds k responses at `temperature` per prompt, for avg@k and pass@k.
    `by` names a field of rewards by which results are grouped (empty: no groups). Results of a mixture
    are grouped by its tasks, and the best checkpoint is that with the highest accuracy of the task
    `best_by` (empty: on the mean of the tasks).

    >>> jl.Evaluation(every=20, validation=500, samples=8).samples
    8
    """

    every: int = 20
    validation: int = 500
    examples: int = 0
    samples: int = 0
    temperature: float = 1.0
    by: str = ""
    best_by: str = ""

    def __post_init__(self):
        at_least(0, "evaluation", self, "every", "examples", "samples")
        at_least(1, "evaluation", self, "validation")
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"evaluation: temperature = {self.temperature} must be a number from 0 on"
            )


@dataclass(frozen=True)
class Config:
    """Everything that determines a run; a UserError if fields are invalid or contradict each other.

    `task(data_folder)` makes the task. A step draws `prompts` prompts and `group_size` responses to
    each; `max_tokens` and `stop` of `sampling` are set from `collate` and the tokenizer.
    `slots` of the embedded engine and `microbatches` of `collate` may be 0: a new run chooses what fits
    into the memory of its devices, and keeps to that.
    `reference` keeps the policy from before reinforcement (None: if the objective reads
    `ref_logp`). `teacher` is another model, of any family and size and with the policy's tokens, which
    scores the responses for objectives that read `teacher_logp`. `ratios` says whose log-probs are
    `old_logp`: recomputed by the trainer, or the sampler's, and then no factor or select may
    correct for the sampler. With `max_lag`
    k > 0 the responses of the next k steps are sampled meanwhile, so by weights up to k steps old;
    the engine needs weights of its own. `offload` keeps optimizer state, reference policy (and
    teacher) or both in host memory while unused.

    Training prompts over `collate.prompt_length` tokens are skipped and counted, or refused
    (`long_prompts`). `drop_constant_groups` learns nothing from groups of equal rewards; `max_resamples` puts
    groups of the next prompts in their place, in so many rounds at most. A response
    whose reward, or a step of whose environment, raises or takes `reward_seconds`, is ungraded:
    not learned from, and neither right nor wrong; the run ends if more than `max_ungraded` of the
    last steps' responses are ungraded.

    Samples are written every `show_samples_every` steps (0: never), and the numbers of each token of
    a step's first `keep_tokens` groups, for `jaxrl-llm view`; checkpoints every `save_every` steps,
    `save_minutes` after the last one (0: not by time) and at the end. Kept are the last
    `keep_checkpoints`, the newest and the best.

    Schedules in `optimizers` (by `scale_by_batches`) count batches; those in other optax
    transformations count optimizer steps, of which Lopti makes twice as many.

    >>> config = jl.Config(
    ...     task=lambda folder: ...,  # made when the run begins
    ...     model=jl.Pretrained("Qwen/Qwen2.5-3B"),
    ...     objective=jl.recipes.grpo(1024),
    ...     optimizer=jl.optimizers.adamw(1e-6),
    ...     collate=jl.Collator(prompt_length=400, response_length=1024),
    ...     steps=100,
    ... )
    >>> config.prompts * config.group_size
    512
    """

    task: Callable[[Path], Task]
    model: Pretrained | Scratch
    objective: Objective
    optimizer: optax.GradientTransformation
    collate: Collator
    steps: int
    prompts: int = 64
    group_size: int = 8
    sampling: Sampling = field(default_factory=Sampling)
    engine: engines.Engine = field(default_factory=engines.Native)
    warm_start: WarmStart | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    compute: qwen2.Compute = field(default_factory=qwen2.Compute)
    mesh: Mesh = field(default_factory=Mesh)
    offload: Offload = "none"
    order: Callable[[int, int], np.ndarray] = update.interleaved
    reference: bool | None = None
    teacher: Pretrained | None = None
    ratios: Literal["trainer", "sampler"] = "trainer"
    max_lag: int = 0
    long_prompts: Literal["skip", "refuse"] = "skip"
    drop_constant_groups: bool = False
    max_resamples: int = 0
    reward_threads: int = 1
    reward_seconds: float = 300.0
    max_ungraded: float = 0.5
    save_every: int = 20
    save_minutes: float = 15.0
    keep_checkpoints: int = 2
    show_samples_every: int = 20
    keep_tokens: int = 2
    seed: int = 0

    def __post_init__(self):
        _check_types(self)
        at_least(
            0,
            "config",
            self,
            "steps",
            "show_samples_every",
            "keep_tokens",
            "max_resamples",
            "max_lag",
        )
        counts = ("prompts", "group_size", "save_every", "keep_checkpoints", "reward_threads")
        at_least(1, "config", self, *counts)
        if not self.reward_seconds > 0:
            raise UserError(f"config: reward_seconds = {self.reward_seconds} must be above 0")
        if self.max_resamples and self.group_size == 1:
            raise UserError(
                f"config: max_resamples = {self.max_resamples} replaces groups of equal rewards, and a group of "
                "one response has none: set group_size above 1, or leave it out"
            )
        if not 0 <= self.save_minutes < math.inf:
            raise UserError(
                f"config: save_minutes = {self.save_minutes} must be a number from 0 on"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"config: seed = {self.seed} must be at least 0 and less than 2**32")
        if self.sampling.seed:
            logger.warning(
                "config: sampling.seed = %s has no use in a run, which draws by Config.seed",
                self.sampling.seed,
            )
        if self.prompts * self.group_size % self.collate.minibatches:
            raise UserError(
                f"config: {self.prompts * self.group_size} responses a step do not divide into "
                f"{self.collate.minibatches} mini-batches: choose prompts x group_size as a multiple of it"
            )
        self.loss.try_out()
        if self.max_lag:
            self._check_old_weights()
        if isinstance(self.engine, engines.Vllm):
            self._check_vllm(self.engine)
        if self.warm_start and self.warm_start.collate.prompt_length < self.collate.prompt_length:
            raise UserError(
                f"config: prompts of up to {self.collate.prompt_length} tokens are kept, and "
                f"warm_start.collate has room for {self.warm_start.collate.prompt_length}: make them equal"
            )
        if self.ratios == "sampler" and self.loss.corrects:
            raise UserError(
                "config: with ratios = 'sampler' old_logp is the sampler's, and a factor or select that looks at "
                "sampler_logp corrects nothing: set ratios = 'trainer', or leave it out"
            )
        if self.reference is False and self.loss.reads("ref_logp"):
            raise UserError(
                "config: reference = False, but the objective looks at ref_logp: leave reference out, or what "
                "looks at it, such as penalties"
            )

        of_teacher = self.loss.reads("teacher_logp", "teacher_top", "top_logp")
        if of_teacher != (self.teacher is not None):
            raise UserError(
                "config: there is a teacher, but the objective does not look at teacher_logp or teacher_top: take "
                "one that does, such as recipes.distillation"
                if self.teacher
                else "config: the objective looks at a teacher's log-probs: name a teacher"
            )
        if self.teacher and self.teacher.lora:
            raise UserError("config: a teacher is not trained: leave out its lora")

    def _check_vllm(self, engine: engines.Vllm) -> None:
        from jaxrl_llm.rollouts.vllm.sampler import refuse_distortion

        tried = (self.evaluation.temperature,) if self.evaluation.samples else ()
        for temperature in (self.sampling.temperature, *tried):
            refuse_distortion(replace(self.sampling, temperature=temperature), "config: ")
        longest = self.collate.prompt_length + self.collate.response_length
        if engine.max_model_len is not None and engine.max_model_len < longest:
            raise UserError(
                f"config: prompt and response may have {longest} tokens, max_model_len = {engine.max_model_len}: "
                "raise it in the engine"
            )

    def _check_old_weights(self) -> None:
        if not self.engine.own_weights:
            raise UserError(
                f"config: max_lag = {self.max_lag} needs an engine with weights of its own, as Vllm; "
                f"{type(self.engine).__name__} generates with the trainer's"
            )
        if self.ratios == "trainer" and not self.loss.allows_for_staleness:
            raise UserError(
                "config: with max_lag the sampler is behind the trainer: set ratios = 'sampler', or correct for "
                "it, as by factors.truncated"
            )

    @cached_property
    def loss(self) -> Objective:
        """The objective, tried on batches of this config's shapes."""
        batch = (self.prompts, self.group_size, self.collate.response_length)
        return replace(self.objective, tried_on=batch)

    def programs(self, policy: Policy, like: update.TrainState) -> Programs:
        """The programs of a step of reinforcement, which a run compiles and a plan foresees."""
        return programs(
            policy,
            self.loss,
            self.optimizer,
            like=like,
            temperature=self.sampling.temperature,
            order=self.order,
        )

    def teacher_score(self, shape: qwen2.Shape, tokens: int) -> Any:
        """The program of the scores of a teacher of this shape, for a policy with so many `tokens`."""
        teacher = Policy(qwen2.graph(shape, self.compute)[0])
        return teacher_score(teacher, self.sampling.temperature, self.loss, tokens)

    @property
    def warm_steps(self) -> int:
        """The steps of the warm start: reinforcement counts on from them."""
        return self.warm_start.steps if self.warm_start else 0

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return self.warm_steps + self.steps

    def saves(self, step: int) -> bool:
        """True if `step` has a regular checkpoint: every `save_every` steps, and the last."""
        return step % self.save_every == 0 or step == self.last_step

    @property
    def shared(self) -> float:
        """The part of the trainer's GPUs that servers take."""
        return (self.engine.share or 0.0) if isinstance(self.engine, engines.Vllm) else 0.0

    @property
    def sizes(self) -> dict[str, int]:
        """`slots` of the embedded engine and `microbatches`; 0 where a run is to choose what fits."""
        slots = {"slots": self.engine.slots} if isinstance(self.engine, engines.Native) else {}
        return slots | {"microbatches": self.collate.microbatches}

    def sized(self, sizes: Mapping[str, int]) -> "Config":
        """The config with these sizes where its own are 0."""
        new = {name: own or sizes.get(name, 0) for name, own in self.sizes.items()}
        collate, engine = replace(self.collate, microbatches=new["microbatches"]), self.engine
        if isinstance(engine, engines.Native):
            engine = replace(engine, slots=new["slots"])
        if (warm := self.warm_start) and not warm.steps:
            warm = replace(warm, steps=sizes.get("warm_steps", 0))
        return replace(self, collate=collate, engine=engine, warm_start=warm)

    def longest_prompt(self, *, rows: bool) -> int:
        """Tokens of the longest prompt, but of a test; of `rows` to imitate nearly all may be one."""
        return self.collate.prompt_length + (self.collate.response_length if rows else 0)

    @property
    def keeps_reference(self) -> bool:
        """True if the policy from before reinforcement is kept as the reference."""
        return self.loss.reads("ref_logp") if self.reference is None else self.reference

    def offloads(self, what: Literal["optimizer", "reference"]) -> bool:
        """True if the optimizer state, or the reference policy and the teacher, wait in host memory."""
        return self.offload in (what, "both")


def _check_types(config: Config) -> None:
    """Raises a UserError for the first field of a wrong type or with an unknown literal."""
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        kinds: Any = (
            () if one.type in (float, engines.Engine) else get_args(one.type) or (one.type,)
        )
        kinds = kinds if all(isinstance(kind, type) for kind in kinds) else ()
        if kinds and not (
            isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        ):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"config: {one.name} is a {type(value).__name__}, not a {names}")
        if get_origin(one.type) is Literal and value not in (known := get_args(one.type)):
            raise UserError(f"config: {one.name} = {value!r} is none of {', '.join(known)}")
    if not hasattr(config.engine, "start"):
        raise UserError(
            f"config: engine = {config.engine!r} has no start: it is Native() or Vllm()"
        )
    if not callable(config.task):
        raise UserError("config: task is a function of the data folder, as in lambda folder: ...")


def shipped() -> Path:
    """The folder of the configs that come with the package: in it, or beside it in a checkout."""
    package = Path(__file__).parent
    for path in (package / "configs", package.parent / "configs"):
        if path.is_dir():
            return path
    raise UserError(
        f"{package} was installed without its configs: they lie beside it, in configs/, when it is built"
    )


def named(word: str) -> Path:
    """The config file of a path, or of the name of one that comes with the package; a UserError for neither."""
    path = Path(word)
    if path.suffix or path.is_file():
        return path
    if not (ours := shipped() / f"{word}.py").is_file():
        hint = userfile.nearest(word, [one.stem for one in shipped().glob("*.py")])
        raise UserError(
            f"there is no config {word!r}{hint} (jaxrl-llm configs lists them; a path ends in .py)"
        )
    return ours


def load(path: Path | str) -> Callable[..., Config]:
    """The `config` function of a config file, also by a name as `kk_tiny`; a UserError if there is none."""
    path = named(str(path))
    make: Any = userfile.member(userfile.run(path, "config"), "config", f"config file {path}")
    if not callable(make):
        raise UserError(f"{path}: config is not a function; write def config(...) -> Config")
    try:
        get_type_hints(make)  # the command line makes flags of them
    except Exception as error:  # annotations are code and may raise anything
        raise UserError(f"{path}: an annotation of config() cannot be resolved: {error}") from error
    return cast(Callable[..., Config], make)


def build(make: Callable[..., Config], path: Path, *args: Any, **flags: Any) -> Config:
    """`make(...)`; its errors become UserErrors with file and line, or the nearest known field."""
    try:
        config = make(*args, **flags)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"{userfile.blame(path, error)}: {_nearest_field(error, make)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{userfile.blame(path, error)}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: config() returned a {type(config).__name__}, not a Config")
    return config


def _nearest_field(error: TypeError, make: Callable[..., Config]) -> str:
    message = re.sub(r"^(\w+)(\.__init__)?\(\)", r"\1", str(error).partition(". Did you mean")[0])
    unknown = re.match(r"(\w+) got an unexpected keyword argument '(\w+)'", message)
    kinds = (Config, Pretrained, Scratch, Mesh, WarmStart, Evaluation, Collator, Sampling, Objective,
             qwen2.Shape, qwen2.Compute, *engines.ENGINES)  # fmt: skip
    known = {kind.__name__: [f.name for f in dataclasses.fields(kind)] for kind in kinds}
    known["config"] = [*inspect.signature(make).parameters]
    if unknown is None or unknown[1] not in known:
        return message
    hint = userfile.nearest(unknown[2], known[unknown[1]], least=0.0)
    return f"{unknown[1]} has no field {unknown[2]!r}{hint}"
