"""What a run writes is whole or absent, what it is stays what it was, and what is damaged is said."""

import io
import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import rich.console
from tensorboardX.proto import event_pb2

from jaxrl_llm import files
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.stream import Cursor
from jaxrl_llm.models import hf, tokenizer
from jaxrl_llm.reports import curves
from jaxrl_llm.runs import folder, journal, record, seal
from jaxrl_llm.runs import train as training
from jaxrl_llm.runs.journal import DAMAGED, METRICS, Journal
from tests.training.process import QUICK, contents, metrics, train
from tests.training.test_errors import fails


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


# Files.


def full(_):
    raise OSError(28, "full")


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


def test_a_failing_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x"
    files.write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            files.write(path, "new")
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "new" + chr(0xD800))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    files.write(path, "new")
    assert path.read_text() == "new"
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


# The journal.


@pytest.fixture
def opened(tmp_path):
    """Starts journals in the folder of the test, and ends with their files closed."""
    began = []

    def start():
        made = Journal(tmp_path, rich.console.Console(file=io.StringIO()))
        made.start()
        began.extend([made._file, made._board._writer._py_recordio_writer._writer])
        return made

    yield start
    for file in began:
        file.close()


def test_a_full_disk_between_saves_is_one_line_and_tears_nothing(tmp_path, opened):
    made = opened()
    made.record(1, "x", {"loss": 0.5})
    made._file = Full(made._file, 10)
    with pytest.raises(
        UserError, match=r"cannot write metrics.jsonl to .*No space left .*--resume"
    ):
        made.record(2, "x", {"loss": 0.5})
    assert (tmp_path / METRICS).read_bytes() == seal.line({"step": 1, "phase": "x", "loss": 0.5})


