"""A run in a process of its own, as a user starts it."""

import contextlib
import os
import pathlib
import random
import socket
import subprocess
import sys

import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.training import journal

ROOT = pathlib.Path(__file__).parents[2]
QUICK = "tests/training/quick.py"


def port():
    """One that is free, not of those that the kernel gives to whoever asks for any, nor another worker's."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        number = random.randrange(12_000 + worker % 16, 32_000, 16)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number


def train(environment, out, *flags, program=("-m", "jaxrl_llm"), config=QUICK):
    command = [sys.executable, *program, "train", config, "--out", str(out), *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )


def finished(environment, out, *flags, **how):
    """The folder of a run that came to its end."""
    done = train(environment, out, *flags, **how)
    assert done.returncode == 0, done.stderr
    return out


def metrics(out):
    """Everything but the clock."""
    return [
        {name: value for name, value in record.items() if not name.startswith("time/")}
        for record in journal.read(out)
    ]


def steady(files):
    """Files in an order that does not hang on their names, some of which a checkpoint draws."""
    return sorted(files, key=lambda path: (str(path.parent), path.stat().st_size))


def contents(out):
    """Every file of a run and what it holds, but who works in it."""
    files = (p for p in out.rglob("*") if p.is_file() and p.name != "lock")
    return {p: p.read_bytes() for p in files}


def written(path, text=""):
    """The file, its folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def fails(capsys, *arguments):
    """The one line that a command ends with, after warnings, for what is wrong outside."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith("warning: "))
    assert error.startswith("jaxrl-llm: ")
    assert error.count("\n") == 1
    return error
