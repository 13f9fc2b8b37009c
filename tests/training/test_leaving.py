"""Leaving: asked for by signals and the clock, in good order and in time; and a terminal that closes."""

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest
import rich.table

from jaxrl_llm import storage
from jaxrl_llm.errors import StopRequested
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.training import leaving, terminal
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.leaving import Stop, stoppable


@pytest.fixture(autouse=True)
def _no_end(monkeypatch):
    """Nothing here may end the process of the tests."""
    monkeypatch.setattr(leaving, "_end", lambda *_, **__: None)


def tell(number):
    os.kill(os.getpid(), number)


def wait_for(stop, seconds=60.0):
    until = time.monotonic() + seconds
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.01)
    return stop.requested


@pytest.mark.parametrize("number", leaving.SIGNALS)
def test_each_signal_asks_and_interrupts_nothing(number):
    before = signal.signal(number, signal.SIG_DFL)  # who runs the tests may have it ignored
    try:
        with stoppable(stop := Stop()):
            stop.check()
            tell(number)
            assert wait_for(stop)
            with pytest.raises(StopRequested):
                stop.check()
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_the_clock_asks_and_so_may_any_thread():
    with stoppable(Stop(), minutes=0.002) as _, stoppable(stop := Stop(), minutes=0.002):
        assert wait_for(stop)
    with stoppable(stop := Stop()):
        thread = threading.Thread(target=stop.request)
        thread.start()
        thread.join()
        assert stop.requested


def test_what_was_ignored_stays_ignored():
    """SIGHUP, as nohup leaves it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable(stop := Stop()):
            tell(signal.SIGHUP)
            assert not wait_for(stop, 0.3)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_timer_of_somebody_else_asks_nobody():
    """Such as that of a reward, which limits its time by SIGALRM."""
    rang = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        with stoppable(stop := Stop()):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            assert not wait_for(stop, 0.5)
            tell(signal.SIGTERM)
            assert wait_for(stop)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert rang


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_nothing_is_left_behind():
    """No open pipe, and nothing that is told of signals."""
    before = {*os.listdir("/proc/self/fd")}
    with stoppable(Stop()):
        pass
    assert {*os.listdir("/proc/self/fd")} <= before
    assert signal.set_wakeup_fd(-1) == -1


BUSY = """
import ctypes, os, signal, sys, time
from jaxrl_llm.training import leaving
grace, signals = float(sys.argv[1]), list(map(int, sys.argv[2:]))
leaving.HURRY = 2.0 if signals == [2, 2] else 1000.0
for number in filter(None, signals):
    signal.signal(number, signal.SIG_DFL)
with leaving.stoppable(stop := leaving.Stop(), grace=grace):
    for number in signals:
        os.kill(os.getpid(), number) if number else stop.request()
        time.sleep(0.2)
    ctypes.CDLL(None).sleep(60)  # no signal handler of Python ends a long program
"""


@pytest.mark.parametrize(
    ("grace", "signals", "code", "said"),
    [
        (0.2, [15], leaving.UNFINISHED, "more than 0.2 s"),
        (0.2, [0], leaving.UNFINISHED, "more than 0.2 s"),  # asked by a thread
        (40, [2, 2], 130, "stopping, within 40 s; Ctrl-C again ends at once"),
        (0.5, [15, 1, 10], 75, "--resume"),
    ],
)
def test_the_process_ends_when_its_grace_is_over(grace, signals, code, said):
    command = [sys.executable, "-c", BUSY, str(grace), *map(str, signals)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said)


FORKING = """
import os, signal, sys, threading, time
from jaxrl_llm.training import leaving

leaving.HURRY = 0.2
where, then = sys.argv[1:]
children, ready = [], os.pipe()

def fork():
    if not (child := os.fork()):
        try:
            os.write(ready[1], b"!")
            for _ in range(6000):
                time.sleep(0.01)
                os.kill(os.getpid(), 0)  # a fork of a thread sees signals in few calls (Python 3.13)
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    children.append(child)

