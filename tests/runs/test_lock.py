"""One trainer a folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import lock
from jaxrl_llm.runs.holder import machine, started, this_process
from jaxrl_llm.runs.lock_notes import FREE, Files, Lock

HOLDER = """
import sys, time
from pathlib import Path
from jaxrl_llm.runs import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def note(folder, number=1):
    return folder / "lock" / f"{number:06d}"


def written(folder, number=1, **changes):
    """The lock of a process on another machine."""
    there = this_process() | {"machine": "another", "host": "node7", **changes}
    note(folder).parent.mkdir(exist_ok=True)
    note(folder, number).write_text(json.dumps(there | {"beat": "0"}))
    return there


def test_a_second_trainer_hears_who_holds_it_and_a_dead_one_is_replaced_at_once(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=f"in use by process {holder.pid} on "),
            lock.hold(tmp_path),
        ):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        while started(holder.pid) is not None:  # a zombie counts as dead, which it now is
            time.sleep(0.01)
        start = time.monotonic()
        with lock.hold(tmp_path) as check:
            check()
            assert time.monotonic() - start < 60
            assert [*note(tmp_path).parent.iterdir()] == [note(tmp_path, 2)]
    assert note(tmp_path, 2).read_bytes().strip() == FREE
    with lock.hold(tmp_path):
        assert [*note(tmp_path).parent.iterdir()] == [note(tmp_path, 3)]


def test_another_process_with_the_number_of_the_dead_one_is_not_the_holder(tmp_path):
    written(tmp_path, machine=machine(), started="1")
    with lock.hold(tmp_path, stale=60):
        pass


def test_elsewhere_a_beating_holder_is_alive_whatever_its_clock_says(tmp_path):
    there, done = written(tmp_path), threading.Event()

    def beat():  # with a clock that goes backwards
        for i in range(1, 1000):
            if done.wait(0.05):
                return
            Files(tmp_path).write(1, json.dumps(there | {"beat": str(i % 10)}).encode())
            os.utime(note(tmp_path), (10**9 - i, 10**9 - i))

    heart, said = threading.Thread(target=beat), []
    heart.start()
    try:
        with pytest.raises(UserError, match=r"in use by process .* on node7"), \
                lock.hold(tmp_path, said.append, stale=10):  # fmt: skip
            pass
    finally:
        done.set()
        heart.join()
    assert "watching for up to 10 s" in said[0]


def test_elsewhere_a_holder_without_a_heartbeat_is_given_up(tmp_path):
    written(tmp_path)
    os.utime(note(tmp_path), (2**33, 2**33))  # far in the future of our clock
    start = time.monotonic()
    with lock.hold(tmp_path, stale=0.5) as check:
        assert 0.5 <= time.monotonic() - start < 60
        check()
    assert note(tmp_path, 2).read_bytes().strip() == FREE


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xff", b'{"process": "x"}'])
def test_a_lock_that_says_nothing_is_given_up_too(tmp_path, content):
    note(tmp_path).parent.mkdir()
    note(tmp_path).write_bytes(content)
    with lock.hold(tmp_path, stale=0.3):
        pass


def test_who_lost_the_folder_is_told_and_leaves_the_new_holder_alone(tmp_path):
    with lock.hold(tmp_path, stale=0.2) as check:
        other = written(tmp_path, number=2)
        with pytest.raises(UserError, match=r"no longer of this run but of process .* on node7"):
            check()
        time.sleep(0.2)  # it beats on
    assert json.loads(note(tmp_path, 2).read_bytes()) == other | {"beat": "0"}


def test_who_slept_while_another_came_and_went_is_told(tmp_path):
    with lock.hold(tmp_path) as check:
        note(tmp_path).unlink()
        with pytest.raises(UserError, match="no longer of this run"):
            check()
    assert not note(tmp_path).exists()


def test_who_comes_late_with_a_number_that_was_free_once_does_not_hold(tmp_path):
    """It saw a dead holder, then slept while two others took its place and the first number was removed."""
    written(tmp_path, number=3)
    assert not Lock(Files(tmp_path)).take(2, this_process())
    assert [*note(tmp_path).parent.iterdir()] == [note(tmp_path, 3)]


def test_it_beats_in_place(tmp_path):
    with lock.hold(tmp_path, stale=0.2):
        before, until = note(tmp_path).read_bytes(), time.monotonic() + 10
        while note(tmp_path).read_bytes() == before:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert note(tmp_path).stat().st_size == len(before)


def test_on_a_full_disk_it_is_given_back_too(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, "full")

    with lock.hold(tmp_path):
        monkeypatch.setattr(Files, "write", write)
    assert Lock(Files(tmp_path)).latest()[1] == FREE


def one_of_many_holds(folder):
    """Each of eight threads either holds the lock alone or is refused."""
    inside, most, refused, guard = [], [], [], threading.Lock()

    def attempt():
        try:
            with lock.hold(folder):
                with guard:
                    inside.append(1)
                    most.append(len(inside))
                time.sleep(0.2)
                with guard:
                    inside.pop()
        except UserError:
            refused.append(1)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) + len(refused) == 8


def test_of_many_at_once_one_gets_it(tmp_path):
    """All see the lock of a dead process; each either holds it alone or is refused."""
    written(tmp_path, machine=machine(), started="1")
    one_of_many_holds(tmp_path)


def test_it_beats_several_times_before_it_would_be_stale(tmp_path):
    with lock.hold(tmp_path, stale=2.0):
        time.sleep(1.8)
        said = note(tmp_path).read_bytes()
    assert int(json.loads(said)["beat"]) >= 2
