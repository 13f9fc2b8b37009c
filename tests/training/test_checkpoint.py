"""Checkpoints are whole or none; what is damaged is found, and nothing else is touched."""

import logging
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import distributed, storage
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.models import sharding
from jaxrl_llm.training import checkpoint, fingerprint
from jaxrl_llm.training.checkpoint import Checkpoints, DamageError
from tests.training.process import contents, steady
from tests.training.test_storage import objects


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


def equal(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def saved(folder, *steps, **how):
    with Checkpoints(folder, **how) as made:
        made.clean()
        for step in steps:
            made.save(step, state(step), {"at": step})
    return made


def newest(there, like=None, **how):
    read = lambda step: (there.restore(step, like or state()), there.note(step)["at"])
    return there.first_whole(read, **how)


@pytest.fixture
def three(tmp_path):
    """A folder with three whole checkpoints."""
    return saved(tmp_path / "c", 2, 4, 6).folder


def flip(folder: Path):
    """Alters one bit of the largest file of the arrays."""
    largest = max(folder.rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_what_a_cleaner_took_from_a_mirror_is_brought_again(url):
    """As tmpreaper does, which minds no lock: the best checkpoint is old."""
    here = storage.local(url)
    with storage.locked(here):
        there = saved(here / "c", 2, 4, 6, scores=lambda: {2: (0.5, 0)})
        shutil.rmtree(there.folder / "2")
        step, (found, _) = newest(there, prefer=there.best)
        assert (step, there.steps) == (2, [2, 4, 6])
        assert equal(found, state(2))


def test_what_was_saved_is_restored_whole_or_a_part(three):
    step, (found, at) = newest(there := Checkpoints(three))
    assert (step, at) == (6, 6)
    assert equal(found, state(6))
    assert equal(there.restore(4, state().params, part="params"), state(4).params)


def test_a_checkpoint_of_eight_devices_opens_on_one(tmp_path):
    eight, one = (
        NamedSharding(jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n]), P("fsdp"))
        for n in (8, 1)
    )
    array = jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(16, 4), eight)
    with Checkpoints(tmp_path / "c") as there:
        there.clean()
        there.save(1, {"params": {"a": array}}, {})
    like = {"a": jax.ShapeDtypeStruct((16, 4), "float32", sharding=one)}
    for found in (
        there.restore(1, {"params": like})["params"],
        there.restore(1, like, part="params"),
    ):
        np.testing.assert_array_equal(found["a"], array)
        assert len(found["a"].sharding.device_set) == 1


def test_a_damaged_checkpoint_is_renamed_once_an_older_one_was_read(three, caplog):
    flip(three / "6")
    before = contents(three)
    step, (found, at) = newest(Checkpoints(three))
    assert (step, at, contents(three)) == (4, 4, before)
    assert equal(found, state(4))
    newest(again := Checkpoints(three), rename=True)
    assert "checkpoint 6 is damaged" in caplog.text
    assert again.steps == [2, 4]
    aside = contents(three / "damaged-6-0")
    assert {three / "6" / p.relative_to(three / "damaged-6-0"): aside[p] for p in aside} == {
        p: content for p, content in before.items() if p.is_relative_to(three / "6")
    }
    with again:
        again.save(6, state(7), {"at": 6})  # the step can be saved anew
    assert again.steps == [2, 4, 6]


def test_where_none_can_be_read_nothing_is_touched(three):
    for step in (2, 4, 6):
        flip(three / str(step))
    before = contents(three)
    with pytest.raises(
        UserError, match=r"no checkpoint that can be read .*6: .*nothing was changed"
    ):
        newest(Checkpoints(three), rename=True)
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
        newest(Checkpoints(three), other(), rename=True)
    assert "\n" not in str(error.value)
    assert contents(three) == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes"),
        MemoryError(),
        PermissionError(13, "Permission denied"),
        TimeoutError(),
        TimeoutError(110, "Connection timed out"),
    ],
)
def test_an_error_of_disk_or_memory_is_no_damage(three, error, monkeypatch):
    before, there = contents(three), Checkpoints(three)

    def failing(*_, **__):
        raise error

    monkeypatch.setattr(there._reader, "restore", failing)
    with pytest.raises(UserError, match=r"cannot read checkpoint 6 .* nothing was changed"):
        newest(there, rename=True)
    assert contents(three) == before


