"""Pictures: the same numbers give the same bytes, in every format; an error names the run that it is about."""

import json

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.training import curves


def figure():
    made, axes = curves.sheet(1, 1, (2, 2))
    axes[0, 0].plot([1, 2], [3, 4], label="a")
    axes[0, 0].legend()
    return made


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_numbers_give_the_same_bytes(kind, tmp_path, monkeypatch):
    pictures = []
    for now in ("1000000000", "1100000000"):  # a clock for matplotlib
        monkeypatch.setenv("SOURCE_DATE_EPOCH", now)
        curves.save(figure, tmp_path / f"picture.{kind}")
        pictures.append((tmp_path / f"picture.{kind}").read_bytes())
    assert pictures[0] == pictures[1]


def test_an_evaluation_without_its_interval_is_drawn(tmp_path):
    """As other programs write records."""
    line = json.dumps({"step": 1, "phase": "reinforce", "eval/accuracy": 0.5})
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    curves.draw([tmp_path], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["_x", r"cost$\alpha{$", "plain"])
def test_a_run_is_in_the_legend_whatever_it_is_called(name, tmp_path):
    records = [{"step": 1, "phase": "reinforce", "eval/accuracy": 0.1}]
    made = curves._runs({name: records})
    [text] = made.axes[0].get_legend().get_texts()
    assert text.get_text().strip().replace(r"\$", "$") == name
    curves.save(lambda: made, tmp_path / "picture.png")


def test_what_is_sampled_is_drawn_beside_what_is_held_out():
    """As means of five steps, the last ones of as many as there are."""
    records = [{"step": 10, "phase": "reinforce", "eval/accuracy": 0.1}]
    records += [{"step": 10 + n, "phase": "reinforce", "accuracy": n / 10} for n in range(1, 8)]
    greedy, sampled, *_ = curves._runs({"a": records}).axes[0].lines
    assert ([*greedy.get_xdata()], [*greedy.get_ydata()]) == ([10], [0.1])
    assert [*sampled.get_xdata()] == [13.0, 16.5]
    assert [*sampled.get_ydata()] == pytest.approx([0.3, 0.65])


def test_stages_are_curves_of_their_figure_and_fields_of_the_reward_are_not():
    """A reward's field may be called like a stage."""
    names = ("loss/stage1", "loss/stage10", "loss/stages", "reward", "reward/stage_bonus")
    records = [{"step": 1, "phase": "reinforce", **dict.fromkeys((*names, "reward/stage1"), 0.5)}]
    assert [*curves.series(records, "loss")] == ["loss/stage1", "loss/stage10"]
    assert [*curves.series(records, "reward")] == ["reward"]


def test_a_run_named_twice_does_not_take_the_blame_for_another(tmp_path):
    measured = {f"eval/accuracy{end}": 0.5 for end in ("", "_low", "_high")}
    for name, values in (("a", measured), ("b", {})):
        (tmp_path / name).mkdir()
        record = {"step": 1, "phase": "reinforce", **values}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    a, b = tmp_path / "a", tmp_path / "b"
    with pytest.raises(UserError, match=f"{b} has no evaluation to draw yet"):
        curves.draw([a, a, b], tmp_path / "picture.png")
