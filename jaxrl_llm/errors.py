"""What ends a run from outside: an error for people (one line, exit code 2, nothing half done), or a wish."""

from collections.abc import Iterator
from typing import Any


class UserError(Exception):
    """Something outside the program is wrong: the message says what, where, and what to do.

    >>> jl.load("nowhere")
    Traceback (most recent call last):
        ...
    jaxrl_llm.errors.UserError: no model folder nowhere: give a folder, or a hub name such as ...
    """


def at_least(least: int, where: str, record: Any, *names: str) -> None:
    """A UserError for the first of these fields of a record that is less."""
    for name in names:
        if getattr(record, name) < least:
            raise UserError(f"{where}: {name} = {getattr(record, name)} must be at least {least}")


ELSEWHERE = ": choose another --out"


def cannot_write(folder: Any, error: OSError, advice: str = "") -> UserError:
    """A disk that is full, or not ours."""
    return UserError(f"cannot write to {folder}: {error.strerror or error}{advice}")


def first_line(error: BaseException) -> str:
    """What an error says, in a line; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def causes(error: BaseException, *, implicit: bool = False) -> Iterator[BaseException]:
    """The error, the one that it was raised from (or `implicit`ly while), and so on; each once."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        yield link
        seen.append(link)
        link = link.__cause__ or (link.__context__ if implicit else None)


class Leaving(KeyboardInterrupt):
    """It is time to leave: raised where what is under way may be dropped."""
