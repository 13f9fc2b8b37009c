"""Studies: every study file, what is left to do of one, and what is read out of its runs."""

import json
import pathlib
import shutil

import pytest

from jaxrl_llm import config, userfile
from jaxrl_llm.cli.main import main
from jaxrl_llm.cli.study import command, grid
from jaxrl_llm.errors import UserError
from jaxrl_llm.reports import study_figures
from jaxrl_llm.reports.study import Planned, Study
from jaxrl_llm.runs import fleet, journal

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "configs" / "studies").glob("*.py"))
SMALL = f"""'''What does Lopti do?'''
from jaxrl_llm.reports.study import Study
study = Study(
    config={str(ROOT / "tests" / "runs" / "quick.py")!r},
    variants={{"plain": {{"eta": 0.0}}, "Lopti": {{"eta": 0.5}}}},
    baseline="plain",
    flags={{"steps": 2, "warm_steps": 2}},
    warm=("warm_steps",),
    seeds=(0, 1),
)
"""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_study_builds_every_config(path):
    study = userfile.run(path, "study").study
    make = config.load(path.parent / study.config)
    runs = study.runs(seeds=(5,))
    assert len({run.name for run in runs}) == len(runs) >= 3
    for run in runs:
        made, warm = (make(**r.flags) for r in (run, study.warm_start(run)))
        assert made.seed == warm.seed == 5
        assert warm.steps == 0
        assert warm.model == made.model
        assert (warm.collate.prompt_length, warm.warm_start.collate, warm.warm_start.steps) == (
            made.collate.prompt_length, made.warm_start.collate, made.warm_start.steps
        )  # fmt: skip
        assert warm.warm_start.demonstration.keywords == made.warm_start.demonstration.keywords
        assert warm.task.keywords == made.task.keywords


def test_a_variant_may_not_touch_the_warm_start():
    with pytest.raises(UserError, match=r"variant 'b' sets 'steps', on which"):
        Study("c.py", {"a": {}, "b": {"steps": 1}}, "a", warm=("steps",))
    with pytest.raises(UserError, match=r"the baseline 'c' is none of"):
        Study("c.py", {"a": {}}, "c")


def test_warm_starts_are_shared_where_they_are_the_same():
    panels = {"p": {"size": 1, "algo": "x"}, "q": {"size": 1}, "r": {"size": 2}}
    study = Study("c.py", {"a": {}, "b": {"k": 1}}, "a", panels, warm=("size",), seeds=(0, 1))
    assert len(study.runs()) == 12
    assert [run.seed for run in study.runs()] == [0] * 6 + [1] * 6
    warm = {study.warm_start(run).name for run in study.runs()}
    assert warm == {f"warm-size-{size}-seed{seed}" for size in (1, 2) for seed in (0, 1)}


