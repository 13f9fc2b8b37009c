"""Studies: every study file, what is left to do of one, and what is read out of its runs."""

import json
import pathlib
import re
import shutil

import pytest

from jaxrl_llm import config, userfile
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import fleet, grid, study_report
from jaxrl_llm.research.study import Planned, Study
from jaxrl_llm.training import journal, record

ROOT = pathlib.Path(__file__).parents[2]
QUICK = ROOT / "tests" / "training" / "quick.py"
FILES = sorted((ROOT / "configs" / "studies").glob("*.py"))
SMALL = f"""'''What does Lopti do?'''
from pathlib import Path
from jaxrl_llm.research.study import Study
study = Study(
    config={str(QUICK)!r},
    variants={{"plain": {{"eta": 0.0}}, "Lopti": {{"eta": 0.5}}}},
    baseline="plain",
    flags={{"steps": 2, "warm_steps": 2}},
    warm=("warm_steps",),
    seeds=(0, 1),
)
"""
WARM = [f"warm-warm_steps-2-seed{seed}" for seed in (0, 1)]


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
        grid._require_same_beginning(run, made, warm)


def test_the_example_of_the_page_is_a_study(tmp_path):
    _, example, _ = re.split(r"```(?:python)?\n", (ROOT / "docs" / "studies.md").read_text())
    path = tmp_path / "example.py"
    path.write_text(example.replace("../kk_tiny.py", str(ROOT / "configs" / "kk_tiny.py")))
    made = grid.load(path, None, (0,))
    assert len(made.runs) == 4
    assert made.text == "Does Lopti help, with both algorithms?"


def test_a_variant_may_not_touch_the_warm_start():
    with pytest.raises(UserError, match=r"variant 'b' sets 'steps', on which"):
        Study("c.py", {"a": {}, "b": {"steps": 1}}, "a", warm=("steps",))
    with pytest.raises(UserError, match=r"the baseline 'c' is none of"):
        Study("c.py", {"a": {}}, "c")


def test_warm_starts_are_shared_where_they_are_the_same():
    panels = {"p": {"size": 1, "algo": "x"}, "q": {"size": 1}, "r": {"size": 2}}
    study = Study("c.py", {"a": {}, "b": {"k": 1}}, "a", panels, warm=("size",), seeds=(0, 1))
    assert [run.seed for run in study.runs()] == [0] * 6 + [1] * 6
    warm = {study.warm_start(run).name for run in study.runs()}
    assert warm == {f"warm-size-{size}-seed{seed}" for size in (1, 2) for seed in (0, 1)}


# The resume logic, with runs whose records are written by hand.


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def planned(monkeypatch):
    """The jobs that the command would start, by name."""

    def run(*arguments):
        caught = []

        def catch(jobs, *_):
            caught.extend(jobs)
            return {job.name: fleet.DONE for job in jobs}

        with monkeypatch.context() as patch:
            patch.setattr(fleet, "run", catch)
            main(["study", *map(str, arguments)])
        return {job.name: job for job in caught}

    return run


