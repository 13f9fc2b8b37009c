"""Programs of a model have limits: whatever they try, an answer comes, and nothing stays behind."""

import os
import pathlib
import re
import sys

import pytest

from jaxrl_llm.tasks import python as programs
from jaxrl_llm.tasks.python import interpreter
from jaxrl_llm.tasks.python import python as ready
from jaxrl_llm.tasks.tools import Toolbox

kernel = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux refuses these")


def descendants():
    """Processes below this one, as (pid, parent)."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                folder.joinpath("stat").read_text().rsplit(")")[1].split()[1]
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


def started(folder, **limits):
    made = interpreter(workers=1, **limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        made("pass")
    return made


@pytest.fixture(scope="module")
def python(folder):
    return started(folder)


@pytest.fixture(scope="module")
def hasty(folder):
    return started(folder, seconds=1.0, memory=256 << 20)


@pytest.fixture
def nothing_stays_behind(python, hasty, folder):
    """The same processes are there afterwards, none is the program's, and no folder of it is left."""
    before = descendants()
    yield
    assert python("print('alive')") == hasty("print('alive')") == "alive"
    assert descendants() == before
    assert [*folder.iterdir()] == []


def test_a_program_prints(python):
    assert python("import math\nfor i in range(2): print(math.factorial(i + 3))") == "6\n24"
    assert python("x = 1") == "(nothing was printed)"
    assert python("print(x)").endswith("NameError: name 'x' is not defined")
    assert python("import sys; print('\u00e9', file=sys.stderr); sys.exit(3)") == "\u00e9"
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
            "i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1", "", id="many files"
        ),
        pytest.param("[open(f'{i}', 'w') for i in range(99)]", "", id="files"),
        pytest.param(
            "import sys; sys.stdout = None; del sys.modules['os']\n1 / 0", "", id="broken"
        ),
        pytest.param(
            "import signal, time\nfor n in range(1, 30):\n"
            "    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
            "",
            id="deaf",
        ),
        pytest.param(
            "class E(Exception):\n def __str__(self):\n  while True: pass\nraise E", "", id="error"
        ),
    ],
)
def test_limits(hasty, program, said, nothing_stays_behind):
    assert said in hasty(program)


@kernel
@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.execv('/bin/true', ['true'])",
        "import threading\nwhile True: threading.Thread(target=input).start()",
        "import multiprocessing; multiprocessing.Pool(2)",
        "import ctypes\nif ctypes.CDLL(None, use_errno=True).fork() < 0: raise OSError('refused')",
        "import socket; socket.create_connection(('127.0.0.1', 1))",
        "import socket; socket.getaddrinfo('example.org', 80)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import urllib.request; urllib.request.urlopen('http://example.org')",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import resource; resource.prlimit(__import__('os').getppid(), resource.RLIMIT_CPU, (1, 1))",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))",
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
        "import os; os.chmod(OUTSIDE, 0)",
        "import os; os.truncate(OUTSIDE, 0)",
        "import os; os.mkdir(OUTSIDE + 'e')",
        "import os; os.chroot('.')",
        "import shutil, os; shutil.rmtree(os.path.dirname(OUTSIDE))",
    ],
)  # fmt: skip
def test_what_the_kernel_refuses(python, program, tmp_path, nothing_stays_behind):
    """Each is an error, of which the program is told; and it could work in its own folder."""
    (outside := tmp_path / "outside").write_text("kept")
    mode = outside.stat().st_mode
    program = program.replace("OUTSIDE", repr(str(outside)))
    said = python(
        f"open('own', 'w').write('1')\nprint(open('own').read())\n{program}\nprint('done')"
    )
    assert said.startswith("1\n")
    assert re.search(r"(Error|\.gaierror): ", said)
    assert not said.endswith("done")
    assert (outside.read_text(), outside.stat().st_mode) == ("kept", mode)
    assert [*tmp_path.iterdir()] == [outside]


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
def test_a_program_ends_with_its_worker():
    """The trainer may be killed while a program sleeps."""
    import signal
    import threading
    import time

    one = interpreter(workers=1, seconds=30.0)
    before = descendants()
    one("pass")
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
    while not children:
        children = [pid for pid, parent in descendants() if parent == worker]
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    asking.join(20)
    assert said == ["the program could not be run"]
    end = time.monotonic() + 5
    while time.monotonic() < end and os.path.exists(f"/proc/{children[0]}"):
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{children[0]}")


def test_a_system_that_refuses_nothing_is_named(monkeypatch, caplog):
    """Limits are there all the same."""
    monkeypatch.setattr(programs, "_contained", lambda: False)
    assert interpreter(workers=1)("print(1)") == "1"
    assert "can reach files and network" in caplog.text
