"""Batches of examples, shuffled anew each epoch and resumable at any example."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.task import Source

E = TypeVar("E")


class Batches(Iterator[list[E]], Generic[E]):
    """Batches of `batch_size` without end, in a new order each epoch.

    With `parts`, each a length and a share, of consecutive stretches of the source, each stretch has its
    share of any run of examples, and epochs of its own.
    """

    def __init__(
        self,
        source: Source[E],
        batch_size: int,
        *,
        seed: int,
        parts: Sequence[tuple[int, float]] = (),
    ):
        if len(source) == 0:
            raise UserError("the data set is empty: it needs at least one example")
        streams, end = list[Any](), 0
        for i, (count, _) in enumerate(parts or [(len(source), 1.0)]):
            own = int(np.random.SeedSequence((seed, i)).generate_state(1)[0]) if i else seed
            stretch = grain.MapDataset.range(end, end := end + count)
            streams.append(stretch.seed(own).shuffle().repeat())
        stream: Any = streams[0]
        if len(streams) > 1:
            stream = grain.MapDataset.mix(streams, [share for _, share in parts])
        self._examples, self._size = stream.map(source.__getitem__), batch_size
        self._taken = 0
        self._identity: dict[str, Any] = {
            "examples": len(source),
            "global_batch": batch_size,
            "seed": seed,
            **({"parts": [[*part] for part in parts]} if len(parts) > 1 else {}),
        }

    def __next__(self) -> list[E]:
        return self.draw(self._size)

    def draw(self, count: int) -> list[E]:
        """The next `count` examples."""
        at, self._taken = self._taken, self._taken + count
        return [self.at(place) for place in range(at, self._taken)]

    def at(self, place: int) -> E:
        """The example at a place in the stream."""
        return self._examples[place]

    def seek(self, batch: int) -> None:
        """Goes to a batch by its number, from 0."""
        self._taken = batch * self._size

    def get_state(self) -> dict[str, Any]:
        """The state for a checkpoint: how many examples were taken, and the settings of the stream."""
        return {"taken": self._taken, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken; UserError if its settings were others."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise UserError(
                    f"cannot resume the data at {key}={value}: the checkpoint was written with {state.get(key)}"
                )
        self._taken = state["taken"]
