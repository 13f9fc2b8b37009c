"""Runs of rows to imitate: the loss is transformers', they go on bit for bit, and reinforcement begins there."""

import json
import random
import shutil
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm import config as configs
from jaxrl_llm.cli import analyze
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import StopRequested
from jaxrl_llm.learning import imitate, update
from jaxrl_llm.models import families, hf, sharding
from jaxrl_llm.training import journal, run, terminal
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.folder import RunFolder
from tests import tiny
from tests.reference import peer
from tests.tasks import templates
from tests.training.process import fails, metrics

TEMPLATE = templates.QWEN25
SETTINGS = {"length": 80, "batch": 8, "learning_rate": 3e-3, "validation": 8, "bfloat16": False}


def conversation(a, b):
    """A row of two turns each, with the text of the template in pieces and whether it is learned."""
    said = [(f"{a}+{b}?", f"{a + b}"), ("and 1 more?", f"{a + b + 1}")]
    messages, pieces = [], []
    for asked, answer in said:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        pieces += [(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n", False)]
        pieces += [(f"{answer}<|im_end|>", True), ("\n", False)]
    return {"messages": messages}, pieces


PAIRS = [(a, b) for a in range(8) for b in range(7)]
random.Random(0).shuffle(PAIRS)


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    """Runs are no others on several, and start much faster on one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", lambda *_: MESHES[1])
        yield


MESHES = {n: sharding.make_mesh(devices=jax.devices()[:n]) for n in (1, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with a chat template, rows of which one is too long, and questions."""
    there = tmp_path_factory.mktemp("supervised")
    words, source = templates.of_bytes(TEMPLATE), there / "words"
    shape = tiny.shape(vocab_size=320)
    words.save(source)
    described = {
        "config.json": families.config_of(shape, "float32"),
        "generation_config.json": {"eos_token_id": [*words.stops]},
    }
    for name, content in described.items():
        (source / name).write_text(json.dumps(content))
    hf.export(tiny.policy(shape, seed=0)[1], shape, there / "model", source=source)
    rows = [conversation(*pair)[0] for pair in PAIRS]
    rows += [{"prompt": "x" * 60, "completion": "y"}]
    asked = [{"question": f"{a}+{b}?", "answer": f"{a + b}"} for a, b in PAIRS]
    for name, table in {"rows": rows, "questions": asked}.items():
        lines = "".join(json.dumps(row) + "\n" for row in table)
        (there / f"{name}.jsonl").write_text(lines)
    return there


def config(folder, **settings):
    path = configs.shipped() / "sft.py"
    return configs.build(
        configs.load(path),
        path,
        str(folder / "model"),
        str(folder / "rows.jsonl"),
        **SETTINGS | settings,
    )


def trained(folder, out, stop_after=None, resume=False, **settings):
    """Runs the config, up to a step."""
    session = run.Session(console=terminal.console(quiet=True))
    if stop_after is not None:
        session.on_record = lambda r: r["step"] == stop_after and session.stop.request()
    run.train(config(folder, **settings), out, resume=resume, session=session)
    return out


@pytest.fixture(scope="module")
def whole(folder):
    return trained(folder, folder / "whole", epochs=1.5, evaluate_every=3)


def test_rows_as_long_as_the_model_reads_can_be_shown_and_asked(folder, capsys):
    """A prompt to answer leaves less than a whole row to its answer."""
    length = tiny.shape().max_length
    words = ("--model", folder / "model", "--data", folder / "questions.jsonl", "--length", length)
    words = (
        *words,
        "--reward",
        "exact",
        "--prompt-column",
        "question",
        "--answer-column",
        "answer",
    )
    main(["data", "sft", *map(str, words)])
    assert "examples" in capsys.readouterr().out
    components = Components.make(config(folder, length=length), folder)
    asked = components.splits.test
    longest = max(len(components.tokenizer.prompt(components.task.prompt(x))) for x in asked)
    assert components.config.collate.response_length == length - 1
    assert components.sampling(asked).max_tokens == length - longest < length - 1


@pytest.fixture(scope="module")
def reference(folder):
    """Rows in tokens, labels by the pieces of their texts, and transformers' loss."""
    encode, rows = templates.of_bytes(TEMPLATE).encode, []
    for pair in PAIRS[:8]:
        tokens, labels = [], []
        for text, is_learned in conversation(*pair)[1]:
            tokens += encode(text)
            labels += encode(text) if is_learned else [-100] * len(encode(text))
        rows.append([tokens, labels])
    (folder / "model" / "rows.json").write_text(json.dumps(rows))
    peer.transformers("supervised", folder / "model")
    return json.loads((folder / "model" / "loss.json").read_text())


def in_batches(components, batch):
    warm = replace(components.config.warm_start, batch=batch)
    return replace(components, config=replace(components.config, warm_start=warm))


@pytest.mark.parametrize(
    ("pack", "devices"),
    [
        (True, 1),
        *(tiny.slow(*x) for x in ((False, 8), (True, 8), (False, 1))),
    ],
)
def test_the_loss_is_that_of_transformers(folder, reference, pack, devices, monkeypatch):
    """Of a step, and on rows that are held out, also where they do not fill a batch."""
    mesh = MESHES[devices]
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)
    made = config(folder)
    collate = replace(made.collate, pack=pack, microbatches=2, round_to=16)
    made = replace(
        made, collate=collate, warm_start=replace(made.warm_start, steps=1, collate=collate)
    )
    components = Components.make(made, folder)
    there = {str(conversation(*pair)[0]["messages"]): i for i, pair in enumerate(PAIRS[:8])}
    task = components.task
    every = [*task.train, *task.test]
    examples = [x for x in every if str(list(x.messages)) in there]
    assert len(examples) == 8
    rows = [imitate.of_row(task, components.tokenizer, one) for one in examples]
    with jax.set_mesh(mesh):
        params = components.initial_params()
        for batch in (8, 5):
            beats = count()
            found = in_batches(components, batch).held_out(params, examples, beats.__next__)
            assert next(beats) == -(-8 // batch)
            np.testing.assert_allclose(found, reference, rtol=1e-5)
        state = update.init_state(params, made.warm_start.optimizer)
        step = components.imitation(state)
        _, visits = step.programs.update(state, step.batch(rows), frozen=step.frozen)
    np.testing.assert_allclose(visits["loss"], [reference], rtol=1e-5)


def test_a_run_learns_and_says_what_it_left_out(whole):
    records = journal.read(whole)
    steps = [r for r in records if "updates" in r]
    # of 57 rows one is too long, 5 are to test on and 8 to validate by
    assert len(steps) == round(1.5 * 43 / 8)
    assert {r["too_long"] for r in steps} == {1}
    losses = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    assert [*losses] == [0, 3, 6, 8]
    assert losses[8] < 0.6 * losses[0]
    [tested] = [r for r in records if "test/loss" in r]
    best = min(losses, key=lambda step: losses[step])
    assert (tested["step"], tested["test/step"]) == (8, best)
    assert not any("eval/accuracy" in r for r in records)
    assert (whole / "curves.png").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_bit_for_bit(folder, whole, tmp_path):
    how = {"epochs": 1.5, "evaluate_every": 3}
    with pytest.raises(StopRequested):
        trained(folder, tmp_path / "run", stop_after=4, **how)
    trained(folder, tmp_path / "run", resume=True, **how)
    assert metrics(tmp_path / "run") == metrics(whole)


def reinforced(folder, *more):
    words = ["train", "grpo", "--model", folder / "model", "--data", folder / "questions.jsonl"]
    words += ["--reward", "exact", "--instruction", "", "--steps", 1, "--prompts", 2, "--group", 2]
    words += ["--prompt-length", 64, "--length", 4, "--validation", 2, "--no-bfloat16", "--quiet"]
    return [*map(str, [*words, *more])]


@pytest.mark.parametrize("rank", [0, tiny.slow(2)])
@pytest.mark.slow
def test_reinforcement_begins_with_the_best_checkpoint(folder, whole, tmp_path, rank):
    """Of adapters with those, bit for bit; and they are no longer what the model began with."""
    first = trained(folder, tmp_path / "first", steps=1, lora=rank) if rank else whole
    main(reinforced(folder, "--lora", rank, "--from", first, "--out", tmp_path / "run"))
    _, shape, want = RunFolder(first).weights()
    _, _, got = RunFolder(tmp_path / "run").weights(0)
    same = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))
    assert same(got, want)
    assert (shape.lora is not None) == bool(rank)
    assert not same(got, Components.make(config(folder, lora=rank), folder).initial_params())


