"""Studies: every study file, what is left to do of one, and what is read out of its runs."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from jaxrl_llm import accelerators, config, storage, userfile
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import pool, runner, study_report
from jaxrl_llm.research.study import Study, outcome
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


def test_the_example_of_the_page_is_a_study(tmp_path):
    _, example, _ = re.split(r"```(?:python)?\n", (ROOT / "docs" / "studies.md").read_text())
    path = tmp_path / "example.py"
    path.write_text(example.replace("configs/kk_tiny.py", str(ROOT / "configs" / "kk_tiny.py")))
    made = runner.load(path, None, (0,))
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
    apart = Study("c.py", {"a": {}, "b": {"k": 1}}, "a", panels, {"k": 2}, seeds=(0,))
    warm = [apart.warm_start(run) for run in apart.runs()]
    assert [one.name for one in warm] == [f"{panel}-warm-seed0" for panel in "ppqqrr"]
    assert warm[1].flags == {"k": 2, "size": 1, "algo": "x", "steps": 0, "seed": 0}


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
    """The commands that `study` would run, by name."""

    def run(*arguments):
        caught = {}

        def catch(commands, *_, **how):
            caught.update(commands)
            run.how = how
            return dict.fromkeys(commands, 0)

        with monkeypatch.context() as patch:
            patch.setattr(pool, "run", catch)
            main(["study", *map(str, arguments)])
        return caught

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
    nothing = {
        "flags": {},
        "files": {},
        "sums": {},
        "given": {},
        "sessions": [],
        "config": None,
        "init_from": None,
    }
    record.write(
        where, {"version": record.VERSION, "id": "a", "init_from_id": None, **nothing, **known}
    )


def fake(out, name, accuracies, *, tested=True, warm=2, flags=None):
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
    if tested:
        records.append({**records[-1], "test/accuracy": 0.5})
        del records[-1]["eval/accuracy"]
    (where / journal.METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
    made(where, flags=flags or {})
    return where


def results(out):
    return json.loads((out / "results.json").read_text())


def test_a_new_study_makes_everything_warm_starts_first(small, out, planned, capsys):
    commands = planned(small, "--out", out, "--seeds", "0", "1", "1")
    left = [f"{variant}-seed{seed}" for seed in (0, 1) for variant in ("plain", "lopti")]
    assert [*commands] == [*WARM, *left]
    words = " ".join(commands["lopti-seed1"])
    assert "--steps 2 --warm-steps 2 --eta 0.5 --seed 1" in words
    assert f"--from {out}/runs/{WARM[1]}" in words
    assert "--resume auto" in words
    assert "--steps 0" in " ".join(commands[WARM[0]])
    assert "no run in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("devices", "jobs", "workers", "fraction"),
    [(False, 0, 3, None), (True, 0, 1, None), (True, 4, 4, "0.2")],
)
def test_runs_share_a_gpu_only_where_that_is_asked_for(
    devices, jobs, workers, fraction, small, out, planned, monkeypatch
):
    monkeypatch.setattr(pool, "available", lambda: [0, 1, 2])
    monkeypatch.setattr(accelerators, "in_use", lambda: devices)
    monkeypatch.setattr(
        runner, "divided", lambda n: {} if n != 4 else {"XLA_CLIENT_MEM_FRACTION": "0.2"}
    )
    planned(small, "--out", out, "--jobs", str(jobs))
    assert planned.how["workers"] == workers
    assert planned.how["environment"].get("XLA_CLIENT_MEM_FRACTION") == fraction


@pytest.mark.parametrize(
    ("devices", "jobs", "fine"), [(True, 2, False), (True, 0, True), (False, 2, True)]
)
def test_runs_with_servers_of_their_own_share_no_gpu(
    small, tmp_path, out, planned, refused, monkeypatch, devices, jobs, fine
):
    """Each server would take its part of the whole GPU."""
    (tmp_path / "served.py").write_text(
        "from tests.training.quick import *\nfrom jaxrl_llm.rollouts.engines import Vllm\nmade = config\n"
        "def config(eta: float = 0.5, steps: int = 2, seed: int = 0):\n"
        "    one = made(eta=eta, steps=steps, seed=seed, warm_steps=0)\n"
        "    return replace(one, engine=Vllm(python='python', share=0.4, max_model_len=88))\n"
    )
    changed = SMALL.replace(str(QUICK), str(tmp_path / "served.py"))
    small.write_text(changed.replace(', "warm_steps": 2', "").replace('warm=("warm_steps",),', ""))
    monkeypatch.setattr(accelerators, "in_use", lambda: devices)
    arguments = small, "--out", out, "--jobs", str(jobs)
    if fine:
        assert len(planned(*arguments)) == 4
    else:
        assert "plain-seed0 shares its GPU with a server of its own: --jobs 1" in refused(
            *arguments
        )


def test_a_study_goes_on_with_what_is_left(small, out, planned):
    fake(out, WARM[0], [0.1])
    fake(out, "plain-seed0", [0.1, 0.2, 0.3])
    fake(out, "lopti-seed0", [0.1, 0.2], tested=False)
    commands = planned(small, "--out", out)
    assert [*commands] == [WARM[1], "lopti-seed0", "plain-seed1", "lopti-seed1"]
    fake(out, "lopti-seed1", [0.1, 0.2, 0.3])
    shutil.rmtree(out / "runs" / WARM[0])  # lopti of seed 0 begins with it
    assert [*planned(small, "--out", out)] == [*WARM, "lopti-seed0", "plain-seed1"]


@pytest.mark.long
def test_a_study_is_made_stopped_and_finished(small, tmp_path):
    """By real runs: a signal while the first ones are on, then the same command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "jaxrl_llm", "study", str(small), "--out", "out"]
    command += ["--seeds", "0", "--jobs", "1", "--data-folder", "data"]
    study = subprocess.Popen(command, cwd=tmp_path, env=environment)
    until = time.monotonic() + 600
    while not (tmp_path / "out" / "runs" / "plain-seed0" / "metrics.jsonl").exists():
        assert study.poll() is None
        assert time.monotonic() < until
        time.sleep(0.2)
    study.terminate()
    assert study.wait() == 75
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 runs are finished" in done.stdout
    assert {run["variant"] for run in results(tmp_path / "out")["runs"]} == {"plain", "Lopti"}


