"""What a run writes down is whole, is that of the run, and ends it only where it is lost."""

import io
import json
import subprocess
import sys
import types

import pytest
import rich.console
from tensorboardX.proto import event_pb2

from jaxrl_llm.errors import UserError
from jaxrl_llm.training import journal
from jaxrl_llm.training.journal import METRICS, REINFORCE, Journal, Recorder


@pytest.fixture
def opened(tmp_path):
    """Starts journals in the folder of the test, and ends with their files closed."""
    began = []

    def start(after=-1, said=None):
        made = Journal(tmp_path, rich.console.Console(file=said or io.StringIO(), width=500))
        began.append(made)
        made.start(after)
        return made

    yield start
    for made in began:
        made.__exit__(KeyError)


def steps(folder):
    return [r["step"] for r in journal.read(folder)]


def test_records_come_back_as_they_were_written(tmp_path, opened):
    assert journal.read(tmp_path) == []
    made = opened()
    made.record(1, "x", {"loss": 0.1 + 0.2, "count": 2})
    made.record(1, REINFORCE, {"eval/accuracy": 0.5})
    assert journal.read(tmp_path) == made.records
    assert made.records[0] == {"step": 1, "phase": "x", "loss": 0.1 + 0.2, "count": 2}
    assert journal.scores(made.records) == {1: 0.5}
    assert made.find("eval/accuracy", 1, REINFORCE) == 0.5
    assert made.find("eval/accuracy", 1, "x") is made.find("loss", 2, "x") is None


def test_a_resume_forgets_what_is_later(tmp_path, opened):
    made = opened()
    for step in (1, 2, 3):
        made.record(step, "x", {})
    made.__exit__(None)
    made = opened(after=2)
    made.record(3, "y", {})
    assert [(r["step"], r["phase"]) for r in journal.read(tmp_path)] == [
        (1, "x"),
        (2, "x"),
        (3, "y"),
    ]
    opened()
    assert steps(tmp_path) == []


BAD = [b"\0" * 20, b'{"step": 3, "pha', b"\xff\xfe\xfa", b"[1]", b'{"step": "3"}', b"1e", b""]


def test_lines_that_are_no_records_are_left_out(tmp_path, opened, caplog):
    good = [json.dumps({"step": i, "phase": "x"}).encode() for i in range(8)]
    lines = [line for pair in zip(BAD, good, strict=False) for line in pair]
    (tmp_path / METRICS).write_bytes(b"\n".join([*lines, b'{"step": 9, "phase": "x"}']))  # torn
    assert steps(tmp_path) == [*range(7)]
    assert f"{len(BAD)} damaged lines" in caplog.text
    opened(after=4).record(5, "x", {})
    caplog.clear()
    assert steps(tmp_path) == [*range(6)]
    assert not caplog.text


@pytest.mark.parametrize(("left", "lost"), [(3, 0), (1, 2), (0, 3)])
def test_a_journal_that_has_lost_its_end_is_said(tmp_path, opened, left, lost):
    made = opened()
    for step in range(1, left + 1):
        made.record(step, "x", {})
    opened(after=3, said=(said := io.StringIO()))
    assert said.getvalue().startswith(f"{lost} steps have no record") == bool(lost)