@pytest.fixture
def refused(planned, capsys):
    """The line that the command ends with."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            planned(*arguments)
        assert left.value.code == 2
        return capsys.readouterr().err

    return run


def made(where, **known):
    """Says that a run was started there."""
    nothing = {"flags": {}, "files": {}, "sums": {}, "sessions": [], "config": None, "from": None}
    record.write(where, {"version": record.VERSION, "id": "a", "from_id": None, **nothing, **known})


def fake(out, name, accuracies, *, warm=2, flags=None):
    """The folder of a run that was evaluated at every step, from 0 on; half as many sampled answers are right."""
    where = out / "runs" / name
    where.mkdir(parents=True)
    records = []
    for step, accuracy in enumerate(accuracies):
        if step:
            sampled = {"reward": 0.0, "accuracy": accuracy / 2}
            records.append({**sampled, "rare_half": 0.25, "entropy": 0.5, "length": 30.0})
        records.append({"eval/accuracy": accuracy})
        for written in records[-2:]:
            written.update({"step": warm + step, "phase": "reinforce", "time/step": 1.0})
    (where / journal.METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    made(where, flags=flags or {})
    (where / "checkpoints" / str(warm + len(accuracies) - 1)).mkdir(parents=True)
    return where


def results(out):
    return json.loads((out / "results.json").read_text())


def test_a_new_study_makes_everything_warm_starts_first(small, out, planned, capsys):
    jobs = planned(small, "--out", out, "--seeds", "0", "1", "1")
    plain, lopti = (["plain-seed0", "plain-seed1"], ["lopti-seed0", "lopti-seed1"])
    assert [*jobs] == [name for seed in zip(WARM, plain, lopti, strict=True) for name in seed]
    assert [job.after for job in jobs.values()] == ["", WARM[0], WARM[0], "", WARM[1], WARM[1]]
    words = " ".join(jobs["lopti-seed1"].command)
    assert "--steps 2 --warm-steps 2 --eta 0.5 --seed 1" in words
    assert f"--from {out}/runs/{WARM[1]}" in words
    assert "--resume" not in words
    assert "--steps 0" in " ".join(jobs[WARM[0]].command)
    assert "no run in" in capsys.readouterr().out


def test_a_study_goes_on_with_what_is_left(small, out, planned):
    fake(out, WARM[0], [0.1])
    fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    fake(out, "lopti-seed0", [0.1, 0.2])
    nothing = out / "runs" / "plain-seed1"
    (nothing / "model").mkdir(parents=True)  # killed before its first checkpoint
    made(nothing)
    jobs = planned(small, "--out", out)
    assert [*jobs] == ["lopti-seed0", WARM[1], "plain-seed1", "lopti-seed1"]
    assert jobs["lopti-seed0"].after == ""
    assert [name for name, job in jobs.items() if "--resume" in job.command] == ["lopti-seed0"]
    assert not nothing.exists()


def test_a_finished_run_may_lose_its_checkpoints_no_other_loses_anything(
    small, out, planned, refused
):
    done, half = fake(out, "plain-seed0", [0.1, 0.2, 0.3]), fake(out, "lopti-seed0", [0.1, 0.2])
    for where in (done, half):
        shutil.rmtree(where / "checkpoints")
    assert f"{half} has lost its checkpoints before it was finished" in refused(small, "--out", out)
    assert (half / journal.METRICS).exists()
    half.rename(out / "away")
    assert [*planned(small, "--out", out)][:2] == [WARM[0], "lopti-seed0"]
    assert (done / journal.METRICS).exists()


def test_runs_of_other_flags_or_cores_are_not_mixed_in(small, out, refused, planned):
    planned(small, "--out", out)
    assert "go on with --threads 1" in refused(small, "--out", out, "--threads", "2")
    fake(out, "plain-seed0", [0.1, 0.2, 0.3], flags={"eta": 0.3, "seed": 0})
    for flags in ([], ["--report"]):
        said = refused(small, "--out", out, *flags)
        assert "was made with eta = 0.3, the study says 0.0" in said


def test_runs_of_another_version_of_a_file_are_not_mixed_in(small, tmp_path, out, planned, refused):
    loaded, where = tmp_path / "loaded.py", fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    (where / "files").mkdir()
    for file in (loaded, where / "files" / "0-loaded.py"):
        file.write_text("RATE = 1")
    files = {str(loaded): "files/0-loaded.py"}
    made(where, files=files)
    shutil.copy(QUICK, where / "config.py")
    assert "plain-seed0" not in planned(small, "--out", out)
    loaded.write_text("RATE = 2")
    assert f"{loaded} has changed since {where} was made" in refused(small, "--out", out)
    (where / "config.py").write_text(QUICK.read_text().replace("1e-3", "1e-4"))
    said = refused(small, "--out", out)
    assert "quick.py has changed since" in said
    assert f"put it back as it was ({where}/config.py)" in said


def test_a_flag_that_changes_the_warm_start_has_to_be_named(tmp_path, out, refused):
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
        assert "name the flag that changes it in warm" in refused(file, "--out", out), flags
    assert not out.exists()


def test_so_has_one_that_is_bound_in_a_function(tmp_path, small, out, planned, refused):
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
        f"""from jaxrl_llm.research.study import Study
