"""Which examples are for what: to learn from, to choose the best checkpoint by, to report on once at the end."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.task import Mapped, Source, Task

SHARE = 4  # validation is at most a quarter of the training data


class Splits(NamedTuple):
    """Three disjoint choices of a task's examples: `validation` is taken out of its training data."""

    train: Source[Any]
    validation: Source[Any]
    test: Source[Any]


def split(train: Source[Any], test: Source[Any], validation: int) -> Splits:
    """Sets `validation` examples aside, one out of each of as many equal stretches of the training data.

    So they are like the rest where that is sorted; which of a stretch is drawn, for it may also go in cycles.
    """
    size = len(train)
    count = min(validation, size // SHARE)
    if count < 1:
        raise UserError(
            f"the training data has {size} examples: at least {SHARE} are needed, to set one aside for validation"
        )
    stretches = itertools.pairwise(i * size // count for i in range(count + 1))
    rng = np.random.default_rng(0)
    aside = {int(rng.integers(*stretch)) for stretch in stretches}
    rest = [i for i in range(size) if i not in aside]
    get = train.__getitem__
    return Splits(Mapped(rest, get), Mapped(sorted(aside), get), test)


def overlap(task: Task[Any], splits: Splits) -> str:
    """A line on examples of one split whose prompt is in another, if there are any.

    A UserError where the test data say nothing, because all of their prompts are trained on.
    """
    train, validation, test = (
        [task.prompt(source[i]) for i in range(len(source))] for source in splits
    )
    known = set(train)
    seen = sum(prompt in known for prompt in test)
    if seen == len(test):
        raise UserError(
            f"the prompts of all {seen} test examples are in the training data: give the task a test set "
            "of its own"
        )
    chosen_by = set(validation) - known
    counts = (
        (seen, "test prompts are in the training data"),
        (sum(p in chosen_by for p in test), "test prompts are in the validation data"),
        (sum(p in known for p in validation), "validation prompts are in the training data"),
    )
    said = [f"{count} {what}" for count, what in counts if count]
    return f"warning: {'; '.join(said)}" if said else ""
