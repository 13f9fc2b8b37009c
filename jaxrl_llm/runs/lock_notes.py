"""What a lock is made of: numbered notes, each created by one process alone; the highest number holds.

Who takes the place of a dead holder makes the number after that holder's, and of several one succeeds. Nobody
writes to the note of another, so a holder that stood still cannot take anything back: its number is not the
highest any more. Numbers only grow; the last note stays, and says that nobody holds it.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from jaxrl_llm.errors import UserError
from jaxrl_llm.runs.holder import Holder
from jaxrl_llm.storage import Place

FOLDER = "lock"
FREE = b"{}"


class Notes(Protocol):
    """Where notes lie."""

    def numbers(self) -> list[int]:
        """Those that are there, the highest last."""
        ...

    def create(self, number: int, content: bytes) -> bool:
        """Whether the note was not there, and now is; of many who try one hears so."""
        ...

    def read(self, number: int) -> bytes | None:
        """What a note says; None if it is gone."""
        ...

    def write(self, number: int, content: bytes) -> None:
        """A note that is there says something else, never half of it."""
        ...

    def beat(self, number: int, content: bytes) -> None:
        """The same, but one that fails is allowed for."""
        ...

    def remove(self, number: int) -> None:
        """One note less."""
        ...


class Lock:
    """A lock over notes, and the note of this process."""

    def __init__(self, notes: Notes):
        self._notes = notes
        self._mine, self._beats = 0, 0

    def latest(self) -> tuple[int, bytes]:
        """The highest number and what it says; none is 0, and free."""
        while numbers := self._notes.numbers():
            if (said := self._notes.read(numbers[-1])) is not None:
                return numbers[-1], said
        return 0, FREE

    def take(self, number: int, mine: Holder) -> bool:
        """Whether it is ours, now that the number before is free or of a dead holder."""
        if not self._notes.create(number, _content(mine, 0)):
            return False
        there = self._notes.numbers()
        if there[-1:] != [number]:  # free once, but we stood still and others took more
            self._notes.remove(number)
            return False
        for older in there[:-1]:
            self._notes.remove(older)
        self._mine = number
        return True

    def beat(self, mine: Holder) -> None:
        """A sign of life; who has lost the lock writes to a note that counts no more."""
        self._beats += 1
        self._notes.beat(self._mine, _content(mine, self._beats))

    def lost_to(self, mine: Holder) -> Holder | None:
        """Who has it now, if it is no longer ours: {} where nobody is named."""
        number, said = self.latest()
        holder = holder_of(said)
        return None if number == self._mine and holder == mine else holder or {}

    def release(self, mine: Holder) -> None:
        """Gives it back, if it is still ours."""
        with suppress(OSError):  # on a broken disk the end of this process says so
            if self.lost_to(mine) is not None:
                return
            try:
                self._notes.write(self._mine, FREE)
            except OSError:  # what is full lets go of a name
                self._notes.remove(self._mine)


def holder_of(said: bytes) -> Holder | None:
    """Who made a note; {} if it does not say (yet), None if it is free."""
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    if found == json.loads(FREE):
        return None
    return {k: v for k, v in found.items() if k != "beat"} if isinstance(found, dict) else {}


def _content(mine: Holder, beats: int) -> bytes:
    return json.dumps(mine | {"beat": f"{beats:012d}"}).encode()  # of one length


class Files:
    """Notes in a folder of a file system that lets one process alone create a file."""

    def __init__(self, folder: Path):
        self._folder = folder / FOLDER

    def numbers(self) -> list[int]:
        with suppress(FileNotFoundError):
            return sorted(int(name) for name in os.listdir(self._folder) if name.isdecimal())
        return []

    def create(self, number: int, content: bytes) -> bool:
        self._folder.mkdir(exist_ok=True)
        path = self._path(number)
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return True

    def read(self, number: int) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._path(number).read_bytes()
        return None

    def write(self, number: int, content: bytes) -> None:
        """In place, as long as it was: a disk that is full has room for that."""
        with suppress(FileNotFoundError), self._path(number).open("r+b", buffering=0) as file:
            file.write(content.ljust(os.fstat(file.fileno()).st_size))

    def beat(self, number: int, content: bytes) -> None:
        with suppress(OSError):
            self.write(number, content)

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}"


class Objects:
    """Notes in a bucket."""

    def __init__(self, place: Place):
        self._place = place

    def numbers(self) -> list[int]:
        names = self._place.names(FOLDER)
        return sorted(int(name.rpartition("/")[2]) for name in names)

    def create(self, number: int, content: bytes) -> bool:
        return self._place.create(_name(number), content)

    def read(self, number: int) -> bytes | None:
        return self._place.read(_name(number))

    def write(self, number: int, content: bytes) -> None:
        self._place.write(_name(number), content)

    def beat(self, number: int, content: bytes) -> None:
        with suppress(UserError):
            self._place.write(_name(number), content, patience=0.0)

    def remove(self, number: int) -> None:
        self._place.remove(_name(number))


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}"
