"""A sampler whose responses come from vLLM servers, each a process of its own.

One request is one turn of a response, its prompt all tokens before that. Its seed is a function of
(sampling seed, prompt, number of the response), so any server may answer it, in any batch, at any
attempt. If a server dies, only the turns it was working on are lost; they are requested again,
there or elsewhere.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.sampler import Draft, Reply, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.rollouts.vllm.client import NoAnswer, NoRoute, Patience, Response, Server, run, tasks
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE, Proof, Proved, probe_sequences
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION
from jaxrl_llm.rollouts.vllm.sync import WeightSync, load, load_adapters, loading

BATCHED = 256  # requests, of a server that cannot tell: vLLM's limit on most GPUs


@runtime_checkable
class ServedTensors(Protocol):
    """A config and tensors for a server, and the trainer's checksums to verify it by."""

    def config(self, params: Any, dtype: str) -> dict[str, Any]: ...

    def tensors(self, params: Any, dtype: str) -> Iterable[tuple[str, np.ndarray]]: ...

    def checksums(self, params: Any, dtype: str) -> dict[str, int]: ...


@runtime_checkable
class ServedAdapter(ServedTensors, Protocol):
    """Those of adapters (LoRA)."""

    @property
    def rank(self) -> int: ...


@runtime_checkable
class Served(ServedTensors, Protocol):
    """Those of a model, the trainer's log-probs, and the adapters if they alone are trained."""

    @property
    def adapter(self) -> ServedAdapter | None: ...

    def score(self, params: Any, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...


class VllmSampler:
    """A sampler on `servers`, each with at most `concurrency` requests at a time (0: its own limit).

    `weights` brings those of `served` over, also to a server that has restarted. The weights of
    every push get a label of their own, and responses of other weights are refused. `check` is
    called while servers load and answer; an exception from it ends that.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        weights: WeightSync,
        served: Served,
        *,
        dtype: str,
        concurrency: int,
        tolerance: float | None = None,
        max_model_len: int | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self.servers, self.weights = list(servers), weights
        self.version: int | None = None
        self.counters: dict[str, Any] = {}
        self.sync: dict[str, float] = {}
        self._served, self._dtype = served, dtype
        self._concurrency, self._longest, self._check = concurrency, max_model_len, check
        self._vocabulary = 0
        self._label = ""
        self._base: dict[str, int] = {}  # checksums of the model beside adapters
        self._batches: dict[str, int] = {}  # how many requests servers batch
        rank = served.adapter.rank if served.adapter else 0
        self._proof = Proof(TOLERANCE[dtype] if tolerance is None else tolerance, rank)

    @property
    def tolerance(self) -> float:
        """How far, on average, log-probs may be from the trainer's."""
        return self._proof.tolerance

    def push(self, params: Any, version: int) -> None:
        """Has every server load the weights and prove it; sets `sync` to the figures."""
        config = self._served.config(params, self._dtype)
        trained = self._served.adapter or self._served
        if self._served.adapter is not None and self.version is None:
            self._base = self._served.checksums(params, self._dtype)
            self.weights.write_base(self._served.tensors(params, self._dtype), config)
        described = trained.config(params, self._dtype)
        written = self.weights.write(trained.tensors(params, self._dtype), described)
        self.version, self._vocabulary = version, config["vocab_size"]
        self._label = f"{secrets.token_hex(4)}-{version}"  # that no other push of any run has
        start = time.monotonic()
        expected = self._served.score(params, probe_sequences(self._vocabulary))
        scored = time.monotonic()
        checksums = trained.checksums(params, self._dtype)
        summed = time.monotonic()
        self._proof.expect(expected, checksums, config, written.changed)
        proved = run(self._load_all(), self._look)
        self.weights.delete_old()
        figures = asdict(written) | {
            "probe": scored - start,
            "reload": time.monotonic() - summed,
            "proof": float(all(one.exact for one in proved)),
            "proof_seconds": summed - scored + max(one.seconds for one in proved),
        }
        if compared := [one.difference for one in proved if one.difference is not None]:
            figures["difference"] = max(compared)
        self.sync = {f"sync/{name}": value for name, value in figures.items()}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Trajectory]:
        """`n` responses to each prompt, side by side; sets `counters` to this call's figures."""
        if self.version is None:
            raise UserError("the sampler has no weights: push some before generate")
        self._refuse(prompts, n, sampling)
        patience = Patience(self.servers, self.weights.patience)

        made = [Draft(sampling, prompt) for prompt in prompts for _ in range(n)]

        async def ask(server: Server, request: Request) -> Response:
            how = replace(sampling, max_tokens=made[request.index].room)
            response = await server.complete(request.prompt, how, request.seed, self._vocabulary)
            if (label := await server.label()) != self._label:
                raise NoAnswer(f"its weights became {label or 'those of a new start'} meanwhile")
            return response

        async def following(request: Request, response: Response) -> Request | None:
            episode = made[request.index]
            episode.add(*response)
            if reply is None:
                return None
            said = await asyncio.wrap_future(reply(request.index, response.tokens, response.logps))
            if said is None or not episode.goes_on(said):
                return None
            given, anew = said
            prompt = (*given,) if anew else (*request.prompt, *response.tokens, *given)
            return Request(prompt, request_seed(request.seed, prompt, 0), request.index)

        requests = make_requests(prompts, n, sampling.seed)
        work = answer_all(requests, patience, ask, self._prepare, following)
        run(work, self._look)
        self.counters = {"retries": patience.retries}
        return [draft.done(self.version, episode=reply is not None) for draft in made]

    def release(self) -> None:
        """Nothing to do: the servers' weights take none of the trainer's memory."""

    def _look(self) -> None:
        self._check()
        self.weights.check()

    async def _load_all(self) -> list[Proved]:
        """Has all servers load the newest weights at the same time."""
        async with tasks() as group:
            loads = [
                group.create_task(Patience([x], self.weights.patience).persist(x, self._load))
                for x in self.servers
            ]
        return [task.result() for task in loads]

    async def _load(self, server: Server) -> Proved:
        folder = await self.weights.newest_for(server)
        if await server.label() is None:  # it has just started
            self._proof.started(server)
            if self._served.adapter is not None:
                await self._proof.same_weights(server, self._base)
        if self._served.adapter is None:
            return await load(server, folder, self._label, self._proof)
        return await load_adapters(server, folder, self._label, self._proof)

    async def _prepare(self, server: Server) -> int:
        """Gives a server that has restarted the newest weights; a UserError if it has others.

        Returns how many requests it is to have at a time.
        """
        found = await server.label()
        if found in (None, loading(self._label)):  # it has restarted, or our load was cut off
            await self._load(server)
        elif found != self._label:
            raise UserError(
                f"{server.url} serves the weights {found}, and not {self._label}, the newest of this run: "
                "somebody else has synced it; one trainer a server"
            )
        if not self._concurrency and server.url not in self._batches:
            self._batches[server.url] = await batched(server)
        return self._concurrency or self._batches[server.url]

    def _refuse(self, prompts, n: int, sampling: Sampling) -> None:
        """A UserError for requests that a server would answer wrongly or crash on."""
        if n < 1 or not prompts or not all(map(len, prompts)):
            raise UserError("generate wants at least one prompt, none of them empty, and n >= 1")
        largest, longest = max(map(max, prompts)), max(map(len, prompts))
        if largest >= self._vocabulary or min(map(min, prompts)) < 0:
            raise UserError(
                f"a prompt holds token {largest}, the vocabulary has {self._vocabulary}: wrong tokenizer?"
            )
        if self._longest is not None and longest + sampling.max_tokens > self._longest:
            raise UserError(
                f"a prompt of {longest} tokens and {sampling.max_tokens} to come exceed max_model_len = "
                f"{self._longest}: raise it in the engine"
            )
        if sampling.temperature > 0:
            refuse_truncation(sampling)


