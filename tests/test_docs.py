"""README and docs are true: their snippets run, their commands are known, their links lead somewhere."""

import fnmatch
import functools
import importlib
import json
import math
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import jaxrl_llm as jl
from jaxrl_llm import config as configs
from jaxrl_llm.cli.main import COMMANDS, main
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import families
from jaxrl_llm.models import tokenizer as tokenizers
from jaxrl_llm.objectives import TokenData, recipes
from jaxrl_llm.tasks import questions
from jaxrl_llm.tasks.tools import Toolbox
from jaxrl_llm.training import journal, tokens
from tests import public, tiny
from tests.tasks import templates

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {"README.md": (ROOT / "README.md").read_text()} | {
    path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))
}
ELSEWHERE = {
    "python.md": 9,
    "studies.md": 1,
}  # snippets run by test_public.py and research/test_study.py
LINES = [
    pytest.param(line.strip(), id=f"{name}:{number}")
    for name, text in PAGES.items()
    for number, line in enumerate(text.splitlines(), 1)
    if re.match(r"    (\w+=\S+ )*jaxrl-llm ", line)
    and not re.search(r"CONFIG|\.\.\.|s3:.*--resume", line)
]


def snippet(page, number):
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)[number]


def run(page, number, space=None):
    space = space or {}
    exec(compile(snippet(page, number), page, "exec"), space)
    return space


def test_every_snippet_is_tested():
    found = {name: len(re.findall("```python", text)) for name, text in PAGES.items()}
    tested = ELSEWHERE | {
        "README.md": 2,
        "objectives.md": 4,
        "own-task.md": 3,
        "models.md": 3,
        "environments.md": 3,
        "tools.md": 3,
        "agents.md": 1,
        "tokens.md": 1,
        "tutorial.md": 5,
        "migration.md": 2,
        "gallery.md": 1,
    }
    assert {name: count for name, count in found.items() if count} == tested


@pytest.mark.parametrize("page", ["README.md", "objectives.md"])
def test_the_objective_has_two_stages(page):
    assert run(page, 0)["objective"].stages == 2


def test_a_shape_of_two_kinds_is_one_of_its_family():
    space = run("models.md", 0)
    assert space["model"].chat
    space = run("models.md", 2, run("models.md", 1, space))
    assert space["model"].lora.scale == 2.0
    again = families.shape_of(families.config_of(space["shape"], "float32"))
    assert (again.kind_of, again.head_dim) == ((0, 0, 0, 0, 0, 1), 32)


def test_a_teacher_is_a_field_of_a_config():
    space = run("objectives.md", 1)
    assert isinstance(space["teacher"], jl.Pretrained)


def test_a_new_surrogate_takes_a_step(capsys):
    space = run("objectives.md", 3)
    assert int(space["state"].step) == 1
    assert float(space["metrics"]["grad_norm"][0]) > 0
    assert "'policy'" in capsys.readouterr().out


def test_an_objective_of_your_own_goes_into_a_config_that_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (path := tmp_path / "mine.py").write_text(text := snippet("objectives.md", 2))
    assert text.count("\n") <= 10
    made = configs.build(configs.load(path), path, floor=-3.0)
    data = TokenData(mask=np.ones((1, 2), bool), old_logp=np.asarray([[-2.0, -4.0]]))
    loss = made.objective.surrogate(data.old_logp, np.asarray([[1.0, 1.0]]), data)
    assert loss.tolist() == [[2.0, 0.0]]
    assert made.objective.stages == 2  # the rest is that of kk_tiny


