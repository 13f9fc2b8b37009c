"""A sampler whose responses come from vLLM servers, each a process of its own.

One request is one response. Its seed is a function of (sampling seed, prompt, number of the response), so
it does not matter which server answers it, in what company, or at which attempt: a server that dies costs
the responses it was working on, and those are asked for again, elsewhere or of the restarted one.
"""

import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts import weight_sync
from jaxrl_llm.rollouts.model import Served
from jaxrl_llm.rollouts.proof import TOLERANCE, Proof, probe_sequences
from jaxrl_llm.rollouts.sampler import Rollout, Sampling
from jaxrl_llm.rollouts.server import Server
from jaxrl_llm.rollouts.work import Task, Work

LEAVE = 5.0  # seconds for threads to notice the end


class VllmSampler:
    """A sampler on `servers`, each with at most `concurrency` requests at a time.

    `transport` brings the weights of `served` over, also into a server that has started again, and knows how long
    to wait for one. The weights of every push have a label of their own, and a response of others is refused.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        transport: weight_sync.Folders,
        served: Served,
        *,
        dtype: str,
        concurrency: int,
        tolerance: float | None = None,
        max_model_len: int | None = None,
    ):
        self.servers, self.transport = list(servers), transport
        self.version: int | None = None
        self.report: weight_sync.Report | None = None
        self.counters: dict[str, Any] = {}
        self.sync: dict[str, float] = {}
        self._served, self._dtype = served, dtype
        self._concurrency, self._longest = concurrency, max_model_len
        self._vocabulary = 0
        self._labels: dict[str, str] = {}
        self._proof = Proof(TOLERANCE[dtype] if tolerance is None else tolerance)

    def push(self, params: Any, version: int) -> None:
        """Syncs every server and compares its log-probs with the trainer's; `report` then holds the figures."""
        config, label = self._served.config(params, self._dtype), new_label(version)
        try:
            tensors = self._served.tensors(params, self._dtype)
            sent = self.transport(tensors, config, label, self.servers)
            start = time.monotonic()
            expected = self._served.score(params, probe_sequences(config["vocab_size"]))
            self._proof.expect(expected, config, sent.changed)
            labels = {server.url: label for server in self.servers}
            differences = [
                weight_sync.persist(
                    partial(self._prove, server, labels, version),
                    f"{server.url} could not be probed",
                    self.transport.check,
                    self.transport.patience,
                )
                for server in self.servers
            ]
        finally:
            _close(self.servers)
        self.version, self._labels, self._vocabulary = version, labels, config["vocab_size"]
        seconds = time.monotonic() - start
        self.report = replace(sent, probe=seconds, difference=max(differences))
        self.sync = {f"sync/{name}": value for name, value in asdict(self.report).items()}

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling) -> Rollout:
        """`n` responses to each prompt, side by side; `counters` then holds the figures of this call."""
        if self.version is None:
            raise UserError("the sampler has no weights: push some before generate")
        self._refuse(prompts, n, sampling)
        tasks = make_tasks(prompts, n, sampling.seed)
        ask = partial(Server.complete, sampling=sampling, vocabulary=self._vocabulary)
        work = Work(tasks, self.servers, min(self._concurrency, len(tasks)), ask, self._label)
        with _running(work.threads(), work, self.servers):
            work.wait(self.transport.check, self.transport.patience)
        responses = [work.responses[task.place] for task in tasks]
        self.counters = {"retries": work.retries}
        return Rollout(
            prompts=[p for p in prompts for _ in range(n)],
            responses=[response.tokens for response in responses],
            logps=[response.logps for response in responses],
            finished=[response.finished for response in responses],
            version=self.version,
            tolerance=self._proof.tolerance,
        )

    def release(self) -> None:
        """The servers keep their weights: they take none of the trainer's memory."""

    def _label(self, server: Server) -> str:
        """The label of a server that serves the newest weights; one that has started again is given them first."""
        assert self.version is not None
        label, expected = server.label(), self._labels[server.url]
        if label in (None, weight_sync.loading(expected)):
            self._prove(server, self._labels, self.version)
        elif label != expected:
            raise UserError(
                f"{server.url} serves the weights {label}, and not {expected}, the newest of this run: "
                "somebody else has synced it; one trainer a server"
            )
        return self._labels[server.url]

    def _prove(self, server: Server, labels: dict[str, str], version: int) -> float:
        """The proof's difference for a server; one that has started again is given weights and a label first."""
        label = server.label()
        if label is None:
            labels[server.url] = new_label(version)
        if label in (None, weight_sync.loading(labels[server.url])):  # or it was ours that broke
            self.transport.renew(server, labels[server.url])
        return self._proof(server, labels[server.url])

    def _refuse(self, prompts, n: int, sampling: Sampling) -> None:
        """A UserError for what a server would answer wrongly, or die of."""
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
    """A UserError for draws of less than all tokens."""
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise UserError(
            f"{where}vLLM tells log-probs after truncation only: set top_p to 1 and top_k to 0, or use the "
            "Native engine"
        )


def make_tasks(prompts: Sequence[Sequence[int]], n: int, seed: int) -> list[Task]:
    """The requests of a call in the order of the rollout; a prompt that comes again goes on counting."""
    numbers: Counter[tuple[int, ...]] = Counter()
    tasks = []
    for place in range(n * len(prompts)):
        prompt = tuple(map(int, prompts[place // n]))
        tasks.append(Task(prompt, request_seed(seed, prompt, numbers[prompt]), place))
        numbers[prompt] += 1
    return tasks


def request_seed(seed: int, prompt: tuple[int, ...], number: int) -> int:
    """63 bits made of these and nothing else."""
    content = np.asarray([seed, number, *prompt], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def new_label(version: int) -> str:
    """The identity of the weights of one push, which no other push of any run has: a nonce and the step."""
    return f"{secrets.token_hex(4)}-{version}"


@contextmanager
def _running(threads: Sequence[threading.Thread], work: Work, servers: Sequence[Server]):
    """Starts threads; however the block ends, so do they, and what they have asked for is called off."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        work.stop()
        deadline = time.monotonic() + LEAVE
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            _close(servers)
            time.sleep(0.01)
        _close(servers)


def _close(servers: Sequence[Server]) -> None:
    for server in servers:
        server.close()