# The resume logic, with runs whose records are written by hand.


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def fake(out, name, accuracies, *, warm=2, flags=None):
    """The folder of a run that was evaluated at every step, from 0 on; half as many sampled answers are right."""
    where = out / "runs" / name
    where.mkdir(parents=True)
    records = []
    for step, accuracy in enumerate(accuracies):
        if step:
            sampled = {"reward": 0.0, "accuracy": accuracy / 2}
            records.append({**sampled, "rare_half": 0.25, "entropy": 0.5, "length": 30.0})
        records.append(
            {"eval/accuracy": accuracy, "eval/accuracy/2": 1.0, "eval/accuracy/3": accuracy}
        )
        for record in records[-2:]:
            record.update({"step": warm + step, "phase": "reinforce", "time/step": 1.0})
    (where / journal.METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    (where / "run.json").write_text(json.dumps({"flags": flags or {}}))
    (where / "checkpoints" / str(warm + len(accuracies) - 1)).mkdir(parents=True)
    return where


def planned(monkeypatch, *arguments):
    """The jobs that the command would start."""
    caught = []

    def catch(jobs, *rest):
        caught.extend(jobs)
        return {job.name: fleet.DONE for job in jobs}

    monkeypatch.setattr(fleet, "run", catch)
    main(["study", *map(str, arguments)])
    return {job.name: job for job in caught}


def test_a_new_study_makes_everything_warm_starts_first(small, tmp_path, monkeypatch, capsys):
    jobs = planned(monkeypatch, small, "--out", tmp_path / "out")
    warm = ["warm-warm_steps-2-seed0", "warm-warm_steps-2-seed1"]
    assert [*jobs] == [warm[0], "plain-seed0", "lopti-seed0", warm[1], "plain-seed1", "lopti-seed1"]
    assert [job.after for job in jobs.values()] == ["", warm[0], warm[0], "", warm[1], warm[1]]
    words = " ".join(jobs["lopti-seed1"].command)
    assert "--steps 2 --warm-steps 2 --eta 0.5 --seed 1" in words
    assert f"--from {tmp_path}/out/runs/{warm[1]}" in words
    assert "--resume" not in words
    assert "--steps 0" in " ".join(jobs[warm[0]].command)
    assert "no run in" in capsys.readouterr().out


def test_a_study_goes_on_with_what_is_left(small, tmp_path, monkeypatch):
    out = tmp_path / "out"
    fake(out, "warm-warm_steps-2-seed0", [0.1])
    fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    fake(out, "lopti-seed0", [0.1, 0.2])
    nothing = out / "runs" / "plain-seed1"
    (nothing / "model").mkdir(parents=True)  # killed before its first checkpoint
    (nothing / "run.json").write_text('{"flags": {}}')
    jobs = planned(monkeypatch, small, "--out", out)
    assert [*jobs] == ["lopti-seed0", "warm-warm_steps-2-seed1", "plain-seed1", "lopti-seed1"]
    assert jobs["lopti-seed0"].after == ""
    resumed = [name for name, job in jobs.items() if "--resume" in job.command]
    assert resumed == ["lopti-seed0"]
    assert not nothing.exists()


def test_runs_of_other_flags_are_not_mixed_in(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    fake(out, "plain-seed0", [0.1, 0.2, 0.3], flags={"eta": 0.3, "seed": 0})
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out)
    assert "was made with eta = 0.3, the study says 0.0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out, "--report")
    assert "was made with eta = 0.3, the study says 0.0" in capsys.readouterr().err
    shutil.rmtree(out / "runs")
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out, "--threads", "2")
    assert "go on with --threads 1" in capsys.readouterr().err


def test_runs_of_another_version_of_the_config_are_not_mixed_in(
    small, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    config, where = ROOT / "tests" / "runs" / "quick.py", fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    shutil.copy(config, where / "config.py")
    assert "plain-seed0" not in planned(monkeypatch, small, "--out", out)
    (where / "config.py").write_text(config.read_text().replace("1e-3", "1e-4"))
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out)
    said = capsys.readouterr().err
    assert "quick.py has changed since" in said
    assert f"put it back as it was ({where}/config.py)" in said


def test_files_that_the_config_loads_are_parts_of_it(small, tmp_path, monkeypatch, capsys):
    out, loaded = tmp_path / "out", tmp_path / "loaded.py"
    where = fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    (where / "files").mkdir()
    for file in (loaded, where / "files" / "0-loaded.py"):
        file.write_text("RATE = 1")
    run = {"flags": {}, "files": {str(loaded): "files/0-loaded.py"}}
    (where / "run.json").write_text(json.dumps(run))
    assert "plain-seed0" not in planned(monkeypatch, small, "--out", out)
    loaded.write_text("RATE = 2")
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out)
    assert f"{loaded} has changed since {where} was made" in capsys.readouterr().err


def test_a_flag_that_changes_the_warm_start_has_to_be_named(tmp_path, monkeypatch, capsys):
    """Else all begin with the warm start of the default, and nothing says so."""
    asked = SMALL.replace("tests/training/quick.py", "configs/kk_tiny.py")
    for flags, warm in (
        ('"warm_steps": 60, "people": 4', '"warm_steps",'),
        ('"warm_steps": 60, "careless": 0.0', '"warm_steps",'),
        ('"warm_steps": 60', ""),
    ):
        file = tmp_path / "tiny.py"
        text = asked.replace('"warm_steps": 2', flags).replace('("warm_steps",)', f"({warm})")
        file.write_text(text)
        with pytest.raises(SystemExit):
            planned(monkeypatch, file, "--out", tmp_path / "out")
        assert "name the flag that changes it in warm" in capsys.readouterr().err, flags
    assert not (tmp_path / "out").exists()


