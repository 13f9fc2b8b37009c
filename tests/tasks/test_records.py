import json
import shutil

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.math import records
from jaxrl_llm.tasks.math.records import (
    SUITES,
    Problem,
    from_file,
    from_hub,
    suite,
    truths,
    without,
)
from jaxrl_llm.tasks.math.worker import Verdict
from tests.shared import reference

CHAT_ROW = {
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    "reward_model": {"ground_truth": "7"},
}
PLAIN_ROW = {"problem": "q", "answer": 7}
CHAT_WITH_ANSWER = {"prompt": CHAT_ROW["prompt"], "answer": "7"}


@pytest.mark.parametrize("row", [CHAT_ROW, PLAIN_ROW, CHAT_WITH_ANSWER])
def test_rows_of_both_shapes_are_read_from_every_format(tmp_path, monkeypatch, row):
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "p.parquet")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: tmp_path)
    (tmp_path / "data").mkdir()
    shutil.copy(tmp_path / "p.parquet", tmp_path / "data" / "train-00000-of-00001.parquet")
    expected = [Problem("q", ("7",))] * 2
    assert from_file(tmp_path / "p.jsonl") == expected
    assert from_file(tmp_path / "p.parquet") == expected
    assert from_hub("us/math", "train") == expected


def test_two_turns_are_read_from_a_list(tmp_path):
    turns = [{"from": "human", "value": "q"}, {"from": "assistant", "ground_truth": {"value": "7"}}]
    path = tmp_path / "p.json"
    path.write_text(json.dumps([turns, PLAIN_ROW]))
    assert from_file(path) == [Problem("q", ("7",))] * 2


def test_a_line_ends_at_a_newline_alone(tmp_path):
    row = {"problem": "a\u2028b\x85c", "answer": "7"}
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", newline="")
    assert from_file(path) == [Problem("a\u2028b\x85c", ("7",))]


def test_an_answer_of_several_parts_needs_them_all(tmp_path):
    path = tmp_path / "p.jsonl"
    row = {"question": "q", "final_answer": ["2", "-1"]}
    path.write_text(json.dumps({**row, "is_multiple_answer": True}) + "\n" + json.dumps(row))
    assert [p.truths for p in from_file(path)] == [("2, -1",), ("2", "-1")]


def test_a_hub_name_may_have_dots(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(records, "from_hub", lambda *name: asked.append(name))
    suite("amc").load("org/data-v1.5")
    assert asked == [("org/data-v1.5", "test")]


def test_other_columns_are_read_by_a_function(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"Q": "q", "A": 7}\n')
    read = from_file(tmp_path / "p.jsonl", lambda row: Problem(row["Q"], (str(row["A"]),)))
    assert read == [Problem("q", ("7",))]


def of(**row):
    return json.dumps({"problem": "q", "answer": "7"} | row)


CHAT_OF_PARTS = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", '{"problem": "q", "answer": 1}\n{"problem"', "line 2: not JSON"),
        ("p.jsonl", '{"text": "q"}', r"row 0 \(text\): no problem found"),
        ("p.jsonl", '["q"]', r"row 0 \(list\): no problem found"),
        ("p.jsonl", "", "holds no problems"),
        ("p.jsonl", of(problem={"text": "q"}), "a question is a text"),
        ("p.jsonl", of(problem=CHAT_OF_PARTS), "a question is a text"),
        *(("p.jsonl", of(answer=empty), "row 0 .*at least one truth")
          for empty in ("", " ", [], "['']")),
        *(("p.jsonl", of(answer=odd), "row 0")
          for odd in (float("nan"), {"a": 1}, [float("nan")], "\ud83d")),
        ("p.json", "{}", "holds a dict, not a list"),
        ("p.json", "[", "not JSON"),
        ("p.json", "[[]]", r"row 0 \(list\): no problem found"),
        ("p.json", '[[{"from": "human", "value": "q"}]]', r"row 0 \(list\): no problem found"),
        ("p.parquet", "no parquet", "cannot read"),
        ("p.py", "", "ends in none of"),
    ],
)  # fmt: skip
def test_unreadable_data_is_a_one_line_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        from_file(tmp_path / name)
    with pytest.raises(UserError, match="cannot read"):
        from_file(tmp_path / "missing.jsonl")


