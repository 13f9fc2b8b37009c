"""Bad input is one line and exit code 2, and nothing is lost or half written."""

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jaxrl_llm as jl
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Scratch, load
from jaxrl_llm.errors import UserError
from jaxrl_llm.training import run, terminal
from jaxrl_llm.training.folder import RunFolder
from tests.training import quick
from tests.training.process import QUICK, fails

HEAD = (
    "from tests.training.quick import *; from jaxrl_llm.rollouts.engines import Vllm\n"
    "from jaxrl_llm.objectives import recipes; import dataclasses; from jaxrl_llm.rollouts.sampler "
    "import Sampling\n"
)


@pytest.fixture
def written(tmp_path):
    """A config file with these lines after those of the quick one."""

    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return path

    return write


def test_too_little_memory_is_one_line(tmp_path, capsys):
    """More than addresses reach: no machine has it."""
    more = ("--hidden", 2**24, "--warm-steps", 0)
    said = fails(capsys, "train", QUICK, "--out", tmp_path / "run", *more)
    assert "jaxrl-llm: out of memory (" in said
    assert "jaxrl-llm plan tells how much" in said


TASK = """made = config()
def config(): return dataclasses.replace(made, task=lambda folder: Mine())
class Mine:
  name, train, test = 'mine', [1, 2], [3]
  """
