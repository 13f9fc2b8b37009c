"""`python keeper.py PARENT FOLDER COMMAND...`: runs a command until its own standard input ends or PARENT does.

However the parent ends, kill -9 included, the command and all its children end with it, and FOLDER, which
it read from, is removed. If this process is killed, the command is killed by the kernel, and its children by a
shell that waits for that alone. It is a process of its own and imports nothing of this package.
"""

import contextlib
import ctypes
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time

GRACE = 10.0  # seconds to end by itself
POLL = 0.2
PR_SET_PDEATHSIG = 1
AFTER_US = "trap '' TERM INT HUP; read _; kill -9 0"  # its input ends when its only writer is gone


def main(parent: int, folder: str, command: list[str]) -> None:
    """Waits for the command, for the end of input or for the parent's, and leaves no process of the group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # these may go to a whole job, the trainer decides
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    heir = subprocess.Popen(["/bin/sh", "-c", AFTER_US], stdin=subprocess.PIPE)  # noqa: S603
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_us())  # noqa: S603
    while child.poll() is None and os.getppid() == parent:
        if select.select([sys.stdin], [], [], POLL)[0]:
            break
    end(child, {os.getpid(), heir.pid})
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # whoever is left of the group, and this process


def end(child: subprocess.Popen, keeping: set[int]) -> None:
    """Ends the command and its children, gently, then not; returns when the command is gone.

    The last of them to end removes what the others had in shared memory, so all get their time. Those that are
    `keeping` are not waited for.
    """
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while (child.poll() is None or _others(keeping)) and time.monotonic() < deadline:
        time.sleep(POLL)
    child.kill()
    child.wait()


def _others(keeping: set[int]) -> bool:
    """Whether this group has living processes but these, as far as /proc tells."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpid() and int(path.parent.name) not in keeping and state != "Z":
                return True
    return False


def _die_with_us():
    """What a child does before it becomes the command: the kernel is to kill it when its parent ends (Linux).

    The parent is a thread to the kernel; this process has one only.
    """
    prctl, us = getattr(ctypes.CDLL(None), "prctl", None), os.getpid()

    def before() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != us:
            os._exit(1)

    return before


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