def test_which_tokens_one_method_moves_alone_is_worked_out(tmp_path, monkeypatch, capsys):
    """Of four tokens, one in each bin of probability, Lopti alone moves the first."""
    monkeypatch.chdir(tmp_path)
    old = np.log([[0.05, 0.3, 0.7, 0.95]])
    groups = tiny.groups(tiny.trajectories([[2]], [[2, 3, 4, 5]]), [jl.Reward(1.0, True)], n=1)
    moved = {"plain": (0.01, 0.2, -0.2, 0), "lopti": (-0.1, 0.2, -0.04, 0), "twice": (0.3,) * 4}
    for name, by in moved.items():
        tokenizers.of_words("abcd").save((folder := tmp_path / "runs" / "rare" / name) / "model")
        numbers = {"old": old, "new": old + by}
        tokens.write(folder, 601, groups, ["a"], numbers)
    run("tokens.md", 0)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "p < 0.1 1 plain 0.010 lopti 0.100 twice 0.300",
        "0.1 to 0.5 1 plain 0.200 lopti 0.200 twice 0.300",
        "0.5 to 0.9 1 plain 0.200 lopti 0.040 twice 0.300",
        "p > 0.9 1 plain 0.000 lopti 0.000 twice 0.300",
        "Lopti alone: 1 of 4; rare: 100%, of all 50%",
        "[('a', 1)]",
    ]


@pytest.mark.slow
def test_your_own_task_is_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "larger.py").write_text(snippet("README.md", 1))
    main(["train", "larger.py", "--steps", "50", "--out", "run"])
    assert "test accuracy in percent" in " ".join(capsys.readouterr().out.split())
    sampled = [r["accuracy"] for r in journal.read(tmp_path / "run") if "reward" in r]
    assert np.mean(sampled[-10:]) > np.mean(sampled[:5]) + 0.15
    told = PAGES["getting-started.md"].split("## What the numbers mean")[1].split("\n## ")[0]
    told = {*re.findall(r"`([^`\n]+)`", told)}
    for name in {name for record in journal.read(tmp_path / "run") for name in record}:
        heads = {f"{name[:i]}..." for i in range(1, len(name))}
        assert heads & told or {name, re.sub("^reward/.*", "reward/NAME", name)} & told, name


def test_the_names_beside_those_of_others_exist():
    text = PAGES["from-others.md"]
    for part, name in (found := re.findall(r"(?<![./\w])([a-z]+)\.([a-z]\w+)", text)):
        if part in {*jl.objectives.__all__}:
            assert hasattr(getattr(jl.objectives, part), name), f"{part}.{name}"
    assert ("losses", "gspo") in found
    names = {"partial": functools.partial, "math": math, **vars(jl.objectives)}
    assert eval(re.search(r"`(Objective\(.*?\))`,", text)[1], names).stages == 1


@pytest.mark.slow
def test_what_is_run_in_three_ways_has_one_file_of_rewards(tmp_path, monkeypatch, capsys):
    """Our command of the page as it stands but for the sizes; the file's two functions say the same."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("reward.py").write_text(snippet("migration.md", 0))
    compile(snippet("migration.md", 1), "trl_run.py", "exec")
    public.write_model(pathlib.Path("model"))
    settings = json.loads(pathlib.Path("model/tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    pathlib.Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    pathlib.Path("model/SHA256SUMS").unlink()
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{a} {b}"}],
            "reward_model": {"style": "rule", "ground_truth": a},
            "extra_info": {"index": 0},
        }
        for a in public.WORDS
        for b in public.WORDS
    ]
    for name, part in (("gsm8k", rows[4:]), ("gsm8k_test", rows[:4])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), f"{name}.parquet")
    [line] = re.findall(r"^    jaxrl-llm (train .*)$", PAGES["migration.md"], re.MULTILINE)
    words = shlex.split(line)
    words[words.index("--model") + 1], words[words.index("--length") + 1] = "model", "4"
    words += [
        "--prompts",
        "2",
        "--group",
        "2",
        "--steps",
        "1",
        "--validation",
        "3",
        "--no-bfloat16",
    ]
    main([*words, "--prompt-length", "4", "--out", "run"])
    assert "test accuracy" in capsys.readouterr().out
    task = questions.task("gsm8k.parquet", ["reward.py:compute_score", "reward.py:correct"])
    for said in ("#### " + public.WORDS[0], "#### 1,000", "", public.WORDS[0]):
        fields = task.reward(task.train[0], said).fields
        assert fields["compute_score"] == fields["correct"]
    right = task.reward(task.train[0], f"so\n#### {task.train[0].truths[0]}")
    assert (right.score, right.correct) == (2.0, True)


def tutorial(folder):
    """The file that the tutorial's blocks make."""
    (path := folder / "sorting.py").write_text(
        "\n".join(snippet("tutorial.md", i) for i in range(5))
    )
    return path


