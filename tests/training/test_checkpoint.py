"""Checkpoints cannot be lost by us: what is damaged is set aside, what may pass touches nothing."""

import json
import logging
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import anchor, checkpoint, disk, fingerprint
from jaxrl_llm.runs import train as training
from jaxrl_llm.runs.checkpoint import Checkpoints
from tests.training.process import steady


class State(NamedTuple):
    params: dict
    opt_state: object
    step: jax.Array


ADAM = optax.adam(1e-3)


def state(seed=0, optimizer=ADAM):
    rng = np.random.default_rng(seed)
    params = {
        "a": jnp.asarray(rng.normal(size=(20, 30)), jnp.float32),
        "b": {"c": jnp.asarray(rng.normal(size=40), jnp.bfloat16)},
    }
    return State(params, optimizer.init(params), jnp.int32(seed))


def like(_=None, **how):
    return jax.tree.map(lambda x: x, state(**how))


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(disk, "DELAYS", (0.0, 0.0))


@pytest.fixture
def three(tmp_path):
    """A folder with three whole checkpoints."""
    checkpoints = Checkpoints(tmp_path / "c", keep=3)
    for step in (2, 4, 6):
        checkpoints.save(step, state(step), {"phase": "x", "at": step}, score=float(step == 4))
    checkpoints.close()
    return tmp_path / "c"


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def flip(folder: Path):
    """Alters one bit of the largest file of the arrays."""
    largest = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_whole_and_named(three, caplog):
    flip(three / "6")
    before = contents(three / "6")
    step, found, notes = Checkpoints(three).newest(like)
    assert (step, notes["at"]) == (4, 4)
    assert equal(found, state(4))
    assert "damaged-6-0" in caplog.text
    assert contents(three / "damaged-6-0") == before
    again = Checkpoints(three)
    assert again.steps == [2, 4]
    again.save(6, state(7), {"at": 6})  # the step can be saved anew
    again.wait()
    assert again.steps == [4, 6]
    assert (three / "damaged-6-0").is_dir()


def test_where_none_can_be_read_nothing_is_touched(three):
    for step in (2, 4, 6):
        flip(three / str(step))
    before = contents(three)
    with pytest.raises(
        UserError, match=r"no checkpoint that can be read.*6: .*nothing was changed"
    ):
        Checkpoints(three).newest(like)
    assert contents(three) == before


@pytest.mark.parametrize(
    "other",
    [
        lambda: state(optimizer=optax.sgd(1e-3)),
        lambda: state(optimizer=optax.adam(1e-3, mu_dtype=jnp.bfloat16)),
        lambda: state()._replace(params={"a": jnp.ones((20, 30))}),
        lambda: state()._replace(params={**state().params, "a": jnp.ones((20, 31))}),
    ],
)
def test_another_optimizer_or_model_is_one_line_and_nothing_is_touched(three, other):
    before = contents(three)
    with pytest.raises(UserError, match="of another model or optimizer") as error:
        Checkpoints(three).newest(lambda _: other())
    assert "\n" not in str(error.value)
    assert contents(three) == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"),
        MemoryError(),
        PermissionError(13, "Permission denied"),
    ],
)
def test_an_error_of_disk_or_memory_is_tried_again_then_said(three, error, monkeypatch):
    before, calls = contents(three), []
    checkpoints = Checkpoints(three)
    inner = checkpoints._manager.restore

    def failing(step, args):
        calls.append(step)
        raise error

    monkeypatch.setattr(checkpoints._manager, "restore", failing)
    with pytest.raises(UserError, match=r"cannot read checkpoint 6 .* nothing was changed"):
        checkpoints.newest(like)
    assert calls == [6, 6, 6]
    assert contents(three) == before

    def failing_once(step, args):
        calls.append(step)
        if len(calls) == 4:
            raise error
        return inner(step, args=args)

    monkeypatch.setattr(checkpoints._manager, "restore", failing_once)
    assert checkpoints.newest(like)[0] == 6