def test_so_has_one_that_is_bound_in_a_function(tmp_path, monkeypatch, capsys):
    """Optimizers are functions, and tasks may be: what they close over tells."""
    mine = tmp_path / "mine.py"
    mine.write_text("""from dataclasses import replace
from jaxrl_llm.config import Config
from jaxrl_llm.learning import optimizers
from tests.training.quick import config as quick
import optax

def config(
    steps: int = 2, warm_rate: float = 1e-3, hint: str = "", peak: float = 0.0, many: int = 2, seed: int = 0
) -> Config:
    made = quick(steps=steps, seed=seed)
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, 2, 4) if peak else warm_rate
    collate = replace(made.warm_start.collate, microbatches=many)
    warm = replace(made.warm_start, optimizer=optimizers.adamw(rate), collate=collate)
    return replace(made, warm_start=warm, task=lambda folder: (made.task(folder), hint)[0])
""")
    written = lambda flags, warm=(): (
        f"""from jaxrl_llm.reports.study import Study
study = Study(
    config={str(mine)!r}, variants={{"a": {{}}, "b": {{"steps": 3}}}}, baseline="a", warm={warm}, flags={flags}
)
"""
    )
    for flags in ({"warm_rate": 3e-3}, {"hint": "x"}, {"peak": 3e-3}):
        [named] = flags
        text = written(flags)
        (tmp_path / "small.py").write_text(text)
        with pytest.raises(SystemExit):
            planned(monkeypatch, tmp_path / "small.py", "--out", tmp_path / "out")
        assert "name the flag that changes it in warm" in capsys.readouterr().err
        (tmp_path / "small.py").write_text(written(flags, (named,)))
        planned(monkeypatch, tmp_path / "small.py", "--out", tmp_path / f"out-{named}")
    (tmp_path / "small.py").write_text(written({"many": 1}))  # how it is computed, not what
    planned(monkeypatch, tmp_path / "small.py", "--out", tmp_path / "out-many")


def test_a_seed_that_is_none_is_found_before_anything_starts(small, tmp_path, monkeypatch, capsys):
    for seed in ("-1", str(2**32)):
        with pytest.raises(SystemExit):
            planned(monkeypatch, small, "--out", tmp_path / "out", "--seeds", "0", seed)
        assert f"seed = {seed} must be at least 0" in capsys.readouterr().err


def test_a_full_disk_is_one_line(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study_figures, "draw", full)
    with pytest.raises(SystemExit) as left:
        main(["study", str(small), "--out", str(out), "--report"])
    assert left.value.code == 2
    assert f"cannot write to {out}: No space left on device" in capsys.readouterr().err


def test_flags_may_be_paths(small, tmp_path, monkeypatch):
    out, quick, mine = tmp_path / "out", ROOT / "tests" / "runs" / "quick.py", tmp_path / "mine.py"
    imported, last = "from pathlib import Path\n", "    seed: int = 0,\n"
    mine.write_text(
        imported + quick.read_text().replace(last, last + "    of: Path | None = None,\n")
    )
    text = SMALL.replace(str(quick), str(mine)).replace(
        '{"steps": 2,', '{"of": Path("a"), "steps": 2,'
    )
    small.write_text(imported + text)
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    shutil.rmtree(out / "runs")
    assert [*planned(monkeypatch, small, "--out", out, "--seeds", "0")] == []


