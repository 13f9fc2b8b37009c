"""A child process that is asked by lines and answers by lines, and what it has of our environment."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

BASE = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")


def environment(*names: str) -> dict[str, str]:
    """Our variables of these names and of BASE: others may hold secrets."""
    return {name: os.environ[name] for name in (*BASE, *names) if name in os.environ}


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
                with suppress(ProcessLookupError):  # it has no session of its own
                    os.killpg(self.pid, signal.SIGKILL)
                self.kill()
