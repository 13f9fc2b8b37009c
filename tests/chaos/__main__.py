"""`python -m tests.chaos --count 50 --seed 0`: faults at random moments of small runs, and what becomes of them.

A run must end equal to the undisturbed one bit for bit, or end with one line and get there when it is resumed.
Whatever else happens is a finding, told with the command that makes it again.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.faults import FAULTS, REAL
from tests.chaos.trial import Stage, report, trial


def main() -> None:
    """Runs faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--count", type=int, help="faults; the kinds take turns, one each if not given"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument(
        "--only", action="append", help="a kind; may be given again; a word of it will do"
    )
    parser.add_argument("--bound", type=float, default=900.0, help="seconds that any run may take")
    parser.add_argument(
        "--vllm", action="store_true", help="beside a real vLLM, whose Python is JAXRL_VLLM_PYTHON"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    words = given.only or [""]
    there = [k for k, fault in FAULTS.items() if (fault.engine == REAL) == given.vllm]
    kinds = [k for k in there if k in words] or [k for k in there if any(w in k for w in words)]
    if not kinds:
        parser.error(f"no such kind; there are: {', '.join(there)}")
    scratch = Path(tempfile.mkdtemp(prefix="chaos-"))
    stage = Stage(scratch, given.bound)
    try:
        numbers = range(given.count or len(kinds))
        report((trial(stage, kinds[i % len(kinds)], given.seed + i) for i in numbers), scratch)
    finally:
        stage.close()


if __name__ == "__main__":
    main()
