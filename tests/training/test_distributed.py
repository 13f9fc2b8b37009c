"""Several processes are one run: the steps of one process, left together, and none waits for a dead one."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm import distributed
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.training.leaving import UNFINISHED, Stop
from jaxrl_llm.training.run import train
from tests.chaos.small import config
from tests.processes import QUICKLY
from tests.training.process import QUICK, ROOT, metrics, port

SMALL = "tests/chaos/small.py"
LOST = 15.0  # seconds, where one is to be lost


class Job:
    """Processes of one run on this machine, with so many devices each."""

    def __init__(
        self, environment, out, count, devices, *flags, config=SMALL, outs=None, log=None, lost=60.0
    ):
        self.log, self.out, self.processes = log or out, out, []
        where = f"127.0.0.1:{port()}"
        for i in range(count):
            process = ["--process", f"{i}/{count}@{where}", "--lost", str(lost)]
            command = [sys.executable, "-m", "jaxrl_llm", "train", config]
            command += ["--out", str((outs or [out] * count)[i]), *flags]
            with self._log(i).open("w") as file:
                self.processes.append(subprocess.Popen(
                    command + (process if count > 1 else []),
                    cwd=ROOT, env=environment | {"JAX_NUM_CPU_DEVICES": str(devices)},
                    stdout=file, stderr=subprocess.STDOUT,
                ))  # fmt: skip

    def wait_until(self, condition):
        """While the first process lives."""
        while not condition():
            assert self.processes[0].poll() is None, self.said(0)
            time.sleep(0.02)

    def wait_for(self, step):
        """Until a step of reinforcement is recorded."""
        mine = lambda r: r["step"] >= step and r["phase"] == "reinforce"
        self.wait_until(lambda: any(map(mine, metrics(self.out))))

    def ends(self):
        """The exit codes; none waits for ever, and where they stood is said."""
        try:
            return [process.wait(timeout=3000) for process in self.processes]
        except subprocess.TimeoutExpired:
            for process in self.processes:
                process.kill()
            raise AssertionError([*map(self.said, range(len(self.processes)))]) from None

    def said(self, i):
        """What is on the terminal of process `i`."""
        return self._log(i).read_text(errors="replace")

    def finished(self):
        """The folder, once all have ended well."""
        said = lambda: [*map(self.said, range(len(self.processes)))]
        assert self.ends() == [0] * len(self.processes), said()
        return self.out

    def _log(self, i):
        return self.log.with_name(f"{self.log.name}-{i}.log")


@pytest.fixture(scope="module")
def environment(environment):
    """Compiled anew: the collectives of CPU programs that are read from a cache may overtake one another."""
    flags = {"XLA_FLAGS": QUICKLY, "JAX_PLATFORMS": "cpu"}
    return environment | flags | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory):
    """A run of two processes that nothing has disturbed."""
    return Job(environment, tmp_path_factory.mktemp("pair") / "run", 2, 2).finished()


def close(found, whole):
    """Whether two runs have the same records, to rounding."""
    near = lambda value: (
        pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value
    )
    assert found == [{name: near(x) for name, x in record.items()} for record in whole]
    return True


def samples(out):
    return {path.name: path.read_text() for path in (out / "samples").iterdir()}


def test_two_processes_take_the_steps_of_one(environment, pair, tmp_path):
    alone = Job(environment, tmp_path / "run", 1, 4).finished()
    assert close(metrics(pair), metrics(alone))
    assert samples(pair) == samples(alone)


@pytest.mark.long
def test_processes_draw_other_prompts_alike(environment, tmp_path):
    flags = ("--max-resamples", "2", "--warm-steps", "0", "--steps", "1")
    two = Job(environment, tmp_path / "two", 2, 2, *flags, config=QUICK).finished()
    one = Job(environment, tmp_path / "one", 1, 4, *flags, config=QUICK).finished()
    assert close(metrics(two), metrics(one))
    assert samples(two) == samples(one)
    assert [r["drawn"] for r in metrics(one) if "drawn" in r] == [12]  # not one of 4 was solved


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_processes(environment, pair, tmp_path):
    out = tmp_path / "run"
    Job(environment, out, 1, 4, "--steps", "1").finished()
    Job(environment, out, 4, 1, "--steps", "2", "--resume").finished()
    Job(environment, out, 2, 1, "--steps", "4", "--resume").finished()
    steps = lambda out: [r for r in metrics(out) if "test/accuracy" not in r and "reward" in r]
    assert close(steps(out), steps(pair))


@pytest.mark.long
def test_a_signal_to_one_saves_once_and_stops_all_after_the_same_step(environment, pair, tmp_path):
    job = Job(environment, tmp_path / "run", 2, 2)
    job.wait_for(3)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.ends() == [UNFINISHED] * 2
    assert "stopped and saved" in job.said(0)
    assert "stopped and saved" not in job.said(1)
    Job(environment, job.out, 2, 2, "--resume").finished()
    assert metrics(job.out) == metrics(pair)
    assert samples(job.out) == samples(pair)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_one_ends_the_others_and_the_run_goes_on_to_the_same(
    environment, pair, tmp_path, victim
):
    job = Job(environment, tmp_path / "run", 2, 2, lost=LOST)
    job.wait_for(3)
    start = time.monotonic()
    job.processes[victim].kill()
    ends, said = job.ends(), job.said(1 - victim)
    assert time.monotonic() - start < LOST + 120
    assert ends[victim] == -signal.SIGKILL
    assert "Traceback" not in said
    assert ends[1 - victim] == 2
    [line] = [line for line in said.splitlines() if line.startswith("jaxrl-llm: ")]
    assert f"process {victim} on " in line
    Job(environment, job.out, 2, 2, "--resume", "auto").finished()
    assert metrics(job.out) == metrics(pair)


@pytest.mark.long
@pytest.mark.parametrize("shown", [3, 4])
def test_what_one_cannot_write_ends_all_with_its_line(environment, tmp_path, shown):
    """Whether an evaluation comes after it, as after step 4, or a checkpoint, as after step 5."""
    job = Job(environment, tmp_path / "run", 2, 1)
    job.wait_until((job.out / "samples" / f"step-{shown:06d}.md").exists)
    (job.out / "samples").rename(job.out / "moved")
    (job.out / "samples").write_text("in the way")
    assert job.ends() == [2, 2]
    for i in range(2):
        assert "cannot write to" in job.said(i)
        assert "Traceback" not in job.said(i)


BUG = """
from tests.chaos.small import *
from jaxrl_llm import distributed
from jaxrl_llm.learning import reinforce

