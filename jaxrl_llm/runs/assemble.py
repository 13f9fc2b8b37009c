"""A config to the parts that a run is made of: task, tokenizer, model, mesh."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from jaxrl_llm import desk, userfile
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import reinforce, shares, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.stream import Cursor, Stream
from jaxrl_llm.learning.token_task import TokenTask
from jaxrl_llm.models import hf, qwen2, sharding, tokenizer
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampler, Sampling
from jaxrl_llm.runs import anchor
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Source, Task, check_members

E = TypeVar("E")


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
    def shardings(self) -> Any:
        """Where each parameter lies."""
        return sharding.param_shardings(qwen2.graph(self.shape)[1], self.mesh)

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


def parts(config: Config, data: Path) -> Parts:
    """Builds or finds the data (in a folder, or under a URL), the tokenizer and the architecture.

    No parameter is read yet.
    """
    if isinstance(config.model, Pretrained):
        source = hf.resolve(_at_hand(config.model.name))
        shape = hf.load_shape(source)
        words = tokenizer.load(source, hf.stop_tokens(source, shape.vocab_size))
    else:
        source, words, shape = None, tokenizer.of_words(config.model.words), config.model.shape
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    definition, _ = qwen2.graph(shape, config.compute)
    here = desk.at_hand(data)
    desk.fetch(here)
    with userfile.answering_for("the task cannot be made"):
        task = config.task(here)
        check_members(task, "config: task")
    desk.store(here)
    return Parts(task, words, shape, Policy(definition), mesh, source)


def _at_hand(model: str) -> str | Path:
    """The folder of a model under a URL, fetched; other names as they are."""
    here = desk.at_hand(Path(model))
    desk.fetch(here)
    return model if desk.place(here) is None else here


def fresh_params(config: Config, made: Parts) -> Any:
    """The parameters that the run starts from, in place, in float32."""
    if made.source is not None:
        return hf.load(made.source, made.shape, made.shardings, "float32")
    return qwen2.init(made.shape, config.seed, shardings=made.shardings)


def like_params(made: Parts) -> Any:
    """The shapes and places of the parameters, nothing allocated."""
    return sharding.params_like(qwen2.graph(made.shape)[1], made.mesh)


def reference(config: Config, made: Parts, kept: Path) -> Any:
    """The parameters of the reference policy, in the precision of the model, where they wait."""
    params = made.policy.narrowed(anchor.read(kept, like_params(made)))
    return sharding.to_hosts(params) if config.offloads("reference") else params


def stream(
    config: Config, made: Parts, sampler: Sampler, examples: Source[Any], cursor: Cursor | None
) -> Stream[Any]:
    """The training examples in batches, with responses by the sampler."""
    task, sampling = made.token_task(config), made.sampling(config)
    respond = partial(reinforce.respond, sampler, task, config.group_size, sampling, config.seed)
    whole = lambda examples, share: shares.whole(share, task.prompts(examples))
    return Stream(Batches(examples, config.prompts, seed=config.seed + 1), respond, cursor, whole)


def reinforcement(
    config: Config, made: Parts, like: update.TrainState, reference: Any
) -> reinforce.Programs:
    """The programs of the reinforcement phase, for states that lie as `like` does."""
    return reinforce.compiled(
        made.policy,
        config.objective,
        config.optimizer,
        made.collator(config.collate),
        made.mesh,
        like,
        group_size=config.group_size,
        reference=reference,
        temperature=config.sampling.temperature,
        order=config.order,
        sampler_ratios=config.ratios == "sampler",
        drop_even_groups=config.drop_even_groups,
    )


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


def first(source: Source[E], count: int) -> Source[E]:
    """The first `count` examples, all of them if 0."""
    return [source[i] for i in range(min(count, len(source)))] if count else source
