"""Faults of different kinds, and moments that must be met exactly; `python -m tests.chaos` draws more."""

import copy
import shutil
import signal
import sys

import pytest

from tests.chaos import proxy, several
from tests.chaos.faults import FOREVER, NATIVE, SERVED
from tests.chaos.scene import STALL, checkpoints, difference, recorded
from tests.chaos.trial import Stage, trial
from tests.training import s3

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)
# Tests of resuming, of checkpoints and of journals meet these in the fast tier, and `.ci/run` draws some.
KINDS = (
    "killed while writing",
    "clock jumps",
    "second trainer",
    "disk full",
    "disk error once",
    "kill -9",
    "SIGTERM",
    "checkpoint flipped",
    "record flipped",
    "journal cut",
    "reward hangs",
    "disk blocks",
    "checkpoints unmounted",
)
SPARING = """
from dataclasses import replace
from tests.chaos import small

def config(*, servers: str = "", memory: str = ""):
    return replace(small.config(servers=servers, memory=memory, patience=3.0), save_every=100)
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    made = Stage(tmp_path_factory.mktemp("c"))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_changes_no_number(stage, kind):
    one = trial(stage, kind, 6)
    assert not one.finding, one.line()


@pytest.fixture(scope="module")
def jobs(s3_port, tmp_path_factory):
    """Of two processes, whose runs lie in a bucket."""
    with pytest.MonkeyPatch.context() as patch:
        wire = s3.Wire(s3_port)
        for name, value in s3.credentials(wire.port).items():
            patch.setenv(name, value)
        made = several.Stage(tmp_path_factory.mktemp("j"), 2, wire)
        yield made
        made.nursery.close()
        wire.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [1, 2, 4, 6, 8]
)  # one killed, one told to leave, the network cut, one hangs, the run goes back
def test_a_fault_in_a_job_of_two_changes_no_number(jobs, seed, monkeypatch):
    monkeypatch.setattr(several, "CUT", 3.0)
    one = several.trial(jobs, seed)
    assert not one.finding, one.line()


@pytest.mark.slow
def test_a_run_that_hangs_before_it_has_written_anything_can_be_started_again(stage):
    scene = stage.scene(NATIVE, "hangs")
    scene.start(flags=STALL, hang=("start", 0))
    scene.until()
    assert scene.stalled().startswith("stood still")
    assert [path.name for path in scene.out.iterdir()] == ["stacks-0.txt"]
    scene.start()
    assert scene.end() == "completed"


def test_what_a_fault_has_changed_is_found(stage):
    whole = stage.whole(NATIVE).record
    assert difference(whole, whole) == ""
    other, fewer, older = (copy.deepcopy(whole) for _ in range(3))
    other.metrics[4]["loss"] += 1e-6
    del fewer.metrics[2]
    older.newest.clear()
    assert difference(other, whole).startswith("undetected: 1 other figures")
    assert difference(fewer, whole).startswith("lost: records [(2, 'reinforce'")
    assert difference(older, whole).startswith("undetected: other newest")


def resumed(stage, scene):
    """Whether it goes on to where the undisturbed run ended."""
    scene.proxy.lift()
    scene.start()
    assert scene.end() == "completed"
    return difference(recorded(scene.out), stage.whole(SERVED).record) == ""


@pytest.mark.slow
@pytest.mark.parametrize("where", [proxy.ROLLOUT, proxy.EVALUATION])
def test_sigterm_during_a_wait_for_responses(stage, where):
    """In the last rollout, and in the last evaluation by which a best checkpoint can be chosen."""
    scene, calls = stage.scene(SERVED, f"sigterm-{where}"), stage.whole(SERVED).calls[where]
    scene.proxy.lay(where, calls - (1 if where == proxy.ROLLOUT else 8), 1, proxy.hang)
    scene.start()
    scene.until(lambda: scene.proxy.met)
    scene.signal(signal.SIGTERM)
    assert scene.end() == "stopped"
    assert checkpoints(scene.out)[-1].name == ("5" if where == proxy.ROLLOUT else "6")
    assert resumed(stage, scene)


@pytest.mark.slow
def test_an_outage_saves_before_it_gives_up(stage, tmp_path):
    scene, calls = stage.scene(SERVED, "outage"), stage.whole(SERVED).calls[proxy.ROLLOUT]
    scene.config = tmp_path / "sparing.py"
    scene.config.write_text(SPARING)
    scene.proxy.lay(proxy.ROLLOUT, calls - 1, FOREVER, proxy.internal)
    scene.start()
    assert scene.end() == "a line"
    assert "500" in scene.line()
    assert [path.name for path in checkpoints(scene.out)][-1] == "5"
    assert resumed(stage, scene)
