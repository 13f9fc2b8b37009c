"""The README is true: its snippets run, its commands are the ones that are tested."""

import json
import pathlib
import re

import numpy as np

from jaxrl_llm.runs import journal

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(snippet):
    space = {}
    exec(compile(snippet, "README.md", "exec"), space)
    return space


def test_the_objective_has_two_stages():
    assert run(SNIPPETS[0])["objective"].stages == 2


def test_a_new_surrogate_takes_a_step(capsys):
    space = run(SNIPPETS[1])
    assert int(space["state"].step) == 1
    assert float(space["metrics"]["grad_norm"][0]) > 0
    assert "'policy'" in capsys.readouterr().out


def test_your_own_task_is_learned(tmp_path, monkeypatch, capsys):
    from jaxrl_llm.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "larger.py").write_text(SNIPPETS[2])
    main(["train", "larger.py", "--steps", "50", "--out", "run"])
    assert "test accuracy in percent" in " ".join(capsys.readouterr().out.split())
    sampled = [r["accuracy"] for r in journal.read(tmp_path / "run") if "reward" in r]
    assert np.mean(sampled[-10:]) > np.mean(sampled[:5]) + 0.15


def chat_model(folder):
    """A tiny Qwen2.5 that reads bytes and the turns of a chat, as Hugging Face has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from jaxrl_llm.models import hf
    from tests import tiny

    shape = tiny.shape(vocab_size=264)
    hf.export(tiny.policy(shape)[1], shape, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    turns = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    PreTrainedTokenizerFast(tokenizer_object=inner, **turns).save_pretrained(folder)


def test_a_pretrained_model_learns_from_data_of_your_own(tmp_path, monkeypatch, capsys):
    from jaxrl_llm.cli.main import main

    monkeypatch.chdir(tmp_path)
    chat_model(tmp_path / "model")
    rows = [{"question": f"{i} plus {i}?", "answer": str(2 * i)} for i in range(500)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "facts.py").write_text(SNIPPETS[3])
    flags = ["--questions", "facts.jsonl", "--model", "model", "--prompts", "4", "--length", "16"]
    main(["train", "facts.py", *flags, "--steps", "1", "--out", "run"])
    assert "test accuracy in percent" in " ".join(capsys.readouterr().out.split())
    steps = [r for r in journal.read(tmp_path / "run") if "share/stage1" in r]
    assert len(steps) == 1


def test_load_and_save(tmp_path):
    from jaxrl_llm.models import hf
    from tests import tiny

    _, params = tiny.policy()
    hf.export(params, tiny.SHAPE, tmp_path / "a")
    space = run(SNIPPETS[4])
    folder, shape, _, params = space["load"](tmp_path / "a", fsdp=4, tensor=2)
    space["save"](params, shape, tmp_path / "b", folder)
    files = [tmp_path / name / hf.SINGLE for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_snippets_are_all_tested():
    assert len(SNIPPETS) == 5


def test_the_map_is_that_of_the_package():
    """Every room and every file at the top is in it, and every file that it names is there."""
    tree = README.split("## Where things are")[1].split("    configs/")[0]
    package = ROOT / "jaxrl_llm"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^      (\w+)/ ", tree, re.MULTILINE)) == rooms
    top = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert top <= set(re.findall(r"\w+\.py", tree)) <= {path.name for path in package.rglob("*.py")}


def test_ci_runs_the_test_command_of_the_readme():
    command = ".venv/bin/python -m pytest"
    assert f"    {command}\n" in README
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text()