async def batched(server: Server) -> int:
    """How many requests a server batches."""
    try:
        answer = await server.post(EXTENSION, {"method": "jaxrl_batched"})
        return min(map(int, answer["results"]))
    except NoRoute:
        return BATCHED
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"told not how many requests it batches ({error!r:.200})") from error


def refuse_truncation(sampling: Sampling, where: str = "") -> None:
    """A UserError for top-p or top-k, with which vLLM's log-probs are not the trainer's."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise UserError(
            f"{where}vLLM tells log-probs after truncation only: set top_p to 1 and top_k to 0, or use the "
            "Native engine"
        )


class Request(NamedTuple):
    """One requested turn, and the `index` of its response in the rollout."""

    prompt: tuple[int, ...]
    seed: int
    index: int


def make_requests(prompts: Sequence[Sequence[int]], n: int, seed: int) -> list[Request]:
    """The requests in the order of the rollout; a repeated prompt continues its numbers."""
    numbers: Counter[tuple[int, ...]] = Counter()
    requests = []
    for index in range(n * len(prompts)):
        prompt = tuple(map(int, prompts[index // n]))
        requests.append(Request(prompt, request_seed(seed, prompt, numbers[prompt]), index))
        numbers[prompt] += 1
    return requests


def request_seed(seed: int, prompt: tuple[int, ...], number: int) -> int:
    """A hash of the arguments in 63 bits."""
    content = np.asarray([seed, number, *prompt], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


async def answer_all(
    requests: Sequence[Request],
    patience: Patience,
    ask: Callable[[Server, Request], Awaitable[Response]],
    prepare: Callable[[Server], Awaitable[int]],
    following: Callable[[Request, Response], Awaitable[Request | None]],
) -> None:
    """Answers all requests, and those `following` from their responses, by servers that may fail.

    Many requests fail of one cause, so the first failure of a server calls off its other requests.
    Then it is prepared anew, gets one request, and after that as many at a time as `prepare` says.
    What a server has failed waits at the end of the queue, for any server.
    """
    waiting: asyncio.Queue[Request] = asyncio.Queue()
    for request in requests:
        waiting.put_nowait(request)

    async def answer_one(server: Server) -> None:
        request = await waiting.get()
        try:
            response = await ask(server, request)
        except BaseException:  # called off, too
            waiting.put_nowait(request)
            waiting.task_done()
            raise
        patience.answered(server)
        group.create_task(follow(request, response))

    async def follow(request: Request, response: Response) -> None:
        try:
            if (more := await following(request, response)) is not None:
                waiting.put_nowait(more)
        finally:
            waiting.task_done()

    async def answer_on_and_on(server: Server) -> None:
        while True:
            await answer_one(server)

    async def serve(server: Server) -> None:
        concurrency = await prepare(server)
        if patience.failing(server):
            await answer_one(server)
        async with tasks() as answering:
            for _ in range(min(concurrency, len(requests))):
                answering.create_task(answer_on_and_on(server))

    async with tasks() as group:
        serving = [group.create_task(patience.persist(x, serve)) for x in patience.servers]
        await waiting.join()
        for task in serving:
            task.cancel()
