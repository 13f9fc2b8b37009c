"""Errors of disks and memory, told apart from damage: tried again, then one line."""

import errno
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxrl_llm import errors
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs.ending import leave_threads_behind

T = TypeVar("T")
DELAYS = (0.2, 1.0)  # seconds before each new attempt to read
_PASSING = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|ABORTED|out of memory|"
    "Input/output error|Permission denied|Too many open files|Stale file handle|No space left",
    re.IGNORECASE,
)
_ORBAX = str(Path(ocp.__file__).parent)
_MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class DamageError(Exception):
    """What lies on the disk is not what was written there."""


def patiently(what: str, read: Callable[[], T]) -> T:
    """What `read` returns; an error that new attempts do not cure is damage, or a UserError if it may pass."""
    for delay in DELAYS:
        try:
            return read()
        except Exception:  # a damaged file raises almost anything; the last attempt tells
            time.sleep(delay)
    try:
        return read()
    except Exception as error:
        _silence_what_is_left_behind()
        if may_pass(error):
            raise UserError(
                f"cannot read {what} ({first_line(error)}), which may be no fault of the files: nothing "
                "was changed, try again"
            ) from error
        raise DamageError(first_line(error)) from error


def may_pass(error: BaseException) -> bool:
    """Whether an error is of the disk, the network or the memory, and not of what was read."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno not in _MISSING)
        or _PASSING.search(str(cause)) is not None
        for cause in errors.causes(error, implicit=True)
    )


@contextmanager
def writing(folder: Path, what: str, tree: Any = None) -> Iterator[None]:
    """Errors of writing as one line; with a `tree`, room for it is asked for before anything is written."""
    advice = "make room or permit writing, then go on with --resume"
    needed = 1.1 * sum(x.nbytes for x in jax.tree.leaves(tree))
    try:
        if needed and (free := shutil.disk_usage(folder).free) < needed:
            raise OSError(f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free")
        yield
    except (OSError, ValueError, RuntimeError) as error:
        _silence_what_is_left_behind()
        raise UserError(
            f"cannot write {what} to {folder}: {first_line(error)}: {advice}"
        ) from error


def _silence_what_is_left_behind() -> None:
    """Tasks of the library that were broken off say the same error again, in hundreds of lines.

    Some of its threads may wait for ever.
    """
    sys.unraisablehook = lambda _: None
    leave_threads_behind()


def silence_given_up() -> None:
    """What reads and writes that were given up after an error report is no news: a traceback each."""
    if not isinstance(sys.unraisablehook, _ButGivenUp):
        sys.unraisablehook = _ButGivenUp(sys.unraisablehook)


class _ButGivenUp:
    """Hands on to the hook before what is no report of orbax's coroutines, or to the loop that it closed."""

    def __init__(self, inner: Callable[[Any], Any]):
        self._inner = inner

    def __call__(self, report: Any) -> None:
        code = getattr(report.object, "cr_code", None)
        of_orbax = code is not None and code.co_filename.startswith(_ORBAX)
        if not of_orbax and str(report.exc_value) != "Event loop is closed":
            self._inner(report)


def first_line(error: BaseException) -> str:
    """The innermost cause in a line; the libraries wrap an OSError in errors of their own."""
    *_, innermost = errors.causes(error)
    line = errors.first_line(innermost)
    if "Barrier timed out" in line:
        return "another process has not written its part, and may say why"
    return line
