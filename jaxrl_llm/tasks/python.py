"""Python that a model wrote, run in processes with limits, as a tool: `Toolbox([python])`.

This is a limit, not a jail: hostile code belongs in a container. A program is one process of one
thread with a temporary folder of its own and limits of time, memory, output and the size of a file.
The kernel of Linux (5.13 or later, x86-64 or ARM; no root is needed) refuses it all files but
Python's own and that folder (Landlock), and all system calls but those that work on its own files
and memory (seccomp): no sockets, programs or signals, and nothing that outlives it. It may learn
names of files, fill the disk while it runs, and use a flaw of the kernel. What a system does not
refuse, the log says.
"""

import atexit
import ctypes
import json
import logging
import os
import platform
import resource
import signal
import site
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from typing import Any, NoReturn, cast

from jaxrl_llm.tasks.workers import Workers, serve

logger = logging.getLogger(__name__)

_LIMITS = {"FSIZE": 16 << 20, "NOFILE": 64, "CORE": 0, "NPROC": 0}  # a file's bytes, open files
_OUTPUT = 10_000  # characters
_SLOWER = 4  # wall-clock seconds for one of CPU time
_READ = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/urandom")
# all system calls that a program may make: their numbers on x86-64 and ARM
_CALLS = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  lseek 8 62
sendfile 40 71  copy_file_range 326 285  open 2 -  openat 257 56  close 3 57  stat 4 -  fstat 5 80
lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -  faccessat 269 48  faccessat2 439 439
getdents64 217 61  readlink 89 -  readlinkat 267 78  getcwd 79 17  chdir 80 49  fchdir 81 50
mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38
renameat2 316 276  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36  ftruncate 77 46
fallocate 285 47  fadvise64 221 223  fsync 74 82  fdatasync 75 83  flock 73 32  fcntl 72 25
ioctl 16 29  dup 32 23  dup2 33 -  dup3 292 24  pipe 22 -  pipe2 293 59  umask 95 166  mmap 9 222
munmap 11 215  mprotect 10 226  mremap 25 216  madvise 28 233  msync 26 227  brk 12 214
rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  sigaltstack 131 132
restart_syscall 219 128  alarm 37 -  setitimer 38 103  getitimer 36 102  pause 34 -  futex 202 98
sched_yield 24 124  sched_getaffinity 204 123  gettimeofday 96 169  clock_gettime 228 113
clock_getres 229 114  nanosleep 35 101  clock_nanosleep 230 115  times 100 153  getrusage 98 165
poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create1 291 20  epoll_ctl 233 21
epoll_wait 232 -  epoll_pwait 281 22  socketpair 53 199  sendto 44 206  recvfrom 45 207
shutdown 48 210  getpid 39 172  getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175
getgid 104 176  getegid 108 177  getgroups 115 158  uname 63 160  sysinfo 99 179  getrandom 318 278
exit 60 93  exit_group 231 94
"""
_COMMANDS = {  # what the second argument may be: no owner of a file to send signals to, no flags
    "fcntl": (*range(8), 1030),
    "ioctl": (0x5401, 0x5421, 0x5450, 0x5451),
    "socketpair": (0x1, 0x801, 0x80001, 0x80801),  # two ends that reach nothing but one another
}
_OPENS = {"open": 24, "openat": 32}  # where the kernel's filters find the flags
_MACHINES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
_MACHINE = _MACHINES.get(platform.machine()) if sys.platform == "linux" else None
_SITES = (*site.getsitepackages(), site.getusersitepackages())  # where modules are installed
_RULESET, _RULE, _RESTRICT = 444, 445, 446  # system calls of Landlock
_LIBC = ctypes.CDLL(None, use_errno=True)


def interpreter(
    workers: int = 2, seconds: float = 5.0, memory: int = 1 << 30
) -> Callable[[str], str]:
    """The tool `python`: `workers` programs run at a time.

    A program has `seconds` of CPU time, four times that on the clock, and `memory` bytes of address
    space.
    """

    one_at_a_time = threading.Lock()

    @cache
    def started() -> Workers:
        warn_of_reach()
        folder = tempfile.mkdtemp()
        weakref.finalize(python, _delete, folder)  # of two, the later one is called first
        return Workers(workers, "jaxrl_llm.tasks.python", folder)

    def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept for the next program.

        Args:
            code: The program.
        """
        # the worker only waits, and deletes files
        with one_at_a_time:
            ready = started()
        reply = ready.ask([code, seconds, memory], 10 * seconds)
        if not reply.startswith('"'):
            raise RuntimeError("the program could not be run")
        return json.loads(reply)

    vars(python)["limits_itself"] = True  # it waits for others' programs, which must not count
    return python


