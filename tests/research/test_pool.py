"""Processes of nothing but a line of Python."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl_llm.research import pool
from jaxrl_llm.training.leaving import UNFINISHED, Stop

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
from jaxrl_llm.research import pool
from jaxrl_llm.training.leaving import Stop, stoppable
stop = Stop()
with stoppable(stop):
    codes = pool.run({"a": [sys.executable, "-S", "-c", sys.argv[1]]}, pathlib.Path("."),
                     workers=1, threads=1, environment={}, stop=stop, say=lambda *_: None)
sys.exit(codes != {"a": 75})
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs lines of Python by name, in a folder of their own."""
    monkeypatch.chdir(tmp_path)

    def run(lines, *, workers=1, stop=None, say=lambda *_: None):
        commands = {name: [sys.executable, "-S", "-c", line] for name, line in lines.items()}
        return pool.run(commands, tmp_path, workers=workers, threads=1, environment={"SAID": "x"},
                        stop=stop or Stop(), say=say)  # fmt: skip

    return run


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_commands_run_in_order_and_say_how_they_ended(run, tmp_path):
    heard, mark = [], "import os; open('order', 'a').write({!r} + os.environ['SAID'])".format
    lines = {"b": mark("b"), "bad": "raise ValueError('no luck')", "a": mark("a")}
    codes = run(lines, say=lambda *said: heard.append(said))
    assert codes == {"b": 0, "bad": 1, "a": 0}
    assert (tmp_path / "order").read_text() == "bxax"
    assert "no luck" in (tmp_path / "bad.log").read_text()
    assert heard == [(name, code) for name in lines for code in (None, codes[name])]


def test_one_that_leaves_unasked_goes_on(run):
    """As a run does that somebody else told to stop."""
    twice = "import os, sys; sys.exit(0 if os.path.exists('begun') else open('begun', 'w') and 75)"
    heard = []
    assert run({"a": twice}, say=lambda *said: heard.append(said[1])) == {"a": 0}
    assert heard == [None, UNFINISHED, None, 0]


def test_when_asked_to_stop_runs_save_and_no_other_starts(run, tmp_path):
    stop, ready = Stop(), (tmp_path / "ready").exists
    threading.Thread(target=lambda: (until(ready), stop.request()), daemon=True).start()
    assert run({"a": WAITS, "b": ""}, stop=stop) == {"a": UNFINISHED, "b": None}
    assert (tmp_path / "saved").exists()


def test_an_error_of_ours_lets_runs_save(run, tmp_path):
    def fails(name, code):
        if name == "b":
            until((tmp_path / "ready").exists)
            raise OSError("nothing can be said")

    with pytest.raises(OSError, match="nothing can be said"):
        run({"a": WAITS, "b": ""}, workers=2, say=fails)
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
    until(ended, seconds=120)
    assert (tmp_path / "saved").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_command_has_its_number_of_cores(run, tmp_path):
    before = os.sched_getaffinity(0)
    tells = "import os, time; print(os.environ['NPROC'], *os.sched_getaffinity(0), flush=True)"
    waits = "\nwhile not os.path.exists('begun'): time.sleep(0.01)"
    run({"a": tells + waits, "b": tells + "; open('begun', 'w')"}, workers=2)
    said = [(tmp_path / f"{name}.log").read_text().split() for name in "ab"]
    assert [(threads, len(cores)) for threads, *cores in said] == [("1", 1)] * 2
    assert said[0] != said[1] or len(before) == 1
    assert os.sched_getaffinity(0) == before
