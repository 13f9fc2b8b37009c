"""The parts of a run, from its config: task, tokenizer, model, mesh, and the examples."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_llm import accelerators, storage, userfile
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import imitate, reinforce, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import Group, TokenTask
from jaxrl_llm.learning.programs import programs
from jaxrl_llm.models import hf, lora, qwen2, sharding, tokenizer
from jaxrl_llm.models.policy import ModelFolder, Policy, pretrained
from jaxrl_llm.models.primitives import merge_params
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.mixture import Mixture
from jaxrl_llm.tasks.task import (
    Evaluated,
    Mapped,
    Prompt,
    Relearned,
    RewardSettings,
    Source,
    Supervised,
    Task,
    TaskExample,
    TeacherPrompter,
    as_text,
    check_members,
)
from jaxrl_llm.training.fingerprint import written_out

E = TypeVar("E")
DATA = "~/.cache/jaxrl_llm"
PRETRAINED, TEACHER, DAY = "the pretrained model", "the teacher", "the day in prompts"
DATA_OF_TASK, TESTED = "the data of the task", "the test data"
TOKENIZER = "the tokenizer"  # with its chat template, and the tokens that end a response
KEPT = 2**16  # examples that are held once they are read, which may take 0.2 ms
SHARE = 4  # validation takes at most 1 / SHARE of the training data


@dataclass(frozen=True)
class Components:
    """All that a config makes; `source` is the folder of a pretrained model, or None.

    `base` are name and revision of that, by which adapters name it. `data` is the folder of data sets here.
    """

    config: Config
    task: Task[Any]
    tokenizer: Tokenizer
    shape: qwen2.Shape
    policy: Policy
    mesh: jax.sharding.Mesh
    source: Path | None
    base: tuple[str, str | None] = ("", None)
    data: Path = Path()

    @classmethod
    def make(cls, config: Config, data: str | Path = DATA) -> "Components":
        """Makes the task (`data`: a folder or URL for data sets), tokenizer, mesh and architecture.

        Reads no parameters. Raises a UserError if the task cannot be made.
        """
        accelerators.begin(config.shared)
        base = "", None
        if isinstance(config.model, Pretrained):
            base = config.model.name, config.model.revision
            source, shape, words = _read(config.model)
            shape = lora.shape_with_adapters(shape, config.model.lora)
        else:
            source, words, shape = None, tokenizer.of_words(config.model.words), config.model.shape
        mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        definition, _ = qwen2.graph(shape, config.compute)  # shapes alone: nothing is allocated
        if any(phase.collate.share_prompts for phase in (config, config.warm_start) if phase):
            shape.refuse_shared_prompts()
        folder = storage.local(data)  # a task may download into it, so it is pushed afterwards
        # code of the user's, which may raise anything: it is told as one line with their file and line
        with userfile.user_code("the task cannot be made"):
            task = config.task(folder)
            check_members(task, "config: task")
        if isinstance(task, Supervised) and (config.steps or not config.warm_start):
            raise UserError(
                f"config: the task {task.name!r} is learned by a warm start alone: set warm_start, and steps = 0"
            )
        names = [*task.shares] if isinstance(task, Mixture) else []
        if (best_by := config.evaluation.best_by) and best_by not in names:
            known = ", ".join(names) or "none, being no mixture"
            raise UserError(
                f"evaluation: best_by = {best_by!r} is no task of the mixture, which has {known}"
            )
        storage.push(folder)
        return cls(config, task, words, shape, Policy(definition), mesh, source, base, folder)

    @property
    def identity(self) -> dict[str, str]:
        """Versions of the tokenizer and the pretrained models, and a template's day; by their names."""
        folders = {PRETRAINED: self.source, TEACHER: self.teacher and self.teacher.folder}
        versions = {name: hf.version(folder) for name, folder in folders.items() if folder}
        versions |= {TOKENIZER: self.tokenizer.digest}
        return versions | ({DAY: self.tokenizer.day.isoformat()} if self.source else {})

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt, but of a test."""
        return self.config.longest_prompt(rows=isinstance(self.task, Supervised))

    @property
    def like(self) -> Any:
        """Shapes and shardings of the parameters that are trained; allocates nothing."""
        return sharding.params_like(lora.trained(self.shape), self.mesh)

    @cached_property
    def frozen(self) -> Any:
        """The parameters that are not trained, in the compute precision; None if all are."""
        if self.shape.lora is None or self.source is None:
            return None
        dtype = qwen2.settings(self.policy.definition)[1].dtype
        keep = lora.base_quantizer(self.shape)
        return hf.load(self.source, self.shape, self.mesh, dtype, keep=keep)

    @cached_property
    def teacher(self) -> ModelFolder | None:
        """The teacher's folder, shape and tokenizer; a UserError if it cannot score the policy's tokens."""
        if (model := self.config.teacher) is None:
            return None
        teacher, ours = _read(model), self.base[0] or "the policy"
        if other := self.tokenizer.difference(teacher.tokenizer):
            number, text, theirs = other
            raise UserError(
                f"teacher: token {number} is {text!r} in {ours} and {theirs!r} in {model.name}: the vocabularies "
                "have to be the same, so take another teacher"
            )
        if self.config.collate.share_prompts:
            teacher.shape.refuse_shared_prompts(f"the teacher {model.name}")
        limit = self.config.collate.prompt_length + self.config.collate.response_length
        if teacher.shape.max_length < min(limit, self.shape.max_length):
            raise UserError(
                f"teacher: {model.name} reads {teacher.shape.max_length} tokens, and prompt and response may have "
                f"{limit}: lower response_length, or take another teacher"
            )
        return teacher

    @property
    def _score_by_teacher(self) -> Callable[[Any], tuple[jax.Array, Any]] | None:
        """The program of `teacher_score` with the teacher's parameters, which are read."""
        if self.teacher is None:
            return None
        # read when the step is made and not before: a plan and a dry run have no room for it
        folder, shape, _ = self.teacher
        params = hf.load(folder, shape, self.mesh, self.config.compute.dtype)
        program = self.config.teacher_score(shape, self.shape.vocab_size)
        return partial(program, self.placed(params))

    @property
    def teacher_prompts(self) -> Callable[[Sequence[Any]], list[list[int] | None]] | None:
        """The token ids of the prompts that the teacher has of its own; None where it reads the policy's."""
        task = self.task
        if self.teacher is None or not isinstance(task, TeacherPrompter):
            return None

        @userfile.user_code("a teacher's prompt cannot be made")
        def ask(example: Any) -> list[int] | None:
            prompt = task.teacher_prompt(example)
            # as the policy reads its own: the tokens are the teacher's too
            return None if prompt is None else self.tokenizer.prompt(prompt)

        return lambda examples: [*map(ask, examples)]

    @property
    def graded(self) -> bool:
        """True if responses have rewards; rows to imitate may have none."""
        return not isinstance(self.task, Supervised) or self.task.graded

    def placed(self, params: Any) -> Any:
        """Parameters of a policy that only scores where they are kept: on devices, or in host memory."""
        return sharding.to_hosts(params) if self.config.offloads("reference") else params

    def merged(self, params: Any) -> Any:
        """All parameters of the model, from those that are trained."""
        return merge_params(params, self.frozen)

    def initial_params(self) -> Any:
        """The sharded parameters that a run starts from, in float32: read, or drawn by its seed."""
        # float32 whatever is computed in: an update of 1e-6 is lost in bfloat16
        if self.shape.lora is None and self.source is not None:
            return hf.load(self.source, self.shape, self.mesh, "float32")
        places, seed = jax.tree.map(lambda x: x.sharding, self.like), self.config.seed
        if self.shape.lora is None:
            return qwen2.init(self.shape, seed, shardings=places)
        # in one program, in which the compiler drops the base that is not asked for
        make = lambda: lora.adapters(qwen2.init(self.shape, seed))
        return jax.jit(make, out_shardings=places)()

    @cached_property
    def splits(self) -> "Splits":
        """The examples of a run; a UserError for the first whose prompt cannot be used."""
        learned = readable(self, _read_once(self.task.train), "training")
        test = askable(self, _read_once(self.task.test))
        # by prompt and not by example: two examples may ask the same
        train, validation, parts = self._divided(learned)
        whole, tested = hashlib.sha256(), hashlib.sha256()
        add(learned, whole)
        add(test, whole, tested)
        return Splits(
            learned.at(train),
            learned.at(validation),
            test.at(range(len(test))),
            parts,
            learned.skipped + test.skipped,
            # a run that goes on has to have the same data, wherever it comes from
            {DATA_OF_TASK: whole.hexdigest(), TESTED: tested.hexdigest()},
            _overlap(
                {learned.texts[i] for i in train},
                {learned.texts[i] for i in validation},
                test.texts,
            ),
        )

    def _divided(
        self, learned: "Prompted[Any]"
    ) -> tuple[list[int], list[int], list[tuple[int, float]]]:
        """Places to train on and for validation, and the parts of the former, a task after the other."""
        shares = self.task.shares if isinstance(self.task, Mixture) else {"": 1.0}
        by_task: dict[str, list[int]] = {name: [] for name in shares}
        for i in range(len(learned)):
            example = learned[i]
            by_task[example.name if isinstance(example, TaskExample) else ""].append(i)
        trained, validation = dict[str, list[int]](), list[int]()
        for (name, share), places in zip(shares.items(), by_task.values(), strict=True):
            count = round(share * self.config.evaluation.validation)
            train, aside = _set_aside([learned.texts[i] for i in places], count, name)
            trained[name] = [places[i] for i in train]
            validation += [places[i] for i in aside]
        # by prompt: an example in validation is never trained on under another number, or for another task
        asked = {learned.texts[i] for i in validation}
        for name, places in trained.items():
            trained[name] = [i for i in places if learned.texts[i] not in asked]
            if not trained[name]:
                raise UserError(f"mixture: all prompts of {name!r} are in the validation of others")
        parts = [(len(places), shares[name]) for name, places in trained.items()]
        return [i for places in trained.values() for i in places], validation, parts

    def sampling(self, examples: Source[Any] = (), **changes: Any) -> Sampling:
        """The config's sampling, with its limit of tokens and the tokenizer's stop tokens."""
        # responses are as long as rows have room for: one number says both
        limit = self.config.collate.response_length
        # rows to imitate may be as long as the model reads, and so may their prompts, nearly
        if isinstance(self.task, Supervised):
            prompts = (self.task.prompt(examples[i]) for i in range(len(examples)))
            longest = max((len(self.tokenizer.prompt(x)) for x in prompts), default=0)
            limit = min(limit, self.shape.max_length - longest)
        return replace(self.config.sampling, max_tokens=limit, stop=self.tokenizer.stops, **changes)

    @property
    def warm_steps(self) -> int:
        """Steps of the warm start, which may be counted in epochs of the data."""
        warm = self.config.warm_start
        if warm is None or warm.steps or not warm.epochs:
            return self.config.warm_steps
        return max(1, round(warm.epochs * len(self.splits.train) / warm.batch))

    def token_task(
        self,
        heartbeat: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
        *,
        evaluates: bool = False,
    ) -> TokenTask:
        """The task in tokens, with the config's settings for rewards; or that which evaluates."""
        threads, seconds = self.config.reward_threads, self.config.reward_seconds
        settings = RewardSettings(threads, seconds, heartbeat, stop_requested)
        task = self.task
        if evaluates:
            with userfile.user_code("the task of evaluations cannot be made"):
                # before Python 3.12 to ask whether it has one is to read it
                task = task.evaluated if isinstance(task, Evaluated) else task
        return TokenTask(task, self.tokenizer, settings)

    def as_learned(self, groups: Sequence[Group]) -> list[Group]:
        """The groups as they are learned from."""
        if not isinstance(self.task, Relearned):
            return [*groups]
        learned = userfile.user_code("a response cannot be learned from")(self.task.learned)
        changed = partial(learned, limit=self.config.collate.response_length)
        return [
            replace(group, trajectories=tuple(map(changed, group.trajectories))) for group in groups
        ]

    def collator(self, collate: Collator) -> Collator:
        """The same limits, with bins that spread evenly over the batch axes of the mesh."""
        # else a device would have nothing to do in the last micro-batch
        return replace(collate, shards=self.mesh.shape["data"] * self.mesh.shape["fsdp"])

    def held_out(
        self, params: Any, examples: Sequence[Any], between: Callable[[], object]
    ) -> float:
        """The loss of the warm start on other rows; `between` is called before each batch."""
        assert isinstance(self.task, Supervised)
        rows = [imitate.of_row(self.task, self.tokenizer, one) for one in examples]
        step, batch = self._scorer
        return step.held_out(params, rows, batch, between)

    @cached_property
    def _scorer(self) -> tuple[imitate.Step, int]:
        """A step of the warm start that makes none, and its batch."""
        warm = self.config.warm_start
        assert warm is not None
        return self.imitation(update.state_like(self.like, warm.optimizer)), warm.batch

    def imitation(self, like: update.TrainState) -> imitate.Step:
        """A step of the warm start, for states sharded like `like`."""
        warm = self.config.warm_start
        assert warm is not None
        made = programs(self.policy, imitate.IMITATION, warm.optimizer, like=like)
        return imitate.Step(made, self.collator(warm.collate), self.mesh, self.frozen)

    def step(self, like: update.TrainState, reference: Any) -> reinforce.Step:
        """A step of reinforcement, for states sharded like `like`."""
        config = self.config
        return reinforce.Step(
            config.programs(self.policy, like),
            config.loss,
            self.collator(config.collate),
            self.mesh,
            reference=reference,
            frozen=self.frozen,
            teacher=self._score_by_teacher,
            teacher_prompts=self.teacher_prompts,
            sampler_ratios=config.ratios == "sampler",
            drop_constant_groups=config.drop_constant_groups,
        )