def test_every_way_to_damage_a_checkpoint_is_survived(three, tmp_path, caplog):
    """One file cut, emptied, altered or removed: the state is exactly the saved one, or an older one is."""
    caplog.set_level(logging.ERROR, "jaxrl_llm")
    draw, seen, there = random.Random(0), [], Checkpoints(tmp_path / "damaged")
    for _ in range(60):
        shutil.copytree(three, there.folder)
        path = draw.choice(steady(p for p in (there.folder / "6").rglob("*") if p.is_file()))
        content = bytearray(path.read_bytes())
        how = draw.choice(["flip", "cut", "empty", "remove", "noise"])
        if how == "flip" and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        content = content[: draw.randrange(len(content))] if how == "cut" and content else content
        content = draw.randbytes(len(content)) if how == "noise" else content
        path.write_bytes(b"" if how == "empty" else content)
        if how == "remove":
            path.unlink()
        step, (found, at) = newest(there)
        assert step == at
        assert step in (4, 6), (how, path)
        assert equal(found, state(step)), (how, path)
        seen.append(step)
        shutil.rmtree(there.folder)
    assert {4, 6} == set(seen)


def test_a_fingerprint_sees_every_bit_and_every_exchange():
    rng = np.random.default_rng(0)
    array = rng.normal(size=(3, 40, 5)).astype(np.float32)
    number = lambda: fingerprint.describe([jnp.asarray(array)])["[0]"]
    said, words = number(), array.view(np.uint32).reshape(-1)
    for _ in range(100):
        place, bit = rng.integers(words.size), rng.integers(32)
        words[place] ^= np.uint32(1 << bit)
        assert number() != said
        words[place] ^= np.uint32(1 << bit)
        one, other = rng.choice(words.size, 2, replace=False)
        words[[one, other]] = words[[other, one]]
        assert number() != said
        words[[one, other]] = words[[other, one]]
        words[[one, other]] ^= np.uint32(1 << 31)  # two signs
        assert number() != said
        words[[one, other]] ^= np.uint32(1 << 31)
    assert number() == said
    for axes in ((0, 2, 1), (2, 1, 0)):  # cubes, turned
        turned = array[:3, :3, :3].transpose(axes).copy()
        array[:3, :3, :3], kept = turned, array[:3, :3, :3].copy()
        assert number() != said
        array[:3, :3, :3] = kept


def test_what_an_older_run_noted_of_a_score_is_its_accuracy(tmp_path):
    """Which was a number, and is two now."""
    saved(tmp_path / "c", 1, 2, scores=lambda: {1: 0.5, 2: 0.4})
    with saved(tmp_path / "c", 3, keep=1, scores=lambda: {3: (0.45, 1.0)}) as there:
        assert (there.best, there.steps) == (1, [1, 3])


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "bool", "uint8"])
def test_every_kind_of_array_has_a_fingerprint(dtype):
    for shape in ((), (7,), (5, 6, 7)):
        array = jnp.zeros(shape, dtype)
        numbers = [
            fingerprint.describe([x])["[0]"][2]
            for x in (array, array.at[(0,) * array.ndim].set(jnp.ones((), dtype)))
        ]
        assert numbers[0] != numbers[1]


@pytest.mark.parametrize(
    ("steps", "how", "left"),
    [
        ((1, 2, 3, 4), {}, [1, 2, 3, 4]),
        ((1, 2, 3, 4), {"keep": 1}, [4]),
        ((1, 2, 3, 4), {"keep": 2, "scores": lambda: {1: (0.5, 0), 3: (0.4, 1)}}, [1, 3, 4]),
        (
            (1, 2, 3, 4),
            {"keep": 1, "scores": lambda: {1: (0.5, 0), 2: (0.5, 0)}},
            [2, 4],
        ),  # the later
        (
            (2, 4, 5),
            {"keep": 2, "regular": lambda step: step % 2 == 0},
            [2, 4, 5],
        ),  # 5: on the way out
        ((2, 4, 5, 6), {"keep": 2, "regular": lambda step: step % 2 == 0}, [4, 6]),
    ],
)
def test_the_newest_the_best_and_the_last_regular_ones_stay(tmp_path, steps, how, left):
    assert saved(tmp_path / "c", *steps, **how).steps == left


