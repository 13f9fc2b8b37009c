"""A peer: `peer.py NAME JOB` says its values as a line of JSON, then works once a line of input."""

import importlib
import json
import os
import sys
from pathlib import Path


def main(name, path):
    """Answers on standard output; what the peer itself prints goes to standard error."""
    job = json.loads(Path(path).read_text())
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        values, work = getattr(importlib.import_module(f"in_{name}"), job["kind"])(job)
        print(json.dumps(values), file=answers, flush=True)
        for _ in sys.stdin:
            work()
            print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