def test_the_tutorial_makes_a_config(tmp_path, monkeypatch):
    """Its own objective is in it, and the script of the last command is there."""
    monkeypatch.chdir(tmp_path)
    made = configs.build(configs.load(path := tutorial(tmp_path)), path, bad=0.25)
    [factor] = made.objective.factors
    assert factor(np.asarray([[-2.0, 3.0]]), None).tolist() == [[0.25, 1.0]]
    assert (made.task("").reward((9, 1, 2), "1 2 9 9").score, made.steps) == (0.75, 100)
    [script] = re.findall(r"^    bash (\S+) sorting.py$", PAGES["tutorial.md"], re.MULTILINE)
    assert (ROOT / script).exists()


def alone(*words):
    """Runs Python in a process of its own, on one device, as a user has it."""
    settings = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    settings["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, *words], env=settings, check=True, timeout=3600)


@pytest.mark.long
def test_the_tutorial_is_learned_and_its_model_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tutorial(tmp_path)
    accuracy = lambda run: [r["accuracy"] for r in journal.read(tmp_path / run) if "reward" in r]
    for line in re.findall("^    jaxrl-llm (.*)$", PAGES["tutorial.md"], re.MULTILINE):
        if not line.startswith("plan"):
            alone("-m", "jaxrl_llm", *shlex.split(line, comments=True))
    sampled = accuracy("runs/sorting")
    assert np.mean(sampled[-10:]) > np.mean(sampled[:5]) + 0.3
    assert accuracy("runs/whole")[0] == sampled[0]  # the same warm start
    assert accuracy("runs/again")[0] > sampled[0] + 0.3
    assert (tmp_path / "tokens.html").exists()


SHOWN = """
import sys, types
sys.modules["IPython.display"] = types.SimpleNamespace(
    Image=str, HTML=str, display=lambda x: print(x, file=open("shown", "a"), flush=True)
)
"""


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    """All its cells, with what it shows kept instead of shown; its task is the README's."""
    cells = json.loads((DOCS / "first-run.ipynb").read_text())["cells"]
    code = {c["id"]: "".join(c["source"]) for c in cells if c["cell_type"] == "code"}
    assert not [c for c in cells if c.get("outputs") or c.get("execution_count")]
    assert snippet("README.md", 1).endswith(code["task"] + "\n")
    monkeypatch.chdir(tmp_path)
    alone("-c", "\n".join([SHOWN, *code.values()]))
    picture, frame = (tmp_path / "shown").read_text().split("\n", 1)
    assert pathlib.Path(picture).read_bytes().startswith(b"\x89PNG")
    assert "&lt;script&gt;" in frame.removeprefix('<div><iframe srcdoc="').partition('"')[0]
    sampled = [r["accuracy"] for r in journal.read(tmp_path / "runs/larger") if "reward" in r]
    assert np.mean(sampled[-10:]) > np.mean(sampled[:5]) + 0.15


@pytest.mark.parametrize(
    ("driver", "files", "extra", "found"),
    [
        ("550.54.15, 7.5", [], "[cuda12]", "gpu"),  # a T4 or an L4, by its host
        ("580.95.05, 7.5\n580.95.05, 7.5", [], "[cuda]", "gpu"),
        ("580.95.05, 6.0", [], "[cuda12]", "gpu"),  # Kaggle's P100
        ("580.95.05, 9.0", [], "[cuda]", "cpu"),
        (None, ["/dev/accel0"], "[tpu]", "tpu"),
        (None, ["/dev/vfio/0"], "[tpu]", "tpu"),
        (None, ["/dev/vfio/vfio"], "", "cpu"),
        ("NVIDIA-SMI has failed", [], "", "cpu"),
    ],
)
def test_the_notebook_installs_what_fits_the_machine(driver, files, extra, found, monkeypatch):
    """Of an older JAX no plugin stays; where JAX runs on something else it says so."""
    cells = json.loads((DOCS / "first-run.ipynb").read_text())["cells"]
    [code] = ["".join(cell["source"]) for cell in cells if cell["id"] == "install"]
    commands = []

    def run(command, **_):
        commands.append(command)
        return types.SimpleNamespace(stdout=f"{driver}\n")

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("shutil.which", lambda name: driver and name)
    monkeypatch.setattr("glob.glob", lambda pattern: fnmatch.filter(files, pattern))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("jax.default_backend", lambda: found)
    monkeypatch.delenv("JAX_PLATFORMS")
    if extra and found == "cpu":
        with pytest.raises(RuntimeError, match="has a GPU, but JAX runs on the CPU: restart"):
            exec(code, {})
    else:
        exec(code, {})
    *before, [*_, wheel] = commands
    assert wheel.startswith(f"jaxrl-llm{extra} @ file://")
    gone = [command for command in before if "uninstall" in command]
    assert bool(gone) == extra.startswith("[cuda")


@pytest.mark.long
def test_who_asks_learns_to_use_the_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "asking.py").write_text(snippet("environments.md", 0))
    main(["train", "asking.py", "--out", "run"])
    assert "test accuracy in percent" in " ".join(capsys.readouterr().out.split())
    steps = [r for r in journal.read(tmp_path / "run") if "reward" in r]
    first, last = (np.mean([r["accuracy"] for r in some]) for some in (steps[:5], steps[-10:]))
    assert last > first + 0.15
    assert np.mean([r["turns"] for r in steps[-10:]]) > 1.3