class Full:
    """A disk with room for so many more bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(bytes(data)[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_is_an_error_and_a_resume_forgets_what_it_tore(tmp_path, opened):
    made = opened()
    made.record(1, "x", {"loss": 0.5})
    size = (tmp_path / METRICS).stat().st_size
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 10},) * 2)"
    code = (
        f"{limit}; import io, pathlib, rich.console; from jaxrl_llm.training import journal; "
        f"made = journal.Journal(pathlib.Path({str(tmp_path)!r}), rich.console.Console()); "
        "made._board = type('Board', (), {'add': print, 'close': print}); made.record(2, 'x', {})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert (tmp_path / METRICS).stat().st_size == size + 10
    assert steps(tmp_path) == [1]
    opened(after=1).record(2, "x", {})
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_for_tensorboard_is_an_error_and_no_record(tmp_path, opened):
    made = opened()
    writer = made._board._writer._py_recordio_writer
    writer._writer = Full(writer._writer, 10)
    with pytest.raises(OSError, match="No space left"):
        made.record(1, "x", {"loss": 0.5})
    assert steps(tmp_path) == []


def events(folder):
    for path in sorted((folder / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
        content, at = path.read_bytes(), 0
        while at < len(content):
            size = int.from_bytes(content[at : at + 8], "little")
            yield event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
            at += 12 + size + 4


def test_tensorboard_reads_what_is_written_and_forgets_what_a_resume_does(tmp_path, opened):
    made = opened()
    made.record(3, "x", {"loss": 0.5, "count": 2})
    made.__exit__(None)
    values = {v.tag: (e.step, v.simple_value) for e in events(tmp_path) for v in e.summary.value}
    assert values == {"x/loss": (3, 0.5), "x/count": (3, 2.0)}
    assert [e for e in events(tmp_path) if e.HasField("session_log")] == []
    opened(after=2)
    assert [e.step for e in events(tmp_path) if e.HasField("session_log")] == [3]


def test_tensorboard_forgets_all_where_a_run_starts_over(tmp_path, opened):
    made = opened()
    made.record(1, "x", {"loss": 0.5})
    made.__exit__(None)
    opened(after=-1)
    assert [e.step for e in events(tmp_path) if e.HasField("session_log")] == [0]


@pytest.mark.parametrize(
    ("scores", "steps", "best"),
    [
        ({4: 0.9, 7: 0.5, 10: 0.2}, (4, 7, 10), 7),  # the policy it began with is no candidate
        ({4: 0.0, 7: 0.0, 10: 0.0}, (4, 7, 10), 10),  # the later of equals
        ({4: 0.0, 7: 0.5, 10: 0.2}, (4, 10), 10),  # of those that are there
        ({4: 0.0, 7: 0.5, 11: 0.5}, (4, 7, 11), 7),  # 11 was saved on the way out only
        ({4: 0.0, 7: 0.5, 11: 0.6}, (4, 7, 11), 11),  # which would have been saved anyhow
        ({4: 0.0}, (4, 10), None),
    ],
)
def test_the_best_is_that_of_the_highest_accuracy(scores, steps, best):
    records = [{"step": s, "phase": REINFORCE, "eval/accuracy": a} for s, a in scores.items()]
    assert journal.best(records, [*steps], lambda step: step != 11) == best


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """A stand-in for Weights & Biases, that is asked for."""
    (tmp_path / "run.json").write_text(json.dumps({"id": "abc"}))
    nothing = lambda *_, **__: None
    fake = types.SimpleNamespace(log=nothing, finish=nothing, begun=[], __spec__=object())
    fake.init = lambda **how: (fake.begun.append(how), fake)[1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv(journal.WANDB, "1")
    return fake


def test_weights_and_biases_only_when_asked_for(opened, wandb, monkeypatch):
    monkeypatch.setenv(journal.WANDB, "0")
    opened().record(1, "x", {})
    assert not wandb.begun
    monkeypatch.setenv(journal.WANDB, "1")
    opened()
    assert (wandb.begun[0]["id"], wandb.begun[0]["resume"]) == ("abc", "allow")


def broken(*_, **__):
    raise RuntimeError("api_key not configured (no-tty). call wandb.login\nmore")


@pytest.mark.parametrize("call", ["log", "finish"])
def test_weights_and_biases_never_ends_a_run(opened, wandb, call, tmp_path, caplog):
    setattr(wandb, call, broken)
    made = opened()
    made.record(1, "x", {})
    made.record(2, "x", {})
    made.__exit__(None)
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("Weights & Biases is left out from here on: api_key") == 1


def test_weights_and_biases_that_does_not_start_is_one_line(opened, wandb, monkeypatch):
    wandb.init = broken
    with pytest.raises(UserError, match=r"api_key not configured.*JAXRL_WANDB") as error:
        opened()
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        opened()


def test_samples_are_quoted(tmp_path, opened):
    opened().samples(3, [("one\ntwo", "", "reward 1")])
    said = (tmp_path / "samples" / "step-000003.md").read_text()
    assert said.endswith("## Prompt\n\n> one\n> two\n\n**reward 1**\n\n> \n")
    opened().samples(4, [("\x1b[2J", "a\rb\u202e", "reward 1")])
    said = (tmp_path / "samples" / "step-000004.md").read_text()
    assert said.endswith("> \\x1b[2J\n\n**reward 1**\n\n> a\\rb\\u202e\n")


def recorder(made, **how):
    return Recorder(made, REINFORCE, range(20), 0, **{"most_unchecked": 0.5, "every": 8} | how)


def test_a_step_is_recorded_when_it_is_flushed_and_once(tmp_path, opened):
    one = recorder(opened())
    one.hold(1, dict)
    assert steps(tmp_path) == []
    one.flush()
    one.flush()
    assert steps(tmp_path) == [1]


FAILED = {"updates": 0, "skipped": 4, "reward": 0.0}


def test_an_alarm_is_recorded_each_time_and_said_once(tmp_path, opened):
    one = recorder(opened(said=(said := io.StringIO())))
    for step in (1, 2, 3):
        one.check()
        one.hold(step, lambda: FAILED)
        one.flush()
    assert [r["alarm/skipped"] for r in journal.read(tmp_path)] == [1, 1, 1]
    assert said.getvalue().count("warning: no gradient of the step was finite") == 1
    with pytest.raises(UserError, match="no gradient of the last 3 steps was finite"):
        one.check()
    recorder(opened(after=3)).check()  # resumed, it has three steps to do better


def test_a_phase_says_once_how_long_it_will_take(opened):
    one = recorder(opened(said=(said := io.StringIO())))
    one._journal.record(0, REINFORCE, {"eval/accuracy": 0.5, "time/evaluation": 20.0})
    with one.shown():
        for step in range(1, 6):
            one.hold(step, lambda: {"updates": 1, "time/step": 10.0, "time/compile": 30.0})
            one.flush()
    assert said.getvalue().count("to go") == 1
    assert "reinforce: 17 steps to go, about 3 min 50 s with 3 evaluations" in said.getvalue()
    assert "reinforce: the first step also compiles its programs\n" in said.getvalue()
    again = Recorder(one._journal, REINFORCE, range(4), 3, 0.5, 8)
    with again.shown():
        assert "compiles its programs, 30 s when it last did" in said.getvalue()


@pytest.mark.parametrize(
    ("steps", "text"), [(4, "1 step to go, about 10 s and 1 evaluation"), (3, "")]
)
def test_the_end_of_a_phase_is_near(opened, steps, text):
    made = opened(said=(said := io.StringIO()))
    one = Recorder(made, REINFORCE, range(steps), 0, 0.5, steps)
    for step in (1, 2, 3):
        one.hold(step, lambda: {"time/step": 10.0})
        one.flush()
    assert ("to go" in said.getvalue(), text in said.getvalue()) == (bool(text), True)
