"""Programs of a model have limits: whatever they try, an answer comes, and nothing stays behind."""

import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import python as programs
from jaxrl_llm.tasks.python import interpreter
from jaxrl_llm.tasks.python import python as ready
from jaxrl_llm.tasks.tools import Toolbox
from jaxrl_llm.tasks.workers import Workers

kernel = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux refuses these")


def descendants():
    """Processes below this one, as (pid, parent)."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                folder.joinpath("stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:  # it has ended
            continue
    found, count = {os.getpid()}, 0
    while len(found) > count:
        count = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return {(pid, parents[pid]) for pid in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where programs have their folders."""
    return tmp_path_factory.mktemp("programs")


def started(folder, landlock=None, python=sys.executable, **limits):
    """The tool, ready; its kernel may have an older Landlock, and `python` be another program."""
    made = interpreter(workers=1, **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(sys, "executable", python)
        if landlock is not None:
            older = lambda count, _, folder: Workers(
                count, "tests.tasks.older", folder, str(landlock)
            )
            patch.setattr(programs, "Workers", older)
        made("pass")
    return made


@pytest.fixture(scope="module")
def python(folder):
    return started(folder)


@pytest.fixture(scope="module")
def oldest(folder, tmp_path_factory):
    """As on the oldest kernel that has Landlock, by a user without root's powers."""
    powerless = tmp_path_factory.mktemp("powerless") / "python"
    powerless.write_text(f'#!/bin/sh\nexec setpriv --bounding-set=-all {sys.executable} "$@"\n')
    powerless.chmod(0o755)
    root = os.geteuid() == 0 and shutil.which("setpriv")
    return started(folder, landlock=1, python=str(powerless) if root else sys.executable)


@pytest.fixture(scope="module")
def open_files(folder):
    """As on a kernel that has no Landlock."""
    return started(folder, landlock=0)


@pytest.fixture(scope="module")
def hasty(folder):
    return started(folder, seconds=1.0, memory=256 << 20)


@pytest.fixture(scope="module")
def narrow(folder):
    """With time for what takes long to come to another limit."""
    return started(folder, seconds=60.0, memory=256 << 20)


@pytest.fixture
def tool(request):
    """One of these."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def nothing_stays_behind(python, hasty, folder):
    """No other processes are there afterwards, so none is the program's, and no folder of it is left."""
    before = descendants()
    yield
    assert python("print('alive')") == hasty("print('alive')") == "alive"
    assert descendants() <= before
    assert [*folder.glob("*/*")] == []


def test_a_program_prints(python):
    assert python("import math\nfor i in range(2): print(math.factorial(i + 3))") == "6\n24"
    assert python("x = 1") == "(nothing was printed)"
    assert python("print(x)").endswith("NameError: name 'x' is not defined")
    assert python("import sys; print('\u00e9', file=sys.stderr); sys.exit(3)") == "\u00e9"
    assert python("import sys; sys.exit('no solution')") == "no solution"
    assert python("import atexit; atexit.register(print, 'bye'); print('hi')") == "hi\nbye"
    assert python("import io, sys; print(1, end=''); sys.stdout = io.StringIO(); print(2)") == "1"
    assert "SyntaxError" in python("print(")
    assert python("import numpy; print(numpy.arange(3).sum())") == "3"
    assert Toolbox([ready]).answer(("python", {"code": "print(1 + 1)"})) == ("2", True)


def test_an_error_shows_the_program_alone(python):
    said = python("def f():\n    return 1 / 0\nf()")
    assert re.findall(r"line \d+, in .*", said) == ["line 3, in <module>", "line 2, in f"]
    assert said.endswith("ZeroDivisionError: division by zero")
    assert str(pathlib.Path(__file__).parents[2]) not in said


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param(
            "print('a')\nwhile True: pass", "a\n(ended: it took more than 1 s)", id="loop"
        ),
        pytest.param("import re; re.match('(a+)+b', 'a' * 99)", r"more than 1 s", id="regex"),
        pytest.param("import time; time.sleep(99)", r"more than 1 s", id="sleep"),
        pytest.param("while True: print('x' * 999)", r"more than 10000 characters", id="output"),
        pytest.param("import os\nwhile True: os.write(2, b'x' * 999)", "more than 10000", id="raw"),
        pytest.param("x = 'a' * (1 << 30)", "MemoryError", id="memory"),
        pytest.param("x = []\nwhile True: x.append(x * 2)", "", id="little by little"),
        pytest.param("open('a', 'wb').write(b'x' * (17 << 20))", "File too large", id="file"),
        pytest.param("def f(): f()\nf()", "RecursionError", id="recursion"),
        pytest.param("import ctypes; ctypes.string_at(0)", "ended: Segmentation fault", id="crash"),
        pytest.param("import os; os.close(1); os.close(2)\nwhile True: pass", "nothing", id="mute"),
        pytest.param("import os; os._exit(0)", "nothing", id="exit"),
        pytest.param(
            "import os; os.mkdir('a'); open('a/b', 'w'); os.mkdir('c', 0)",
            "",
            id="unread",
        ),
        pytest.param(
            "i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", "", id="many files"
        ),
        pytest.param("[open(f'{i}', 'w') for i in range(99)]", "", id="files"),
        pytest.param(
            "import sys; sys.stdout = None; del sys.modules['os']\n1 / 0", "", id="broken"
        ),
        pytest.param(
            "import signal, time\nfor n in range(1, 30):\n"
            "    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
            "more than 1 s",
            id="deaf",
        ),
        pytest.param(
            "class E(Exception):\n def __str__(self):\n  while True: pass\nraise E", "", id="error"
        ),
    ],
)
def test_limits(hasty, program, said, nothing_stays_behind):
    assert said in hasty(program)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        pytest.param("x = 1\n" * 300_000, "MemoryError", id="to compile"),
        pytest.param(
            "import os\nfor _ in range(1100): os.mkdir('a'); os.chdir('a')", "nothing", id="deep"
        ),
    ],
)
def test_limits_that_take_a_while(narrow, program, said, nothing_stays_behind):
    assert said in narrow(program)


