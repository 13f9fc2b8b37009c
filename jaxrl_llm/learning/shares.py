"""Prompts shared out over the processes of a run; what each makes of its own comes together in all of them."""

import io
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm import hosts
from jaxrl_llm.rollouts.sampler import Rollout, Sampler, Sampling

T = TypeVar("T")


def owners(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The process of each prompt; equal prompts have the same, which counts their responses as one would alone."""
    numbers = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    return [numbers[tuple(prompt)] * hosts.count() // len(numbers) for prompt in prompts]


def mine(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The places of this process's prompts."""
    return [i for i, owner in enumerate(owners(prompts)) if owner == hosts.index()]


def generate(
    sampler: Sampler, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling
) -> Rollout:
    """`n` responses to each prompt, each by the sampler of its process."""
    return whole(share(sampler, prompts, n=n, sampling=sampling), prompts)


def share(
    sampler: Sampler, prompts: Sequence[Sequence[int]], *, n: int, sampling: Sampling
) -> Rollout:
    """`n` responses to each prompt of this process."""
    here = [prompts[i] for i in mine(prompts)]
    return sampler.generate(here, n=n, sampling=sampling) if here else Rollout([], [], [])


def whole(part: Rollout, prompts: Sequence[Sequence[int]]) -> Rollout:
    """The responses of all processes to these prompts, of which `part` are this one's."""
    if hosts.count() == 1:
        return part
    parts = [_unpacked(payload) for payload in hosts.exchange(_payload(part))]
    rows = merged(prompts, [_rows(one) for one in parts])
    responses, logps, finished = zip(*rows, strict=True)
    tolerance = max(float(one["tolerance"]) for one in parts)
    n = len(rows) // len(prompts)
    return Rollout(
        prompts=[prompt for prompt in prompts for _ in range(n)],
        responses=responses,
        logps=logps,
        finished=finished,
        version=max(int(one["version"]) for one in parts),
        tolerance=None if np.isinf(tolerance) else float(tolerance),
    )


def merged(prompts: Sequence[Sequence[int]], parts: Sequence[Sequence[T]]) -> list[T]:
    """What the processes have of their prompts, equally much of each, in the order of the prompts."""
    left, n = list(map(iter, parts)), sum(map(len, parts)) // len(prompts)
    return [next(left[owner]) for owner in owners(prompts) for _ in range(n)]


def _payload(part: Rollout) -> bytes:
    flat = lambda rows, dtype: np.asarray([x for row in rows for x in row], dtype)
    nothing = not part.responses
    return _packed(
        lengths=np.asarray([len(row) for row in part.responses], np.int32),
        tokens=flat(part.responses, np.int32),
        logps=flat(part.logps, np.float32),
        finished=np.asarray(part.finished, bool),
        version=-1 if nothing else part.version,
        tolerance=-np.inf if nothing or part.tolerance is None else part.tolerance,
    )


def _rows(part: dict[str, Any]) -> list[tuple[list[int], list[float], bool]]:
    ends = np.cumsum(part["lengths"])[:-1]
    tokens, logps = (np.split(part[name], ends) for name in ("tokens", "logps"))
    rows = zip(tokens, logps, part["finished"], strict=False)
    return [(t.tolist(), p.tolist(), bool(done)) for t, p, done in rows]


def _packed(**arrays: Any) -> bytes:
    """Arrays as bytes; `_unpacked` gives them back."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _unpacked(payload: bytes) -> dict[str, np.ndarray]:
    """What `_packed` was given."""
    with np.load(io.BytesIO(payload), allow_pickle=False) as found:
        return dict(found)
