"""Runs of jaxrl-llm that start at once: forked from a process that has imported everything, and computed nothing.

    {"start": {...}}    -> {"pid": ...}, of a process group of its own
    {"poll": pid}       -> {"status": null while it runs, else its exit code, or minus the signal}

on standard input and output, a line of JSON each. What a run is started with: `arguments`, `log` (a file for its
output), `environment`, `moments` (a file: a line for each moment that the run comes to), `arm` (for shim.c).
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


def _import_all() -> None:
    import matplotlib.pyplot  # noqa: F401
    import transformers  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import tests.chaos.small  # noqa: F401


def _watch(moments: str) -> None:
    """Notes each moment as the run comes to it."""
    from jaxrl_llm import storage
    from jaxrl_llm.learning import imitate, update
    from jaxrl_llm.training import checkpoint, run, stream

    checkpoint.WRITTEN = 20  # seconds: a checkpoint is small here
    noted = os.open(moments, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for owner, name, moment in (
        (run, "parts", "data"),  # processes have met by then
        (storage, "locked", "start"),
        (run, "_newest", "resume"),
        (imitate, "demonstrations", "warm_start"),
        (stream.Stream, "take", "rollout"),
        (update, "place", "update"),
        (run, "evaluate", "evaluation"),
        (checkpoint.Checkpoints, "save", "save"),
        (run, "_test", "end"),
    ):
        inner = getattr(owner, name)

        def watched(*args: Any, inner: Any = inner, moment: str = moment, **kwargs: Any) -> Any:
            os.write(noted, f"{moment}\n".encode())
            return inner(*args, **kwargs)

        setattr(owner, name, watched)


def _become(request: dict[str, Any], shim: ctypes.CDLL) -> None:
    """What the child does before it is the run."""
    os.setsid()
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell's background ignores these
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for there, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(there, number)
    faulthandler.register(signal.SIGUSR2)  # a run that hangs is asked where
    os.environ.update(request["environment"])
    _watch(request["moments"])
    where, *numbers = request["arm"]
    shim.chaos_arm(where.encode(), *map(ctypes.c_long, numbers))


def _serve(shim: ctypes.CDLL) -> list[str]:
    """Answers requests for ever; a child returns, with the arguments of its run."""
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if (start := request.get("start")) is not None:
            if (pid := os.fork()) == 0:
                _become(start, shim)
                return start["arguments"]
            ended.pop(pid, None)  # numbers come back
            answer: dict[str, Any] = {"pid": pid}
        else:
            pid = request["poll"]
            found, status = os.waitpid(pid, os.WNOHANG) if pid not in ended else (0, 0)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
            answer = {"status": ended.get(pid)}
        print(json.dumps(answer), flush=True)
    sys.exit()


def main() -> None:
    """Imports, forks; in a child, runs."""
    shim = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))
    _import_all()
    print(json.dumps({"ready": True}), flush=True)
    sys.argv = ["jaxrl-llm", *_serve(shim)]
    from jaxrl_llm.cli.main import entry

    counts = os.environ.get("CHAOS_COUNT")
    try:
        entry()
    finally:
        if counts:
            Path(counts).write_text(str(shim.chaos_count()))


if __name__ == "__main__":
    main()
