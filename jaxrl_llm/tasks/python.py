"""Python that a model wrote, run in processes with limits, as a tool: `Toolbox([python])`.

This is a limit, not a jail. A program is one process of one thread with a temporary folder of its
own and limits of time, memory, output and the size of a file. The kernel of Linux (5.13 or later,
x86-64 or ARM; no root is needed) refuses it all files but Python's own and that folder (Landlock),
and sockets, other programs and signals (seccomp). It may learn names of files, fill the disk with
many files while it runs, and use a flaw of the kernel. On other systems it can reach files and
network, and the log says so.
"""

import ctypes
import json
import logging
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from typing import NoReturn

from jaxrl_llm.tasks.workers import Workers, serve

logger = logging.getLogger(__name__)

_LIMITS = {"FSIZE": 16 << 20, "NOFILE": 64, "CORE": 0, "NPROC": 0}  # a file's bytes, open files
_OUTPUT = 10_000  # characters
_SLOWER = 4  # wall-clock seconds for one of CPU time
_READ = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/urandom")
_REFUSED = {  # the architecture's code, and its numbers of system calls
    "x86_64": (
        0xC000003E,
        *(56, 57, 58, 59, 322, 435, 272, 308),  # clone, fork, vfork, execve, unshare, setns
        *(41, 425, 62, 129, 200, 234, 297, 424),  # socket, io_uring_setup, kill and its like
        *(101, 310, 311, 438, 157, 160, 302),  # ptrace and its like, prctl, setrlimit, prlimit
        *(90, 91, 268, 452, 92, 93, 94, 260),  # chmod, chown and their like
    ),
    "aarch64": (
        0xC00000B7,
        *(220, 221, 281, 435, 97, 268),
        *(198, 425, 129, 138, 130, 131, 240, 424),
        *(117, 270, 271, 438, 167, 164, 261),
        *(52, 53, 452, 54, 55),
    ),
}.get(platform.machine() if sys.platform == "linux" else "", ())  # fmt: skip
_RULESET, _RULE, _RESTRICT = 444, 445, 446  # system calls of Landlock
_LIBC = ctypes.CDLL(None, use_errno=True)


def interpreter(
    workers: int = 2, seconds: float = 5.0, memory: int = 1 << 30
) -> Callable[[str], str]:
    """The tool `python`: `workers` programs run at a time.

    A program has `seconds` of CPU time, four times that on the clock, and `memory` bytes of address
    space.
    """

    @cache
    def started() -> Workers:
        if not _contained():
            logger.warning("the model's programs can reach files and network on this system")
        return Workers(workers, "jaxrl_llm.tasks.python")

    def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept for the next program.

        Args:
            code: The program.
        """
        # the worker only waits, and deletes files
        reply = started().ask([code, seconds, memory], 10 * seconds)
        if not reply.startswith('"'):
            raise RuntimeError("the program could not be run")
        return json.loads(reply)

    return python


python = interpreter()


def _contained() -> bool:
    """Whether the kernel can refuse files and sockets to a program."""
    return len(_REFUSED) > 0 and _LIBC.syscall(_RULESET, None, 0, 1) > 0


def _answer(code: str, seconds: float, memory: int) -> str:
    """What a program printed, in JSON, and why it was ended if it was."""
    said, left = b"", lambda: max(0.0, end - time.monotonic())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        reader, writer = os.pipe()
        end = time.monotonic() + _SLOWER * seconds
        if not (pid := os.fork()):
            _run(code, seconds, memory, folder, writer)
        os.close(writer)
        while len(said) <= 4 * _OUTPUT and wait([reader], left()):  # in UTF-8
            if not (piece := os.read(reader, 1 << 16)):
                break
            said += piece
        late = not left()
        for kill in (os.kill, os.killpg):  # it has a group if it came that far
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(reader)
    text, number, why = said.decode(errors="replace"), os.WTERMSIG(status), ""
    if len(text) > _OUTPUT:
        why = f"it printed more than {_OUTPUT} characters"
    elif late or number == signal.SIGXCPU:
        why = f"it took more than {seconds:g} s"
    elif number not in (0, signal.SIGKILL):
        why = signal.strsignal(number)
    text = "\n".join([text[:_OUTPUT].strip(), *([f"(ended: {why})"] if why else [])])
    return json.dumps(text.strip() or "(nothing was printed)")


def _run(code: str, seconds: float, memory: int, folder: str, writer: int) -> NoReturn:
    """Becomes the program; what it prints goes to `writer`."""
    try:
        os.setsid()
        os.chdir(folder)
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), writer, writer)):
            os.dup2(source, target)
        os.closerange(3, 1 << 16)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
        os.environ |= {"HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"}
        sys.path.remove(os.environ["PYTHONPATH"])  # of this package, and whatever lies beside it
        tempfile.tempdir = folder
        program = compile(code, "program.py", "exec")
        _limit(seconds, memory, folder)
        exec(program, {"__name__": "__main__"})  # noqa: S102 (what this is for)
    except SystemExit:
        pass
    except BaseException as error:
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(shown), limit=-3)
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)


def _limit(seconds: float, memory: int, folder: str) -> None:
    """Limits this process, for good."""
    limits = _LIMITS | ({"AS": memory} if sys.platform == "linux" else {})
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    whole = int(-(-seconds // 1))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))  # the first signal says why
    if _contained():
        _must(_LIBC.prctl(1, signal.SIGKILL, 0, 0, 0))  # if the worker ends
        _must(_LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))  # none of root's powers
        _must(_LIBC.prctl(38, 1, 0, 0, 0))  # nor others to come: the next two ask for it
        _refuse_files(folder)
        _refuse_calls()


def _must(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "a limit cannot be set")
    return result


def _refuse_files(folder: str) -> None:
    """This process reads Python's own files from now on, and does anything in `folder`."""
    version = _LIBC.syscall(_RULESET, None, 0, 1)
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = _must(_LIBC.syscall(_RULESET, struct.pack("Q", everything), 8, 0))
    own = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    for path in filter(os.path.exists, {folder, *own, *_READ}):
        reads = 12 if os.path.isdir(path) else 4  # a file; or files and names in it
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", everything if path == folder else reads, place)
        _must(_LIBC.syscall(_RULE, rules, 1, rule, 0))
        os.close(place)
    _must(_LIBC.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _refuse_calls() -> None:
    """The refused system calls, and all in another architecture's manner, fail from now on."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06  # of the kernel's filters
    architecture, *numbers = _REFUSED
    n = len(numbers)
    lines = [(load, 0, 0, 4), (equal, 0, n + 3, architecture)]
    lines += [(load, 0, 0, 0), (at_least, n + 1, 0, 1 << 30)]
    lines += [(equal, n - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050001)]  # allowed; EPERM
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    _must(_LIBC.prctl(22, 2, struct.pack("HP", len(lines), ctypes.addressof(code)), 0, 0))


if __name__ == "__main__":
    serve(_answer)
