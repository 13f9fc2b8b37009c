"""Runs of jaxrl-llm that start at once: forked from a process that has imported everything, and computed nothing.

    {"start": {...}}    -> its process number; it has a process group of its own
    {"poll": pid}       -> null while it runs, else its exit code, or minus the signal

on standard input and output, a line of JSON each. What a run is started with: `arguments`, `log` (a file for its
output), `environment`, `moments` (a file: a line for each moment that the run comes to), `arm` (for shim.c),
`hang` (a moment and how often it came before: there the main thread waits for ever, or what `WAYS` says third).
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401 (these take long to import)
from transformers import PreTrainedTokenizerFast  # noqa: F401

from jaxrl_llm import storage
from jaxrl_llm.cli.main import entry
from jaxrl_llm.learning import imitate, update
from jaxrl_llm.tasks import task
from jaxrl_llm.training import checkpoint, run, stream
from tests.chaos import small  # noqa: F401

MOMENTS = (
    (run.Components, "make", "data"),  # processes have met by then
    (storage, "locked", "start"),
    (run, "_resumed", "resume"),
    (imitate, "demonstrations", "warm_start"),
    (stream.Rollouts, "next", "rollout"),
    (update, "place", "update"),
    (run, "evaluate", "evaluation"),
    (checkpoint.Checkpoints, "save", "save"),
    (run.Run, "test", "end"),
)
REWARD = (task, "_plain", "reward")  # in a reward, where signals interrupt Python; not noted


def with_an_alarm() -> None:
    """Limits its time by SIGALRM, takes that away, and hangs in what comes then."""
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    while True:
        time.sleep(1.0)


def exiting() -> None:
    """Has a child that ends as programs do."""
    if (child := os.fork()) == 0:
        sys.exit(0)
    os.waitpid(child, 0)


WAYS = {"with an alarm": with_an_alarm, "exits": exiting}


def watch(moments: str, hang: list[Any], shim: ctypes.CDLL) -> None:
    """Notes each moment as the run comes to it; the one to `hang` in does not end."""
    checkpoint.WRITTEN = 20  # seconds: a checkpoint is small here
    noted = os.open(moments, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    met = Counter[str]()
    for owner, name, moment in (*MOMENTS, REWARD):
        inner = getattr(owner, name)

        def watched(*args: Any, inner: Any = inner, moment: str = moment, **kwargs: Any) -> Any:
            if moment != "reward":
                os.write(noted, f"{moment}\n".encode())
            if [moment, met[moment]] == hang[:2]:
                os.write(noted, b"hanging\n")
                WAYS[hang[2]]() if hang[2:] else shim.chaos_block()
            met[moment] += 1
            return inner(*args, **kwargs)

        setattr(owner, name, watched)


def become(request: dict[str, Any], shim: ctypes.CDLL) -> None:
    """What the child does: it is the run."""
    os.setsid()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background ignores these
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for there, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(there, number)
    faulthandler.register(signal.SIGUSR2)  # a run that hangs is asked where
    os.environ.update(request["environment"])
    watch(request["moments"], request["hang"], shim)
    where, *numbers = request["arm"]
    shim.chaos_arm(where.encode(), *map(ctypes.c_long, numbers))
    sys.argv = ["jaxrl-llm", *request["arguments"]]
    try:
        entry()
    finally:
        Path(os.environ["CHAOS_COUNT"]).write_text(str(shim.chaos_count()))


def main() -> None:
    """Answers requests until there are no more."""
    shim, ended = ctypes.CDLL(os.environ.pop("LD_PRELOAD")), dict[int, int]()
    for line in sys.stdin:
        request = json.loads(line)
        if start := request.get("start"):
            if (answer := os.fork()) == 0:
                return become(start, shim)
            ended.pop(answer, None)  # numbers come back
        else:
            pid = request["poll"]
            if pid and pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    main()
