"""Places in buckets, the folders here that stand for them, and their locks, against a server on this machine."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_llm import desk, storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import lock
from jaxrl_llm.runs.holder import machine, this_process
from jaxrl_llm.runs.lock_notes import Lock, Objects, holder_of
from jaxrl_llm.storage import Place, url_of
from tests.training.conftest import forget
from tests.runs.test_lock import HOLDER, one_of_many_holds


def test_a_url_survives_pathlib_and_a_path_is_none():
    for url in ("s3://bucket/runs/a", "gs://bucket"):
        assert url_of(Path(url)) == url
        assert url_of(Path(url + "/")) == url
    for path in ("runs/a", "/runs/a", "s3/a", ".", "a:b", "s3:"):
        assert url_of(Path(path)) is None
    with pytest.raises(UserError, match=r"only s3:// and gs:// are known"):
        url_of(Path("https://host/a"))


def test_without_the_package_of_a_scheme_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    storage._opened.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'jaxrl-llm\[gcs\]'"):
        Place("gs://bucket/a")


@pytest.mark.parametrize("name", ["a", "lr=[1e-4, *] a?", "100%/#é"])
def test_objects_come_back_as_they_were_put(url, tmp_path, name):
    place, file = Place(f"{url}/{name}"), tmp_path / "f"
    assert place.names() == {}
    assert place.read("a") is None
    file.write_bytes(bytes(range(256)) * 1000)
    place.upload(file, "b/c")
    place.write("a", b"1")
    place.write("a", b"22")
    place.write("bb", b"")
    assert place.names() == {"a": 2, "b/c": 256_000, "bb": 0}
    assert place.names("b") == {"b/c": 256_000}
    place.download("b/c", tmp_path / "new" / "g")
    assert (tmp_path / "new" / "g").read_bytes() == file.read_bytes()
    place.remove("a")
    place.remove("a")
    assert place.names("a") == {}
    with pytest.raises(FileNotFoundError):
        place.download("a", tmp_path / "h")
    assert not (tmp_path / "h").exists()


def test_objects_that_are_folders_are_none_and_none_lies_outside(url):
    place = Place(f"{url}/markers")
    place.write("a/b", b"1")
    for marker in ("", "a/"):
        place._objects.pipe_file(f"{place._root}/{marker}", b"")
    assert place.names() == {"a/b": 1}
    place.write("a/../../c", b"1")
    with pytest.raises(UserError, match="would lie outside"):
        place.names()


def test_of_many_at_once_one_creates(url):
    place, made = Place(url), []
    threads = [
        threading.Thread(target=lambda i=i: made.append(place.create("a", b"%d" % i)))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False] * 11 + [True]


def test_who_creates_again_because_an_answer_was_lost_has_created(url):
    place = Place(url)
    assert place.create("a", b"mine")
    assert place.create("a", b"mine")
    assert not place.create("a", b"yours")
    assert place.read("a") == b"mine"


def test_a_network_that_comes_back_is_waited_for(url, wire, caplog, monkeypatch):
    place = Place(url)
    monkeypatch.setattr(type(place._objects), "retries", 1)
    assert place.read("a") is None  # an answer too
    monkeypatch.setattr(storage, "FIRST", 0.5)
    wire.cut()
    Objects(place).beat(1, b"")  # a beat that fails says nothing
    start = time.monotonic()
    threading.Timer(4, wire.mend).start()
    place.write("a", b"2")
    assert time.monotonic() - start > 3.5
    assert place.read("a") == b"2"
    assert "does not answer" in caplog.text


def test_who_has_never_heard_of_a_bucket_hears_soon_that_it_does_not_answer(url, wire, monkeypatch):
    monkeypatch.setattr(storage, "FIRST", 0.5)
    wire.cut()
    start = time.monotonic()
    with pytest.raises(UserError, match=f"cannot reach {url} .*the network"):
        Place(url).names()
    assert time.monotonic() - start < 15


def test_what_no_attempt_would_cure():
    assert storage._lasts(OSError(errno.ENOSPC, "No space left on device"))
    assert storage._lasts(Exception("Forbidden: https://storage.googleapis.com/b/o"))
    assert not storage._lasts(OSError(errno.ECONNRESET, "Connection reset by peer"))


@pytest.fixture
def at_once(monkeypatch):
    """Neither attempt nor pause follows the first error."""
    monkeypatch.setattr(storage, "FIRST", 60.0)
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 30


@pytest.mark.usefixtures("at_once")
def test_a_bucket_that_is_not_there_is_said_at_once(wire):
    with pytest.raises(UserError, match=r"cannot reach s3://nobodys/a \(The specified bucket does"):
        Place("s3://nobodys/a").names()


@pytest.mark.usefixtures("at_once")
def test_missing_credentials_are_said_at_once(url, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    forget()
    with pytest.raises(UserError, match=r"cannot reach \S+ \(.*credentials.*\)"):
        Place(url).names()


def test_a_desk_stores_what_has_changed_and_last_what_says_that_it_is_whole(url, monkeypatch):
    stored = []
    upload = Place.upload
    monkeypatch.setattr(
        Place, "upload", lambda self, file, name: (stored.append(name), upload(self, file, name))
    )
    here = desk.at_hand(Path(url))
    assert desk.at_hand(Path(url)) == here
    names = ("run.json", "z/config.json", "z/weights", "apart/b", "apart.tmp/c", ".hidden", "a")
    for name in names:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(name)
    desk.store(here, but=("apart",))
    assert stored == ["a", "z/weights", "z/config.json", "run.json"]
    desk.store(here, but=("apart",))
    assert len(stored) == 4
    (here / "a").write_text("more than before")
    desk.store(here, but=("apart",))
    assert stored[4:] == ["a"]
    assert desk.named(here / "a") == f"{url}/a"
    assert desk.spoken(f"in {here}: b") == f"in {url}: b"


def test_what_is_stored_apart_may_come_and_go_meanwhile(url, monkeypatch):
    here, walk = desk.at_hand(Path(url)), os.scandir
    for name in ("a", "apart.tmp/b"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(name)

    def gone(path):
        if str(path).endswith("apart.tmp"):
            raise FileNotFoundError(path)
        return walk(path)

    monkeypatch.setattr(os, "scandir", gone)
    desk.store(here, but=("apart",))
    assert desk.entries(here) == {"a": {""}}


def test_a_desk_elsewhere_fetches_and_drops(url):
    here = desk.at_hand(Path(url))
    for name in ("4/a", "4/b/c", "44/a", "5/config.json"):
        (here / name).parent.mkdir(exist_ok=True, parents=True)
        (here / name).write_text(name)
    desk.store(here)
    forget()
    there = desk.at_hand(Path(url))
    assert there != here
    assert desk.entries(there) == {"4": {"a", "b/c"}, "44": {"a"}, "5": {"config.json"}}
    desk.fetch(there / "4")
    assert [p.relative_to(there).as_posix() for p in sorted(there.rglob("*")) if p.is_file()] == [
        "4/a",
        "4/b/c",
    ]
    desk.release(there / "4")
    assert not (there / "4").exists()
    assert desk.exists(there / "4")
    desk.drop(there / "4")
    assert desk.entries(there) == {"44": {"a"}, "5": {"config.json"}}


def test_nothing_is_stored_or_removed_once_the_guard_objects(url):
    here = desk.at_hand(Path(url))
    (here / "a").write_text("a")
    desk.store(here)

    def no():
        raise UserError("not ours")

    desk.guard(here, no)
    (here / "a").write_text("other")
    for act in (desk.store, desk.drop):
        with pytest.raises(UserError, match="not ours"):
            act(here / "a")
    assert Place(url).names() == {"a": 1}


def test_a_path_in_a_file_system_is_at_hand_as_it_is(tmp_path):
    (tmp_path / "a").write_text("a")
    assert desk.at_hand(tmp_path) == tmp_path
    assert desk.place(tmp_path) is None
    for act in (desk.fetch, desk.bring, desk.store, desk.drop, desk.release):
        act(tmp_path)
    assert (tmp_path / "a").read_text() == "a"


def test_what_a_killed_process_left_behind_is_removed_and_what_is_in_use_stays(
    url, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = (
        "import sys, time; from pathlib import Path; from jaxrl_llm import desk\n"
        "print(desk.at_hand(Path(sys.argv[1])), flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, url],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as other:  # fmt: skip
        assert other.stdout
        theirs = Path(other.stdout.readline().strip())
        desk.at_hand(Path(url) / "a")
        assert theirs.is_dir()
        other.kill()
        other.wait()
    here = desk.at_hand(Path(url) / "b")
    assert here.is_dir()
    assert not theirs.parent.exists()


# The lock.


def written(url, number=1, **changes):
    """The lock of a process on another machine."""
    there = this_process() | {"machine": "another", "host": "node7", **changes}
    Place(url).write(f"lock/{number:06d}", json.dumps(there | {"beat": 0}).encode())
    return there


def test_a_second_trainer_hears_who_holds_it_and_a_dead_one_is_replaced_at_once(url):
    program = HOLDER.replace("Path(sys.argv[1])", "desk.at_hand(Path(sys.argv[1]))").replace(
        "from pathlib", "from jaxrl_llm import desk\nfrom pathlib"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        here = desk.at_hand(Path(url))
        with (
            pytest.raises(UserError, match=f"in use by process {holder.pid} on "),
            lock.hold(here),
        ):
            pass
        holder.kill()
        holder.wait()
        start = time.monotonic()
        with lock.hold(here):
            assert time.monotonic() - start < 30
            assert list(Place(url).names()) == ["lock/000002"]
    assert Place(url).read("lock/000002") == b"{}"
    with lock.hold(here):
        assert list(Place(url).names()) == ["lock/000003"]


def test_elsewhere_a_beating_holder_is_alive_and_a_silent_one_is_given_up(url):
    there, here, beats = written(url), desk.at_hand(Path(url)), iter(range(1, 100))
    done = threading.Event()

    def beat():
        while not done.wait(0.1):
            content = json.dumps(there | {"beat": next(beats)}).encode()
            Place(url).write("lock/000001", content)

    heart = threading.Thread(target=beat)
    heart.start()
    with pytest.raises(UserError, match=r"in use by process .* on node7"), lock.hold(here, stale=5):
        pass
    done.set()
    heart.join()
    start, said = time.monotonic(), []
    with lock.hold(here, said.append, stale=0.5):
        assert 0.5 <= time.monotonic() - start < 60
    assert "watching" in said[0]


def test_it_beats(url):
    with lock.hold(desk.at_hand(Path(url)), stale=0.4):
        first, until = Place(url).read("lock/000001"), time.monotonic() + 10
        while Place(url).read("lock/000001") == first:
            assert time.monotonic() < until
            time.sleep(0.05)


def test_who_stood_still_stores_nothing_more_and_takes_nothing_back(url):
    here = desk.at_hand(Path(url))
    with lock.hold(here, stale=0.2) as check:
        check()
        other = written(url, number=2)
        (here / "a").write_text("a")
        with pytest.raises(UserError, match=r"no longer of this run but of process .* on node7"):
            desk.store(here)
        time.sleep(0.3)  # it beats on
    assert holder_of(Lock(Objects(Place(url))).latest()[1]) == other
    assert "a" not in Place(url).names()


def test_who_comes_late_with_a_number_that_was_free_once_does_not_hold(url):
    """It saw a dead holder, then slept while two others took its place and the first number was removed."""
    written(url, number=3)
    assert not Lock(Objects(Place(url))).take(2, this_process())
    assert list(Place(url).names()) == ["lock/000003"]


def test_of_many_at_once_one_gets_it(url):
    """All see the lock of a dead process; each either holds it alone or is refused."""
    written(url, machine=machine(), started="1")
    one_of_many_holds(desk.at_hand(Path(url)))
