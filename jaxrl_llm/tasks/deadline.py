"""A task's functions under a deadline: interrupted in the main thread, left behind in any other."""

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
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import dropwhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from jaxrl_llm import userfile
from jaxrl_llm.background import in_background, loop, repeating
from jaxrl_llm.errors import StopRequested, UserError, first_line

if TYPE_CHECKING:
    from jaxrl_llm.tasks.task import RewardSettings

logger = logging.getLogger(__name__)

SLOW = 15.0  # seconds after which a call that still runs is named
LOOK = 1.0  # seconds between two looks at it
_SIGNAL, _TIMER = signal.SIGPROF, signal.ITIMER_PROF  # of a look, in the main thread
# between a deadline and what a user wrote
_OURS = {str(Path(__file__).with_name(f"{name}.py")) for name in ("deadline", "task", "agents")}
Outcome = tuple[Any, BaseException | None]  # what a call returned, or None and what it raised


@dataclass
class Call:
    """A call of a task's function, `check` on what it returns, and what is known meanwhile.

    The settings' `heartbeat` is called before it and at each look, in any thread; if
    `stop_requested()` then, it ends as StopRequested. `name` is for the log, `size` how many responses
    are ungraded if it raises.
    """

    work: partial[Any]
    check: Callable[[Any], Any]
    example: Any
    name: str
    settings: "RewardSettings"
    size: int = 1
    began: float = math.inf
    thread: int = 0  # where it runs, if it has one
    slow: bool = False

    @property
    def every(self) -> float:
        """Seconds between two looks."""
        return min(self.settings.seconds, LOOK)

    def __call__(self) -> Any:
        """The checked result."""
        if self.settings.stop_requested():
            raise StopRequested
        self.settings.heartbeat()
        process, code = os.getpid(), 0
        self.began, self.thread = time.monotonic(), threading.get_ident()
        try:
            return self.check(self.work())
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            raise
        finally:
            if os.getpid() != process:  # a child that it forked ends here, and does not train too
                os._exit(code if isinstance(code, int) else int(code is not None))

    def look(self, frame: FrameType | None = None) -> Exception | None:
        """Why it has to end now, if it has; says once that it is slow, and where it is."""
        taken, seconds = time.monotonic() - self.began, self.settings.seconds
        if taken < 0:  # nothing of the task runs yet
            return None
        if taken > SLOW and not self.slow:
            self.slow = True
            frame = frame or sys._current_frames().get(self.thread)
            place = _place(traceback.extract_stack(frame) if frame else [], self.work.func)
            logger.warning(
                "%s has been running for %.0f s: on example %.80r, now in %s; it is given "
                "up after %g s (reward_seconds)", self.name, taken, self.example, place, seconds,
            )  # fmt: skip
        if self.settings.stop_requested():
            return StopRequested()
        if taken > seconds:
            return TimeoutError(f"no result after {seconds:g} s")
        self.settings.heartbeat()
        return None


class Errors:
    """Errors that calls raised, by type and place; `logged` are the kinds that were logged before."""

    def __init__(self, logged: set[str]):
        self._logged, self._messages = logged, defaultdict[str, list[str]](list)

    def settled(self, call: Call, outcome: Outcome) -> Any:
        """The result of the call; None if it raised, unless that is for the caller."""
        result, error = outcome
        if error is None:
            return result
        if isinstance(error, SystemExit):  # must not look like a run that is finished
            code, trace = error.code, error.__traceback__
            error = RuntimeError(f"it called exit({code})").with_traceback(trace)
        if isinstance(error, UserError | StopRequested | KeyboardInterrupt):
            raise error  # for the caller
        place = _place(traceback.extract_tb(error.__traceback__), call.work.func)
        kind = f"{type(error).__name__} in {place}"
        self._messages[kind] += [first_line(error)] * call.size
        return None

    def log(self, responses: int) -> None:
        """Logs each new kind with its first message."""
        for kind, messages in self._messages.items():
            if kind not in self._logged:
                count = f"{len(messages)} of {responses} responses ungraded"
                logger.warning("%s: %s; %s", kind, messages[0], count)
        self._logged.update(self._messages)


def _place(stack: Sequence[traceback.FrameSummary], function: Any) -> str:
    """The function and line that a call's stack has come to in the task's own file, or in a reward's."""
    inside = dropwhile(lambda frame: frame.filename not in _OURS, stack)
    frames = [frame for frame in inside if frame.filename not in _OURS]
    frames = [frame for frame in frames if userfile.ran(frame.filename)] or frames
    if frames:
        frame = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        return f"{frame.name} ({frame.filename}:{frame.lineno})"
    code = getattr(function, "__code__", None)
    return f"reward ({code.co_filename}:{code.co_firstlineno})" if code else "reward"


def run(calls: Sequence[Call], threads: int, errors: Errors) -> list[Any]:
    """The results of calls, None of those that raised; one thread is the caller's if that is the main one."""
    if threads == 1 and threading.current_thread() is threading.main_thread():
        with interrupting(min([call.every for call in calls], default=LOOK)) as outcome_of:
            return [errors.settled(call, outcome_of(call)) for call in calls]
    workers = Threads(threads)
    outcomes = [future.result() for future in [workers.submit(call) for call in calls]]
    workers.close()
    return [*map(errors.settled, calls, outcomes)]


# In the main thread.


class _InterruptError(BaseException):
    """Raised within a call that has to end; no Exception, so that little code catches it."""


