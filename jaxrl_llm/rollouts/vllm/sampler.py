"""A sampler whose responses come from vLLM servers, each a process of its own.

One request is one response. Its seed is a function of (sampling seed, prompt, number of the
response), so any server may answer it, in any batch, at any attempt. If a server dies, only the
responses it was working on are lost; they are requested again, there or elsewhere.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.sampler import Rollout, Sampling, Served
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Response, Server, run, together
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE, Proof, probe_sequences
from jaxrl_llm.rollouts.vllm.sync import Report, WeightSync, loading

ATTEMPTS = 5  # of a request on each server; when all of them are used up, the run fails
REST = (0.1, 5.0)  # seconds of rest after a failure, doubling from the first to the second

T = TypeVar("T")


class VllmSampler:
    """A sampler on `servers`, each with at most `concurrency` requests at a time.

    `sync` brings the weights of `served` over, also to a server that has restarted. The weights of
    every push get a label of their own, and responses of other weights are refused. `check` is
    called while responses are made; an exception from it ends that.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        sync: WeightSync,
        served: Served,
        *,
        dtype: str,
        concurrency: int,
        tolerance: float | None = None,
        max_model_len: int | None = None,
        check: Callable[[], None] = lambda: None,
    ):
        self.servers, self.weights = list(servers), sync
        self.version: int | None = None
        self.report: Report | None = None
        self.counters: dict[str, Any] = {}
        self.sync: dict[str, float] = {}
        self._served, self._dtype = served, dtype
        self._concurrency, self._longest, self._check = concurrency, max_model_len, check
        self._vocabulary = 0
        self._label = ""
        self._proof = Proof(TOLERANCE[dtype] if tolerance is None else tolerance)

    def push(self, params: Any, version: int) -> None:
        """Syncs every server and proves it; sets `report` and `sync` to the figures."""
        config, label = self._served.config(params, self._dtype), new_label(version)
        written = self.weights.write(self._served.tensors(params, self._dtype), config)
        start = time.monotonic()
        self._run(self.weights.load(self.servers, label))
        loaded = time.monotonic()
        expected = self._served.score(params, probe_sequences(config["vocab_size"]))
        self._proof.expect(expected, config, written.changed)
        persist = self.weights.persist
        proofs = (persist(x, "could not be probed", self._prove, label) for x in self.servers)
        differences = self._run(together(*proofs))
        self.version, self._label, self._vocabulary = version, label, config["vocab_size"]
        self.report = replace(
            written,
            reload=loaded - start,
            probe=time.monotonic() - loaded,
            difference=max(differences),
        )
        self.sync = {f"sync/{name}": value for name, value in asdict(self.report).items()}

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling) -> Rollout:
        """`n` responses to each prompt, side by side; sets `counters` to this call's figures."""
        if self.version is None:
            raise UserError("the sampler has no weights: push some before generate")
        self._refuse(prompts, n, sampling)

        async def ask(server: Server, request: Request) -> Response:
            return await server.complete(request.prompt, sampling, request.seed, self._vocabulary)

        requests = make_requests(prompts, n, sampling.seed)

        def check() -> None:
            self._check()
            self.weights.check()

        spread = Spread(requests, self.servers, self._concurrency, ask, self._prepare)
        self._run(spread.all_done(check, self.weights.patience))
        responses = [spread.responses[i] for i in range(len(requests))]
        self.counters = {"retries": spread.retries}
        return Rollout(
            prompts=[p for p in prompts for _ in range(n)],
            responses=[response.tokens for response in responses],
            logps=[response.logps for response in responses],
            finished=[response.finished for response in responses],
            version=self.version,
            tolerance=self._proof.tolerance,
        )

    def release(self) -> None:
        """Nothing to do: the servers' weights take none of the trainer's memory."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; closes all connections, as the trainer may be busy for minutes."""

        async def closing() -> T:
            try:
                return await work
            finally:
                for server in self.servers:
                    await server.close()

        return run(closing())

    async def _prepare(self, server: Server) -> str:
        """The label of a server's weights; a restarted one is given the newest weights first."""
        assert self.version is not None
        found = await server.label()
        if found in (None, loading(self._label)):
            await self._prove(server, self._label)
        elif found != self._label:
            raise UserError(
                f"{server.url} serves the weights {found}, and not {self._label}, the newest of this run: "
                "somebody else has synced it; one trainer a server"
            )
        return self._label

    async def _prove(self, server: Server, label: str) -> float:
        """The proof's difference; a restarted server is given the weights first."""
        if await server.label() in (None, loading(label)):  # restarted, or our own sync was cut off
            await self.weights.reload(server, label)
        return await self._proof(server, label)

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


