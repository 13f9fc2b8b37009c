"""What a run writes down is whole, is that of the run, and ends it only where it is lost."""

import html
import io
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rich.console
from tensorboardX.proto import event_pb2

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import journal, log, loggers
from jaxrl_llm.training.journal import METRICS, REINFORCE, Journal
from jaxrl_llm.training.log import RunLog
from jaxrl_llm.training.terminal import duration
from tests.reference import peer


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
    made.record(1, REINFORCE, {"eval/accuracy": 0.5, "eval/score": 2.5})
    assert journal.read(tmp_path) == made.records
    assert made.records[0] == {"step": 1, "phase": "x", "loss": 0.1 + 0.2, "count": 2}
    assert journal.scores(made.records) == {1: (0.5, 2.5)}
    assert made.find("eval/accuracy", 1, REINFORCE) == 0.5
    assert made.find("eval/accuracy", 1, "x") is made.find("loss", 2, "x") is None


def test_who_listens_is_told_each_record_that_is_written(tmp_path):
    heard = []
    for writes in (True, False):
        console = rich.console.Console(file=io.StringIO())
        with Journal(tmp_path, console, [], writes=writes, on_record=heard.append) as made:
            made.start(-1)
            made.record(1, "x", {"loss": 0.5})
    assert heard == journal.read(tmp_path) == [{"step": 1, "phase": "x", "loss": 0.5}]


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


BAD = [
    *(b"\0" * 20, b'{"step": 3, "pha', b"\xff\xfe\xfa", b"[1]", b'{"step": "3"}', b"1e", b""),
    b'{"step": 3, "phase": null}',
    b'{"step": 3, "phase": "reinforce", "reward": "0.5"}',
]


def test_lines_that_are_no_records_are_left_out(tmp_path, opened, caplog):
    good = [json.dumps({"step": i, "phase": "x"}).encode() for i in range(len(BAD) + 1)]
    lines = [line for pair in zip(BAD, good, strict=False) for line in pair]
    (tmp_path / METRICS).write_bytes(b"\n".join([*lines, b'{"step": 99, "phase": "x"}']))  # torn
    assert steps(tmp_path) == [*range(len(BAD))]
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
        "made._loggers = type('Loggers', (), {'log': print}); made.record(2, 'x', {})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert (tmp_path / METRICS).stat().st_size == size + 10
    assert steps(tmp_path) == [1]
    opened(after=1).record(2, "x", {})
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_for_tensorboard_is_one_warning(tmp_path, opened, caplog):
    made = opened()
    writer = made._loggers._loggers["TensorBoard"]._writer._py_recordio_writer
    writer._writer = Full(writer._writer, 10)
    for step in (1, 2):
        made.record(step, "x", {"loss": 0.5})
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count("TensorBoard is left out from here on: [Errno 28] No space left") == 1


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
    ("scores", "fit"),
    [
        ({4: 0.9, 7: 0.5, 10: 0.2}, {7, 10}),  # the policy it began with is no candidate
        ({4: 0.0, 7: 0.0, 10: 0.0}, {7, 10}),
        ({4: 0.0, 7: 0.5, 11: 0.5}, {7}),  # 11 was saved on the way out only
        ({4: 0.0, 7: 0.5, 11: 0.6}, {7, 11}),  # which would have been saved anyhow
        ({4: 0.0}, set()),
    ],
)
def test_which_steps_may_be_the_best(scores, fit):
    records = [{"step": s, "phase": REINFORCE, "eval/accuracy": a} for s, a in scores.items()]
    found = journal.fit(records, lambda step: step != 11)
    assert found == {step: (scores[step], 0.0) for step in fit}


def test_the_mean_reward_tells_equal_accuracies_apart():
    """A reward for few words is never 1: no response is ever correct, and all accuracies are 0."""
    measured = {0: (0.0, 0.1), 5: (0.0, 0.4), 10: (0.0, 0.3), 15: (0.0, 0.35)}
    records = [
        {"step": s, "phase": REINFORCE, "eval/accuracy": a, "eval/score": r}
        for s, (a, r) in measured.items()
    ]
    found = journal.fit(records)
    assert max(found, key=found.__getitem__) == 5
    assert set(journal.fit(records, lambda step: False)) == {5}  # better than all before it


def test_an_evaluation_without_graded_responses_is_no_score():
    """It has an accuracy and a reward of 0, which would be above rewards below 0."""
    worse = {"phase": REINFORCE, "eval/accuracy": 0.0, "eval/examples": 4}
    records = [worse | {"step": s, "eval/score": r} for s, r in ((0, -0.8), (5, -0.4), (15, -0.2))]
    records.append(worse | {"step": 10, "eval/score": 0.0, "eval/examples": 0})
    assert journal.fit(records) == {5: (0.0, -0.4), 15: (0.0, -0.2)}


