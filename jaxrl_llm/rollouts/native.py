"""The embedded engine: a fixed number of slots that decode together inside one jitted loop.

Slots are spread over the devices, each of which draws its own tokens. A prompt is prefilled once
and copied to the slots of its responses; a slot whose response is complete takes the next request.
Shapes do not depend on the requests, and a token's noise is a function of (seed, prompt, number of
the response, tokens before it): a request gives the same tokens whatever it is batched with. With
several hosts every process generates on its own devices; only `push` involves all.

What that earns in tokens a second (docs/benchmarks.md): refilling slots 1.4 to 1.5 over plain
batches, padding prompts by length up to 2.7 where long ones are read, else nothing.
"""

import ctypes
import itertools
import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.generation import Chosen, ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.tokenizer import HiddenTokens
from jaxrl_llm.rollouts.sampler import (
    Draft,
    Reply,
    Request,
    Sampler,
    Sampling,
    enumerate_requests,
)
from jaxrl_llm.rollouts.slots import Slots, idle_slots, program, rules_of
from jaxrl_llm.rollouts.trajectory import Trajectory

SHORTEST = 16  # tokens to which shorter prompts are padded: fewer programs to compile
STRIDE = 8  # tokens decoded between checks whether to stop, where layers are apart
SOON = 0.01  # seconds in which a reply is waited for; a later one is looked for every LOOK tokens
LOOK = 16
CALL = 5.0  # seconds of decoding, about, between checks whether to stop
CHECK = 0.5  # seconds between checks where all slots wait for replies


class Read(NamedTuple):
    """Prompts that were read together: their keys and values, and requests by their rows in them."""

    cache: Any
    requests: deque[tuple[int, Request]]