def test_a_function_is_a_tool():
    task, made = run("tools.md", 0)["task"], templates.of_bytes(templates.QWEN25)
    assert "How many people live in a city." in made.decode(made.prompt(task.prompt(task.test[0])))
    episode, answers = task.environment(task.test[0], made), []
    for turn in (
        '<tool_call>{"name": "population", "arguments": {"city": "Oslo", "unit": 1000}}</tool_call>',
        '<tool_call>{"name": "population", "arguments": {"city": "Rome"}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "print(3.7 + 0.7)"}}</tool_call>',
    ):
        given, _ = episode.step([*made.encode(turn), made.eos])
        answers += re.findall(r"<tool_response>\n(.*)\n", made.decode(given))
    assert answers == ["700.0", "error: KeyError: 'Rome'", "4.4"]
    given, reward = episode.step([*made.encode("It is 4.4"), made.eos])
    assert (given, reward.correct, reward.fields["tool_errors"]) == (None, True, 1)


def test_a_tool_may_send_a_program_elsewhere():
    """Here another Python is the box."""
    space = run("tools.md", 1)
    space["BOX"] = f"timeout 20 {sys.executable} -"
    box = Toolbox([space["python"]])
    says = lambda code: box.answer(("python", {"code": code}))
    assert says("print(1 + 1)") == ("2\n", True)
    assert "ZeroDivisionError" in says("1 / 0")[0]
    assert says("while True: print('x' * 99)")[0].startswith("x" * 99)


def test_a_class_made_for_trl_is_a_task():
    task, made = run("tools.md", 2)["task"], templates.of_bytes(templates.QWEN25)
    row = task.train[6]
    assert "Guess my number. It is from 1 to 9." in made.decode(made.prompt(task.prompt(row)))
    episode = task.environment(row, made)
    turn = '<tool_call>{"name": "guess", "arguments": {"value": 7}}</tool_call>'
    following, _ = episode.step([*made.encode(turn), made.eos])
    assert "right" in made.decode(following)
    assert episode.step([*made.encode("It is 7."), made.eos])[1].correct


def test_an_agent_is_a_task():
    known = TokenTask(run("agents.md", 0)["task"], templates.of_bytes(templates.QWEN25))
    played = known.replay(["3 + 4"] * 2, [["Seven.", "7"], ["8"]])
    assert [len(one.turns) for one in played] == [2, 1]
    assert [one.reward.score for one in played] == [1.0, 0.0]


def test_a_task_may_be_reflected_on():
    class Sums:
        name, train, test = "sums", ["2 + 2"], ["3 + 4"]

        def prompt(self, example):
            return example

        def reward(self, example, response):
            return jl.Reward(float(response == str(eval(example))), response == str(eval(example)))

    task = run("environments.md", 2, {"my_task": Sums()})["task"]
    known = TokenTask(task, templates.of_bytes(templates.QWEN25))
    played = known.replay(["2 + 2"] * 2, [["4"], ["5", "Add.", "4"]])
    assert [len(one.turns) for one in played] == [1, 3]
    text = known.tokenizer.decode(played[1].tokens)
    for part in ("Think step by step.", "The answer is wrong.", "Add.", "2 + 2"):
        assert part in text
    assert [one.reward.score for one in played] == [1.0, 1.0]