sound = reinforce.describe_answers

def describe_answers(*arguments):
    if distributed.index() == 1:
        raise ZeroDivisionError("a bug")
    return sound(*arguments)

reinforce.describe_answers = describe_answers
"""


@pytest.mark.slow
def test_a_bug_that_one_meets_ends_all_and_is_shown(environment, tmp_path):
    """The first is by then in a program that waits for the other."""
    (tmp_path / "buggy.py").write_text(BUG)
    job = Job(environment, tmp_path / "run", 2, 1, config=str(tmp_path / "buggy.py"))
    assert 0 not in job.ends()
    assert "process 1 on " in job.said(0)
    assert "ZeroDivisionError: a bug" in job.said(0)
    assert "in describe_answers" in job.said(1)


@pytest.mark.slow
def test_damage_that_one_alone_can_see_is_seen_by_all(environment, pair, tmp_path):
    """In the bytes that the second has written, and reads again."""
    out = shutil.copytree(pair, tmp_path / "run")
    newest = max((out / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for path in (newest / "state" / "ocdbt.process_1").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    job = Job(environment, out, 2, 2, "--resume", "auto")
    job.finished()
    assert f"checkpoint {newest.name} is damaged" in job.said(0) + job.said(1)
    assert metrics(out) == metrics(pair)


@pytest.mark.slow
def test_folders_that_are_not_shared_are_found(environment, pair, tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    shutil.copytree(pair, outs[1])
    job = Job(environment, outs[0], 2, 1, outs=outs)
    assert job.ends() == [2, 2]
    assert "storage that all processes see" in job.said(0)


@pytest.mark.parametrize("given", ["2/2@host:1", "one", "0/2@host", "0/2"])
def test_a_place_among_processes_is_checked(given):
    with pytest.raises(UserError, match="I/N@HOST:PORT"), distributed.initialize(given, Stop()):
        pass


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:{taken}", "Address already in use"),
        ("192.0.2.1:1234", "Cannot assign requested address"),  # no host has it
    ],
)
def test_a_first_process_that_cannot_listen_says_so(address, said, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = f"0/2@{address.format(taken=other.getsockname()[1])}"
        with pytest.raises(UserError, match=rf"--process {process}: .* cannot listen at .*{said}"):
            distributed._join(process)


def test_the_name_of_the_first_host_may_come_late(monkeypatch):
    """A cluster publishes the name of a pod once it has an address; one that never comes is named."""
    asked, known = [], socket.getaddrinfo

    def late(host, port, **settings):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", port, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: None)
    distributed._require_room("0/2@pod:0", "pod:0")
    assert asked == ["pod"] * 3
    monkeypatch.setattr(distributed, "NAMED", -1)
    asked.clear()
    with pytest.raises(UserError, match=r"cannot listen at pod:0 .*Name or service not known"):
        distributed._require_room("0/2@pod:0", "pod:0")


@pytest.mark.slow
def test_a_process_that_is_started_twice_harms_none(environment, pair, tmp_path):
    job = Job(environment, tmp_path / "run", 2, 2)
    job.wait_for(3)
    for process in job.processes:
        again = subprocess.run(
            process.args, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert again.returncode == 2
        assert "it is running on this host already, and goes on" in again.stderr
    assert metrics(job.finished()) == metrics(pair)


FORKED = """
import os, sys, time
from jaxrl_llm import distributed

