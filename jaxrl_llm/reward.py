"""The reward of a response."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LARGEST = 1e15  # of scores: sums of their squares over a batch are learned from in float32


@dataclass(frozen=True)
class Reward:
    """The reward of one response; `fields` are further numbers for the metrics.

    `graded` is False where nobody could decide whether the response is right: it is left out of
    the batch and its statistics.

    >>> jl.Reward(1.0, correct=True, fields={"format": 1.0}).graded
    True
    """

    score: float
    correct: bool
    fields: Mapping[str, float] = field(default_factory=dict)
    graded: bool = True

    def __str__(self) -> str:
        """As text: `reward 1, correct`."""
        if not self.graded:
            return "ungraded"
        return f"reward {self.score:g}, {'correct' if self.correct else 'wrong'}"


UNGRADED = Reward(0.0, False, graded=False)
