"""What a run is stays what it was: its folder, flags and files; another one is refused in a line."""

import contextlib
import copy
import datetime
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import pytest

import jaxrl_llm
from jaxrl_llm import config, distributed, storage, userfile
from jaxrl_llm.cli import open_run
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.models import hf, sharding
from jaxrl_llm.models.qwen2 import Lora
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks import rewards
from jaxrl_llm.tasks.tables import Question
from jaxrl_llm.training import card, record, tokens
from jaxrl_llm.training.checkpoint import Checkpoints
from jaxrl_llm.training.components import DAY, PRETRAINED, TOKENIZER, Components
from jaxrl_llm.training.folder import CHECKPOINTS, INITIAL, RunFolder
from jaxrl_llm.training.record import Source
from tests import public
from tests.tasks import templates
from tests.training import quick, s3
from tests.training.conftest import forget
from tests.training.process import QUICK, ROOT, contents, written


@pytest.fixture(scope="module")
def made():
    return Components.make(quick.config(), ".")


SOURCE = Source(ROOT / QUICK, {"eta": 0.5, "steps": 6})


@pytest.fixture
def opening(made, tmp_path):
    """Opens a run's folder, and closes it."""

    def opened(
        out=None, source: Source | None = SOURCE, *, resume=True, init_from=None, components=made
    ):
        out = tmp_path / "run" if out is None else out
        now = record.new(source, init_from, components.identity)
        with RunFolder(out).open(components, now, resume=resume):
            pass
        return out

    return opened


@pytest.fixture
def begun(opening):
    """A run that has not made a step."""
    return opening(resume=False)


def refused(opening, message, *given, **how):
    with pytest.raises(UserError, match=message) as error:
        opening(*given, **how)
    assert "\n" not in str(error.value)


def test_what_a_killed_writer_left_is_cleared_away(begun, opening):
    """Not what another command writes at this moment."""
    (begun / "tokens").mkdir()
    old, new = begun / ".curves.png.0123abcd.new", begun / "tokens" / ".step.npz.0123abcd.new"
    for half in (old, new):
        half.touch()
    os.utime(old, (0, 0))
    opening()
    assert not old.exists()
    assert new.exists()


def test_a_run_is_opened_again_as_it_was_started(begun, opening):
    assert RunFolder(begun).holds_run
    assert {p.name for p in begun.iterdir()} == {"run.json", "config.py", "files", "model", "lock"}
    opening()
    assert [session["lengths"] for session in record.read(begun)["sessions"]] == [{"steps": 6}] * 2
    assert RunFolder(begun).config().steps == 6


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"eta": 0.4, "steps": 6}, "was started with --eta 0.5, not 0.4: leave --eta out"),
        ({"eta": 0.5, "steps": 6, "warm_steps": 3}, "was started with --warm-steps None, not 3"),
        ({"eta": 0.5, "steps": 9}, None),
    ],
)
def test_only_lengths_may_be_given_anew(begun, opening, flags, said):
    if said:
        before = contents(begun)
        refused(opening, said, source=replace(SOURCE, flags=flags))
        assert contents(begun) == before
    else:
        opening(source=replace(SOURCE, flags=flags))
        assert record.read(begun)["flags"] == flags
        assert RunFolder(begun).config().steps == 9


def test_sizes_may_be_given_anew(begun, opening):
    """As a run that was out of memory is told to."""
    flags = {"eta": 0.5, "steps": 6, "slots": 8, "microbatches": 4}
    opening(source=replace(SOURCE, flags=flags))
    assert record.read(begun)["flags"] == flags


FLAGS: list[tuple[Any, Any]] = [
    (tuple[int, int], (1, 2)),
    (Path, Path("/x")),
    (Literal["a", "b"], "b"),
    (Path | None, Path("y")),
    (Path | None, None),
    (str | None, "c"),
    (Annotated[float, "a note"], 1),
    (tuple[Path, ...], (Path("a"), Path("b"))),
    (tuple[Path, ...] | None, (Path("a"),)),
    (tuple[tuple[str, Path], ...], (("a", Path("b")),)),
    (list[int], [1, 2]),
    (list[Path] | None, [Path("a")]),
    (dict[int, float], {1: 12.5}),
    (dict[str, Path], {"1": Path("b")}),
    (dict[str, list[float]], {"a": [0.5]}),
]


@pytest.mark.parametrize(("kind", "value"), FLAGS)
def test_flags_come_back_as_they_were_given(kind, value, tmp_path):
    def config(flag: kind): ...

    run = record.new(Source(Path(__file__), {"flag": value})) | {"sums": {}}
    record.write(tmp_path, run)
    back = record.flags_for(config, record.read(tmp_path)["flags"])["flag"]
    assert repr(back) == repr(value)
    record.require_kept(config, {"flag": value})


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (Any, object(), "a object, which cannot be kept"),
        (set[int], {1}, "a set, which cannot be kept"),
        (dict[bool, int], {True: 1}, r"\{True: 1\}, and would come back as \{'true': 1\}"),
        (str | Path, Path("a"), "would come back as 'a'"),
        (Any, [1], r"would come back as \(1,\)"),
    ],
)
def test_a_flag_that_would_come_back_as_another_is_refused_at_the_start(kind, value, said):
    def config(flag: kind): ...

    with pytest.raises(UserError, match=f"the flag flag of config.*{said}"):
        record.require_kept(config, {"flag": value})


