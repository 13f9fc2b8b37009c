"""Exceptions that end a command: an error for people (one line, exit code 2), or a wish to stop."""

from collections.abc import Iterator
from typing import Any


class UserError(Exception):
    """Wrong input, files or environment; the message says what is wrong, where, and what to do.

    >>> jl.load("nowhere")
    Traceback (most recent call last):
        ...
    jaxrl_llm.errors.UserError: no model folder nowhere: give a folder, or a hub name such as ...
    """


class Leaving(Exception):  # noqa: N818 (not an error: the run was asked to stop)
    """The run was asked to stop; raised only where unfinished work may be dropped."""


def at_least(least: int, where: str, record: Any, *names: str) -> None:
    """A UserError for the first of these fields of `record` below `least`, naming `where`."""
    for name in names:
        if getattr(record, name) < least:
            raise UserError(f"{where}: {name} = {getattr(record, name)} must be at least {least}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """The error, what it was raised from (`implicit`: or while handling), and so on; no repeats."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or (found.__context__ if implicit else None)
