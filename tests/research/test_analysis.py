"""`analyze` on a run, words of reasoning, and what is wrong in a line."""

import json
from types import SimpleNamespace

import pytest
import rich.console

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import Group, trajectories
from jaxrl_llm.research import analysis, analysis_report, token_gradients, words
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.task import UNGRADED, Reward
from tests import tiny
from tests.reference import peer
from tests.training.process import fails

CONFIG = """
import dataclasses
from tests.training.quick import *
from jaxrl_llm.tasks.task import Reward

class Uneven:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def demonstration(self, example): return self.inner.demonstration(example)
    def reward(self, example, response): return Reward(float(len(response) % 3), len(response) % 3 == 2)

made = config(warm_steps=0, steps=1)
def config():
    return dataclasses.replace(made, task=lambda folder: Uneven(made.task(folder)))
"""
FIGURES = {f"{name}.png" for name in ("bins", "single_tokens", "directions", "sources", "words")}
BATCHES = ("--step", "1", "--prompts", "6", "--batches", "2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyzed")
    (folder / "config.py").write_text(CONFIG)
    main(["train", str(folder / "config.py"), "--out", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def found(run):
    main(["analyze", str(run), *BATCHES, "--tokens", "12"])
    return json.loads((run / "analysis" / analysis_report.NAME).read_text())


@pytest.mark.slow
def test_it_measures_the_run_and_draws(run, found, tmp_path):
    there = run / "analysis"
    assert {p.name for p in there.iterdir()} == FIGURES | {analysis_report.NAME}
    assert found["sample"]["responses"] == 24
    assert found["sample"]["optimizer_steps_before"] == 1  # it goes on from the checkpoint
    bins = found["updates"]["probability"]["bins"]
    assert sum(entry["tokens"] for entry in bins) == found["sample"]["tokens"] / 2
    assert sum(entry["share"] for entry in bins) == pytest.approx(1.0)
    norms = [entry.get("gradient_norm", 0.0) for entry in bins]
    assert sum(norms) >= found["updates"]["gradient_norm"] * 0.999 > 0  # the triangle inequality
    single = found["single_tokens"]
    assert len(single["one_minus_p"]) == 12
    assert single["outside_at_logits"] == sum(single["outside_at_layers"]) == 0
    variants = found["directions"]["probability"]["variants"]
    assert {*variants} == {"plain", "reweighting", "Lopti", "both"}
    for part in (p for name, p in found["sources"].items() if name != "tokens"):
        assert sum(group["share"] for group in part["groups"].values()) == pytest.approx(1.0)
    least, middle, most = (
        part["updates"]["gradient_norm"] for part in (found["least"], found, found["most"])
    )
    assert least < middle < most
    assert middle == pytest.approx((least + most) / 2)
    analysis_report.write(found, tmp_path)
    same = lambda name: (tmp_path / name).read_bytes() == (there / name).read_bytes()
    assert all(map(same, FIGURES | {analysis_report.NAME}))


def analyzed(run, folder, step, *arguments):
    """What one batch of `analyze` gives before reinforcement; its sample goes to `folder`, for torch."""
    drawn, places = [], []
    draw, choose = analysis.draw, token_gradients.choose

    def keep(subject, *rest):
        drawn.extend((subject, samples := draw(subject, *rest)))
        return samples

    command = ["analyze", str(run), "--fresh", "--step", str(step), "--batches", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "draw", keep)
        patch.setattr(token_gradients, "choose", lambda *x: places.append(x[1]) or choose(*x))
        main([*command, *arguments, "--out", str(folder)])
    subject, [groups] = drawn
    responses = trajectories(groups)
    sample = {
        "prompts": [[*one.prompt] for one in responses],
        "responses": [[*one.tokens] for one in responses],
        "rewards": [one.reward.score for one in responses],
        "group": subject.config.group_size,
        "alpha": subject.alpha,
        "single": places[0],
    }
    (folder / "sample.json").write_text(json.dumps(sample))
    return json.loads((folder / analysis_report.NAME).read_text())


@pytest.mark.slow
def test_figures_are_those_of_torch(tmp_path):
    """After a warm start, so that no bin is empty."""
    run, config = tmp_path / "run", tmp_path / "config.py"
    config.write_text(CONFIG.replace("warm_steps=0, steps=1", "warm_steps=60, steps=0"))
    main(["train", str(config), "--out", str(run)])
    ours = analyzed(run, tmp_path, 60, "--prompts", "6", "--tokens", "6")
    main(["export", str(run), str(tmp_path / "model"), "--step", "60"])
    peer.transformers("figures", tmp_path, 1e-3)
    compare(ours, json.loads((tmp_path / "figures.json").read_text()), 1e-4)


def compare(ours, theirs, tolerance):
    near = lambda x: pytest.approx(x, rel=tolerance, abs=1e-7)
    assert ours["updates"]["gradient_norm"] == near(theirs["gradient_norm"])
    found = ours["updates"]["probability"]
    for mine, other in zip(found["bins"], theirs["bins"], strict=True):
        assert (mine["name"], mine["tokens"]) == (other["name"], other["tokens"])
        assert mine.get("gradient_norm", 0.0) == near(other["gradient_norm"])
    assert theirs["one_minus_p"] == near(ours["single_tokens"]["one_minus_p"])
    assert theirs["over_parameters"] == near(ours["single_tokens"]["over_parameters"])
    for by, updates in found["updates"].items():
        for on, moved in updates.items():
            assert moved["logp_size"] == near(theirs["updates"][by][on]), (by, on)
    for name, other in theirs["directions"].items():
        mine = ours["directions"]["probability"]["variants"][name]
        assert {way: mine[way] for way in other} == other, name


@pytest.mark.long
def test_an_optimizer_may_begin_anew(run, found, tmp_path):
    main(["analyze", str(run), *BATCHES, "--tokens", "1", "--fresh", "--out", str(tmp_path)])
    anew = json.loads((tmp_path / analysis_report.NAME).read_text())
    assert anew["sample"]["optimizer_steps_before"] == 0
    moved = [x["updates"]["probability"]["updates"]["optimizer"]["all"] for x in (found, anew)]
    assert moved[0] != moved[1]  # the same batches


def test_what_is_measured_is_what_is_learned(monkeypatch):
    """A task may add to its responses before they are learned from, as reflection does."""
    drawn = [[Group(i, ())] for i in range(2)]
    components = SimpleNamespace(as_learned=lambda groups: [("learned", *groups)])
    monkeypatch.setattr(analysis, "draw", lambda *_: drawn)
    monkeypatch.setattr(analysis, "trajectories", list)
    met = []

    def credit(sample):
        met.extend(sample)
        raise UserError("enough")

    monkeypatch.setattr(analysis, "compiled", lambda of, responses: (None, credit))
    sizes = {"prompts": 1, "batches": 2, "tokens": 1, "seed": 0}
    with pytest.raises(UserError, match="enough"):
        analysis.measure(SimpleNamespace(components=components), None, say=lambda _: None, **sizes)
    assert met == [("learned", *drawn[0])]


def test_what_is_unchecked_counts_for_nothing():
    rewards = [Reward(1.0, True), Reward(0.0, False), UNGRADED]
    found = analysis.described([tiny.groups(tiny.responses(rows=3), rewards, n=3)])
    assert (found["responses"], found["ungraded"]) == (3, 1)
    assert found["reward"] == found["accuracy"] == 0.5


@pytest.mark.slow
def test_the_table_has_the_key_numbers_and_gaps_where_there_is_none(found, tmp_path, capsys):
    found = json.loads(json.dumps(found))
    found["words"] = []
    for part in found["directions"]["probability"]["variants"].values():
        part["rising"] = [None] * 5
    rich.console.Console(width=200).print(analysis_report.table(found))
    out = capsys.readouterr().out
    for said in ("12 tokens at the logits: 0", "none in this vocabulary", "that rise: both"):
        assert said in out
    analysis_report.draw(found, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FIGURES - {"words.png"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "99"], "has no checkpoint of step 99"),
        (["--batches", "0"], "--batches 0 must be at least 1"),
        (["--prompts", "1", "--batches", "999999"], "take fewer"),
    ],
)
@pytest.mark.slow
def test_what_is_wrong_is_one_line(run, arguments, message, tmp_path, capsys):
    assert message in fails(capsys, "analyze", run, *arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / analysis_report.NAME).exists()