DAMAGED = "run.json is damaged"
OLDER = "was made by another version of this package: start anew"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", DAMAGED),
        (b"{", DAMAGED),
        (b"[]", DAMAGED),
        (b'{"flags": 3}', OLDER),
        (b"\xff\xfe", DAMAGED),
        (b"{}", OLDER),
        (b'{"flags": {}, "version": 2, "id": "a"}', OLDER),
        ({"version": 1}, OLDER),
        ({"flags": {"seed": 1}}, "run.json was altered: take it from a copy of the run"),
    ],
)
def test_a_damaged_older_or_altered_record_is_one_line(begun, opening, content, said):
    path = begun / "run.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content).encode()
    path.write_bytes(content)
    before = contents(begun)
    refused(opening, said)
    assert contents(begun) == before


def test_a_checkout_tells_its_commit_and_whether_files_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxrl_llm, "__file__", str(tmp_path / "package" / "__init__.py"))
    (tmp_path / "package").mkdir()
    code = record.code
    assert {**code(), "sha256": ""} == {"version": jaxrl_llm.__version__, "sha256": ""}

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    known = code() | {"commit": git("rev-parse", "HEAD")}
    assert code() == {**known, "dirty": False}
    (tmp_path / "file").write_text("another")
    assert code() == {**known, "dirty": True}
    (tmp_path / "package" / "loss.py").write_text("-1")
    assert code()["sha256"] != known["sha256"]


def test_another_version_of_the_package_or_a_library_is_said(begun, opening, caplog):
    opening()
    assert not caplog.records
    run = record.read(begun)
    run["sessions"][-1]["versions"]["jax"] = "0.1"
    run["sessions"][-1]["code"]["sha256"] = "abc"
    record.write(begun, run)
    opening()
    (said,) = caplog.messages
    assert f"jax 0.1 then, {jax.__version__} now" in said
    assert f"jaxrl_llm {jaxrl_llm.__version__} (abc) then" in said
    caplog.clear()
    opening()
    assert not caplog.records


@pytest.mark.parametrize("name", ["the data of the task", "module helper", "the pretrained model"])
def test_what_decides_the_numbers_must_be_put_back(tmp_path, name):
    run = record.new(None, inputs={name: "one", "module of_an_option": "two"}) | {"sums": {}}
    with pytest.raises(UserError, match=rf"{name} is not as it was .*\(one; now another\)"):
        record.continued(tmp_path, run, record.new(None, inputs={name: "another"}))
    # the option is not taken this time
    record.continued(tmp_path, run, record.new(None, inputs={name: "one"}))


def test_a_run_goes_on_with_the_commit_it_began_with(tmp_path):
    """Though the branch at the hub has moved; only another revision is another model."""
    began_with = {"the pretrained model": "commit abc"}
    record.write(tmp_path, record.new(None, inputs=began_with) | {"sums": {}})
    hub, branch = config.Pretrained("Qwen/x"), config.Pretrained("Qwen/x", "main")
    for model, found in ((hub, "abc"), (branch, "main")):
        made = RunFolder(tmp_path).pinned(replace(quick.config(), model=model))
        assert made.model == config.Pretrained("Qwen/x", found)
    assert RunFolder(tmp_path).pinned(quick.config()).model == quick.config().model


def test_prompts_have_the_day_on_which_a_run_began(begun, made, tmp_path):
    """Some chat templates write it."""
    of_base = replace(made, source=tmp_path)
    assert of_base.identity[DAY] == made.tokenizer.day.isoformat()
    record.write(tmp_path, record.new(None, inputs={DAY: "2024-07-26"}))
    day = datetime.date(2024, 7, 26)
    model, other = config.Pretrained("x"), config.Pretrained("x", day=datetime.date(2024, 1, 1))
    pinned = lambda model: RunFolder(tmp_path).pinned(replace(quick.config(), model=model)).model
    assert pinned(model) == replace(model, day=day)
    assert pinned(other) == other


def test_a_module_of_the_user_is_known_by_its_content(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_helper.py").write_text("factor = 2")
    importlib.import_module("a_helper")
    (tmp_path / "user_rewards.py").write_text("factor = 2")  # called as files that a run keeps
    importlib.import_module("user_rewards")
    userfile.run(tmp_path / "a_helper.py", "kept")
    before = record.modules()
    for name in ("a_helper.py", "user_rewards.py"):
        (tmp_path / name).write_text("factor = 3")
    after = record.modules()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"module a_helper", "module user_rewards"}
    assert not any(x in name for name in before for x in ("numpy", "jaxrl_llm.", "user_kept"))


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"eta": 0.5, "steps": 6}, None),
        ({"eta": 0.5, "steps": 7}, "--steps 7, process 0 with 6"),
        ({"eta": 0.4, "steps": 6}, "--eta 0.4, process 0 with 0.5"),
    ],
)
def test_processes_that_were_started_otherwise_are_told(theirs, said, monkeypatch):
    words = []
    monkeypatch.setattr(distributed, "agree", lambda word: words.append(word) or words)
    record.require_alike(record.new(SOURCE, inputs={"module a": "x"}), "auto")
    other = record.new(replace(SOURCE, flags=theirs), inputs={"module b": "x"})
    if said is None:
        record.require_alike(other, "auto")
    else:
        with pytest.raises(UserError, match=rf"process 1 on .* was started with {said}: start all"):
            record.require_alike(other, "auto")
    words.pop()
    with pytest.raises(UserError, match=r"process 1 on .* --resume False, process 0 with auto"):
        record.require_alike(record.new(SOURCE), False)


def test_two_runs_are_told_apart():
    assert record.new(None)["id"] != record.new(None)["id"]


# What may be --out.


