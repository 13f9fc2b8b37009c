"""What is learned from, what chooses the best checkpoint, and what is read once at the end."""

from collections import Counter
from types import SimpleNamespace

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.training import parts

TASK = SimpleNamespace(prompt=str)


def every(source):
    return [source[i] for i in range(len(source))]


def test_validation_comes_out_of_the_training_data_evenly():
    """One of every ten in a row, where the data are sorted; and of each kind, where they go in cycles."""
    made = splits.split(range(100), range(7), 10)
    assert [number // 10 for number in every(made.validation)] == list(range(10))
    kinds = Counter(number % 5 for number in every(splits.split(range(5000), [], 500).validation))
    assert sorted(kinds) == [0, 1, 2, 3, 4]
    assert all(70 < count < 130 for count in kinds.values())
    assert every(made.validation) == every(splits.split(range(100), [], 10).validation)
    assert sorted(every(made.train) + every(made.validation)) == list(range(100))
    assert len(made.test) == 7


def test_small_training_data_keep_three_quarters():
    made = splits.split(range(10), range(3), 500)
    assert (len(made.train), len(made.validation)) == (8, 2)
    with pytest.raises(UserError, match="at least 4 are needed"):
        splits.split(range(3), range(3), 500)


@pytest.mark.parametrize(
    ("train", "validation", "test", "said"),
    [
        ([1, 2, 3], [4], [5, 6], ""),
        ([1, 2, 3], [4], [1, 6], "warning: 1 test prompts are in the training data"),
        ([1, 2, 3], [4], [4, 6], "warning: 1 test prompts are in the validation data"),
        ([1, 2, 3], [3], [4], "warning: 1 validation prompts are in the training data"),
    ],
)
def test_overlap_is_said(train, validation, test, said):
    assert splits.overlap(TASK, splits.Splits(train, validation, test)) == said


def test_a_test_set_that_is_trained_on_is_refused():
    with pytest.raises(UserError, match="all 2 test examples are in the training data"):
        splits.overlap(TASK, splits.Splits([1, 2, 3], [4], [1, 2]))