def test_a_data_set_that_is_not_there_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: tmp_path)
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"no files of the split .test.: train"):
        from_hub("us/math", "test")
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot download the data set 'not a name'") as caught:
        from_hub("not a name", "test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("['9.6\\n']", ("9.6",)),
        ("['2', '$\\\\frac{1}{2}$', '2 ']", ("2", "$\\frac{1}{2}$")),
        (["a", "b\n"], ("a", "b")),
        ("[-2,4]", ("[-2,4]",)),
        ("['2', 3]", ("['2', 3]",)),
        ("['2'", ("['2'",)),
        ("[" * 5000, ("[" * 5000,)),
        ("080 or 081 (both were accepted)", ("080", "081")),
        (7, ("7",)),
        (0.5, ("0.5",)),
        ("48/2 = <<48/2=24>>24 clips.\n#### 1,072", ("1,072",)),
        (r"So $x=\boxed{2}$, and the sum is \boxed{\frac{7}{2}}.", (r"\frac{7}{2}",)),
        ([r"\boxed{2}", "#### 3"], ("2", "3")),
    ],
)
def test_a_stored_truth_is_one_or_a_printed_list_of_several(stored, expected):
    assert truths(stored) == expected


def test_parts_of_an_answer_may_each_have_a_box(tmp_path):
    row = {"question": "q", "answer": [r"\boxed{2}", "#### -1"], "is_multiple_answer": True}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    assert [p.truths[0].replace(" ", "") for p in from_file(tmp_path / "p.jsonl")] == ["2,-1"]


@pytest.mark.parametrize(
    "lost", ["3 + = 4", "She sold 48/2 = 24 clips, so 72.", "all the primes " * 6]
)
def test_a_truth_that_equals_nothing_else_is_said_with_its_row(tmp_path, caplog, lost):
    rows = ["7", r"\text{no}", lost, "(1,2)", lost]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"problem": "q", "answer": a}) for a in rows))
    assert len(from_file(path)) == 5
    [said] = caplog.messages
    assert f"{path}, row 2: " in said
    assert said.endswith("2 of 5")


def test_of_several_folders_of_a_data_set_one_is_named(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path)
    )
    for config, answer in (("main", "1"), ("socratic", "2")):
        for split in ("train", "test"):
            folder = tmp_path / config / split if config == "main" else tmp_path / config
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{split}-0.jsonl").write_text(json.dumps(PLAIN_ROW | {"answer": answer}))
    with pytest.raises(UserError, match=r"several configs \(main, socratic\): name one"):
        from_hub("us/math", "test")
    assert from_hub("us/math:main", "test") == [Problem("q", ("1",))]
    assert from_hub("us/math:socratic", "test") == [Problem("q", ("2",))]
    assert set(asked) == {"us/math"}


def test_truths_that_are_one_text_are_an_error():
    with pytest.raises(TypeError, match="tuple of texts"):
        Problem("q", "12")  # pyright: ignore[reportArgumentType]


def test_every_suite_reads_a_local_file_and_knows_its_samples(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "q", "final_answer": ["1", "2"]}))
    for published in SUITES.values():
        assert published.load(tmp_path / "p.jsonl") == [Problem("q", ("1", "2"))]
    assert {s.name: s.samples for s in SUITES.values() if s.samples} == {"amc": 16, "aime24": 16}
    with pytest.raises(UserError, match="needs a file: parquet"):
        suite("orz").load()
    with pytest.raises(UserError, match="no math suite 'mth': there are math500"):
        suite("mth")


def test_held_out_questions_are_left_out_of_training():
    train = [Problem("What  is\n$1+1$?", ("2",)), Problem("What is 1+2?", ("3",))]
    held_out = [Problem("what is 1 + 1? Let's think step by step and box it.", ("2",))]
    assert without(train, held_out) == train[1:]
    assert without(held_out, train) == []


@pytest.mark.parametrize(
    "asked",
    [
        "{} Please reason step by step, and put your final answer within \\boxed{{}}.",
        "Let\u2019s think step by step. {}",
        "Solve the problem.\n\n{}\n\nAnswer:",
        "{}",
    ],
)
def test_held_out_questions_are_known_with_any_instruction(asked):
    question = "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates."
    other = question.replace("3", "4")
    train = [Problem(asked.format(q), ("1",)) for q in (question, other)]
    assert without(train, [Problem(question, ("1",))]) == train[1:]


def test_published_problems_are_read_and_can_be_kept_apart():
    names = ("dsr_uniform_train", "math500", "aime_2021_2024")
    train, math500, aime = (from_file(reference("data", "math", f"{n}.parquet")) for n in names)
    assert (len(train), len(math500), len(aime)) == (10_000, 500, 103)
    assert all(problem.question and problem.truths for problem in [*train, *math500, *aime])
    kept = set(without(train, [*math500, *aime]))
    shared = [p for p in train if p not in kept]
    known = {p.truths for p in [*math500, *aime]}
    assert 0 < len(shared) < 50
    others = {p.truths for p in shared} - known  # the same problems, one truth in other words
    assert others == {(r"0.09 \text{ OR } \frac{9}{100}",)}


def test_published_answers_in_their_own_words_are_equal(checker):
    for problem in from_file(reference("data", "math", "math500.parquet")):
        assert checker.check(problem.truths[0], f" {problem.truths[0]} ") is Verdict.EQUAL
