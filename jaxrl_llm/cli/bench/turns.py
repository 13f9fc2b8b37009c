"""Timings that can be compared: taken in turn, ours and a peer's in a process of its own."""

import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.errors import UserError


def least_one(**counts: int) -> None:
    """A UserError for the first count that is less than one."""
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"--{name.replace('_', '-')} {count}: at least 1")


def in_turn(runs: dict[str, Callable[[], Any]], repeats: int, console) -> dict[str, list[float]]:
    """Seconds of each run, taken in turn (A B C A B C ...) after a first call of each that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with console.status("compiling") as status:
        for repeat in range(repeats + 1):
            for name, run in runs.items():
                status.update(
                    f"{'warm-up' if repeat == 0 else f'round {repeat} of {repeats}'}: {name}"
                )
                start = time.perf_counter()
                jax.block_until_ready(run())
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


class Peer:
    """A script that answers every line of input with a piece of work; one call, one piece."""

    def __init__(
        self, script: pathlib.Path, python: pathlib.Path, model: pathlib.Path, arguments: list[str]
    ):
        try:
            self.process = subprocess.Popen(  # noqa: S603
                [str(python), str(script), str(model), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise UserError(f"--peer-python {python}: {error.strerror}") from error

    def __call__(self):
        print("step", file=self.process.stdin, flush=True)
        if next(iter(self.process.stdout or ()), "").strip() != "done":
            raise UserError(
                f"the peer stopped (exit {self.process.wait()}): its message stands above"
            )

    def close(self):
        self.process.communicate()
