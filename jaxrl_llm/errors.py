"""Exceptions that end a command: an error for people (one line, exit code 2), or a wish to stop."""

import re
from collections.abc import Iterator
from typing import Any

# all control characters but tab and line feed, marks that turn the direction of text, surrogates
_UNPRINTABLE = re.compile("[\0-\b\v-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """Wrong input, files or environment; the message says what is wrong, where, and what to do.

    >>> jl.load("nowhere")
    Traceback (most recent call last):
        ...
    jaxrl_llm.errors.UserError: no model folder nowhere: give a folder, or a hub name such as ...
    """


class StopRequested(Exception):  # noqa: N818 (not an error: the run was asked to stop)
    """The run was asked to stop; raised only where unfinished work may be dropped."""


def at_least(least: int, where: str, record: Any, *names: str) -> None:
    """A UserError for the first of these fields of `record` below `least`, naming `where`."""
    for name in names:
        if getattr(record, name) < least:
            raise UserError(f"{where}: {name} = {getattr(record, name)} must be at least {least}")


def from_0_to_1(name: str, value: float) -> None:
    """A UserError unless the value of this name is; an array may have any."""
    if isinstance(value, int | float) and not 0 <= value <= 1:
        raise UserError(f"{name} = {value} must be a number from 0 to 1")


def flags_at_least(least: int, **counts: int) -> None:
    """A UserError for the first of these flags of a command that is below `least`."""
    for name, count in counts.items():
        if count < least:
            raise UserError(f"--{name.replace('_', '-')} {count} must be at least {least}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type if it has none."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])


def out_of_memory(error: BaseException) -> bool:
    """True if it was raised, or what it was raised from, because memory ran out."""
    full = re.compile("RESOURCE_EXHAUSTED|out.of.memory", re.IGNORECASE)
    return any(isinstance(e, MemoryError) or full.search(str(e)) for e in causes(error))


def printable(text: str) -> str:
    r"""The text with control characters written out, as \x1b: for text of tasks, models, servers.

    A terminal would obey them: they move the cursor, rename the window, fill the clipboard.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """The error, what it was raised from (`implicit`: or while handling), and so on; no repeats."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or (found.__context__ if implicit else None)