def test_a_folder_that_is_no_run_is_refused(opening, tmp_path):
    (other := tmp_path / "other").mkdir()
    opening(other, resume=False)  # empty
    refused(opening, "holds no run to resume", tmp_path / "new")
    for name in ("something", "checkpoints/4/a", "config.py", "model/config.json"):
        (out := tmp_path / name.replace("/", "-")).mkdir()
        written(out / name)
        before = contents(out)
        refused(opening, "is not empty and holds no run: choose a new folder", out, resume=False)
        assert contents(out) == before
    refused(opening, r"no checkpoint can be kept under \*", tmp_path / "a*", resume=False)


def test_a_run_that_has_saved_something_is_not_started_again(begun, opening):
    opening(resume=False)
    written(begun / "checkpoints" / "2" / "x")
    before = contents(begun)
    refused(opening, "already holds a run: add --resume", resume=False)
    assert contents(begun) == before


def test_a_run_without_a_checkpoint_has_no_policy(begun, made):
    with pytest.raises(UserError, match="has no checkpoint yet"):
        RunFolder(begun).params(made)


def test_weights_are_read_of_a_run_alone(begun):
    (begun / "run.json").write_text("{")
    with pytest.raises(UserError, match="is damaged: take it from a copy"):
        RunFolder(begun).weights()


def filled(like, value):
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype, device=x.sharding), like)