def test_an_advantage_sees_turns():
    late = run("environments.md", 1)["late_turns"]
    data = TokenData(
        mask=jnp.ones((2, 3), bool),
        old_logp=jnp.zeros((2, 3)),
        turn=jnp.asarray([[1, 1, 2], [1, 2, 3]]),
    )
    found = late(jnp.asarray([[1.0, 0.0]]), data, gamma=0.5)
    np.testing.assert_allclose(found[0] / found[0, -1], [0.5, 0.5, 1.0])
    np.testing.assert_allclose(found[1] / found[1, -1], [0.25, 0.5, 1.0])


def chat_model(folder):
    """A tiny Qwen2.5 that reads bytes and the turns of a chat, as Hugging Face has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from jaxrl_llm.models import hf

    shape = tiny.shape(vocab_size=264)
    hf.export(tiny.policy(shape)[1], shape, folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    turns = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    PreTrainedTokenizerFast(tokenizer_object=inner, **turns).save_pretrained(folder)


def test_a_pretrained_model_learns_from_data_of_your_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    chat_model(tmp_path / "model")
    rows = [{"question": f"{i} plus {i}?", "answer": str(2 * i)} for i in range(500)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "facts.py").write_text(snippet("own-task.md", 0))
    flags = ["--questions", "facts.jsonl", "--model", "model", "--prompts", "4", "--length", "16"]
    main(["train", "facts.py", *flags, "--steps", "1", "--out", "run"])
    assert "test accuracy in percent" in " ".join(capsys.readouterr().out.split())
    steps = [r for r in journal.read(tmp_path / "run") if "share/stage1" in r]
    assert len(steps) == 1


def test_several_tasks_are_one():
    tasks = {
        name: types.SimpleNamespace(name=name, train=[1], test=[2], prompt=str, reward=min)
        for name in ("sums", "capitals")
    }
    space = run("own-task.md", 1, dict(tasks))
    assert space["task"].shares == pytest.approx({"sums": 0.7, "capitals": 0.3})
    assert space["evaluation"].best_by in space["task"].tasks


def test_a_receiver_is_asked_for_when_it_is_needed(tmp_path):
    public.write_model(tmp_path / "receiver")
    task = types.SimpleNamespace(name="sums", train=[1], test=[2], prompt=str, reward=min)
    space = run("own-task.md", 2, {"sums": task, "folder": tmp_path / "receiver"})
    assert space["task"].weight == 0.5
    assert space["receiver"]().tokenizer.encode("one two") == [2, 3]


def test_a_reward_of_few_words():
    brief = run("gallery.md", 0)["brief"]
    assert [brief(None, "so " * words) for words in (0, 5, 25, 40)] == [1.0, 0.8, 0.0, 0.0]


@pytest.mark.parametrize("line", LINES)
def test_a_command_is_known(line, tmp_path, monkeypatch):
    """It is parsed as it stands, up to the call; `RUN` and the like stand for a user's own."""
    words = shlex.split(line, comments=True)
    words = words[words.index("jaxrl-llm") + 1 :]
    if words == ["--help"]:
        main(words)
        return
    name, *rest = words
    assert name in COMMANDS
    if name == "sft":
        name, rest = "train", words
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n' * 8)
    rest = [word.replace("mine.jsonl", str(tmp_path / "mine.jsonl")) for word in rest]
    rest = [word.replace("sorting.py", str(tutorial(tmp_path))) for word in rest]
    module, called = importlib.import_module(f"jaxrl_llm.cli.{name}"), []
    if name == "bench":
        monkeypatch.setitem(module.COMMANDS, rest[0], _noted(module.COMMANDS[rest[0]], called))
    else:
        monkeypatch.setattr(module, "main", _noted(module.main, called))
    main([name, *rest])
    assert called == [1]