os.setpgrp()
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
with leaving.stoppable(stop := leaving.Stop(), grace=300):
    if where == "main":
        fork()
    else:
        (thread := threading.Thread(target=fork)).start()
        thread.join()
    if then == "is terminated":
        os.kill(children[0], signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(children[0], 0)[1]) == signal.SIGTERM
    if then == "is interrupted too":
        os.killpg(0, signal.SIGINT)
    until = time.monotonic() + (60 if then == "is interrupted too" else 0.5)
    while not stop.requested and time.monotonic() < until:
        time.sleep(0.01)
    print("asked" if stop.requested else "not asked", flush=True)
print("the block has ended", flush=True)
if then == "lives on":
    os.kill(children[0], signal.SIGKILL)
"""


AT_ONCE = """
import os, signal
from jaxrl_llm.training import leaving

with leaving.stoppable(stop := leaving.Stop(), grace=30):
    for _ in range(300):
        if not (child := os.fork()):
            signal.pause()
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    print("asked" if stop.requested else "not asked", flush=True)
"""


def test_a_child_that_is_terminated_at_once_stops_nothing():
    """Before its first line it has our handlers, and our pipe."""
    command = [sys.executable, "-c", AT_ONCE]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    assert done.stdout == b"not asked\n"


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("then", ["lives on", "is terminated", "is interrupted too"])
def test_a_forked_child_has_nothing_of_it(where, then):
    """It keeps no block from its end, signals end it, and are not counted here: as in a reward with a pool."""
    command = [sys.executable, "-c", FORKING, where, then]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    asked = "asked" if then == "is interrupted too" else "not asked"
    assert (done.returncode, done.stdout.splitlines()) == (0, [asked, "the block has ended"])


HAMMERED = """
import os, subprocess, sys, time
from jaxrl_llm.training.leaving import Stop, stoppable

hammer = f"import os, signal\\nfor _ in range(5_000): os.kill({os.getpid()}, signal.SIGTERM)"
with stoppable(stop := Stop(), grace=600):
    other = subprocess.Popen([sys.executable, "-c", hammer])
    while other.poll() is None:
        time.sleep(0.0001)
assert stop.requested
"""


def test_a_signal_finds_no_lock_that_it_interrupts():
    subprocess.run([sys.executable, "-c", HAMMERED], check=True, timeout=600)


def test_what_a_run_prints_is_not_captured_by_a_reward(capsys):
    """It may capture what a program prints, while a thread tells how far the run is."""
    console = terminal.console()
    with contextlib.redirect_stdout(io.StringIO()) as captured:
        print("42")
        console.print("1 min so far")
    assert captured.getvalue() == "42\n"
    assert capsys.readouterr().out == "1 min so far\n"


RECORDS = """
import os, sys
from jaxrl_llm.training import terminal
print("before", flush=True)
kept = sys.stdout
with terminal.alone() as out:
    print("of a reward")
    kept.write("of a log\\n")
    os.system("echo of its program")
    out.write("record\\n")
    out.flush()
print("after")
"""


def test_standard_output_has_records_alone():
    done = subprocess.run(
        [sys.executable, "-c", RECORDS], capture_output=True, text=True, check=True
    )
    assert done.stdout == "before\nrecord\nafter\n"
    assert sorted(done.stderr.splitlines()) == ["of a log", "of a reward", "of its program"]


SPEAKS = """
import pathlib, sys
from rich.progress import Progress
from jaxrl_llm.training import terminal
console = terminal.console()
with Progress(console=console):
    console.print("begun")
    sys.stdin.read()
    for _ in range(3):
        console.print("x" * 10_000)