@pytest.fixture
def two(begun, made):
    """A run with checkpoints of its warm start (1) and of reinforcement (2); the first scored best."""
    optimizer = quick.config().optimizer
    with Checkpoints(begun / CHECKPOINTS) as there:
        for step, phase in ((1, "warm_start"), (2, "reinforce")):
            state = update.init_state(filled(made.like, step), optimizer)
            there.save(step, state._replace(step=jnp.int32(7)), {"phase": phase})
    scored = {"phase": "reinforce", "eval/accuracy": 0.1}
    records = [scored | {"step": s, "eval/accuracy": a} for s, a in ((0, 0.1), (1, 0.9), (2, 0.5))]
    (begun / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return begun


def value(params):
    (found,) = {float(x.ravel()[0]) for x in jax.tree.leaves(params)}
    return found


def test_the_best_policy_is_read_unless_another_is_asked_for(two, made):
    for asked, expected in ((None, 1), (2, 2)):
        step, params = RunFolder(two).params(made, asked)
        assert (step, value(params)) == (expected, expected)
    assert value(RunFolder(two).weights()[2]) == 1.0
    with pytest.raises(UserError, match=r"has no checkpoint of step 3, only of \[1, 2\]"):
        RunFolder(two).params(made, 3)
    (two / "metrics.jsonl").unlink()
    assert RunFolder(two).params(made)[0] == 2


def test_the_state_of_a_warm_start_has_a_fresh_optimizer(two, made):
    read = lambda step: RunFolder(two).state(made, step)
    assert [int(read(step).step) for step in (1, 2)] == [0, 7]
    assert [value(read(step).params) for step in (1, 2)] == [1.0, 2.0]


def test_a_damaged_checkpoint_comes_with_the_others(two, made):
    for step, advice in ((1, r"try --step with one of \[2\]"), (2, "there is no other")):
        for path in (two / "checkpoints" / str(step)).rglob("d/*"):
            path.write_bytes(b"")
        with pytest.raises(UserError, match=rf"checkpoint {step} of .* is damaged .*: {advice}"):
            RunFolder(two).params(made)
        shutil.rmtree(two / "checkpoints" / "1", ignore_errors=True)


def test_a_run_has_made_no_more_steps_than_it_is_asked_for(two):
    RunFolder(two).require_at_most(1, 1)
    RunFolder(two).require_at_most(0, 1, earlier=1)
    for earlier in (None, 2):
        with pytest.raises(
            UserError, match="has made 2 steps of reinforcement, more than --steps 1"
        ):
            RunFolder(two).require_at_most(0, 1, earlier)


@pytest.mark.parametrize("how", ["gone", "linked", "empty"])
def test_records_of_reinforcement_without_a_checkpoint_are_never_thrown_away(two, opening, how):
    """The disk that checkpoints/ is linked to is not mounted yet, or was moved."""
    shutil.rmtree(two / "checkpoints")
    if how == "linked":
        (two / "checkpoints").symlink_to(two.parent / "away")
    if how == "empty":
        (two / "checkpoints").mkdir()
    with pytest.raises(UserError, match="its checkpoints are gone: mount or put back"):
        RunFolder(two).require_at_most(0, 6)
    refused(opening, "already holds a run", resume=False)
    (two / "metrics.jsonl").write_text('{"step": 1, "phase": "warm_start", "loss": 0.5}\n')
    with pytest.raises(UserError) if how == "linked" else contextlib.nullcontext():
        RunFolder(two).require_at_most(0, 6)  # killed before it had saved anything
    RunFolder(two).note_saved()  # as once the first checkpoint is whole, in a warm start too
    with pytest.raises(UserError, match="its checkpoints are gone: mount or put back"):
        RunFolder(two).require_at_most(0, 6)
    refused(opening, "already holds a run", resume=False)


def test_a_folder_knows_that_it_had_a_checkpoint(two, opening):
    """Also of one that was whole as its run was killed, and was found when that went on."""
    assert not record.read(two).get("saved")
    opening(two)
    assert record.read(two)["saved"]
    shutil.rmtree(two / "checkpoints")
    (two / "metrics.jsonl").unlink(missing_ok=True)
    with pytest.raises(UserError, match="its checkpoints are gone"):
        RunFolder(two).require_at_most(0, 6)


def test_a_file_that_is_edited_while_a_run_starts_is_refused(opening, tmp_path):
    """What ran is what a run keeps; the edit was meant for another."""
    path = tmp_path / "mine.py"
    shutil.copy(ROOT / QUICK, path)
    (tmp_path / "words.txt").write_text("one")
    config.load(path)
    userfile.read(tmp_path / "words.txt", "rubric")
    source = Source(path, files=(tmp_path / "words.txt",))
    before = record.new(source)["sums"]
    for edited in (tmp_path / "words.txt", path):
        kept = edited.read_text()
        edited.write_text(f"{kept}\n")
        assert record.new(source)["sums"] == before
        refused(
            opening, f"{edited} has changed while the run was starting", source=source, resume=False
        )
        assert not (tmp_path / "run" / "run.json").exists()
        edited.write_text(kept)
    opening(source=source, resume=False)


def test_a_checkpoint_that_is_pruned_as_it_is_read_is_not_called_damaged(two, made, monkeypatch):
    """As when the trainer goes on while the run is evaluated."""
    inner = Checkpoints.restore

    def pruned(there, step, *like, **how):
        shutil.rmtree(there.folder / str(step))
        return inner(there, step, *like, **how)

    monkeypatch.setattr(Checkpoints, "restore", pruned)
    with pytest.raises(UserError, match=r"checkpoint 1 of .* was removed meanwhile: try again"):
        RunFolder(two).params(made)


def test_the_reference_is_the_policy_before_reinforcement(begun, made, monkeypatch):
    with pytest.raises(UserError, match="initial, the policy before reinforcement, is gone"):
        RunFolder(begun).reference_params(made)
    assert RunFolder(begun).initial_params(made) is None
    with Checkpoints(begun / INITIAL) as there:
        there.save(4, filled(made.like, 3), {})
        there.save(8, filled(made.like, 5), {})  # of a run that began here before, and was killed
    assert value(RunFolder(begun).initial_params(made)) == 3.0
    assert RunFolder(begun).initial_params(replace(made, config=quick.config(warm_steps=0))) is None
    assert value(RunFolder(begun).reference_params(made)) == 3.0
    monkeypatch.setattr(sharding, "to_hosts", lambda params: "in the hosts' memory")
    offloads = replace(made, config=replace(made.config, offload="reference"))
    found = RunFolder(begun).reference_params(offloads)
    assert found == "in the hosts' memory"
    assert value(RunFolder(begun).reference_params(made)) == 3.0


def test_where_a_run_began_is_as_given_or_as_recorded(begun, tmp_path):
    assert RunFolder(tmp_path / "new").init_from(None, resuming=False) is None
    assert RunFolder(begun).init_from(None, resuming=True) is None
    other = shutil.copytree(begun, tmp_path / "other")
    assert RunFolder(begun).init_from(other, resuming=True).path == other
    with pytest.raises(UserError, match="nowhere is not the folder of a run"):
        RunFolder(tmp_path / "new").init_from(tmp_path / "nowhere", resuming=False)


def test_a_run_that_has_a_checkpoint_goes_on_without_its_origin(
    opening, begun, tmp_path, monkeypatch
):
    """However its place is written."""
    monkeypatch.chdir(tmp_path)
    origin = shutil.copytree(begun, tmp_path / "origin")
    out = opening(resume=False, init_from=origin)
    with Checkpoints(out / CHECKPOINTS) as there:
        there.save(4, {"a": jnp.ones(3)}, {})
    shutil.rmtree(origin)
    for where in ("origin", origin):
        assert RunFolder(out).init_from(where, resuming=True).path == origin


def test_a_run_that_has_a_checkpoint_needs_its_origin_no_more(opening, made, wire, monkeypatch):
    """Though the bucket of that is away."""
    url = f"s3://{s3.BUCKET}/origin"
    with RunFolder(url).open(made, record.new(SOURCE), resume=False):
        out = opening(resume=False, init_from=RunFolder(url).path)
    with Checkpoints(out / CHECKPOINTS) as there:
        there.save(4, {"a": jnp.ones(3)}, {})
    forget()
    monkeypatch.setattr(storage, "FIRST_PATIENCE", 0.1)
    wire.cut()
    opening(out, init_from=RunFolder(out).init_from(None, resuming=True).path)
    with pytest.raises(UserError, match="cannot reach"):
        RunFolder(out).init_from(f"{url}/another", resuming=True)


def test_a_run_in_a_bucket_is_opened_without_what_few_read(made, wire):
    url = f"s3://{s3.BUCKET}/lean"
    names = [f"{name}/step-000001.npz" for name in ("tokens", "samples", "tensorboard")]
    with RunFolder(url).open(made, record.new(SOURCE), resume=False):
        for name in names:
            written(RunFolder(url).path / name)
    forget()
    out = RunFolder(url).path
    assert {p.name for p in out.iterdir()} == {"run.json", "config.py", "model"}
    assert tokens.steps(out) == [1]


def test_what_a_run_writes_is_in_the_bucket_when_it_ends(made, wire):
    url = f"s3://{s3.BUCKET}/ended"
    out = RunFolder(url).path
    with contextlib.suppress(KeyError), RunFolder(out).open(made, record.new(SOURCE), resume=False):
        (out / "samples.txt").write_text("late")
        raise KeyError
    other = storage._Mirror(url)
    other.pull("", "")
    assert (other.folder / "samples.txt").read_text() == "late"


def test_other_processes_see_a_run_in_a_bucket_before_it_has_saved(made, wire):
    url = f"s3://{s3.BUCKET}/begun"
    with RunFolder(url).open(made, record.new(SOURCE), resume=False):
        other = storage._Mirror(url)
        other.pull("", "")
        assert RunFolder(other.folder).holds_run


def test_a_bucket_that_another_fills_meanwhile_is_refused(opening, wire, monkeypatch):
    url, locked = f"s3://{s3.BUCKET}/filled", storage.locked

    def later(out):
        storage._file_system("s3").pipe_file(f"{url}/something", b"x")
        return locked(out)

    monkeypatch.setattr(storage, "locked", later)
    refused(opening, "is not empty and holds no run", RunFolder(url).path, resume=False)


def test_a_folder_that_another_fills_meanwhile_is_refused(opening, tmp_path, monkeypatch):
    """Between the first look and the lock."""
    locked = storage.locked
    monkeypatch.setattr(storage, "locked", lambda out: locked(written(out / "something").parent))
    refused(opening, "is not empty and holds no run", tmp_path / "run", resume=False)


def test_all_processes_have_to_see_the_folder_of_the_first(begun, tmp_path, monkeypatch):
    identity, late = record.identity(begun), tmp_path / "late"
    RunFolder(begun).wait_for(identity)
    with pytest.raises(UserError, match="is another folder here"):
        RunFolder(begun).wait_for("another")
    copy = shutil.copytree(begun, tmp_path / "copy")
    threading.Timer(0.2, copy.rename, (late,)).start()
    RunFolder(late).wait_for(identity)
    monkeypatch.setattr(sys.modules[RunFolder.__module__], "SHARED", 0.1)
    with pytest.raises(UserError, match="is another folder here"):
        RunFolder(tmp_path / "empty").wait_for(identity)


@pytest.mark.parametrize("left", [(), ("model",), ("model", "files", "config.py")])
def test_a_start_that_was_killed_can_be_made_again(begun, opening, left):
    """run.json is written last."""
    for path in begun.iterdir():
        if path.name not in (*left, "lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in (".config.py.ab.new", "stacks-0.txt"):
        (begun / name).touch()
    assert not RunFolder(begun).holds_run
    opening(resume=False)
    assert RunFolder(begun).config().steps == 6


# The user's files.


def test_a_config_that_has_changed_is_not_resumed(opening, tmp_path):
    mine = shutil.copy(ROOT / QUICK, tmp_path / "mine.py")
    mine.chmod(0o640)
    source = replace(SOURCE, path=mine)
    out = opening(source=source, resume=False)
    assert (out / "config.py").stat().st_mode == mine.stat().st_mode
    mine.write_text(mine.read_text().replace("1e-3", "2e-3"))
    refused(
        opening,
        rf"mine\.py has changed since .*the run's own copy, {out}/config\.py",
        source=source,
    )
    opening(source=replace(SOURCE, path=out / "config.py"))
    (out / "config.py").write_text(mine.read_text())
    for act in (opening, lambda: RunFolder(out).config()):
        with pytest.raises(
            UserError, match=r"config\.py is not as it was when the run was started"
        ):
            act()


def test_a_flag_that_a_config_has_got_since_may_have_no_default(tmp_path, monkeypatch):
    """After one that has a stored value; the config is then refused, as one that has changed."""
    monkeypatch.setattr(record, "read", lambda _: {"flags": {"word": "one", "steps": 2}})

    def config(word: str, other: str, steps: int = 1) -> tuple[str, str, int]:
        return word, other, steps

    flagged = record.with_stored_flags(config, tmp_path)
    defaults = {name: one.default for name, one in inspect.signature(flagged).parameters.items()}
    assert defaults == {"word": "one", "other": inspect.Parameter.empty, "steps": 2}


LOADS = """from dataclasses import replace
from pathlib import Path
from jaxrl_llm.config import load
base = load(Path(__file__).parents[1] / "base.py")
def config(): return replace(base(), steps=3)
"""


def test_a_config_that_loads_another_is_opened_again_as_it_was(opening, tmp_path):
    """Wherever the other lies now, and whatever is written there; only a resumed run asks for the same."""
    (mine := tmp_path / "mine" / "config_of_mine.py").parent.mkdir()
    base = tmp_path / "base.py"
    mine.write_text(LOADS)
    shutil.copy(ROOT / QUICK, base)
    userfile.reset()
    made = Components.make(config.load(mine)(), tmp_path)
    source = Source(mine, {}, tuple(userfile.files_read(but=mine)))
    run = opening(source=source, resume=False, components=made)
    base.write_text(base.read_text().replace("1e-3", "1e-4"))
    assert RunFolder(run).config().steps == 3
    config.load(mine)()
    refused(opening, r"base\.py has changed since", source=source, components=made)
    for path in (base, mine):
        path.unlink()
    assert RunFolder(run).config().steps == 3
    assert len(RunFolder(run).config().task(tmp_path).train) == 64


@pytest.fixture
def paths(monkeypatch):
    """Where modules are looked for, put back afterwards."""
    known = {*sys.modules}
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield sys.path
    for name in {*sys.modules} - known:
        if name.startswith("beside_"):
            del sys.modules[name]


def test_a_file_imports_modules_beside_it_and_they_hide_nothing(
    opening, tmp_path, paths, monkeypatch
):
    """Later too, and when a run is opened again, which knows them by their content."""
    mine = written(
        tmp_path / "mine" / "rw.py",
        "import json, beside_one\nfrom tests.training.quick import config\n"
        "def reward(example, response):\n    import beside_two\n    return beside_two.score\n",
    )
    written(mine.parent / "beside_one.py")
    written(mine.parent / "beside_two.py", "score = 0.5\n")
    written(mine.parent / "json.py", "raise ImportError")
    monkeypatch.chdir(tmp_path)
    before = [*paths]
    assert rewards.reward("mine/rw.py:reward")(Question("q", (), {}), "") == Reward(0.5, False)
    assert paths == [*before, str(mine.parent)]
    assert {"module beside_one", "module beside_two"} <= record.modules().keys()
    run = opening(source=Source(mine), resume=False)
    for name in ("beside_one", "beside_two"):
        del sys.modules[name]
    paths[:] = before
    RunFolder(run).config()
    assert paths == [*before, str(mine.parent)]


def test_modules_of_the_configs_that_are_shipped_are_no_libraries(paths):
    """Who looks whether there is a library `gym` would run configs/gym.py."""
    before = [*paths]
    config.load("kk_tiny")
    assert paths == before


TASK = """
class Task:
    name, train, test = "a", [0] * 4, [1]
    def prompt(self, example): return WORD
    def reward(self, example, response): raise NotImplementedError
WORD = "first"
task = Task()
"""
RELATIVE = """from dataclasses import replace
from tests.training.quick import config as quick
from jaxrl_llm.tasks.task import load_task
def config(): return replace(quick(), task=lambda folder: load_task("task.py:task"))
"""


@pytest.fixture
def relative(opening, tmp_path, monkeypatch):
    """A run that was started in a folder whose task its config names by a relative path."""
    here = tmp_path / "here"
    written(here / "mine.py", RELATIVE)
    written(here / "task.py", TASK)
    monkeypatch.chdir(here)
    opening(source=_started(here), resume=False)
    return here


def _started(here):
    """The source of a run of the config there, from the working folder."""
    userfile.reset()
    made = Components.make(config.load(here / "mine.py")(), ".")
    source = Source(here / "mine.py", {}, tuple(userfile.files_read(but=here / "mine.py")))
    assert made.task.name == "a"
    return source


def test_files_that_have_moved_are_compared_all_the_same(relative, opening, tmp_path, monkeypatch):
    there = relative.rename(tmp_path / "there")
    monkeypatch.chdir(there)
    opening(source=_started(there))
    refused(opening, r"0-task\.py has changed since", source=replace(_started(there), files=()))
    (there / "task.py").write_text(TASK.replace("first", "other"))
    refused(opening, r"there/task\.py has changed since", source=_started(there))


def test_a_run_has_the_task_it_was_started_with_wherever_it_is_opened(
    relative, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    written(elsewhere / "task.py", TASK.replace("first", "other"))
    monkeypatch.chdir(elsewhere)
    for _ in range(2):
        assert RunFolder(tmp_path / "run").config().task(tmp_path).prompt(0) == "first"
        shutil.rmtree(relative, ignore_errors=True)


OF_FILES = """from dataclasses import replace
from pathlib import Path
import jaxrl_llm as jl
from jaxrl_llm.tasks import questions
from jaxrl_llm.tasks.tables import rows
def config(data: Path = Path("q.jsonl")):
    task = lambda folder: (data.read_text(), questions.task(str(data), held_out=1))[1]
    made = jl.grpo("m", str(data), "exact", steps=1, length=4, prompt_length=8, bfloat16=False)
    return replace(made, task=task, collate=replace(made.collate, microbatches=1))
"""


@pytest.mark.parametrize("gone", [False, True])
def test_paths_are_from_the_folder_that_the_run_was_started_in(gone, tmp_path, monkeypatch):
    """Of model, data and what a task opens; if it is gone, from that in which it is opened."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, words in ((here, public.WORDS), (elsewhere, ["other"])):
        folder.mkdir()
        public.write_model(folder / "m", words=words)
        rows = [{"question": word, "answer": folder.name} for word in public.WORDS]
        written(folder / "q.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    mine = written(tmp_path / "mine.py", OF_FILES)
    monkeypatch.chdir(here)
    userfile.reset()
    made = Components.make(config.load(mine)(), "data")
    source = Source(mine, {}, tuple(userfile.files_read(but=mine)))
    with RunFolder("run").open(made, record.new(source, None, made.identity), resume=False):
        pass
    shutil.move("run", elsewhere)
    if gone:
        for name in ("m", "q.jsonl"):
            storage.delete(elsewhere / name)
            shutil.move(name, elsewhere)
    monkeypatch.chdir(elsewhere)
    if gone:
        shutil.rmtree(here)
    there = lambda folder, *_: (len(record.read(folder.path)["sessions"]), made.initial_params())
    monkeypatch.setattr(RunFolder, "params", there)
    with open_run.open_run("run", "data", None) as (components, _, step):
        assert components.tokenizer.digest == made.tokenizer.digest
        assert {one.truths for one in components.task.train} == {("here",)}
        assert (components.base[0], components.data, step) == ("m", elsewhere / "data", 1)
    assert Path.cwd() == elsewhere


def test_a_run_opened_again_executes_no_file_that_it_does_not_keep(opening, tmp_path, monkeypatch):
    written(tmp_path / "mine.py", RELATIVE)
    run = opening(source=Source(tmp_path / "mine.py"), resume=False)
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "task.py", TASK)
    with pytest.raises(UserError, match=r"task file 'task\.py' is none that the run keeps"):
        RunFolder(run).config().task(tmp_path)


def test_an_edit_of_the_same_length_in_the_same_second_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    path = tmp_path / "config.py"
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert userfile.run(path, "config").value == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.py"]


def test_a_run_of_a_program_is_opened_by_it_alone(opening):
    out = opening(source=None, resume=False)
    opening(source=None)
    with pytest.raises(UserError, match="made by a program"):
        RunFolder(out).config()


# Another model, and the run that a run began with.


def test_another_model_or_tokenizer_is_refused(begun, opening, made):
    other = Components.make(quick.config(hidden=16), ".")
    refused(opening, "a run of another model: hidden_size is 32 there and 16", components=other)
    name = begun / "model" / "tokenizer.json"
    name.write_text(name.read_text() + " ")
    refused(opening, "its tokenizer is another")


@pytest.mark.parametrize("changed", ["chat_template", "stops"])
def test_another_template_or_end_of_responses_is_refused(opening, made, tmp_path, changed):
    """They change prompts and where responses end: of a run that goes on, is evaluated, or begun from."""
    words = templates.of_bytes(templates.QWEN25)
    ours, theirs = replace(made, tokenizer=words), replace(made, tokenizer=copy.deepcopy(words))
    if changed == "stops":
        theirs.tokenizer.stops = (*words.stops, 3)
    else:
        theirs.tokenizer._inner.chat_template = templates.THINKING
    out = opening(tmp_path / "run", resume=False, components=ours)
    for components, fine in ((ours, True), (theirs, False)):
        for act in (
            lambda components=components: opening(out, components=components),
            lambda components=components: RunFolder(out).require_model(components),
        ):
            wrong = pytest.raises(UserError, match="the tokenizer is not as it was")
            with contextlib.nullcontext() if fine else wrong:
                act()
    assert ours.identity[TOKENIZER] != theirs.identity[TOKENIZER]  # hosts are compared by it


def test_a_run_with_other_adapters_or_without_is_refused(begun, opening, made, tmp_path):
    adapted = lambda rank: replace(made, shape=replace(made.shape, lora=Lora(rank, 4.0)))
    refused(opening, "is a run without adapters, unlike the config", components=adapted(2))
    out = opening(tmp_path / "adapted", resume=False, components=adapted(2))
    opening(out, components=adapted(2))
    refused(opening, "is a run of adapters, unlike the config", out)
    refused(opening, "another model: r is 2 there and 3 in the config", out, components=adapted(3))


@pytest.fixture
def based(made, tmp_path):
    """Components of a run on a pretrained model, with these adapters or none."""
    base = tmp_path / "base"
    hf.export(made.initial_params(), made.shape, base)
    made.tokenizer.save(base)

    def on_it(lora):
        return replace(
            made, shape=replace(made.shape, lora=lora), source=base, base=(str(base), None)
        )

    return on_it


def test_adapters_belong_to_the_base_that_they_were_trained_beside(opening, based, tmp_path):
    """All weights belong to none."""
    adapted, whole = based(Lora(2, 4.0)), based(None)
    run, other = (
        opening(tmp_path / n, resume=False, components=p) for n, p in (("a", adapted), ("b", whole))
    )
    with Checkpoints(run / INITIAL) as there:
        there.save(1, {"a": jnp.zeros(1)}, {})
    acts = (
        lambda: opening(run, components=adapted),
        lambda: RunFolder(run).require_model(adapted),  # to evaluate it
        lambda: RunFolder(run).require_warm_start(adapted, 1),
        lambda: RunFolder(run).base(),  # to merge it
    )
    for act in acts:
        act()
    with (adapted.source / "config.json").open("a") as file:
        file.write(" ")
    for act in acts:
        with pytest.raises(UserError, match="the pretrained model is not as it was when"):
            act()
    RunFolder(other).require_model(whole)


def test_adapters_are_merged_into_the_commit_that_the_run_began_with(
    opening, based, tmp_path, monkeypatch
):
    """A relative name is one in the working folder that the run was started in."""
    adapted, asked = based(Lora(2, 4.0)), []
    monkeypatch.setattr(hf, "resolve", lambda *what: asked.append(what) or tmp_path)
    monkeypatch.setattr(hf, "version", lambda _: "commit abc")
    for name, found in (("Qwen/x", "Qwen/x"), ("base", tmp_path / "base")):
        monkeypatch.chdir(tmp_path)
        components = replace(adapted, base=(name, "main"))
        run = opening(
            tmp_path / f"of-{name.replace('/', '-')}", resume=False, components=components
        )
        monkeypatch.chdir(ROOT)
        assert RunFolder(run).base() == tmp_path
        assert asked[-1] == (found, "abc")


def test_adapters_of_a_model_of_the_hub_go_on_at_its_commit(opening, based, tmp_path, monkeypatch):
    """A resumed run, `eval` and others ask the hub for the commit that the run began with."""
    monkeypatch.setattr(hf, "version", lambda _: "commit abc")
    began = replace(based(Lora(2, 4.0)), base=("Qwen/x", None))
    run = opening(tmp_path / "hub", resume=False, components=began)
    opening(run, components=replace(began, base=("Qwen/x", "abc")))
    with pytest.raises(UserError, match="base_model_name_or_path is Qwen/x there and Qwen/y in"):
        RunFolder(run).require_model(replace(began, base=("Qwen/y", "abc")))


def test_a_run_on_a_snapshot_in_the_hubs_cache_goes_on(opening, made, tmp_path):
    """Its folder is called like its commit, which is asked of that folder again."""
    snapshot = tmp_path / "snapshots" / ("a1" * 20)
    hf.export(made.initial_params(), made.shape, snapshot)
    run = opening(
        resume=False, components=replace(made, source=snapshot, base=(str(snapshot), None))
    )
    model = (
        RunFolder(run).pinned(replace(quick.config(), model=config.Pretrained(str(snapshot)))).model
    )
    assert hf.resolve(model.name, model.revision) == snapshot
    with pytest.raises(UserError, match="is a folder, which has no revision main"):
        hf.resolve(str(snapshot), "main")


def test_a_card_names_the_model_that_it_is_of_if_that_is_the_hubs(opening, tmp_path):
    """A folder may be called like one."""
    run = opening(resume=False)
    (tmp_path / "there").mkdir()
    for version, named in (("sha256 0", False), ("commit abc", True)):
        known = {"flags": {"model": "exports/kk"}, "given": {PRETRAINED: version}}
        record.write(run, record.read(run) | known)
        card.write(RunFolder(run), 1, tmp_path / "there", adapters=False)
        assert ('base_model: "exports/kk"' in (tmp_path / "there" / card.CARD).read_text()) == named


def test_a_card_tells_of_no_machine_and_of_no_start_that_nobody_graded(opening, tmp_path):
    run = opening(resume=False)
    flags = {
        "reward": ["/home/ada/secret/mine.py:score", "math"],
        "judge": "http://ada:sk@judge.internal:8000/v1?key=sk",
        "tests": {"a": "/home/ada/a.jsonl", "b": "gs://bucket/b.jsonl"},
        "others": ["http://judge.internal:8000", "gs://bucket", "http://ada@judge.internal/"],
    }
    record.write(run, record.read(run) | {"flags": flags})
    figures = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "score": 1.0}
    lines = [
        {
            "step": n,
            "phase": "reinforce",
            "eval/examples": 9 * bool(n),
            **{f"eval/{k}": x for k, x in figures.items()},
        }
        for n in (0, 20, 40)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    card.write(RunFolder(run), 40, tmp_path, adapters=False)
    said = (tmp_path / card.CARD).read_text()
    assert "['mine.py:score', 'math']" in said
    assert "{'a': 'a.jsonl', 'b': 'gs://.../b.jsonl'}" in said
    assert "http://.../v1" in said
    assert not re.search("ada|sk|internal|bucket", said)
    assert "before reinforcement" not in said
    assert "validation, this step | 50.0" in said


def test_a_card_of_learned_rows_has_the_accuracy_of_its_own_step(opening, tmp_path):
    """Evaluations belong to the warm start there, but for the one at its end."""
    run = opening(resume=False)
    lines = []
    for step, accuracy in ((0, 0.1), (20, 0.6), (40, 0.5)):
        ends = {"": accuracy, "_low": accuracy - 0.1, "_high": accuracy + 0.1}
        line = {f"eval/accuracy{end}": x for end, x in ends.items()} | {"eval/score": accuracy}
        phase = "reinforce" if step == 40 else "warm_start"
        lines.append({"step": step, "phase": phase, "eval/loss": 1.0, "eval/examples": 9, **line})
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    card.write(RunFolder(run), 20, tmp_path, adapters=False)
    said = (tmp_path / card.CARD).read_text()
    assert "| validation, before the first step | 10.0 |" in said
    assert "| validation, this step | 60.0 |" in said
    assert "before reinforcement" not in said


def test_a_flag_of_a_card_stays_in_its_cell(opening, tmp_path):
    """Whatever stands in it: bars, line breaks, backticks."""
    run = opening(resume=False)
    flags = {
        "reward": ["regex:(yes|no)"],
        "system": "Be brief.\nSay `x` only.\r\n",
        "name": "``a``|`",
    }
    record.write(run, record.read(run) | {"flags": flags})
    card.write(RunFolder(run), 1, tmp_path, adapters=False)
    lines = (tmp_path / card.CARD).read_text().splitlines()
    assert r"| reward | `['regex:(yes\|no)']` |" in lines
    assert r"| system | `` Be brief.\nSay `x` only.\n `` |" in lines
    assert r"| name | ``` ``a``\|` ``` |" in lines


def test_processes_begin_with_the_checkpoint_that_the_first_one_chooses(two, made, monkeypatch):
    """Each may see another one as the best of a run that goes on."""
    chosen = []
    monkeypatch.setattr(distributed, "from_first", lambda make: chosen.append(make()) or 2)
    assert RunFolder(two)._restored(None, lambda there, step: step) == (2, 2)
    assert chosen == [1]
    assert RunFolder(two)._restored(1, lambda there, step: step) == (1, 1)


def test_the_run_it_began_with_is_known_by_its_id_where_it_has_moved(opening, tmp_path):
    origin, run = opening(tmp_path / "origin", resume=False), tmp_path / "run"
    opening(resume=False, init_from=origin)
    origin.rename(tmp_path / "moved")
    opening(init_from=tmp_path / "moved")
    opening(init_from=origin)  # it may be gone
    assert RunFolder(run).init_from(None, True).path == origin
    (other := tmp_path / "other").mkdir()
    for given in (other, None):
        refused(opening, f"was started with --from {origin}: resume it so", init_from=given)


def test_a_warm_start_has_to_be_there_and_to_fit(begun, made):
    with pytest.raises(UserError, match="it has not ended a warm start, that of the config has 4"):
        RunFolder(begun).require_warm_start(made, 4)
    with Checkpoints(begun / "initial") as there:
        there.clean()
        there.save(4, made.initial_params(), {})
    RunFolder(begun).require_warm_start(made, 4)
    with pytest.raises(UserError, match="its warm start has 4 steps, that of the config has 5"):
        RunFolder(begun).require_warm_start(made, 5)
    with pytest.raises(UserError, match="hidden_size is 32 there and 16"):
        RunFolder(begun).require_warm_start(Components.make(quick.config(hidden=16), "."), 4)
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunFolder(begun / "nowhere").require_warm_start(made, 4)