class Hub:
    """A stand-in for Weights & Biases or trackio that keeps what it is told."""

    def __init__(self):
        self.begun, self.logged, self.finished, self.broken = [], [], 0, ""

    def init(self, **how):
        self._may_break("init")
        self.thread = threading.current_thread()
        self.begun.append(how)
        print("welcome")
        return self

    def log(self, values, step):
        self._may_break("log")
        self.logged.append((step, values))

    def Table(self, columns, data):
        self._may_break("Table")
        return columns, data

    def Text(self, text):
        return text

    def finish(self):
        self._may_break("finish")
        self.finished += 1

    def _may_break(self, call):
        if self.broken == call:
            self.raises()

    def raises(self):
        raise RuntimeError("api_key not configured (no-tty). call wandb.login\nmore")


@pytest.fixture
def hubs(monkeypatch, tmp_path):
    """Stand-ins that are asked for, those that share an interface."""
    (tmp_path / "run.json").write_text(json.dumps({"id": "abcdefghijk"}))
    found = {name: Hub() for name in ("wandb", "trackio")}
    for name, hub in found.items():
        monkeypatch.setitem(sys.modules, name, hub)
    monkeypatch.setenv(loggers.ASKED, "wandb, trackio")
    return found


def test_loggers_only_when_asked_for(opened, hubs, monkeypatch, tmp_path, capsys):
    for value in ("", ","):
        monkeypatch.setenv(loggers.ASKED, value)
        opened().record(1, "x", {})
    assert not hubs["wandb"].begun + hubs["trackio"].begun
    monkeypatch.setenv(loggers.ASKED, "wandb,trackio,wandb")
    opened()
    [wandb], [trackio] = hubs["wandb"].begun, hubs["trackio"].begun
    assert (wandb["id"], wandb["resume"], wandb["dir"]) == ("abcdefghijk", "allow", tmp_path)
    assert (trackio["name"], trackio["resume"]) == (f"{tmp_path.name}-abcdefgh", "allow")
    assert capsys.readouterr().out.count("welcome") == 1  # of wandb, which speaks to stderr