with distributed._place(sys.argv[1]):
    read, write = os.pipe()
    if child := os.fork():
        os.read(read, 1)  # it has come to its first line
        print(child, flush=True)
    else:
        os.write(write, b".")
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of sockets without files")
def test_a_fork_of_a_process_is_none_of_the_job():
    """Its place is free when the process is gone."""
    name = f"1/2@{os.getpid()}:1"
    with subprocess.Popen(
        [sys.executable, "-c", FORKED, name], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        with (
            pytest.raises(UserError, match="running on this host already"),
            distributed._place(name),
        ):
            pass
        process.kill()
        process.wait()
        with distributed._place(name):
            os.kill(child, signal.SIGKILL)


def test_devices_of_processes_that_have_not_joined_are_refused(monkeypatch, tmp_path):
    """On a slice of TPUs JAX knows all of them without a word from us."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(UserError, match="belong to 4 processes: start each with --process auto"):
        train(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_one_whose_others_are_never_started_says_so(environment, index):
    lonely = (
        "from jaxrl_llm import distributed; distributed.MEETING = 2; "
        "from jaxrl_llm.cli.main import entry; entry()"
    )
    process = f"{index}/2@127.0.0.1:{port()}"
    ended = subprocess.run(
        [sys.executable, "-c", lonely, "train", SMALL, "--process", process],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("jaxrl-llm: ")]
    assert len(lines) == 1
    assert "not all came within 2 s" in lines[0]
    assert "stack trace" not in ended.stderr


# In this process, with a store that is none.


class Store(dict):
    """What the coordinator of a job keeps; `gone` is what asking it raises from then on."""

    gone = None

    def key_value_set(self, key, value, allow_overwrite=False):
        del allow_overwrite
        if self.gone:
            raise self.gone
        self[key] = value

    def key_value_dir_get(self, name):
        return [(key, value) for key, value in [*self.items()] if key.startswith(name)]


@pytest.fixture
def job(monkeypatch):
    """This process as the second of two, whose watch ends it by `said`."""
    made = distributed._Job(1, 2, Store(), ["process 0 on a", "process 1 on b"])
    made.said, made.ended = [], threading.Event()

    def end(reason):
        made.said.append(reason)
        made.ended.set()

    monkeypatch.setattr(distributed, "_JOB", made)
    monkeypatch.setattr(distributed, "_join", lambda process: None)
    monkeypatch.setattr(distributed, "_place", nullcontext)
    monkeypatch.setattr(distributed, "_end", end)
    monkeypatch.setattr(distributed, "BEAT", 0.02)
    monkeypatch.setattr(distributed, "LEAVE", 1.0)
    yield made
    for watch in [one for one in threading.enumerate() if "(_watch" in one.name]:
        watch.join(120)  # it would find the store of another test
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize(
    ("there", "lost", "leave", "said"),
    [
        ({}, 2.0, 60.0, "process 0 on a has not been heard of for 2 s"),
        ({"ended/0": "disk full"}, 60.0, 1.0, "process 0 on a has ended: disk full"),
    ],
)
def test_an_error_of_another_is_not_told_as_ones_own(job, monkeypatch, there, lost, leave, said):
    """A program that another is missing from raises one here, which ends nothing before the watch has seen who."""
    ending = SimpleNamespace(**(vars(time) | {"sleep": job.ended.wait}))  # as the process ends then
    monkeypatch.setattr(distributed, "time", ending)
    monkeypatch.setattr(distributed, "LEAVE", leave)
    job.store.update(there)
    kind = ValueError if there else jax.errors.JaxRuntimeError  # as programs on CPUs raise them
    error = kind("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    with pytest.raises(UserError), distributed.initialize("1/2@a:1", Stop(), lost=lost):
        raise UserError("cannot write a checkpoint") from error
    assert job.said[0] == said


@pytest.mark.parametrize("gone", [None, jax.errors.JaxRuntimeError("UNAVAILABLE: closed")])
@pytest.mark.parametrize(
    ("error", "told"), [(UserError("full"), "full"), (SystemExit(1), "SystemExit: 1")]
)
def test_ones_own_error_is_told_the_others_at_once(job, error, told, gone):
    """And raised, though the store may be gone."""
    job.store.gone, start = gone, time.monotonic()
    with pytest.raises(type(error)), distributed.initialize("1/2@a:1", Stop()):
        raise error
    assert job.store.get("ended/1") == (None if gone else told)
    assert time.monotonic() - start < 50  # others are given up after 60


@pytest.mark.parametrize("index", [0, 1])
def test_the_first_stays_until_the_others_have_read_its_error(job, monkeypatch, index):
    monkeypatch.setattr(distributed, "LEAVE", leave := 60.0 * index or 0.3)
    job.index, start = index, time.monotonic()
    with pytest.raises(UserError), distributed.initialize("0/2@a:1", Stop()):
        raise UserError("full")
    assert (time.monotonic() - start > leave) == (index == 0)


def wait_in_a_job(condition, stop):
    """Until that holds, and no longer than some minutes."""
    with suppress(UserError), distributed.initialize("1/2@a:1", stop, lost=5.0):
        until = time.monotonic() + 300
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        raise UserError("enough")


def test_a_first_process_that_does_not_answer_is_given_up(job, monkeypatch):
    """As that of a host without power, whose connections nobody closes."""
    answers = lambda *_, **__: job.ended.wait(300)
    monkeypatch.setattr(job.store, "key_value_set", answers, raising=False)
    wait_in_a_job(job.ended.is_set, Stop())
    assert job.said[0] == "process 0 on a, through which all meet, has not answered for 5 s"


def test_a_wish_to_stop_reaches_the_others(job):
    job.store["alive/0"], stop = "7 leaving", Stop()
    wait_in_a_job(lambda: stop.requested, stop)
    assert stop.requested


def test_who_waits_for_another_that_works_does_not_hang(job, monkeypatch):
    """It hears of the other's progress, and tells of its own; where neither has any it hears of none."""
    monkeypatch.setattr(distributed, "BEAT", 0.01)
    own, heard = [1.5], []
    with distributed.watched(lambda: own[0], lambda: heard.append(job.store["alive/0"])):

        def beaten():  # the other, whose sign changes with each beat
            number = int(job.store.get("alive/0", "0 2.0 ").split()[0]) + 1
            job.store["alive/0"] = f"{number} {2.0 if number < 20 else 3.0} "
            return number > 40

        wait_in_a_job(beaten, Stop())
        assert len(heard) == 1
        assert heard[0].split()[1] == "3.0"
        assert job.store["alive/1"].split()[1] == "1.5"


def test_a_hang_of_another_ends_this_one_with_its_stacks(job, monkeypatch):
    """Which an error does not: this process waits for the other, and its stacks show in what."""
    told, stop = [], Stop()
    monkeypatch.setattr(distributed, "LEAVE", 0.1)
    monkeypatch.setattr(stop, "stall", lambda reason: (told.append(reason), job.ended.set()))
    job.store["ended/0"] = f"{distributed.STALLED}: no progress in the phase reward"
    wait_in_a_job(job.ended.is_set, stop)
    assert told[0] == "process 0 on a has stalled: no progress in the phase reward"


def test_the_end_waits_for_no_process_that_stands_still(job, monkeypatch):
    """All have come to the last barrier, and one does not leave: the work is done, no one may hang."""
    waits, told = threading.Event(), []
    agree = lambda word: told.append(job.store.get("ended/1")) or [word]
    monkeypatch.setattr(distributed, "agree", agree)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: waits.wait(120.0))
    job.store["ended/0"] = ""
    before = time.monotonic()
    with distributed.initialize("1/2@a:1", Stop(), lost=0.5):
        pass
    assert 0.4 < time.monotonic() - before < 60.0
    assert told == [""]  # before the barrier: no one may be taken for lost behind it
    assert not job.said
    waits.set()


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_stalls_tells_the_others_before_it_ends(job, monkeypatch, index):
    """The first waits a little: the store, in which they read it, ends with it."""
    stop, told = Stop(), []
    job.index = index
    monkeypatch.setattr(distributed, "LEAVE", leave := 60.0 * index or 0.3)
    monkeypatch.setattr(stop, "stall", lambda reason: told.append((reason, dict(job.store))))
    before = time.monotonic()
    distributed.stalled("no progress", stop)
    assert told == [("no progress", {f"ended/{index}": f"{distributed.STALLED}: no progress"})]
    assert (time.monotonic() - before > leave) == (index == 0)


