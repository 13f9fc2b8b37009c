"""What a run leaves, and what a user does with it."""

import io
import json
import pathlib
import re
import shutil
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxrl_llm import accelerators
from jaxrl_llm.cli import train
from jaxrl_llm.cli.main import main
from jaxrl_llm.models import hf
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.training import record, run
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.folder import RunFolder
from tests.training import quick
from tests.training.process import QUICK, fails, metrics


def test_a_run_leaves_what_it_promises(whole):
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").glob("events*"))
    assert json.loads((whole / "run.json").read_text())["flags"]["eta"] == 0.5
    sample = (whole / "samples" / "step-000005.md").read_text()
    assert "> Ada :" in sample
    assert "reward -" in sample
    assert ", by the weights of step 4**" in sample
    last, evaluated, tested = metrics(whole)[-3:]
    assert evaluated["eval/examples"] == 8
    assert (tested["test/examples"], tested["step"]) == (8, 10)
    assert {"reward", "entropy", "kl_reference", "rare_half", "mismatch_max", "loss/stage2"} <= {
        *last
    }
    assert last["mismatch_max"] < 1e-4
    assert last["share/stage1"] + last["share/stage2"] == pytest.approx(1.0, abs=1e-6)
    assert tested["test/step"] == RunFolder(whole).checkpoints().best
    assert [path.name for path in (whole / "initial").iterdir()] == ["4"]


def test_the_summary_says_when_nothing_was_gained():
    better = run._progress({4: (0.2, 0), 7: (0.5, 0), 10: (0.4, 0)}, 7, 4)
    assert better.startswith("validation accuracy: 20.0% before reinforcement, 50.0% at step 7")
    assert better.endswith("mean of the last 2: 45.0% (+25.0 points)")
    worse = run._progress({4: (0.5, 0), 7: (0.4, 1), 10: (0.3, 1)}, 7, 4)
    assert worse.endswith("warning: no checkpoint is better than the start of reinforcement")
    assert run._progress({4: (0.5, 0)}, 4, 4) == "validation accuracy: 50.0% before reinforcement"
    graded = run._progress({0: (0.0, 0.18), 5: (0.0, 0.36)}, 5, 0)
    assert graded == "validation reward: 0.18 before reinforcement, 0.36 at step 5 (+0.18)"
    unknown = run._progress({20: (0.5, 0), 40: (0.6, 0)}, 40, 0)  # its judge was away at first
    assert unknown == (
        "validation accuracy: unknown before reinforcement, 60.0% at step 40, mean of the last 2: 55.0%"
    )


def test_eval_shows_the_table(whole, capsys):
    main(["eval", str(whole), "--samples", "2"])
    out = capsys.readouterr().out
    assert "pass@2" in out
    [row] = [line for line in out.splitlines() if " all " in line]
    assert row.split()[3] == "12"  # all test examples, not only those of the run's evaluations


def test_eval_says_that_the_test_data_are_others(whole, tmp_path, capsys):
    """A file may have been written anew, or the one of that name in another folder is read."""
    out = shutil.copytree(whole, tmp_path / "run")
    main(["eval", str(out)])
    assert "the test data are not as they were" not in capsys.readouterr().err
    run = record.read(out)
    record.write(out, run | {"given": run["given"] | {"the test data": "others"}})
    main(["eval", str(out)])
    assert f"the test data are not as they were when {out} was started" in capsys.readouterr().err


def test_sample_answers_an_example_and_typed_prompts(whole, capsys, monkeypatch):
    main(["sample", str(whole), "--example", "0", "--n", "2", "--temperature", "1"])
    assert capsys.readouterr().out.count("reward ") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ada : Ada knight . <think>\nno such words\n"))
    main(["sample", str(whole)])
    assert "cannot read 'such'" in capsys.readouterr().out
    fails(capsys, "sample", whole, "--example", "99")
    assert "max_tokens = 0 is out of range" in fails(capsys, "sample", whole, "--max-tokens", "0")
    assert "choose one" in fails(capsys, "sample", whole, "Ada : Ada knight .", "--example", "0")


