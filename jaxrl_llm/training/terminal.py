"""Output on the terminal, which may be closed (or `| tee` end) while the run goes on."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import IO, Any, cast

import rich.console
import rich.text

from jaxrl_llm.errors import printable


class _Console(rich.console.Console):
    def render_str(self, text: str, **how: Any) -> rich.text.Text:
        """All text that is printed comes by here, cells of tables too."""
        return super().render_str(printable(text), **how)


def plain(**options: Any) -> rich.console.Console:
    """A console that prints text as it is: no markup, emoji, colours or line breaks of its own.

    But control characters, which a terminal would obey, are written out (`errors.printable`).
    """
    plainly = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True}
    return _Console(**{**plainly, **options})


def console(*, quiet: bool = False) -> rich.console.Console:
    """A console on standard output that goes silent once nobody reads it."""
    return plain(file=cast(IO[str], _Output()), quiet=quiet)


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 5 h 10 min, 6 d 5 h."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 100 else f"{hours} h {minutes % 60} min"


def excerpt(text: str) -> str:
    """The first lines of a text, each cut and after a margin; and how much was left out."""
    whole, lines, width = text.splitlines() or [""], 12, 400
    shown = [line if len(line) <= width else f"{line[:width]} …" for line in whole[:lines]]
    if len(whole) > lines:
        shown.append(f"… {len(whole) - lines} more lines")
    return "\n".join(f"  | {line}" for line in shown)


class _Output:
    """Standard output as it is now: a reward that captures what it prints gets nothing of a run's own."""

    def __init__(self, stream: Any = None):
        # not the proxy that rich sets during live displays
        self._stream = stream or getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


@contextmanager
def alone() -> Iterator[IO[str]]:
    """Standard output, to which for the block nobody else prints: what they do goes to standard error."""
    sys.stdout.flush()
    with ExitStack() as stack:
        out: Any = sys.stdout
        with suppress(OSError, ValueError):  # in a test it is no file, in a notebook no such one
            if (number := sys.stdout.fileno()) == 1:
                out = stack.enter_context(os.fdopen(os.dup(number), "w"))
                stack.callback(os.dup2, out.fileno(), number)
                stack.callback(sys.stdout.flush)  # what others have in its buffer
                os.dup2(sys.stderr.fileno(), number)  # programs that are started, too
        stack.enter_context(redirect_stdout(sys.stderr))
        yield cast(IO[str], _Output(out))


def silence(stream: Any) -> None:
    """Discards all later output, and what is still in the buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
