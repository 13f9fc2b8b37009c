"""A terminal that closes, or a pipe that nobody reads any more, ends no run and loses none of its steps."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from jaxrl_llm.training import journal, terminal
from jaxrl_llm.training.leaving import UNFINISHED
from tests.training import process

SPEAKS = """
import pathlib, sys, time
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


def piped(command, **how):
    """The process and what reads its output: a pipe."""
    started = subprocess.Popen(command, stdout=subprocess.PIPE, **how)
    return started, started.stdout


def on_terminal(command, **how):
    """The same with a terminal."""
    ours, theirs = pty.openpty()
    started = subprocess.Popen(command, stdout=theirs, **how)
    os.close(theirs)
    return started, os.fdopen(ours, "rb", 0)


@pytest.mark.parametrize("start", [piped, on_terminal])
def test_what_nobody_takes_is_not_said(start, tmp_path):
    command = [sys.executable, "-c", SPEAKS, str(tmp_path / "mark")]
    said, output = start(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert output.read(1)
    output.close()
    _, complaint = said.communicate(timeout=60)
    assert (said.returncode, complaint) == (0, b"")
    assert (tmp_path / "mark").read_text() == "went on"


@pytest.mark.parametrize("start", [piped, on_terminal])
def test_a_run_whose_terminal_closes_saves_what_it_has(start, environment, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", process.QUICK, "--out", str(out)]
    flags = ["--steps", "1000", "--warm-steps", "0"]
    run, output = start(command + flags, cwd=process.ROOT, env={**environment, "TERM": "xterm"})
    said = b""
    while not re.search(rb"\b[1-9]\d*/1000", said):
        said += (read := output.read(1))
        assert read, said
    output.close()
    run.send_signal(signal.SIGHUP)
    assert run.wait(timeout=120) == UNFINISHED
    last = max(record["step"] for record in journal.read(out))
    assert (out / "checkpoints" / str(last)).is_dir()


def test_what_a_policy_wrote_is_printed_as_it_is(capsys):
    terminal.plain().print("2:o:3 :x: [b]a:b:c[/b] " + "x" * 200)
    assert capsys.readouterr().out == "2:o:3 :x: [b]a:b:c[/b] " + "x" * 200 + "\n"