def test_runs_of_other_flags_or_cores_are_not_mixed_in(small, out, refused, planned):
    planned(small, "--out", out)
    assert "go on with --threads 1" in refused(small, "--out", out, "--threads", "2")
    fake(out, "plain-seed0", [0.1, 0.2, 0.3], flags={"eta": 0.3, "seed": 0})
    for flags in ([], ["--report"]):
        said = refused(small, "--out", out, *flags)
        assert "was made with eta = 0.3, the study says 0.0" in said


@pytest.mark.parametrize("warm", [2, 0])
def test_runs_of_another_version_of_a_file_are_not_mixed_in(
    small, warm, tmp_path, out, planned, refused
):
    """Nor where the numbers of finished runs are in results.json already."""
    small.write_text(SMALL.replace('"warm_steps": 2', f'"warm_steps": {warm}'))
    loaded, where = tmp_path / "loaded.py", fake(out, "plain-seed0", [0.1, 0.2, 0.3], warm=warm)
    loaded.write_text("RATE = 1")
    copies = {"config.py": QUICK, "files/0-loaded.py": loaded}
    sums = {name: storage.sha256(file) for name, file in copies.items()}
    made(where, files={str(loaded): "files/0-loaded.py"}, sums=sums)
    assert "plain-seed0" not in planned(small, "--out", out)
    loaded.write_text("RATE = 2")
    assert f"{loaded} has changed since {where} was made" in refused(small, "--out", out)
    made(where, sums=sums | {"config.py": "that of another version"})
    said = refused(small, "--out", out)
    assert "quick.py has changed since" in said
    assert f"put it back as it was ({where}/config.py)" in said