def refuse_truncation(sampling: Sampling, where: str = "") -> None:
    """A UserError for top-p or top-k, with which vLLM's log-probs are not the trainer's."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise UserError(
            f"{where}vLLM tells log-probs after truncation only: set top_p to 1 and top_k to 0, or use the "
            "Native engine"
        )


def new_label(version: int) -> str:
    """A label that no other push of any run has: a nonce and the version."""
    return f"{secrets.token_hex(4)}-{version}"


class Request(NamedTuple):
    """One requested response, and its `index` in the rollout."""

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


class Spread:
    """Requests spread over servers that may fail, without one spoiling the work of all.

    Many requests fail of one cause, so the first failure of a server cancels its other requests. It
    rests, longer every time, until `prepare` succeeds and returns the label of its weights; then it
    gets a single request, and after that has succeeded `concurrency` at a time. A response counts
    if the label is the same before and after.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        servers: Sequence[Server],
        concurrency: int,
        ask: Callable[[Server, Request], Awaitable[Response]],
        prepare: Callable[[Server], Awaitable[str]],
    ):
        self.responses: dict[int, Response] = {}
        self.retries = 0
        self._count, self._ask, self._prepare = len(requests), ask, prepare
        self._servers, self._concurrency = servers, min(concurrency, len(requests))
        self._waiting = deque(requests)
        self._failures = Counter[tuple[int, str]]()
        self._flying, self._trouble = 0, ""
        self._in_order = time.monotonic()  # when some server last worked
        self._returned, self._over = asyncio.Event(), asyncio.Event()

    async def all_done(self, check: Callable[[], None], patience: float) -> None:
        """Returns when all responses are there; a UserError after `patience` s without a server."""
        watch = asyncio.create_task(self._watch(check, patience))
        tasks = [watch, *(asyncio.create_task(self._serve(server)) for server in self._servers)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, check: Callable[[], None], patience: float) -> None:
        while not self._over.is_set():
            check()
            if not self._flying and time.monotonic() - self._in_order > patience:
                raise UserError(f"no server has answered for {patience:g} s: {self._trouble}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), 0.5)

    async def _serve(self, server: Server) -> None:
        """Keeps a server busy, and lets it rest after a failure."""
        rest = 0.0
        while True:
            try:
                label = await self._prepare(server)
                self._in_order = time.monotonic()
                if rest:
                    await self._send(server, label)
                rest = 0.0
                await together(*(self._work(server, label) for _ in range(self._concurrency)))
            except NoAnswer as error:
                self._trouble = f"{server.url}: {error}"
                rest = min(max(2 * rest, REST[0]), REST[1])
                await asyncio.sleep(rest)

    async def _work(self, server: Server, label: str) -> None:
        while True:
            await self._send(server, label)

    async def _send(self, server: Server, label: str) -> None:
        """Sends the next request; without a response any server that is free takes it again."""
        while (request := self._next(server)) is None:
            await self._returned.wait()
        self._flying += 1
        try:
            response = await self._ask(server, request)
            if (after := await server.label()) != label:
                raise NoAnswer(f"its weights became {after or 'those of a new start'} meanwhile")
            self.responses[request.index] = response
            self._in_order = time.monotonic()
            if len(self.responses) == self._count:
                self._over.set()
        except NoAnswer as error:
            self.retries += 1
            self._failures[request.index, server.url] += 1
            if min(self._failures[request.index, x.url] for x in self._servers) >= ATTEMPTS:
                raise UserError(
                    f"a prompt of {len(request.prompt)} tokens failed {ATTEMPTS} times, "
                    f"last at {server.url}: {error}"
                ) from error
            raise
        finally:
            self._flying -= 1
            if request.index not in self.responses:
                self._waiting.appendleft(request)
                self._returned.set()  # wakes all that wait in `_send`
                self._returned.clear()

    def _next(self, server: Server) -> Request | None:
        """Takes the first waiting request that has not failed ATTEMPTS times on this server."""
        for request in self._waiting:
            if self._failures[request.index, server.url] < ATTEMPTS:
                self._waiting.remove(request)
                return request
        return None