def test_sample_goes_no_further_than_the_model_reads(whole, capsys, monkeypatch):
    """Nor does it start what can have no room; without --max-tokens a response has what is left."""
    made = Components.make(RunFolder(whole).config())
    short = replace(made, shape=replace(made.shape, max_length=12))
    monkeypatch.setattr(Components, "make", lambda *_: short)
    monkeypatch.setattr(RunFolder, "require_model", lambda *_: None)
    prompt = "Ada : Ada knight . <think>"
    main(["sample", str(whole), prompt, "--max-tokens", "6"])
    main(["sample", str(whole), prompt])
    assert len(capsys.readouterr().out.splitlines()[-1].split()) == 6
    for words in ([prompt, "--max-tokens", "7"], ["--example", "0", "--max-tokens", "100000"]):
        assert "the model has room for 12: lower max_tokens" in fails(
            capsys, "sample", whole, *words
        )
    said = fails(capsys, "sample", whole, " ".join([prompt] * 2))
    assert "a prompt of 12 and 1 to come are 13 tokens, and the model has room for 12" in said


def test_where_gpus_are_kept_off_a_run_is_sampled_without_servers(whole, capsys, monkeypatch):
    """They would start on a GPU, maybe that of the run itself, which goes on."""
    config = RunFolder(whole).config()
    served = replace(config, engine=Vllm(python="/no/such/python"))
    monkeypatch.setattr(RunFolder, "config", lambda self: served)
    monkeypatch.setattr(accelerators, "present", lambda kind="": kind == "nvidia")
    main(["sample", str(whole), "--example", "0", "--max-tokens", "2"])
    assert capsys.readouterr().out.count("reward ") == 1


def test_a_run_is_opened_with_what_it_was_trained_with(whole, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(whole, tmp_path / "run")
    monkeypatch.setattr(record, "modules", lambda: {"module tests.tiny": "other", "module x": "y"})
    main(["sample", str(out), "--example", "0", "--max-tokens", "2"])
    said = capsys.readouterr().err
    assert f"warning: module tests.tiny is not as it was when {out} was started" in said
    assert "module x" not in said
    with (out / "model" / "tokenizer.json").open("a") as file:
        file.write(" ")
    for command in (("sample", out, "--example", "0"), ("eval", out)):
        assert "its tokenizer is another" in fails(capsys, *command)


def test_an_export_is_a_model_that_can_be_trained_on_and_executes_nothing(whole, tmp_path, capsys):
    out = shutil.copytree(whole, tmp_path / "whole")
    (out / "config.py").write_text("raise SystemExit('executed')")
    exported = tmp_path / "hf"
    main(["export", str(out), str(exported), "--step", "10"])
    made = Components.make(quick.config(), tmp_path)
    _, params = RunFolder(whole).params(made, 10)
    there = hf.load(exported, hf.load_shape(exported), made.mesh)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, there))
    ends = json.loads((exported / "generation_config.json").read_text())["eos_token_id"]
    assert tuple(ends) == made.tokenizer.stops != ()
    path = tmp_path / "mine.py"
    path.write_text(
        "from tests.training.quick import *\nimport dataclasses\nfrom jaxrl_llm.config import Pretrained\n"
        "made = config(warm_steps=0, steps=1, drop_constant_groups=True, ratios='sampler')\n"
        "made = dataclasses.replace(made, evaluation=Evaluation(every=0, validation=8), show_samples_every=0)\n"
        f"def config(): return dataclasses.replace(made, model=Pretrained({str(exported)!r}))\n"
    )
    main(["train", str(path), "--out", str(tmp_path / "run")])
    assert "of step 1, the best on the validation examples" in capsys.readouterr().out
    assert [r["step"] for r in metrics(tmp_path / "run")] == [0, 1, 1, 1]
    with (exported / "config.json").open("a") as file:
        file.write(" ")
    said = fails(capsys, "train", path, "--out", tmp_path / "run", "--resume")
    assert f"the pretrained model is not as it was when {tmp_path / 'run'} was started" in said


class Hub:
    """A stand-in for the hub's client that keeps what it is given."""

    error = None

    def create_repo(self, name, *, private, exist_ok):
        if Hub.error:
            raise Hub.error
        assert private
        assert exist_ok
        self.name = name
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, repo_id, commit_message):
        assert repo_id == self.name
        Hub.files = {path.name: path.read_bytes() for path in folder_path.iterdir()}


