"""The embedded engine: a fixed number of slots that decode together inside one jitted loop.

Slots are spread over the devices, each of which draws its own tokens. A prompt is prefilled once
and copied to the slots of its responses; a slot whose response is complete takes the next request.
Shapes do not depend on the requests, and a token's noise is a function of (seed, prompt, number of
the response, tokens before it): a request gives the same tokens whatever it is batched with. With
several hosts every process generates on its own devices; only `push` involves all.
"""

import itertools
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.model import Decoder
from jaxrl_llm.rollouts.sampler import Rollout, Sampling
from jaxrl_llm.rollouts.slots import Slots, idle_slots, program, rules_of, ways_of

STRIDE = 8  # tokens that an accelerator decodes between checks whether to stop


class Request(NamedTuple):
    """One requested response: its `number` among those to the prompt, its `index` in the result."""

    prompt: tuple[int, ...]
    number: int
    index: int


class NativeSampler:
    """A sampler on the trainer's devices; it reads the trainer's parameters in place, else a copy.

    `slots` sequences decode at a time; prompts are prefilled `prefill_prompts` at a time, padded to
    a power of two. Both count all processes: each takes the share of its devices, rounded up to
    divide evenly. The loop returns to the host when a sixteenth of the slots is done, if requests
    are waiting, or after `steps` tokens.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        prefill_prompts: int,
        steps: int = 256,
        check: Callable[[], None] = lambda: None,
    ):
        self.model, self.steps, self._check = model, steps, check
        self.mesh = own_copies(model.mesh)
        self.slots, self.lanes, self.together = shared_out(
            slots, prefill_prompts, self.mesh.size, model.mesh.size
        )
        self.swap = max(1, self.slots // 16)
        self.stride = STRIDE if model.static else 1
        self.params: Any = None
        self.version = 0
        self.counters: dict[str, Any] = {}
        self.sync: dict[str, float] = {}
        self._longest = 0
        self._empty = jax.jit(model.empty, static_argnums=(1, 2))
        self._prefill = jax.jit(model.prefill)
        self._insert = jax.jit(model.insert, donate_argnums=0)
        self._run = program(model.decode, self.stride)

    def put(self, arrays: Any) -> Any:
        """Copies host arrays to every device of this process."""
        return jax.device_put(arrays, NamedSharding(self.mesh, P()))

    @property
    def place(self) -> str:
        """One line that says where it generates."""
        return (
            f"generation: {self.slots} sequences at a time on {self.mesh.size} devices, "
            f"{self.mesh.shape['tensor']} of which share a copy of the weights"
        )

    def push(self, params: Any, version: int) -> None:
        """Uses these parameters until a train step donates them; all processes call it together."""
        self.release()
        with jax.set_mesh(self.model.mesh):
            everywhere = self.model.weights(params)
        self.params = jax.tree.map(partial(own_part, mesh=self.mesh), everywhere)
        self.version = version

    def release(self) -> None:
        """Drops the weights and any copy of them; push before the next `generate`."""
        self.params = None

    def generate(self, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling) -> Rollout:
        """`n` responses to each prompt, side by side; sets `counters` to this call's figures."""
        if self.params is None:
            raise UserError("the sampler has no weights: push some before generate")
        if n < 1 or not prompts or not all(map(len, prompts)):
            raise UserError("generate wants at least one prompt, none of them empty, and n >= 1")
        requests = number(prompts, n)
        results: list[Any] = [None] * (n * len(prompts))
        with jax.set_mesh(self.mesh):
            self._serve(requests, results, sampling)
        tokens, logps, stopped = zip(*results, strict=True)
        return Rollout(
            prompts=[p for p in prompts for _ in range(n)],
            responses=tokens,
            logps=logps,
            finished=stopped,
            version=self.version,
        )

    def _serve(self, requests, results, sampling):
        """The host's loop: fill free slots, decode, collect the finished responses."""
        longest = max(_buckets(requests))
        if not self.model.static:  # same results, and the largest cache so far compiles less
            longest = self._longest = max(self._longest, longest)
        limit = longest + sampling.max_tokens
        columns = self._columns(longest + self.stride, limit)
        ways = ways_of(sampling) if self.model.static else None
        cache = self._empty(self.params, self.slots, columns)
        slots = idle_slots(self.slots, sampling.max_tokens)
        rules = self.put(rules_of(sampling))
        working: list[Request | None] = [None] * self.slots
        count: dict[str, Any] = {"prefill_tokens": 0, "decode_steps": 0}
        waiting = self._prefilled(requests, count)
        idle, since = 0.0, time.perf_counter()
        while left := results.count(None):
            self._check()
            cache = self._admit(cache, slots, working, waiting)
            more_wait = left > self.slots - working.count(None)
            quota = self.put(np.int32(self.swap if more_wait else self.slots))
            end = int(slots.position[~slots.done].max())
            if end + self.stride > columns < limit:
                columns = self._columns(end + self.stride, limit)
                cache = self.model.grow(cache, columns)
            steps = self.put(
                np.int32(self.steps if columns == limit else min(self.steps, columns - end))
            )
            idle += time.perf_counter() - since
            cache, slots, steps = self._run(
                self.params, cache, self.put(slots), rules, quota, steps, ways=ways
            )
            slots = jax.tree.map(np.array, jax.device_get(slots))
            since = time.perf_counter()
            count["decode_steps"] += int(jax.device_get(steps))
            _collect(slots, working, results)
        idle += time.perf_counter() - since
        self.counters = count | {"idle_seconds": idle}

    def _columns(self, needed: int, limit: int) -> int:
        """Columns of the cache: all, or if `static` a power of two, for few compilations."""
        return min(limit, max(256, 1 << (needed - 1).bit_length())) if self.model.static else limit

    def _prefilled(self, requests, count) -> Iterator[tuple[Any, int, Request]]:
        """Yields (cache, index of the prompt in it, request); prefills a chunk when needed."""
        for length, prompts in _buckets(requests).items():
            for start in range(0, len(prompts), self.together):
                chunk = prompts[start : start + self.together]
                tokens = np.zeros((self.together, length), np.int32)
                for i, prompt in enumerate(chunk):
                    tokens[i, : len(prompt)] = prompt
                    count["prefill_tokens"] += len(prompt)
                cache = self._prefill(self.params, self.put(tokens))
                for i, prompt in enumerate(chunk):
                    yield from ((cache, i, request) for request in requests[prompt])

    def _admit(self, cache, slots, working, waiting):
        """Puts requests into free slots: the prompts' cache on the device, the rest on the host."""
        free = [s for s, request in enumerate(working) if request is None]
        pairs = zip(free, waiting, strict=False)  # `free` first: prefill only if a slot is free
        for _, same in itertools.groupby(pairs, key=lambda pair: id(pair[1][0])):
            same = list(same)
            for start in range(0, len(same), self.lanes):
                some = same[start : start + self.lanes]
                slot = np.full(self.lanes, self.slots, np.int32)  # out of range: no insert
                which = np.zeros(self.lanes, np.int32)
                slot[: len(some)] = [s for s, _ in some]
                which[: len(some)] = [i for _, (_, i, _) in some]
                cache = self._insert(cache, some[0][1][0], self.put(slot), self.put(which))
            for s, (_, _, request) in same:
                working[s] = request
                _start(slots, s, request)
        return cache


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
    place = NamedSharding(mesh, array.sharding.spec)
    return jax.make_array_from_single_device_arrays(array.shape, place, mine)


