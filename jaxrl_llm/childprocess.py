"""A child process that is asked by lines and answers by lines, and what it has of our environment."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

BASE = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")


def environment(*names: str) -> dict[str, str]:
    """Our variables of these names and of BASE: others may hold secrets."""
    return {name: os.environ[name] for name in (*BASE, *names) if name in os.environ}


def end_session(leader: int) -> None:
    """Kills the processes of a session: also the groups of their own that shells and `timeout` make."""
    with suppress(ProcessLookupError):  # all of its own group has ended
        os.killpg(leader, signal.SIGKILL)
    ended = set[int]()
    while others := {*_members(leader)} - ended:  # until nobody has started another one meanwhile
        for process in others:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ended |= others


def _members(session: int) -> Iterator[int]:
    """The processes of a session; none on a system without /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, its, *_ = path.read_text().rpartition(")")[2].split()
            if int(its) == session and state not in "ZX":
                yield int(path.parent.name)


class Child(subprocess.Popen[str]):
    """A process that answers each line on its standard input by one on its standard output.

    It may have one to say before it is asked.
    """

    def __init__(
        self, command: Sequence[str | Path], variables: Mapping[str, str], **settings: Any
    ):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(command, env=variables, encoding="utf-8", **pipes, **settings)

    def ask(self, question: str = "", seconds: float | None = None) -> str:
        """Its next line, after the question is sent; "" if it has ended, or says none in time."""
        assert self.stdin
        assert self.stdout
        with suppress(OSError, ValueError):  # it has ended, or was closed by another thread
            self.stdin.write(question)
            self.stdin.flush()
            if seconds is None or wait([self.stdout.fileno()], seconds):
                return self.stdout.readline().strip()
        return ""

    def close(self, grace: float = 0.0) -> None:
        """Ends it and all of its session; with `grace` it may end by itself, as its input does."""
        with suppress(BrokenPipeError), self:  # which closes the pipes, and waits
            if grace:
                with suppress(subprocess.TimeoutExpired):
                    self.communicate(timeout=grace)
            if self.poll() is None:
                end_session(self.pid)  # where it has one of its own
                self.kill()
