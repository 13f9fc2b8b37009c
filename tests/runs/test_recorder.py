"""What the steps of a phase leave for people."""

import json

import pytest
import rich.console

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.step import Step
from jaxrl_llm.runs.journal import Journal
from jaxrl_llm.runs.recorder import Recorder


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
