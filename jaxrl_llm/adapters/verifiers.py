"""Environments of the package `verifiers`, in a process with a Python of their own, as tasks.

They ask for turns by `/inference/v1/generate`. The other process (`verifiers_side.py`) serves that
route, and `Episode` brings it what the engine samples.
"""

import json
import secrets
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from jaxrl_llm.childprocess import Child, environment
from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.task import NewContext, Prompt, Step

_PATIENCE = 300.0  # seconds for an episode's first request
_GRACE = 20.0  # seconds for what is given up to end
_AT_ONCE = 16  # episodes that are begun together to hear those


@dataclass(frozen=True)
class Row:
    """A task of a taskset, by its place, and what it asks."""

    index: int
    system: str
    question: str


class _First(tuple[Mapping[str, str], ...]):
    """A prompt to be read, whose tokens are those of an episode's first request."""

    token_ids: Callable[[Any], list[int]]


class Verifiers:
    """The first `train` tasks of a taskset to learn from, and the next `test` to test on.

    `python` is that of an environment with `verifiers` and the taskset. `env` is the environment's
    config without the taskset's id, `renderer` that of what makes tokens of messages. The process
    gets `variables` of the caller's, beside PATH and the like. The reward is the mean of those of
    an episode's traces; from 1 on it is correct. `close()` ends it, as the end of the
    program does. Raises UserError if it does not start.
    """

    def __init__(
        self,
        taskset: str,
        *,
        python: str | Path,
        train: int = 200,
        test: int = 50,
        env: Mapping[str, Any] | None = None,
        renderer: Mapping[str, Any] | None = None,
        variables: Sequence[str] = (),
    ):
        config = {"agent": {"runtime": {"type": "subprocess"}}, **(env or {})}
        config["taskset"] = {**config.get("taskset", {}), "id": taskset}
        settings = json.dumps((config, train + test, renderer or {"name": "default"}))
        try:
            process = Child(
                [python, "-P", Path(__file__).with_name("verifiers_side.py"), settings],
                environment("HOME", "SSL_CERT_FILE", *variables),
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"verifiers: {python} cannot be started: {error}") from error
        self._folder = tempfile.TemporaryDirectory()
        self.close = weakref.finalize(self, _end, process, self._folder)
        if not (line := process.ask()):
            self.close()
            raise UserError(f"verifiers: {taskset} did not start: see its message above")
        url, key, rows = json.loads(line)
        self.server: dict[str, Any] = {
            "base_url": url,
            "headers": {"X-Key": key},
            "timeout": None,
            "trust_env": False,
            "verify": False,  # no TLS to load certificates for
        }
        made = [Row(i, *said) for i, said in enumerate(rows)]
        self.name, self.train, self.test = taskset, made[:train], made[train:]
        self._first: list[list[int]] = []

    def prompt(self, row: Row) -> Prompt:
        said = {"system": row.system, "user": row.question}
        made = _First({"role": role, "content": text} for role, text in said.items() if text)
        made.token_ids = lambda tokenizer: [*self._prompts(tokenizer)[row.index]]
        return made

    def environment(self, row: Row, tokenizer: Any) -> "Episode":
        prompt = self._prompts(tokenizer)[row.index]
        return Episode(self.server, self._start(row), prompt, tokenizer.stops)

    def _start(self, row: Row) -> dict[str, Any]:
        """The request that starts an episode."""
        return {"id": secrets.token_hex(16), "task": row.index, "tokenizer": self._folder.name}

    def _prompts(self, tokenizer: Any) -> list[list[int]]:
        """The tokens of all rows' first requests, heard once of episodes that are given up then."""

        def heard(row: Row) -> list[int]:
            patient: dict[str, Any] = {**self.server, "timeout": _PATIENCE}
            with httpx.Client(**patient) as client:
                reply = client.post("/step", json=self._start(row) | {"heard": True}).json()
            if "prompt" not in reply:
                raise UserError(f"verifiers: {self.name} asks for no turn: {reply}")
            return reply["prompt"]

        if not self._first:
            tokenizer.save(Path(self._folder.name))
            try:
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    self._first = list(pool.map(heard, [*self.train, *self.test]))
            except httpx.HTTPError as error:
                text = f"verifiers: {self.name} did not begin an episode: {error!r:.200}"
                raise UserError(text) from error
        return self._first


def _end(process: Child, folder: "tempfile.TemporaryDirectory[str]") -> None:
    process.close(_GRACE)
    folder.cleanup()


class Episode:
    """An episode whose requests are answered by turns; what it goes on from are its tokens."""

    def __init__(self, server: dict[str, Any], start: Any, prompt: list[int], stops: Sequence[int]):
        self._server, self._start, self._tokens, self._stops = server, start, [*prompt], stops
        self._name = ""

    async def step_with_logps(self, tokens: Sequence[int], logps: Sequence[float]) -> Step:
        async with httpx.AsyncClient(**self._server) as client:
            if not self._name:
                self._name = self._start["id"]
                reply = (await client.post("/step", json=self._start)).json()
                if reply.get("prompt") != self._tokens:
                    raise ValueError(f"its first request is not what it was before: {reply}")
            turn = {"tokens": [*tokens], "logps": [*logps], "cut": tokens[-1] not in self._stops}
            reply = (await client.post("/step", json={"id": self._name, **turn})).json()
        if "prompt" not in reply:
            self._name = ""
        if "error" in reply:
            raise RuntimeError(reply["error"])
        if "reward" in reply:
            return None, Reward(reply["reward"], reply["reward"] >= 1, reply["fields"])
        before, self._tokens = [*self._tokens, *tokens], reply["prompt"]
        on = self._tokens[: len(before)] == before
        return self._tokens[len(before) :] if on else NewContext(self._tokens), Reward(0.0, False)

    def __del__(self):
        if self._name:  # it would wait for a turn
            patient: dict[str, Any] = {**self._server, "timeout": _GRACE}
            with suppress(httpx.HTTPError), httpx.Client(**patient) as client:
                client.post("/step", json={"id": self._name, "end": True})
