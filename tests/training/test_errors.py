"""Bad input is one line and exit code 2, and nothing is lost or half written."""

import dataclasses
import textwrap

import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.runs import assemble
from tests.training import quick
from tests.training.process import QUICK, metrics, train

HEAD = (
    "from tests.training.quick import *; from jaxrl_llm.rollouts.engines import Vllm\n"
    "import dataclasses; from jaxrl_llm.rollouts.sampler import Sampling\n"
)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxrl-llm: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def written(tmp_path):
    """A config file with these lines after those of the quick one."""

    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + textwrap.dedent(text))
        return path

    return write


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
        (REPLACE + "optimizer=3)", "optimizer is a int"),
        (REPLACE + "ratios='mine')", "none of trainer, sampler"),
        (REPLACE + "ratios='sampler', objective=Objective(advantages.grpo, (factors.truncated,)))",
         "corrects nothing: set ratios = 'trainer'"),
        (REPLACE + "reference=False)", "the objective looks at ref_logp: leave reference out"),
        (REPLACE + "collate=Collator(40, 48, minibatches=3))", "8 responses a step do not divide into 3"),
        (REPLACE + "collate=Collator(40, 48, minibatches=0))", "collate: minibatches = 0 must be at least 1"),
        (REPLACE + "collate=Collator(40, 48, microbatches=0))", "collate: microbatches = 0 must be at least 1"),
        (REPLACE + "warm_start=WarmStart(1, Collator(40, 48, minibatches=3), made.optimizer, batch=8))",
         "warm_start: batch = 8 does not divide into 3 mini-batches"),
        (REPLACE + "evaluation=Evaluation(validation=0))", "evaluation: validation = 0 must be at least 1"),
        (REPLACE + "evaluation=Evaluation(every=-1))", "evaluation: every = -1 must be at least 0"),
        (REPLACE + "show_samples_every=-1)", "show_samples_every = -1 must be at least 0"),
        (REPLACE + "reward_threads=0)", "reward_threads = 0 must be at least 1"),
        (REPLACE + "reward_seconds=0.0)", "reward_seconds = 0.0 must be above 0"),
        (REPLACE + "engine=Native(slots=0))", "engine: slots = 0 must be at least 1"),
        (REPLACE + "warm_start=dataclasses.replace(made.warm_start, collate=Collator(20, 48)))",
         "prompts of up to 40 tokens are kept, and warm_start.collate has room for 20"),
        (REPLACE + "engine=Vllm(max_model_len=87))", "prompt and response may have 88 tokens, max_model_len = 87"),
        (REPLACE + "engine=Vllm(), sampling=Sampling(top_p=0.9))", "vLLM tells log-probs after truncation only"),
        (REPLACE + "objective=Objective(advantages.grpo, factors=factors.truncated))", "line 4: "),
        ("def mine(logp, advantage, seen):\n    return -advantage * seen.old_logps\n" + REPLACE +
         "objective=Objective(advantages.grpo, surrogate=mine))", "line 4: AttributeError: "),
        (REPLACE + "objective=Objective(lambda reward, seen: reward))", "not that of the tokens"),
        (REPLACE + "task=lambda folder: open('/nowhere'))", "the task cannot be made: "),
        (TASK + "def reward(self, e, r): return 0", "config: task: it has no 'prompt'"),
        (TASK + "def prompt(self, e): return 'a'\n  def rewards(self, e, r): return 0", "it has no 'reward'"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e): return [1]", "a list, not a str"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e): return e['q']",
         "training example 0 has no prompt: "),
        (TASK + "@property\n  def train(self): return 1 / 0\n  def reward(self, e, r): return 0\n"
         "  def prompt(self, e): return 'a'", "line 8: ZeroDivisionError"),
        (TASK + "def reward(self, e, r): return 0\n  def prompt(self, e):\n    import json\n"
         "    return json.loads('{')", "line 10: JSONDecodeError"),
        (TASK.replace("Mine()", "Mine"), "config: task is a class: an instance is wanted, as Mine()"),
        ("def config(): return 1 / 0", "line 3: ZeroDivisionError"),
        ("def config(x: 'jax.numpi' = 1): pass", "an annotation of config() cannot be resolved"),
        ("def config() -> 'Cnfig': return made", "an annotation of config() cannot be resolved: name 'Cnfig'"),
        ("def confi(): pass\ndel config", "defines no 'config'; did you mean 'confi'?"),
        ("def config(:", "line 3: SyntaxError"),
    ],
)  # fmt: skip
def test_a_wrong_config(text, message, written, capsys):
    assert message in fails(capsys, "train", written(text))


