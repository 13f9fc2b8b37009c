"""The batches of a run's prompts, step after step; the next can be answered while the trainer updates."""

import time
from collections.abc import Callable
from concurrent.futures import Future
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

    `whole` and `own` make the responses of all processes of a share, and a share of them. `cursor` is where an
    earlier stream stopped. `seconds` is how long the last batch took to sample (0: out of a checkpoint).
    """

    def __init__(
        self,
        data: Batches[E],
        sample: Callable[[int, list[E]], Rollout],
        *,
        whole: Callable[[list[E], Rollout], Rollout] = lambda _, own: own,
        own: Callable[[list[E], Rollout], Rollout] = lambda _, whole: whole,
        cursor: Cursor | None = None,
    ):
        self._data, self._sample, self._whole, self.seconds = data, sample, whole, 0.0
        if cursor is not None:
            data.set_state(cursor.data)
        self._next = data.get_state()  # before the first batch that has not been learned from
        self._taken: dict[str, int] | None = None  # after it, once it was taken
        self._examples: list[E] | None = None
        self._ahead: Future[tuple[Rollout, float]] | None = None
        if cursor is not None and cursor.ahead is not None:
            self._ahead = Future()
            self._ahead.set_result((own(self.examples, cursor.ahead), 0.0))

    @property
    def examples(self) -> list[E]:
        """The next batch."""
        if self._examples is None:
            self._examples = next(self._data)
        return self._examples

    def take(self, step: int) -> Rollout:
        """This process's share of the responses to the next batch, which is that of this step.

        They are those that were begun, else they are sampled now. Until `learned` the cursor stays before them.
        """
        ahead, self._ahead = self._ahead, None
        own, self.seconds = ahead.result() if ahead else self._answer(step, self.examples)
        self._examples, self._taken = None, self._data.get_state()
        return own

    def learned(self) -> None:
        """The batch that was taken last is part of the state now."""
        assert self._taken is not None
        self._next, self._taken = self._taken, None

    def begin(self, step: int) -> None:
        """Starts on the next batch, which is that of this step, in the background."""
        examples = self.examples
        self._ahead = in_background(lambda: self._answer(step, examples))

    def settle(self) -> None:
        """Returns when nothing is being sampled; raises what went wrong with it.

        What was dropped because the run was asked to stop is sampled anew when it goes on.
        """
        if self._ahead is not None:
            try:
                self._ahead.result()
            except Exception as error:
                self._ahead = None
                if not isinstance(error, Leaving):
                    raise

    def cursor(self) -> Cursor:
        """What a later stream goes on from, with the responses to the next batch if they were begun (and settled).

        A batch that was taken and not learned from is sampled anew.
        """
        if self._ahead is None or self._taken is not None:
            return Cursor(dict(self._next))
        return Cursor(dict(self._next), self._whole(self.examples, self._ahead.result()[0]))

    def _answer(self, step: int, examples: list[E]) -> tuple[Rollout, float]:
        start = time.perf_counter()
        own = self._sample(step, examples)
        return own, time.perf_counter() - start
