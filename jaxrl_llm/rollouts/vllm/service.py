"""Turns that are asked for, and the servers that answer them."""

import asyncio
import hashlib
import heapq
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from jaxrl_llm.background import loop
from jaxrl_llm.models.tokenizer import HiddenTokens
from jaxrl_llm.rollouts.sampler import Draft, Said
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Patience, Response, Server, tasks

READY = 0.5  # seconds in which all servers are waited for: the first would be given all there is
INTERRUPTED = 0.5  # seconds without an answer, after which an interrupted server has given back all


@dataclass(eq=False)
class Turn:
    """The turn of a response that is asked for next: its prompt, all tokens before it, and its seed.

    `reply` is called with the tokens and log-probs of each turn, None for a response of one turn. For
    a hidden prompt it says first what is asked.
    """

    prompt: tuple[int, ...]
    seed: int
    draft: Draft
    reply: Callable[[Sequence[int] | None, Sequence[float]], Future[Said]] | None
    response: Future[Trajectory] = field(default_factory=Future)

    def add(self, part: Response, version: int) -> None:
        """Adds the turn, or what was sampled of it when its server was interrupted."""
        self.draft.add(part.tokens, part.logps, part.finished, version, whole=not part.aborted)
        if part.experts is not None:
            self.draft.send(part.experts)
        # a part without tokens leaves prompt and seed, so that it is the same request again
        self._go_on((*self.prompt, *part.tokens))

    async def goes_on(self) -> bool:
        """True if more is to be asked for: the rest of the turn, or after a reply the next one."""
        if self.draft.in_turn:
            return True
        if self.reply is None:
            return False
        begins, turn = self.begins, (None, ())
        if not begins:
            # the environment sees the whole turn, whatever parts it was sampled in
            start, end = self.draft.turns[-1]
            turn = self.draft.tokens[start:end], self.draft.logps[start:end]
        reply = await asyncio.wrap_future(self.reply(*turn))
        if not self.draft.goes_on(reply):
            return False
        if reply is not None:
            tokens, anew = reply
            self._go_on((*tokens,) if anew or begins else (*self.prompt, *tokens))
        return True

    @property
    def begins(self) -> bool:
        """True if what the policy sees first is still to be said."""
        hidden = self.reply is not None and isinstance(self.draft.prompt, HiddenTokens)
        return hidden and not self.draft.tokens

    def _go_on(self, prompt: tuple[int, ...]) -> None:
        if prompt != self.prompt:
            self.prompt, self.seed = prompt, request_seed(self.seed, prompt, 0)


