"""The report: its numbers are those of the run's records, its text is only read, it says what is missing."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.cli import report
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.evaluate import wilson
from jaxrl_llm.research import page
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.training import record
from jaxrl_llm.training import tokens as kept
from jaxrl_llm.training.record import Source
from tests import tiny
from tests.reference import peer
from tests.research.test_page import EVIL, run  # noqa: F401 (a fixture)

STUDIES = Path(__file__).parents[2] / "configs" / "studies" / "results"


def evaluation(of, right, n, **more):
    low, high = wilson(right, n)
    found = {"accuracy": right / n, "accuracy_low": low, "accuracy_high": high, "examples": n}
    found |= {"length": 9.5, "truncated": 0.25, "ungraded": 1, "score": 0.5, **more}
    return {f"{of}/{name}": value for name, value in found.items()}


@pytest.fixture
def lines():
    """Records as a run writes them; of step 4 some numbers are none."""
    rng = np.random.default_rng(0)
    first = {"step": 2, "phase": "warm_start", **evaluation("eval", 1, 10)}
    made = [first, {**first, "phase": "reinforce"}]
    for step in range(3, 13):
        values = {"reward": rng.random(), "entropy": rng.random(), "updates": 2, "skipped": 0}
        values |= {f"clip/stage{k}": rng.random() / 10 for k in (1, 2)}
        values |= {"grad_norm/stage1": np.nan if step == 4 else 3.0, "mismatch_mean": 1e-6 * step}
        values |= {f"time/{k}": rng.random() for k in ("rollout", "update", "compile", "lost")}
        values["time/step"] = values["time/rollout"] + values["time/update"]
        made.append({"step": step, "phase": "reinforce", **values})
        if step % 4 == 0:
            groups = {"accuracy/3": 0.5, "avg@8": 0.375, "pass@8": 0.75, "avg@8/3": 0.25}
            groups |= (
                {"avg@8_low": 0.25, "avg@8_high": 0.5} if step > 4 else {}
            )  # as of this version
            more = evaluation("eval", step, 40, **groups)
            made.append({"step": step, "phase": "reinforce", **more})
    made[-3]["alarm/entropy"] = 1
    tested = evaluation("test", 30, 200) | {"test/step": 8}
    return [*made, {"step": 12, "phase": "reinforce", **tested}]


@pytest.fixture
def whole(run, lines, tmp_path):  # noqa: F811
    """The folder of `test_page` with records, and a run.json whose text tries to act too."""
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (path := tmp_path / "config.py").write_text("")
    made = record.new(Source(path, {"name": "".join(EVIL), "alpha": 0.3}), inputs={"data": "abc"})
    record.write(run, made | {"sums": {"config.py": "123"}})
    return run


class Read(HTMLParser):
    """Elements, tables by caption as rows of text, and charts by title with points."""

    def __init__(self, text):
        super().__init__()
        self.names, self.tables, self.charts, self.text = [], {}, {}, {}
        self._path, self._caption, self._chart = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.names.append(tag)
        if tag not in ("meta", "img"):
            self._path.append(tag)
        if tag == "svg":
            self._chart = attrs.get("aria-label", self._chart)
        if tag in ("polyline", "polygon"):
            points = [[*map(float, p.split(","))] for p in attrs["points"].split()]
            self.charts.setdefault(self._chart, []).append((tag, np.asarray(points)))
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag):
        assert self._path.pop() == tag

    def handle_data(self, data):
        if "caption" in self._path:
            self._caption += data
        elif {"td", "th"} & {*self._path}:
            self.tables[self._caption][-1][-1] += data
        self.text.setdefault(self._path[-1] if self._path else "", []).append(data)


def made(folder, tmp_path):
    report.main(str(folder), out=str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    return text, Read(text)


def of_percent(share, low, high):
    return f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def test_numbers_are_those_of_the_records(whole, lines, tmp_path, capsys):
    _, read = made(whole, tmp_path)
    assert "report.html" in capsys.readouterr().out
    head, *rows = read.tables["Accuracy on examples not learned from"]
    assert [row[0] for row in rows] == ["2", "2", "4", "8", "12", "8"]
    assert [row[1][:4] for row in rows] == ["vali"] * 5 + ["test"]
    counts = [(1, 10), (1, 10), (4, 40), (8, 40), (12, 40), (30, 200)]
    for row, (right, n) in zip(rows, counts, strict=True):
        shown = dict(zip(head, row, strict=True))
        assert shown["graded"] == str(n)
        p, z = right / n, 1.96
        middle, half = p + z * z / 2 / n, z * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
        ends = [(middle + sign * half) / (1 + z * z / n) for sign in (-1, 1)]
        assert shown["greedy, % (95% interval)"] == of_percent(p, *ends)
        assert (shown["length"], shown["truncated, %"], shown["ungraded"]) == ("9.5", "25.0", "1")
    average, whole_groups = (head.index(f"{x}@8, % (95% interval)") for x in ("avg", "pass"))
    ends = of_percent(0.375, 0.25, 0.5)
    assert [row[average] for row in rows] == ["", "", "37.5", ends, ends, ""]
    assert [row[whole_groups] for row in rows] == ["", "", "75.0", "75.0", "75.0", ""]
    steps = [r for r in lines if "reward" in r]
    seconds = {k: sum(r[f"time/{k}"] for r in steps) for k in ("rollout", "update", "lost")}
    compiling = sum(r["time/compile"] for r in steps)
    total = sum(seconds.values()) + compiling
    [caption] = [x for x in read.tables if "goodput" in x]
    assert caption.endswith(f"{(seconds['rollout'] + seconds['update']) / total:.1%}")
    times = {row[0]: row[1:3] for row in read.tables[caption]}
    assert times["rollout"] == [f"{seconds['rollout']:.1f}", f"{seconds['rollout'] / total:.1%}"]
    assert times["lost to restarts"][0] == f"{seconds['lost']:.1f}"
    assert times["compiling"][0] == f"{compiling:.1f}"
    said = " ".join(read.text["p"])
    assert f"at best {of_percent(0.3, *wilson(12, 40))} at step 12" in said
    assert f"Test accuracy: {of_percent(0.15, *wilson(30, 200))} at step 8" in said
    assert "Alarm (entropy) at 1 steps, from 11 to 11" in said
    assert "10 steps of reinforcement, finished" in said


def test_curves_are_those_of_the_records(whole, lines, tmp_path):
    _, read = made(whole, tmp_path)
    steps = [r for r in lines if "reward" in r]

    def agrees(points, xs, ys):
        """Pixels are the values, stretched and turned, to a tenth of a pixel."""
        assert len(points) == len(xs)
        for pixels, values, sign in ((points[:, 0], xs, 1), (points[:, 1], ys, -1)):
            slope, start = np.polyfit(values, pixels, 1)
            assert slope * sign > 0
            np.testing.assert_allclose(slope * np.asarray(values) + start, pixels, atol=0.11)

    numbers = [r["step"] for r in steps]
    [(_, points)] = read.charts["mean reward"]
    agrees(points, numbers, [r["reward"] for r in steps])
    both = read.charts["share of tokens without gradient"]
    agrees(
        np.concatenate([points for _, points in both]),
        [*numbers, *numbers],
        [r[f"clip/stage{k}"] for k in (1, 2) for r in steps],
    )
    [(_, points)] = read.charts["norm of the gradient"]
    assert len(points) == 9  # one is not a number
    (_, band), (_, line) = read.charts["validation accuracy, greedy, with 95% intervals"]
    found = [r for r in lines if "eval/accuracy" in r]
    low, high = ([r[f"eval/accuracy_{side}"] for r in found] for side in ("low", "high"))
    agrees(
        np.concatenate([line, band]),
        [r["step"] for r in (*found, *found, *found[::-1])],
        [*(r["eval/accuracy"] for r in found), *low, *high[::-1]],
    )
    assert not [title for title in read.charts if "KL" in title]  # there was none


def test_the_responses_are_the_ends_of_the_rewards_and_those_that_moved_most(whole, tmp_path):
    _, read = made(whole, tmp_path)
    heads = read.text["header"]
    rewards = [float(re.search(r"reward (\S+),", x)[1]) for x in heads]
    assert rewards[:4] == [3.0, 2.0, 0.0, 1.0]  # of 0, 1, 2 and 3
    sizes = []
    for step in (3, 4):
        with np.load(whole / "tokens" / f"step-{step:06d}.npz") as found:
            flat, at = np.abs(found["of_moved"].astype(float)), 0
            for length in (3, 2, 4, 1):
                sizes.append((flat[at : at + length].mean(), step))
                at += length
    expected = [f"step {step}: .* moved by {x:.3g} " for x, step in sorted(sizes)[::-1][:2]]
    for head, pattern in zip(heads[4:], expected, strict=True):
        assert re.match(pattern, head)


def test_what_a_model_wrote_is_text(whole, tmp_path):
    words = (*EVIL, "\ud800", "\u2066", "\ufeff")
    page_of_tokens = (Path(page.__file__).with_name("page.html")).read_text()
    for path in (whole / "tokens").glob("*.npz"):
        with np.load(path) as found:
            kept = dict(found)
        responses = json.loads(kept["about"].tobytes())
        kept["about"] = np.frombuffer(
            json.dumps([r | {"prompt": "".join(words)} for r in responses]).encode(), np.uint8
        )
        np.savez(path, **kept)
    text, read = made(whole, tmp_path)
    assert not {"script", "link", "iframe", "a", "object", "img"} & {*read.names}
    assert "http" not in text.replace("http-equiv", "")
    assert not re.findall(" on[a-z]+=", re.sub(r">[^<]*<", "><", text))
    assert not [c for c in words[2:6] if c in text and c not in ("\x1b[31m", "&lt;")]
    assert "\x1b" not in text
    shown = read.text["div"] + read.text["span"]
    assert any("⟨U+202E⟩abc⟨U+001B⟩[31m&lt;⟨U+D800⟩⟨U+2066⟩⟨U+FEFF⟩" in x for x in shown)
    assert any(EVIL[0] in x for x in shown)
    assert ["name", "".join(EVIL[:2]) + "⟨U+202E⟩abc⟨U+001B⟩[31m&lt;"] in read.tables["Flags"]
    in_page = re.search(r"const special = /\[(.*)\]/g", page_of_tokens)[1]
    for number in [*range(0x300), *range(0x2000, 0x2100), 0xFEFF]:  # the same as the page of tokens
        left = chr(number) in Read(
            report.report.tostring(report.report.tag("p", chr(number)), "unicode")
        ).text.get("p", "")
        assert left != bool(re.match(f"[{in_page}]", chr(number))), hex(number)


def test_records_without_their_figures_have_a_report(whole, tmp_path):
    """As other programs write them; and what is no file of a step is none."""
    lines = [
        {"step": s, "phase": "reinforce", f"{of}/accuracy": 0.5}
        for s, of in ((1, "eval"), (2, "test"))
    ]
    (whole / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (whole / "tokens" / "step-abc.npz").touch()
    assert "Test accuracy: 50.0 at step 2." in made(whole, tmp_path)[0]


def test_a_run_that_goes_on_after_its_test_is_not_finished(whole, lines, tmp_path):
    assert "10 steps of reinforcement, finished." in made(whole, tmp_path)[0]
    last = max(r["step"] for r in lines)
    more = next(r for r in lines if r["step"] == last and "reward" in r) | {"step": last + 1}
    (whole / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*lines, more]))
    assert "11 steps of reinforcement, not finished." in made(whole, tmp_path)[0]


def test_a_run_on_conversations_has_its_losses(whole, tmp_path):
    lines = [
        {"step": n, "phase": "warm_start", "loss": 1 / n, "time/step": 1.0} for n in range(1, 5)
    ]
    lines += [{"step": n, "phase": "warm_start", "eval/loss": 2 / n} for n in (2, 4)]
    (whole / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    assert "4 supervised steps, not finished." in made(whole, tmp_path)[0]
    again = {"step": 4, "phase": "reinforce", "eval/loss": 0.5}  # the next phase begins with it
    lines += [again, {"step": 4, "phase": "reinforce", "test/step": 4, "test/loss": 0.25}]
    (whole / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    text, read = made(whole, tmp_path)
    assert (
        "4 supervised steps, finished. Validation loss: 1.0000 at step 2, at best 0.5000 at step 4."
        in text
    )
    assert "Test loss: 0.2500 at step 4." in text
    assert read.tables["Loss on rows not learned from"][1:] == [
        ["2", "validation", "1.0000"], ["4", "validation", "0.5000"], ["4", "test", "0.2500"],
    ]  # fmt: skip
    assert "validation loss" in read.charts
    assert "none yet" not in text
    lines.insert(0, {"step": 0, "phase": "warm_start", "eval/loss": 3.0})
    for line, accuracy in ((0, 0.25), (5, 0.5), (6, 0.75), (7, 0.75)):
        ends = {"": accuracy, "_low": accuracy - 0.125, "_high": accuracy + 0.125}
        lines[line] |= {f"eval/accuracy{end}": x for end, x in ends.items()} | {"eval/examples": 8}
    (whole / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    text, _ = made(whole, tmp_path)
    before, best = "25.0 (12.5 to 37.5) before the first step", "75.0 (62.5 to 87.5) at step 4"
    assert f"Validation accuracy: {before}, at best {best}." in text
    assert "before reinforcement" not in text


@pytest.mark.parametrize("of", ["eval", "test"])
def test_an_evaluation_without_all_its_figures_is_left_out(whole, lines, of, tmp_path):
    odd = {"step": 9, "phase": "reinforce", f"{of}/accuracy": 0.5}
    odd |= {f"{of}/accuracy_low": 0.4, f"{of}/accuracy_high": 0.6}
    (whole / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [odd, *lines, odd]))
    _, read = made(whole, tmp_path)
    assert len(read.tables["Accuracy on examples not learned from"]) == 7


def test_a_run_that_has_just_begun_has_a_report(whole, tmp_path):
    (whole / "metrics.jsonl").write_text("")
    shutil.rmtree(whole / "tokens")
    text, read = made(whole, tmp_path)
    assert "not finished" in text
    assert "There was none yet" in text
    assert "kept no tokens" in text
    assert ["alpha", "0.3"] in read.tables["Flags"]
    assert ["data", "abc"] in read.tables["Where it comes from"]
    assert read.charts == {}


def test_the_rewards_of_turns_are_told(whole, tmp_path):
    turns, each = [((0, 1), (2, 3))] * 2, [(0.5, 1.0), (0.25, -1.0)]
    responses = tiny.trajectories([[7]] * 2, [[2, 3, 4], [2, 3, 5]], turns=turns, turn_rewards=each)
    numbers = {name: np.ones((2, 2), np.float32) for name in ("old", "new")}
    shutil.rmtree(whole / "tokens")
    kept.write(whole, 5, tiny.groups(responses, [Reward(1.0, True)] * 2), ["a"], numbers)
    assert "3 tokens in 2 turns of reward 0.5, 1;" in made(whole, tmp_path)[0]


def test_an_analysis_in_the_folder_is_shown(whole, tmp_path):
    shutil.copytree(STUDIES / "analysis" / "trained-0.35", whole / "analysis")
    _, read = made(whole, tmp_path)
    found = json.loads((whole / "analysis" / "analysis.json").read_text())
    rows = dict(read.tables[f"of step {found['step']}"])
    assert rows["responses, tokens"].startswith(f"{found['sample']['responses']}, ")
    assert read.names.count("img") == 4
    (whole / "analysis" / "analysis.json").write_text("[]")
    with pytest.raises(UserError, match=r"analysis.json cannot be read"):
        made(whole, tmp_path)


def test_a_study_shows_its_tables_and_pictures(tmp_path):
    _, read = made(STUDIES / "main", tmp_path)
    found = json.loads((STUDIES / "main" / "results.json").read_text())
    assert read.names.count("img") == 2
    panels = [panel for panel in found["study"]["panels"] if panel in read.tables]
    assert panels
    for panel in panels:
        head, *rows = read.tables[panel]
        assert [row[0] for row in rows] == [*found["study"]["variants"]]
        for row in rows:
            ours = [r for r in found["runs"] if (r["panel"], r["variant"]) == (panel, row[0])]
            sampled = 100 * np.mean([r["figures"]["sampled"] for r in ours])
            assert row[head.index("sampled, %")].startswith(f"{sampled:.1f} (")


def test_what_is_no_run_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    for where in ("empty", "nowhere"):
        with pytest.raises(UserError, match=f"{where} is not the folder of a run"):
            report.main(str(tmp_path / where), out=str(tmp_path / "report.html"))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_in_a_browser(whole, tmp_path):
    """Light and dark, wide and narrow, on paper; nothing acts, and axe-core finds nothing serious."""
    shutil.copytree(STUDIES / "analysis" / "trained-0.35", whole / "analysis")
    for folder in (whole, STUDIES / "main"):
        made(folder, tmp_path)
        peer.browser(tmp_path / "report.html", tmp_path / folder.name, readable=True, kind="report")
        assert len([*tmp_path.glob(f"{folder.name}-*.png")]) == 4
        assert (tmp_path / f"{folder.name}.pdf").read_bytes().startswith(b"%PDF")