def test_going_back_keeps_the_later_ones_aside_in_a_bucket_too(url):
    here = storage.local(url)
    with storage.locked(here):
        there = saved(here / "c", 2, 4, 6)
        there.go_back(2)
        assert there.steps == [2]
        with there:
            there.save(4, state(9), {})
        there.go_back(2)
    asides = {"2", "later-4-0", "later-4-1", "later-6-0"}
    assert {p.name for p in there.folder.iterdir()} == asides
    shutil.rmtree(here)
    storage._MIRRORS.clear()
    again = Checkpoints(storage.local(url) / "c")
    storage.pull(again.folder)
    assert {p.name for p in again.folder.iterdir()} == asides


def damaged(folder):
    """The note of a step is another."""
    [note] = (folder / checkpoint.NOTE).glob("metadata")
    note.write_text(note.read_text().replace('"at": 6', '"at": 7'))


@pytest.mark.parametrize(
    ("act", "aside"),
    [
        (lambda there: there.go_back(2), "later-6-0"),
        (lambda there: there.first_whole(there.note, rename=True), "damaged-6-0"),
    ],
    ids=["going back", "damage"],
)
def test_what_is_renamed_in_a_bucket_is_whole_though_its_arrays_are_not_here(url, act, aside):
    """A run is opened without the arrays of its checkpoints."""
    with storage.locked(here := storage.local(url)):
        saved(here / "c", 2, 6)
        damaged(here / "c" / "6")
        storage.push(here)
    before = objects(url)
    here = storage.local(url, but=checkpoint.ARRAYS)
    with storage.locked(here):
        act(Checkpoints(here / "c"))
        storage.push(here)
    after = {name: size for name, size in objects(url).items() if name.startswith("c/")}
    assert {
        name.replace("c/6/", f"c/{aside}/"): before[name] for name in before if "c/" in name
    } == after


