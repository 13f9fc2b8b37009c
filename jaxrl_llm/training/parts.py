"""A config to the parts that a run is made of: task, tokenizer, model, mesh, and its examples."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from jaxrl_llm import storage, userfile
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import reinforce, update
from jaxrl_llm.learning.answers import TokenTask
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, qwen2, sharding, tokenizer
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Mapped, Source, Task, check_members

E = TypeVar("E")
DATA = "~/.cache/jaxrl_llm"
SHARE = 4  # validation is at most a quarter of the training data


@dataclass(frozen=True)
class Parts:
    """What commands share; `source` is the Hugging Face folder of a pretrained model."""

    task: Task[Any]
    tokenizer: Tokenizer
    shape: qwen2.Shape
    policy: Policy
    mesh: jax.sharding.Mesh
    source: Path | None

    @property
    def like(self) -> Any:
        """The shapes and places of the parameters, nothing allocated."""
        return sharding.params_like(qwen2.graph(self.shape)[1], self.mesh)

    def fresh(self, seed: int) -> Any:
        """The parameters that a run starts from, in place, in float32."""
        places = sharding.param_shardings(qwen2.graph(self.shape)[1], self.mesh)
        if self.source is not None:
            return hf.load(self.source, self.shape, places, "float32")
        return qwen2.init(self.shape, seed, shardings=places)

    def programs(
        self, config: Config, like: update.TrainState, reference: Any
    ) -> reinforce.Programs:
        """The programs of a step of reinforcement, for states that lie as `like` does."""
        return reinforce.compiled(
            self.policy,
            config.objective,
            config.optimizer,
            self.collator(config.collate),
            self.mesh,
            like,
            group_size=config.group_size,
            reference=reference,
            temperature=config.sampling.temperature,
            order=config.order,
            sampler_ratios=config.ratios == "sampler",
            drop_even_groups=config.drop_even_groups,
        )

    def sampling(self, config: Config, **changes: Any) -> Sampling:
        """How responses are drawn, with the limit of the config and the stop tokens of the tokenizer."""
        limit = config.collate.response_length
        return replace(config.sampling, max_tokens=limit, stop=self.tokenizer.stops, **changes)

    def token_task(self, config: Config) -> TokenTask:
        """The task in tokens, with the rewards of the config."""
        return TokenTask(self.task, self.tokenizer, config.reward_threads, config.reward_seconds)

    def collator(self, collate: Collator) -> Collator:
        """The same limits, with bins that spread evenly over the batch axes of the mesh."""
        return replace(collate, shards=self.mesh.shape["data"] * self.mesh.shape["fsdp"])


def parts(config: Config, data: str | Path = DATA) -> Parts:
    """Builds or finds the data (in a folder, or under a URL), the tokenizer and the architecture.

    No parameter is read yet.
    """
    if isinstance(config.model, Pretrained):
        name = config.model.name
        source = hf.resolve(storage.local(name) if storage.is_url(name) else name)
        shape = hf.load_shape(source)
        words = tokenizer.load(source, hf.stop_tokens(source, shape.vocab_size))
    else:
        source, words, shape = None, tokenizer.of_words(config.model.words), config.model.shape
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    definition, _ = qwen2.graph(shape, config.compute)
    folder = storage.local(data).expanduser()
    with userfile.answering_for("the task cannot be made"):
        task = config.task(folder)
        check_members(task, "config: task")
    storage.push(folder)
    return Parts(task, words, shape, Policy(definition), mesh, source)


class Splits(NamedTuple):
    """Three disjoint choices of a task's examples: `validation` is taken out of its training data.

    `skipped` training examples have prompts that are too long to learn from.
    """

    train: Source[Any]
    validation: Source[Any]
    test: Source[Any]
    skipped: int


def splits(made: Parts, config: Config) -> Splits:
    """The examples of a run; a UserError for the first whose prompt cannot be used."""
    known = readable(made, made.task.train, config, "training")
    test = askable(made, made.task.test, config)
    train, validation = _set_aside(known, config.evaluation.validation)
    return Splits(train, validation, test, known.skipped)


def _set_aside(source: Source[E], validation: int) -> tuple[Source[E], Source[E]]:
    """Sets `validation` examples aside, one out of each of as many equal stretches of the training data.

    So they are like the rest where that is sorted; which of a stretch is drawn, for it may also go in cycles.
    """
    size = len(source)
    count = min(validation, size // SHARE)
    if count < 1:
        raise UserError(
            f"the training data has {size} examples: at least {SHARE} are needed, to set one aside for validation"
        )
    stretches = itertools.pairwise(i * size // count for i in range(count + 1))
    rng = np.random.default_rng(0)
    aside = {int(rng.integers(*stretch)) for stretch in stretches}
    rest = [i for i in range(size) if i not in aside]
    get = source.__getitem__
    return Mapped(rest, get), Mapped(sorted(aside), get)


def overlap(task: Task[Any], divided: Splits) -> str:
    """A line on examples of one split whose prompt is in another, if there are any.

    A UserError where the test data say nothing, because all of their prompts are trained on.
    """
    train, validation, test = (
        [task.prompt(source[i]) for i in range(len(source))] for source in divided[:3]
    )
    known = set(train)
    seen = sum(prompt in known for prompt in test)
    if seen == len(test):
        raise UserError(
            f"the prompts of all {seen} test examples are in the training data: give the task a test set "
            "of its own"
        )
    chosen_by = set(validation) - known
    counts = (
        (seen, "test prompts are in the training data"),
        (sum(p in chosen_by for p in test), "test prompts are in the validation data"),
        (sum(p in known for p in validation), "validation prompts are in the training data"),
    )
    said = [f"{count} {what}" for count, what in counts if count]
    return f"warning: {'; '.join(said)}" if said else ""


@dataclass(frozen=True)
class Readable(Generic[E]):
    """The examples of a source whose prompts fit the limit, and how many do not."""

    source: Source[E]
    index: list[int]
    skipped: int

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int, /) -> E:
        return self.source[self.index[i]]


def readable(made: Parts, source: Source[E], config: Config, name: str) -> Readable[E]:
    """Leaves out the examples with too long a prompt to learn from, or refuses them, as the config says."""
    limit, kept, skipped = config.collate.prompt_length, [], 0
    for i in range(len(source)):
        length = _prompt_length(made, source, i, name)
        if 0 < length <= limit:
            kept.append(i)
        elif config.long_prompts == "refuse":
            raise UserError(
                f"{name} example {i} has a prompt of {length} tokens, the limit is 1 to {limit}: "
                "raise prompt_length, or set long_prompts to 'skip'"
            )
        else:
            skipped += 1
    if not kept:
        raise UserError(
            f"the {name} data is empty: {skipped} examples were skipped for prompts of more than "
            f"{limit} tokens"
            if skipped
            else f"the {name} data is empty: it needs at least one example"
        )
    return Readable(source, kept, skipped)


def _prompt_length(made: Parts, source: Source[E], i: int, name: str) -> int:
    with userfile.answering_for(f"{name} example {i} has no prompt"):
        prompt = made.task.prompt(source[i])
        if not isinstance(prompt, str):
            raise TypeError(f"prompt() returned a {type(prompt).__name__}, not a str")
    return len(made.tokenizer.encode(prompt))


def askable(made: Parts, source: Source[E], config: Config) -> Source[E]:
    """The source, to test on: examples are only answered, so nothing but the model limits their prompts."""
    whole, engine = made.shape.max_length, config.engine
    more = ""
    if isinstance(engine, Vllm) and engine.max_model_len is not None:
        more = ", raise the engine's max_model_len" if engine.max_model_len < whole else ""
        whole = min(whole, engine.max_model_len)
    response = config.collate.response_length
    for i in range(len(source)):
        length = _prompt_length(made, source, i, "test")
        if not 0 < length <= whole - response:
            raise UserError(
                f"test example {i} has a prompt of {length} tokens, and {whole} is room for it and {response} to "
                f"come: lower response_length{more}, or leave the example out of the task"
            )
    if not len(source):
        raise UserError("the test data is empty: it needs at least one example")
    return source