@pytest.mark.slow
def test_a_stop_is_heard_while_the_test_rows_are_read(folder, whole, tmp_path):
    """And the test is made when the run goes on."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    records = [r for r in journal.read(out) if "test/loss" not in r]
    (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    session = run.Session(console=terminal.console(quiet=True))
    session.stop.request()
    made = config(folder, epochs=1.5, evaluate_every=3)
    with pytest.raises(StopRequested):
        run.train(made, out, resume=True, session=session)
    trained(folder, out, resume=True, epochs=1.5, evaluate_every=3)
    want, found = ([r for r in journal.read(x) if "test/loss" in r] for x in (whole, out))
    assert [r["test/loss"] for r in found] == [r["test/loss"] for r in want]


def test_a_run_of_rows_is_not_analyzed(folder, whole, monkeypatch, capsys):
    made = Components.make(config(folder), folder)
    monkeypatch.setattr(analyze, "open_run", lambda *_: nullcontext((made, None, 0)))
    assert "imitates rows: analyze reads runs of reinforcement" in fails(capsys, "analyze", whole)


def test_an_evaluation_that_is_stopped_halfway_is_finished_by_the_next_session(tmp_path):
    """Accuracy is there when a stop is heard between the batches of the loss."""
    for stops in (True, False):
        asked = []
        with journal.Journal(tmp_path, terminal.console(quiet=True)) as made:
            made.start(after=20)

            def validate(phase, step, made=made, asked=asked):
                asked.append(step)
                made.record(step, phase, {"eval/accuracy": 0.5, "eval/score": 0.5})

            def loss(*_, stops=stops):
                if stops:
                    raise StopRequested
                return 1.25, 2.0

            there = SimpleNamespace(
                log=SimpleNamespace(journal=made, flush=lambda: None),
                components=SimpleNamespace(graded=True, splits=SimpleNamespace(validation=[1])),
                rollouts=SimpleNamespace(push=lambda *_: None),
                validate=validate,
                _loss=loss,
            )
            with pytest.raises(StopRequested) if stops else nullcontext():
                run.Run._evaluate_rows(cast(Any, there), "warm_start", 20, None)
        assert asked == [20] * stops
    assert ["eval/accuracy" in r for r in journal.read(tmp_path)] == [True, False]


def test_what_cannot_go_on_is_one_line(folder, whole, tmp_path, capsys):
    out = ["--out", tmp_path / "run"]
    rows = ["--model", folder / "model", "--data", folder / "rows.jsonl"]
    assert "rows of more than 20 tokens" in fails(capsys, "sft", *rows, "--length", 20, *out)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is not the folder of a run" in fails(capsys, *reinforced(folder, "--from", empty, *out))
    with pytest.raises(
        jl.UserError, match="has ended after 8 steps, and cannot be made longer to 9"
    ):
        trained(folder, whole, resume=True, steps=9, evaluate_every=3)
    with pytest.raises(
        jl.UserError, match=r"has made 8 steps, more than the 5 .*: give --steps 8 or"
    ):
        trained(folder, whole, resume=True, steps=5, evaluate_every=3)
    made = config(folder)  # more room in what is not learned by
    roomy = replace(made, collate=jl.Collator(1, 120), long_prompts="refuse")
    assert len(Components.make(replace(roomy, long_prompts="skip"), folder).splits.train) > 0
    with pytest.raises(jl.UserError, match=r"has a row of 8. tokens, the limit is 1 to 80"):
        Components.make(roomy, folder).splits  # noqa: B018
    with pytest.raises(jl.UserError, match="is learned by a warm start alone"):
        Components.make(replace(config(folder), steps=1), folder)