def test_a_way_back_that_was_cut_short_is_gone_to_its_end(three, monkeypatch):
    """Else the run would go on from a later step than the one that was asked for."""
    renamed = []

    def killed(folder, name, inner=storage.rename):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(name)
        inner(folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            Checkpoints(three).go_back(2)
    assert len(Checkpoints(three).steps) == 2
    Checkpoints(three).clean()
    assert {p.name for p in three.iterdir()} == {"2", "later-4-0", "later-6-0"}


def test_why_a_checkpoint_was_saved_is_in_its_note(tmp_path):
    """Whatever has become of the records since, and of when to save."""
    even = lambda step: step % 2 == 0
    saved(tmp_path / "c", 1, 2, 4, 5, keep=3, regular=even, scores=lambda: {1: (0.9, 0)})
    later = Checkpoints(tmp_path / "c", keep=3, regular=lambda step: step % 10 == 0)
    later.prune()
    assert later.steps == [1, 2, 4, 5]
    assert later.best == 1
    with later:
        later.save(10, state(10), {})
    assert later.steps == [1, 2, 4, 10]  # 5 was saved on the way out only


def test_a_note_that_one_process_sees_otherwise_is_damaged_for_all(three, monkeypatch):
    """What one process raises before all have agreed leaves the others waiting."""
    said = []
    monkeypatch.setattr(distributed, "agree", lambda word: said.append(word) or [word, ""])
    damaged(three / "6")
    with pytest.raises(DamageError, match="the note is not the one that was saved"):
        Checkpoints(three).note(6)
    assert said == ["the note is not the one that was saved"]


def strays(folder, elsewhere):
    """A checkpoint that was moved and linked, and what is none."""
    (folder / "2").rename(elsewhere)
    (folder / "2").symlink_to(elsewhere)
    (folder / "2025-notes.txt").write_text("mine")
    for name in ("10-copy", "²", "007"):
        (folder / name).mkdir()
        (folder / name / checkpoint.WHOLE).touch()
    (folder / "10-copy" / checkpoint.WHOLE).unlink()
    return {"2025-notes.txt", "10-copy", "²", "007"}


def test_links_go_themselves_and_what_is_no_checkpoint_stays(three, tmp_path):
    others = strays(three, tmp_path / "elsewhere")
    there = Checkpoints(three, keep=1)
    there.clean()
    assert there.steps == [2, 4, 6]
    there.prune()
    assert {p.name for p in three.iterdir()} == {"6", *others}
    assert (tmp_path / "elsewhere" / checkpoint.WHOLE).exists()


def test_what_the_disk_does_not_let_go_of_is_a_warning(three, monkeypatch, caplog):
    """As NFS does of a file that another process reads."""

    def busy(_):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", busy)
    Checkpoints(three, keep=1).prune()
    Checkpoints(three).clean()
    assert Checkpoints(three).steps == [6]
    assert "cannot be removed" in caplog.text


def test_a_save_is_on_disk_before_it_is_pushed(tmp_path, monkeypatch):
    done = []
    for name in ("sync_tree", "push"):
        monkeypatch.setattr(storage, name, lambda path, name=name: done.append((name, path)))
    saved(tmp_path / "c", 1)
    assert done == [("sync_tree", tmp_path / "c" / "1"), ("push", tmp_path)]


@pytest.mark.parametrize("first", [True, False])
def test_where_hosts_see_folders_of_their_own_the_first_writes_for_all(
    tmp_path, monkeypatch, first
):
    kept = saved(tmp_path / "c", 1).folder / "1"
    monkeypatch.setattr(distributed, "count", lambda: 2)
    monkeypatch.setattr(distributed, "first", lambda: first)
    monkeypatch.setattr(distributed, "agree", lambda word: [word, word])
    monkeypatch.setattr(storage, "shared", lambda folder: False)
    gathered = []
    monkeypatch.setattr(sharding, "on_first_host", lambda x: gathered.append(1) or np.asarray(x))
    before = contents(kept)
    with Checkpoints(tmp_path / "c") as there:
        there.save(2, state(2), {})
        there.replace(1, state(3))
    assert len(gathered) == 2 * len(jax.tree.leaves(state()))
    assert there.steps == ([1, 2] if first else [])
    assert contents(kept) != before
    assert kept.exists() == first


def test_what_another_process_cannot_read_is_damaged_for_all(three, monkeypatch):
    monkeypatch.setattr(distributed, "agree", lambda word: [word, "its part is damaged"])
    with pytest.raises(DamageError, match="its part is damaged"):
        Checkpoints(three).note(2)


def test_a_step_that_is_there_is_not_saved_again_but_may_be_replaced(three):
    before = contents(three)
    with Checkpoints(three) as there:
        with pytest.raises(UserError, match="already exists"):
            there.save(4, state(5), {})
        assert contents(three) == before
        there.replace(4, state(5))
        assert equal(there.restore(4, state()), state(5))


def test_what_is_replaced_is_the_only_one_whatever_its_step(three):
    with Checkpoints(three) as there:
        there.replace(3, state(5))
    assert there.steps == [3]
    assert equal(there.restore(3, state()), state(5))


def test_what_killed_writers_left_is_cleared_away(three):
    """Half a save, half a removal, and what got as far as a bucket."""
    for name in ("7.orbax-checkpoint-tmp", ".2.1f.gone"):
        shutil.copytree(three / "2", three / name)
    shutil.copytree(three / "2", three / "8")
    (three / "8" / checkpoint.WHOLE).unlink()
    (three / "damaged-3-0").mkdir()
    assert Checkpoints(three).steps == [2, 4, 6]
    Checkpoints(three).clean()
    assert {p.name for p in three.iterdir()} == {"2", "4", "6", "damaged-3-0"}
    saved(three, 8)


def test_one_that_is_half_removed_is_none(three, monkeypatch):
    def killed(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(three, keep=2).prune()
    assert Checkpoints(three).steps == [4, 6]


def failing(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("leaves", "told"), [(None, UserError), (StopRequested, UserError), (KeyError, KeyError)]
)
def test_a_write_that_fails_in_the_background_is_told_unless_an_error_is(
    tmp_path, monkeypatch, leaves, told
):
    monkeypatch.setattr(Checkpoints, "_finish", failing)
    (there := Checkpoints(tmp_path / "c")).clean()

    def save():
        with there:
            there.save(1, state(1), {})
            if leaves:
                raise leaves

    with pytest.raises(told, match="cannot write a checkpoint" if told is UserError else None):
        save()
    there._writer.wait_until_finished()


def test_a_write_from_the_memory_of_hosts_fails_as_any_other(tmp_path, monkeypatch):
    """It is waited for at once; a full disk is no lack of memory."""
    there = Checkpoints(tmp_path / "c")
    monkeypatch.setattr(sharding, "waits", lambda _: True)

    def full():
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr(there._writer, "save", lambda *_, **__: None)
    monkeypatch.setattr(there._writer, "wait_until_finished", full)
    with pytest.raises(UserError, match="cannot write a checkpoint"):
        there.save(1, state(1), {})


def test_a_write_that_failed_is_told_by_the_next_save(tmp_path, monkeypatch):
    there = Checkpoints(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_finish", failing)
        there.save(1, state(1), {})
        with pytest.raises(UserError, match="cannot write a checkpoint"):
            there.save(2, state(2), {})
    with there:
        there.save(2, state(2), {})
    assert there.steps == [1, 2]


def test_what_was_given_up_after_an_error_is_no_news(tmp_path, monkeypatch):
    """What reads and writes for orbax says it in a traceback each; the error is raised where we wait."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    for name in "ab":
        assert Checkpoints(tmp_path / name)._reader
    defined = {}
    exec(compile("async def reading(): pass", ocp.__file__, "exec"), defined)

    async def ours():
        pass

    reading, own = defined["reading"](), ours()
    for said, where in (("Event loop is closed", None), ("while reading", reading), ("other", own)):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(said), object=where))
    reading.close()
    own.close()
    assert [str(report.exc_value) for report in heard] == ["other"]


def on_host(tree):
    """The tree in the memory of the host, as `offload` has it."""
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return sharding.to_hosts(jax.device_put(tree, NamedSharding(mesh, P())))


def test_a_save_pins_no_memory(tmp_path, monkeypatch):
    """By itself orbax copies all of a GPU's arrays to pinned memory, which XLA never gives back."""
    kinds, inner = [], jax.device_put

    def put(x, device=None, **how):
        kinds.append(getattr(device, "memory_kind", None))
        return inner(x, device, **how)

    there, tree = Checkpoints(tmp_path), {"a": jnp.arange(5.0)}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _ = there._writer
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "device_put", put)
    with there:
        there.save(1, tree, {})
    assert "pinned_host" not in kinds


@pytest.mark.parametrize("place", [on_host, lambda tree: tree], ids=["host", "device"])
def test_what_lies_on_the_host_is_written_before_the_next_step_takes_it(
    tmp_path, monkeypatch, place
):
    """Its memory is read as it lies there; what is on devices is copied first, and written meanwhile."""
    there, waited = Checkpoints(tmp_path), []
    writer = there._writer
    inner = writer.wait_until_finished
    with there:
        there.save(1, {"a": jnp.arange(5.0)}, {})
        there.wait()
        monkeypatch.setattr(writer, "wait_until_finished", lambda: (waited.append(1), inner()))
        monkeypatch.setattr(checkpoint, "in_background", lambda work: None)
        there.save(2, place({"a": jnp.arange(5.0)}), {})
        assert len(waited) == 1 + (place is on_host)  # orbax waits for the save before, too
        inner()


def test_fingerprints_bring_one_array_of_the_host_at_a_time(monkeypatch):
    """All at once they may not fit beside what is on the devices; they are those of the same arrays there."""
    tree, calls = {"a": jnp.arange(5.0), "b": jnp.ones((2, 3)), "c": jnp.zeros(4)}, []
    placed = {"a": tree["a"], **on_host({name: tree[name] for name in "bc"})}
    expected, inner = fingerprint.describe(tree), fingerprint._checksums
    monkeypatch.setattr(
        fingerprint, "_checksums", lambda arrays: (calls.append(len(arrays)), inner(arrays))[1]
    )
    assert fingerprint.describe(placed) == expected
    assert calls == [1, 1, 1]
