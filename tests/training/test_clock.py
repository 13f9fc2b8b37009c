"""What a run's time goes into."""

from types import SimpleNamespace

import pytest

from jaxrl_llm.training import clock as clocks
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.log import RunLog


@pytest.fixture
def now(monkeypatch):
    """The time, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(clocks.storage, "heard", lambda: 0.0)  # of a test before this one
    return now


def test_a_step(now):
    clock = Clock()
    with clock("save"):
        now[0] += 7.0
    now[0] += 3.0  # of no step
    clock.idle(9.0)  # of what came before
    clock.restart()
    for phase, seconds in (("rollout", 2.0), ("reward", 1.0), ("collate", 1.0), ("update", 4.0)):
        with clock(phase):
            now[0] += seconds
    now[0] += 2.0
    clock.idle(1.0)
    figures = clock.lap()
    assert (figures["time/step"], figures["time/save"]) == (10.0, 7.0)
    assert figures["time/idle_share"] == pytest.approx(1 - 5 / 10)
    assert figures["time/other"] == 5.0
    assert figures["time/goodput"] == pytest.approx(13 / 20)


def test_until_the_first_step_a_long_phase_says_how_long_it_has_taken(now):
    """Later the lines of steps do: 256 responses by a CPU take many minutes without a word."""
    lines, clock = [], Clock()
    journal = SimpleNamespace(say=lines.append, records=[])
    log = RunLog(journal, clock)
    log.begin("reinforce", range(3), 0, 1)
    lines.clear()
    with clock("rollout"):
        log.progress = lambda: ", 24 of 256 responses are there"
        now[0] += 59.0
        log.tell()
        now[0] += 61.0
        log.tell()
        journal.records.append({"phase": "reinforce", "updates": 1})
        log.begin("reinforce", range(3), 1, 1)
        now[0] += 600.0
        log.tell()
    assert lines[0] == "  rollout: 2 min 0 s so far, 24 of 256 responses are there"
    assert not any("so far" in line for line in lines[1:])


def test_all_time_is_counted_once(now):
    """Nested phases, compiling within them, earlier sessions, and what was lost."""
    clock = Clock()
    clock.begin({"update": 10.0, "evaluation": 5.0}, lost=20.0)
    with clock("evaluation"):
        now[0] += 1.0
        with clock("rollout"):
            now[0] += 2.0
            clock._heard(clocks.COMPILING, 1.5)
        now[0] += 3.0
    figures = clock.lap()
    found = {name: figures[f"time/{name}"] for name in ("evaluation", "rollout", "compile", "lost")}
    assert found == {"evaluation": 4.0, "rollout": 0.5, "compile": 1.5, "lost": 20.0}
    assert clock.in_words() == (
        "41 s in all: lost to restarts 49%, update 24%, evaluation 22%, compiling 4%, rollout 1%"
    )


def test_what_comes_before_a_run_is_its_start(now):
    clock = Clock(since=-3.0)
    now[0] += 2.0
    assert clock.now[0] == "start"
    clock.begin({})
    now[0] += 1.0
    assert clock.now[0] == "other"
    figures = clock.lap()
    assert (figures["time/start"], figures["time/other"]) == (5.0, 1.0)


def test_limits_are_learned(now):
    clock = Clock()
    with clock("reward"):
        assert clock.limit(10.0, 5.0) == clocks.FIRST * 10.0
        now[0] += 4.0
    with clock("reward"):
        assert (clock.limit(10.0, 5.0), clock.limit(30.0, 5.0)) == (20.0, 30.0)


def test_a_save_may_wait_for_the_one_before_however_short_others_were(now):
    """Of a run that goes on the first one waits for nothing."""
    clock = Clock()
    for seconds, limit in ((0.1, 60.0), (20.0, 60.0), (0.1, 100.0)):
        with clock("save"):
            assert clock.limit(10.0, 5.0) == limit
            now[0] += seconds


def test_others_progress_is_none_of_ones_own(now):
    """Else two processes that hang would keep each other alive."""
    clock = Clock()
    own = clock.last_here
    now[0] += 5.0
    clock.others_went_on()
    assert (clock.last_here, clock.now[1]) == (own, now[0])
    now[0] += 5.0
    clock.heartbeat()
    assert clock.last_here == clock.now[1] == now[0]
