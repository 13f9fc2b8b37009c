"""The lock of a folder in a file system: a file that names its holder and is touched while the holder lives.

It needs nothing of a file system but that a file is created by one process alone and that names can be changed.
"""

import json
import os
import uuid
from contextlib import suppress
from pathlib import Path

from jaxrl_llm.runs.holder import Holder

NAME = "lock"


class LockFile:
    """The lock of a folder, in it."""

    def __init__(self, folder: Path):
        self._path = folder / NAME

    def create(self, mine: Holder) -> bool:
        try:
            number = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(number, json.dumps(mine).encode())
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(number)
        return True

    def holder(self) -> Holder:
        """What the file says; {} if it says nothing yet, or is not there."""
        return _read(self._path)

    def last_beat(self) -> int | None:
        """When it was touched; the file is opened, for network file systems look anew only then."""
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def pass_over(self, holder: Holder) -> None:
        """Removes a dead holder's file; one that a third process made in between is put back."""
        aside = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != holder:
            with suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink()

    def beat(self, mine: Holder) -> None:
        if self.holder() == mine:
            with suppress(OSError):  # one missed beat is allowed for
                os.utime(self._path)

    def lost_to(self, mine: Holder) -> Holder | None:
        """Whoever has the file; one that cannot be read just now says nothing."""
        try:
            holder = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return None
        return None if holder == mine else holder

    def release(self, mine: Holder) -> None:
        if self.holder() == mine:
            self._path.unlink(missing_ok=True)


def _read(path: Path) -> Holder:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
