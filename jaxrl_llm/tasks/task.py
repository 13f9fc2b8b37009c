"""The boundary to a problem: its examples, their prompts, and a reward for a response."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError

logger = logging.getLogger(__name__)

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)


class Source(Protocol[E_co]):
    """Random access to examples; a list will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> E_co: ...


@dataclass(frozen=True)
class Reward:
    """What one response earned; `fields` are further numbers for the metrics."""

    score: float
    correct: bool
    fields: Mapping[str, float] = field(default_factory=dict)


NO_REWARD = Reward(0.0, False)


class Task(Protocol[E]):
    """A named problem: examples to train and to test on, a prompt for each, a reward for a response."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Source[E]: ...

    @property
    def test(self) -> Source[E]: ...

    def prompt(self, example: E, /) -> str: ...

    def reward(self, example: E, response: str, /) -> Reward: ...


@runtime_checkable
class Demonstrator(Protocol[E_contra]):
    """A task that can also write a full-score response, for a supervised warm start."""

    def demonstration(self, example: E_contra, /) -> str: ...


class Mapped(Generic[E]):
    """A random-access source seen through a function, applied on each access."""

    def __init__(self, source: Source[Any], function: Callable[[Any], E]):
        self._source = source
        self._function = function

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> E:
        return self._function(self._source[index])

    def __iter__(self) -> Iterator[E]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Scored:
    """The rewards of a batch, and how many of them are the default because the task raised."""

    rewards: tuple[Reward, ...]
    failures: int


def score_responses(
    task: Task[E],
    examples: Sequence[E],
    responses: Sequence[str],
    *,
    default: Reward = NO_REWARD,
    threads: int = 1,
) -> Scored:
    """Rewards each response; a reward that raises costs its own sample the default, never the run."""

    def attempt(example: E, response: str) -> Reward | None:
        try:
            return _checked(task.reward(example, response))
        except Exception as error:  # a task is foreign code: any error is its own
            logger.warning(
                "%s: reward failed, default %s used: %r", task.name, default.score, error
            )
            return None

    if len(examples) != len(responses):
        raise ValueError(f"{len(examples)} examples for {len(responses)} responses")
    if threads == 1:
        attempts = list(map(attempt, examples, responses))
    else:
        with ThreadPoolExecutor(threads) as pool:
            attempts = list(pool.map(attempt, examples, responses))
    rewards = tuple(default if reward is None else reward for reward in attempts)
    return Scored(rewards, attempts.count(None))


def _checked(reward: Reward) -> Reward:
    """A reward in plain floats; NaN, infinity and other types are errors of the task."""
    if not isinstance(reward, Reward):
        raise TypeError(f"reward() returned {type(reward).__name__}, not Reward")
    fields = {str(key): float(value) for key, value in reward.fields.items()}
    score = float(reward.score)
    if not all(map(math.isfinite, (score, *fields.values()))):
        raise ValueError(f"reward() returned a number that is not finite: {reward}")
    return Reward(score, bool(reward.correct), fields)


def load_task(spec: str) -> Task[Any]:
    """The task that `path/to/file.py:name` names, checked to be usable."""
    path, separator, name = spec.rpartition(":")
    if not (separator and path and name):
        raise UserError(f"task {spec!r}: write it as path/to/file.py:name")
    module = userfile.run(Path(path), "task")
    task = userfile.member(module, name, f"task {spec!r}: {path}")
    if isinstance(task, type):
        raise UserError(
            f"task {spec!r}: {name} is a class; name an instance, as in task = {name}()"
        )
    _check_members(task, spec)
    return task


def _check_members(task: Any, spec: str) -> None:
    """Raises a UserError that names the first thing that keeps `task` from being a Task."""
    for member in ("name", "train", "test", "prompt", "reward"):
        if not hasattr(task, member):
            raise UserError(f"task {spec!r}: it has no {member!r} (see jaxrl_llm/tasks/task.py)")
    for member in ("prompt", "reward"):
        if not callable(getattr(task, member)):
            raise UserError(f"task {spec!r}: {member!r} is not a function")
    for member in ("train", "test"):
        source = getattr(task, member)
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise UserError(
                f"task {spec!r}: {member!r} needs a length and access by index, as a list has"
            )
        if len(source) == 0:
            raise UserError(f"task {spec!r}: {member!r} is empty")