python = interpreter()


def warn_of_reach() -> None:
    """Logs what this system does not refuse to what a model wrote."""
    if not (_MACHINE and _landlock()):
        reached = "files" if _MACHINE else "files and network"
        logger.warning("the model's programs can reach %s on this system", reached)


def _landlock() -> int:
    """The version of the kernel's Landlock, by which it can refuse files; 0 if it has none."""
    return max(0, _LIBC.syscall(_RULESET, None, 0, 1)) if _MACHINE else 0


def _delete(folder: str) -> None:
    """Deletes a folder, however deep, with what its owner may not read in it."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, folder], check=False, stderr=subprocess.DEVNULL)  # noqa: S603
        if not os.path.lexists(folder):
            return


def _answer(code: str, seconds: float, memory: int) -> str:
    """The output of a program, in JSON, and why it was ended if it was."""

    def program() -> None:
        atexit._clear()  # what the worker has registered is not the program's
        try:
            exec(compile(code, "program.py", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 (what this is for)
        except SystemExit as error:
            if not isinstance(error.code, int | None):
                print(error.code, file=sys.stderr)
        finally:
            atexit._run_exitfuncs()

    text, why = confined(program, sys.argv[1], seconds, _SLOWER * seconds, memory)
    text = "\n".join([text.strip(), *([f"(ended: {why})"] if why else [])])
    return json.dumps(text.strip() or "(nothing was printed)")


def confined(
    work: Callable[[], object], where: str, seconds: float, clock: float, memory: int
) -> tuple[str, str]:
    """The output of `work` in a process of its own, within the limits, and why it was ended if it was.

    It has `seconds` of CPU time and `clock` in all; its folder is in `where` meanwhile.
    """
    output, left = b"", lambda: max(0.0, end - time.monotonic())
    folder = tempfile.mkdtemp(dir=where)
    try:
        reader, writer = os.pipe()
        end, worker = time.monotonic() + clock, os.getpid()
        if not (pid := os.fork()):
            _run(work, seconds, memory, folder, writer, worker)
        os.close(writer)
        while len(output) <= 4 * _OUTPUT and wait([reader], left()):  # in UTF-8
            if not (piece := os.read(reader, 1 << 16)):
                break
            output += piece
        late = not left()
        for kill in (os.kill, os.killpg):  # it has a group if it came that far
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        _, status, used = os.wait4(pid, 0)
        spent = used.ru_utime + used.ru_stime
        os.close(reader)
    finally:
        _delete(folder)
    text, number, why = output.decode(errors="replace"), os.WTERMSIG(status), ""
    if len(text) > _OUTPUT:
        why = f"it printed more than {_OUTPUT} characters"
    elif late or number == signal.SIGXCPU or (number == signal.SIGKILL and spent > seconds):
        why = f"it took more than {seconds:g} s"
    elif number not in (0, signal.SIGKILL):
        why = signal.strsignal(number) or f"signal {number}"
    return text[:_OUTPUT], why


def _run(
    work: Callable[[], object], seconds: float, memory: int, folder: str, writer: int, worker: int
) -> NoReturn:
    """Becomes the program that does this; what it prints goes to `writer`."""
    try:
        os.setsid()
        os.chdir(folder)
        for target, source in enumerate((os.open(os.devnull, os.O_RDONLY), writer, writer)):
            os.dup2(source, target)
        os.closerange(3, 1 << 16)
        sys.stdin = os.fdopen(0, closefd=False)
        printed = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = printed
        os.environ |= {"HOME": folder, "TMPDIR": folder, "OPENBLAS_NUM_THREADS": "1"}
        beside = os.environ.get("PYTHONPATH")  # of this package
        if beside in sys.path and beside not in _SITES:
            sys.path.remove(beside)
        tempfile.tempdir, sys.argv = folder, ["program.py"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        _limit(seconds, memory, folder)
        if os.getppid() != worker:  # it ended before that would have ended this one
            os._exit(0)
        work()
    except SystemExit:
        pass
    except BaseException as error:
        shown = error.__traceback__
        for _ in ("this function", "work"):
            shown = shown.tb_next if shown else None
        traceback.print_exception(error.with_traceback(shown), limit=-3)
    finally:
        for stream in (sys.stdout, sys.__stdout__):  # a program may have put another in its place
            with suppress(BaseException):
                cast(Any, stream).flush()
        os._exit(0)


def _limit(seconds: float, memory: int, folder: str) -> None:
    """Limits this process, for good."""
    limits = _LIMITS | ({"AS": memory} if sys.platform == "linux" else {})
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    whole = int(-(-seconds // 1))
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole + 1))  # the first signal says why
    if _MACHINE:
        _must(_LIBC.prctl(1, signal.SIGKILL, 0, 0, 0))  # if the worker ends
        _must(_LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))  # none of root's powers
        _must(_LIBC.prctl(38, 1, 0, 0, 0))  # nor others to come: the next two ask for it
        if _landlock():
            _refuse_files(folder)
        _refuse_calls(*_MACHINE)


def _must(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "a limit cannot be set")
    return result


def _refuse_files(folder: str) -> None:
    """This process reads Python's own files from now on, and does anything in `folder`."""
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(_landlock(), 16)) - 1
    rules = _must(_LIBC.syscall(_RULESET, struct.pack("Q", everything), 8, 0))
    own = map(sysconfig.get_path, ("stdlib", "platstdlib"))
    for path in filter(os.path.exists, {folder, *own, *_SITES, *_READ}):
        reads = 12 if os.path.isdir(path) else 4  # a file; or files and names in it
        place = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", everything if path == folder else reads, place)
        _must(_LIBC.syscall(_RULE, rules, 1, rule, 0))
        os.close(place)
    _must(_LIBC.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _refuse_calls(architecture: int, column: int) -> None:
    """All but the allowed system calls fail from now on, as do those of another architecture."""
    load, equal, mask, give = 0x20, 0x15, 0x54, 0x06  # of the kernel's filters
    allow, refuse = (give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x0005000D)  # EACCES
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse, (load, 0, 0, 0)]
    words = iter(_CALLS.split())
    for call in zip(words, words, words, strict=True):
        then = [allow]
        if place := _OPENS.get(call[0]):  # Landlock sees no emptying before its third version
            then = [(load, 0, 0, place), (mask, 0, 0, os.O_TRUNC | os.O_ACCMODE)]
            for mode in (os.O_RDONLY, os.O_ACCMODE):  # the latter is neither, and asked of nobody
                then += [(equal, 0, 1, os.O_TRUNC | mode), refuse]
            then.append(allow)
        elif commands := _COMMANDS.get(call[0]):
            known = [line for one in commands for line in ((equal, 0, 1, one), allow)]
            then = [(load, 0, 0, 24), *known, refuse]
        if call[column] != "-":
            lines += [(equal, 0, len(then), int(call[column])), *then]
    lines.append(refuse)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    _must(_LIBC.prctl(22, 2, struct.pack("HP", len(lines), ctypes.addressof(code)), 0, 0))


if __name__ == "__main__":
    serve(_answer)
    with suppress(OSError):  # the last worker to leave
        os.rmdir(sys.argv[1])