@pytest.mark.parametrize("name", ["lr=[1e-4]", "a*/run"])
def test_a_folder_that_is_a_pattern_of_others(name, capsys, tmp_path):
    """Orbax would look for its own files by it, and find none, or those of another run."""
    said = fails(capsys, "train", QUICK, "--out", tmp_path / name)
    assert "no checkpoint can be kept under" in said
    assert not list(tmp_path.iterdir())


def test_a_missing_config(capsys):
    assert "config file 'nowhere.py' does not exist" in fails(capsys, "train", "nowhere.py")
    assert "train wants a config file" in fails(capsys, "train")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "3"], "Perhaps you meant: --steps INT"),
        (["--eta", "much"], "Error parsing --eta"),
        (["--ratios", "mine"], "Expected one of ('trainer', 'sampler')"),
        (["extra"], "Unrecognized options: extra"),
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


def test_prompts_that_are_too_long(capsys, tmp_path):
    arguments = ("train", "tests/training/quick.py", "--out", tmp_path / "run", "--prompt-length")
    refused = fails(capsys, *arguments, 18, "--long-prompts", "refuse")
    assert "the limit is 1 to 18" in refused
    assert "examples were skipped" in fails(capsys, *arguments, 5)
    assert not (tmp_path / "run").exists()


def test_no_test_example_is_dropped_for_its_length(environment, written, capsys, tmp_path):
    """It is only answered, not collated: a prompt that is too long to learn from may be asked."""
    arguments = ("--warm-steps", "0", "--steps", "1", "--prompt-length", "22")
    done = train(environment, tmp_path / "run", *arguments)
    assert done.returncode == 0, done.stderr
    assert "31 examples are left out: their prompts are too long to learn from" in done.stdout
    assert "12 to test on" in done.stdout
    [tested] = [r for r in metrics(tmp_path / "run") if "test/accuracy" in r]
    assert tested["test/examples"] == 8
    path = written("""
        made, short = config(), dataclasses.replace(SHAPE, max_length=70)
        def config():
            return dataclasses.replace(made, model=Scratch(short, kk_tiny.vocabulary()))
    """)
    message = (
        "test example 2 has a prompt of 25 tokens, and 70 is room for it and 48 to come: lower"
    )
    assert message in fails(capsys, "train", path, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    made = dataclasses.replace(quick.config(prompt_length=24), engine=Vllm(max_model_len=72))
    parts = assemble.parts(made, tmp_path)
    with pytest.raises(
        UserError,
        match="72 is room for it and 48 to come: lower response_length, raise the engine's max_model_len",
    ):
        assemble.askable(parts, parts.task.test, made)


def test_an_empty_data_set(written, capsys):
    path = written("""
        made = config()
        def config():
            return dataclasses.replace(made, task=lambda d: knights_knaves.tiny([], []))
    """)
    assert "training data is empty" in fails(capsys, "train", path)


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run"
    assert f"cannot write to {out}" in fails(capsys, "train", "tests/training/quick.py", "--out", out)


def test_nothing_to_resume_and_no_run(capsys, tmp_path):
    assert "no run to resume" in fails(
        capsys, "train", "tests/training/quick.py", "--out", tmp_path, "--resume"
    )
    for command in ("eval", "sample"):
        assert "is not the folder of a run" in fails(capsys, command, tmp_path)
    assert "is not the folder of a run" in fails(capsys, "export", tmp_path, tmp_path / "to")
    assert "no evaluation to draw" in fails(capsys, "plot", tmp_path)


def test_too_small_a_vocabulary():
    from jaxrl_llm.config import Scratch
    from jaxrl_llm.errors import UserError

    small = dataclasses.replace(quick.SHAPE, vocab_size=20)
    with pytest.raises(UserError, match="do not fit into vocab_size=20"):
        Scratch(small, quick.kk_tiny.vocabulary())