def _read(model: Pretrained) -> ModelFolder:
    """The folder, shape and tokenizer of a config's model."""
    return pretrained(model.name, model.revision, chat=model.chat, day=model.day)


class Splits(NamedTuple):
    """A task's examples, with `validation` taken out of its training data.

    `parts` are the lengths of consecutive parts of `train`, a task each, with their shares of what
    is drawn. `skipped` examples are too long to learn
    from. `checksums` are those of all prompts and examples, and of the test's alone, by their names.
    `overlap` is a warning if test prompts are in another split.
    """

    train: Source[Any]
    validation: Source[Any]
    test: Source[Any]
    parts: Sequence[tuple[int, float]]
    skipped: int
    checksums: dict[str, str]
    overlap: str


def _overlap(train: Collection[str], validation: Collection[str], test: Sequence[str]) -> str:
    """A warning if test prompts are among the others; a UserError if all are trained on."""
    counts = {
        name: sum(prompt in among for prompt in test)
        for name, among in (("training", train), ("validation", validation))
    }
    # the rest of a test set still tells something
    if counts["training"] and all(prompt in train or prompt in validation for prompt in test):
        raise UserError(
            f"the prompts of all {len(test)} test examples are in the training data: give the task a test set "
            "of its own"
        )
    shared = [f"{n} test prompts are in the {name} data" for name, n in counts.items() if n]
    return f"warning: {'; '.join(shared)}" if shared else ""


