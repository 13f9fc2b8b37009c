"""What a user does with a finished run."""

import io
import json
import shutil
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.runs import assemble, folder
from jaxrl_llm.runs.checkpoint import Checkpoints
from tests.training import quick
from tests.training.process import contents, metrics, train


def test_a_run_leaves_what_it_promises(whole):
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((whole / "tensorboard").glob("events*"))
    assert json.loads((whole / "run.json").read_text())["flags"]["eta"] == 0.5
    sample = (whole / "samples" / "step-000005.md").read_text()
    assert "> Ada :" in sample
    assert "reward -" in sample
    last, evaluated, tested = metrics(whole)[-3:]
    assert evaluated["eval/examples"] == 8
    assert (tested["test/examples"], tested["step"]) == (8, 10)
    assert {"reward", "entropy", "kl_reference", "rare_half", "mismatch_max", "loss/stage2"} <= {
        *last
    }
    assert last["mismatch_max"] < 1e-4
    shares = last["share/stage1"] + last["share/stage2"]
    assert shares == pytest.approx(1.0, abs=1e-6)


def test_eval_shows_the_table(whole, capsys):
    main(["eval", str(whole), "--samples", "2"])
    out = capsys.readouterr().out
    assert "pass@2" in out
    [row] = [line for line in out.splitlines() if " all " in line]
    assert row.split()[3] == "12"  # all test examples, not only those of the run's evaluations


def test_sample_answers_an_example_and_typed_prompts(whole, capsys, monkeypatch):
    main(["sample", str(whole), "--example", "0", "--n", "2", "--temperature", "1"])
    assert capsys.readouterr().out.count("reward ") == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO("Ada : Ada knight . <think>\nno such words\n"))
    main(["sample", str(whole)])
    out = capsys.readouterr().out
    assert "cannot read 'such'" in out
    with pytest.raises(SystemExit):
        main(["sample", str(whole), "--example", "99"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["sample", str(whole), "Ada : Ada knight .", "--example", "0"])
    assert stop.value.code == 2
    assert "choose one" in capsys.readouterr().err


def test_export_gives_a_model_folder(whole, tmp_path, capsys):
    main(["export", str(whole), str(tmp_path / "hf"), "--step", "10"])
    capsys.readouterr()
    parts = assemble.parts(quick.config(), tmp_path)
    _, params = folder.params(whole, parts, 10)
    exported = hf.load(tmp_path / "hf", hf.load_shape(tmp_path / "hf"), parts.shardings)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, exported))
    assert (tmp_path / "hf" / "tokenizer.json").exists()
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert tuple(ends) == parts.tokenizer.stops != ()


def test_an_exported_model_can_be_trained_on(whole, tmp_path, capsys):
    main(["export", str(whole), str(tmp_path / "hf")])
    path = tmp_path / "mine.py"
    path.write_text(
        "from tests.training.quick import *\nimport dataclasses\nfrom jaxrl_llm.config import Pretrained\n"
        "made = config(warm_steps=0, steps=1, drop_even_groups=True, ratios='sampler')\n"
        "made = dataclasses.replace(made, evaluation=Evaluation(every=0, validation=8), show_samples_every=0)\n"
        f"def config(): return dataclasses.replace(made, model=Pretrained({str(tmp_path / 'hf')!r}))\n"
    )
    main(["train", str(path), "--out", str(tmp_path / "run")])
    assert "of step 1, the best on the validation examples" in capsys.readouterr().out
    assert [r["step"] for r in metrics(tmp_path / "run")] == [0, 1, 1, 1]


def test_data_and_dry_run_print_and_start_no_run(tmp_path, capsys):
    main(["data", "tests/training/quick.py"])
    assert "64 examples, 0 with too long a prompt" in capsys.readouterr().out
    main(["train", "tests/training/quick.py", "--out", str(tmp_path / "run"), "--dry-run"])
    out = capsys.readouterr().out
    assert "warm_start=WarmStart(" in out
    task = quick.task(tmp_path)
    assert task.prompt(task.train[0]) in out
    assert "the worst moment is" in out
    assert not (tmp_path / "run").exists()


def test_help_explains_the_flags_of_a_config(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "tests/training/quick.py", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "separates the stages of Lopti" in out
    assert "--resume" in out


def test_a_run_is_not_overwritten_nor_another_model_resumed(whole, environment, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = contents(out)
    wrong = {
        (): "already holds a run",
        ("--resume", "--hidden", "16"): "was started with --hidden 32",
    }
    for flags, message in wrong.items():
        done = train(environment, out, *flags)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    assert contents(out) == before


def test_a_full_disk_during_a_save_keeps_the_last_checkpoint(environment, whole, tmp_path):
    """A limit on the size of a file stands for a full disk: both make a write fail."""
    out = tmp_path / "run"
    program = (
        "-c",
        "import resource; from jaxrl_llm.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2); main()",
    )
    done = train(environment, out, program=program)
    assert done.returncode == 2
    assert "\njaxrl-llm: cannot write " in "\n" + done.stderr
    again = train(environment, out, "--resume")
    assert again.returncode == 0, again.stderr
    assert metrics(out) == metrics(whole)


def test_checkpoints_are_verified(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    state = {"params": {"a": jax.numpy.arange(6.0)}, "step": jax.numpy.int32(3)}
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"n": step}, score=float(step == 1))
    checkpoints.wait()
    assert checkpoints.steps == [1, 2, 3]  # the last two and the best
    assert checkpoints.best == 1
    part = checkpoints.restore(3, state["params"], part="params")
    assert np.array_equal(part["a"], state["params"]["a"])
    with pytest.raises(UserError, match="no checkpoint that can be read"):
        Checkpoints(tmp_path / "empty").newest(lambda notes: state)


def test_room_is_asked_for_before_writing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "c")
    state = {"a": jax.numpy.ones(1000)}
    checkpoints.save(1, state, {})
    checkpoints.wait()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4000))
    with pytest.raises(UserError, match=r"last whole one is step 1.* 0.0 MB needed, 0.0 MB free"):
        checkpoints.save(2, state, {})
    assert checkpoints.steps == [1]


def test_the_score_decides_the_best_even_when_it_is_zero(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c", keep=1)
    checkpoints.save(1, {"a": jax.numpy.ones(2)}, {}, score=0.0)
    checkpoints.save(2, {"a": jax.numpy.ones(2)}, {})
    checkpoints.wait()
    assert checkpoints.best == 1
