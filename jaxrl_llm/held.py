"""A folder that lives as long as its process, in a place where strangers and other hosts may write too."""

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_llm.errors import UserError

MEMORY = Path("/dev/shm")  # noqa: S108 (a folder with a random name is made in it)
PREFIX, LOCK = "jaxrl-llm-", "in-use"
MARK_BYTES = 1000


def memory() -> Path:
    """Memory-backed storage, where there is any."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def held_folder(under: Path) -> Iterator[Path]:
    """A fresh folder, removed at the end.

    What our own processes on this host have left behind that were killed is removed too.
    """
    for folder in under.glob(f"{PREFIX}*"):
        _remove_if_dead(folder)
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=under))
        held = os.open(root / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, _mark())
    except OSError as error:
        raise UserError(f"cannot make a folder in {under}: {error.strerror}") from error
    try:
        yield root
    finally:
        os.close(held)
        shutil.rmtree(root, ignore_errors=True)


def _remove_if_dead(folder: Path) -> None:
    """Removes a folder that is ours, was made on this host, and whose lock nobody holds any more.

    Anybody may have made what bears such a name, a link or a fifo too: nothing here follows or waits.
    """
    how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        inside = os.open(folder, how | os.O_DIRECTORY)
        stack.callback(os.close, inside)
        lock = os.open(LOCK, how, dir_fd=inside)
        stack.callback(os.close, lock)
        ours = all(os.fstat(it).st_uid == os.geteuid() for it in (inside, lock))
        regular = stat.S_ISREG(os.fstat(lock).st_mode)
        if ours and regular and os.read(lock, MARK_BYTES) == _mark():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def _mark() -> bytes:
    """What the lock file says. The lock means nothing on another host, which may see the same folder."""
    return f"jaxrl-llm on {socket.gethostname()}\n".encode()[:MARK_BYTES]
