"""Several processes are one run: the steps of one process, left together, and none waits for a dead one."""

import filecmp
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jaxrl_llm.runs import disk, folder
from jaxrl_llm.runs.leaving import UNFINISHED

from jaxrl_llm import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import shares
from jaxrl_llm.rollouts.sampler import Rollout
from tests.training.conftest import forget
from tests.training.process import ROOT, metrics, port

SMALL = "tests/chaos/small.py"
LOST = 15.0


class Job:
    """Processes of one run on this machine, with so many devices each."""

    def __init__(self, environment, out, count, devices, *flags, config=SMALL, outs=None, log=None):
        self.log = log or out
        where = f"127.0.0.1:{port()}"
        self.out, self.processes = out, []
        for i in range(count):
            process = (
                ["--process", f"{i}/{count}@{where}", "--lost", str(LOST)] if count > 1 else []
            )
            with self.log.with_name(f"{self.log.name}-{i}.log").open("w") as file:
                self.processes.append(subprocess.Popen(
                    [sys.executable, "-m", "jaxrl_llm.cli", "train", config,
                     "--out", str((outs or [out] * count)[i]), *process, *flags],
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
        self.wait_until(lambda: any(
            r["step"] >= step and r["phase"] == "reinforce" for r in metrics(self.out)
        ))  # fmt: skip

    def ends(self):
        """The exit codes; none waits for ever, and where they stood is said."""
        until = time.monotonic() + 600
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > until:
                for process in self.processes:
                    process.kill()
                pytest.fail("\n".join(map(self.said, range(len(self.processes)))))
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def said(self, i):
        """What the product itself said on the terminal of process `i`."""
        return self.log.with_name(f"{self.log.name}-{i}.log").read_text(errors="replace")

    def finished(self):
        """The folder, once all have ended well."""
        assert self.ends() == [0] * len(self.processes), [
            *map(self.said, range(len(self.processes)))
        ]
        return self.out


@pytest.fixture(scope="module")
def environment(environment):
    """Compiled anew: the collectives of CPU programs that are read from a cache may overtake one another."""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
    return environment | flags | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory):
    """A run of two processes that nothing has disturbed."""
    return Job(environment, tmp_path_factory.mktemp("pair") / "run", 2, 2).finished()


def close(found, whole):
    """Whether two runs have the same records, to rounding."""
    assert [record.keys() for record in found] == [record.keys() for record in whole]
    for here, there in zip(found, whole, strict=True):
        for name, value in there.items():
            if isinstance(value, float):
                assert math.isclose(here[name], value, rel_tol=1e-5, abs_tol=1e-5), (
                    name,
                    here,
                    there,
                )
            else:
                assert here[name] == value
    return True


def the_same_samples(found, whole):
    names = sorted(path.name for path in (whole / "samples").iterdir())
    return names and not any(
        filecmp.cmpfiles(found / "samples", whole / "samples", names, shallow=False)[1:]
    )


def test_two_processes_take_the_steps_of_one(environment, pair, tmp_path):
    alone = Job(environment, tmp_path / "run", 1, 4).finished()
    assert close(metrics(pair), metrics(alone))
    assert the_same_samples(pair, alone)


def test_a_run_goes_on_with_another_number_of_processes(environment, pair, tmp_path):
    out = tmp_path / "run"
    Job(environment, out, 1, 4, "--steps", "1").finished()
    Job(environment, out, 4, 1, "--steps", "2", "--resume").finished()
    Job(environment, out, 2, 1, "--steps", "4", "--resume").finished()
    steps = lambda records: [r for r in records if "test/accuracy" not in r]
    assert close(
        [r for r in steps(metrics(out)) if "reward" in r],
        [r for r in steps(metrics(pair)) if "reward" in r],
    )


def test_a_signal_to_one_saves_once_and_stops_all_after_the_same_step(environment, pair, tmp_path):
    job = Job(environment, tmp_path / "run", 2, 2)
    job.wait_for(3)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.ends() == [UNFINISHED] * 2
    assert "stopped and saved" in job.said(0)
    assert "stopped and saved" not in job.said(1)
    Job(environment, job.out, 2, 2, "--resume").finished()
    assert metrics(job.out) == metrics(pair)
    assert the_same_samples(job.out, pair)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_dead_one_ends_the_others_and_the_run_goes_on_to_the_same(
    environment, pair, tmp_path, victim
):
    job = Job(environment, tmp_path / "run", 2, 2)
    job.wait_for(3)
    start = time.monotonic()
    job.processes[victim].kill()
    ends = job.ends()
    assert time.monotonic() - start < LOST + 20
    assert ends[victim] == -signal.SIGKILL
    said = job.said(1 - victim)
    assert "Traceback" not in said
    if victim or ends[1] == 2:
        assert ends[1 - victim] == 2
        assert f"jaxrl-llm: process {victim} on " in said
    else:  # JAX misses the first in its own way, mostly before we do
        assert ends[1] == -signal.SIGABRT
        assert "the leader (usually slice 0 task 0)" in said
    Job(environment, job.out, 2, 2, "--resume", "auto").finished()
    assert metrics(job.out) == metrics(pair)


def test_a_bucket_serves_processes_that_share_no_folder(environment, pair, url, tmp_path):
    """Stopped once, killed once, and gone on with in one process."""
    users = environment | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    start = lambda count, *flags: Job(users, url, count, 4 // count, *flags, log=tmp_path / "run")
    job = start(2)
    job.wait_until(lambda: "1/4 reinforce" in job.said(0))
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.ends() == [UNFINISHED] * 2
    job = start(2, "--resume")
    job.wait_until(lambda: re.search("[234]/4 reinforce", job.said(0)))
    job.processes[1].kill()
    assert job.ends() == [2, -signal.SIGKILL]
    start(1, "--resume").finished()
    forget()
    assert close(metrics(folder.at_hand(Path(url))), metrics(pair))


class Frozen:
    """The store of a first process that stands still: what it is asked is never answered."""

    def __init__(self, answers):
        self.answers, self.free = answers, threading.Event()

    def key_value_set(self, *_, **__):
        self.answers -= 1
        if self.answers < 0:
            self.free.wait()

    def key_value_dir_get(self, name):
        return [("alive/0", str(self.answers))] if name == "alive/" else []


def test_a_first_process_that_does_not_answer_is_given_up(monkeypatch):
    """As that of a host without power, whose connections nobody closes."""
    store, said, ended = Frozen(answers=10), [], threading.Event()

    def end(reason):
        said.append((store.answers, reason))
        ended.set()

    monkeypatch.setattr(hosts, "BEAT", 0.02)
    monkeypatch.setattr(hosts, "_end", end)
    job = hosts._Job(index=1, count=2, store=store, names=["process 0 on a", "process 1 on b"])
    monkeypatch.setattr(hosts, "_JOB", job)
    with hosts._watched(1.0, lambda: False):
        assert ended.wait(15)
        store.free.set()
    assert said[0] == (-1, "process 0 on a, through which all meet, has not answered for 1 s")


@pytest.mark.parametrize(
    ("said", "naps"),
    [("UNAVAILABLE: closed", 1), ("Barrier timed out", 0), ("RESOURCE_EXHAUSTED: no memory", 0)],
)
def test_a_process_that_goes_while_all_write_is_not_taken_for_a_full_disk(
    monkeypatch, tmp_path, said, naps
):
    """The watch has time to miss it, before what came of that is told as the disk's fault."""
    known = []

    def ask(*_, **__):
        raise jax.errors.JaxRuntimeError(said)

    def sleep(seconds):
        known.append((seconds > hosts._JOB.lost, hosts._JOB.failure))

    monkeypatch.setattr(hosts, "time", SimpleNamespace(sleep=sleep))
    job = hosts._Job(index=1, count=2, store=SimpleNamespace(key_value_set=ask))
    monkeypatch.setattr(hosts, "_JOB", job)
    with (
        pytest.raises(jax.errors.JaxRuntimeError),
        hosts.together(),
        disk.writing(tmp_path, "a checkpoint"),
    ):
        ask()
    assert known == [(True, "")] * naps
    assert "cannot write a checkpoint" in job.failure


class Failed:
    """A store that knows of the failure of a process, in a round that this one has or has not come to."""

    def __init__(self):
        self.beats = 0

    def key_value_set(self, *_, **__):
        self.beats += 1

    def key_value_dir_get(self, name):
        known = {
            "alive/": ("alive/1", str(self.beats)),
            "failed/": ("failed/1", '[5, "disk full"]'),
        }
        return [known[name]] if name in known else []


@pytest.mark.parametrize(("round_", "ends"), [(4, ["process 1 on b: disk full"]), (5, [])])
def test_a_failure_that_a_program_keeps_one_from_hearing_ends_it(monkeypatch, round_, ends):
    """It waits there for the one that failed, which waits for it in a round."""
    said, ended = [], threading.Event()

    def end(reason):
        said[:] = [reason]
        ended.set()

    monkeypatch.setattr(hosts, "BEAT", 0.02)
    monkeypatch.setattr(hosts, "_end", end)
    names = ["process 0 on a", "process 1 on b"]
    job = hosts._Job(index=0, count=2, store=Failed(), names=names, round=round_)
    monkeypatch.setattr(hosts, "_JOB", job)
    with hosts._watched(1.0, lambda: False):
        assert ended.wait(15 if ends else 3) == bool(ends)
    assert said == ends


@pytest.mark.parametrize("shown", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_what_one_cannot_write_ends_all_with_its_line(environment, tmp_path, shown):
    """Whether an evaluation comes after it, as after step 4, or a checkpoint, as after step 5."""
    job = Job(environment, tmp_path / "run", 2, 1)
    job.wait_until((job.out / "samples" / f"step-{shown:06d}.md").exists)
    (job.out / "samples").rename(job.out / "moved")
    (job.out / "samples").write_text("in the way")
    assert job.ends() == [2, 2]
    for i in range(2):
        assert "samples" in job.said(i)
        assert "Traceback" not in job.said(i)


BUG = """
from tests.chaos.small import *
from jaxrl_llm import hosts
from jaxrl_llm.learning import reinforce

sound = reinforce.learned_from

def learned_from(*arguments):
    if hosts.index() == 1:
        raise ZeroDivisionError("a bug")
    return sound(*arguments)

reinforce.learned_from = learned_from
"""


def test_a_bug_that_one_meets_ends_all_and_is_shown(environment, tmp_path):
    """The first is by then in a program that waits for the other."""
    (tmp_path / "buggy.py").write_text(BUG)
    job = Job(environment, tmp_path / "run", 2, 1, config=str(tmp_path / "buggy.py"))
    assert 0 not in job.ends()
    assert "process 1 on " in job.said(0)
    assert "ZeroDivisionError: a bug" in job.said(0)
    assert "in learned_from" in job.said(1)


def test_folders_that_are_not_shared_are_found(environment, pair, tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    shutil.copytree(pair, outs[1])
    job = Job(environment, outs[0], 2, 1, outs=outs)
    assert job.ends() == [2, 2]
    assert "storage that all processes see" in job.said(0)


@pytest.mark.parametrize("given", ["2/2@host:1", "one", "0/2@host", "0/2"])
def test_a_place_among_processes_is_checked(given):
    with pytest.raises(UserError, match="I/N@HOST:PORT"), hosts.joined(given):
        pass


@pytest.mark.parametrize("index", [0, 1])
def test_one_whose_others_are_never_started_says_so(environment, index):
    lonely = "from jaxrl_llm import hosts; hosts.MEETING = 2.0; from jaxrl_llm.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", lonely, "train", SMALL, "--process", f"{index}/2@127.0.0.1:{port()}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    lines = [line for line in ended.stderr.splitlines() if line.startswith("jaxrl-llm: ")]
    assert len(lines) == 1
    assert "not all came within 2 s" in lines[0]
    assert "stack trace" not in ended.stderr


PROMPTS = [[1, 2], [3], [1, 2], [4], [5], [3]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_equal_prompts_belong_to_one_process_and_every_prompt_to_one(monkeypatch, count):
    monkeypatch.setattr(hosts._JOB, "count", count)
    owners = shares.owners(PROMPTS)
    assert all(0 <= owner < count for owner in owners)
    assert len({(tuple(p), o) for p, o in zip(PROMPTS, owners, strict=True)}) == 4
    assert max(owners) - min(owners) == min(count, 4) - 1 or count == 9
    parts = [
        [f"{i} of {n}" for i, o in enumerate(owners) if o == p for n in range(2)]
        for p in range(count)
    ]
    assert shares.merged(PROMPTS, parts) == [f"{i} of {n}" for i in range(6) for n in range(2)]


def test_responses_of_all_processes_come_together(monkeypatch):
    """As if the other's payload came over the network."""
    monkeypatch.setattr(hosts._JOB, "count", 2)
    rollout = lambda tokens, **more: Rollout(
        [], tokens, [[-0.5] * len(t) for t in tokens], [len(t) > 1 for t in tokens], **more
    )
    first, second = (
        rollout([[7], [8, 8]], version=3),
        rollout([[9, 9, 9], [1]], version=3, tolerance=0.1),
    )
    payloads = {0: shares._payload(first), 1: shares._payload(second)}
    monkeypatch.setattr(hosts, "exchange", lambda payload: [*payloads.values()])
    whole = shares.whole(first, [[1], [2]])
    assert whole.prompts == [[1], [1], [2], [2]]
    assert [*whole.responses] == [[7], [8, 8], [9, 9, 9], [1]]
    assert [*whole.logps] == [[-0.5], [-0.5] * 2, [-0.5] * 3, [-0.5]]
    assert [*whole.finished] == [False, True, True, False]
    assert (whole.version, whole.tolerance) == (3, pytest.approx(0.1))


def test_nothing_is_raised_between_the_halves_of_an_exchange(monkeypatch):
    """The others already wait for the second, in a program that would wait for ever."""
    monkeypatch.setattr(hosts._JOB, "count", 2)
    unbroken = []

    class Payload(bytes):
        def __len__(self):
            unbroken.append(hosts.meeting())
            return super().__len__()

    def meet(entry):
        with hosts._unbroken():
            return [entry, entry]

    def gather(padded):
        unbroken.append(hosts.meeting())
        return [padded, padded]

    monkeypatch.setattr(hosts, "_meet", meet)
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", gather)
    assert hosts.exchange(Payload(b"abc")) == [b"abc", b"abc"]
    assert unbroken == [True] * len(unbroken) != []
    assert not hosts.meeting()


def test_a_process_without_prompts_has_a_part_of_nothing(monkeypatch):
    monkeypatch.setattr(hosts._JOB, "count", 2)
    none, some = Rollout([], [], []), Rollout([], [[7]], [[-0.5]], [True], version=2)
    payloads = [shares._payload(one) for one in (some, none)]
    monkeypatch.setattr(hosts, "exchange", lambda payload: payloads)
    whole = shares.whole(some, [[1]])
    assert (whole.responses, whole.version, whole.tolerance) == (([7],), 2, None)
    json.dumps(dict(vars(whole)))  # as notes of a checkpoint