REPLACE = "made = config()\ndef config(): return dataclasses.replace(made, "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config = 3", "config is not a function"),
        ("def config(): return {}", "config() returned a dict, not a Config"),
        ("def config(): return Config(promts=3)", "line 3: Config has no field 'promts'; did you mean 'prompts'?"),
        ("def config(): return Evaluation(evry=3)", "Evaluation has no field 'evry'; did you mean 'every'?"),
        (REPLACE + "steps='10')", "steps is a str, not a int"),
        (REPLACE + "engine='vllm')", "engine = 'vllm' has no start"),
        (REPLACE + "optimizer=3)", "optimizer is a int"),
        (REPLACE + "ratios='mine')", "none of trainer, sampler"),
        (REPLACE + "ratios='sampler', objective=Objective(advantages.grpo, (factors.truncated,)))",
         "corrects nothing: set ratios = 'trainer'"),
        (REPLACE + "reference=False)", "the objective looks at ref_logp: leave reference out"),
        (REPLACE + "teacher=Pretrained('x'))", "the objective does not look at teacher_logp"),
        (REPLACE + "objective=recipes.distillation(48))", "a teacher's log-probs: name a teacher"),
        (REPLACE + "objective=recipes.distillation(48), teacher=Pretrained('x', lora=qwen2.Lora(2, 4.0)))",
         "a teacher is not trained: leave out its lora"),
        (REPLACE + "collate=Collator(40, 48, minibatches=3))", "8 responses a step do not divide into 3"),
        (REPLACE + "collate=Collator(40, 48, minibatches=0))", "collate: minibatches = 0 must be at least 1"),
        (REPLACE + "collate=Collator(40, 48, share_prompts=True))", "share_prompts is for packed rows"),
        ("from tests import tiny\n" + REPLACE + "collate=Collator(40, 48, pack=True, share_prompts=True), "
         "model=dataclasses.replace(made.model, shape=tiny.FAMILIES['qwen3_5']))",
         "share_prompts is for models that attend in all layers, which this one does not: leave it out"),
        (REPLACE + "collate=Collator(40, 48, microbatches=-1))", "collate: microbatches = -1 must be at least 0"),
        (REPLACE + "warm_start=WarmStart(1, Collator(40, 48, minibatches=3), made.optimizer, batch=8))",
         "warm_start: batch = 8 does not divide into 3 mini-batches"),
        (REPLACE + "evaluation=Evaluation(validation=0))", "evaluation: validation = 0 must be at least 1"),
        (REPLACE + "evaluation=Evaluation(every=-1))", "evaluation: every = -1 must be at least 0"),
        *((REPLACE + f"evaluation=Evaluation(temperature=float('{x}')))", "evaluation: temperature = ")
          for x in ("-1", "nan", "inf")),
        (REPLACE + "max_lag=2)", "max_lag = 2 needs an engine with weights of its own"),
        (REPLACE + "max_lag=-1)", "max_lag = -1 must be at least 0"),
        (REPLACE + "engine=Vllm(), max_lag=1, "
         "objective=dataclasses.replace(made.objective, penalties=((1e-3, kl.from_sampler),)))",
         "with max_lag the sampler is behind"),
        (REPLACE + "max_resamples=2, group_size=1)", "a group of one response has none"),
        (REPLACE + "show_samples_every=-1)", "show_samples_every = -1 must be at least 0"),
        (REPLACE + "reward_threads=0)", "reward_threads = 0 must be at least 1"),
        (REPLACE + "reward_seconds=0.0)", "reward_seconds = 0.0 must be above 0"),
        (REPLACE + "engine=Native(slots=-1))", "engine: slots = -1 must be at least 0"),
        (REPLACE + "warm_start=WarmStart(1, Collator(40, 48, microbatches=0), made.optimizer))",
         "warm_start: collate: microbatches = 0 must be at least 1"),
        *((REPLACE + f"warm_start=dataclasses.replace(made.warm_start, epochs=float('{epochs}')))",
           f"warm_start: epochs = {epochs} must be a number from 0 on") for epochs in ("nan", "inf", "-1.0")),
        (REPLACE + "warm_start=dataclasses.replace(made.warm_start, collate=Collator(20, 48)))",
         "prompts of up to 40 tokens are kept, and warm_start.collate has room for 20"),
        (REPLACE + "engine=Vllm(max_model_len=87))", "prompt and response may have 88 tokens, max_model_len = 87"),
        (REPLACE + "engine=Vllm(), sampling=Sampling(top_p=0.9))", "vLLM tells log-probs after truncation only"),
        (REPLACE + "engine=Vllm(), evaluation=Evaluation(samples=4, temperature=0.005))",
         "config: vLLM samples at a temperature of 0.01 where 0.005"),
        (REPLACE + "objective=Objective(advantages.grpo, factors=factors.truncated))", "line 4: "),
        ("def mine(logp, advantage, seen):\n    return -advantage * seen.old_logps\n" + REPLACE +
         "objective=Objective(advantages.grpo, surrogate=mine))", "line 4: AttributeError: "),
        (REPLACE + "objective=Objective(lambda reward, seen: reward))", "not that of the tokens"),
        (REPLACE + "task=lambda folder: open('/nowhere'))", "the task cannot be made: "),
        (TASK + "def reward(self, e, r): return 0", "config: task: it has no 'prompt'"),
        (TASK + "def prompt(self, e): return 'a'\n  def rewarded(self, e, r): return 0", "it has no 'reward'"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e): return [1]",
         "not a str or a list of messages"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e): return e['q']",
         "training example 0 has no prompt: "),
        (TASK + "@property\n  def train(self): return 1 / 0\n  def reward(self, e, r): return 0\n"
         "  def prompt(self, e): return 'a'", "line 8: ZeroDivisionError"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e):\n    import json\n"
         "    return json.loads('{')", "line 10: JSONDecodeError"),
        (TASK.replace("Mine()", "Mine"), "config: task is a class: an instance is wanted, as Mine()"),
        ("def config(): return 1 / 0", "line 3: ZeroDivisionError"),
        ("def config(): exit()", "line 3: SystemExit: "),
        ("exit(0)", "line 3: SystemExit: 0"),
        (REPLACE + "task=lambda folder: exit())", "the task cannot be made: "),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e): exit(0)", "line 8: SystemExit: 0"),
        ("def config(x: 'jax.numpi' = 1): pass", "an annotation of config() cannot be resolved"),
        ("def config() -> 'Cnfig': return made", "an annotation of config() cannot be resolved: name 'Cnfig'"),
        ("def confi(): pass\ndel config", "defines no 'config'; did you mean 'confi'?"),
        ("def config(:", "line 3: SyntaxError"),
    ],
)  # fmt: skip
def test_a_wrong_config(text, message, written, capsys):
    assert message in fails(capsys, "train", written(text))


