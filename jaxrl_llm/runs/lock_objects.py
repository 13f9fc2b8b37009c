"""The lock of a place in a bucket: numbered objects, each made by one process alone; the highest number holds.

Who takes the place of a dead holder makes the next number, and of several one succeeds. Nobody writes to the
object of another, so a holder that stood still cannot take anything back: its number is not the highest any
more. Numbers only grow; the last object stays, and says that nobody holds it.
"""

import json
from contextlib import suppress

from jaxrl_llm.errors import UserError
from jaxrl_llm.runs.holder import Holder
from jaxrl_llm.storage import Place

FOLDER = "lock"


class LockObjects:
    """The lock of a place."""

    def __init__(self, place: Place):
        self._place = place
        self._mine, self._beats = 0, 0
        self._dead: Holder | None = None

    def create(self, mine: Holder) -> bool:
        number, holder = self._highest()
        if holder and holder != self._dead:
            return False
        if not self._place.create(_name(number + 1), _content(mine, 0)):
            return False
        self._mine = number + 1
        latest = self._numbers()[-1]
        if latest != self._mine:  # made after a later one, by a process that stood still
            self._place.remove(_name(self._mine))
            return False
        for older in self._numbers()[:-1]:
            self._place.remove(_name(older))
        return True

    def holder(self) -> Holder:
        return self._highest()[1]

    def last_beat(self) -> bytes | None:
        """What the highest says, the number of its beat with it."""
        number, holder = self._highest()
        return self._place.read(_name(number)) if holder else None

    def pass_over(self, holder: Holder) -> None:
        """What is made next may follow on the object of this holder."""
        self._dead = holder

    def beat(self, mine: Holder) -> None:
        self._beats += 1
        with suppress(UserError):  # some missed beats are allowed for
            self._place.write(_name(self._mine), _content(mine, self._beats), patience=0.0)

    def lost_to(self, mine: Holder) -> Holder | None:
        number, holder = self._highest()
        return None if number == self._mine and holder == mine else holder

    def release(self, mine: Holder) -> None:
        if self.lost_to(mine) is None:
            self._place.write(_name(self._mine), b"{}")

    def _highest(self) -> tuple[int, Holder]:
        """The highest number, and who made it: {} if it was released, or there is none."""
        number = (self._numbers() or [0])[-1]
        found = json.loads(self._place.read(_name(number)) or b"{}") if number else {}
        found.pop("beat", None)
        return number, found

    def _numbers(self) -> list[int]:
        names = self._place.names(FOLDER)
        return sorted(int(name.rpartition("/")[2]) for name in names)


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}"


def _content(mine: Holder, beats: int) -> bytes:
    return json.dumps(mine | {"beat": beats}).encode()
