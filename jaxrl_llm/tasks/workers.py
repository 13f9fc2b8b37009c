"""Processes that judge what a model wrote, so that none of it can hang, harm or end the run.

Each is a module in a fresh Python, without the caller's main module, JAX, and most environment
variables. It reads a question in JSON a line and writes a line of answer. One that takes too long
is ended by the kernel, and the next question finds a new process.
"""

import json
import logging
import os
import queue
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import jaxrl_llm
from jaxrl_llm.childprocess import Child, environment
from jaxrl_llm.errors import UserError

_SET = {"PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0"}  # sets have one order in all workers
_WALL = 200.0  # wall-clock seconds for one of CPU time until a worker counts as stuck
_START = 300.0  # seconds a worker may take to import its libraries
_MEMORY = 4 << 30  # bytes of address space a worker may use


class Workers:
    """`count` processes of `python -m module arguments`, each answering one question at a time.

    Thread-safe. Raises UserError if they do not start.
    """

    def __init__(self, count: int, module: str, *arguments: str):
        self._workers = [_Worker([module, *arguments]) for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:  # all start before one is ready
                worker.ready()
                self._idle.put(worker)
        except UserError:
            self.close()
            raise

    def ask(self, question: Sequence[Any], seconds: float) -> str:
        """The answer, or "" if there was none in `seconds` of CPU time: load does not decide it."""
        worker = self._idle.get()
        try:
            if not self._finalizer.alive:
                raise UserError("nothing can be judged any more: the workers are closed")
            return worker.ask([seconds, *question], _WALL * seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Ends the workers; garbage collection and the end of the program do the same."""
        self._finalizer()


class _Worker:
    """A process that answers one question at a time; one that is lost is replaced when asked."""

    process: Child | None = None

    def __init__(self, command: Sequence[str]):
        self._command = command

    def start(self) -> None:
        """Starts the process, which gets no secrets from the environment and no Ctrl-C."""
        package = {"PYTHONPATH": str(Path(jaxrl_llm.__file__).parents[1])}
        try:
            self.process = Child(
                [sys.executable, "-P", "-W", "ignore", "-m", *self._command],
                environment("VIRTUAL_ENV", "SYSTEMROOT") | _SET | package,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"a worker that judges answers cannot be started: {error}") from error

    def ready(self) -> None:
        """Waits until the process can answer; UserError if it does not come to that."""
        if self._reply("", _START) != "ready":
            raise UserError("a worker that judges answers did not start: see its message above")

    def ask(self, question: list[Any], timeout: float) -> str:
        """The reply, or "" if the process had ended, or has ended or been stopped since."""
        if self.process is None:
            self.start()
            self.ready()
        return self._reply(json.dumps(question) + "\n", timeout)

    def _reply(self, line: str, timeout: float) -> str:
        """The answer to a line; if there is none, or what waits is interrupted, the process is ended."""
        reply, process = "", self.process
        try:
            reply = process.ask(line, timeout) if process else ""
            return reply
        finally:
            if not reply:
                self.stop()

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.close()


def _stop_all(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.stop()


def serve(
    answer: Callable[..., str], warm: Callable[[], object] = lambda: None, *, memory: int = _MEMORY
) -> None:
    """The main loop of a worker: for each question a line, `answer(*question)`; "failed" if it raises.

    `warm` is called first: no question's time goes into loading libraries.
    """
    _limit_memory(memory)
    Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    logging.disable(logging.CRITICAL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    warm()
    print("ready", file=replies)
    for line in sys.stdin:
        seconds, *question = json.loads(line)
        limit_time(seconds)
        try:
            reply = answer(*question)
        except Exception:  # libraries raise anything
            reply = "failed"
        limit_time(0)
        print(reply, file=replies)


def _end_with(parent: int) -> None:
    """Ends this process, in the middle of a question too, when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def limit_time(seconds: float) -> None:
    """The kernel ends this process after so much CPU time, or far more time; 0 lifts the limit."""
    for alarm in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(alarm, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL / 2 * seconds)


def _limit_memory(most: int) -> None:
    """Caps the address space of this process, on Linux (macOS cannot)."""
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