def test_a_missing_config(capsys):
    assert "config file 'nowhere.py' does not exist" in fails(capsys, "train", "nowhere.py")
    assert "train wants a config, a file or a name" in fails(capsys, "train")


def test_configs_have_names_in_python_too():
    assert load("kk_tiny")(steps=3).steps == 3
    with pytest.raises(UserError, match="there is no config 'kk_tinny'; did you mean 'kk_tiny'"):
        load("kk_tinny")
    with pytest.raises(
        UserError, match=r"grpo\.py: config has no field 'lengths'; did you mean 'len"
    ):
        jl.grpo("a/model", "a/set", lengths=3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "3"], "Perhaps you meant: --steps INT"),
        (["--eta", "much"], "Error parsing --eta"),
        (["--ratios", "mine"], "Expected one of ('trainer', 'sampler')"),
        (["extra"], "Unrecognized options: extra"),
        (["--resume", "always"], "resume"),
    ],
)
def test_a_wrong_flag(flags, message, capsys):
    assert message in fails(capsys, "train", "tests/training/quick.py", *flags)


def test_a_missing_model(written, capsys):
    path = written("""
        made = config()
        from jaxrl_llm.config import Pretrained
        def config(): return dataclasses.replace(made, model=Pretrained("/nowhere"))
    """)
    assert "no model folder /nowhere" in fails(capsys, "train", path)


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    assert f"cannot write to {out}" in fails(
        capsys, "train", "tests/training/quick.py", "--out", out
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "cannot write to .*run: .*No space left"),
        (OSError(28, "No space left", "{}/metrics.jsonl"), "cannot write to .*run: .*No space"),
        (FileNotFoundError(2, "No such file", "{}-elsewhere/data.jsonl"), None),
    ],
    ids=str,
)
def test_only_what_lies_in_its_folder_is_written_by_a_run(error, said, tmp_path):
    out = tmp_path / "run"
    if error.filename:
        error.filename = error.filename.format(out)
    with (
        pytest.raises(UserError if said else FileNotFoundError, match=said),
        run._explained(RunFolder(out), terminal.console(quiet=True)),
    ):
        raise error


def test_nothing_to_resume_and_no_run(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    train = ("train", QUICK, "--resume", "--out")
    assert "holds no run to resume" in fails(capsys, *train, tmp_path / "empty")
    for command in (("eval",), ("sample",)):
        assert "is not the folder of a run" in fails(capsys, *command, tmp_path / "empty")
    assert "is not the folder of a run" in fails(capsys, "export", tmp_path, tmp_path / "to")
    assert not list((tmp_path / "empty").iterdir())


def test_too_small_a_vocabulary():
    small = dataclasses.replace(quick.SHAPE, vocab_size=20)
    with pytest.raises(UserError, match="do not fit into vocab_size=20"):
        Scratch(small, quick.kk_tiny.vocabulary())


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("gs://bucket/run", "pip install 'jaxrl-llm[gcs]'"),
        ("https://host/run", "write a URL as s3://bucket/name"),
        ("s3:///run", "write a URL as s3://bucket/name"),
        ("s3:///runs/run", "write a URL as s3:"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--resume",), ("--resume", "auto")])
def test_a_url_that_cannot_be_used_makes_no_folder(out, said, flags, capsys, tmp_path, monkeypatch):
    path = Path(QUICK).absolute()
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, "train", path, "--out", out, *flags)
    assert not list(tmp_path.iterdir())


def test_commands_are_listed_and_an_unknown_one_names_the_nearest(capsys):
    for words in ([], ["--help"]):
        main(words)
        assert "train " in capsys.readouterr().out
    assert "did you mean 'train'?" in fails(capsys, "trian")


def test_output_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "jaxrl_llm", "--help"],
            stdout=output, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
