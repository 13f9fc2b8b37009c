"""The terminal of a long command, which may close, or `| tee` end, while the work goes on."""

import os
import sys
from typing import IO, Any, cast

import rich.console


def plain(**options: Any) -> rich.console.Console:
    """A console that prints what it is given: `[b]` and `:x:` are text, and lines are as long as they are."""
    return rich.console.Console(**{"markup": False, "emoji": False, "soft_wrap": True, **options})


def console(*, quiet: bool = False) -> rich.console.Console:
    """A console on standard output that goes silent once nobody takes what it says."""
    return plain(file=cast(IO[str], _Output()), quiet=quiet)


class _Output:
    """Standard output, whatever it is when it is written to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_stdout(), name)

    def write(self, text: str) -> int:
        try:
            return _stdout().write(text)
        except OSError:
            silence()
            return len(text)

    def flush(self) -> None:
        try:
            _stdout().flush()
        except OSError:
            silence()


def _stdout() -> Any:
    """Standard output itself, not what rich puts in its place while something is live."""
    return getattr(sys.stdout, "rich_proxied_file", sys.stdout)


def silence() -> None:
    """From now on what is written, and what is left in the buffer, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _stdout().fileno())
    os.close(nowhere)