def test_a_command_named_in_a_sentence_is_one():
    named = {
        (name, word)
        for name, text in PAGES.items()
        for word in re.findall(r"`jaxrl-llm ([a-z]+)", text)
    }
    assert not [(name, word) for name, word in named if word not in COMMANDS]


def _noted(command, called):
    return functools.wraps(command)(lambda *_, **__: called.append(1))


def test_every_promise_names_a_test_that_exists():
    """Each row of the tables of docs/reliability.md; a promise that nothing shows is none."""
    files = (ROOT / "tests").rglob("test_*.py")
    known = {
        name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    promises, rest = PAGES["reliability.md"].split("## What is not promised")
    rows = [
        row
        for row in promises.splitlines()
        if row.startswith("| ") and not row.endswith("| shown by |")
    ]
    assert len(rows) > 40
    assert not [row for row in rows if not re.search(r"`test_\w+`", row)]
    assert not {*re.findall(r"`(test_\w+)`", promises + rest)} - known


def test_the_gallery_has_a_picture_of_each_command(tmp_path, monkeypatch):
    """Drawn from the runs' records, small, and the same again."""
    monkeypatch.chdir(tmp_path)
    (page := tmp_path / "gallery.md").write_text(PAGES["gallery.md"])
    pictures = runpy.run_path(str(DOCS / "pictures.py"))
    runs = pictures["commands"](page.read_text())
    assert (
        4
        <= len(runs)
        == len(re.findall("^    jaxrl-llm.* --out runs/gallery/", page.read_text(), re.M))
    )
    for i, run in enumerate(runs):
        (folder := tmp_path / run).mkdir(parents=True)
        found = [{"step": s, "phase": "reinforce", "accuracy": (s + i) / 30} for s in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    drawn = []
    for _ in range(2):
        pictures["draw"](page)
        drawn.append({p.name: p.read_bytes() for p in (tmp_path / "images/gallery").iterdir()})
    assert drawn[0] == drawn[1]
    assert len({*drawn[0].values()}) == len(runs)
    assert {*drawn[0]} == {*re.findall(r"\(images/gallery/([\w.]+)\)", page.read_text())}
    assert max(p.stat().st_size for p in (DOCS / "images/gallery").iterdir()) < 30_000


def test_links_lead_somewhere():
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else (DOCS / name).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (folder / target).exists(), f"{name}: {target}"


def test_the_site_has_every_page_and_every_public_name():
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({*PAGES} - {"README.md"})
    shown = re.findall(r"^::: jaxrl_llm\.([\w.]+)$", "\n".join(PAGES.values()), re.MULTILINE)
    parts = {f"objectives.{name}" for name in jl.objectives.__all__} - {"objectives.Objective"}
    assert {*jl.__all__} - {"objectives"} | parts <= {*shown}


def test_the_number_of_recipes_is_that_of_algo():
    count = len(recipes.BY_NAME)
    assert f"the {count} recipes\nthat `--algo` takes" in PAGES["README.md"]
    assert f"has {count} published losses" in PAGES["objectives.md"]
    named = re.findall(
        r"^\| (`.*?) \| ", PAGES["objectives.md"].split("| recipe |")[1], re.MULTILINE
    )
    assert {*re.findall(r"`(\w+)`", " ".join(named))} == {*recipes.BY_NAME}


def test_the_map_is_that_of_the_package():
    """Every room and every file at the top of the package is in it."""
    tree = PAGES["design.md"].split("## The house")[1].split("Imports go one way")[0]
    package = ROOT / "jaxrl_llm"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^      (\w+)/ ", tree, re.MULTILINE)) == rooms
    top = {path.name for path in package.glob("*.py")}
    assert set(re.findall(r"^      (\w+\.py) ", tree, re.MULTILINE)) == top


def test_the_glossary_is_short():
    words = re.findall(r"^\| ([a-z, -]+) \| ", PAGES["glossary.md"], re.MULTILINE)
    assert 20 < len(words) - 1 <= 40  # the head of the table


def test_ci_runs_the_test_command_of_the_readme():
    command = ".venv/bin/python -m pytest"
    assert f"    {command}\n" in PAGES["README.md"]
    for name, tier in (("run", "\n"), ("slow", " -m slow -n 2 ")):
        assert f"{command}{tier}" in (ROOT / ".ci" / name).read_text()