def test_older_ones_go_only_after_the_newer_was_read_back(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, state(1), {"at": 1})
    checkpoints.wait()
    verify, during = checkpoint._verify, []

    def damaging(folder, *rest):
        during.append(sorted(p.name for p in (tmp_path / "c").glob("[0-9]")))
        flip(folder)
        verify(folder, *rest)

    monkeypatch.setattr(checkpoint, "_verify", damaging)
    checkpoints.save(2, state(2), {"at": 2})
    checkpoints.wait()
    assert during == [["1", "2"]]
    assert checkpoints.steps == [1]
    assert "not read back as it was written" in caplog.text
    monkeypatch.setattr(checkpoint, "_verify", verify)
    checkpoints.save(3, state(3), {"at": 3})
    checkpoints.wait()
    assert checkpoints.steps == [3]
    assert checkpoints.newest(like)[2] == {"at": 3}


def test_who_reads_the_newest_removes_what_its_writer_did_not_live_to(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_prune", lambda: None)
        for step in (1, 2):
            checkpoints.save(step, state(step), {"at": step})
        checkpoints.close()
    resumed = Checkpoints(tmp_path / "c", keep=1)
    assert resumed.steps == [1, 2]
    assert resumed.newest(like)[0] == 2
    assert resumed.steps == [2]


def test_a_disk_that_does_not_answer_keeps_the_older_ones(tmp_path, monkeypatch, caplog):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, state(1), {})

    def silent(*_):
        raise UserError("cannot read")

    checkpoints.wait()
    monkeypatch.setattr(checkpoint, "_verify", silent)
    checkpoints.save(2, state(2), {})
    checkpoints.wait()
    assert checkpoints.steps == [1, 2]
    assert "older checkpoints are kept" in caplog.text