LIBC = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def tried(made):
    if made < 0: raise OSError(ctypes.get_errno(), "refused")
"""
ADD_KEY = {"x86_64": 248, "aarch64": 217}.get(platform.machine(), -1)
FILES = [
    "open(OUTSIDE).read()",
    "open('/etc/passwd').read()",
    "open('/proc/self/environ').read()",
    "import os; open(f'/proc/{os.getppid()}/mem', 'rb+').read(1)",
    "import os; os.listdir('/')",
    "open(OUTSIDE, 'w')",
    "open('../outside', 'w')",
    "import os; os.remove(OUTSIDE)",
    "import os; os.rename(OUTSIDE, 'mine')",
    "import os; os.link(OUTSIDE, 'mine')",
    "import os; os.symlink(OUTSIDE, 'mine'); open('mine').read()",
    "import os; os.mkdir(OUTSIDE + 'e')",
    "import shutil, os; shutil.rmtree(os.path.dirname(OUTSIDE))",
]
OTHERS = [
    "import os\nwhile True: os.fork()",
    "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "import subprocess; subprocess.run(['true'])",
    "import os; os.execv('/bin/true', ['true'])",
    "import threading\nwhile True: threading.Thread(target=input).start()",
    "import multiprocessing; multiprocessing.Pool(2)",
    LIBC + "tried(libc.fork())",
    "import socket; socket.create_connection(('127.0.0.1', 1))",
    "import socket; socket.getaddrinfo('example.org', 80)",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import urllib.request; urllib.request.urlopen('http://example.org')",
    # signals, and other processes
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())\n"
    "fcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')",
    "import resource; resource.prlimit(__import__('os').getppid(), resource.RLIMIT_CPU, (1, 1))",
    "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))",
    "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "import os; os.sched_setaffinity(os.getppid(), {0})",
    "import os; os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
    LIBC + f"tried(libc.syscall({251 if platform.machine() == 'x86_64' else 30}, 1, os.getppid(), 3 << 13))",
    # memory beside the limit, and what stays when a program has ended
    "import os; os.memfd_create('a')",
    LIBC + "tried(libc.shmget(0, 4096, 0o1600))",
    LIBC + "tried(libc.semget(0, 1, 0o1600))",
    LIBC + "tried(libc.msgget(0, 0o1600))",
    LIBC + f"tried(libc.syscall({ADD_KEY}, b'user', b'a', b'b', 1, -3))",
    # what Landlock leaves to others
    "import os; os.chmod(OUTSIDE, 0)",
    "import os; os.truncate(OUTSIDE, 0)",
    "import os; os.utime(OUTSIDE, (0, 0))",
    "import os; os.setxattr(OUTSIDE, 'user.a', b'1')",
    LIBC + "word = ctypes.create_string_buffer(b'1')\n"
    "how = struct.pack('PII', ctypes.addressof(word), 1, 0)\n"
    "tried(libc.syscall(463, -100, OUTSIDE.encode(), 0, b'user.a', how, 16))",
    "import fcntl, os\nfile = os.open(os.__file__, os.O_RDONLY)\n"
    "fcntl.ioctl(file, 0x40086602, fcntl.ioctl(file, 0x80086601, bytes(8)))",
    "import os; os.chroot('.')",
]  # fmt: skip


@kernel
@pytest.mark.parametrize(
    ("tool", "program"),
    [
        *(("python", program) for program in FILES + OTHERS),
        *(("oldest", program) for program in FILES + OTHERS),
        *(("open_files", program) for program in OTHERS),
    ],
    indirect=["tool"],
)
def test_what_the_kernel_refuses(tool, program, tmp_path, nothing_stays_behind):
    """Each is an error, of which the program is told; and it could work in its own folder."""
    (outside := tmp_path / "outside").write_text("kept")
    mode = outside.stat().st_mode
    program = program.replace("OUTSIDE", repr(str(outside)))
    said = tool(f"open('own', 'w').write('1')\nprint(open('own').read())\n{program}\nprint('done')")
    assert said.startswith("1\n")
    assert re.search(r"(Error|\.gaierror): ", said)
    assert not said.endswith("done")
    assert (outside.read_text(), outside.stat().st_mode) == ("kept", mode)
    assert [*tmp_path.iterdir()] == [outside]


@kernel
@pytest.mark.parametrize("tool", ["python", "oldest"], indirect=True)
def test_what_may_be_read_cannot_be_emptied(tool):
    """Before its third version Landlock does not see that a file is emptied as it is opened to be read."""
    with tempfile.NamedTemporaryFile(
        "w+", dir=sysconfig.get_path("purelib"), suffix=".txt"
    ) as file:
        file.write("kept")
        file.flush()
        opened = f"os.open({file.name!r}, os.O_RDONLY"
        assert tool(f"import os\nprint(os.read({opened}), 9))") == "b'kept'"
        for flags in ("O_TRUNC", "O_TRUNC | os.O_CREAT", "O_TRUNC | os.O_CLOEXEC", "O_TRUNC | 3"):
            assert "Error" in tool(f"import os\n{opened} | os.{flags})")
        file.seek(0)
        assert file.read() == "kept"


@kernel
def test_a_pair_of_sockets_reaches_nothing_else(python, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as outside:
        outside.bind(str(tmp_path / "outside"))
        outside.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_STREAM"):
            program = f"one, _ = socket.socketpair(type=socket.{kind})"
            program += f"\none.sendto(b'x', {str(tmp_path / 'outside')!r})"
            assert "Error" in python(f"import socket\n{program}")
            with pytest.raises(BlockingIOError):
                outside.recv(1)


@kernel
def test_numbers_of_system_calls_are_those_of_the_kernel():
    """Also of the machines on which no test runs."""
    of_x86 = pathlib.Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    of_arm = pathlib.Path("/usr/include/asm-generic/unistd.h")
    if not (of_x86.exists() and of_arm.exists()):
        pytest.skip("the kernel's headers are not there")
    words = programs._CALLS.split()
    for column, header in ((1, of_x86), (2, of_arm)):
        text = header.read_text().replace("__NR3264_fstatat", "__NR_newfstatat")
        known = dict(re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text))
        for name, number in zip(words[::3], words[column::3], strict=True):
            assert number == known.get(name, "-"), name


MAY = {
    "asyncio": "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 1\n"
    "print(asyncio.run(f()))",
    "a database": "import sqlite3\nc = sqlite3.connect('a.db')\nc.execute('create table t(x)')\n"
    "c.execute('insert into t values (1)')\nc.commit()\nprint(*c.execute('select x from t').fetchone())",
    "arrays": "import numpy as np\na = np.random.default_rng(0).random((300, 300))\n"
    "np.save('a', a)\nprint(np.linalg.matrix_rank(np.load('a.npy') @ np.linalg.inv(a)) // 300)",
    "files": "import glob, os, shutil, tempfile, zipfile\nwith tempfile.TemporaryDirectory() as f:\n"
    "    path = f + '/a'\n    print(1, file=open(path, 'w'))\n    shutil.copyfile(path, path + 'b')\n"
    "    os.truncate(os.open(path + 'b', os.O_RDWR), 1)\n    os.replace(path + 'b', 'c')\n"
    "zipfile.ZipFile('d', 'w').write('c')\nos.remove('c')\nzipfile.ZipFile('d').extractall()\n"
    "print(open(*glob.glob('c')).read())",
    "time": "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: print(1))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(0.1); time.process_time()",
    "callbacks": "import ctypes\nkind = ctypes.CFUNCTYPE(ctypes.c_int)\nprint(kind(lambda: 1)())",
    # of what the program itself is
    "a failing test": "import sys, unittest\nclass Test(unittest.TestCase):\n"
    "    def test(self): self.fail()\nmade = unittest.main(exit=False).result\nprint(len(made.failures))",
    "a wrong example": "def f():\n    'Says.\\n\\n    >>> 1\\n    2\\n    '\nimport doctest\n"
    "print(doctest.testmod().failed)",
    "objects": "import pickle, timeit\nclass A: x = 1\nprint(pickle.loads(pickle.dumps(A())).x)\n"
    "timeit.timeit('A()', 'from __main__ import A', number=1)",
}  # fmt: skip


@pytest.mark.parametrize("what", MAY)
def test_what_programs_may_do(python, what, nothing_stays_behind):
    assert python(MAY[what]).splitlines()[-1] == "1"


@kernel
def test_where_the_package_is_installed_its_neighbours_can_be_imported(tmp_path):
    """From a wheel, that is, beside numpy."""
    venv.create(tmp_path / "one", symlinks=True)
    [installed] = tmp_path.glob("one/lib/*/site-packages")
    shutil.copytree(pathlib.Path(programs.__file__).parents[1], installed / "jaxrl_llm")
    (installed / "beside.py").write_text("x = 1")
    code = (
        "from jaxrl_llm.tasks.python import python; print(python('import beside; print(beside.x)'))"
    )
    done = subprocess.run(
        [tmp_path / "one/bin/python", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": os.defpath},
    )
    assert done.stdout == "1\n", done.stderr


@kernel
def test_nothing_of_the_trainer_is_in_reach(monkeypatch):
    """No open file, no environment, no module of the package or beside it."""
    monkeypatch.setenv("TOKEN", "secret")
    fresh = interpreter(workers=1)
    assert fresh("import os; print('TOKEN' in os.environ)") == "False"
    code = "import os\nfor n in range(3, 64):\n    try: os.fstat(n)\n    except OSError: continue\n    print(n)"
    assert fresh(code) == "(nothing was printed)"
    assert re.search("(ModuleNotFound|Permission)Error", fresh("import tests"))
    assert "EOFError" in fresh("input()")


@kernel
@pytest.mark.parametrize("landlock", [None, 0])
def test_a_program_ends_with_its_worker(folder, landlock):
    """The trainer may be killed while a program sleeps."""
    before = descendants()
    one = started(folder, landlock, seconds=30.0)
    [(worker, _)] = descendants() - before
    said = []

    def ask():
        try:
            said.append(one("import time; time.sleep(60)"))
        except RuntimeError as error:
            said.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    children = []
    while not children and asking.is_alive():
        children = [pid for pid, parent in descendants() if parent == worker]
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)  # whatever limits it has by then
    asking.join(120)
    assert said == ["the program could not be run"]
    end = time.monotonic() + 120
    while time.monotonic() < end and os.path.exists(f"/proc/{children[0]}"):
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{children[0]}")


ENDS = """
import pathlib, sys, threading, time
from jaxrl_llm.tasks.python import interpreter
root = pathlib.Path(sys.argv[1])
program = '''
import time
open("made", "w").close()
time.sleep(60)
'''
threading.Thread(target=interpreter(1, 30.0), args=(program,), daemon=True).start()
while not [*root.glob("*/made"), *root.glob("*/*/made")]:
    time.sleep(0.01)