def test_the_project_of_a_logger_is_that_of_its_variable(opened, hubs, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    opened()
    assert [hubs[name].begun[0]["project"] for name in hubs] == ["mine", "jaxrl_llm"]


def test_loggers_have_the_same_names_and_tables(opened, hubs, tmp_path):
    made = opened()
    made.samples(3, [("one|two\n<b>", "*a*\x1b", "reward 1")])
    made.record(3, REINFORCE, {"loss": 0.5, "count": 2})
    made.__exit__(None)
    text = ("one|two\n<b>", "*a*\\x1b", "reward 1")
    for hub in hubs.values():
        (first, table), (second, values) = hub.logged
        assert (first, second) == (3, 3)
        assert table == {"samples": (["prompt", "response", "remark"], [[*text]])}
        assert values == {"reinforce/loss": 0.5, "reinforce/count": 2}
        assert hub.finished == 1
    shown = [(e.step, v) for e in events(tmp_path) for v in e.summary.value]
    assert {v.tag for _, v in shown} == {
        "reinforce/loss",
        "reinforce/count",
        "samples/text_summary",
    }
    [board] = [v.tensor.string_val[0].decode() for _, v in shown if "samples" in v.tag]
    head, _, row = board.split("\n")
    assert head == "| prompt | response | remark |"
    cells = [html.unescape(x).replace("<br>", "\n") for x in row.strip("| ").split(" | ")]
    assert cells == [*text]
    assert not {*"<*\\"} & {*row.replace("<br>", "")}


def test_swanlab_has_texts_for_tables(opened, hubs, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "swanlab", hub := Hub())
    monkeypatch.setenv(loggers.ASKED, "swanlab")
    made = opened()
    made.samples(3, [("6 * 7?", "41", "reward 0")])
    made.record(3, REINFORCE, {"loss": 0.5})
    [how] = hub.begun
    assert (how["id"], how["resume"], how["project"]) == ("abcdefghijk", "allow", "jaxrl_llm")
    assert tmp_path in Path(how["log_dir"]).parents
    assert hub.thread is not threading.main_thread()  # where it would take Ctrl-C for itself
    text = "prompt: 6 * 7?\n\nresponse: 41\n\nremark: reward 0"
    assert hub.logged == [(3, {"samples": [text]}), (3, {"reinforce/loss": 0.5})]


def test_mlflow_and_swanlab_take_a_run_and_its_resume(tmp_path):
    """The packages themselves: one run in MLflow, which is finished at last; SwanLab's files of both."""
    python = peer.needed("JAXRL_LOGGERS_PYTHON", "an interpreter with mlflow-skinny and swanlab")
    script = Path(peer.__file__).with_name("loggers.py")
    root = script.parents[2]
    told = subprocess.run(
        [python, script, tmp_path],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    said = json.loads(told.stdout.splitlines()[-1])
    assert (said["name"], said["status"]) == ("first", "FINISHED")
    assert said["loss"] == [[3, 0.5], [4, 0.25]]
    assert said["names"] == ["reinforce/eval/pass_2", "reinforce/loss"]
    assert said["table"] == [["6 * 7?", "41"], ["1 + 1?", "2"]]
    assert "left out" not in told.stderr
    assert said["swanlab"] == [".swanlab"] * 2
    assert said["metrics"] == ["reinforce/eval/pass@2", "reinforce/loss", "samples"]


@pytest.mark.parametrize("how", ["api_key", "it takes more than 1 s"])
@pytest.mark.parametrize("call", ["log", "finish", "Table"])
def test_loggers_never_end_a_run(opened, hubs, call, how, tmp_path, caplog, monkeypatch):
    """Nor hold it up: Weights & Biases waits for its server."""
    hubs["wandb"].broken = call
    if how != "api_key":
        monkeypatch.setattr(loggers, "LIMIT", 1.0)
        monkeypatch.setattr(hubs["wandb"], "raises", threading.Event().wait)
    made = opened()
    for step in (1, 2):
        made.samples(step, [("a", "b", "c")])
        made.record(step, "x", {})
    made.__exit__(None)
    assert steps(tmp_path) == [1, 2]
    assert caplog.text.count(f"Weights & Biases is left out from here on: {how}") == 1
    assert len(caplog.records) == 1
    assert [step for step, _ in hubs["trackio"].logged] == [1, 1, 2, 2]


def test_a_run_that_fails_is_not_finished_for_its_loggers(opened, hubs):
    opened().__exit__(KeyError)
    assert hubs["wandb"].finished == hubs["trackio"].finished == 0


def test_a_logger_that_does_not_start_is_one_line(opened, hubs, monkeypatch, caplog, tmp_path):
    hubs["wandb"].broken = "init"
    with pytest.raises(UserError, match=r"api_key not configured.*JAXRL_LOGGERS") as error:
        opened()
    assert "\n" not in str(error.value)
    for name in ("trackio", "swanlab", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setenv(loggers.ASKED, name)
        with pytest.raises(UserError, match=f"pip install {name}") as error:
            opened()
        assert "\n" not in str(error.value)
    monkeypatch.setenv(loggers.ASKED, "wanb")
    with pytest.raises(UserError, match="no logger 'wanb', only wandb, trackio, swanlab, mlflow"):
        opened()
    monkeypatch.setenv(loggers.ASKED, "")
    opened().record(1, "x", {})
    monkeypatch.setenv(loggers.ASKED, "wandb")
    opened(after=1).record(2, "x", {})  # a run under way is not held up
    assert steps(tmp_path) == [1, 2]
    assert "the run goes on without" in caplog.text


def test_samples_are_quoted(tmp_path, opened):
    opened().samples(3, [("one\ntwo", "", "reward 1")])
    said = (tmp_path / "samples" / "step-000003.md").read_text()
    assert said.endswith("## Prompt\n\n> one\n> two\n\n**reward 1**\n\n> \n")
    opened().samples(4, [("\x1b[2J", "a\rb\u202e", "reward 1")])
    said = (tmp_path / "samples" / "step-000004.md").read_text()
    assert said.endswith("> \\x1b[2J\n\n**reward 1**\n\n> a\\rb\\u202e\n")


def begun(made, steps=range(20), start=0, every=8):
    """The log of a phase, with no time of its own."""
    clock: Any = SimpleNamespace(restart=lambda: None, lap=dict)
    one = RunLog(made, clock, max_ungraded=0.5)
    one.begin(REINFORCE, steps, start, every)
    return one


def make(one, step, figures):
    with one.step(step):
        one.later(lambda: figures)


def test_a_phase_of_ones_own_is_told_as_a_warm_start_is(opened):
    """The log asks no phase which it is."""
    made, said = opened(), []
    made.say = lambda text, *_: said.append(text)
    one = begun(made)
    one.begin("polish", range(3), 0, 1)
    make(one, 1, {"loss": 0.5})
    one.flush()
    assert "0.500" in said[-1]


def test_a_step_is_recorded_when_it_is_flushed_and_once(tmp_path, opened):
    one = begun(opened())
    make(one, 1, {})
    assert steps(tmp_path) == []
    one.flush()
    one.flush()
    assert steps(tmp_path) == [1]
    make(one, 2, {})
    make(one, 3, {})  # which has not flushed the one before
    assert steps(tmp_path) == [1, 2]


def test_what_is_done_at_the_end_of_a_step_finds_it_made_and_its_record_is_whole(tmp_path, opened):
    one, made = begun(opened()), []
    one.clock.lap = lambda: {"time/step": 2.0}
    with pytest.raises(UserError, match="full"), one.step(1):  # noqa: PT012
        one.later(lambda: {"reward": 1.0})
        one.at_end(lambda: (made.append("end"), errors_full())[0])
        made.append("step")
    one.flush()
    assert made == ["step", "end"]
    assert journal.read(tmp_path)[0] | {"phase": ""} == {
        "step": 1, "phase": "", "reward": 1.0, "time/step": 2.0,
    }  # fmt: skip


def test_a_step_that_gives_no_figures_has_not_those_of_another(tmp_path, opened):
    one = begun(opened())
    make(one, 1, {"reward": 1.0})
    with one.step(2):
        pass
    one.flush()
    assert ["reward" in r for r in journal.read(tmp_path)] == [True, False]


def errors_full():
    raise UserError("the disk is full")


def test_a_step_that_was_not_made_leaves_no_record(tmp_path, opened):
    one = begun(opened())
    make(one, 1, {})
    with pytest.raises(UserError), one.step(2):  # noqa: PT012
        one.later(lambda: {})
        errors_full()
    one.flush()
    assert steps(tmp_path) == [1]


FAILED = {"updates": 0, "skipped": 4, "reward": 0.0}


def test_an_alarm_is_recorded_each_time_and_said_once(tmp_path, opened):
    one = begun(opened(said=(said := io.StringIO())))
    for step in (1, 2, 3):
        make(one, step, FAILED)
        one.flush()
    assert [r["alarm/skipped"] for r in journal.read(tmp_path)] == [1, 1, 1]
    assert said.getvalue().count("warning: no gradient of the step was finite") == 1
    with pytest.raises(UserError, match="no gradient of the last 3 steps was finite"):
        make(one, 4, FAILED)
    one.flush()
    assert steps(tmp_path)[-1] == 4
    make(begun(opened(after=4)), 5, FAILED)  # resumed, it has three steps to do better


def test_quick_steps_share_a_line(opened, monkeypatch):
    """The first, then one when 2 seconds have gone by, and the last."""
    clock = (i / 4 for i in range(999))
    monkeypatch.setattr(log, "time", SimpleNamespace(monotonic=clock.__next__))
    one = begun(made := opened(said=(said := io.StringIO())))
    for step in range(1, 21):
        make(one, step, {"updates": 1, "time/step": 0.25})
        one.flush()
    shown = [int(n) for n in re.findall(r"^ +(\d+)/20 ", said.getvalue(), re.MULTILINE)]
    assert shown == [1, 9, 17, 20]  # the clock is read twice where a line is shown
    assert len(journal.read(made.folder)) == 20


@pytest.fixture
def each(monkeypatch):
    """A line of every step."""
    monkeypatch.setattr(log, "_PACE", 0.0)


@pytest.mark.usefixtures("each")
def test_each_line_says_how_long_the_phase_will_take(opened):
    one = begun(made := opened(said=(said := io.StringIO())))
    made.record(0, REINFORCE, {"eval/accuracy": 0.5, "time/evaluation": 20.0})
    for step in range(1, 6):
        make(one, step, {"updates": 1, "time/step": 10.0, "time/compile": 30.0})
        one.flush()
    # 17 steps, and evaluations after 8, 16 and 20
    assert re.search(r"^ +3/20 .* 10\.00  3 min 50 s$", said.getvalue(), re.MULTILINE)
    assert "reinforce: the first step also compiles its programs\n" in said.getvalue()
    begun(made, range(4), 3)
    assert "compiles its programs, 30 s when it last did" in said.getvalue()


FIGURES = {
    "reward": -1.5,
    "accuracy": 1.0,
    "length": 31_000.0,
    "kl_reference": 0.12345,
    "updates": 1,
}


@pytest.mark.usefixtures("each")
@pytest.mark.parametrize("count", [40, 12_345])
def test_each_step_is_a_line_of_80_columns_under_its_titles(opened, count):
    one = begun(opened(said=(said := io.StringIO())), range(4, 4 + count), 4, count)
    for step in range(5, 5 + 30):
        figures = {**FIGURES, "time/tokens_per_second": 1_234_567.0, "time/step": 900.0}
        make(one, step, figures)
        one.flush()
    make(one, 35, {"updates": 0})  # no response was checked
    one.flush()
    lines = said.getvalue().splitlines()
    heads = [line for line in lines if line.startswith("reinforce ") and "reward" in line]
    steps = [line for line in lines if re.match(r" *\d+/\d+ ", line)]
    assert (len(heads), len(steps)) == (2, 31)
    assert {len(line) for line in heads + steps} == {80}
    assert steps[0].split()[:7] == [
        f"1/{count}",
        "-1.50",
        "100%",
        "31,000",
        "0.1235",
        "1,234,567",
        "900.00",
    ]
    assert steps[-1].split()[1:5] == ["-"] * 4
    ends = [
        [m.end() for m in re.finditer(r"\S+(?= |$)", line)][:7] for line in (heads[0], steps[0])
    ]
    assert ends[0][1:] == ends[1][1:]
    assert steps[0].endswith(f"{duration(900.0 * (count - 1))}")


def test_what_a_run_in_a_bucket_uploads_grows_with_its_steps(url, monkeypatch):
    """A file that grows goes up whole at each save: it is many, of which one grows."""
    monkeypatch.setattr(journal, "PART", 5)
    clock = iter(range(10**9, 10**10))  # the names of event files have the second in them
    monkeypatch.setattr(loggers.time, "time", lambda: float(next(clock)))
    here, bucket, sent = storage.local(url), storage._file_system("s3"), []
    inner = bucket.put_file

    def put(file, to):
        sent.append(Path(file).stat().st_size)
        inner(file, to)

    monkeypatch.setattr(bucket, "put_file", put)
    console, by_save = rich.console.Console(file=io.StringIO()), []
    with Journal(here, console) as made:
        made.start(-1)
        for step in range(1, 61):
            made.record(step, "x", {"loss": step / 7})
            sent.clear()
            storage.push(here)
            by_save.append(sum(sent))
    assert max(by_save[-10:]) < 1.5 * max(by_save[:10])
    storage._MIRRORS.clear()  # as another process
    there = storage.local(url)
    assert journal.read(there) == made.records
    assert len(made.records) == 60
    assert len([*there.glob("tensorboard/*")]) > 10
    with Journal(there, console) as again:  # goes back, and its parts too
        again.start(12)
    storage.push(there)
    names = {path.rpartition("/")[2] for path in bucket.find(url)}
    assert {name for name in names if name.startswith("metrics")} == {
        "metrics.jsonl",
        "metrics-1.jsonl",
        "metrics-2.jsonl",
    }
    assert journal.read(there) == made.records[:12]


def test_the_part_that_is_written_is_synced(tmp_path, opened, monkeypatch):
    """Of a mirror of a bucket, whose first part nobody has touched for days and a cleaner may take."""
    monkeypatch.setattr(journal, "PART", 2)
    monkeypatch.setattr(storage, "shared", lambda folder: False)
    synced = []
    monkeypatch.setattr(storage, "sync", lambda path: synced.append(path.name))
    log = opened()
    for step in range(5):
        log.record(step, "reinforce", {"reward": 1.0})
    synced.clear()
    log.sync()
    assert synced == ["metrics.jsonl", "metrics-1.jsonl", "metrics-2.jsonl"]
    (tmp_path / "metrics.jsonl").unlink()
    log.record(5, "reinforce", {"reward": 1.0})
    log.sync()
    assert synced[3:] == ["metrics-2.jsonl"]


def test_parts_of_records_are_one_file_in_a_folder(tmp_path, opened, monkeypatch):
    """Copied from a bucket; a kill may leave a part beside the file that has its records."""
    lines = [json.dumps({"step": n, "phase": "x"}) + "\n" for n in range(1, 31)]
    monkeypatch.setattr(journal, "PART", 2)
    for part in range(15):
        name = f"metrics-{part}.jsonl" if part else METRICS
        (tmp_path / name).write_text("".join(lines[2 * part : 2 * part + 2]))
    assert steps(tmp_path) == [*range(1, 31)]
    (tmp_path / METRICS).write_text("".join(lines))
    assert steps(tmp_path) == [*range(1, 31)]
    opened(29)
    assert steps(tmp_path) == [*range(1, 30)]
    assert [path.name for path in tmp_path.glob("metrics*")] == [METRICS]
