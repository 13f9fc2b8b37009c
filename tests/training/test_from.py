"""A run that begins with another's warm start is the run that made its own."""

import json
import shutil
from pathlib import Path

import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import assemble, folder
from jaxrl_llm.runs.notes import REINFORCE
from tests.training import quick
from tests.training.process import QUICK, contents, finished, metrics, train


@pytest.fixture(scope="module")
def warm(environment, tmp_path_factory):
    """The folder of a warm start alone."""
    return finished(environment, tmp_path_factory.mktemp("warm") / "run", "--steps", "0")


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stop:
        main(["train", QUICK, *map(str, flags)])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_a_shared_warm_start_changes_nothing(environment, whole, warm, tmp_path, capsys):
    run = finished(environment, tmp_path / "run", "--from", str(warm))
    assert metrics(run) == [r for r in metrics(whole) if r["phase"] == REINFORCE]
    assert json.loads((run / "run.json").read_text())["from"] == str(warm)
    said = refused(capsys, "--out", run, "--resume", "--from", tmp_path)
    assert f"was started with --from {warm}: resume it so" in said
    again = train(environment, run, "--resume")
    assert "nothing was left to do" in again.stdout, again.stderr


def test_a_run_does_not_get_shorter(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = contents(run)
    said = refused(capsys, "--out", run, "--resume", "--steps", "1")
    assert "would have 5 with these --steps: give" in said
    assert contents(run) == before


def test_nor_one_that_is_told_again_what_it_began_with(environment, warm, tmp_path, capsys):
    run = finished(environment, tmp_path / "run", "--from", str(warm))
    before = contents(run)
    flags = ("--out", run, "--resume", "--from", warm, "--steps", "1")
    assert "would have 5 with these --steps: give" in refused(capsys, *flags)
    assert contents(run) == before


def test_what_it_began_with_is_needed_until_something_is_saved(environment, warm, tmp_path, capsys):
    origin, run = tmp_path / "origin", tmp_path / "run"
    shutil.copytree(warm, origin)
    finished(environment, run, "--from", str(origin), "--steps", "1")
    shutil.rmtree(origin)
    done = train(environment, run, "--steps", "1", "--resume")
    assert "nothing was left to do" in done.stdout, done.stderr
    shutil.rmtree(run / "checkpoints")
    flags = ("--out", run, "--steps", "1")
    assert "checkpoint of step 4, the end of its warm start, is gone" in refused(
        capsys, *flags, "--resume"
    )
    parts = assemble.parts(quick.config(), tmp_path)
    with folder.opened(run, Path(QUICK), {}, parts, resume=False):
        (run / "checkpoints" / "2").mkdir(parents=True)
    with (
        pytest.raises(UserError, match="already holds a run"),
        folder.opened(run, Path(QUICK), {}, parts, resume=False),
    ):
        pass


def test_it_is_known_by_its_id_where_it_has_moved(warm, tmp_path):
    origin, run = tmp_path / "origin", tmp_path / "run"
    parts = assemble.parts(quick.config(), tmp_path)
    shutil.copytree(warm, origin)
    with folder.opened(run, Path(QUICK), {}, parts, resume=False, origin=origin):
        pass
    origin.rename(tmp_path / "moved")
    with folder.opened(run, Path(QUICK), {}, parts, resume=True, origin=tmp_path / "moved"):
        pass
    with folder.opened(run, Path(QUICK), {}, parts, resume=True, origin=origin):  # it may be gone
        pass
    (other := tmp_path / "other").mkdir()
    for given in (other, None):
        with (
            pytest.raises(UserError, match="was started with --from"),
            folder.opened(run, Path(QUICK), {}, parts, resume=True, origin=given),
        ):
            pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--warm-steps", "5"), "its warm start has 4 steps, that of the config 5"),
        (("--hidden", "16"), "hidden_size is 32 there and 16"),
    ],
)
def test_another_model_or_warm_start_is_refused(warm, tmp_path, capsys, flags, message):
    assert message in refused(capsys, "--out", tmp_path / "run", "--from", warm, *flags)
    assert not (tmp_path / "run").exists()


def test_there_must_be_a_warm_start(whole, tmp_path, capsys):
    for origin, message in (
        (tmp_path, "no run there that has ended its warm start"),
        (whole, "checkpoint of step 4, the end of its warm start, is gone"),
    ):
        assert message in refused(capsys, "--out", tmp_path / "run", "--from", origin)
    assert not (tmp_path / "run").exists()
