"""The interface of tasks (examples, prompts, rewards), and the scoring of responses."""

import logging
import math
import queue
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm import userfile
from jaxrl_llm.errors import Leaving, UserError, first_line

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Mapping[str, str]]  # a text, or messages with a role and content
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)


class Source(Protocol[E_co]):
    """Random access to examples; a list will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> E_co: ...


def as_text(prompt: Prompt) -> str:
    """A prompt to be read: messages are paragraphs."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


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
SLOW = 15.0  # seconds after which a reward that still runs is named
LOOK = 1.0  # seconds between two looks at it
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
    asked: Callable[[], bool] = lambda: False,
    said: set[str] | None = None,
) -> list[Reward]:
    """The responses' rewards; unchecked where it raises, is not finite or takes over `seconds`.

    Calls `beat` before each, in any thread. Raises Leaving if `asked()`, which is looked at before
    each and every LOOK seconds of it. Logs a reward that takes over SLOW seconds, and each kind of
    error (type and place) that is not in `said`, where it is then added.
    With one thread (the main one) a late reward is interrupted. With several it is given up and
    goes on in the background; an endless regular expression, which keeps the GIL, blocks all else.
    A task's UserError is raised.
    """
    said, errors = set() if said is None else said, defaultdict[str, list[str]](list)

    def settled(outcome: _Outcome) -> Reward:
        if isinstance(outcome, Reward):
            return outcome
        if isinstance(outcome, SystemExit):  # must not look like a run that is finished
            code, trace = outcome.code, outcome.__traceback__
            outcome = RuntimeError(f"it called exit({code})").with_traceback(trace)
        if isinstance(outcome, UserError | Leaving) or not isinstance(outcome, Exception):
            raise outcome  # KeyboardInterrupt and the like are for the caller
        place = _place(traceback.extract_tb(outcome.__traceback__), task)
        errors[f"{type(outcome).__name__} in {place}"].append(first_line(outcome))
        return UNCHECKED

    pairs = zip(examples, responses, strict=True)
    calls = [
        _Call(task, example, response, f"response {i} of {len(responses)}", seconds, beat, asked)
        for i, (example, response) in enumerate(pairs, 1)
    ]
    if threads == 1 and threading.current_thread() is threading.main_thread():
        rewards = [settled(_interrupted(one)) for one in calls]
    else:
        rewards = list(map(settled, _in_threads(calls, threads)))
    for kind, messages in errors.items():
        if kind not in said:
            count = f"{len(messages)} of {len(calls)} responses unchecked"
            logger.warning("%s: %s; %s", kind, messages[0], count)
    said.update(errors)
    return rewards


@dataclass
class _Call:
    """The reward of one response to be worked out, and what is known of it meanwhile."""

    task: Task[Any]
    example: Any
    response: str
    which: str
    seconds: float
    beat: Callable[[], None]
    asked: Callable[[], bool]
    begun: float = math.inf
    slow: bool = False

    def __call__(self) -> Reward:
        """The reward."""
        if self.asked():
            raise Leaving
        self.beat()
        self.begun = time.monotonic()
        return _plain(self.task.reward(self.example, self.response))

    def over(self, frame: FrameType | None) -> Exception | None:
        """Why it has to end now, if it has; says once that it is slow, and where it is."""
        taken = time.monotonic() - self.begun
        if taken > SLOW and not self.slow:
            self.slow = True
            place = _place(traceback.extract_stack(frame) if frame else [], self.task)
            logger.warning(
                "the reward of %s has been running for %.0f s: on example %.80r, now in %s; it is given "
                "up after %g s (reward_seconds)", self.which, taken, self.example, place, self.seconds,
            )  # fmt: skip
        if self.asked():
            return Leaving()
        return TimeoutError(f"no result after {self.seconds:g} s") if taken > self.seconds else None


def _place(stack: Sequence[traceback.FrameSummary], task: Task[Any]) -> str:
    """The function and line that a reward's stack has come to in the reward's own file."""
    inside = dropwhile(lambda frame: frame.filename != __file__, stack)
    frames = [frame for frame in inside if frame.filename != __file__]
    if frames:
        frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        return f"{frame.name} ({frame.filename}:{frame.lineno})"
    code = getattr(task.reward, "__code__", None)
    return f"reward ({code.co_filename}:{code.co_firstlineno})" if code else "reward"


class _InterruptError(BaseException):
    """Raised within a reward that has to end; no Exception, so that little code catches it."""


def _interrupted(call: _Call) -> _Outcome:
    """What the call returns or raises; SIGALRM interrupts it, even an endless regular expression."""
    over: Exception | None = None

    def look(_: int, frame: FrameType | None) -> None:
        nonlocal over
        over = over or call.over(frame)
        if over:
            raise _InterruptError

    before = signal.signal(signal.SIGALRM, look)
    try:
        try:
            # again each time, if what it raises is caught
            signal.setitimer(signal.ITIMER_REAL, min(call.seconds, LOOK), LOOK)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _InterruptError as error:
        assert over
        return over.with_traceback(error.__traceback__)
    except BaseException as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have come before the first one
        signal.signal(signal.SIGALRM, before)


def _in_threads(calls: Sequence[_Call], threads: int) -> list[_Outcome]:
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
            call, found = calls[index], list[_Outcome]()
            one = threading.Thread(target=attempt, args=(call, found), daemon=True)
            one.start()
            while not found:
                one.join(min(call.seconds, LOOK))
                over = call.over(sys._current_frames().get(one.ident or 0))
                found.extend([over] if over else [])
            outcomes[index] = found[0]

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
