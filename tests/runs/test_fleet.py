"""Processes of nothing but a line of Python."""

import os
import sys
import threading
import time

import pytest
from jaxrl_llm.runs import fleet
from jaxrl_llm.runs.leaving import Stop

IGNORE = lambda states: None


def jobs(folder, *lines):
    """(name, after, line of Python) each."""
    return [
        fleet.Job(name, [sys.executable, "-S", "-c", line], folder / f"{name}.log", after)
        for name, after, line in lines
    ]


def test_jobs_wait_for_what_they_need_and_fail_with_it(tmp_path):
    mark = lambda name: f"open({str(tmp_path / 'order')!r}, 'a').write({name!r})"
    seen = []
    states = fleet.run(
        jobs(tmp_path, ("b", "a", mark("b")), ("a", "", mark("a")), ("c", "bad", mark("c")),
             ("bad", "", "raise ValueError('no luck')")),
        2, 1, Stop(), lambda states: seen.append(sum(s == fleet.RUNNING for s in states.values())), {},
    )  # fmt: skip
    assert (tmp_path / "order").read_text() == "ab"
    assert states == {"b": fleet.DONE, "a": fleet.DONE, "c": fleet.FAILED, "bad": fleet.FAILED}
    assert "no luck" in (tmp_path / "bad.log").read_text()
    assert max(seen) == 2


def test_a_stop_lets_runs_save_and_starts_no_other(tmp_path):
    waits = (
        "import signal, sys, time\n"
        f"def leave(*_): open({str(tmp_path / 'saved')!r}, 'w'); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, leave); open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"
    )
    stop = Stop()

    def ask():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)
        stop.asked = True

    threading.Thread(target=ask, daemon=True).start()
    states = fleet.run(jobs(tmp_path, ("a", "", waits), ("b", "", "")), 1, 1, stop, IGNORE, {})
    assert states == {"a": fleet.STOPPED, "b": fleet.WAITING}
    assert (tmp_path / "saved").exists()


def test_an_error_of_ours_lets_runs_save(tmp_path):
    waits = (
        "import signal, sys, time\n"
        f"def leave(*_): time.sleep(0.5); open({str(tmp_path / 'saved')!r}, 'w'); sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, leave); open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(60)"
    )

    def look(_):
        if (tmp_path / "ready").exists():
            raise OSError("no table can be shown")

    with pytest.raises(OSError, match="no table"):
        fleet.run(jobs(tmp_path, ("a", "", waits)), 1, 1, Stop(), look, {})
    assert (tmp_path / "saved").exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is Linux's")
def test_a_job_has_its_number_of_cores(tmp_path):
    before = os.sched_getaffinity(0)
    tells = "import os; print(os.environ['NPROC'], len(os.sched_getaffinity(0)), flush=True)"
    fleet.run(jobs(tmp_path, ("a", "", tells)), 3, 1, Stop(), IGNORE, {})
    assert (tmp_path / "a.log").read_text().split() == ["1", "1"]
    assert os.sched_getaffinity(0) == before