def test_a_finished_run_may_lose_its_checkpoints_no_other_loses_anything(
    small, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    done, half = fake(out, "plain-seed0", [0.1, 0.2, 0.3]), fake(out, "lopti-seed0", [0.1, 0.2])
    for where in (done, half):
        shutil.rmtree(where / "checkpoints")
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", out)
    assert f"{half} has lost its checkpoints before it was finished" in capsys.readouterr().err
    assert (half / journal.METRICS).exists()
    half.rename(tmp_path / "away")
    jobs = planned(monkeypatch, small, "--out", out)
    assert [*jobs][:2] == ["warm-warm_steps-2-seed0", "lopti-seed0"]
    assert (done / journal.METRICS).exists()


def test_a_variant_called_as_a_warm_start_is_refused(small, tmp_path, monkeypatch, capsys):
    small.write_text(SMALL.replace('"plain"', '"warm"').replace('warm=("warm_steps",),', ""))
    with pytest.raises(SystemExit):
        planned(monkeypatch, small, "--out", tmp_path / "out")
    assert (
        "or one and a warm start, have names that make the same folder" in capsys.readouterr().err
    )


def test_a_seed_given_twice_is_one(small, tmp_path, monkeypatch):
    jobs = planned(monkeypatch, small, "--out", tmp_path / "out", "--seeds", "1", "1")
    assert [*jobs] == ["warm-warm_steps-2-seed1", "plain-seed1", "lopti-seed1"]


@pytest.mark.parametrize("name", ["threads", "runs/plain-seed0/run.json"])
def test_a_damaged_file_is_one_line(name, small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    planned(monkeypatch, small, "--out", out)
    capsys.readouterr()
    (out / name).write_text("")
    with pytest.raises(SystemExit) as left:
        planned(monkeypatch, small, "--out", out)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"jaxrl-llm: {out / name} ")


def test_a_folder_is_worked_on_once(tmp_path):
    refused = pytest.raises(UserError, match="by another process")
    with command._alone(tmp_path, 1), refused, command._alone(tmp_path, 1):
        pass


def test_the_report_reads_the_runs(small, tmp_path, capsys):
    out = tmp_path / "out"
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])
    fake(out, "lopti-seed0", [0.1, 0.4, 0.4])
    fake(out, "plain-seed1", [0.2, 0.3, 0.5])
    fake(out, "lopti-seed1", [0.2, 0.7])
    main(["study", str(small), "--out", str(out), "--report"])
    text = capsys.readouterr().out
    assert "3 of 4 runs are finished" in text
    assert "What does Lopti do?" in text
    found = json.loads((out / "results.json").read_text())
    entries = {(e["variant"], e["figure"]): e for e in found["summary"]}
    plain, lopti = (entries[v, "greedy"] for v in ("plain", "Lopti"))
    assert (plain["n"], plain["mean"]) == (2, pytest.approx(0.35))  # 0.3 and 0.4
    assert lopti["difference"] == {
        "n": 1,
        "mean": pytest.approx(0.1),
        "low": None,
        "high": None,
        "holm": None,
    }
    assert entries["Lopti", "greedy/2"]["mean"] == 1.0
    assert entries["plain", "sampled"]["mean"] == pytest.approx(0.175)  # 0.1, 0.2 and 0.15, 0.25
    # Plain, seed 0: from 0.1 to 0.15 in the mean, half of it after 1.25 steps; Lopti begins above that.
    assert entries["Lopti", "steps_to_level"]["mean"] == 1.0
    assert entries["Lopti", "steps_to_level"]["difference"]["mean"] == pytest.approx(-0.25)
    assert (out / "results.md").read_text() in text
    pictures = {name: (out / name).read_bytes() for name in ("curves.svg", "differences.svg")}
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    main(["study", str(small), "--out", str(out), "--report"])
    assert pictures == {
        name: (out / name).read_bytes() for name in pictures
    }  # nothing to commit anew


def test_a_study_goes_on_elsewhere_from_its_results(small, tmp_path, monkeypatch):
    """Folders of runs are large and stay behind; whole seeds are then read out of the results."""
    out = tmp_path / "out"
    for name in ("plain-seed0", "lopti-seed0", "plain-seed1"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    before = json.loads((out / "results.json").read_text())
    shutil.rmtree(out / "runs")
    main(["study", str(small), "--out", str(out), "--report"])
    assert json.loads((out / "results.json").read_text())["runs"] == before["runs"]
    jobs = planned(monkeypatch, small, "--out", out)
    assert [*jobs] == ["warm-warm_steps-2-seed1", "plain-seed1", "lopti-seed1"]
    after = json.loads((out / "results.json").read_text())
    assert after["runs"] == [run for run in before["runs"] if run["seed"] == 0]
    assert after["others"] == [run for run in before["runs"] if run["seed"] == 1]  # not lost
    small.write_text(SMALL.replace('"eta": 0.5', '"eta": 0.4'))
    assert "plain-seed0" in planned(monkeypatch, small, "--out", out)
    small.write_text(SMALL)
    fake(out, "plain-seed5", [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "5"])
    main(["study", str(small), "--out", str(out), "--report"])
    again = json.loads((out / "results.json").read_text())
    assert again["runs"] == before["runs"]
    assert {run["name"] for run in again["others"]} == {"plain-seed5"}


def test_results_of_other_settings_are_not_mixed_in(small, tmp_path, monkeypatch, capsys):
    """A default of the config that was another when the runs were made: their flags are the same, they are not."""
    out, settings = tmp_path / "out", {"hidden": 32, "dropped_later": 1}
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4], flags=settings)
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "0"])
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [run["made"]["flags"] for run in runs] == [settings] * 2
    shutil.rmtree(out / "runs")
    results = (out / "results.json").read_text()
    (out / "results.json").write_text(results.replace('"hidden": 32', '"hidden": 64'))
    before = (out / "results.json").read_bytes()
    for flags in ([], ["--report"]):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            planned(monkeypatch, small, "--out", out, "--seeds", "0", *flags)
        assert left.value.code == 2
        assert "was made with hidden = 64, the study says 32" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before