def test_an_export_has_a_card_and_goes_to_the_hub_if_asked_to(whole, tmp_path, capsys, monkeypatch):
    """The card tells of the run's numbers, and nothing of the machine."""
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    to = tmp_path / "policy"
    main(["export", str(whole), str(to), "--step", "10", "--push", "me/policy"])
    assert "uploaded to" in capsys.readouterr().out
    assert Hub.files == {path.name: path.read_bytes() for path in to.iterdir()}
    assert (to / "curves.png").read_bytes() == (whole / "curves.png").read_bytes()
    said = (to / "README.md").read_text()
    _, head, body = said.split("---\n", 2)
    assert [json.loads(line.partition(": ")[2]) for line in head.splitlines()] == [
        "transformers", "text-generation", ["reinforcement-learning", "jaxrl_llm"],
    ]  # fmt: skip
    known = {
        r["step"]: r for r in metrics(whole) if "eval/accuracy" in r and r["phase"] == "reinforce"
    }
    assert f"| validation, before reinforcement | {100 * known[4]['eval/accuracy']:.1f} |" in body
    assert f"| validation, this step | {100 * known[10]['eval/accuracy']:.1f} |" in body
    assert record.read(whole)["id"] in body
    assert not {socket.gethostname(), str(whole.parent)} & {*re.findall(r"[^\s`|]+", said)}
    Hub.error = ValueError("401: who are you?")
    line = fails(capsys, "export", whole, tmp_path / "again", "--push", "me/policy")
    assert "cannot upload to me/policy (401: who are you?)" in line
    assert (tmp_path / "again" / "README.md").exists()


TASK = """
class Sums:
    name = "sums"
    train, test = ("Ada knight", "Ada knave") * 4, ("Ben knight", "Ben knave") * 4
    def prompt(self, example): return "Ada : " + example + " . <think>"
    def reward(self, example, response): return Reward(float(GRADE), GRADE > 0)

from jaxrl_llm.tasks.task import Reward
GRADE = 1
task = Sums()
"""


@pytest.mark.slow
def test_a_run_is_graded_with_the_task_that_it_was_started_with(tmp_path, capsys):
    (tmp_path / "sums.py").write_text(TASK)
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from tests.training.quick import *\nimport dataclasses\nfrom jaxrl_llm.tasks.task import load_task\n"
        f"made = config(warm_steps=0, steps=0)\nwhere = {str(tmp_path / 'sums.py')!r} + ':task'\n"
        "def config(): return dataclasses.replace(made, task=lambda data: load_task(where))\n"
    )
    main(["train", str(mine), "--out", str(tmp_path / "run")])
    (tmp_path / "sums.py").write_text(TASK.replace("GRADE = 1", "GRADE = 0"))
    capsys.readouterr()
    main(["sample", str(tmp_path / "run"), "--example", "0", "--max-tokens", "4"])
    assert "reward 1, correct" in capsys.readouterr().out
    said = fails(capsys, "train", mine, "--out", tmp_path / "run", "--resume")
    assert "sums.py has changed since" in said


RAISES = """
from tests.training.quick import *
import dataclasses
from jaxrl_llm.tasks.task import Reward
class Raises:
    name, train, test = "raises", ("Ada knight", "Ada knave") * 4, ("Ben knight", "Ben knave")
    def prompt(self, example): return "Ada : " + example + " . <think>"
    def reward(self, example, response): return Reward(1 / 0, True)
made = config(warm_steps=0, steps=1)
def config(): return dataclasses.replace(made, task=lambda data: Raises())
"""