class NativeSampler(Sampler):
    """A sampler on the trainer's devices; it reads the trainer's parameters in place, else a copy.

    `slots` sequences decode at a time; prompts are prefilled `prefill_prompts` at a time, padded to
    a power of two. Both count all processes: each takes the share of its devices, rounded up to
    divide evenly. The loop returns to the host when a sixteenth of the slots is done, if requests
    are waiting, or after `steps` tokens. Prompts that are longer than memory was planned for come
    last, so many at a time that they take no more.
    """

    def __init__(
        self,
        model: ScannedGenerator | UnrolledGenerator,
        *,
        slots: int,
        prefill_prompts: int,
        steps: int = 256,
        check: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.model, self.steps, self._check = model, steps, check
        self.mesh = own_copies(model.mesh)
        self.slots, self.prefill_prompts = shared_out(
            slots, prefill_prompts, self.mesh.size, model.mesh.size
        )
        self.stride = STRIDE if model.static else 1
        self.params: Any = None
        self.version = 0
        self._pace = CALL / LOOK  # seconds a token, of the last call; few tokens come in the first
        self._empty = jax.jit(model.empty, static_argnums=(0, 1))
        self._prefill = jax.jit(model.prefill)
        self._insert = jax.jit(model.insert, donate_argnums=0)
        self._run = program(model.decode, self.stride)

    def push(self, params: Any, version: int) -> None:
        """Uses these parameters until a train step donates them; all processes call it together."""
        self.release()
        with jax.set_mesh(self.model.mesh):
            weights = self.model.weights(params)
        self.params = jax.tree.map(partial(own_part, mesh=self.mesh), weights)
        self.version = version

    def release(self) -> None:
        """Drops the weights and any copy of them; push before the next `submit`."""
        dropped, self.params = self.params is not None, None
        if dropped and self.mesh.devices.flat[0].platform == "cpu":
            _give_back_memory()

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        sampling: Sampling,
        reply: Reply | None = None,
    ) -> list[Future[Trajectory]]:
        """Answers at once: trainer and sampler share devices. Sets `counters` to its figures."""
        if self.params is None:
            raise UserError("the sampler has no weights: push some before it is asked")
        requests, longer = (defaultdict[tuple[int, ...], list[Request]](list) for _ in range(2))
        hidden, usual = deque[Request](), self.prompt_length or math.inf
        for request in enumerate_requests(prompts, n):
            begins = reply and isinstance(prompts[request.index // n], HiddenTokens)
            some = requests if len(request.prompt) <= usual else longer
            (hidden if begins else some[request.prompt]).append(request)
        drafts = [Draft(sampling, prompt) for prompt in prompts for _ in range(n)]
        self.counters = {"prefill_tokens": 0, "decode_steps": 0, "left": len(drafts)}
        begun, busy = time.perf_counter(), 0.0
        # what the host has changed goes along with a call: a device_put of its own takes longer
        with jax.set_mesh(self.mesh), jax.transfer_guard_host_to_device("allow"):
            if requests or hidden:
                busy += self._serve(self.slots, requests, hidden, drafts, sampling, reply)
            if longer:
                columns = lambda length: padded(length, SHORTEST) + sampling.max_tokens
                fit = self.slots * columns(self.prompt_length) // columns(max(map(len, longer)))
                busy += self._serve(self._evenly(fit), longer, deque(), drafts, sampling, reply)
        self.counters["idle_seconds"] = time.perf_counter() - begun - busy
        responses = [Future[Trajectory]() for _ in drafts]
        for response, draft in zip(responses, drafts, strict=True):
            draft.versions = [self.version]
            response.set_result(draft.done(episode=reply is not None))
        return responses

    def _evenly(self, number: int) -> int:
        """At most so many, as many on each device; one at least."""
        return max(1, number // self.mesh.size) * self.mesh.size

    def _read_at_a_time(self, length: int) -> int:
        """Prompts of a padded length that are prefilled together."""
        planned = padded(self.prompt_length or length, SHORTEST)
        return self._evenly(self.prefill_prompts * min(planned, length) // length)

    def _serve(
        self,
        number: int,
        requests: Mapping[tuple[int, ...], list[Request]],
        hidden: deque[Request],
        drafts: list[Draft],
        sampling: Sampling,
        reply: Reply | None,
    ) -> float:
        """The host's loop over `number` slots: fill free ones, decode, collect turns and replies to them.

        What a `hidden` request begins with is asked for once a slot is free for it. Gives the seconds of
        decoding.
        """
        asked, count = [*itertools.chain(*requests.values(), hidden)], self.counters
        busy, left, refill = 0.0, len(asked), max(1, number // 16)
        longest = padded(max(len(one.prompt) for one in asked), SHORTEST)
        limit = longest + sampling.max_tokens
        columns = self._columns(longest + self.stride, limit)
        cache = self._empty(number, columns)
        slots = idle_slots(number, sampling.max_tokens, turns=reply is not None)
        rules = rules_of(sampling)
        working: dict[int, Request] = {}  # by slot
        replies: dict[int, Future[Any]] = {}  # replies to come, by slot
        waiting, read, again = deque(self._together(requests)), list[Read](), list[Request]()

        def grown(cache, columns, end):
            if end + self.stride > columns < limit:
                columns = self._columns(end + self.stride, limit)
                cache = cast(UnrolledGenerator, self.model).grow(cache, columns)
            return cache, columns

        while left:
            self._check()
            if again:
                segments = defaultdict[tuple[int, ...], list[Request]](list)
                for request in again:
                    segments[request.prompt].append(request)
                cache, columns = grown(cache, columns, max(map(len, segments)))
                waiting += self._together(segments)
                again.clear()
            cache = self._admit(cache, slots, working, waiting, read)
            while hidden and (free := _free(slots, working)):
                working[free[0]] = request = hidden.popleft()
                assert reply is not None
                replies[free[0]] = reply(request.index, None, ())
            if slots.done.all():  # all wait for replies
                futures.wait(replies.values(), CHECK, futures.FIRST_COMPLETED)
            else:
                live = ~slots.done
                end = int(slots.position[live].max())
                cache, columns = grown(cache, columns, end)
                quota = refill if left > len(working) else number
                if reply:
                    quota = max(1, live.sum() // 16)
                steps = min(self.steps, max(self.stride, int(CALL / self._pace)))
                steps = min(steps, max(LOOK, self.stride)) if replies else steps
                steps = steps if columns == limit else min(steps, columns - end)
                began = time.perf_counter()
                ends = np.int32(quota), np.int32(steps)
                cache, *done = self._run(self.params, cache, slots, rules, *ends)
                slots, steps = jax.tree.map(np.array, jax.device_get(done))
                took = time.perf_counter() - began
                busy, self._pace = busy + took, max(took / max(int(steps), 1), 1e-6)
                count["decode_steps"] += int(steps)
            ended = _collect(slots, working, replies, drafts, reply, again, self._chosen(cache))
            left, count["left"] = left - ended, count["left"] - ended
        return busy

    def _chosen(self, cache: Any) -> Chosen | None:
        """The experts of all tokens in the slots, if they are kept."""
        return cache[-1] if self.model.routed else None

    def _columns(self, needed: int, limit: int) -> int:
        """Columns of the cache: all, or if `static` a power of two, for few compilations."""
        return min(limit, padded(needed, 256)) if self.model.static else limit

    def _together(
        self, requests: Mapping[tuple[int, ...], list[Request]]
    ) -> list[tuple[int, list[list[Request]]]]:
        """Requests by their prompts, of which some are read at a time: padded to a length."""
        each = [*requests.values()]
        lengths = by_padded_length([*map(len, requests)], SHORTEST)
        return [
            (length, [each[i] for i in group[start : start + size]])
            for length, group in lengths.items()
            for size in [self._read_at_a_time(length)]
            for start in range(0, len(group), size)
        ]

    def _read(self, length: int, some: list[list[Request]]) -> Read:
        """Reads prompts."""
        size = self._read_at_a_time(length)
        tokens, lengths = np.zeros((size, length), np.int32), np.zeros(size, np.int32)
        for row, (request, *_) in enumerate(some):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        self.counters["prefill_tokens"] += int(lengths.sum())
        requests = deque((row, one) for row, group in enumerate(some) for one in group)
        return Read(self._prefill(self.params, tokens, lengths), requests)

    def _admit(self, cache, slots, working, waiting, read):
        """Puts requests into free slots: the prompts' cache on the device, the rest on the host.

        `read` has those prompts whose requests are not all in slots yet: no others are there beside them.
        """
        free = deque(_free(slots, working))
        while free and (read or waiting):  # read a prompt only if a slot is free
            if not read:
                read.append(self._read(*waiting.popleft()))
            requests = read[0].requests
            slot = np.full(self.prefill_prompts, len(slots.done), np.int32)  # out of range: no copy
            which = np.zeros(self.prefill_prompts, np.int32)
            for i in range(min(len(slot), len(free), len(requests))):
                s, (row, request) = free.popleft(), requests.popleft()
                slot[i], which[i], working[s] = s, row, request
                _start(slots, s, request)
            cache = self._insert(cache, read[0].cache, slot, which)
            if not requests:
                read.clear()
        return cache


def _give_back_memory() -> None:
    """Of freed arrays: glibc keeps what is below 32 MiB each, and an update asks for more at once."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def own_copies(mesh: Mesh) -> Mesh:
    """The copies (axis 0) on this process's devices; a UserError if processes share one."""
    copies = mesh.devices.reshape(len(mesh.devices), -1)
    here = np.vectorize(lambda device: device.process_index == jax.process_index())(copies)
    if (here.any(1) != here.all(1)).any():
        raise UserError(
            f"engine: {copies.shape[1]} devices share a copy of the weights, and a host has fewer: "
            "use Vllm, or a devices_a_copy that divides the devices of a host"
        )
    return mesh if here.all() else Mesh(mesh.devices[here.all(1)], mesh.axis_names)


def own_part(array: Any, mesh: Mesh) -> jax.Array:
    """This process's part of an array that is whole on each copy; `mesh` has its devices."""
    if array.is_fully_addressable:
        return array
    mine = [shard.data for shard in array.addressable_shards]
    where = NamedSharding(mesh, array.sharding.spec)
    return jax.make_array_from_single_device_arrays(array.shape, where, mine)


def shared_out(slots: int, prompts: int, devices: int, everywhere: int) -> tuple[int, int]:
    """Slots, and prompts prefilled at a time, for a share of the devices; rounded up to divide."""
    share = lambda number: -(-number * devices // everywhere)
    even = lambda number: -(-number // devices) * devices
    slots = even(share(slots))
    return slots, even(min(share(prompts), slots))


def by_padded_length(lengths: Sequence[int], least: int) -> dict[int, list[int]]:
    """Indices of sequences by padded length, a power of two from `least` on; the longest first."""
    found = defaultdict(list)
    for i, length in enumerate(lengths):
        found[padded(length, least)].append(i)
    return dict(sorted(found.items(), reverse=True))


def padded(number: int, least: int = 1) -> int:
    """The smallest power of two that is enough."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def _hash(prompt: tuple[int, ...]) -> int:
    """The number that stands for a prompt in the noise of its responses."""
    return zlib.crc32(np.asarray(prompt, np.int32).tobytes())


def _start(slots: Slots, s: int, request: Request) -> None:
    """Sets slot `s` to read the last token of the prompt next."""
    arrays: Any = slots
    arrays.prompt[s], arrays.number[s] = _hash(request.prompt), request.number
    arrays.last[s], arrays.position[s] = request.prompt[-1], len(request.prompt) - 1
    arrays.count[s], arrays.done[s], arrays.stopped[s] = request.used, False, False
    if arrays.forced is not None:
        arrays.forced[s] = request.used


def _collect(
    slots: Slots,
    working: dict[int, Request],
    replies: dict[int, Future[Any]],
    drafts: list[Draft],
    reply: Reply | None,
    again: list[Request],
    chosen: Chosen | None,
) -> int:
    """Takes turns that are over and asks for replies; how many responses these end.

    A slot whose episode goes on is set to read the reply next, another one is free. New segments
    are added to `again`. `chosen` are the experts of the tokens in each slot.
    """

    def context_ends(s, request, count):
        if chosen is not None:
            read = len(request.prompt) + int(count) - request.used - 1  # not the last one
            drafts[request.index].experts.append(np.asarray(_row(chosen.experts, s))[:read])

    arrays: Any = slots
    ended_now = [s for s in working if slots.done[s] and s not in replies]
    for s in ended_now:
        turn = slice(0 if slots.forced is None else slots.forced[s], slots.count[s])
        tokens, logps = slots.tokens[s, turn].tolist(), slots.logps[s, turn].tolist()
        if not all(map(math.isfinite, logps)):
            raise UserError(
                "the model gives log-probs that are not finite: look at its weights, and for a "
                "dtype that its logits are too large for"
            )
        drafts[working[s].index].add(tokens, logps, bool(slots.stopped[s]))
        if reply is None:
            context_ends(s, working.pop(s), slots.count[s])
        else:
            replies[s] = reply(working[s].index, tokens, logps)
    if reply is None:
        return len(ended_now)
    futures.wait([replies[s] for s in ended_now], SOON)
    ended = 0
    for s in [s for s in replies if replies[s].done()]:
        request, count = working[s], slots.count[s]
        episode = drafts[request.index]
        size, segments = len(episode.tokens), len(episode.restarts)
        begins = not episode.turns
        goes_on = episode.goes_on(replies.pop(s).result())
        if goes_on and len(episode.restarts) == segments and not begins:
            arrays.forced[s] = count + len(episode.tokens) - size
            arrays.tokens[s, count : arrays.forced[s]] = episode.tokens[size:]
            arrays.done[s] = arrays.stopped[s] = False
            continue
        working.pop(s)
        if not begins:
            context_ends(s, request, count)
        arrays.position[s], ended = 0, ended + (not goes_on)
        if goes_on:
            identity = np.asarray([_hash(request.prompt), request.number], np.uint32).tobytes()
            used = slots.tokens.shape[1] - episode.room
            prompt = tuple(episode.tokens[size:]) or request.prompt
            again.append(Request(prompt, zlib.crc32(identity), request.index, used))
    return ended


def _free(slots: Slots, working: Mapping[int, Request]) -> list[int]:
    return [s for s in range(len(slots.done)) if s not in working]


@jax.jit
def _row(x, row):
    return x[row]
