"""The batches of a run's prompts, with responses; the next are sampled while the trainer updates."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from jaxrl_llm.background import in_background
from jaxrl_llm.errors import StopRequested
from jaxrl_llm.learning.groups import Group
from jaxrl_llm.tasks.pipeline import Batches

E = TypeVar("E")


@dataclass(frozen=True)
class Cursor:
    """A position in the data, after the batches `ahead`, which were sampled for later steps.

    Each is the position before it and its groups, those of all processes. `surplus` are groups for
    the next batch, with the places of their examples in the data.
    """

    data: dict[str, int]
    ahead: Sequence[tuple[dict[str, int], list[Group]]] = ()
    surplus: Sequence[tuple[int, Group]] = ()


class _Batch(NamedTuple):
    """A batch that is sampled ahead: the position before it, and this process's groups."""

    data: dict[str, int]
    examples: list[Any]
    own: Future[tuple[list[Group], float]]


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
        sample: Callable[..., list[Group]],
        *,
        whole: Callable[[list[E], list[Group] | None], list[Group] | None] = lambda _, own: own,
        own: Callable[[list[E], list[Group]], list[Group]] = lambda _, whole: whole,
        cursor: Cursor | None = None,
    ):
        self._data, self._sample, self._whole, self.seconds = data, sample, whole, 0.0
        self._ahead: deque[_Batch] = deque()
        for position, groups in cursor.ahead if cursor else ():
            data.set_state(position)
            batch = self._drawn()
            there = [replace(x, example=e) for x, e in zip(groups, batch.examples, strict=True)]
            batch.own.set_result((own(batch.examples, there), 0.0))
        if cursor is not None:
            data.set_state(cursor.data)
        # groups for the next batch, with their places in the data; and those for the one after it
        self._surplus = (
            [(at, replace(x, example=data.at(at))) for at, x in cursor.surplus] if cursor else []
        )
        self._later: list[tuple[int, Group]] | None = None
        self._taken = False  # from those ahead, and not learned from yet
        self._mark()

    def _drawn(self) -> _Batch:
        """The next batch of the data, ahead of its step."""
        self._ahead.append(_Batch(self._data.get_state(), next(self._data), Future()))
        return self._ahead[-1]

    def _mark(self) -> None:
        """`cursor` goes on from here."""
        self._reached, self._kept = self._data.get_state(), [*self._ahead]

    def examples(self, count: int) -> list[E]:
        """The examples of the next batch: those sampled ahead, or `count` more."""
        return self._ahead[0].examples if self._ahead else self._data.draw(count)

    @property
    def surplus(self) -> list[Group]:
        """Groups that were left over, for the next batch."""
        return [group for _, group in self._surplus]

    @property
    def ahead(self) -> int:
        """How many batches are sampled, or being sampled, after the one from `take`."""
        return len(self._ahead) - self._taken

    def take(self, step: int, examples: list[E]) -> list[Group]:
        """This process's responses to the `examples` of the batch of `step`.

        They come from `begin`, if it was called, or are sampled now.
        """
        self._taken = bool(self._ahead)
        made = self._ahead[0].own.result() if self._taken else self._answer(step, examples)
        own, self.seconds = made
        return own

    def draw(self, count: int) -> list[E]:
        """`count` more examples for the batch from `take`; before `begin`."""
        return self._data.draw(count)

    def answer(self, step: int, examples: list[E], nth: int) -> list[Group]:
        """This process's responses to examples from the nth `draw` of a step."""
        own, seconds = self._answer(step, examples, nth)
        self.seconds += seconds
        return own

    def keep(self, drawn: Sequence[Group], chosen: Sequence[int]) -> None:
        """Leaves these groups of the last `drawn` for the next step."""
        first = self._data.get_state()["taken"] - len(drawn)
        self._later = [(first + i, drawn[i]) for i in chosen]

    def begin(self, step: int, count: int = 1) -> None:
        """Starts sampling the next batches, those from `step` on, one by one in the background."""
        batches = [self._drawn() for _ in range(count)]

        def work() -> None:
            for n, batch in enumerate(batches):
                try:
                    batch.own.set_result(self._answer(step + n, batch.examples))
                except BaseException as error:
                    for other in batches[n:]:
                        other.own.set_exception(error)
                    return

        in_background(work)

    def advance(self) -> None:
        """The batch from `take` was learned from: `cursor` goes on after it."""
        if self._taken:
            self._ahead.popleft()
        self._taken = False
        if self._later is not None:
            self._surplus = self._later
        self._mark()

    def settle(self) -> None:
        """Waits until nothing is being sampled; raises errors of sampling.

        A batch that a stop interrupts is sampled anew when the run goes on.
        """
        for batch in self._ahead:
            with suppress(StopRequested):
                batch.own.result()
        self._mark()

    def cursor(self) -> Cursor:
        """The position after the last batch learned from; all processes have to call it.

        It has the responses to those ahead that were there at `settle` or `advance`, up to the first
        that any process has not.
        """
        ahead: list[tuple[dict[str, int], list[Group]]] = []
        for position, examples, own in self._kept:
            there = own.done() and own.exception() is None
            whole = self._whole(examples, own.result()[0] if there else None)
            if whole is None:
                return Cursor(dict(position), tuple(ahead))
            ahead.append((dict(position), whole))
        return Cursor(dict(self._reached), tuple(ahead), tuple(self._surplus))

    def _answer(self, step: int, examples: list[E], *nth: int) -> tuple[list[Group], float]:
        start = time.perf_counter()
        own = self._sample(step, examples, *nth)
        return own, time.perf_counter() - start