def test_one_alone_that_stalls_has_nobody_to_tell(monkeypatch):
    stop, told = Stop(), []
    monkeypatch.setattr(stop, "stall", told.append)
    distributed.stalled("no progress", stop)
    assert told == ["no progress"]


@pytest.mark.parametrize("asked", ["here", "while it works", "elsewhere"])
def test_a_share_is_left_by_all_if_one_is_asked_to_stop(job, monkeypatch, asked):
    stop, said = Stop(), []
    elsewhere = "leave" if asked == "elsewhere" else ""
    monkeypatch.setattr(distributed, "agree", lambda word: said.append(word) or [elsewhere, word])
    stop.requested = asked == "here"

    def work():
        if asked == "while it works":
            raise StopRequested

    with pytest.raises(StopRequested):
        distributed.in_step(work, stop)
    assert said == ["" if elsewhere else "leave"]


def test_words_are_read_by_all_and_then_forgotten(job):
    """A process deletes its word of a round when all have come to the next."""
    job.store["round/1/0"], job.store["round/2/0"] = "a", "c"
    job.store.blocking_key_value_get = lambda key, _: job.store[key]
    job.store.key_value_delete = job.store.pop
    assert distributed.agree("b") == ["a", "b"]
    assert "round/1/1" in job.store
    assert distributed.agree("d") == ["c", "d"]
    assert sorted(job.store) == ["round/1/0", "round/2/0", "round/2/1"]


