"""What follows a save, in the background."""

import threading
from collections.abc import Callable

from jaxrl_llm.runs.disk import DamageError, first_line


class Settling(threading.Thread):
    """Whether a step that was saved was `verified`, or its `fault`, once joined; other errors are raised there."""

    def __init__(self, step: int, work: Callable[[], bool]):
        super().__init__(daemon=True)
        self.step, self.verified = step, False
        self.fault: str | None = None
        self._work, self._error = work, None
        self.start()

    def run(self) -> None:
        try:
            self.verified = self._work()
        except DamageError as error:
            self.fault = first_line(error)
        except BaseException as error:
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error
