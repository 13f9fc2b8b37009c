"""What the steps of a phase leave for people."""

import json
from contextlib import suppress

import pytest
import rich.console

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.step import Step
from jaxrl_llm.runs.journal import Journal
from jaxrl_llm.runs.recorder import Recorder


def test_what_could_not_be_written_is_written_before_the_step_after_it(tmp_path, monkeypatch):
    """Else the step after it is saved, and a resumed run never comes by the one that is missing."""
    journal = Journal(tmp_path, rich.console.Console(quiet=True))
    journal.start()
    recorder = Recorder(journal, "reinforce", lambda *_: None, most_unchecked=1.0)
    write, failed = journal.record, []

    def once(step, *rest):
        if step == 2 and not failed:
            failed.append(step)
            raise UserError("cannot write metrics.jsonl")
        write(step, *rest)

    monkeypatch.setattr(journal, "record", once)
    for number in (1, 2, 3):
        recorder.hold(Step(number, None, None, lambda: {"reward": 0.5}))  # pyright: ignore[reportArgumentType]
        with suppress(UserError):
            recorder.flush()
    journal.close()
    assert failed == [2]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]


def test_what_could_not_be_shown_is_shown_before_its_step_is_saved(tmp_path):
    """A disk that fails once: whoever saves the step flushes again; a resumed run does not come by it."""
    shown = []

    def show(step):
        shown.append(step.number)
        if len(shown) == 1:
            raise UserError("cannot write samples")

    journal = Journal(tmp_path, rich.console.Console(quiet=True))
    journal.start()
    recorder = Recorder(journal, "reinforce", lambda *_: None, most_unchecked=1.0, show=show)
    recorder.hold(Step(3, None, None, lambda: {"reward": 0.5}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError):
        recorder.flush()
    recorder.flush()
    recorder.flush()
    journal.close()
    assert shown == [3, 3]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3]
