"""`python -m tests.chaos --count 50 --seed 0`: faults at random moments of small runs, and what becomes of them.

A run must end equal to the undisturbed one bit for bit, or end with one line and get there when it is resumed.
Whatever else happens is a finding, told with the command that makes it again.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.trial import Stage, Trial, trial


def main() -> None:
    """Runs faults, prints a line each and a table at the end; exits with 1 if there were findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, default=len(FAULTS), help="faults; the kinds take turns"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument(
        "--only", action="append", help="a kind; may be given again; a word of it will do"
    )
    parser.add_argument(
        "--vllm", help="the Python of an environment with vLLM, in place of the stand-in"
    )
    parser.add_argument("--out", type=Path, help="a file for the record: a line of JSON a fault")
    parser.add_argument("--bound", type=float, default=240.0, help="seconds that any run may take")
    parser.add_argument("--scratch", type=Path, help="kept, with all runs; else a temporary folder")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    words = given.only or [""]
    kinds = [k for k in FAULTS if k in words] or [k for k in FAULTS if any(w in k for w in words)]
    if not kinds:
        parser.error(f"no such kind; there are: {', '.join(FAULTS)}")
    scratch = given.scratch or Path(tempfile.mkdtemp(prefix="chaos-"))
    scratch.mkdir(parents=True, exist_ok=True)
    stage, done = Stage(scratch, given.vllm, given.bound), []
    try:
        for i in range(given.count):
            one = trial(stage, kinds[i % len(kinds)], given.seed + i)
            done.append(one)
            print(one.line(), flush=True)
            if given.out:
                with given.out.open("a") as file:
                    file.write(json.dumps(vars(one)) + "\n")
    finally:
        stage.close()
        print(table(done), flush=True)
        if not given.scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(1 if any(one.finding for one in done) else 0)


def table(trials: list[Trial]) -> str:
    """How many faults of each kind ended how."""
    ends = list(dict.fromkeys(one.end for one in trials))
    rows = ["| fault | " + " | ".join(ends) + " |", "|---" * (len(ends) + 1) + "|"]
    for kind in dict.fromkeys(one.kind for one in trials):
        counts = [sum(t.kind == kind and t.end == end for t in trials) for end in ends]
        rows.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    seconds = sum(one.seconds for one in trials)
    return "\n".join(
        [*rows, f"{len(trials)} faults in {seconds:.0f} s, {time.strftime('%Y-%m-%d')}"]
    )


if __name__ == "__main__":
    main()
