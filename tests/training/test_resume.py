"""Whole runs in processes of their own: killed, stopped, cut off, and resumed to the same figures, bit for bit."""

import json
import os
import re
import shutil
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm import storage
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.learning import optimizers
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.training import components as parts
from jaxrl_llm.training import journal, run, terminal
from jaxrl_llm.training.checkpoint import Checkpoints
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.journal import REINFORCE
from jaxrl_llm.training.leaving import UNFINISHED
from tests import tiny
from tests.public import write_model
from tests.tiny import slow
from tests.training import quick
from tests.training.conftest import forget
from tests.training.process import QUICK, ROOT, contents, fails, finished, metrics, train
from tests.training.test_leaving import on_terminal, piped
from tests.training.test_storage import objects

LAGGING = "tests/training/lagging.py"


def killed(environment, out, moment, nth, delay, *flags, **how):
    program = ("-m", "tests.training.killed", moment, str(nth), str(delay))
    done = train(environment, out, *flags, program=program, **how)
    assert done.returncode == -signal.SIGKILL, done.stderr


def resumed(environment, out, *flags, **how):
    done = train(environment, out, "--resume", *flags, **how)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_a_killed_run_goes_on_bit_for_bit(environment, whole, tmp_path):
    killed(environment, tmp_path / "run", "save", 3, 0.02)
    done = resumed(environment, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(whole)
    assert len(metrics(whole)) == 10 + 4 + 1  # steps of both phases, evaluations, test
    assert "mean of the last 2:" in done.stdout  # those before the kill count too


@pytest.mark.slow
def test_a_run_goes_back_to_an_earlier_step_and_keeps_the_later_ones(
    environment, whole, tmp_path, capsys
):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    there = {path.name for path in (out / "checkpoints").glob("[0-9]*")}
    first = min(map(int, there))
    assert "there are checkpoints of" in fails(
        capsys, "train", QUICK, "--out", out, "--resume", "1"
    )
    assert "has made 6 steps of reinforcement, more than --steps 1" in fails(
        capsys, "train", QUICK, "--out", out, "--resume", max(map(int, there)), "--steps", 1
    )
    done = train(environment, out, "--resume", str(first))
    assert done.returncode == 0, done.stderr
    assert metrics(out) == metrics(whole)
    aside = {path.name for path in (out / "checkpoints").glob("later-*")}
    assert aside == {f"later-{step}-0" for step in there - {str(first)}}


def quiet():
    return run.Session(console=terminal.console(quiet=True))


@pytest.fixture
def teacher(tmp_path):
    """A folder with another size of model and the words of the policy's."""
    write_model(tmp_path / "teacher", words=kk_tiny.vocabulary())
    return tmp_path / "teacher"


@pytest.mark.slow
def test_a_run_with_a_teacher_goes_on_bit_for_bit_with_that_one_alone(teacher, tmp_path, capsys):
    make = partial(quick.config, warm_steps=0, eta=0.0, teacher=str(teacher))
    for name, offload in (("through", "none"), ("run", "reference")):
        go = partial(run.train, out=tmp_path / name, session=quiet())
        if name == "run":
            go(make(steps=1, offload=offload))
        go(make(steps=2, offload=offload), resume="auto")
    through, again = (
        [r for r in metrics(tmp_path / name) if "updates" in r] for name in ("through", "run")
    )
    assert through == again
    assert len(through) == 2
    assert all(np.isfinite(r["kl_teacher"]) and r["skipped"] == 0 for r in through)
    shutil.rmtree(teacher)
    write_model(teacher, words=kk_tiny.vocabulary(), seed=1)
    with pytest.raises(UserError, match=r"the teacher is not as it was when .* was started"):
        go(make(steps=3, offload=offload), resume=True)


def test_a_teacher_with_another_memory_shares_no_prompts(teacher, monkeypatch):
    config = quick.config(warm_steps=0, teacher=str(teacher))
    config = replace(config, collate=replace(config.collate, pack=True, share_prompts=True))
    read, shape = parts._read, tiny.FAMILIES["qwen3_5"]
    monkeypatch.setattr(parts, "_read", lambda model: read(model)._replace(shape=shape))
    with pytest.raises(UserError, match=r"attend in all layers, which the teacher .* does not"):
        Components.make(config).teacher  # noqa: B018


def test_a_teacher_of_other_tokens_is_refused_by_the_first_of_them(tmp_path):
    """Before anything is written; more tokens than the policy's are no others."""
    words = kk_tiny.vocabulary()

    def make(*words):
        shutil.rmtree(tmp_path / "teacher", ignore_errors=True)
        write_model(tmp_path / "teacher", words=words)

    config = quick.config(warm_steps=0, teacher=str(tmp_path / "teacher"))
    for other, said in (
        ((*words[:3], "four", *words[4:]), f"token 5 is {words[3]!r} in the policy and 'four' in "),
        (words[:-1], f"token {len(words) + 1} is {words[-1]!r} in the policy and None in "),
    ):
        make(*other)
        with pytest.raises(UserError) as error:
            run.train(config, tmp_path / "run", session=quiet())
        assert f"{said}{tmp_path / 'teacher'}: " in str(error.value)
    assert not (tmp_path / "run").exists()
    make(*words, *map(str, range(90, 170)))
    components = Components.make(config)
    assert components.teacher.shape.vocab_size > components.shape.vocab_size
    assert components.teacher_prompts is None
    telling = SimpleNamespace(**vars(components.task), teacher_prompt=lambda puzzle: "and " * 50)
    with pytest.raises(UserError, match="skipped for prompts of more than"):
        replace(components, task=telling).splits  # noqa: B018
    strict = replace(components, task=telling, config=replace(config, long_prompts="refuse"))
    with pytest.raises(UserError, match="has a prompt of 50 tokens for the teacher, the limit is"):
        strict.splits  # noqa: B018
    longer = replace(config, collate=replace(config.collate, response_length=1000))
    with pytest.raises(UserError, match="reads 256 tokens, and prompt and response may have 1040"):
        Components.make(longer).teacher  # noqa: B018


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    """Gradients are finite, the optimizer's steps are not from the fourth on."""
    rate = lambda step: jnp.where(step < 3, 1e-3, jnp.nan)
    config = replace(quick.config(warm_steps=0), optimizer=optimizers.adamw(rate))
    with pytest.raises(UserError, match=r"step 4: .* is not finite though its gradient was"):
        run.train(config, tmp_path / "run", session=quiet())
    assert RunFolder(tmp_path / "run").checkpoints().steps == [0, 2, 3]  # all of them finite


@pytest.mark.long
def test_a_killed_run_of_adapters_goes_on_bit_for_bit(environment, whole, tmp_path, capsys):
    """Their checkpoints hold them alone, as do exports; merged they are the policy that was tested."""
    main(["export", str(whole), str(tmp_path / "model")])
    flags = ("--model", str(tmp_path / "model"))
    through = finished(environment, tmp_path / "through", *flags)
    killed(environment, tmp_path / "run", "save", 3, 0.02, *flags)
    resumed(environment, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(through)
    for origin, kind, other in ((whole, "without", flags), (tmp_path / "run", "of", ())):
        said = fails(capsys, "train", QUICK, "--out", tmp_path / "new", "--from", origin, *other)
        assert f"is a run {kind} adapters, unlike the config" in said
    for flag, name in ((), "adapter"), (("--merge",), "merged"):
        main(["export", str(tmp_path / "run"), str(tmp_path / name), *flag])
    small, merged = (
        sum(x.stat().st_size for x in (tmp_path / name).glob("*.safetensors"))
        for name in ("adapter", "merged")
    )
    assert small < merged / 2
    tokens = [[2, 3, 4, 5, 6]]
    beside = jl.load(tmp_path / "model", adapter=tmp_path / "adapter")
    logps = [jl.token_logps(x, tokens) for x in (beside, jl.load(tmp_path / "merged"))]
    np.testing.assert_array_equal(*logps)
    assert (logps[0] != jl.token_logps(jl.load(tmp_path / "model"), tokens)).all()


@pytest.mark.slow
def test_a_checkpoint_that_is_the_best_no_longer_goes_also_at_the_end(tmp_path, monkeypatch):
    """Where the last evaluation is dropped by a stop, the step that it makes the best is saved already."""
    config = replace(quick.config(steps=4, warm_steps=0), keep_checkpoints=1, save_every=4)
    scores, asked = {0: 0.1, 3: 0.5, 4: 0.9}, []

    def validate(run, phase, step):
        if step == 4 and not asked:
            asked.append(step)
            raise StopRequested
        names = ("accuracy", "accuracy_low", "accuracy_high")
        values = {f"eval/{name}": scores[step] for name in names}
        run.log.journal.record(step, phase, values | {"time/evaluation": 1.0})
        return scores[step], 0.0

    monkeypatch.setattr(run.Run, "validate", validate)
    go = partial(run.train, config, tmp_path / "run", session=quiet())
    with pytest.raises(StopRequested):
        go()
    assert RunFolder(tmp_path / "run").checkpoints().steps == [3, 4]
    go(resume=True)
    assert RunFolder(tmp_path / "run").checkpoints().steps == [4]


def test_the_first_checkpoint_is_whole_before_anything_is_recorded_of_what_comes_after(
    tmp_path, monkeypatch
):
    """So records of reinforcement without a checkpoint tell that it is gone."""
    inner, found, heard = Checkpoints._finish, [], threading.Event()

    def late(there, where):
        heard.wait(2.0)
        inner(there, where)

    def validate(run, phase, step):
        found.extend(RunFolder(tmp_path / "run").checkpoints().steps)
        heard.set()
        raise KeyError

    monkeypatch.setattr(Checkpoints, "_finish", late)
    monkeypatch.setattr(run.Run, "validate", validate)
    config = quick.config(steps=4, warm_steps=0)
    with pytest.raises(KeyError):
        run.train(config, tmp_path / "run", session=quiet())
    assert found == [0]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ("--family", "gemma3"),
        ("--family", "qwen3_moe"),
        ("--max-resamples", "2"),
        ("--mixed", "--steps", "3"),
    ],
    ids=" ".join,
)
def test_a_killed_run_of_another_kind_goes_on_bit_for_bit(environment, flags, tmp_path):
    through = finished(environment, tmp_path / "through", *flags)
    killed(environment, tmp_path / "run", "save", 3, 0.02, *flags)
    resumed(environment, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(through)


@pytest.mark.slow
def test_what_waits_in_the_memory_of_the_host_changes_no_number(environment, whole, tmp_path):
    killed(environment, tmp_path / "run", "save", 3, 0.02, "--offload", "both")
    resumed(environment, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(whole)


@pytest.mark.slow
@pytest.mark.parametrize("start", [piped, on_terminal])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ends of pipes
def test_a_run_whose_terminal_closes_saves_what_it_has(start, environment, tmp_path, monkeypatch):
    for name, value in {**environment, "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    flags = ["--out", str(out), "--steps", "1000", "--warm-steps", "0"]
    run, output = start([sys.executable, "-m", "jaxrl_llm", "train", QUICK, *flags])
    said = b""
    while not re.search(rb"\b[1-9]\d*/1000", said):
        said += (read := output.read(1))
        assert read, said
    output.close()
    run.send_signal(signal.SIGTERM)  # SIGHUP may be ignored where the tests run
    assert run.wait(timeout=600) == UNFINISHED
    last = max(record["step"] for record in journal.read(out))
    assert (out / "checkpoints" / str(last)).is_dir()


# Longer, shorter, and with another's warm start.


@pytest.mark.slow
def test_a_shared_warm_start_changes_nothing(environment, whole, tmp_path, capsys):
    run = finished(environment, tmp_path / "run", "--from", str(whole))
    assert metrics(run) == [r for r in metrics(whole) if r["phase"] == REINFORCE]
    said = fails(capsys, "train", QUICK, "--out", run, "--resume", "--from", tmp_path)
    assert f"was started with --from {whole}: resume it so" in said


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_and_does_not_get_shorter(whole, tmp_path, capsys):
    run = shutil.copytree(whole, tmp_path / "run")
    main(["train", QUICK, "--out", str(run), "--resume", "auto"])
    out = capsys.readouterr().out
    assert "resumed after step 6 of reinforcement's 6" in out
    assert f"nothing was left to do in {run}" in out
    before = contents(run)
    for flags in (("--steps", 1), ("--steps", 1, "--from", whole)):
        said = fails(capsys, "train", QUICK, "--out", run, "--resume", *flags)
        assert (
            "has made 6 steps of reinforcement, more than --steps 1: give --steps 6 or more" in said
        )
    assert "already holds a run: add --resume" in fails(capsys, "train", QUICK, "--out", run)
    with storage.locked(run):
        said = fails(capsys, "train", QUICK, "--out", run, "--resume")
    assert f"in use by process {os.getpid()} on " in said
    assert contents(run) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--warm-steps", "5"), "its warm start has 4 steps, that of the config has 5"),
        (("--hidden", "16"), "hidden_size is 32 there and 16"),
    ],
)
def test_a_warm_start_of_another_kind_is_refused_before_anything_is_written(
    whole, tmp_path, capsys, flags, message
):
    assert message in fails(
        capsys, "train", QUICK, "--out", tmp_path / "run", "--from", whole, *flags
    )
    assert not (tmp_path / "run").exists()


def test_what_it_began_with_is_needed_until_something_is_saved(
    environment, whole, tmp_path, capsys
):
    """Killed before its first checkpoint, its origin removed."""
    origin, run = shutil.copytree(whole, tmp_path / "origin"), tmp_path / "run"
    killed(environment, run, "save", 1, 0.0, "--from", str(origin))
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    shutil.rmtree(origin)
    said = fails(capsys, "train", QUICK, "--out", run, "--resume")
    assert f"{origin} is not the folder of a run" in said


@pytest.mark.slow
def test_a_longer_run_goes_on_and_keeps_its_flags(environment, tmp_path):
    flags = ("--eta", "0.9", "--steps", "1", "--warm-steps", "0")
    run = finished(environment, tmp_path / "run", *flags)
    resumed(environment, run, "--steps", "2")
    assert [
        session["lengths"]["steps"]
        for session in json.loads((run / "run.json").read_text())["sessions"]
    ] == [1, 2]
    assert [m["step"] for m in metrics(run) if "reward" in m] == [1, 2]
    assert RunFolder(run).config().steps == 2


# max_lag: an engine with weights of its own samples steps while those before them are learned from.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "lags"),
    [("1", [0, 1, 1, 1, 1, 1]), ("2", [0, 1, 2, 2, 2, 2]), ("4", [0, 1, 2, 3, 4, 4])],
)
def test_steps_ahead_a_killed_run_goes_on_bit_for_bit(environment, tmp_path, most, lags):
    """The groups that were there are in the checkpoint; here those are all that were asked for."""
    flags, how = ("--max-lag", most), {"config": LAGGING}
    ahead = metrics(finished(environment, tmp_path / "ahead", *flags, **how))
    assert [m["lag"] for m in ahead if "lag" in m] == lags
    assert max(m.get("mismatch_max", 0.0) for m in ahead) > 1e-4  # the trainer has moved on since
    for moment, nth in (("update", 7), ("save", 4)):
        out = tmp_path / moment
        killed(environment, out, moment, nth, 0.02, *flags, **how)
        resumed(environment, out, **how)
        assert metrics(out) == ahead


