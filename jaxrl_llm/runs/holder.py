"""Who holds a lock: a process of this machine, known to be alive or dead, or one elsewhere."""

import os
import socket
import uuid
from pathlib import Path
from typing import Any

Holder = dict[str, Any]


def this_process() -> Holder:
    """Who this process is, in a way that no other process shares."""
    return {
        "host": socket.gethostname(),
        "machine": machine(),
        "process": os.getpid(),
        "started": started(os.getpid()),
        "key": uuid.uuid4().hex,
    }


def alive(holder: Holder) -> bool:
    """Whether the holder is a process of this machine that runs."""
    return _is_here(holder) and not known_dead(holder)


def known_dead(holder: Holder) -> bool:
    """Whether the holder was a process of this machine, and is no more."""
    return _is_here(holder) and started(holder["process"]) != holder.get("started")


def _is_here(holder: Holder) -> bool:
    return isinstance(holder.get("process"), int) and holder.get("machine") == machine()


def machine() -> str:
    """This boot of this machine, as the processes that can see one another share it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux: processes are told apart by number alone
        return f"{socket.gethostname()} {uuid.getnode()}"


def started(process: int) -> str | None:
    """When a process of this machine started; None if there is none, or only what is left of it."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in "ZX" else fields[19]
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "running"


def name(holder: Holder) -> str:
    """What people call it."""
    if "process" not in holder:
        return "somebody who left no name"
    return f"process {holder['process']} on {holder.get('host', 'an unknown host')}"