def test_the_best_is_known_after_the_run_and_survives_a_resume(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    for step, score in ((1, 0.0), (2, 0.5), (3, 0.1)):
        checkpoints.save(step, state(step), {}, score=score)
    checkpoints.close()
    assert Checkpoints(tmp_path / "c", keep=None, read_only=True).best == 2
    resumed = Checkpoints(tmp_path / "c", keep=1)
    resumed.save(4, state(4), {}, score=0.2)
    resumed.close()
    assert resumed.steps == [2, 4]


def test_what_is_saved_on_the_way_out_takes_no_regular_ones_place(tmp_path):
    """So the mean over the last ones is that of the same steps, told to stop or not."""
    even = {"keep": 2, "regular": lambda step: step % 2 == 0}
    checkpoints = Checkpoints(tmp_path / "c", **even)
    for step in (2, 4, 5):
        checkpoints.save(step, state(step), {})
    checkpoints.close()
    resumed = Checkpoints(tmp_path / "c", **even)
    assert resumed.newest(like)[0] == 5
    assert resumed.steps == [2, 4, 5]
    resumed.save(6, state(6), {})
    resumed.close()
    assert resumed.steps == [4, 6]


def test_a_best_whose_note_cannot_be_read_for_a_moment_stays(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    for step, score in ((1, 0.9), (2, 0.1)):
        checkpoints.save(step, state(step), {}, score=score)
    checkpoints.close()
    read = Checkpoints._read

    def failing(self, step, **item):
        if step == 1:
            raise UserError("cannot read: Input/output error")
        return read(self, step, **item)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_read", failing)
        resumed = Checkpoints(tmp_path / "c", keep=1)
    assert resumed.newest(like)[0] == 2
    resumed.save(3, state(3), {}, score=0.2)
    resumed.close()
    again = Checkpoints(tmp_path / "c", keep=1)
    assert again.best == 1
    again.save(4, state(4), {}, score=0.3)
    again.close()
    assert again.steps == [1, 4]


def test_half_a_save_that_nobody_ended_is_cleared_away(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(10, state(1), {})
    checkpoints.close()
    half = tmp_path / "c" / "7.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "c" / "10", half)
    Checkpoints(tmp_path / "c", read_only=True).close()
    assert half.exists()  # its writer may be at it
    Checkpoints(tmp_path / "c").close()
    assert not half.exists()


@pytest.mark.parametrize(
    ("score", "step", "judged"), [(0.5, 30, []), (0.6, 30, [(30, 0.6)]), (0.4, 40, [(40, 0.4)])]
)
def test_what_was_saved_on_the_way_out_competes_only_as_it_would_have_anyhow(
    monkeypatch, score, step, judged
):
    """As good as the best before it, it would not have been saved: else another checkpoint is tested."""
    found = []
    config = SimpleNamespace(
        steps=40, evaluation=SimpleNamespace(every=10), show_samples_every=0, keeps_reference=False,
        group_size=4, look_ahead=False, saves=lambda step: step % 20 == 0,
    )  # fmt: skip
    nothing = lambda *_, **__: None
    run = SimpleNamespace(
        config=config, parts=SimpleNamespace(token_task=nothing), warm_steps=0, last_step=40, best=0.5,
        sampler=None, stop=SimpleNamespace(droppable=None), splits=SimpleNamespace(train=None),
        checkpoints=SimpleNamespace(judge=lambda *of: found.append(of)),
    )  # fmt: skip
    monkeypatch.setattr(training, "_catch_up", lambda *_: score)
    monkeypatch.setattr(
        training, "_recording", lambda *_: nullcontext(SimpleNamespace(flush=nothing))
    )
    monkeypatch.setattr(training.reinforce, "reinforce", lambda *_, **__: [])
    for name in ("stream", "reinforcement"):
        monkeypatch.setattr(training.assemble, name, nothing)
    training._reinforce(run, step, SimpleNamespace(params=None), None, None)  # pyright: ignore[reportArgumentType]
    assert found == judged
    assert run.best == max(score, 0.5)


def test_one_that_is_half_deleted_is_none(tmp_path, monkeypatch):
    """Killed amid it: what is left is cleared away by the next."""
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, state(1), {})
    checkpoints.save(2, state(1), {})

    def killed(folder, **_):
        shutil.move(folder / "1" / "notes", tmp_path / "notes")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.close()
    monkeypatch.undo()
    assert (tmp_path / "notes").exists()
    again = Checkpoints(tmp_path / "c", keep=1)
    assert again.steps == [2]
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["2"]
    again.close()


def test_in_the_end_the_best_that_can_be_read_is_tested(three, monkeypatch, caplog):
    flip(three / "4")
    pushed, result = [], SimpleNamespace(metrics=dict)
    for name, value in {
        "_recorded": None,
        "_measured": (result, 0.0),
        "assemble.like_params": state().params,
        "assemble.first": None,
    }.items():
        monkeypatch.setattr(f"jaxrl_llm.runs.train.{name}", lambda *_, value=value: value)
    run = SimpleNamespace(
        parts=None,
        last_step=6,
        checkpoints=Checkpoints(three),
        sampler=SimpleNamespace(push=lambda params, step: pushed.append(params)),
        journal=SimpleNamespace(record=lambda *_: None),
        splits=SimpleNamespace(test=None),
        config=SimpleNamespace(evaluation=SimpleNamespace(examples=0)),
    )
    assert training.conclude(run) == (6, result)  # pyright: ignore[reportArgumentType]
    assert equal(pushed, [state(6).params])
    assert "damaged-4-0" in caplog.text
    for step in (2, 6):
        flip(three / str(step))
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        training.conclude(run)  # pyright: ignore[reportArgumentType]


def test_a_step_that_is_judged_after_it_was_saved(tmp_path, three, caplog):
    checkpoints = Checkpoints(three, keep=1)
    checkpoints.save(8, state(8), {})
    assert checkpoints.best == 4
    checkpoints.judge(8, 2.0)
    checkpoints.judge(4, 3.0)  # it has a score
    assert checkpoints.best == 8
    assert checkpoints.steps == [8]  # which was the best before
    checkpoints.close()
    again = Checkpoints(three, keep=1)
    assert again.best == 8
    again.save(9, state(9), {}, score=0.5)
    again.close()
    assert Checkpoints(three, read_only=True).steps == [8, 9]
    (three / "8" / checkpoint.SCORE).write_text("{")
    assert Checkpoints(three, read_only=True).best == 9
    assert "checkpoint 8 stays, and counts as without a score" in caplog.text


WAITING = """
import threading
from pathlib import Path
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs.disk import writing
from jaxrl_llm.runs.ending import ending
threading.Thread(target=threading.Event().wait).start()
with ending():
    try:
        with writing(Path(), "a checkpoint"):
            raise OSError(5, "Input/output error")
    except UserError as error:
        raise SystemExit(75) from error
"""


def test_threads_that_wait_for_ever_do_not_keep_a_process_that_cannot_write():
    """As those of orbax do, if an error of the disk meets one of them alone; the exit code stays."""
    done = subprocess.run([sys.executable, "-c", WAITING], timeout=100, check=False)
    assert done.returncode == 75


def test_what_was_given_up_after_an_error_is_no_news(tmp_path, monkeypatch):
    """What reads and writes for orbax says it in a traceback each; the error is raised where we wait."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for name in "ab":
        Checkpoints(tmp_path / name)
    defined = {}
    exec(compile("async def reading(): pass", ocp.__file__, "exec"), defined)

    async def ours():
        pass

    reading, own = defined["reading"](), ours()
    for said, where in (("Event loop is closed", None), ("while reading", reading), ("other", own)):
        report = SimpleNamespace(exc_value=RuntimeError(said), object=where)
        sys.unraisablehook(report)
    reading.close()
    own.close()
    assert [str(report.exc_value) for report in heard] == ["other"]


def test_every_way_to_damage_a_checkpoint_is_survived(three, tmp_path, caplog):
    """One file cut, emptied, altered or removed: the state is exactly the saved one, or an older one is."""
    caplog.set_level(logging.ERROR, "jaxrl_llm")
    draw, seen = random.Random(0), []
    for number in range(60):
        folder = tmp_path / f"{number}" / "c"
        shutil.copytree(three, folder)
        path = draw.choice(steady(p for p in (folder / "6").rglob("*") if p.is_file()))
        content = bytearray(path.read_bytes())
        how = draw.choice(["flip", "cut", "empty", "remove", "noise"])
        if how == "flip" and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        content = content[: draw.randrange(len(content))] if how == "cut" and content else content
        content = draw.randbytes(len(content)) if how == "noise" else content
        path.write_bytes(b"" if how == "empty" else content)
        if how == "remove":
            path.unlink()
        checkpoints = Checkpoints(folder)
        step, found, notes = checkpoints.newest(like)
        assert step in (4, 6), (how, path)
        assert equal(found, state(step)), (how, path)
        assert notes["at"] == step
        checkpoints._manager.close()
        seen.append(step)
        shutil.rmtree(folder.parent)
    assert {4, 6} == set(seen)


def test_notes_that_were_altered_are_damage(three):
    path = next((three / "6" / "notes").glob("metadata"))
    path.write_text(path.read_text().replace('"at": 6', '"at": 5'))
    assert Checkpoints(three).newest(like)[0] == 4


def test_a_fingerprint_sees_every_bit_and_every_exchange():
    rng = np.random.default_rng(0)
    array = rng.normal(size=(3, 40, 5)).astype(np.float32)
    said = fingerprint.describe({"x": jnp.asarray(array)})["['x']"]
    assert said == fingerprint.on_host(array)
    words = array.view(np.uint32).reshape(-1)
    for _ in range(200):
        place, bit = rng.integers(words.size), rng.integers(32)
        words[place] ^= np.uint32(1 << bit)
        assert fingerprint.on_host(array) != said
        words[place] ^= np.uint32(1 << bit)
    for _ in range(200):
        one, other = rng.choice(words.size, 2, replace=False)
        words[[one, other]] = words[[other, one]]
        assert fingerprint.on_host(array) != said
        words[[one, other]] = words[[other, one]]
    assert fingerprint.on_host(array) == said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
@pytest.mark.parametrize("shape", [(), (7,), (5, 6, 7), (0, 3)])
def test_host_and_devices_say_the_same(dtype, shape, monkeypatch):
    monkeypatch.setattr(fingerprint, "_PIECE", 16)
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype)
    assert fingerprint.describe([array])["[0]"] == fingerprint.on_host(np.asarray(array))


@pytest.fixture
def reference(tmp_path):
    def written(name, seed):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({"id": name, "flags": {}}))
        anchor.write(folder / "reference", state(seed).params)
        return folder

    return written


def test_the_reference_of_a_run_is_its_own(reference):
    one, other = reference("one", 1), reference("other", 2)
    assert equal(anchor.read(one / "reference", state().params), state(1).params)
    shutil.rmtree(one / "reference")
    with pytest.raises(UserError, match=r"the policy before reinforcement, cannot be used"):
        anchor.read(one / "reference", state().params)
    shutil.copytree(other / "reference", one / "reference")
    with pytest.raises(UserError, match="not the ones that were saved"):
        anchor.read(one / "reference", state().params)
    shutil.copyfile(other / "reference.json", one / "reference.json")
    with pytest.raises(UserError, match="of another run"):
        anchor.read(one / "reference", state().params)