@pytest.mark.slow
def test_a_step_ahead_with_frozen_weights_makes_no_difference(environment, tmp_path):
    runs = []
    for lag in ("1", "2", "3"):
        flags = ("--max-lag", lag, "--learning-rate", "0")
        out = finished(environment, tmp_path / lag, *flags, config=LAGGING)
        runs.append([{k: v for k, v in m.items() if not k.startswith("lag")} for m in metrics(out)])
    assert runs[0] == runs[1] == runs[2]


# Runs in a bucket.


def users(environment):
    """A user of the server: one device, and what `wire` has set."""
    return environment | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}


def recorded(url):
    forget()
    return metrics(RunFolder(url).path)


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_same_through_a_kill(environment, whole, url):
    """Killed while a checkpoint is stored; the name is a pattern, and has to be taken as it is."""
    url = f"{url}/lr=[1e-4] [b]*"
    killed(users(environment), url, "push", 6, 0.03)
    assert "run.json" in objects(url)
    done = resumed(users(environment), url)
    assert recorded(url) == metrics(whole)
    assert f"talk to it: jaxrl-llm sample {url}" in done.stdout
    names = {*objects(url)}
    assert {"run.json", "config.py", "metrics.jsonl", "curves.png"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"8", "10"}
    assert {name.split("/")[1] for name in names if name.startswith("initial/")} == {"4"}
    assert any(name.startswith("tensorboard/events") for name in names)
    assert not any(".orbax-" in name or name == storage.LOCK for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "short", "lost", "half"])
