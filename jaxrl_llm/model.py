"""A model outside a run: `load` it, score tokens with `token_logps`, `generate` responses."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import Mesh
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, logprobs, qwen2, sharding, tokenizer
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.rollouts.engines import SLOTS, Native
from jaxrl_llm.rollouts.native import NativeSampler, by_padded_length, padded
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Prompt

SHORTEST = 64  # tokens to which shorter rows are padded: fewer programs to compile
AT_A_TIME = 2**14  # tokens that a device scores in one call
_ALONE = threading.Lock()  # models of one shape share a sampler, which has one's weights


@dataclass(frozen=True)
class Model:
    """Parameters on the devices of a mesh, the policy that computes with them, and the tokenizer.

    >>> model = jl.load("model")
    >>> model.shape.num_layers, model.mesh.size
    (2, 8)
    >>> model.tokenizer.decode(model.tokenizer.encode("one two"))
    'one two'
    """

    params: Any = field(repr=False)
    policy: Policy = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    shape: qwen2.Shape
    mesh: jax.sharding.Mesh


@dataclass(frozen=True)
class Response:
    """One response of a model: `logps` has the log-prob (nats) of each of the `tokens`.

    `text` leaves out the token that ends it, and is empty where the model has no tokenizer;
    `finished` is False if `max_tokens` cut it.

    >>> [response] = jl.generate(jl.load("model"), ["one two"], jl.Sampling(max_tokens=3))
    >>> len(response.tokens), response.finished
    (3, False)
    """

    text: str
    tokens: list[int]
    logps: list[float]
    finished: bool


def load(
    name: str | Path,
    *,
    adapter: str | Path | None = None,
    mesh: Mesh | jax.sharding.Mesh | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Model:
    """A model from a Hugging Face folder or hub name, with an `adapter` of PEFT merged into it.

    `mesh` says how parameters are sharded (None: over all devices); each device reads only its own
    slices of the files. Parameters are kept in `dtype` and computed with in it. Without files of a
    tokenizer it takes token ids alone. Raises a UserError that says what is wrong with a folder.

    >>> model = jl.load("model", mesh=jl.Mesh(tensor=2), dtype="bfloat16")
    >>> model.params["norm"]["weight"].dtype
    dtype(bfloat16)
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"load: dtype = {dtype!r} is neither float32 nor bfloat16")
    folder = hf.resolve(name)
    shape = hf.load_shape(folder)
    words = tokenizer.load_or_missing(folder)
    if not isinstance(mesh, jax.sharding.Mesh):
        sizes = mesh or Mesh()
        mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor)
    definition, _ = qwen2.graph(shape, qwen2.Compute(dtype=jnp.dtype(dtype)))
    params = hf.load(folder, shape, mesh, dtype)
    if adapter is not None:
        from jaxrl_llm.models import lora

        params = lora.merge(params, *lora.load(hf.resolve(adapter), shape, mesh))
    return Model(params, Policy(definition), words, shape, mesh)


def token_logps(
    model: Model,
    tokens: Sequence[Sequence[int]] | np.ndarray | jax.Array,
    lengths: Sequence[int] | np.ndarray | jax.Array | None = None,
    *,
    temperature: float = 1.0,
) -> np.ndarray:
    """Log-prob (nats) of each token of each row but the first, log p(x[t+1] | x[..t]): `[B, T-1]`.

    `tokens` are right-padded rows `[B, T]` with `lengths` `[B]` (None: rows are full), or lists of
    different lengths. The result is float32, and 0 where there is no token: log softmax(logits /
    temperature), as a trainer computes it. Rows are padded to powers of two, so few programs are
    compiled, and no `[B, T, V]` array is made. Raises a UserError for invalid input.

    >>> model = jl.load("model")
    >>> logps = jl.token_logps(model, [[2, 3, 4, 5], [6, 7]])
    >>> logps.shape, bool((logps[1, 1:] == 0).all())
    ((2, 3), True)
    """
    if not 0 < temperature < math.inf:
        raise UserError(f"token_logps: temperature = {temperature} must be a number above 0")
    rows, width = _rows("token_logps", tokens, lengths, model.shape)
    out = np.zeros((len(rows), max(width - 1, 0)), np.float32)
    for i, logps in _each(model, rows, _scorer(model.policy, float(temperature))):
        out[i, : len(rows[i]) - 1] = logps[: len(rows[i]) - 1]
    return out