def test_a_record_with_another_bit_is_seen(tmp_path, opened):
    made = opened()
    for step in (1, 2, 3):
        made.record(step, "x", {"loss": 0.5 + step})
    path = tmp_path / METRICS
    whole, records = path.read_bytes(), journal.read(tmp_path)
    start = whole.index(b"\n") + 1
    for place in range(8 * start, 8 * whole.index(b"\n", start)):
        altered = bytearray(whole)
        altered[place // 8] ^= 1 << place % 8
        path.write_bytes(altered)
        found = journal._parsed(tmp_path)[0]
        assert found == [records[0], records[2]], place


def test_a_journal_that_has_lost_its_end_is_said(tmp_path, opened):
    made = opened()
    for step in (1, 2, 3):
        made.record(step, "x", {"loss": 0.5 + step})
    path = tmp_path / METRICS
    whole = path.read_bytes()
    for content, lost in ((whole[: len(whole) // 2], 2), (b"", 3), (whole, 0)):
        path.write_bytes(content)
        said = io.StringIO()
        again = Journal(tmp_path, rich.console.Console(file=said, width=200))
        again.start(after=3)
        again.close()
        assert said.getvalue().startswith(f"{lost} steps have no record") == bool(lost)


def test_records_are_on_the_disk_before_the_step_is_saved():
    order = []
    note = lambda name: lambda *_, **__: order.append(name)
    run = types.SimpleNamespace(
        best=None,
        saved=0,
        journal=types.SimpleNamespace(sync=note("records")),
        checkpoints=types.SimpleNamespace(save=note("state")),
    )
    training._save(run, 3, "x", None, Cursor({}))
    assert order == ["records", "state"]
    assert run.saved == 3


def test_records_of_before_have_no_checksum(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1, "phase": "x", "loss": 0.5}\n')
    assert journal.read(tmp_path) == [{"step": 1, "phase": "x", "loss": 0.5}]


def test_a_full_disk_for_tensorboard_is_one_line(tmp_path, opened):
    made = opened()
    writer = made._board._writer._py_recordio_writer
    writer._writer = Full(writer._writer, 10)
    with pytest.raises(UserError, match=r"cannot write metrics.jsonl to .*No space left"):
        made.record(1, "x", {"loss": 0.5})


def test_a_failing_start_keeps_the_records(tmp_path, opened, monkeypatch):
    made = opened()
    made.record(1, "x", {"loss": 0.5})
    before = (tmp_path / METRICS).read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write metrics.jsonl"):
        made.start(after=1)
    assert (tmp_path / METRICS).read_bytes() == before


BAD = [b"\0" * 20, b'{"step": 3, "pha', b"\xff\xfe\xfa", b"[1]", b'{"step": "3"}', b"1e", b""]


def test_damaged_lines_are_set_aside_wherever_they_are(tmp_path, caplog):
    good = [json.dumps({"step": i, "phase": "x"}).encode() for i in range(8)]
    lines = [line for pair in zip(BAD, good, strict=False) for line in pair]
    (tmp_path / METRICS).write_bytes(b"\n".join([*lines, b'{"step": 9, "ph']))
    assert [r["step"] for r in journal.read(tmp_path)] == list(range(7))
    assert f"{len(BAD)} damaged lines" in caplog.text
    said = io.StringIO()
    made = Journal(tmp_path, rich.console.Console(file=said, width=500))
    made.start(after=4)
    made.close()
    assert said.getvalue().count("were set aside") == 1
    assert (tmp_path / DAMAGED).read_bytes() == b"\n".join([*BAD, b""])
    caplog.clear()
    assert [r["step"] for r in journal.read(tmp_path)] == [0, 1, 2, 3, 4]
    assert not caplog.text


def test_a_folder_that_was_lost_is_not_written_to(tmp_path, opened):
    def lost():
        raise UserError("no longer ours")

    made = opened()
    made._check = lost
    for write in (lambda: made.record(1, "x", {}), lambda: made.samples(1, "t", []), made.start):
        with pytest.raises(UserError, match="no longer ours"):
            write()
    assert not (tmp_path / METRICS).read_bytes()
    assert not (tmp_path / "samples").exists()


def test_tensorboard_reads_what_is_written(tmp_path, opened):
    made = opened()
    made.record(3, "x", {"loss": 0.5, "count": 2})
    made.close()
    content = next((tmp_path / "tensorboard").iterdir()).read_bytes()
    values, at = {}, 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
        values |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
        at += 12 + size + 4
    assert values == {"x/loss": (3, 0.5), "x/count": (3, 2.0)}


def test_weights_and_biases_only_when_asked_for(tmp_path, opened, monkeypatch):
    began = []
    fake = types.SimpleNamespace(init=lambda **how: began.append(how), __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (tmp_path / "run.json").write_text(json.dumps({"id": "abc", "flags": {}}))
    opened()
    assert not began
    monkeypatch.setenv(journal.WANDB, "1")
    opened()
    assert began[0]["id"] == "abc"

    def no_key(**_):
        raise RuntimeError("api_key not configured (no-tty). call wandb.login\nmore")

    fake.init = no_key
    with pytest.raises(UserError, match=r"api_key not configured.*JAXRL_WANDB") as error:
        opened()
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(journal.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="not installed"):
        opened()


# What a run is.


def resume(out, *flags, config=QUICK):
    main(["train", str(config), "--out", str(out), "--resume", *flags])


def refused(capsys, out, *flags, config=QUICK):
    before = contents(out)
    said = fails(capsys, "train", config, "--out", out, "--resume", *flags)
    assert contents(out) == before
    return said


def test_a_run_is_resumed_with_its_own_flags(environment, tmp_path, capsys):
    out = tmp_path / "run"
    flags = ("--eta", "0.9", "--steps", "1", "--warm-steps", "0")
    assert train(environment, out, *flags).returncode == 0
    said = refused(capsys, out, "--eta", "0.5")
    assert "was started with --eta 0.9, not 0.5" in said
    resume(out, "--steps", "2")
    resume(out, "--eta", "0.9")
    run = json.loads((out / "run.json").read_text())
    assert run["flags"]["eta"] == 0.9
    assert [session["lengths"]["steps"] for session in run["sessions"]] == [1, 2, 2]
    assert [m["step"] for m in metrics(out) if "reward" in m] == [1, 2]
    assert folder.reopen(out).steps == 2


def test_a_config_that_has_changed_is_not_resumed(copied, tmp_path, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text(Path(QUICK).read_text().replace("1e-3", "2e-3"))
    said = refused(capsys, copied, config=mine)
    assert "mine.py has changed since" in said
    assert str(copied / "config.py") in said
    resume(copied, config=copied / "config.py")


def test_a_started_run_can_be_resumed_whenever_it_was_killed(copied, tmp_path):
    assert folder.resumable(copied)
    assert not folder.resumable(tmp_path)
    shutil.rmtree(copied / "checkpoints")  # killed before the first one
    resume(copied)
    assert folder.resumable(copied)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"flags": 3}', b"\xff\xfe", b"{}"])
def test_a_damaged_record_is_one_line(copied, content, capsys, tmp_path):
    (copied / "run.json").write_bytes(content)
    for command in (["eval", copied], ["export", copied, tmp_path / "to"]):
        assert "run.json is damaged" in fails(capsys, *command)
    assert "run.json is damaged" in refused(capsys, copied)


@pytest.mark.parametrize("name", ["run.json", "config.py"])
def test_another_bit_in_what_a_run_is_is_one_line(name, copied, capsys):
    """A flag, or the config itself: the run would go on with other numbers."""
    path = copied / name
    whole = path.read_text()
    path.write_text(whole.replace("0.5", "0.4", 1))
    assert path.read_text() != whole
    for said in (refused(capsys, copied), fails(capsys, "eval", copied)):
        assert name in said
        assert "take it from a copy of the run" in said
    path.write_text(whole)
    assert folder.reopen(copied)


def test_flags_go_through_json(tmp_path):
    def config(
        size: tuple[int, int],
        where: Path,
        how: Literal["a", "b"] = "a",
        maybe: Path | None = None,
        no: Path | None = None,
        several: tuple[Path, ...] = (),
        name: str | None = None,
    ):
        return size, where, how, maybe, no, several, name

    flags = {"size": (1, 2), "where": Path("/x"), "how": "b", "maybe": Path("y"), "no": None}
    flags |= {"several": (Path("a"), Path("b")), "name": "c"}
    run = record.new(Path("c.py"), flags, [])
    record.write(tmp_path, run)
    stored = record.read(tmp_path)["flags"]
    assert record.flags_for(config, stored) == flags
    assert record.continued(tmp_path, run, flags)["flags"] == run["flags"]
    with pytest.raises(UserError, match="the flag x of config"):
        record.new(Path("c.py"), {"x": object()}, [])


def test_two_runs_are_told_apart(tmp_path):
    one, other = (record.new(Path("c.py"), {}, []) for _ in range(2))
    assert one["id"] != other["id"]


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("gs://bucket/run", "pip install 'jaxrl-llm[gcs]'"),
        ("https://host/run", "only s3:// and gs:// are known"),
    ],
)
def test_a_url_that_cannot_be_used_makes_no_folder(out, said, capsys, tmp_path, monkeypatch):
    quick = Path(QUICK).absolute()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, "train", quick, "--out", out)
    assert not list(tmp_path.iterdir())


def test_a_second_trainer_is_refused_in_one_line(copied, capsys):
    with folder.lock.hold(copied):
        assert f"in use by process {os.getpid()} on " in refused(capsys, copied)


def test_export_does_not_execute_the_folder(copied, tmp_path, capsys):
    (copied / "config.py").write_text("raise SystemExit('executed')")
    main(["export", str(copied), str(tmp_path / "hf"), "--step", "10"])
    assert "step 10" in capsys.readouterr().out
    assert hf.load_shape(tmp_path / "hf").hidden_size == 32


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_who_executes_the_folder_says_so(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "executes the folder's config.py" in " ".join(capsys.readouterr().out.split())


TASK = """
from dataclasses import dataclass
from jaxrl_llm.tasks.task import Reward

@dataclass
class Sums:
    name = "sums"
    train, test = ("Ada knight", "Ada knave") * 4, ("Ben knight", "Ben knave") * 4
    def prompt(self, example): return "Ada : " + example + " . <think>"
    def reward(self, example, response): return Reward(float(GRADE), GRADE > 0)

GRADE = 1
task = Sums()
"""


def test_a_run_is_graded_with_the_task_that_it_was_started_with(tmp_path, capsys):
    (tmp_path / "sums.py").write_text(TASK)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from tests.training.quick import *\nimport dataclasses\nfrom jaxrl_llm.tasks.task import load_task\n"
        f"made = config(warm_steps=0, steps=1)\nwhere = {str(tmp_path / 'sums.py')!r} + ':task'\n"
        "def config(): return dataclasses.replace(made, task=lambda data: load_task(where))\n"
    )
    main(["train", str(mine), "--out", str(tmp_path / "run")])
    (tmp_path / "sums.py").write_text(TASK.replace("GRADE = 1", "GRADE = 0"))
    capsys.readouterr()
    main(["sample", str(tmp_path / "run"), "--example", "0", "--max-tokens", "4"])
    assert "reward 1, correct" in capsys.readouterr().out
    assert "sums.py has changed since" in refused(capsys, tmp_path / "run", config=mine)


def test_two_runs_of_one_name_are_both_drawn(whole, tmp_path):
    folders = [shutil.copytree(whole, tmp_path / name / "run") for name in "ab"]
    assert curves._names(folders) == ["a/run", "b/run"]
    assert curves._names([Path("x/a"), Path("x/b")]) == ["a", "b"]
    drawn = []
    original = curves._accuracy

    def counting(axes, records, name, colour):
        drawn.append(name)
        original(axes, records, name, colour)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "_accuracy", counting)
        curves.curves(folders, tmp_path / "two.png")
    assert drawn == ["a/run", "b/run"]
    with pytest.raises(UserError, match="cannot write"):
        curves.curves(folders, tmp_path / "two.xyz")
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "two.png"}