def request_seed(seed: int, prompt: tuple[int, ...], number: int) -> int:
    """A hash of the arguments in 63 bits."""
    content = np.asarray([seed, number, *prompt], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


class Service:
    """Has servers answer turns in the order of asking, each given to the server with the most room.

    `prepare(server)` says how many it is given at a time, `ask(server, turn)` adds its answer. Many
    requests fail of one cause, so the first failure of a server calls off its other requests. Then
    it is prepared anew, gets one turn, and after that as many as before. A turn that a server has
    failed is asked for after all others. Servers that have all failed for `seconds` fail all
    responses. `submit`, `retries` and `close` are for other threads than the event loop's.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        seconds: float,
        ask: Callable[[Server, Turn], Awaitable[None]],
        prepare: Callable[[Server], Awaitable[int]],
    ):
        self._seconds, self._ask, self._prepare = seconds, ask, prepare
        self._patience = Patience(servers, seconds)
        self._waiting: list[tuple[int, Turn]] = []  # a heap, by the order of asking
        self._order = itertools.count()
        self._unfinished, self._finished = set[Turn](), asyncio.Event()
        self._under_way = {server: set[asyncio.Future[None]]() for server in servers}
        self._limits: dict[Server, int] = {}  # how many it is given at a time; of those that serve
        self._failures: dict[Server, asyncio.Future[None]] = {}
        self._following = set[asyncio.Task[None]]()
        self._serving: asyncio.Task[None] | None = None
        self._held, self._begins = False, 0.0

    def submit(self, turns: Sequence[Turn]) -> None:
        """Has these turns answered; a response that is cancelled is called off."""
        loop("vllm").call_soon_threadsafe(self._add, turns)

    def retries(self) -> int:
        """How often something was asked for again since this was called last."""
        retries, self._patience.retries = self._patience.retries, 0
        return retries

    def close(self) -> None:
        """Calls off everything."""
        loop("vllm").call_soon_threadsafe(self._fail, None)

    @asynccontextmanager
    async def interrupted(
        self, interrupt: Callable[[Server], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """For the block no server is asked for anything; `interrupt` makes one give back what it has.

        What it does not give back is asked for again: a request that arrives only after the
        interruption waits for its end.
        """
        self._held = True
        try:
            # the answers' checks of the weights' label have to see the old one: no new one before
            # all servers have given back what they have
            await asyncio.gather(*(self._drain(server, interrupt) for server in self._under_way))
            if self._serving is not None:  # also who is loading old weights just now
                self._serving.cancel()
                await asyncio.wait([self._serving])
            yield
        finally:
            self._held = False
            self._serve_on()

    async def _drain(
        self, server: Server, interrupt: Callable[[Server], Awaitable[object]]
    ) -> None:
        if self._under_way[server]:
            with suppress(NoAnswer):  # one that has failed has nothing
                await interrupt(server)
        came = True
        while came and (under_way := self._under_way[server]):
            came, _ = await asyncio.wait(
                under_way, timeout=INTERRUPTED, return_when=asyncio.FIRST_COMPLETED
            )

    def _add(self, turns: Sequence[Turn]) -> None:
        self._unfinished.update(turns)
        for turn in turns:
            if turn.begins:
                self._follow_on(next(self._order), turn)
            else:
                heapq.heappush(self._waiting, (next(self._order), turn))
        self._serve_on()

    def _serve_on(self) -> None:
        if self._unfinished and not self._held:
            self._finished.clear()
            if self._serving is None or self._serving.done():
                self._serving = asyncio.create_task(self._serve())
        self._deal()

    async def _serve(self) -> None:
        """Keeps all servers until no response is unfinished."""
        before, self._patience = self._patience, Patience([*self._under_way], self._seconds)
        self._patience.retries = before.retries
        now = asyncio.get_running_loop()
        # a server that hangs may not hold up the others for longer
        self._begins = now.time() + READY
        now.call_later(READY, self._deal)
        try:
            while self._unfinished:
                async with tasks() as group:
                    keeping = [
                        group.create_task(self._patience.persist(server, self._keep))
                        for server in self._under_way
                    ]
                    await self._finished.wait()
                    for task in keeping:
                        task.cancel()
        except Exception as error:
            self._fail(error)

    async def _keep(self, server: Server) -> None:
        """Has a server answer until something that it was asked for fails."""
        limit = await self._prepare(server)
        failure = self._failures[server] = asyncio.get_running_loop().create_future()
        self._limits[server] = limit
        try:
            self._deal()
            await failure
        finally:
            self._limits.pop(server, None)
            for task in self._under_way[server]:
                task.cancel()

    def _deal(self) -> None:
        """Gives what waits to the servers that have room."""
        late = asyncio.get_running_loop().time() >= self._begins
        ready = self._limits and (late or len(self._limits) == len(self._under_way))
        while self._waiting and ready and not self._held:
            server = max(self._limits, key=self._room)
            if self._room(server) < 1:
                return
            # an older response first: its next turn would wait behind all that came later
            order, turn = heapq.heappop(self._waiting)
            if turn.response.cancelled():
                self._end(turn)
            if turn not in self._unfinished:  # it came back after all had failed
                continue
            task = asyncio.ensure_future(self._ask(server, turn))
            self._under_way[server].add(task)
            call_off = partial(_threadsafe, asyncio.get_running_loop(), task)
            turn.response.add_done_callback(call_off)
            task.add_done_callback(partial(self._answered, server, order, turn))

    def _room(self, server: Server) -> int:
        limit = 1 if self._patience.failing(server) else self._limits[server]
        return limit - len(self._under_way[server])

    def _answered(
        self, server: Server, order: int, turn: Turn, task: "asyncio.Future[None]"
    ) -> None:
        """Goes on with a turn that was answered, called off, even before it was sent, or failed."""
        self._under_way[server].discard(task)
        if task.cancelled():  # not its fault: it keeps its place
            heapq.heappush(self._waiting, (order, turn))
        elif isinstance(error := task.exception(), NoAnswer):
            heapq.heappush(self._waiting, (next(self._order), turn))
            # no more for it until it is prepared anew: the rest would fail of the same cause
            self._limits.pop(server, None)
            if not (failure := self._failures[server]).done():
                failure.set_exception(error)
        elif error is not None:
            self._end(turn, error)
        else:
            self._patience.answered(server)
            self._follow_on(order, turn)
        self._deal()

    def _follow_on(self, order: int, turn: Turn) -> None:
        following = asyncio.create_task(self._follow(order, turn))
        self._following.add(following)
        following.add_done_callback(self._following.discard)

    async def _follow(self, order: int, turn: Turn) -> None:
        """Asks for the next turn of a response, in its place, or ends it."""
        try:
            if await turn.goes_on():
                heapq.heappush(self._waiting, (order, turn))
                self._deal()
            else:
                self._end(turn)
        except Exception as error:
            self._end(turn, error)

    def _end(self, turn: Turn, error: BaseException | None = None) -> None:
        if turn not in self._unfinished:
            return
        self._unfinished.discard(turn)
        if turn.response.set_running_or_notify_cancel():
            if error is None:
                turn.response.set_result(turn.draft.done(episode=turn.reply is not None))
            else:
                turn.response.set_exception(error)
        if not self._unfinished:
            self._finished.set()

    def _fail(self, error: Exception | None) -> None:
        """Fails all responses, or without an error calls them off."""
        for turn in [*self._unfinished]:
            if error is None:
                # before `_end`, which then finds that nobody wants it
                turn.response.cancel()
            self._end(turn, error)
        self._waiting.clear()


def _threadsafe(loop: asyncio.AbstractEventLoop, task: "asyncio.Future[None]", _: object) -> None:
    """Cancels a task from any thread."""
    loop.call_soon_threadsafe(task.cancel)