def test_results_of_another_version_of_a_file_are_not_mixed_in(
    small, tmp_path, out, planned, refused
):
    """Where the folders are gone; records of before checksums were kept are read as ever."""
    small.write_text(SMALL.replace('"warm_steps": 2', '"warm_steps": 0'))
    loaded, where = tmp_path / "loaded.py", fake(out, "plain-seed0", [0.1, 0.2, 0.3], warm=0)
    loaded.write_text("RATE = 1")
    copies = {"config.py": QUICK, "files/0-loaded.py": loaded}
    sums = {name: storage.sha256(file) for name, file in copies.items()}
    made(where, files={str(loaded): "files/0-loaded.py"}, sums=sums)
    main(["study", str(small), "--out", str(out), "--report"])
    shutil.rmtree(out / "runs")
    assert "plain-seed0" not in planned(small, "--out", out)
    loaded.write_text("RATE = 2")
    source = f"plain-seed0 of {out / 'results.json'}"
    assert f"loaded.py has changed since {source} was made: put it back" in refused(
        small, "--out", out
    )
    path = out / "results.json"
    path.write_text(path.read_text().replace(sums["config.py"], "that of another version"))
    assert f"quick.py has changed since {source} was made" in refused(small, "--out", out)
    before = results(out)
    for name in ("sums", "files"):
        del before["runs"][0]["made"][name]
    path.write_text(json.dumps(before))
    assert "plain-seed0" not in planned(small, "--out", out)


def test_what_is_wrong_is_found_before_anything_starts(small, out, refused):
    assert "seed = -1 must be at least 0" in refused(small, "--out", out, "--seeds", "0", "-1")
    assert "--threads 0 must be at least 1" in refused(small, "--out", out, "--threads", "0")
    small.write_text(SMALL.replace('"eta": 0.5', '"etta": 0.5'))
    assert "etta" in refused(small, "--out", out)
    small.write_text(SMALL.replace('"steps": 2', '"steps": 0'))
    assert "plain-seed0: steps = 0 leaves nothing to compare" in refused(small, "--out", out)
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

    def stopped(commands, *_, stop, **__):
        seen.append(refused(small, "--out", out))
        stop.request()
        return dict.fromkeys(commands)

    monkeypatch.setattr(pool, "run", stopped)
    with pytest.raises(SystemExit) as left:
        main(["study", str(small), "--out", str(out)])
    assert left.value.code == 75
    assert "is in use by" in seen[0]


def test_a_run_of_which_no_evaluation_was_graded_has_its_steps(small, out, monkeypatch):
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])
    fake(out, "lopti-seed0", [0.1, 0.1, 0.1])
    evaluated = journal.evaluations
    monkeypatch.setattr(journal, "evaluations", lambda records: evaluated(records)[:0])
    main(["study", str(small), "--out", str(out), "--report"])
    entries = {(e["variant"], e["figure"]): e for e in results(out)["summary"]}
    assert entries["Lopti", "reached"]["mean"] == 0.0
    assert entries["Lopti", "steps_to_level"]["mean"] >= 1.0


def test_the_report_reads_the_runs(small, out, capsys):
    fake(out, "plain-seed0", [0.1, 0.2, 0.4])
    fake(out, "lopti-seed0", [0.1, 0.4, 0.4])
    fake(out, "plain-seed1", [0.2, 0.3, 0.5])
    fake(out, "lopti-seed1", [0.2, 0.7], tested=False)
    main(["study", str(small), "--out", str(out), "--report"])
    text = capsys.readouterr().out
    assert "3 of 4 runs are finished" in text
    assert "What does Lopti do?" in text
    entries = {(e["variant"], e["figure"]): e for e in results(out)["summary"]}
    plain, lopti = (entries[v, "greedy"] for v in ("plain", "Lopti"))
    assert (plain["n"], plain["mean"]) == (2, pytest.approx(0.35))  # 0.3 and 0.4
    one = {"n": 1, "mean": pytest.approx(0.1), "low": None, "high": None, "holm": None}
    one["seeds"] = [pytest.approx(0.1)]
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