def test_an_end_is_a_line_and_a_code(job, monkeypatch, capfd):
    codes = []
    monkeypatch.undo()
    monkeypatch.setattr(os, "_exit", codes.append)
    distributed._end("process 1 on b has ended: disk full")
    assert codes == [2]
    said = capfd.readouterr().err
    assert said.startswith("jaxrl-llm: process 1 on b has ended: disk full; this process ends too")
    monkeypatch.setattr(distributed, "_JOB", job)
    distributed._aborted(signal.SIGABRT)  # by JAX, where the first is gone
    assert codes == [2, 2]
    assert "process 0 on a, through which all meet, is gone" in capfd.readouterr().err


def test_how_processes_meet(monkeypatch):
    """By JAX, which would catch SIGTERM and abort: it is told not to, and is not waited for without end."""
    done = []
    state = SimpleNamespace(process_id=1, num_processes=2, client="the store")
    timer = SimpleNamespace(start=lambda: done.append("timer"), cancel=lambda: done.append("met"))
    libc = SimpleNamespace(signal=lambda number, _: done.append(number))
    monkeypatch.setattr(distributed, "_JOB", job := distributed._Job())
    monkeypatch.setattr(distributed, "_require_room", lambda *_: done.append("room"))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **how: done.append(how))
    monkeypatch.setattr("jax._src.distributed.global_state", state)
    monkeypatch.setattr(distributed, "agree", lambda word: ["one", "other"])
    monkeypatch.setattr(distributed.threading, "Timer", lambda *_, **__: timer)
    monkeypatch.setattr(distributed.ctypes, "CDLL", lambda _: libc)
    monkeypatch.setattr(jax.config, "update", lambda name, value: done.append((name, value)))
    distributed._join("1/2@host:1")
    where = {"process_id": 1, "num_processes": 2, "coordinator_address": "host:1"}
    timed = {"initialization_timeout": 2 * distributed.MEETING}
    timed |= {"heartbeat_timeout_seconds": distributed._FOREVER}
    assert done == [
        "timer",
        ("jax_enable_preemption_service", False),
        where | {"cluster_detection_method": "deactivate"} | timed,
        "met",
        signal.SIGABRT,
        ("jax_cuda_visible_devices", "all"),  # one process a host
    ]
    assert (job.index, job.count, job.store) == (1, 2, "the store")
    assert job.names == ["process 0 on one", "process 1 on other"]
    done.clear()
    monkeypatch.setattr(distributed, "agree", lambda word: ["one", "one"])
    distributed._join("0/2@host:1")
    assert done[0] == "room"
    assert done[3]["coordinator_bind_address"] == "host:1"
    assert done[-1] == signal.SIGABRT


