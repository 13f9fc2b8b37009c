"""The interface of tasks (examples, prompts, rewards), and the scoring of responses."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import deadline

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
    """The reward of one response; `fields` are further numbers for the metrics.

    `checked` is False where nobody could decide whether the response is right: it is left out of
    the batch and its statistics.

    >>> jl.Reward(1.0, correct=True, fields={"format": 1.0}).checked
    True
    """

    score: float
    correct: bool
    fields: Mapping[str, float] = field(default_factory=dict)
    checked: bool = True


UNCHECKED = Reward(0.0, False, checked=False)


class Task(Protocol[E]):
    """A named task: examples to train and test on, a prompt for each, a reward for a response."""

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
    """A random-access source whose examples go through a function at each access."""

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
    """The rewards of a batch, in the order of its responses."""

    rewards: tuple[Reward, ...]

    @property
    def failures(self) -> int:
        """The number of unchecked responses."""
        return sum(not reward.checked for reward in self.rewards)


def score_responses(
    task: Task[E],
    examples: Sequence[E],
    responses: Sequence[str],
    *,
    threads: int = 1,
    seconds: float = 300.0,
) -> Scored:
    """The responses' rewards; unchecked where it raises, is not finite or takes over `seconds`.

    With one thread a late reward is interrupted. With several it goes on in the background; an
    endless regular expression, which keeps the GIL, blocks all else. A task's UserError is raised.
    """
    if len(examples) != len(responses):
        raise ValueError(f"{len(examples)} examples for {len(responses)} responses")

    def call(example: E, response: str) -> Callable[[], Reward]:
        return lambda: _plain(task.reward(example, response))

    def settled(outcome: Reward | Exception) -> Reward:
        if isinstance(outcome, UserError):
            raise outcome
        if isinstance(outcome, Exception):
            logger.warning("%s: reward failed, response left unchecked: %r", task.name, outcome)
            return UNCHECKED
        return outcome

    calls = [call(e, r) for e, r in zip(examples, responses, strict=True)]
    return Scored(tuple(map(settled, deadline.outcomes(calls, seconds, threads))))


def _plain(reward: Reward) -> Reward:
    """The reward in plain floats; TypeError or ValueError if the task returned something else."""
    if not isinstance(reward, Reward):
        raise TypeError(f"reward() returned {type(reward).__name__}, not Reward")
    fields = {str(key): float(value) for key, value in reward.fields.items()}
    score = float(reward.score)
    if not all(map(math.isfinite, (score, *fields.values()))):
        raise ValueError(f"reward() returned a number that is not finite: {reward}")
    return Reward(score, bool(reward.correct), fields, bool(reward.checked))


def load_task(spec: str) -> Task[Any]:
    """The task named by `path/to/file.py:name`; UserError if there is none or it is no Task."""
    path, separator, name = spec.rpartition(":")
    if not (separator and path and name):
        raise UserError(f"task {spec!r}: write it as path/to/file.py:name")
    module = userfile.run(Path(path), "task")
    task = userfile.member(module, name, f"task {spec!r}: {path}")
    check_members(task, f"task {spec!r}")
    return task


def check_members(task: Any, where: str) -> None:
    """Raises a UserError that names the first member of a Task that `task` lacks or has wrong."""
    if isinstance(task, type):
        raise UserError(f"{where} is a class: an instance is wanted, as {task.__name__}()")
    for member in ("name", "train", "test", "prompt", "reward"):
        if not hasattr(task, member):
            raise UserError(f"{where}: it has no {member!r} (see jaxrl_llm/tasks/task.py)")
    for member in ("prompt", "reward"):
        if not callable(getattr(task, member)):
            raise UserError(f"{where}: {member!r} is not a function")
    for member in ("train", "test"):
        source = getattr(task, member)
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise UserError(
                f"{where}: {member!r} needs a length and access by index, as a list has"
            )