"""


def test_nothing_stays_where_a_run_ends_while_a_program_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, [*tmp_path.iterdir()]) == (0, []), done.stderr


def test_workers_are_closed_while_one_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    workers = Workers(1, "jaxrl_llm.tasks.python", str(tmp_path))
    said, question = [], ["import time; time.sleep(60)", 30.0, 1 << 30]
    asking = threading.Thread(target=lambda: said.append(workers.ask(question, 300)))
    asking.start()
    while not [*tmp_path.iterdir()]:
        time.sleep(0.01)
    workers.close()
    asking.join(120)
    assert said == [""]
    with pytest.raises(UserError, match="the workers are closed"):
        workers.ask(question, 300)


def test_many_first_calls_start_the_workers_once(monkeypatch):
    made = []
    monkeypatch.setattr(programs, "Workers", lambda *how: made.append(how) or Workers(*how))
    one = interpreter(workers=1)
    asking = [threading.Thread(target=one, args=("pass",)) for _ in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(made) == 1


@pytest.mark.parametrize(
    ("patch", "reached"),
    [(("_landlock", lambda: 0), "files"), (("_MACHINE", None), "files and network")],
)
def test_a_system_that_refuses_nothing_is_named(monkeypatch, caplog, patch, reached):
    """Limits are there all the same."""
    monkeypatch.setattr(programs, *patch)
    assert interpreter(workers=1)("print(1)") == "1"
    assert f"can reach {reached} on this system" in caplog.text