pathlib.Path(sys.argv[1]).write_text("went on")
"""


def piped(command):
    """The process and what reads its output: a pipe."""
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    return started, started.stdout


def on_terminal(command):
    """The same with a terminal."""
    ours, theirs = pty.openpty()
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    return started, os.fdopen(ours, "rb", 0)


@pytest.mark.parametrize("start", [piped, on_terminal])
def test_what_nobody_takes_is_not_said(start, tmp_path):
    said, output = start([sys.executable, "-c", SPEAKS, str(tmp_path / "mark")])
    assert output.read(1)
    output.close()
    _, complaint = said.communicate(timeout=300)
    assert (said.returncode, complaint) == (0, b"")
    assert (tmp_path / "mark").read_text() == "went on"


def test_what_a_policy_wrote_is_printed_as_it_is(capsys):
    terminal.plain().print("2:o:3 :x: [b]a:b:c[/b] " + "x" * 200)
    assert capsys.readouterr().out == "2:o:3 :x: [b]a:b:c[/b] " + "x" * 200 + "\n"


@pytest.mark.parametrize("how", [str, lambda text: rich.table.Table(text, title=text)])
def test_no_text_commands_the_terminal(capsys, how):
    """Such as a response that would empty the screen, name the window, or fill the clipboard."""
    text = "é\x1b[2J\x1b]0;name\x07\x9b2J\r\x08\u202e\ttab\nline\ud800"
    terminal.plain(width=200).print(how(text))
    said = capsys.readouterr().out
    assert r"é\x1b[2J\x1b]0;name\x07\x9b2J\r\x08\u202e" in said
    assert "line\\ud800" in said
    assert not {"\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e"} & {*said}


DROPS_IT = """
import gc, os, signal, sys, time
from jaxrl_llm.cli import main

def drop(phase, info):  # where nothing can be raised
    gc.callbacks.remove(drop)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1.0)

def work(words):
    gc.callbacks.append(drop)
    gc.collect()
    for _ in range(6000):
        time.sleep(0.01)

signal.signal(signal.SIGINT, signal.default_int_handler)
main._run = work
main.entry()
"""


def test_a_ctrl_c_that_is_dropped_comes_again():
    """As in the call-back by which JAX hears of the garbage collector."""
    done = subprocess.run(
        [sys.executable, "-c", DROPS_IT], capture_output=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (130, b"")


WAITING = """
import sys, threading
threading.Thread(target=threading.Event().wait).start()
from jaxrl_llm.cli import main
main.LEAVE, sys.argv = 0.5, ["jaxrl-llm", *sys.argv[1:]]
main.entry()
"""


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["nonsense"], 2)])
def test_threads_that_wait_for_ever_do_not_keep_a_process(words, code):
    """As those of orbax do, if an error of the disk meets one of them alone; the exit code stays."""
    command = [sys.executable, "-c", WAITING, *words]
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert done.returncode == code


def test_nothing_that_is_waited_for_counts_as_stalled():
    """A bucket or a server that is away: these give up first, with their own line."""
    assert max(storage.PATIENCE, Vllm.patience) < leaving.LEAST


def test_a_watch_ends_with_its_block():
    before = {*threading.enumerate()}
    with leaving.stall_watchdog(Clock(), least=60.0, factor=3.0, stalled=pytest.fail):
        [watch] = {*threading.enumerate()} - before
    assert not watch.is_alive()


STALLING = """
import sys, threading, time
from pathlib import Path
from jaxrl_llm.training import leaving
from jaxrl_llm.training.clock import Clock

leaving.LOOK, stop, clock = 0.05, leaving.Stop(), Clock()
stop.stacks, leaving.WRITING = Path(sys.argv[1]), float(sys.argv[2])

def a_reward_that_never_ends():
    time.sleep(60)

with leaving.stall_watchdog(clock, least=1.0, factor=3.0, stalled=stop.stall):
    for _ in range(20):
        with clock("update"):
            time.sleep(0.01)
    for _ in range(12):  # longer than the limit as a whole, but with signs of life
        with clock("rollout"):
            time.sleep(0.1)
            clock.heartbeat()
    with clock("update"):
        a_reward_that_never_ends()
"""


@pytest.mark.parametrize("blocked", [False, True], ids=["a folder", "a folder that blocks too"])
def test_a_run_that_stalls_says_where_and_ends(tmp_path, blocked):
    stacks = tmp_path / "stacks.txt"
    if blocked:
        os.mkfifo(stacks)  # opening it for writing waits for a reader
    command = [sys.executable, "-c", STALLING, str(stacks), "1" if blocked else "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == leaving.STALLED
    assert "no progress in the phase update" in done.stderr
    assert ("a_reward_that_never_ends" in done.stderr) == blocked
    assert (f"in {stacks}" in done.stderr) != blocked
    if not blocked:
        assert "a_reward_that_never_ends" in stacks.read_text()