@pytest.mark.slow
def test_a_reward_that_always_raises_is_said_before_anything_takes_long(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(RAISES)
    main(["train", str(tmp_path / "mine.py"), "--out", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    kind = f"warning: ZeroDivisionError in reward ({tmp_path / 'mine.py'}:8): division by zero; "
    warned = [line.removeprefix(kind) for line in err.splitlines() if line.startswith(kind)]
    assert warned[0] == "1 of 1 responses ungraded"
    assert "8 of 8 responses ungraded" in warned
    assert "WARNING" not in err
    tried = out.index("warning: so the reward, tried on an empty response for the first example")
    assert tried < out.index("reinforce: the first step")
    assert "validation accuracy unknown: all 1 responses are ungraded" in out
    assert "all ungraded" in out
    assert "ungraded responses, which count nowhere: 6" in " ".join(out.split())
    assert "0.0" not in "".join(line for line in out.splitlines() if "accuracy" in line)


def test_data_and_dry_run_print_and_start_no_run(tmp_path, capsys):
    main(["data", QUICK])
    assert "64 examples, 0 with too long a prompt" in capsys.readouterr().out
    main(["train", QUICK, "--out", str(tmp_path / "run"), "--dry-run", "--seed", "7"])
    out = capsys.readouterr().out
    assert "warm_start=WarmStart(" in out
    assert "--seed 7" in " ".join(out.split("made by")[1].split())
    task = quick.task(tmp_path)
    assert task.prompt(task.train[0]) in out.split("the first prompt, as the model reads it:")[1]
    assert out.endswith("memory and time: jaxrl-llm plan, with the same config and flags\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "holds no run to resume"),
        (["--from", "nowhere"], "nowhere is not the folder of a run"),
        (["--out", "full"], "full is not empty and holds no run"),
    ],
    ids=str,
)
def test_a_dry_run_refuses_what_a_run_would(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    config = tmp_path / "mine.py"
    config.write_text("from tests.training import quick\ndef config(): return quick.config()\n")
    out = [] if "--out" in words else ["--out", "new"]
    for dry in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as stop:
            main(["train", str(config), *out, *words, *dry])
        assert stop.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_knows_the_steps_of_what_is_there(whole, tmp_path, capsys):
    """Those of another warm start, checkpoints that there are not, epochs that became steps."""
    to = ("train", QUICK, "--dry-run", "--out")
    said = fails(capsys, *to, tmp_path, "--from", whole, "--warm-steps", "3")
    assert "its warm start has 4 steps, that of the config has 3" in said
    for dry in ([], ["--dry-run"]):
        said = fails(capsys, "train", QUICK, "--out", whole, "--resume", "999", *dry)
        assert "--resume 999: there are checkpoints of [" in said
        said = fails(capsys, "train", QUICK, "--out", whole, "--resume", "--seed", "9", *dry)
        assert f"{whole} was started with --seed" in said
        assert "not 9: leave --seed out to go on" in said
    warm = replace(quick.config().warm_start, steps=0, epochs=1.0)
    counted = replace(quick.config(), warm_start=warm)
    source = record.Source(pathlib.Path(QUICK), record.read(whole)["flags"])
    options = train.Options(out=str(whole), resume=True, dry_run=True)
    train._dry_run(counted, options, source, Console(quiet=True))


def test_a_demonstration_that_raises_is_one_line(tmp_path, capsys):
    config = tmp_path / "mine.py"
    config.write_text(
        "from dataclasses import replace\nfrom tests.training import quick\n"
        "def task(data): return replace(quick.task(data), demonstration=lambda example: {}['none'])\n"
        "def config(): return replace(quick.config(), task=task)\n"
    )
    said = fails(capsys, "data", str(config))
    assert "a demonstration cannot be made: " in said
    assert "mine.py, line 3: KeyError: 'none'" in said


def test_where_a_run_may_not_be_is_told_before_anything_is_chosen_or_compiled(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "a.txt").write_text("mine")
    monkeypatch.setattr(run, "_components", lambda *_: pytest.fail("it began"))
    with pytest.raises(SystemExit):
        main(["train", QUICK, "--out", str(tmp_path)])
    assert "is not empty and holds no run" in " ".join(capsys.readouterr().err.split())


def test_help_explains_the_flags_and_who_executes_a_folder_says_so(capsys):
    def said(*words):
        with pytest.raises(SystemExit) as stop:
            main([*words, "--help"])
        assert stop.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    out = said("train", QUICK)
    assert "separates the stages of Lopti" in out
    assert "--resume" in out
    assert "JAXRL_LOGGERS=wandb" in out
    for command in ("eval", "sample"):
        assert "executes the folder's config.py" in said(command)
    for words in (("train", QUICK), ("plan", QUICK), ("eval",), ("sample",), ("export",)):
        assert "if not given" in (out := said(*words))
        assert not re.search(r"\(default: [^()]*\)\.? \(default", out)


def test_damaged_and_missing_parts_of_a_folder_are_one_line(whole, capsys, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    for path in (out / "checkpoints" / "10" / "note").rglob("*"):
        path.write_bytes(b"{")
    for command in (["eval", out], ["export", out, tmp_path / "to"]):
        said = fails(capsys, *command, "--step", "10")
        assert f"checkpoint 10 of {out} is damaged" in said
        assert "try --step with one of [8]" in said
    assert "has no checkpoint of step 3, only of [8, 10]" in fails(
        capsys, "export", out, tmp_path / "to", "--step", 3
    )
    shutil.rmtree(out / "initial")
    said = fails(capsys, "train", QUICK, "--out", out, "--resume", "--steps", "7")
    assert "the policy before reinforcement" in said
    (out / "model" / "config.json").write_text("[]")
    assert "config.json holds a list" in fails(capsys, "export", out, tmp_path / "to")