def test_a_damaged_checkpoint_in_a_bucket_is_passed_over(environment, whole, url, damage):
    assert train(users(environment), url, "--steps", "5").returncode == 0
    sizes = {
        name: size for name, size in objects(url).items() if name.startswith("checkpoints/9/state")
    }
    largest = max(sizes, key=lambda name: sizes[name])
    name = f"checkpoints/9/{storage.COMPLETION_MARKERS[2]}" if damage == "half" else largest
    bucket, path = storage._file_system("s3"), f"{url}/{name}"
    content = bytearray(bucket.cat_file(path))
    if damage in ("lost", "half"):
        bucket.rm_file(path)
    else:
        content[len(content) // 2] ^= 1
        bucket.pipe_file(
            path, bytes(content if damage == "flipped" else content[: len(content) // 2])
        )
    done = resumed(users(environment), url, "--steps", "6")
    assert ("checkpoint 9 is damaged" in done.stderr) == (damage != "half")
    steps = lambda records: [r for r in records if "reward" in r]
    assert steps(recorded(url)) == steps(metrics(whole))


@pytest.mark.slow
def test_other_commands_read_a_run_in_a_bucket(environment, url, tmp_path, capsys):
    flags = ("--warm-steps", "0", "--steps", "2")
    assert train(users(environment), f"{url}/a", *flags).returncode == 0

    def said(*arguments):
        forget()
        main([*map(str, arguments)])
        return capsys.readouterr().out

    assert f"{url}/a, step" in said("eval", f"{url}/a", "--step", "2")
    assert said("sample", f"{url}/a", "--example", "0")
    assert f"written to {url}/model" in said("export", f"{url}/a", f"{url}/model")
    said("export", f"{url}/a", tmp_path / "model")
    forget()
    there = storage.local(f"{url}/model")
    exported = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    assert {p.name: p.read_bytes() for p in there.iterdir()} == exported
    assert f"{url}/model is not empty" in fails(capsys, "export", f"{url}/a", f"{url}/model")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": ""}, r"\(.*credentials.*\):"),
        slow({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, r"\(.*127\.0\.0\.1:9.*\):"),
    ],
)
def test_what_is_wrong_with_the_way_there_is_one_line(environment, url, changes, said, tmp_path):
    done = train(users(environment) | changes | {"TMPDIR": str(tmp_path)}, url)
    assert done.returncode == 2
    [line] = [x for x in done.stderr.splitlines() if x.startswith("jaxrl-llm: ")]
    assert re.search(said, line)
    assert "Traceback" not in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_policy_before_reinforcement_is_kept_as_a_save(tmp_path, monkeypatch):
    """Whose answers of a bucket are signs of life, and whose limit is that of other saves."""
    clocks, phases = [], []

    class Noted(run.Clock):
        def __init__(self, **how):
            super().__init__(**how)
            clocks.append(self)

    def replace_all(there, step, params):
        phases.append(clocks[0].now[0])
        raise KeyError

    monkeypatch.setattr(run, "Clock", Noted)
    monkeypatch.setattr(Checkpoints, "replace", replace_all)
    with pytest.raises(KeyError):
        run.train(quick.config(warm_steps=1), tmp_path / "run", session=quiet())
    assert phases == ["save"]
