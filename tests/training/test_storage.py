"""Files that are whole or absent, folders with one writer, and buckets, of a server on this machine."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training.clock import Clock
from tests.training.conftest import forget

NAME = f"{storage.PREFIX}x"
STRANGER = 65534


# Files.


def full(_):
    raise OSError(28, "full")


def test_a_failing_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x"
    storage.write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="full"):
            storage.write(path, "new")
    with pytest.raises(UnicodeEncodeError):
        storage.write(path, "new" + chr(0xD800))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    storage.write(path, b"new")
    assert path.read_text() == "new"


def test_a_folder_stays_where_it_is_when_the_working_folder_changes(tmp_path, monkeypatch):
    """A reward may change it while a checkpoint is written; people are shown the path that they gave."""
    monkeypatch.chdir(tmp_path)
    folder = storage.local("runs/a")
    assert storage.shown(f"cannot write to {folder}: full") == "cannot write to runs/a: full"
    assert storage.shown(tmp_path.parent) == str(tmp_path.parent)
    monkeypatch.chdir("/")
    assert folder == tmp_path / "runs" / "a"
    assert storage.shown(folder) == str(folder)


@pytest.fixture
def synced(monkeypatch):
    """What is synced to disk, in order: the name, and the content or the names in it by then."""
    found, inner = [], os.fsync

    def fsync(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        found.append((path.name, sorted(os.listdir(path)) if path.is_dir() else path.read_text()))
        inner(number)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@on_linux
def test_a_file_is_on_disk_before_it_has_its_name_and_then_its_name(tmp_path, synced):
    storage.write(tmp_path / "x", "new")
    (name, content), folder = synced
    assert (name != "x", content) == (True, "new")
    assert folder == (tmp_path.name, ["x"])


@on_linux
def test_a_tree_is_synced_with_all_its_names(tmp_path, synced):
    fill(tmp_path / "a", "b/c", "d")
    before = {*os.listdir("/proc/self/fd")}
    storage.sync_tree(tmp_path / "a")
    assert {name for name, _ in synced} == {tmp_path.name, "a", "b", "c", "d"}
    assert {*os.listdir("/proc/self/fd")} <= before


@pytest.mark.parametrize(
    ("code", "told"), [(errno.EIO, True), (errno.EINVAL, False), (errno.ENOTSUP, False)]
)
def test_only_a_system_that_cannot_sync_is_passed_over(tmp_path, monkeypatch, code, told):
    def fsync(_):
        raise OSError(code, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="no") if told else contextlib.nullcontext():
        storage.sync(tmp_path)


def test_a_file_has_the_permissions_that_are_asked_for(tmp_path):
    for mode in (0o400, 0o640):
        storage.write(tmp_path / "one", f"{mode}", mode=mode)
        assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == mode
        assert (tmp_path / "one").read_text() == f"{mode}"


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    storage.write(tmp_path / "one", "old", mode=0o600)
    storage.write(tmp_path / "one", "new")
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600


# Folders with one writer.

HOLDER = """
import sys, time
from pathlib import Path
from jaxrl_llm import storage
with storage.locked(storage.local(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(where):
    """A process that has the folder locked."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(where)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def refused(folder, message):
    with pytest.raises(UserError, match=message), storage.locked(folder):
        pytest.fail("two writers")


def test_a_second_writer_hears_who_the_first_is_and_a_dead_one_is_none(tmp_path):
    with holder(tmp_path) as other:
        refused(tmp_path, f"in use by process {other.pid} on {socket.gethostname()}: wait")
    with storage.locked(tmp_path):
        refused(tmp_path, f"in use by process {os.getpid()} ")
    with storage.locked(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, code):
    """More room, as an error of the disk is told, would not help."""

    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(tmp_path, f"{tmp_path} cannot be locked .*flock")


FORKS = """
import os, sys, time
from pathlib import Path
from jaxrl_llm import storage

out, memory = map(Path, sys.argv[1:])
with storage.locked(out), storage.temporary_folder(memory):
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, b".")
        time.sleep(600)
    os.read(read, 1)  # it has come to its first line
    print(child, flush=True)
    time.sleep(600)
"""


def test_a_forked_child_of_a_dead_writer_holds_no_lock(tmp_path):
    """Such as a worker of a reward's pool, which is busy when its trainer is killed."""
    out, memory = tmp_path / "out", tmp_path / "memory"
    out.mkdir(), memory.mkdir()
    command = [sys.executable, "-c", FORKS, str(out), str(memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        try:
            process.kill()
            process.wait()
            with storage.locked(out), storage.temporary_folder(memory) as ours:
                assert [*memory.iterdir()] == [ours]
        finally:
            os.kill(child, signal.SIGKILL)


def folder_with(under, lock=True):
    (under / NAME).mkdir(mode=0o700)
    if lock:
        (under / NAME / storage.LOCK).touch()
    return under / NAME


def link_to_a_lock(under):
    (under / "elsewhere").touch()
    (folder_with(under, lock=False) / storage.LOCK).symlink_to(under / "elsewhere")


def link_to_a_folder(under):
    folder_with(under).rename(under / "elsewhere")
    (under / NAME).symlink_to(under / "elsewhere")


TRAPS = {
    "a link to a lock": link_to_a_lock,
    "a link to a folder": link_to_a_folder,
    "another host": lambda under: folder_with(under).rename(under / "jaxrl-llm-00000000-x"),
    "being made": lambda under: folder_with(under, lock=False),
    "no folder": lambda under: (under / NAME).write_bytes(b""),
    "a stranger's": lambda under: os.chown(folder_with(under), STRANGER, STRANGER),
}


@pytest.mark.parametrize("trap", [*TRAPS])
def test_what_is_not_ours_stays(tmp_path, trap):
    if trap == "a stranger's" and os.geteuid():
        pytest.skip("only root can be somebody else")
    TRAPS[trap](tmp_path)
    before = {*tmp_path.rglob("*")}
    with storage.temporary_folder(tmp_path):
        assert before < {*tmp_path.rglob("*")}
    assert before == {*tmp_path.rglob("*")}


def test_a_temporary_folder_in_use_stays_and_a_dead_one_goes(tmp_path):
    folder = folder_with(tmp_path)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with storage.temporary_folder(tmp_path):
        assert folder.exists()
    os.close(lock)
    with storage.temporary_folder(tmp_path) as ours:
        assert not folder.exists()
        assert stat.S_IMODE(ours.stat().st_mode) == 0o700
        number = os.open(ours, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # so systemd-tmpfiles asks whether it is in use
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(number)
        assert stat.S_IMODE((ours / storage.LOCK).stat().st_mode) == 0o600
        with storage.temporary_folder(tmp_path):
            assert ours.exists()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="cannot make a folder"), storage.temporary_folder(folder):
        pass


def test_a_temporary_folder_that_is_being_made_is_in_use(tmp_path, monkeypatch):
    """Another process looks for what is abandoned whenever a file was made in it."""
    inner = os.open

    def opened(path, flags, *mode, **where):
        number = inner(path, flags, *mode, **where)
        if flags & os.O_CREAT:
            storage._remove_if_abandoned(Path(path).parent)
        return number

    monkeypatch.setattr(os, "open", opened)
    with storage.temporary_folder(tmp_path) as ours:
        assert (ours / storage.LOCK).exists()


@on_linux
def test_locks_of_temporary_folders_are_closed(tmp_path):
    before = {*os.listdir("/proc/self/fd")}
    folder_with(tmp_path)
    with storage.temporary_folder(tmp_path):
        pass
    assert {*os.listdir("/proc/self/fd")} <= before


def test_the_temporary_folder_stands_in_for_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MEMORY", tmp_path)
    assert storage.memory() == tmp_path
    monkeypatch.setattr(storage, "MEMORY", tmp_path / "none")
    assert storage.memory() == Path(tempfile.gettempdir())


def test_a_path_from_home_is_in_it(tmp_path, monkeypatch):
    """As of `--out=~/run`, in which no shell has written it out."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.local("~/run") == tmp_path / "run"
    assert storage.local("a/~") == Path("a/~").absolute()
    with pytest.raises(UserError, match="~nobody-here/run: there is no such home"):
        storage.local("~nobody-here/run")


# Buckets.


def test_what_is_a_url_and_what_a_path():
    for where in ("s3://bucket/a", "gs://bucket/a/b", Path("s3://bucket/a/")):
        assert storage.is_url(where)
    for where in ("runs/a", "/runs/a", "s3/a", ".", "a:b", "s3:", Path("a//b")):
        assert not storage.is_url(where)
        assert storage.local(where) == Path(where).absolute()


@pytest.mark.parametrize(
    "url",  # some of them with an unset variable of the shell
    ["https://host/a", "s3:///x", "s3:///x/y", "s3://bucket", "s3://bucket//y", "s3://"],
)
def test_a_url_that_names_nothing_is_refused(url):
    with pytest.raises(UserError, match="write a URL as s3://bucket/name or gs://") as error:
        storage.local(url)
    assert "\n" not in str(error.value)


def test_without_the_package_of_a_scheme_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    storage._file_system.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'jaxrl-llm\[gcs\]'"):
        storage.local("gs://bucket/a")


def objects(url):
    """The sizes of what is stored under a URL."""
    forget()
    found = storage._file_system("s3").find(url, detail=True)
    root = url.partition("://")[2]
    return {name.removeprefix(f"{root}/"): about["size"] for name, about in found.items()}


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(name)


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def stored(monkeypatch):
    """The names of the objects in the order in which they are stored."""
    names, inner = [], storage._Mirror._try

    def watched(self, call):
        if call.__defaults__ and "put_file" in call.__code__.co_names:
            names.append(call.__defaults__[0])
        return inner(self, call)

    monkeypatch.setattr(storage._Mirror, "_try", watched)
    return names


@pytest.mark.parametrize("name", ["a", "lr=[1e-4, *] a?", "100%#é"])
def test_a_mirror_comes_back_as_it_was_stored(url, name):
    here = storage.local(f"{url}/{name}")
    assert storage.local(f"{url}/{name}") == here
    assert not storage.shared(here)
    (here / "b").mkdir()
    (here / "b" / "c").write_bytes(bytes(range(256)) * 1000)
    (here / "empty").touch()
    storage.push(here)
    forget()
    there = storage.local(f"{url}/{name}", but="b")
    assert there != here
    assert files(there) == ["empty"]
    storage.pull(there / "b")
    assert (there / "b" / "c").read_bytes() == bytes(range(256)) * 1000


def test_what_has_changed_is_stored_and_last_what_says_that_it_is_whole(url, stored):
    here = storage.local(url)
    fill(here, "run.json", "z/config.json", "z/weights", "7.orbax-checkpoint-tmp/c", ".hidden", "a")
    storage.push(here)
    assert stored == ["a", "z/weights", "z/config.json", "run.json"]
    storage.push(here)
    assert len(stored) == 4
    (here / "a").write_text("b")  # as long as before
    storage.push(here)
    assert stored[4:] == ["a"]
    assert storage.as_url(f"in {here}: b") == f"in {url}: b"


def test_what_another_has_stored_is_brought_again_and_nothing_else(url, monkeypatch):
    here, bucket, brought = storage.local(url), storage._file_system("s3"), []
    fill(here, "a", "b")
    with storage.locked(here):
        storage.push(here)
        storage.local(url)
    bucket.pipe_file(f"{url}/a", b"c")  # as long as before
    inner = bucket.get_file
    monkeypatch.setattr(bucket, "get_file", lambda *to: (brought.append(to[0]), inner(*to)))
    for _ in range(2):
        assert storage.local(url) == here
        assert (here / "a").read_text() == "c"
    root = url.partition("://")[2]
    assert sorted(brought) == [f"{root}/a", f"{root}/b"]  # side by side; b may have been another


def test_files_are_brought_side_by_side(url, monkeypatch):
    """One after the other, thousands of small ones take minutes."""
    here = storage.local(url)
    fill(here, "a", "b/c")
    storage.push(here)
    forget()
    bucket, both = storage._file_system("s3"), threading.Barrier(2)
    inner = bucket.get_file
    monkeypatch.setattr(bucket, "get_file", lambda *to: (both.wait(120), inner(*to)))
    monkeypatch.setattr(storage, "PATIENCE", 0.0)
    assert files(storage.local(url)) == ["a", "b/c"]


def test_what_vanishes_while_it_is_stored_is_passed_over(url, monkeypatch, stored):
    """A temporary file of another library; where the bucket has gone it is told."""
    here, inner = storage.local(url), storage._stat
    fill(here, "a", "b", "c")

    def mark(file):
        found = inner(file)
        if file.name == "b":
            file.unlink()
        return found

    monkeypatch.setattr(storage, "_stat", mark)
    storage.push(here)
    assert [*objects(url)] == ["a", "c"]


def test_what_vanishes_while_it_is_brought_is_passed_over(url, monkeypatch):
    """The writer removes an old checkpoint that another process reads; else it is told."""
    fill(here := storage.local(url), "a", "b", "c")
    storage.push(here)
    forget()
    bucket = storage._file_system("s3")
    inner = bucket.get_file

    def brought(name, to):
        if name.endswith("/b"):
            bucket.rm_file(name)
        inner(name, to)

    monkeypatch.setattr(bucket, "get_file", brought)
    assert files(storage.local(url)) == ["a", "c"]
    missing = FileNotFoundError("no such disk")
    monkeypatch.setattr(bucket, "get_file", Mock(side_effect=missing))
    bucket.pipe_file(f"{url}/a", b"other")
    with pytest.raises(FileNotFoundError, match="no such disk"):
        storage.local(url)


def test_each_answer_of_a_bucket_is_a_sign_of_life(url, monkeypatch):
    """A run that waits for the upload of a large checkpoint does not stand still."""
    clock, here, seen = Clock(), storage.local(url), []
    fill(here, "4/a", "4/b", "4/c")
    bucket = storage._file_system("s3")
    inner = bucket.put_file
    monkeypatch.setattr(bucket, "put_file", lambda *to: (inner(*to), seen.append(clock.now)))
    storage.push(here)
    assert len({*seen, clock.now}) == 4


def test_a_folder_is_removed_here_and_there_and_no_other(url):
    here = storage.local(url)
    fill(here, "4/a", "4/b/c", "44/a", "5/config.json")
    storage.push(here)
    storage.remove(here / "4")
    assert files(here) == ["44/a", "5/config.json"]
    assert sorted(objects(url)) == ["44/a", "5/config.json"]


def test_of_a_checkpoint_the_note_goes_last(url, monkeypatch):
    """Arrays stay in the bucket until they are asked for: who finds none of it here clears nothing away."""
    here, gone = storage.local(url), []
    fill(here, "4/_CHECKPOINT_METADATA", "4/note/metadata", "4/state/a", "4/state/d/b")
    storage.push(here)
    bucket = storage._file_system("s3")
    inner = bucket.rm_file
    monkeypatch.setattr(bucket, "rm_file", lambda path: (inner(path), gone.append(path)))
    storage.remove(here / "4")
    names = [path.rpartition("/4/")[2] for path in gone]
    assert names == ["_CHECKPOINT_METADATA", "state/d/b", "state/a", "note/metadata"]


def test_objects_that_are_folders_are_none_and_none_lies_outside(url):
    mirror = storage._Mirror(url)
    for marker in ("", "a/"):
        mirror._objects.pipe_file(f"{mirror._root}/{marker}", b"")
    mirror._objects.pipe_file(mirror._path("a/b"), b"1")
    assert files(storage.local(url)) == ["a/b"]
    mirror._objects.pipe_file(mirror._path("a/../../c"), b"1")
    with pytest.raises(UserError, match="would lie outside"):
        storage.local(url)


def test_a_folder_of_a_file_system_is_no_mirror(tmp_path):
    fill(tmp_path, "a/b")
    assert storage.shared(tmp_path)
    storage.pull(tmp_path)
    storage.push(tmp_path)
    assert files(tmp_path) == ["a/b"]
    storage.remove(tmp_path / "a")
    storage.remove(tmp_path / "a")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def pauses(monkeypatch):
    """The seconds between attempts, in which no time goes by but on the clock of those."""
    found = []
    clock = {"monotonic": lambda: sum(found), "sleep": found.append}
    monkeypatch.setattr(storage, "time", SimpleNamespace(**(vars(time) | clock)))
    return found


def test_a_network_that_comes_back_is_waited_for(url, wire, caplog, monkeypatch, pauses):
    here = storage.local(url)
    mirror = storage._mirror_of(here)
    monkeypatch.setattr(type(mirror._objects), "retries", 1)
    monkeypatch.setattr(storage, "FIRST_PATIENCE", 0.5)
    fill(here, "a")
    wire.cut()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 4:
            wire.mend()

    monkeypatch.setattr(storage.time, "sleep", pause)
    storage.push(here)
    assert len(pauses) == 4  # several attempts, and one warning
    assert caplog.text.count("does not answer") == 1
    assert [*objects(url)] == ["a"]


def test_an_outage_is_waited_out_once(url, wire, monkeypatch, pauses):
    monkeypatch.setattr(storage, "FIRST_PATIENCE", 0.1)
    monkeypatch.setattr(storage, "PATIENCE", 30.0)
    mirror = storage._mirror_of(storage.local(url))
    monkeypatch.setattr(type(mirror._objects), "retries", 1)
    wire.cut()
    waited = []
    for _ in range(2):
        with pytest.raises(UserError, match=f"cannot reach {url} .*the network"):
            mirror._list("")
        waited.append(sum(pauses))
        pauses.clear()
    assert 15.0 <= waited[0] <= 30.0
    assert waited[1] == 0.0


def test_what_no_attempt_would_cure():
    assert storage._lasts(OSError(errno.ENOSPC, "No space left on device"))
    assert storage._lasts(Exception("Forbidden: https://storage.googleapis.com/b/o"))
    assert not storage._lasts(OSError(errno.ECONNRESET, "Connection reset by peer"))


@pytest.mark.parametrize(
    ("bucket", "unset", "said"),
    [
        ("nobodys", (), r"cannot reach s3://nobodys/a \(The specified bucket does"),
        ("bucket", ("AWS_ACCESS_KEY_ID",), r"cannot reach \S+ \(.*credentials.*\)"),
    ],
)
def test_what_will_not_pass_is_said_at_once(wire, bucket, unset, said, monkeypatch):
    monkeypatch.setattr(storage, "FIRST_PATIENCE", 600.0)
    for name in unset:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=said):
        storage.local(f"s3://{bucket}/a")


# The lease of a bucket.


def elsewhere(url, number=1):
    """Signs the lease as a writer on another machine."""
    path, beats = f"{url}/writers/{number:06d}", iter(range(1000))
    sign = lambda: storage._file_system("s3").pipe_file(
        path, b"process 7 on node7\nid\n%d" % next(beats)
    )
    sign()
    return sign


def test_a_beating_writer_is_alive_and_a_silent_one_is_given_up(url, monkeypatch):
    sign, done = elsewhere(url), threading.Event()

    def beat():
        while not done.wait(0.1):
            sign()

    heart = threading.Thread(target=beat)
    heart.start()
    refused(storage.local(url), "in use by process 7 on node7: wait")
    done.set()
    heart.join()
    mirror = storage._mirror_of(storage.local(url))
    monkeypatch.setattr(storage, "STALE", 2.0)
    with storage.locked(mirror.folder):
        (number, said), until = mirror._writer(), time.monotonic() + 120
        assert number == 2
        while mirror._writer() == (number, said):  # it gives signs of life itself
            assert time.monotonic() < until
            time.sleep(0.1)
    assert objects(url)["writers/000002"] == 0
    monkeypatch.setattr(storage, "STALE", 120.0)
    start = time.monotonic()
    with storage.locked(storage.local(url)):  # nobody is waited for
        assert time.monotonic() - start < 60
        assert "writers/000003" in objects(url)


@pytest.mark.parametrize("stood", ["the process", "the machine, and one of its clocks"])
def test_who_stood_still_stores_and_removes_nothing_more(stood, url, monkeypatch):
    monkeypatch.setattr(storage, "STALE", 2.0)
    here, now = storage.local(url), time.time
    fill(here, "a")
    with storage.locked(here):
        storage.push(here)
        elsewhere(url, number=2)
        if stood == "the process":
            time.sleep(1.1)
        else:
            monkeypatch.setattr(time, "time", lambda: now() + 60)
        (here / "a").write_text("other")
        for act in (storage.push, storage.remove):
            with pytest.raises(UserError, match="another writer now"):
                act(here / "a")
    assert objects(url)["a"] == 1
    assert objects(url)["writers/000002"] > 0  # nor takes it anything back


def test_who_asks_for_its_lease_gives_a_sign_of_life(url, monkeypatch):
    """A process that stood still would else be given up between its look and what it stores."""
    monkeypatch.setattr(storage, "STALE", -1.0)
    mirror, signs = storage._Mirror(url), []
    monkeypatch.setattr(storage._Mirror, "_sign", lambda self, content: signs.append(content))
    monkeypatch.setattr(storage._Mirror, "_writer", lambda self: (3, b""))
    mirror._lease = 3
    mirror._require_lease()
    assert len(signs) == 1


def test_a_file_is_sent_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("/picture.png", "picture.png", "a/picture.png", str(tmp_path / "picture.png")):
        with storage.upload_after(name) as path:
            assert path == Path(name).absolute()


def test_what_can_be_had_again_may_stay_here(tmp_path, monkeypatch, caplog):
    """As marks of a judge, where a data folder may only be read."""

    def refused(path):
        raise UserError("s3://data/x: access denied")

    monkeypatch.setattr(storage, "push", refused)
    storage.try_push(tmp_path)
    assert "was not uploaded: s3://data/x: access denied" in caplog.text


def test_a_file_in_no_folder_of_a_bucket_is_refused():
    with (
        pytest.raises(
            UserError, match=r"s3://runs/a.png: a file needs a folder .*: s3://runs/FOLDER/a.png"
        ),
        storage.upload_after("s3://runs/a.png"),
    ):
        pass


def test_a_file_is_sent_to_a_bucket_once_it_is_written(url):
    """Nothing of what lies beside it is brought for that."""
    for name in ("a/picture.png", "a/another.png"):
        with storage.upload_after(f"{url}/{name}") as path:
            path.write_text("drawn")
        assert files(path.parent) == [path.name]
        assert name in objects(url)


def test_of_many_at_once_one_writes(url, monkeypatch):
    monkeypatch.setattr(storage, "BEAT", 0.2)
    mirrors, outcomes = [storage._Mirror(url) for _ in range(6)], []
    done = threading.Event()

    def take(mirror):
        try:
            with mirror.lease():
                outcomes.append(mirror._lease)
                done.wait(600)
        except UserError:
            outcomes.append(0)

    threads = [threading.Thread(target=take, args=(mirror,)) for mirror in mirrors]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 300
    while len(outcomes) < len(mirrors) and time.monotonic() < until:
        time.sleep(0.05)
    done.set()
    for thread in threads:
        thread.join()
    assert len([number for number in outcomes if number]) == 1
