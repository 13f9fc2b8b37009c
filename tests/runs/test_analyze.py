"""`analyze` on a run: everything that it promises, and what is wrong in a line."""

import json
from types import SimpleNamespace

import pytest

from jaxrl_llm.cli import analyze
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.reports import analysis, analysis_figures
from jaxrl_llm.tasks.task import UNCHECKED, Reward

CONFIG = """
import dataclasses
from tests.training.quick import *
from jaxrl_llm.tasks.task import Reward

class Uneven:
    def __init__(self, inner): self.inner = inner
    def __getattr__(self, name): return getattr(self.inner, name)
    def reward(self, example, response): return Reward(float(len(response) % 3), len(response) % 3 == 2)

made = config(warm_steps=0, steps=1)
def config():
    return dataclasses.replace(made, task=lambda folder: Uneven(made.task(folder)))
"""
FIGURES = {f"{name}.{kind}" for name in ("bins", "single_tokens", "directions", "sources", "words")
           for kind in ("png", "svg")}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analyzed")
    (folder / "config.py").write_text(CONFIG)
    main(["train", str(folder / "config.py"), "--out", str(folder / "run")])
    return folder / "run"


@pytest.fixture(scope="module")
def found(run):
    flags = ("--step", "1", "--prompts", "6", "--batches", "2", "--tokens", "12")
    main(["analyze", str(run), *flags])
    return json.loads((run / "analysis" / analysis.NAME).read_text())


def test_it_measures_the_run_and_draws(run, found, tmp_path):
    assert {p.name for p in (run / "analysis").iterdir()} == FIGURES | {analysis.NAME}
    assert found["sample"]["responses"] == 24
    assert (
        found["sample"]["optimizer_steps_before"] == 1
    )  # the optimizer goes on from the checkpoint
    for kind in ("probability", "share"):
        bins = found["updates"][kind]["bins"]
        assert sum(entry["tokens"] for entry in bins) == found["sample"]["tokens"] / 2
        assert sum(entry["share"] for entry in bins) == pytest.approx(1.0)
        norms = [entry.get("gradient_norm", 0.0) for entry in bins]
        assert max(norms) > 0
        assert sum(norms) >= found["updates"]["gradient_norm"] * 0.999  # the triangle inequality
    single = found["single_tokens"]
    assert len(single["one_minus_p"]) == 12
    assert single["outside_at_logits"] == sum(single["outside_at_layers"]) == 0
    assert {*found["directions"]["share"]["variants"]} == {"plain", "reweighting", "Lopti", "both"}
    for part in (p for name, p in found["sources"].items() if name != "tokens"):
        assert sum(group["share"] for group in part["groups"].values()) == pytest.approx(1.0)
    least, middle, most = (
        part["updates"]["gradient_norm"] for part in (found["least"], found, found["most"])
    )
    assert least < middle < most
    assert middle == pytest.approx((least + most) / 2)
    analysis.write(found, tmp_path)
    same = lambda name: (tmp_path / name).read_bytes() == (run / "analysis" / name).read_bytes()
    assert all(map(same, FIGURES | {analysis.NAME}))


def test_what_is_unchecked_counts_for_nothing():
    of = SimpleNamespace(state=SimpleNamespace(step=3))
    found = analyze._described(of, [Reward(1.0, True), Reward(0.0, False), UNCHECKED], 9)  # pyright: ignore[reportArgumentType]
    assert (found["responses"], found["unchecked"]) == (3, 1)
    assert found["reward"] == found["accuracy"] == 0.5


def test_a_full_disk_is_one_line(found, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(analysis_figures, "draw", full)
    with pytest.raises(UserError, match=f"cannot write to {tmp_path}: No space left"):
        analysis.write(found, tmp_path)


def test_an_optimizer_may_begin_anew(run, found, tmp_path):
    flags = ("--step", "1", "--prompts", "6", "--batches", "2", "--tokens", "1", "--fresh")
    main(["analyze", str(run), *flags, "--out", str(tmp_path)])
    anew = json.loads((tmp_path / analysis.NAME).read_text())
    assert anew["sample"]["optimizer_steps_before"] == 0
    moved = [x["updates"]["probability"]["updates"]["optimizer"]["all"] for x in (found, anew)]
    assert moved[0] != moved[1]  # the same batches


def test_the_table_has_the_key_numbers(found, capsys):
    import rich.console

    rich.console.Console(width=200).print(analysis.table(found))
    out = capsys.readouterr().out
    assert "outside the bounds of Prop. 4.2" in out
    assert "12 tokens at the logits: 0" in out


def test_a_figure_has_gaps_where_nothing_is_known(found, tmp_path):
    found = json.loads(json.dumps(found))
    found["words"] = []
    for part in found["directions"]["share"]["variants"].values():
        part["rising"][0] = None
    analysis_figures.draw(found, tmp_path)
    assert not (tmp_path / "words.png").exists()
    assert "none in this vocabulary" in [*analysis.table(found).columns[1].cells]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "99"], "has no checkpoint of step 99"),
        (["--tokens", "0"], "they are counts"),
        (["--prompts", "-1"], "they are counts"),
        (["--batches", "0"], "they are counts"),
        (["--prompts", "1", "--batches", "999999"], "take fewer"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(run), *arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / analysis.NAME).exists()
