"""The interface of tasks (examples, prompts, rewards or environments), and how they are called."""

import asyncio
import inspect
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from jaxrl_llm import userfile
from jaxrl_llm.errors import Leaving, UserError, first_line
from jaxrl_llm.reward import LARGEST, UNCHECKED, Reward

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


SLOW = 15.0  # seconds after which a reward that still runs is named
LOOK = 1.0  # seconds between two looks at it
_SIGNAL, _TIMER = signal.SIGPROF, signal.ITIMER_PROF  # of a look, in the main thread
Step = tuple[Sequence[int] | None, Reward]
Said = tuple[Sequence[int], bool] | None


class Anew(list[int]):
    """Token ids in place of all that was said, the prompt included: they begin a new segment."""


class Task(Protocol[E]):
    """A named task: examples to train and test on, a prompt for each, a reward for a response.

    A prompt is a text, or a list of messages for the model's chat template, as
    `[{"role": "user", "content": "2 + 2?"}]`. An `Interactive` task needs no `reward`.
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
    """A task that can also write a full-score response, for a supervised warm start.

    Of an episode it is the policy's turns, between which the environment is asked.
    """

    def demonstration(self, example: E_contra, /) -> str | Sequence[str]: ...


class Environment(Protocol):
    """What the policy talks to in one episode; each has its own.

    `step` gets the tokens' log-probs too, as a second argument, where `hears_logps` is True.
    """

    def step(self, tokens: Sequence[int], /) -> Step | Awaitable[Step | Callable[[], Step]]:
        """What follows a turn of these tokens: token ids, or None at the end; the reward so far.

        If they are `Anew`, the policy sees them alone. What is awaited may be a function that gives
        them, and is called in a thread.
        """
        ...


@runtime_checkable
class Interactive(Protocol[E_contra]):
    """A task of several turns: the policy's first follows the prompt."""

    def environment(self, example: E_contra, tokenizer: Any, /) -> Environment: ...


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

    Calls `beat` before each and while it has time, in any thread. Raises Leaving if `asked()`, which
    is looked at before each and every LOOK seconds of it. Logs a reward that takes over SLOW
    seconds, and each kind of error (type and place) that is not in `said`, where it is then added.
    With one thread (the main one) a late reward is interrupted. With several it is given up and
    goes on in the background; there an endless regular expression, which keeps the GIL, stops all
    else for good, so several are for rewards that wait. A task's UserError is raised.
    """
    errors = _Errors(set() if said is None else said)
    pairs = zip(examples, responses, strict=True)
    calls = [
        _Call(partial(task.reward, example, response), _plain, example,
              f"the reward of response {i} of {len(responses)}", seconds, beat, asked)
        for i, (example, response) in enumerate(pairs, 1)
    ]  # fmt: skip
    if threads == 1 and threading.current_thread() is threading.main_thread():
        with _Interrupter(seconds) as outcome_of:
            rewards = [errors.settled(call, outcome_of(call)) or UNCHECKED for call in calls]
    else:
        workers = _Workers(threads)
        outcomes = [future.result() for future in [workers.submit(call) for call in calls]]
        workers.close()
        pairs = zip(calls, outcomes, strict=True)
        rewards = [errors.settled(call, outcome) or UNCHECKED for call, outcome in pairs]
    errors.log(len(calls))
    return rewards


class Episodes:
    """The environments of a task's `examples`; a call takes the tokens of a turn of one of them.

    It gives a future of what the environment says next, and whether anew; None at the end.
    `rewards` are the newest.
    A step that raises, says what are no tokens of the tokenizer or takes over `seconds` ends its
    episode unchecked. `threads` steps run at a time; those that are coroutines need no thread.
    The other arguments, and what is logged when the block ends, are those of `score_responses`.
    """

    def __init__(
        self,
        task: Interactive[E],
        tokenizer: Any,
        examples: Sequence[E],
        *,
        threads: int = 1,
        seconds: float = 300.0,
        beat: Callable[[], None] = lambda: None,
        asked: Callable[[], bool] = lambda: False,
        said: set[str] | None = None,
    ):
        self.rewards = [UNCHECKED] * len(examples)
        self._task, self._tokenizer, self._examples = task, tokenizer, examples
        self._environments: dict[int, Environment] = {}
        self._settings = seconds, beat, asked
        self._errors = _Errors(set() if said is None else said)
        self._workers = _Workers(threads)

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        self._environments.clear()  # they end now, not when cycles are collected
        self._errors.log(len(self.rewards))

    def __call__(
        self, index: int, tokens: Sequence[int], logps: Sequence[float] = ()
    ) -> Future[Said]:
        which = f"a step of episode {index + 1} of {len(self.rewards)}"
        work = partial(self._step, index, list(tokens), list(logps))
        call = _Call(work, self._plain, self._examples[index], which, *self._settings)
        reply: Future[Said] = Future()

        def settle(done: Future[Any]) -> None:
            made = done.result()
            try:
                if inspect.isawaitable(made):
                    waiting = asyncio.run_coroutine_threadsafe(_awaited(call, made), _loop())
                    return waiting.add_done_callback(settle)
                if callable(made):  # what is left of a coroutine's step, for a thread
                    rest = self._workers.submit(replace(call, work=made))
                    return rest.add_done_callback(settle)
                settled = self._errors.settled(call, made) or (None, UNCHECKED)
                given, self.rewards[index] = settled
                reply.set_result(given if given is None else (given, isinstance(given, Anew)))
            except BaseException as error:
                reply.set_exception(error)

        self._workers.submit(call).add_done_callback(settle)
        return reply

    def _step(self, index: int, tokens: list[int], logps: list[float]) -> Any:
        if index not in self._environments:
            made = self._task.environment(self._examples[index], self._tokenizer)
            self._environments[index] = made
        step: Any = self._environments[index].step
        hears = getattr(self._environments[index], "hears_logps", False)
        return step(tokens, logps) if hears else step(tokens)

    def _plain(self, made: Any) -> Any:
        """What a step returned, in plain numbers; TypeError or ValueError for anything else.

        What is awaited is none yet, and stays as it is.
        """
        if inspect.isawaitable(made):
            return made
        given, reward = made
        reward = _plain(reward)
        if given is None:
            return None, reward
        tokens, known = [*given], range(len(self._tokenizer))
        if wrong := [token for token in tokens if token not in known]:
            raise ValueError(f"step() returned {wrong[0]!r}, which is no token of {len(known)}")
        if isinstance(given, Anew) and not tokens:
            raise ValueError("step() returned Anew without a token")
        return (Anew if isinstance(given, Anew) else list)(map(int, tokens)), reward


class _Errors:
    """Errors of a task's functions, by type and place; `said` are the kinds logged before."""

    def __init__(self, said: set[str]):
        self.said, self.found = said, defaultdict[str, list[str]](list)

    def settled(self, call: "_Call", outcome: Any) -> Any:
        """What the call returned; None if it raised, unless that is for the caller."""
        if not isinstance(outcome, BaseException):
            return outcome
        if isinstance(outcome, SystemExit):  # must not look like a run that is finished
            code, trace = outcome.code, outcome.__traceback__
            outcome = RuntimeError(f"it called exit({code})").with_traceback(trace)
        if isinstance(outcome, UserError | Leaving | KeyboardInterrupt):
            raise outcome  # for the caller
        place = _place(traceback.extract_tb(outcome.__traceback__), call.work.func)
        self.found[f"{type(outcome).__name__} in {place}"].append(first_line(outcome))
        return None

    def log(self, responses: int) -> None:
        """Logs each new kind with its first message."""
        for kind, messages in self.found.items():
            if kind not in self.said:
                count = f"{len(messages)} of {responses} responses unchecked"
                logger.warning("%s: %s; %s", kind, messages[0], count)
        self.said.update(self.found)


