"""What is learned from, what chooses the best checkpoint, and what is read once at the end."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest

from jaxrl_llm.cli import train as cli
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.runs import splits
from jaxrl_llm.runs import train as training
from jaxrl_llm.runs.notes import Notes
from jaxrl_llm.runs.recorder import Recorder

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


class Checkpoints:
    def __init__(self):
        self.saved = []

    def save(self, step, state, notes, score):
        self.saved.append((step, Notes.from_json(notes).best, score))


def test_the_best_score_may_be_zero_and_none_is_none():
    journal = SimpleNamespace(sync=lambda: None)
    run = SimpleNamespace(best=None, saved=-1, checkpoints=Checkpoints(), journal=journal)
    for step, score in ((0, None), (1, 0.0), (2, 0.5), (3, 0.2)):
        training._save(run, step, "reinforce", None, None, score)  # pyright: ignore[reportArgumentType]
    assert run.checkpoints.saved == [(0, None, None), (1, 0.0, 0.0), (2, 0.5, 0.5), (3, 0.5, 0.2)]
    assert run.saved == 3


def written(folder, scores):
    records = [{"step": s, "phase": "reinforce", "eval/accuracy": a} for s, a in scores.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_the_summary_says_when_nothing_was_gained(tmp_path):
    better = cli._progress(written(tmp_path, {4: 0.2, 7: 0.5, 10: 0.4}), 7)
    assert better.startswith("validation accuracy: 20.0% before reinforcement, 50.0% at step 7")
    assert "mean of the last 2: 45.0% (+25.0 points)" in better
    assert "warning" not in better
    worse = cli._progress(written(tmp_path, {4: 0.5, 7: 0.4, 10: 0.3}), 7)
    assert worse.endswith("warning: no checkpoint is better than the start of reinforcement")
    none = cli._progress(written(tmp_path, {4: 0.5}), 4)
    assert none == "validation accuracy: 50.0% before reinforcement"


@pytest.mark.parametrize(
    ("words", "value"), [([], False), (["--resume"], True), (["--resume", "auto"], "auto")]
)
def test_resume_stands_alone_or_with_auto(words, value):
    import tyro

    assert tyro.cli(cli.Options, args=words).resume == value


def test_resume_takes_no_other_word(capsys):
    import tyro

    with pytest.raises(SystemExit):
        tyro.cli(cli.Options, args=["--resume", "always"])
    assert "resume" in capsys.readouterr().err


def test_auto_resumes_only_what_was_started(tmp_path):
    auto = cli.Options(resume="auto")
    assert not auto.resumes(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert auto.resumes(tmp_path)
    assert cli.Options(resume=True).resumes(tmp_path / "nowhere")
    assert not cli.Options().resumes(tmp_path)


def test_no_copy_of_the_policy_stays_for_the_supervised_steps(tmp_path, monkeypatch):
    happened = []
    for thing, name in ((NativeSampler, "push"), (NativeSampler, "release"), (Recorder, "hold")):
        real = getattr(thing, name)
        said = lambda self, *args, real=real, name=name: (happened.append(name), real(self, *args))[
            1
        ]
        monkeypatch.setattr(thing, name, said)
    main(
        [
            "train",
            "tests/training/quick.py",
            "--warm-steps",
            "4",
            "--steps",
            "0",
            "--out",
            str(tmp_path / "run"),
        ]
    )
    assert " ".join(happened[happened.index("hold") :]).startswith(
        "hold hold hold push release release hold"
    )