def test_damaged_and_missing_parts_of_a_folder_are_one_line(copied, capsys, tmp_path):
    for path in (copied / "checkpoints" / "10" / "notes").rglob("*"):
        path.write_bytes(b"{")
    for command in (["eval", copied], ["export", copied, tmp_path / "to"]):
        said = fails(capsys, *command, "--step", "10")
        assert "checkpoint 10 of" in said
        assert "is damaged" in said
    (copied / "model" / "config.json").write_text("[]")
    assert "config.json holds a list" in fails(capsys, "export", copied, tmp_path / "to")


def test_a_missing_reference_is_one_line(copied, capsys):
    shutil.rmtree(copied / "reference")
    said = fails(capsys, "train", QUICK, "--out", copied, "--resume", "--steps", "7")
    assert "the policy before reinforcement, cannot be used" in said
    opened = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.startswith(f"{copied}/")]


def test_a_foreign_tokenizer_is_one_line(copied):
    model = copied / "model"
    original = json.loads((model / "tokenizer.json").read_text())
    vocabulary = {f"w{i}": i + len(original["model"]["vocab"]) for i in range(100)}
    larger = json.loads(json.dumps(original))
    larger["model"]["vocab"] |= vocabulary
    for content, message in (
        (json.dumps(larger), "they are not of one model"),
        ("{", "no tokenizer that can be read"),
        ("[]", "no tokenizer that can be read"),
        (json.dumps(original | {"model": {"type": "Nobody"}}), "no tokenizer that can be read"),
    ):
        (model / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=message) as error:
            tokenizer.load(model)
        assert "\n" not in str(error.value)


def test_a_run_that_only_degrades_keeps_its_start(whole):
    """The start of reinforcement is evaluated, so it can be the best."""
    scores = {m["step"]: m["eval/accuracy"] for m in metrics(whole) if "eval/accuracy" in m}
    notes = folder.Checkpoints(whole / "checkpoints", keep=None, read_only=True)
    best = max(s for step, s in scores.items() if step >= 4)
    assert notes.best is not None
    assert scores[notes.best] == best
    assert np.isclose(notes.notes(notes.best)["best"], best)
