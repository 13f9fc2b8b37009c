"""A sampler whose responses come from vLLM servers, each a process of its own.

One request is one turn of a response, its prompt all tokens before that. Its seed is a function of
(sampling seed, prompt, number of the response), so any server may answer it, in any batch, at any
attempt. If a server dies, only the turns it was working on are lost; they are requested again,
there or elsewhere. New weights interrupt what is under way: a server gives back the tokens that it
has, and the rest is asked for as a next turn is, so a response may have tokens of several weights.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import FIRST_EXCEPTION, Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.policy import Served
from jaxrl_llm.rollouts.sampler import Draft, Reply, Sampler, Sampling, enumerate_requests
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.rollouts.vllm.client import (
    CHECK_SECONDS,
    NoAnswer,
    NoRoute,
    Patience,
    Server,
    run,
    tasks,
)
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE, Proof, Proved, probe_sequences
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION
from jaxrl_llm.rollouts.vllm.service import Service, Turn, request_seed
from jaxrl_llm.rollouts.vllm.sync import WeightSync, load, load_adapters, loading

LEAST = 0.01  # temperature above 0, to which vLLM raises lower ones
BATCHED = 256  # requests, of a server that cannot tell: vLLM's limit on most GPUs


class VllmSampler(Sampler):
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
        super().__init__()
        self.servers, self.weights = list(servers), weights
        self.version: int | None = None
        self._served, self._dtype = served, dtype
        self._concurrency, self._longest, self._check = concurrency, max_model_len, check
        self._vocabulary = 0
        self._label = ""
        self._base: dict[str, int] = {}  # checksums of the model beside adapters
        self._batches: dict[str, int] = {}  # how many requests servers batch
        rank = served.adapter.rank if served.adapter else 0
        self.tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
        self._proof = Proof(self.tolerance, rank)
        self._service = Service(self.servers, weights.patience, self._ask, self._prepare)

    def push(self, params: Any, version: int) -> None:
        """Has every server load the weights and prove it; sets `sync` to the figures."""
        config = self._served.config(self._dtype)
        trained = self._served.adapter or self._served
        if self._served.adapter is not None and self.version is None:
            self._base = self._served.checksums(params, self._dtype)
            self.weights.write_base(self._served.tensors(params, self._dtype), config)
        described = trained.config(self._dtype)
        folder, written = self.weights.write(trained.tensors(params, self._dtype), described)
        self._vocabulary = config["vocab_size"]
        label = f"{secrets.token_hex(4)}-{version}"  # that no other push of any run has
        start = time.monotonic()
        expected = self._served.score(params, probe_sequences(self._vocabulary))
        scored = time.monotonic()
        checksums = trained.checksums(params, self._dtype)
        summed = time.monotonic()
        expect = partial(self._proof.expect, expected, checksums, config, written.changed)
        proved = run(self._renew(label, version, folder, expect), self._look)
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

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Future[Trajectory]]:
        """Asks the servers, which answer meanwhile."""
        if self.version is None:
            raise UserError("the sampler has no weights: push some before it is asked")
        turns = turns_of(prompts, n, sampling, reply)
        self._refuse(prompts, sampling)
        self._service.submit(turns)
        return [turn.response for turn in turns]

    def wait(self, responses: Sequence[Future[Trajectory]]) -> list[Trajectory]:
        """The responses, once all are there; an error calls them off. Sets `counters`."""
        try:
            while (left := futures.wait(responses, CHECK_SECONDS, FIRST_EXCEPTION)).not_done:
                for one in left.done:
                    one.result()  # an error is out at once, whatever is still sampled
                self._look()
            trajectories = [one.result() for one in responses]
        except BaseException:
            for one in responses:
                one.cancel()
            raise
        self.counters = {"retries": self._service.retries()}
        return trajectories

    def close(self) -> None:
        """Calls off all that is asked for."""
        self._service.close()

    def _look(self) -> None:
        self._check()
        self.weights.check()

    async def _renew(
        self, label: str, version: int, folder: Path, expect: Callable[[], None]
    ) -> list[Proved]:
        """Has all servers load new weights at the same time; what they answer goes on after it."""
        abort = lambda server: server.post("/pause?mode=abort")
        async with self._service.interrupted(abort):
            # all at once, while nothing is loaded: a server that comes back before gets the old
            # weights, and they are compared with the old log-probs
            self._label, self.version, self.weights.newest = label, version, folder
            expect()
            async with tasks() as group:
                loads = [
                    group.create_task(Patience([x], self.weights.patience).persist(x, self._load))
                    for x in self.servers
                ]
        return [task.result() for task in loads]

    async def _ask(self, server: Server, turn: Turn) -> None:
        """Adds what a server samples for a turn to the response."""
        how = replace(turn.draft.sampling, max_tokens=turn.draft.room)
        # weights are known by their label: a server may have restarted, or been synced by another
        part = await server.complete(turn.prompt, how, turn.seed, self._vocabulary)
        if (label := await server.label()) != self._label:
            raise NoAnswer(f"its weights became {label or 'those of a new start'} meanwhile")
        assert self.version is not None
        turn.add(part, self.version)

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

    def _refuse(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """A UserError for requests that a server would answer wrongly or crash on."""
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
        refuse_distortion(sampling)


async def batched(server: Server) -> int:
    """How many requests a server batches."""
    try:
        answer = await server.post(EXTENSION, {"method": "jaxrl_batched"})
        return min(map(int, answer["results"]))
    except NoRoute:
        return BATCHED
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"told not how many requests it batches ({error!r:.200})") from error


def refuse_distortion(sampling: Sampling, where: str = "") -> None:
    """A UserError for what has vLLM sample, or tell log-probs, otherwise than the trainer computes them."""
    if 0 < sampling.temperature < LEAST:
        raise UserError(
            f"{where}vLLM samples at a temperature of {LEAST} where {sampling.temperature:g} is asked for: "
            "raise it, set it to 0, or use the Native engine"
        )
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
        raise UserError(
            f"{where}vLLM tells log-probs after truncation only: set top_p to 1 and top_k to 0, or use the "
            "Native engine"
        )


def turns_of(
    prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, reply: Reply | None
) -> list[Turn]:
    """The first turns of the responses, in their order."""
    return [
        Turn(
            request.prompt,
            request_seed(sampling.seed, request.prompt, request.number),
            Draft(sampling, prompts[request.index // n]),
            reply and partial(reply, request.index),
        )
        for request in enumerate_requests(prompts, n)
    ]
