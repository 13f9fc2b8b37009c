"""Examples with responses, batch after batch; the next batch can be sampled while the trainer updates."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from jaxrl_llm import hosts
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.tasks.pipeline import Batches

E = TypeVar("E")


@dataclass(frozen=True)
class Cursor:
    """Where a stream is: the state of its data before the next batch; its responses, if they are there already."""

    data: dict[str, int]
    ahead: Rollout | None = None


class Sampled(NamedTuple):
    """A batch of examples, their responses, and the seconds that sampling them took."""

    examples: list[Any]
    rollout: Rollout
    seconds: float


class Stream(Generic[E]):
    """The batches of `data`, answered by `sample(step, examples)`; `cursor` is where an earlier one left off.

    On several hosts `sample` answers a share, and `whole(examples, share)` brings all together.
    """

    def __init__(
        self,
        data: Batches[E],
        sample: Callable[[int, list[E]], Rollout],
        cursor: Cursor | None = None,
        whole: Callable[[list[E], Rollout], Rollout] = lambda _, rollout: rollout,
    ):
        self._data, self._sample, self._whole = data, sample, whole
        self._ahead: Future[Sampled] | None = None
        self._ahead_is_whole = False
        if cursor is not None:
            data.set_state(cursor.data)
        self._left = data.get_state()  # of the first batch that has not been taken
        if cursor is not None and cursor.ahead is not None:
            self._keep(Sampled(next(data), cursor.ahead, 0.0))

    def take(self, step: int) -> Sampled:
        """The batch of this step: the one that was begun, else one that is sampled now."""
        ahead, self._ahead = self._ahead, None
        sampled = ahead.result() if ahead else self._answer(step, next(self._data))
        if not (ahead and self._ahead_is_whole):
            sampled = self._brought_together(sampled)
        self._left = self._data.get_state()
        return sampled

    def begin(self, step: int) -> None:
        """Starts on the batch of this step, in the background."""
        examples: list[E] = next(self._data)
        self._ahead = _in_background(lambda: self._answer(step, examples))
        self._ahead_is_whole = False

    def settle(self) -> None:
        """Returns when nothing is being sampled; raises what went wrong with it."""
        if self._ahead is not None:
            self._ahead.result()

    def cursor(self) -> Cursor:
        """What a later stream goes on from: with the responses of the next batch, if they are there."""
        ahead = self._ahead
        if ahead is None:
            return Cursor(self._left)
        if not hosts.everywhere(ahead.done() and ahead.exception() is None):
            return Cursor(self._left)
        sampled = ahead.result()
        if not self._ahead_is_whole:
            sampled = self._brought_together(sampled)
            self._keep(sampled)
        return Cursor(self._left, sampled.rollout)

    def _keep(self, sampled: Sampled) -> None:
        """The next batch, with the responses of all."""
        self._ahead, self._ahead_is_whole = Future(), True
        self._ahead.set_result(sampled)

    def _brought_together(self, sampled: Sampled) -> Sampled:
        return sampled._replace(rollout=self._whole(sampled.examples, sampled.rollout))

    def _answer(self, step: int, examples: list[E]) -> Sampled:
        start = time.perf_counter()
        rollout = self._sample(step, examples)
        return Sampled(examples, rollout, time.perf_counter() - start)


def _in_background(call: Callable[[], Any]) -> Future[Any]:
    """The call's future; its thread does not keep a process alive that is leaving."""
    future: Future[Any] = Future()

    def work():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