study = Study(
    config={str(mine)!r}, variants={{"a": {{}}, "b": {{"steps": 3}}}}, baseline="a", warm={warm}, flags={flags}
)
"""
    )
    for flags in ({"warm_rate": 3e-3}, {"hint": "x"}, {"peak": 3e-3}):
        small.write_text(written(flags))
        assert "name the flag that changes it in warm" in refused(small, "--out", out)
    small.write_text(written(flags, tuple(flags)))
    planned(small, "--out", out)
    small.write_text(written({"many": 1}))  # how it is computed, not what
    planned(small, "--out", tmp_path / "many")


def test_what_is_wrong_is_found_before_anything_starts(small, out, refused):
    assert "seed = -1 must be at least 0" in refused(small, "--out", out, "--seeds", "0", "-1")
    assert "--threads is at least 1" in refused(small, "--out", out, "--threads", "0")
    small.write_text(SMALL.replace('"eta": 0.5', '"etta": 0.5'))
    assert "etta" in refused(small, "--out", out)
    small.write_text(SMALL.replace('"plain"', '"warm"').replace('warm=("warm_steps",),', ""))
    assert "one and a warm start, have names that make the same" in refused(small, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["threads", "runs/plain-seed0/run.json", "results.json"])
def test_a_damaged_file_is_one_line(name, small, out, planned, refused):
    fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    planned(small, "--out", out)
    (out / name).write_text("")
    assert refused(small, "--out", out).startswith(f"jaxrl-llm: {out / name} ")


def test_a_full_disk_is_one_line(small, out, refused, monkeypatch):
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(study_report, "save", full)
    assert "cannot read or write a file: No space left" in refused(small, "--out", out, "--report")


def test_the_folder_is_of_one_study_at_a_time_and_a_stop_is_told(small, out, monkeypatch, refused):
    """As a run that is stopped, so that what starts things again does not take it for done."""
    seen = []

    def stopped(jobs, *_):
        seen.append(refused(small, "--out", out))
        return {job.name: fleet.STOPPED for job in jobs}

    monkeypatch.setattr(fleet, "run", stopped)
    with pytest.raises(SystemExit) as left:
        main(["study", str(small), "--out", str(out)])
    assert left.value.code == 75
    assert "is in use by" in seen[0]


def test_the_report_reads_the_runs(small, out, capsys):
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])
    fake(out, "lopti-seed0", [0.1, 0.4, 0.4])
    fake(out, "plain-seed1", [0.2, 0.3, 0.5])
    fake(out, "lopti-seed1", [0.2, 0.7])
    main(["study", str(small), "--out", str(out), "--report"])
    text = capsys.readouterr().out
    assert "3 of 4 runs are finished" in text
    assert "What does Lopti do?" in text
    entries = {(e["variant"], e["figure"]): e for e in results(out)["summary"]}
    plain, lopti = (entries[v, "greedy"] for v in ("plain", "Lopti"))
    assert (plain["n"], plain["mean"]) == (2, pytest.approx(0.35))  # 0.3 and 0.4
    one = {"n": 1, "mean": pytest.approx(0.1), "low": None, "high": None, "holm": None}
    assert lopti["difference"] == one
    assert entries["plain", "sampled"]["mean"] == pytest.approx(0.175)  # 0.1, 0.2 and 0.15, 0.25
    # Plain, seed 0: from 0.1 to 0.15 in the mean, half of it after 1.25 steps; Lopti begins above that.
    assert entries["Lopti", "steps_to_level"]["mean"] == 1.0
    assert entries["Lopti", "steps_to_level"]["difference"]["mean"] == pytest.approx(-0.25)
    assert (out / "results.md").read_text() in text
    pictures = {name: (out / name).read_bytes() for name in ("curves.png", "differences.png")}
    main(["study", str(small), "--out", str(out), "--report"])
    again = {name: (out / name).read_bytes() for name in pictures}
    assert again == pictures  # nothing to commit anew


def test_the_table_marks_what_stands_a_correction_and_figures_of_fewer_seeds(small, out, capsys):
    """Where the baseline gains nothing there is no level to reach."""
    for seed, better in enumerate((0.5, 0.52, 0.54, 0.52)):
        fake(out, f"plain-seed{seed}", [0.1, 0.3, 0.4 if seed else 0.2])
        fake(out, f"lopti-seed{seed}", [0.1, 0.3, better if seed else 0.32])
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "0", "1", "2", "3"])
    rows = capsys.readouterr().out.splitlines()
    lopti = next(row for row in rows if row.startswith("| Lopti"))
    assert "**+3.1** (+2.7 to +3.5)" in lopti  # 3, 3, 3.5 and 3: t is 25
    assert lopti.count("[3 seeds]") == 2
    assert "**" not in next(row for row in rows if row.startswith("| plain"))


def test_a_study_goes_on_elsewhere_from_its_results(small, out, planned):
    """Folders of runs are large and stay behind; whole seeds are then read out of the results."""
    for name in ("plain-seed0", "lopti-seed0", "plain-seed1"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    before = results(out)["runs"]
    shutil.rmtree(out / "runs")
    main(["study", str(small), "--out", str(out), "--report"])
    assert results(out)["runs"] == before
    assert [*planned(small, "--out", out)] == [WARM[1], "plain-seed1", "lopti-seed1"]
    assert results(out)["runs"] == [run for run in before if run["seed"] == 0]
    assert results(out)["others"] == [run for run in before if run["seed"] == 1]  # not lost
    small.write_text(SMALL.replace('"eta": 0.5', '"eta": 0.4'))
    assert "plain-seed0" in planned(small, "--out", out)
    small.write_text(SMALL)
    fake(out, "plain-seed5", [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "5"])
    main(["study", str(small), "--out", str(out), "--report"])
    assert results(out)["runs"] == before
    assert {run["name"] for run in results(out)["others"]} == {"plain-seed5"}


def test_results_of_other_settings_are_not_mixed_in(small, out, refused):
    """A default of the config that was another when the runs were made: their flags are the same, they are not."""
    settings = {"hidden": 32, "dropped_later": 1}
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4], flags=settings)
    main(["study", str(small), "--out", str(out), "--report", "--seeds", "0"])
    assert [run["made"]["flags"] for run in results(out)["runs"]] == [settings] * 2
    shutil.rmtree(out / "runs")
    path = out / "results.json"
    path.write_text(path.read_text().replace('"hidden": 32', '"hidden": 64'))
    before = path.read_bytes()
    for flags in ([], ["--report"]):
        said = refused(small, "--out", out, "--seeds", "0", *flags)
        assert "was made with hidden = 64, the study says 32" in said
    assert path.read_bytes() == before


def test_flags_may_be_paths_and_several_words(small, tmp_path, out, planned):
    mine, last = tmp_path / "mine.py", "    seed: int = 0,\n"
    added = last + "    of: Path | None = None,\n"
    mine.write_text("from pathlib import Path\n" + QUICK.read_text().replace(last, added))
    text = SMALL.replace(str(QUICK), str(mine))
    small.write_text(text.replace('{"steps": 2,', '{"of": Path("a"), "steps": 2,'))
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    shutil.rmtree(out / "runs")
    assert [*planned(small, "--out", out, "--seeds", "0")] == []

    flags = {"layers": (1, 2), "fast": False, "rate": 0.1, "packed": True, "quick": False}
    mine.write_text(
        "def config(layers: tuple[int, ...] = (), fast: bool = True, rate: float = 0.0, "
        "packed: bool | None = None, quick=True): ..."
    )
    made = grid.Grid(Study("c.py", {"a": {}}, "a"), "", "", mine, tmp_path)
    words = made.command(Planned("", "a", 0, flags))
    expected = ["--layers", "1", "2", "--no-fast", "--rate", "0.1", "--packed", "True"]
    assert words[2:11] == [*expected, "--no-quick"]
