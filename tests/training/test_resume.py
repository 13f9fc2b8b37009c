"""A run that is killed and resumed is the uninterrupted run, bit for bit."""

import random
import signal
import subprocess
import sys
import time

import pytest

from jaxrl_llm.runs.leaving import UNFINISHED
from tests.training import process
from tests.training.process import metrics, train

MOMENTS = ("rollout", "update", "save", "evaluation")


def killed(environment, out, moment, nth, delay):
    program = ("-m", "tests.training.killed", moment, str(nth), str(delay))
    assert train(environment, out, program=program).returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_bit_for_bit(moment, environment, whole, tmp_path):
    out = tmp_path / "run"
    killed(environment, out, moment, 3, 0.02)
    done = train(environment, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole)
    assert len(metrics(whole)) == 10 + 4 + 1  # steps of both phases, evaluations, test
    assert "mean of the last 2:" in done.stdout  # those before the kill count too


def test_what_waits_in_the_memory_of_the_host_changes_no_number(environment, whole, tmp_path):
    out, program = tmp_path / "run", ("-m", "tests.training.killed", "save", "3", "0.02")
    done = train(environment, out, "--offload", "both", program=program)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = train(environment, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_random_moments(seed, environment, whole, tmp_path):
    draw, out = random.Random(seed), tmp_path / "run"
    killed(environment, out, draw.choice(MOMENTS), draw.randint(1, 4), draw.uniform(0, 0.2))
    assert train(environment, out, "--resume").returncode == 0
    assert metrics(out) == metrics(whole)


def test_sigterm_saves_and_a_damaged_checkpoint_falls_back(environment, whole, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", process.QUICK, "--out", str(out)]
    with subprocess.Popen(
        command, cwd=process.ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as running:
        while len(metrics(out)) < 8:
            assert running.poll() is None
            time.sleep(0.01)
        running.terminate()
        try:
            said, _ = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == UNFINISHED
    assert "go on with --resume" in said
    newest = max((out / "checkpoints").glob("[0-9]*"), key=lambda p: int(p.name))
    largest = max(newest.rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = train(environment, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"checkpoint {newest.name} is damaged" in done.stderr
    assert metrics(out) == metrics(whole)
