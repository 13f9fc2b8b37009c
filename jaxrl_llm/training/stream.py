"""The batches of a run's prompts, step after step; the next can be answered while the trainer updates."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxrl_llm.errors import Leaving
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.training.checkpoint import in_background

E = TypeVar("E")


@dataclass(frozen=True)
class Cursor:
    """Where a stream is: the state of its data before the next batch; its responses, if they are there already.

    The responses are those of all processes.
    """

    data: dict[str, int]
    ahead: Rollout | None = None


class Stream(Generic[E]):
    """The batches of `data`, answered by `sample(step, examples)` as far as they are this process's share.

    `whole` and `own` make the responses of all processes of a share (None if one has none), and a share of them.
    `cursor` is where an earlier stream stopped. `seconds` is how long the last batch took to sample (0: out of a
    checkpoint).
    """

    def __init__(
        self,
        data: Batches[E],
        sample: Callable[[int, list[E]], Rollout],
        *,
        whole: Callable[[list[E], Rollout | None], Rollout | None] = lambda _, own: own,
        own: Callable[[list[E], Rollout], Rollout] = lambda _, whole: whole,
        cursor: Cursor | None = None,
    ):
        self._data, self._sample, self._whole, self.seconds = data, sample, whole, 0.0
        if cursor is not None:
            data.set_state(cursor.data)
        self._next = data.get_state()  # of the first batch that has not been taken
        self._examples: list[E] | None = None
        self._ahead: Future[tuple[Rollout, float]] | None = None
        self._reached = self._next  # what `cursor` tells, with the responses that are kept
        self._kept: tuple[list[E], Rollout | None] | None = None
        if cursor is not None and cursor.ahead is not None:
            share = own(self.examples, cursor.ahead)
            self._ahead = Future()
            self._ahead.set_result((share, 0.0))
            self._kept = self.examples, share

    @property
    def examples(self) -> list[E]:
        """The next batch."""
        if self._examples is None:
            self._examples = next(self._data)
        return self._examples

    def take(self, step: int) -> Rollout:
        """This process's share of the responses to the next batch, which is that of this step.

        They are those that were begun, else they are sampled now.
        """
        ahead, self._ahead = self._ahead, None
        own, self.seconds = ahead.result() if ahead else self._answer(step, self.examples)
        self._examples, self._next = None, self._data.get_state()
        return own

    def begin(self, step: int) -> None:
        """Starts on the next batch, which is that of this step, in the background."""
        examples = self.examples
        self._ahead = in_background(lambda: self._answer(step, examples))

    def advance(self) -> None:
        """The batch that was taken has been learned from: a later stream goes on after it."""
        self._reached, self._kept = self._next, None

    def settle(self) -> None:
        """Returns when nothing is being sampled; raises what went wrong with it.

        What was dropped because the run is asked to stop is sampled anew when it goes on.
        """
        if self._ahead is not None:
            own = None  # dropped; `cursor` tells the other processes
            with suppress(Leaving):
                own = self._ahead.result()[0]
            self._kept = self.examples, own

    def cursor(self) -> Cursor:
        """What a later stream goes on from: after the last batch that was learned from.

        With the responses to the batch after that, if they were there when it was learned from (`settle`).
        """
        ahead = None if self._kept is None else self._whole(*self._kept)
        return Cursor(dict(self._reached), ahead)

    def _answer(self, step: int, examples: list[E]) -> tuple[Rollout, float]:
        start = time.perf_counter()
        own = self._sample(step, examples)
        return own, time.perf_counter() - start