@pytest.mark.parametrize("index", [0, 1])
def test_what_the_first_has_is_had_by_all(job, monkeypatch, index):
    job.index, made, said = index, [], []
    monkeypatch.setattr(distributed, "agree", lambda word: said.append(word) or ["[1, 2]", ""])
    assert distributed.from_first(lambda: made.append(0) or [1, 2]) == [1, 2]
    assert said == [["[1, 2]"], [""]][index]
    assert len(made) == (index == 0)


def test_a_store_that_cannot_be_reached_ends_this_process(job):
    job.store.gone = jax.errors.JaxRuntimeError("UNAVAILABLE: closed")
    wait_in_a_job(job.ended.is_set, Stop())
    assert job.said[0] == "process 0 on a, through which all meet, cannot be reached"


def test_processes_on_cpus_read_no_programs_from_a_cache(job, monkeypatch):
    monkeypatch.setattr(distributed, "agree", lambda word: [word])
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    with distributed.initialize("1/2@a:1", Stop()):
        assert not jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with distributed.initialize("1/2@a:1", Stop()):
        assert jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize("where", ["here", "elsewhere", ""])
def test_all_save_where_one_finds_it_is_time(job, monkeypatch, where):
    stop, said = Stop(), []
    stop.save_seconds = -1.0 if where == "here" else 1000.0
    other = "save" if where == "elsewhere" else ""
    monkeypatch.setattr(distributed, "agree", lambda word: said.append(word) or [other, word])
    distributed.check(stop)
    assert said == ["save" if where == "here" else ""]
    assert stop.wants_save == bool(where)


def test_who_does_not_meet_the_others_says_so(monkeypatch):
    def fails(**_):
        raise RuntimeError("DEADLINE_EXCEEDED: nobody is there")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with pytest.raises(UserError, match="--process 1/2@a:1: the processes did not find one"):
        distributed._join("1/2@a:1")
    timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    assert all(one.finished.is_set() for one in timers)


@pytest.mark.parametrize("process", ["auto", "1/2@a:1"])
def test_who_does_not_meet_on_kubernetes_hears_what_auto_wants(monkeypatch, process):
    def fails(**_):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(UserError, match="coordinator_address should be defined") as failed:
        distributed._join(process)
    assert ("needs the package kubernetes" in str(failed.value)) == (process == "auto")
