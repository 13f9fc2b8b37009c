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
import math
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.tokenizer import HiddenTokens
from jaxrl_llm.rollouts.sampler import (
    Draft,
    Reply,
    Request,
    Said,
    Sampler,
    Sampling,
    enumerate_requests,
)
from jaxrl_llm.rollouts.slots import idle_slots, program, rules_of
from jaxrl_llm.rollouts.trajectory import Trajectory

SHORTEST = 16  # tokens to which shorter prompts are padded: fewer programs to compile
STRIDE = 8  # tokens decoded between checks whether to stop, where layers are apart
SOON = 0.01  # seconds in which a reply is waited for; a later one is looked for every LOOK tokens
LOOK = 16
CALL = 5.0  # seconds of decoding, about, between checks whether to stop
CHECK = 0.5  # seconds between checks where all slots wait for replies


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
        usual, longer, hidden = list[Request](), list[Request](), list[Request]()
        longest = self.prompt_length or math.inf
        for request in enumerate_requests(prompts, n):
            if reply and isinstance(prompts[request.index // n], HiddenTokens):
                hidden.append(request)
            else:
                (usual if len(request.prompt) <= longest else longer).append(request)
        drafts = [Draft(sampling, prompt) for prompt in prompts for _ in range(n)]
        self.counters = {"prefill_tokens": 0, "decode_steps": 0, "left": len(drafts)}
        begun, busy = time.perf_counter(), 0.0
        # what the host has changed goes along with a call: a device_put of its own takes longer
        with jax.set_mesh(self.mesh), jax.transfer_guard_host_to_device("allow"):
            if usual or hidden:
                busy += _Round(self, self.slots, usual, hidden, drafts, sampling, reply).run()
            if longer:
                columns = lambda length: padded(length, SHORTEST) + sampling.max_tokens
                most = self.slots * columns(self.prompt_length)
                fit = self._evenly(most // columns(max(len(one.prompt) for one in longer)))
                busy += _Round(self, fit, longer, [], drafts, sampling, reply).run()
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


class _Round:
    """Requests that are answered together in some slots: all that the host knows of them.

    Those without a slot are `waiting`, or their prompts are `read`, or `hidden`: a reply says first
    what the policy sees. Those in a slot are `working`, until their response, or its segment, is
    over; `replies` are to come for some of these.
    """

    def __init__(
        self,
        engine: NativeSampler,
        number: int,
        requests: Sequence[Request],
        hidden: Sequence[Request],
        drafts: list[Draft],
        sampling: Sampling,
        reply: Reply | None,
    ):
        self.engine, self.drafts, self.reply = engine, drafts, reply
        self.waiting = deque[tuple[int, list[list[Request]]]]()  # as `_line_up` says
        self.read = deque[tuple[int, Request]]()  # with the prompt's row in `prompts`
        self.prompts: Any = None  # keys and values of the prompts that were read last
        self.hidden = deque(hidden)
        self.working: dict[int, Request] = {}  # by slot
        self.replies: dict[int, Future[Said]] = {}  # by slot
        self.rules = rules_of(sampling)
        self.slots: Any = idle_slots(number, sampling.max_tokens, turns=reply is not None)
        longest = padded(max(len(one.prompt) for one in [*requests, *hidden]), SHORTEST)
        self.limit = longest + sampling.max_tokens  # columns of the cache, at most
        self.columns = self._columns(longest)
        self.cache: Any = engine._empty(number, self.columns)
        self._line_up(requests)

    def run(self) -> float:
        """Answers all of them; the seconds of decoding."""
        busy = 0.0
        while self.waiting or self.read or self.hidden or self.working:
            self.engine._check()
            self._admit()
            if self.slots.done.all():  # all wait for replies
                futures.wait(self.replies.values(), CHECK, futures.FIRST_COMPLETED)
            else:
                busy += self._decode()
            self._collect()
        return busy

    def _columns(self, end: int) -> int:
        """Columns of a cache with a stride after `end`: all, or if `static` a power of two: few programs."""
        static, needed = self.engine.model.static, padded(end + self.engine.stride, 256)
        return min(self.limit, needed) if static else self.limit

    def _grow(self, end: int) -> None:
        """Makes room in the cache for a stride after column `end`."""
        if (columns := self._columns(end)) > self.columns:
            model, self.columns = cast(UnrolledGenerator, self.engine.model), columns
            self.cache = model.grow(self.cache, columns)

    def _line_up(self, requests: Sequence[Request]) -> None:
        """Lets requests wait by their prompts, of which some are read at a time: padded to a length."""
        by_prompt = defaultdict[tuple[int, ...], list[Request]](list)
        for request in requests:
            by_prompt[request.prompt].append(request)
        each = [*by_prompt.values()]
        for length, places in by_padded_length([*map(len, by_prompt)], SHORTEST).items():
            size = self.engine._read_at_a_time(length)
            parts = [places[start : start + size] for start in range(0, len(places), size)]
            self.waiting += [(length, [each[i] for i in part]) for part in parts]

    def _read_next(self) -> None:
        """Reads the prompts that have waited longest; there are never others beside them."""
        engine, (length, some) = self.engine, self.waiting.popleft()
        size = engine._read_at_a_time(length)
        tokens, lengths = np.zeros((size, length), np.int32), np.zeros(size, np.int32)
        for row, (request, *_) in enumerate(some):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
        engine.counters["prefill_tokens"] += int(lengths.sum())
        self.prompts = engine._prefill(engine.params, tokens, lengths)
        self.read += [(row, one) for row, group in enumerate(some) for one in group]

    def _admit(self) -> None:
        """Puts requests into free slots: the prompts' cache on the device, the rest on the host.

        What a hidden one begins with is asked for once a slot is free for it.
        """
        free = deque(s for s in range(len(self.slots.done)) if s not in self.working)
        while free and (self.read or self.waiting):  # read a prompt only if a slot is free
            if not self.read:
                self._read_next()
            # nothing is copied to a slot out of range
            slot = np.full(self.engine.prefill_prompts, len(self.slots.done), np.int32)
            which = np.zeros_like(slot)
            for i in range(min(len(slot), len(free), len(self.read))):
                s, (row, request) = free.popleft(), self.read.popleft()
                slot[i], which[i] = s, row
                self._start(s, request)
            self.cache = self.engine._insert(self.cache, self.prompts, slot, which)
            if not self.read:
                self.prompts = None
        while free and self.hidden:
            assert self.reply is not None
            s, request = free.popleft(), self.hidden.popleft()
            self.working[s], self.replies[s] = request, self.reply(request.index, None, ())

    def _start(self, s: int, request: Request) -> None:
        """Sets slot `s` to read the last token of the prompt next."""
        slots, self.working[s] = self.slots, request
        slots.prompt[s], slots.number[s] = _hash(request.prompt), request.number
        slots.last[s], slots.position[s] = request.prompt[-1], len(request.prompt) - 1
        slots.count[s], slots.done[s], slots.stopped[s] = request.used, False, False
        if slots.forced is not None:
            slots.forced[s] = request.used

    def _decode(self) -> float:
        """Decodes until there is something to do for the host; the seconds that it took."""
        engine, live = self.engine, ~self.slots.done
        end = int(self.slots.position[live].max())
        self._grow(end)
        # to come back once a few slots are done is of use where they can go on
        go_on = self.reply or self.read or self.waiting
        quota = max(1, live.sum() // 16) if go_on else len(live)
        steps = min(engine.steps, max(engine.stride, int(CALL / engine._pace)))
        steps = min(steps, max(LOOK, engine.stride)) if self.replies else steps
        steps = min(steps, self.columns - end) if self.columns < self.limit else steps
        began = time.perf_counter()
        self.cache, *done = engine._run(
            engine.params, self.cache, self.slots, self.rules, np.int32(quota), np.int32(steps)
        )
        self.slots, steps = jax.tree.map(np.array, jax.device_get(done))
        took = time.perf_counter() - began
        engine._pace = max(took / max(int(steps), 1), 1e-6)
        engine.counters["decode_steps"] += int(steps)
        return took

    def _collect(self) -> None:
        """Takes turns that are over, then frees their slots or asks for replies, and takes these."""
        slots = self.slots
        ended = [s for s in self.working if slots.done[s] and s not in self.replies]
        for s in ended:
            index = self.working[s].index
            turn = slice(0 if slots.forced is None else slots.forced[s], slots.count[s])
            tokens, logps = slots.tokens[s, turn].tolist(), slots.logps[s, turn].tolist()
            if not all(map(math.isfinite, logps)):
                raise UserError(
                    "the model gives log-probs that are not finite: look at its weights, and for a "
                    "dtype that its logits are too large for"
                )
            self.drafts[index].add(tokens, logps, bool(slots.stopped[s]))
            if self.reply is None:
                self._free(s)
            else:
                self.replies[s] = self.reply(index, tokens, logps)
        if self.reply is None:
            self.engine.counters["left"] -= len(ended)
        else:
            futures.wait([self.replies[s] for s in ended], SOON)
            self._take_replies()

    def _take_replies(self) -> None:
        """Sets slots whose episodes go on to read the replies next, and frees the others.

        A reply that takes the place of all before it is another request, which waits for a slot.
        """
        slots, again = self.slots, list[Request]()
        for s in [s for s, reply in self.replies.items() if reply.done()]:
            request = self.working[s]
            episode = self.drafts[request.index]
            size, segments = len(episode.tokens), len(episode.restarts)
            goes_on = episode.goes_on(self.replies.pop(s).result())
            if goes_on and episode.turns and len(episode.restarts) == segments:
                count = slots.count[s]
                slots.forced[s] = count + len(episode.tokens) - size
                slots.tokens[s, count : slots.forced[s]] = episode.tokens[size:]
                slots.done[s] = slots.stopped[s] = False
                continue
            self._free(s)
            if not goes_on:
                self.engine.counters["left"] -= 1
                continue
            identity = np.asarray([_hash(request.prompt), request.number], np.uint32).tobytes()
            used = slots.tokens.shape[1] - episode.room
            prompt = tuple(episode.tokens[size:]) or request.prompt
            again.append(Request(prompt, zlib.crc32(identity), request.index, used))
        if again:
            self._grow(max(len(one.prompt) for one in again))
            self._line_up(again)

    def _free(self, s: int) -> None:
        """Frees slot `s`, and notes the experts of the tokens that were read there, if they are kept."""
        request = self.working.pop(s)
        self.slots.position[s], draft = 0, self.drafts[request.index]
        if self.engine.model.routed and draft.turns:  # before the first turn nothing was read
            size = len(request.prompt) + int(self.slots.count[s]) - request.used - 1  # not the last
            draft.experts.append(np.asarray(_row(self.cache[-1].experts, s))[:size])


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


@jax.jit
def _row(x, row):
    return x[row]