@contextmanager
def interrupting(every: float) -> Iterator[Callable[[Call], Outcome]]:
    """A function that makes calls in the main thread, looks at them, and interrupts a late one.

    A thread sends a signal `every` so many seconds, whose handler raises. An endless regular expression
    lets no thread run, but looks at signals: it gets that of a timer of processor time. Rewards may
    have SIGALRM for themselves. Only C code that does not look at signals is out of reach.
    """
    calls = _Interrupter(every)
    before = signal.signal(_SIGNAL, calls.on_signal)
    calls.handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    send = partial(signal.pthread_kill, threading.main_thread().ident or 0, _SIGNAL)
    try:
        with repeating(send, every):
            yield calls
    finally:
        signal.signal(_SIGNAL, signal.SIG_IGN)  # forgets one that is on its way, which would kill
        signal.signal(_SIGNAL, before or signal.SIG_DFL)


def _working_folder() -> str:
    """The folder that relative paths begin at; empty where it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


class _Interrupter:
    """Makes a call, after which timers, handlers of signals, the trace and the working folder are as they were."""

    def __init__(self, every: float):
        self.every, self.handlers = every, dict[signal.Signals, Any]()
        self._call: Call | None = None  # nothing is raised without one
        self._reason: Exception | None = None  # why the call has to end
        self._not_before = 0.0  # a call may clean up between two interruptions

    def __call__(self, call: Call) -> Outcome:
        self._reason, self._not_before = None, 0.0
        alarm, trace = signal.getitimer(signal.ITIMER_REAL), sys.gettrace()
        folder = _working_folder()
        signal.setitimer(_TIMER, self.every, self.every)
        result, error = None, None
        try:
            try:
                self._call = call
                result = call()
            finally:
                self._call = None  # first of all
        except BaseException as raised:
            error = raised
        sys.settrace(trace)
        signal.setitimer(_TIMER, 0)
        signal.setitimer(signal.ITIMER_REAL, *alarm)
        if folder and _working_folder() != folder:
            with suppress(OSError):  # it may have removed that
                os.chdir(folder)
        for number, handler in self.handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if self._reason:
            return None, self._reason.with_traceback(error.__traceback__ if error else None)
        return result, error

    def on_signal(self, _: int, frame: FrameType | None) -> None:
        if self._call is None or time.monotonic() < self._not_before:
            return
        caught, self._reason = self._reason, self._reason or self._call.look(frame)
        if not self._reason:
            return
        self._not_before = time.monotonic() + self.every
        if caught:  # as a bare `except` in a loop does: at the next line it is raised again
            sys.settrace(self._trace)
            while frame and frame.f_code.co_filename != __file__:
                frame.f_trace, frame = self._trace, frame.f_back
        raise _InterruptError

    def _trace(self, _: FrameType, event: str, __: object) -> Any:
        if self._call and event == "line":
            raise _InterruptError
        return self._trace


# In other threads, and in none.

Look = Callable[[], Exception | None]  # why a call has to end now, if it has


class Threads:
    """Makes calls, `count` at a time, in daemon threads; a late one is left behind.

    If what a call returns is awaited, that holds no thread. It may give a function, which is called
    in its place in a thread again.
    """

    def __init__(self, count: int):
        self._waiting: queue.SimpleQueue[tuple[Call, Future[Outcome]] | None] = queue.SimpleQueue()
        self._count = count
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, call: Call) -> Future[Outcome]:
        """A future of the outcome."""
        future: Future[Outcome] = Future()
        self._waiting.put((call, future))
        return future

    def close(self) -> None:
        """Ends the threads when nothing waits any more."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while item := self._waiting.get():
            call, future = item
            try:
                outcome = in_thread(call, call.every, call.look)
            except RuntimeError as error:  # there are no more threads
                outcome = None, error
            if inspect.isawaitable(outcome[0]):
                rest = self._await(outcome[0], call, future)
                asyncio.run_coroutine_threadsafe(rest, loop("environments"))
            else:
                future.set_result(outcome)

    async def _await(self, work: Awaitable[Any], call: Call, future: Future[Outcome]) -> None:
        call.thread = 0
        result, error = await awaited(work, call.every, call.look)
        if callable(result):
            self._waiting.put((replace(call, work=partial(result)), future))
            return
        try:
            result = result if error else call.check(result)
        except BaseException as raised:
            result, error = None, raised
        future.set_result((result, error))


def in_thread(work: Callable[[], Any], every: float | None, look: Look) -> Outcome:
    """The outcome of `work()` in a thread, unless one of the looks, `every` seconds, ends it.

    It is left behind then. With None for `every` nothing looks.
    """
    running = in_background(work)
    while not wait([running], every).done:
        if late := look():
            return None, late
    error = running.exception()
    return (running.result() if error is None else None), error


async def awaited(work: Awaitable[Any], every: float, look: Look) -> Outcome:
    """As `in_thread`, of what is awaited, which is cancelled if it is ended."""
    running = asyncio.ensure_future(_outcome(work))
    try:
        while not (await asyncio.wait([running], timeout=every))[0]:
            if late := look():
                return None, late
        return running.result()
    finally:
        running.cancel()  # nothing where it has ended


async def _outcome(work: Awaitable[Any]) -> Outcome:
    try:
        return await work, None
    except asyncio.CancelledError:
        return None, RuntimeError("it was cancelled")
    except BaseException as error:  # an exit would end the loop that all share
        return None, error
