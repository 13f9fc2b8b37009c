"""One trainer a folder."""

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
from jaxrl_llm.runs.lock_file import NAME, LockFile

HOLDER = """
import sys, time
from pathlib import Path
from jaxrl_llm.runs import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def written(folder, **changes):
    """The lock of a process on another machine."""
    there = this_process() | {"machine": "another", "host": "node7", **changes}
    (folder / NAME).write_text(json.dumps(there))
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
            assert time.monotonic() - start < 5
    assert not list(tmp_path.iterdir())


def test_another_process_with_the_number_of_the_dead_one_is_not_the_holder(tmp_path):
    written(tmp_path, machine=machine(), started="1")
    with lock.hold(tmp_path, stale=60):
        pass


def test_elsewhere_a_beating_holder_is_alive_whatever_its_clock_says(tmp_path):
    written(tmp_path)
    path, done = tmp_path / NAME, threading.Event()

    def beat():  # with a clock that goes backwards
        for i in range(1, 1000):
            if done.wait(0.05):
                return
            os.utime(path, (10**9 - i, 10**9 - i))

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
    os.utime(tmp_path / NAME, (2**33, 2**33))  # far in the future of our clock
    start = time.monotonic()
    with lock.hold(tmp_path, stale=0.5) as check:
        assert 0.5 <= time.monotonic() - start < 5
        check()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xff", b'{"process": "x"}'])
def test_a_lock_that_says_nothing_is_given_up_too(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with lock.hold(tmp_path, stale=0.3):
        pass


def test_who_lost_the_folder_is_told_and_leaves_the_new_holder_alone(tmp_path):
    with lock.hold(tmp_path) as check:
        other = written(tmp_path)
        with pytest.raises(UserError, match=r"no longer of this run but of process .* on node7"):
            check()
    assert json.loads((tmp_path / NAME).read_text()) == other


def test_who_slept_while_another_came_and_went_is_told(tmp_path):
    with lock.hold(tmp_path) as check:
        (tmp_path / NAME).unlink()
        with pytest.raises(UserError, match="no longer of this run"):
            check()


def test_it_beats(tmp_path):
    with lock.hold(tmp_path, stale=0.2):
        before = LockFile(tmp_path).last_beat()
        until = time.monotonic() + 10
        while LockFile(tmp_path).last_beat() == before:
            assert time.monotonic() < until
            time.sleep(0.01)


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