def test_a_bar_in_a_name_stays_in_its_cell(small, out, capsys):
    small.write_text(SMALL.replace('"Lopti"', '"|KL|"'))
    for name in ("plain", "kl"):
        fake(out, f"{name}-seed0", [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    head, _, *rows = [x for x in capsys.readouterr().out.splitlines() if x.startswith("|")]
    counts = {len(re.findall(r"(?<!\\)\|", row)) for row in (head, *rows)}
    assert len(rows) == 2
    assert len(counts) == 1


def test_a_study_goes_on_elsewhere_from_its_results(small, out, planned):
    """Folders of runs are large and stay behind; whole seeds are then read out of the results."""
    for name in ("plain-seed0", "lopti-seed0", "plain-seed1"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    before = results(out)["runs"]
    assert "one of the 3 runs by hand, after its warm start:" in (out / "results.md").read_text()
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


def test_without_a_warm_start_a_study_goes_on_elsewhere_run_by_run(small, out, planned):
    small.write_text(SMALL.replace('"warm_steps": 2', '"warm_steps": 0'))
    for name in ("plain-seed0", "lopti-seed0", "plain-seed1"):
        fake(out, name, [0.1, 0.2, 0.4], warm=0)
    main(["study", str(small), "--out", str(out), "--report"])
    before = results(out)["runs"]
    assert "one of the 3 runs by hand:" in (out / "results.md").read_text()
    shutil.rmtree(out / "runs")
    assert [*planned(small, "--out", out)] == ["lopti-seed1"]
    fake(out, "lopti-seed1", [0.1, 0.2, 0.3], warm=0)
    assert [*planned(small, "--out", out)] == []
    assert results(out)["runs"][:3] == before


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


def test_an_evaluation_of_which_nothing_is_graded_says_nothing():
    records = [
        {"step": step, "phase": "reinforce", "reward": 0.0, "accuracy": 0.5, "rare_half": 0.1}
        | {"eval/accuracy": accuracy, "eval/examples": examples}
        for step, accuracy, examples in ((1, 0.5, 8), (2, 0.0, 0), (3, 0.7, 8))
    ]
    one = outcome(Study("c.py", {"a": {}}, "a", seeds=(0,)).runs()[0], records, {})
    assert one["curves"]["greedy"] == [(0, 0.5), (2, 0.7)]
    assert one["figures"]["greedy"] == 0.7


def test_a_run_keeps_what_its_test_says(small, out, capsys):
    """Of one without a test, or with nothing graded in it, there is no such figure."""
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    assert [run["figures"]["test"] for run in results(out)["runs"]] == [0.5, 0.5]
    entries = {(e["variant"], e["figure"]): e["mean"] for e in results(out)["summary"]}
    assert entries["Lopti", "test"] == 0.5
    assert "| test, % |" in capsys.readouterr().out
    path = out / "results.json"
    older = results(out)
    for run in older["runs"]:
        del run["figures"]["test"]
    path.write_text(json.dumps(older))
    shutil.rmtree(out / "runs")
    main(["study", str(small), "--out", str(out), "--report"])
    assert "| test, % |" not in capsys.readouterr().out
    records = [{"step": 1, "phase": "reinforce", "reward": 0.0, "accuracy": 0.5, "rare_half": 0.1}]
    records.append({"step": 1, "phase": "reinforce", "test/accuracy": 0.0, "test/examples": 0})
    one = outcome(Study("c.py", {"a": {}}, "a", seeds=(0,)).runs()[0], records, {})
    assert "test" not in one["figures"]


def test_a_figure_that_is_no_number_says_nothing_of_the_others(small, out):
    """Neither of the other variants' significance; and results.json is JSON."""
    names = ("plain", "Lopti", "third")
    small.write_text(SMALL.replace('"eta": 0.5}', '"eta": 0.5}, "third": {"eta": 0.4}'))
    for seed in range(4):
        for rank, name in enumerate(names):
            where = fake(
                out, f"{name.lower()}-seed{seed}", [0.1, 0.3, 0.4 + rank * (5 + seed) / 90]
            )
            path = where / journal.METRICS
            bad = "NaN" if name == "Lopti" and seed == 1 else "0.5"
            path.write_text(path.read_text().replace('"entropy": 0.5', f'"entropy": {bad}'))
    command = ["study", str(small), "--out", str(out), "--report", "--seeds", *"0123"]
    main(command)
    strict = lambda: json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)
    entries = {(e["variant"], e["figure"]): e for e in strict()["summary"]}
    assert entries["Lopti", "entropy"]["n"] == 3
    assert entries["third", "entropy"]["difference"]["holm"] == 1.0
    [one] = [run for run in strict()["runs"] if run["name"] == "lopti-seed1"]
    assert one["figures"]["entropy"] is None
    before = strict()
    path = out / "results.json"
    path.write_text(path.read_text().replace('"entropy": null', '"entropy": NaN'))  # an older one
    shutil.rmtree(out / "runs")
    main(command)
    assert strict() == before


def test_names_with_dollars_stand_in_the_pictures_as_they_are(small, out):
    """Between two of them matplotlib reads mathematics, which it may not understand."""
    small.write_text(
        SMALL.replace("    baseline=", r"""    panels={"$\\p{$": {}},""" + "\n    baseline=")
        .replace('"plain"', r'"a$\\b{$"')
        .replace('"Lopti"', r'"$x$"')
    )
    names = [run.name for run in runner.load(small, None, (0,)).runs]
    for seed in range(4):
        for name in names:
            fake(out, name.replace("seed0", f"seed{seed}"), [0.1, 0.2, 0.4 + seed / 100])
    command = ["study", str(small), "--out", str(out), "--report", "--seeds", *"0123"]
    main(command)
    curves, apart = (
        draw(results(out)) for draw in (study_report._curves, study_report._differences)
    )
    texts = lambda several: [text.get_text() for text in several]
    for figure in (curves, apart):
        assert figure.axes[0].get_title() == r"\$\p{\$"
        assert r"a\$\b{\$" in figure._supxlabel.get_text()
    assert texts(curves.legends[0].get_texts()) == [r"a\$\b{\$", r"\$x\$"]
    assert texts(apart.axes[0].get_yticklabels()) == [r"\$x\$"]


def test_runs_at_the_same_time_have_the_cores_that_they_are_said_to_have(
    small, out, planned, refused, monkeypatch
):
    monkeypatch.setattr(pool, "available", lambda: [*range(5)])
    arguments = small, "--out", out, "--threads", "2"
    said = refused(*arguments, "--jobs", "3")
    assert "--jobs 3 with 2 cores each need 6 cores, and there are 5: --jobs 2 fits" in said
    assert not out.exists()
    planned(*arguments, "--jobs", "2")
    planned(*arguments)
    assert planned.how["workers"] == 2


@pytest.mark.parametrize(
    ("kind", "value"),
    [("of: Path | None = None", 'Path("a")'), ("of: float = 0.0", 'float("inf")')],
)
def test_flags_that_json_has_no_word_for_go_into_the_results_and_out_of_them(
    kind, value, small, tmp_path, out, planned
):
    mine, last = tmp_path / "mine.py", "    seed: int = 0,\n"
    added = f"{last}    {kind},\n"
    mine.write_text("from pathlib import Path\n" + QUICK.read_text().replace(last, added))
    text = SMALL.replace(str(QUICK), str(mine))
    small.write_text(
        text.replace('{"steps": 2,', '{"of": VALUE, "steps": 2,'.replace("VALUE", value))
    )
    for name in ("plain-seed0", "lopti-seed0"):
        fake(out, name, [0.1, 0.2, 0.4])
    main(["study", str(small), "--out", str(out), "--report"])
    shutil.rmtree(out / "runs")
    assert [*planned(small, "--out", out, "--seeds", "0")] == []


def test_flags_are_words_of_the_command_line():
    def make(
        layers: tuple[int, ...] = (), fast: bool = True, packed: bool | None = None, quick=True
    ):
        del layers, fast, packed, quick

    flags = {"layers": (1, 2), "fast": False, "rate_of": 0.1, "packed": True, "quick": False}
    expected = "--layers 1 2 --no-fast --rate-of 0.1 --packed True --no-quick"
    assert " ".join(runner.as_words(make, flags)) == expected  # pyright: ignore[reportArgumentType]
