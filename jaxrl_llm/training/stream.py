"""The batches of a run's prompts, with responses; the next is sampled while the trainer updates."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxrl_llm.errors import Leaving
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.training.leaving import in_background

E = TypeVar("E")


@dataclass(frozen=True)
class Cursor:
    """A position in the data, before the next batch; with its responses, if sampled ahead.

    The responses are those of all processes.
    """

    data: dict[str, int]
    ahead: Rollout | None = None


class Stream(Generic[E]):
    """The batches of `data`; `sample(step, examples)` answers this process's share of each, and
    `sample(step, examples, n)` those that `draw` added to the batch of `step` the nth time.
    `whole(examples, own)` gathers the responses of all processes (None if one has none), and
    `own(examples, whole)` takes this one's share. `cursor` resumes an earlier stream. `seconds` is
    how long the last batch took to sample (0: restored from a checkpoint).
    """

    def __init__(
        self,
        data: Batches[E],
        sample: Callable[..., Rollout],
        *,
        whole: Callable[[list[E], Rollout | None], Rollout | None] = lambda _, own: own,
        own: Callable[[list[E], Rollout], Rollout] = lambda _, whole: whole,
        cursor: Cursor | None = None,
    ):
        self._data, self._sample, self._whole, self.seconds = data, sample, whole, 0.0
        if cursor is not None:
            data.set_state(cursor.data)
        self._next = data.get_state()  # position of the first batch not taken
        self._examples: list[E] | None = None
        self._ahead: Future[tuple[Rollout, float]] | None = None
        self._reached = self._next  # position for `cursor`; `_kept` are its responses
        self._kept: tuple[list[E], Rollout | None] | None = None
        if cursor is not None and cursor.ahead is not None:
            share = own(self.examples, cursor.ahead)
            self._ahead = Future()
            self._ahead.set_result((share, 0.0))
            self._kept = self.examples, share

    @property
    def examples(self) -> list[E]:
        """The examples of the next batch."""
        if self._examples is None:
            self._examples = next(self._data)
        return self._examples

    def take(self, step: int) -> Rollout:
        """This process's responses to the next batch, that of `step`.

        They come from `begin`, if it was called, or are sampled now.
        """
        ahead, self._ahead = self._ahead, None
        own, self.seconds = ahead.result() if ahead else self._answer(step, self.examples)
        self._examples, self._next = None, self._data.get_state()
        return own

    def draw(self, count: int) -> list[E]:
        """`count` more examples for the batch from `take`; before `begin`."""
        examples = self._data.draw(count)
        self._next = self._data.get_state()
        return examples

    def answer(self, step: int, examples: list[E], nth: int) -> Rollout:
        """This process's responses to examples from the nth `draw` of a step."""
        own, seconds = self._answer(step, examples, nth)
        self.seconds += seconds
        return own

    def begin(self, step: int) -> None:
        """Starts sampling the next batch, that of `step`, in the background."""
        examples = self.examples
        self._ahead = in_background(lambda: self._answer(step, examples))

    def advance(self) -> None:
        """The batch from `take` was learned from: `cursor` goes on after it."""
        self._reached, self._kept = self._next, None

    def settle(self) -> None:
        """Waits until nothing is being sampled; raises errors of sampling.

        A batch that a stop interrupts is sampled anew when the run goes on.
        """
        if self._ahead is not None:
            own = None  # if dropped here, `cursor` drops it in all processes
            with suppress(Leaving):
                own = self._ahead.result()[0]
            self._kept = self.examples, own

    def cursor(self) -> Cursor:
        """The position after the last batch learned from; all processes have to call it.

        It has the responses to the next batch, if `settle` found them.
        """
        ahead = None if self._kept is None else self._whole(*self._kept)
        return Cursor(dict(self._reached), ahead)

    def _answer(self, step: int, examples: list[E], *nth: int) -> tuple[Rollout, float]:
        start = time.perf_counter()
        own = self._sample(step, examples, *nth)
        return own, time.perf_counter() - start