def _read_once(source: Source[E]) -> Source[E]:
    """The source, whose examples are read once if there are no more than KEPT."""
    read = userfile.user_code("an example cannot be read")(source.__getitem__)
    return Mapped(range(len(source)), lru_cache(KEPT)(read))


def _set_aside(
    prompts: Sequence[str], validation: int, task: str = ""
) -> tuple[list[int], list[int]]:
    """Places to train on, and for validation a random prompt of each of so many equal stretches.

    Stretches make it like the rest in sorted data, random choice in data that goes in cycles. Other
    examples with a prompt that is moved are left out.
    """
    places: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        places.setdefault(prompt, []).append(i)
    each = [*places.values()]
    if len(prompts) < SHARE or len(each) < 2:
        raise UserError(
            f"the training data{task and f' of {task!r}'} has {len(prompts)} examples of {len(each)} different "
            f"prompts: at least {SHARE} are needed, of two prompts, to set one aside for validation"
        )
    count = max(1, min(validation, len(each) // SHARE))  # small data sets keep most to learn from
    stretches = itertools.pairwise(i * len(each) // count for i in range(count + 1))
    rng = np.random.default_rng(0)  # not the run's seed: seeds are compared on the same examples
    aside = [each[rng.integers(*stretch)] for stretch in stretches]
    return sorted({*range(len(prompts))}.difference(*aside)), [first for first, *_ in aside]


@dataclass(frozen=True)
class Prompted(Generic[E]):
    """The examples of a source whose prompts fit, with these; `skipped` is the number of the others."""

    source: Source[E]
    index: Sequence[int]
    prompts: list[Prompt]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int, /) -> E:
        return self.source[self.index[i]]

    @cached_property
    def texts(self) -> list[str]:
        """The prompts to be read."""
        return [*map(as_text, self.prompts)]

    def at(self, places: Sequence[int]) -> Source[E]:
        """The examples at these places, without their prompts."""
        return Mapped([self.index[i] for i in places], self.source.__getitem__)


def add(examples: Prompted[Any], *checksums: Any) -> None:
    """Adds all prompts and examples to these, which are hashlib's."""
    for i, prompt in enumerate(examples.prompts):
        line = f"{prompt}\0{written_out(examples[i])}\0".encode()
        for checksum in checksums:
            checksum.update(line)


def readable(components: Components, source: Source[E], name: str) -> Prompted[E]:
    """Skips examples whose prompts are too long to learn from, or raises (`long_prompts`).

    Of rows to imitate it is all of them that has to fit.
    """
    config, longest = components.config, components.shape.max_length
    # both phases read the same examples, so the longest response of the two decides
    responses = [phase.collate.response_length for phase in (config, config.warm_start) if phase]
    # positions end where the model's do, and rows where the collator's do
    # not below 0, or a message would name a limit that nobody understands
    limit = max(0, min(config.collate.prompt_length, longest - max(responses)))
    raised = "raise prompt_length"
    if limit < config.collate.prompt_length:
        raised = f"the model reads {longest}, {max(responses)} of them for responses: lower response_length"
    task, what = components.task, "prompts"
    if isinstance(task, Supervised):
        warm = config.warm_start
        assert warm is not None
        # the first token of a row is its prompt
        limit, what, raised = 1 + warm.collate.response_length, "rows", "raise its response_length"
        limit = min(limit, longest)
    # prompts are made once, here: the checksum and the search for overlaps read them again
    fit: dict[int, Prompt] = {}
    for_teacher = components.teacher_prompts or (lambda examples: [None])
    for i in range(len(source)):
        prompt, length = _prompt(components, source, i, name)
        if isinstance(task, Supervised):
            row = imitate.of_row(task, components.tokenizer, source[i])
            length = len(row.prompt) + row.size
        [theirs] = for_teacher([source[i]])
        longer, whose = max((length, ""), (len(theirs or ()), " for the teacher"))
        if length > 0 and longer <= limit:
            fit[i] = prompt
        elif config.long_prompts == "refuse":
            raise UserError(
                f"{name} example {i} has a {what[:-1]} of {longer} tokens{whose}, the limit is 1 to {limit}: "
                f"{raised}, or set long_prompts to 'skip'"
            )
    skipped = len(source) - len(fit)
    if not fit:  # with the reason, or one would look for the fault in the data
        raise UserError(
            f"the {name} data is empty: {skipped} examples were skipped for {what} of more than "
            f"{limit} tokens: {raised}"
            if skipped
            else f"the {name} data is empty: it needs at least one example"
        )
    return Prompted(source, [*fit], [*fit.values()], skipped)


def _prompt(components: Components, source: Source[E], i: int, name: str) -> tuple[Prompt, int]:
    """An example's prompt, and its number of tokens."""
    with userfile.user_code(f"{name} example {i} has no prompt"):
        prompt = components.task.prompt(source[i])
        if not isinstance(prompt, str) and not _messages(prompt):
            kind = type(prompt).__name__
            raise TypeError(f"prompt() returned a {kind}, not a str or a list of messages")
    try:
        return prompt, len(components.tokenizer.prompt(prompt))
    except UserError as error:
        raise UserError(f"{name} example {i}: {error}") from error


def _messages(prompt: Any) -> bool:
    """True for a list of messages."""
    fine = lambda one: isinstance(one, Mapping) and {"role", "content"} <= one.keys()
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(map(fine, prompt))


def askable(components: Components, source: Source[E]) -> Prompted[E]:
    """The test examples: only answered, so the model's context alone limits their prompts.

    Of rows to imitate it is all of them that has to fit.
    """
    if isinstance(components.task, Supervised):
        return readable(components, source, "test")
    config = components.config
    whole, engine = components.shape.max_length, config.engine
    more = ""
    if isinstance(engine, Vllm) and engine.max_model_len is not None:
        more = ", raise the engine's max_model_len" if engine.max_model_len < whole else ""
        whole = min(whole, engine.max_model_len)
    response, prompts = config.collate.response_length, []
    for i in range(len(source)):
        prompt, length = _prompt(components, source, i, "test")
        # never skipped: an accuracy on fewer examples could not be compared
        prompts.append(prompt)
        if not 0 < length <= whole - response:
            raise UserError(
                f"test example {i} has a prompt of {length} tokens, and {whole} is room for it and {response} to "
                f"come: lower response_length{more}, or leave the example out of the task"
            )
    if not len(source):
        raise UserError(
            "the test data is empty: it needs at least one example (of a table: --test, or --held-out above 0)"
        )
    return Prompted(source, range(len(source)), prompts)