@dataclass
class _Call:
    """A call of a task's function, `check` on what it returns, and what is known meanwhile."""

    work: partial[Any]
    check: Callable[[Any], Any]
    example: Any
    which: str
    seconds: float
    beat: Callable[[], None]
    asked: Callable[[], bool]
    begun: float = math.inf
    slow: bool = False

    def __call__(self) -> Any:
        """The checked result."""
        if self.asked():
            raise Leaving
        self.beat()
        own, code = os.getpid(), 0
        self.begun = time.monotonic()
        try:
            return self.check(self.work())
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            raise
        finally:
            if os.getpid() != own:  # a child that it forked ends here, or it would train as well
                os._exit(code if isinstance(code, int) else int(code is not None))

    def over(self, frame: FrameType | None) -> Exception | None:
        """Why it has to end now, if it has; says once that it is slow, and where it is."""
        taken = time.monotonic() - self.begun
        if taken < 0:  # nothing of the task runs yet
            return None
        if taken > SLOW and not self.slow:
            self.slow = True
            place = _place(traceback.extract_stack(frame) if frame else [], self.work.func)
            logger.warning(
                "%s has been running for %.0f s: on example %.80r, now in %s; it is given "
                "up after %g s (reward_seconds)", self.which, taken, self.example, place, self.seconds,
            )  # fmt: skip
        if self.asked():
            return Leaving()
        if taken > self.seconds:
            return TimeoutError(f"no result after {self.seconds:g} s")
        self.beat()
        return None


def _place(stack: Sequence[traceback.FrameSummary], function: Any) -> str:
    """The function and line that a call's stack has come to in the task's own file."""
    inside = dropwhile(lambda frame: frame.filename != __file__, stack)
    frames = [frame for frame in inside if frame.filename != __file__]
    if frames:
        frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        return f"{frame.name} ({frame.filename}:{frame.lineno})"
    code = getattr(function, "__code__", None)
    return f"reward ({code.co_filename}:{code.co_firstlineno})" if code else "reward"


class _InterruptError(BaseException):
    """Raised within a reward that has to end; no Exception, so that little code catches it."""