def test_what_stands_a_correction_is_in_bold(small, tmp_path, capsys):
    out = tmp_path / "out"
    for seed, better in enumerate((0.5, 0.52, 0.54, 0.52)):
        fake(out, f"plain-seed{seed}", [0.1, 0.3, 0.4])
        fake(out, f"lopti-seed{seed}", [0.1, 0.3, better])
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "0", "1", "2", "3"])
    rows = capsys.readouterr().out.splitlines()
    lopti = next(row for row in rows if row.startswith("| Lopti"))
    assert "**+3.0** (+2.4 to +3.6)" in lopti  # p = 0.0005
    assert "**" not in next(row for row in rows if row.startswith("| plain"))


def test_results_that_cannot_be_read(small, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"runs": [')
    with pytest.raises(SystemExit) as left:
        main(["study", str(small), "--out", str(tmp_path / "out"), "--report"])
    assert left.value.code == 2
    assert "results.json cannot be read: move it away" in capsys.readouterr().err


def test_a_study_that_is_stopped_is_unfinished(small, tmp_path, monkeypatch):
    """As a run is: what starts things again must not take it for done."""

    def stopped(jobs, workers, threads, stop, *rest):
        stop.ask()
        return {job.name: fleet.STOPPED for job in jobs}

    monkeypatch.setattr(fleet, "run", stopped)
    with pytest.raises(SystemExit) as left:
        main(["study", str(small), "--out", str(tmp_path / "out")])
    assert left.value.code == 75


@pytest.mark.parametrize("flags", [("--threads", "0"), ("--jobs", "-1")])
def test_cores_are_counted_from_one(small, tmp_path, flags, capsys):
    with pytest.raises(SystemExit):
        main(["study", str(small), "--out", str(tmp_path / "out"), *flags])
    assert "--threads is at least 1" in capsys.readouterr().err


def test_a_flag_of_several_values_is_several_words(tmp_path):
    flags = {"layers": (1, 2), "fast": False, "rate": 0.1, "packed": True, "quick": False}
    file = tmp_path / "c.py"
    file.write_text(
        "def config(layers: tuple[int, ...] = (), fast: bool = True, rate: float = 0.0, "
        "packed: bool | None = None, quick=True): ..."
    )
    made = grid.Grid(Study("c.py", {"a": {}}, "a"), "", "", file, tmp_path)
    words = made.command(Planned("", "a", 0, flags))
    expected = ["--layers", "1", "2", "--no-fast", "--rate", "0.1", "--packed", "True"]
    assert words[2:11] == [*expected, "--no-quick"]


def test_a_figure_of_fewer_seeds_says_so(small, tmp_path, capsys):
    """Where the baseline gains nothing there is no level to reach."""
    out = tmp_path / "out"
    for seed, last in ((0, 0.4), (1, 0.2)):
        fake(out, f"plain-seed{seed}", [0.1, 0.3, last])
        fake(out, f"lopti-seed{seed}", [0.1, 0.3, 0.5])
    main(["study", str(small), "--out", str(out), "--report"])
    rows = capsys.readouterr().out.splitlines()
    lopti = next(row for row in rows if row.startswith("| Lopti"))
    assert lopti.count("[1 seeds]") == 2


def test_wrong_flags_are_found_before_anything_starts(small, tmp_path, capsys):
    small.write_text(SMALL.replace('"eta": 0.5', '"etta": 0.5'))
    with pytest.raises(SystemExit):
        main(["study", str(small), "--out", str(tmp_path / "out")])
    assert "etta" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
