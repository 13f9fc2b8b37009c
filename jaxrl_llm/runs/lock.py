"""One trainer a folder: something there names its holder and changes while the holder lives.

A holder on this machine is known to be dead by its process. One elsewhere is given up when its heartbeat has
not changed for `STALE` seconds of the watcher's own clock, so that no two clocks are ever compared.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxrl_llm import desk
from jaxrl_llm.errors import ELSEWHERE, UserError, cannot_write
from jaxrl_llm.runs.holder import Holder, alive, known_dead, name, this_process
from jaxrl_llm.runs.lock_notes import Files, Lock, Objects, holder_of

STALE = 120.0  # seconds without a heartbeat after which a holder on another machine is given up
BEAT = 10.0


@contextmanager
def hold(
    folder: Path, say: Callable[[str], None] = lambda _: None, *, stale: float = STALE
) -> Iterator[Callable[[], None]]:
    """Holds the folder for the block; yields a function that raises if somebody has taken it meanwhile.

    In a bucket that is asked when something is stored.
    """
    place, mine = desk.place(folder), this_process()
    lock = Lock(Files(folder) if place is None else Objects(place))
    try:
        _acquire(lock, folder, mine, say, stale)
    except OSError as error:
        raise cannot_write(folder, error, ELSEWHERE) from error

    def check() -> None:
        holder = None
        with suppress(OSError):  # a disk that cannot be read just now says nothing
            holder = lock.lost_to(mine)
        if holder is not None:
            raise UserError(
                f"the lock of {folder} is no longer of this run but of {name(holder)}: this run stood still, "
                "or somebody removed it; it ends, and writes nothing more"
            )

    done = threading.Event()
    heart = threading.Thread(
        target=_beat, args=(lock, mine, done, min(BEAT, stale / 4)), daemon=True
    )
    heart.start()
    try:
        if place is None:
            yield check
        else:  # what is written before it is stored is nobody else's
            desk.guard(folder, check)
            yield lambda: None
    finally:
        done.set()
        heart.join()
        lock.release(mine)
        desk.guard(folder, lambda: None)


def _acquire(
    lock: Lock, folder: Path, mine: Holder, say: Callable[[str], None], stale: float
) -> None:
    taken = False
    while not taken:
        number, said = lock.latest()
        holder = holder_of(said)
        if holder is not None and not known_dead(holder):
            if alive(holder):
                raise _taken(folder, holder)
            say(
                f"{folder} is in use by {name(holder)}: "
                f"watching for up to {stale:g} s whether that is alive"
            )
            _watch(lock, folder, said, stale)
        taken = lock.take(number + 1, mine)


def _watch(lock: Lock, folder: Path, said: bytes, stale: float) -> None:
    """Returns when it was released or nothing new said for `stale` seconds; raises at a sign of life."""
    until = time.monotonic() + stale
    while time.monotonic() < until:
        time.sleep(min(1.0, stale / 20))
        now = lock.latest()[1]
        holder = holder_of(now)
        if holder is None:
            return
        if now != said:
            raise _taken(folder, holder)


def _beat(lock: Lock, mine: Holder, done: threading.Event, every: float) -> None:
    while not done.wait(every):
        lock.beat(mine)


def _taken(folder: Path, holder: Holder) -> UserError:
    return UserError(
        f"{folder} is in use by {name(holder)}: wait for it, end it, or choose another --out"
    )