def test_words_are_found_with_their_inflections_within_the_thought():
    texts = [
        "Considering this, so we ANALYSED it; suppose not. </think> so so so",
        "Some sofa, thusly recheck. He must  be here",
        "It must be a knave because Zoey said so, hence checked. Assuming that",
    ]
    assert words.count(texts, words.ENGLISH) == {
        "analysis": [2, 0, 1],
        "statement": [0, 0, 1],
        "causal indicator": [0, 0, 1],
        "conclusion indicator": [1, 0, 2],
        "assumption": [1, 0, 1],
        "assertion": [0, 0, 1],
    }
    found = {f["name"]: f for f in words.frequencies(texts, [1.0, 0.0, 2.0], words.ENGLISH)}
    conclusion = found["conclusion indicator"]
    assert conclusion["a_response"] == 1.0
    assert conclusion["responses_with_any"] == pytest.approx(2 / 3)
    assert (conclusion["reward_with_any"], conclusion["reward_without"]) == (1.5, 0.0)
    assert conclusion["correlation_with_reward"] == pytest.approx(1.0)


def test_a_small_vocabulary_has_its_own_words_or_none():
    assert words.categories(()) is words.ENGLISH
    assert words.categories(kk_tiny.vocabulary()) == words.TINY
    assert words.categories(("1", "2", "+")) == {}


def test_every_token_has_one_group():
    response = ["um", "knight", "true", "um", "yes", "</think>", "<answer>", "um"]
    groups = words.group(response, frozenset(kk_tiny.FILLERS))
    assert groups == ["chatter", "reasoning", "reasoning", "chatter", "reasoning", *["answer"] * 3]
    split = ["so", " um", " </", "think", ">", " x"]
    assert words.group(split, frozenset()) == ["reasoning"] * 4 + ["answer"] * 2
