"""Processes of nothing but a line of Python."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_llm.research import fleet

ROOT = Path(__file__).parents[2]
WAITS = """
import os, signal, sys, time
def leave(*_):
    time.sleep(0.3)
    open("saved", "w")
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
with open("written", "w") as file:
    file.write(str(os.getpid()))
os.rename("written", "ready")
time.sleep(120)
"""
PARENT = """
import pathlib, sys
from jaxrl_llm.research import fleet
job = fleet.Job("a", [sys.executable, "-S", "-c", sys.argv[1]], pathlib.Path("a.log"))
states = fleet.run([job], 1, 1, {}, lambda *_: None)
sys.exit(states != {"a": fleet.STOPPED})
"""


def jobs(folder, *lines):
    """(name, after, line of Python) each."""
    return [
        fleet.Job(name, [sys.executable, "-S", "-c", line], folder / f"{name}.log", after)
        for name, after, line in lines
    ]


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_jobs_wait_for_what_they_need_and_fail_with_it(tmp_path):
    mark = lambda name: f"open({str(tmp_path / 'order')!r}, 'a').write({name!r})"
    heard = []
    states = fleet.run(
        jobs(tmp_path, ("b", "a", mark("b")), ("a", "", mark("a")), ("c", "bad", mark("c")),
             ("bad", "", "raise ValueError('no luck')")),
        2, 1, {}, lambda *said: heard.append(said),
    )  # fmt: skip
    assert (tmp_path / "order").read_text() == "ab"
    assert states == {"b": fleet.DONE, "a": fleet.DONE, "c": fleet.FAILED, "bad": fleet.FAILED}
    assert "no luck" in (tmp_path / "bad.log").read_text()
    assert [state for name, state in heard if name == "b"] == [fleet.RUNNING, fleet.DONE]


def test_a_signal_lets_runs_save_and_starts_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def ask():
        until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    states = fleet.run(jobs(tmp_path, ("a", "", WAITS), ("b", "", "")), 1, 1, {}, lambda *_: None)
    assert states == {"a": fleet.STOPPED, "b": fleet.WAITING}
    assert (tmp_path / "saved").exists()


def test_an_error_of_ours_lets_runs_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fails(name, state):
        if name == "b":
            until((tmp_path / "ready").exists)
            raise OSError("nothing can be said")

    with pytest.raises(OSError, match="nothing can be said"):
        fleet.run(jobs(tmp_path, ("a", "", WAITS), ("b", "", "")), 2, 1, {}, fails)
    assert (tmp_path / "saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells of a parent's death")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_runs_save_and_end_when_the_study_is_killed(tmp_path, number):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, WAITS]
    parent = subprocess.Popen(command, cwd=tmp_path, env=environment)
    until((tmp_path / "ready").exists)
    run = Path("/proc", (tmp_path / "ready").read_text(), "stat")
    ended = lambda: not run.exists() or run.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not ended()
    parent.send_signal(number)
    assert parent.wait() == (-number if number == signal.SIGKILL else 0)
    until(ended, seconds=20)
    assert (tmp_path / "saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_job_has_its_number_of_cores(tmp_path):
    before = os.sched_getaffinity(0)
    tells = "import os; print(os.environ['NPROC'], len(os.sched_getaffinity(0)), flush=True)"
    fleet.run(jobs(tmp_path, ("a", "", tells)), 3, 1, {}, lambda *_: None)
    assert (tmp_path / "a.log").read_text().split() == ["1", "1"]
    assert os.sched_getaffinity(0) == before