class _Interrupter:
    """Makes calls in the main thread: gives what one returns or raises, and interrupts a late one.

    A thread sends a signal every LOOK seconds, whose handler raises. An endless regular expression
    lets no thread run, but looks at signals: it gets that of a timer of processor time. Rewards may
    have SIGALRM for themselves. Only C code that does not look at signals is out of reach.
    """

    def __init__(self, seconds: float):
        self._pause = min(seconds, LOOK)
        self._call: _Call | None = None  # nothing is raised without one
        self._over: Exception | None = None
        self._again = 0.0  # when to raise at the earliest: a reward may clean up in between
        self._done = threading.Event()
        self._sender = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> "_Interrupter":
        self._before = signal.signal(_SIGNAL, self._look)
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sender.join()
        signal.signal(_SIGNAL, signal.SIG_IGN)  # forgets one that is on its way, which would kill
        signal.signal(_SIGNAL, self._before or signal.SIG_DFL)

    def __call__(self, call: _Call) -> Any:
        self._over, self._again = None, 0.0
        alarm, trace = signal.getitimer(signal.ITIMER_REAL), sys.gettrace()
        signal.setitimer(_TIMER, self._pause, self._pause)
        try:
            try:
                self._call = call
                made = call()
            finally:
                self._call = None  # first of all
        except BaseException as error:
            made = error
        sys.settrace(trace)
        signal.setitimer(_TIMER, 0)
        signal.setitimer(signal.ITIMER_REAL, *alarm)
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if self._over and isinstance(made, BaseException):
            self._over = self._over.with_traceback(made.__traceback__)
        return self._over or made

    def _send(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._done.wait(self._pause):
            signal.pthread_kill(main, _SIGNAL)

    def _look(self, _: int, frame: FrameType | None) -> None:
        if self._call is None or time.monotonic() < self._again:
            return
        caught, self._over = self._over, self._over or self._call.over(frame)
        if not self._over:
            return
        self._again = time.monotonic() + self._pause
        if caught:  # as a bare `except` in a loop does: at the next line it is raised again
            sys.settrace(self._trace)
            while frame and frame.f_code.co_filename != __file__:
                frame.f_trace, frame = self._trace, frame.f_back
        raise _InterruptError

    def _trace(self, _: FrameType, event: str, __: object) -> Any:
        if self._call and event == "line":
            raise _InterruptError
        return self._trace


class _Workers:
    """Makes calls, `threads` at a time; a future's result is what one returns or raises.

    Each has a daemon thread of its own, which is left behind if it is late.
    """

    def __init__(self, threads: int):
        self._waiting: queue.SimpleQueue[tuple[_Call, Future[Any]] | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, call: _Call) -> Future[Any]:
        """A future of the outcome."""
        future: Future[Any] = Future()
        self._waiting.put((call, future))
        return future

    def close(self) -> None:
        """Ends the threads when nothing waits any more."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _work(self) -> None:
        while item := self._waiting.get():
            (call, future), found = item, list[Any]()
            one = threading.Thread(target=attempt, args=(call, found), daemon=True)
            one.start()
            while not found:
                one.join(min(call.seconds, LOOK))
                over = call.over(sys._current_frames().get(one.ident or 0))
                found.extend([over] if over else [])
            future.set_result(found[0])


def attempt(call: Callable[[], Any], found: list[Any]) -> None:
    """Adds to `found` what a call returns or raises; for a thread."""
    try:
        found.append(call())
    except BaseException as error:
        found.append(error)


async def outcome(work: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What the awaitable gives, and what it raised: an exit would end the loop that all share."""
    try:
        return await work, None
    except asyncio.CancelledError:
        return None, RuntimeError("it was cancelled")
    except BaseException as error:
        return None, error


async def _awaited(call: _Call, work: Awaitable[Any]) -> Any:
    """What the awaitable gives, checked unless it is to be called, or the error of the call."""
    task = asyncio.ensure_future(outcome(work))
    try:
        while not (await asyncio.wait([task], timeout=min(call.seconds, LOOK)))[0]:
            if over := call.over(None):
                task.cancel()
                return over
        made, error = task.result()
        return error or (made if callable(made) else call.check(made))
    except BaseException as error:
        return error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def _plain(reward: Reward) -> Reward:
    """The reward in plain floats; TypeError or ValueError if the task returned something else."""
    if not isinstance(reward, Reward):
        raise TypeError(f"reward() returned {type(reward).__name__}, not Reward")
    fields = {str(key): float(value) for key, value in reward.fields.items()}
    score = float(reward.score)
    if not all(map(math.isfinite, (score, *fields.values()))) or abs(score) > LARGEST:
        raise ValueError(
            f"reward() returned a number that is not finite, or a score over 1e15: {reward!r}"
        )
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
    scores = "environment" if isinstance(task, Interactive) else "reward"
    for member in ("name", "train", "test", "prompt", scores):
        if not hasattr(task, member):
            raise UserError(f"{where}: it has no {member!r} (see jaxrl_llm/tasks/task.py)")
    for member in ("prompt", scores):
        if not callable(getattr(task, member)):
            raise UserError(f"{where}: {member!r} is not a function")
    for member in ("train", "test"):
        source = getattr(task, member)
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise UserError(
                f"{where}: {member!r} needs a length and access by index, as a list has"
            )
