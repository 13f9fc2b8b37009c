"""`python -m tests.training.killed MOMENT NTH DELAY ARGUMENTS...`: jaxrl-llm, killed -9 in the middle.

DELAY seconds after the NTH time that the run enters MOMENT, wherever it is then.
"""

import os
import signal
import sys
import threading
import time

from jaxrl_llm import storage
from jaxrl_llm.cli import main as cli
from jaxrl_llm.learning import update
from jaxrl_llm.training import checkpoint

MOMENTS = {
    "update": (update, "place"),
    "save": (checkpoint.Checkpoints, "save"),
    "push": (storage, "push"),
}


def main(moment: str, nth: str, delay: str, *arguments: str) -> None:
    owner, name = MOMENTS[moment]
    inner, calls = getattr(owner, name), iter(range(1, 10**9))

    def watched(*args, **kwargs):
        if next(calls) == int(nth):
            threading.Thread(target=kill, daemon=True).start()
        return inner(*args, **kwargs)

    def kill():
        time.sleep(float(delay))
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, watched)
    cli.main(list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
