"""The interface of tasks (examples, prompts, rewards), and the scoring of responses."""

import logging
import math
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tokenizer import Prompt

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


LARGEST = 3.4e38  # of scores: they are learned from in float32
UNCHECKED = Reward(0.0, False, checked=False)
_Call = Callable[[], Reward]
_Outcome = Reward | BaseException


class Task(Protocol[E]):
    """A named task: examples to train and test on, a prompt for each, a reward for a response.

    A prompt is a text, or a list of messages for the model's chat template, as
    `[{"role": "user", "content": "2 + 2?"}]`.
    """

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Source[E]: ...

    @property
    def test(self) -> Source[E]: ...

    def prompt(self, example: E, /) -> Prompt: ...

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


def score_responses(
    task: Task[E],
    examples: Sequence[E],
    responses: Sequence[str],
    *,
    threads: int = 1,
    seconds: float = 300.0,
    beat: Callable[[], None] = lambda: None,
) -> list[Reward]:
    """The responses' rewards; unchecked where it raises, is not finite or takes over `seconds`.

    Calls `beat` before each, in any thread.
    With one thread (the main one) a late reward is interrupted. With several it is given up and
    goes on in the background; an endless regular expression, which keeps the GIL, blocks all else.
    A task's UserError is raised.
    """

    def call(example: E, response: str) -> _Call:
        def reward() -> Reward:
            beat()
            return _plain(task.reward(example, response))

        return reward

    def settled(outcome: _Outcome) -> Reward:
        if isinstance(outcome, Reward):
            return outcome
        if isinstance(outcome, SystemExit):  # must not look like a run that is finished
            outcome = RuntimeError(f"it called exit({outcome.code})")
        if isinstance(outcome, UserError) or not isinstance(outcome, Exception):
            raise outcome  # KeyboardInterrupt and the like are for the caller
        logger.warning("%s: reward failed, response left unchecked: %r", task.name, outcome)
        return UNCHECKED

    calls = [call(e, r) for e, r in zip(examples, responses, strict=True)]
    if threads == 1 and threading.current_thread() is threading.main_thread():
        return [settled(_interrupted(one, seconds)) for one in calls]
    return list(map(settled, _in_threads(calls, seconds, threads)))


class _OutOfTimeError(BaseException):
    """Raised within a function whose time is over; no Exception, so that little code catches it."""


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"no result after {seconds:g} s")


def _interrupted(call: _Call, seconds: float) -> _Outcome:
    """What the call returns or raises; SIGALRM interrupts it, even an endless regular expression."""

    def interrupt(*_: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if caught
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTimeError:
        return _late(seconds)
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have come before the first one
        signal.signal(signal.SIGALRM, before)


def _in_threads(calls: Sequence[_Call], seconds: float, threads: int) -> list[_Outcome]:
    """What the calls return or raise, `threads` at a time.

    Each has a daemon thread of its own, which is left behind if it is late.
    """
    outcomes: dict[int, _Outcome] = {}
    waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for item in (*range(len(calls)), *[None] * threads):
        waiting.put(item)

    def attempt(call: _Call, found: list[_Outcome]) -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    def work() -> None:
        while (index := waiting.get()) is not None:
            found: list[_Outcome] = []
            one = threading.Thread(target=attempt, args=(calls[index], found), daemon=True)
            one.start()
            one.join(seconds)
            outcomes[index] = found[0] if found else _late(seconds)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [outcomes[i] for i in range(len(calls))]


def _plain(reward: Reward) -> Reward:
    """The reward in plain floats; TypeError or ValueError if the task returned something else."""
    if not isinstance(reward, Reward):
        raise TypeError(f"reward() returned {type(reward).__name__}, not Reward")
    fields = {str(key): float(value) for key, value in reward.fields.items()}
    score = float(reward.score)
    if not all(map(math.isfinite, (score, *fields.values()))) or abs(score) > LARGEST:
        raise ValueError(f"reward() returned a number that is not finite in float32: {reward}")
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