def generate(
    model: Model,
    prompts: Sequence[Prompt | Sequence[int]],
    sampling: Sampling | None = None,
    *,
    n: int = 1,
    engine: Native | None = None,
) -> list[Response]:
    """`n` responses to each prompt in a flat list, by the embedded engine.

    A prompt is a text to go on with, messages for the model's chat template, or token ids.

    Responses end with a stop token of `sampling`, or of the tokenizer if it names none. They depend
    on their own prompt and `sampling` alone, not on the other prompts. Raises a UserError for bad
    input.

    >>> model = jl.load("model")
    >>> short = jl.Sampling(temperature=0.7, max_tokens=5)
    >>> responses = jl.generate(model, ["one two", [2, 3]], short, n=2)
    >>> [len(r.tokens) == len(r.logps) <= 5 for r in responses]
    [True, True, True, True]
    """
    sampling, engine = sampling or Sampling(), engine or Native()
    if isinstance(prompts, str):
        raise UserError("generate: prompts is a list, as in [prompt]")
    asked = [_tokens(model.tokenizer, prompt) for prompt in prompts]
    rows, longest = _rows("generate", asked, None, model.shape)
    require_room("generate", longest, sampling.max_tokens, model.shape.max_length)
    sampling = replace(sampling, stop=sampling.stop or model.tokenizer.stops)
    slots = min(engine.slots or SLOTS, padded(len(rows) * n))
    with _ALONE:
        sampler = _sampler(model.policy, model.mesh, replace(engine, slots=slots))
        sampler.push(model.params, 0)
        try:
            trajectories = sampler.generate([row.tolist() for row in rows], n=n, sampling=sampling)
        finally:
            sampler.release()
    reads, decode = model.tokenizer.reads, model.tokenizer.decode
    return [
        Response(
            decode(one.tokens, one.finished) if reads else "",
            list(one.tokens),
            list(one.logps),
            one.finished,
        )
        for one in trajectories
    ]


def require_room(caller: str, prompt: int, more: int, room: int) -> None:
    """A UserError unless a prompt of so many tokens, and so many `more`, fit into the model's context."""
    if prompt + more > room:
        raise UserError(
            f"{caller}: a prompt of {prompt} and {more} to come are {prompt + more} tokens, and the model has "
            f"room for {room}: lower max_tokens, or shorten the prompt"
        )


def _tokens(words: Tokenizer, prompt: Any) -> Sequence[int]:
    """Token ids of a prompt, which may be that already."""
    if isinstance(prompt, str):
        return words.encode(prompt)
    messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    return words.prompt(prompt) if messages else prompt


@lru_cache(maxsize=8)  # keeps the compiled programs for later calls
def _scorer(policy: Policy, temperature: float) -> Any:
    return jax.jit(policy.logp(temperature))


@lru_cache(maxsize=8)
def _sampler(policy: Policy, mesh: jax.sharding.Mesh, engine: Native) -> NativeSampler:
    with engine.start(policy, mesh) as sampler:
        return sampler


def _rows(
    caller: str, tokens: Any, lengths: Any, shape: qwen2.Shape
) -> tuple[list[np.ndarray], int]:
    """The tokens of each row without its padding, and T; a UserError if they are invalid."""

    def need(fine: bool, reason: str) -> None:
        if not fine:
            raise UserError(f"{caller}: {reason}")

    if isinstance(tokens, jax.Array):
        tokens = np.asarray(tokens)  # one transfer instead of one a row
    need(np.iterable(tokens), "tokens are rows of token ids: give [model.tokenizer.encode(text)]")
    rows = [np.asarray(row) for row in tokens]
    for i, row in enumerate(rows):
        need(row.ndim > 0, f"row {i} is no list of token ids: give [model.tokenizer.encode(text)]")
    width = max(map(len, rows), default=0)
    if lengths is not None:
        sizes = np.asarray(lengths)
        fine = (
            sizes.shape == (len(rows),)
            and sizes.dtype.kind in "iu"
            and all(0 <= n <= len(row) for n, row in zip(sizes, rows, strict=True))
        )
        need(fine, "lengths are one for each row, none longer than its row")
        rows = [row[:n] for row, n in zip(rows, sizes, strict=True)]
    for i, row in enumerate(rows):
        if size := len(row):
            need(row.dtype.kind in "iu" and row.ndim == 1, f"row {i} is no list of token ids")
            room, vocab = shape.max_length, shape.vocab_size
            need(size <= room, f"row {i} has {size} tokens, the model room for {room}")
            known = 0 <= row.min() <= row.max() < vocab
            need(known, f"row {i} has a token that is none of the model's {vocab}")
    return rows, width


def _each(model: Model, rows: list[np.ndarray], program: Any) -> list[tuple[int, np.ndarray]]:
    """The results of `program(params, inputs)` for each row that has a token to score, by its index."""
    spread = NamedSharding(model.mesh, P(sharding.BATCH))
    shards, results = model.mesh.shape["data"] * model.mesh.shape["fsdp"], []
    with jax.set_mesh(model.mesh):
        for some, shape in _calls(rows, shards):
            inputs = logprobs.of_sequences([rows[i] for i in some], *shape)
            placed = jax.tree.map(lambda x: sharding.put(x, spread), inputs)
            results.append((some, program(model.params, placed)))
        return [
            pair
            for some, values in results
            for pair in zip(some, sharding.on_host(values), strict=False)
        ]


def _calls(rows: list[np.ndarray], shards: int) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Batches of rows of similar length: their indices and padded shape; the longest first."""
    scored = [i for i, row in enumerate(rows) if len(row) > 1]
    for length, group in by_padded_length([len(rows[i]) for i in scored], SHORTEST).items():
        here = [scored[i] for i in group]
        each = min(padded(-(-len(here) // shards)), max(1, AT_A_TIME // length))
        for start in range(0, len(here), each * shards):
            yield here[start : start + each * shards], (each * shards, length)
