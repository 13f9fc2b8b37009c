"""`python keeper.py PARENT FOLDER COMMAND...`: runs a command for as long as the process PARENT lives.

However the parent ends, kill -9 included, the command and all its children end with it, and FOLDER, which
it read from, is removed. It is a process of its own and imports nothing of this package.
"""

import os
import shutil
import signal
import subprocess
import sys

GRACE = 10.0


def main(parent: int, folder: str, command: list[str]) -> int:
    """Waits for the command, the parent or a signal, whichever is first."""
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    child = subprocess.Popen(command, start_new_session=True)  # noqa: S603
    code = None
    while code is None and not stop and os.getppid() == parent:
        try:
            code = child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
    end(child)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if code is None else code


def end(child: subprocess.Popen) -> None:
    """Ends the command's whole process group: gently, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