def shared_out(slots: int, prompts: int, devices: int, everywhere: int) -> tuple[int, int, int]:
    """Slots, and prompts per insert and per prefill, for a share of the devices; rounded up."""
    share = lambda number: -(-number * devices // everywhere)
    even = lambda number: -(-number // devices) * devices
    slots = even(share(slots))
    lanes = min(share(prompts), slots)
    return slots, lanes, even(lanes)


def number(prompts: Sequence[Sequence[int]], n: int) -> dict[tuple[int, ...], list[Request]]:
    """The requests of each distinct prompt, numbered over the whole call."""
    requests = defaultdict(list)
    for index in range(n * len(prompts)):
        prompt = tuple(map(int, prompts[index // n]))
        requests[prompt].append(Request(prompt, len(requests[prompt]), index))
    return dict(requests)


def _buckets(prompts) -> dict[int, list[tuple[int, ...]]]:
    """Prompts by padded length, a power of two of at least 16; the longest first."""
    buckets = defaultdict(list)
    for prompt in prompts:
        buckets[max(16, 1 << (len(prompt) - 1).bit_length())].append(prompt)
    return dict(sorted(buckets.items(), reverse=True))


def _start(slots: Slots, s: int, request: Request) -> None:
    """Sets slot `s` to read the last token of the prompt next."""
    arrays: Any = slots
    arrays.prompt[s] = zlib.crc32(np.asarray(request.prompt, np.int32).tobytes())
    arrays.number[s] = request.number
    arrays.last[s], arrays.position[s] = request.prompt[-1], len(request.prompt) - 1
    arrays.count[s], arrays.done[s], arrays.stopped[s] = 0, False, False


def _collect(slots: Slots, working: list, results: list) -> None:
    """Moves finished responses from their slots to `results`; frees the slots."""
    for s, request in enumerate(working):
        if request is not None and slots.done[s]:
            size = slots.count[s]
            tokens, logps = slots.tokens[s, :size].tolist(), slots.logps[s, :size].tolist()
            if not all(map(math.isfinite, logps)):
                raise UserError(
                    "the model gives log-probs that are not finite: look at its weights, and for a dtype that "
                    "its logits are too large for"
                )
            results[request.index] = tokens, logps, bool(slots.stopped[s])
            working[s] = None
