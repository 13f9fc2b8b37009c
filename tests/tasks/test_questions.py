"""Tables of questions as others publish them: what is asked, what is right; rewards by name and by others."""

import asyncio
import csv
import gzip
import io
import json
import logging
import pathlib
import threading
from functools import partial

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub.utils import filter_repo_objects

import jaxrl_llm as jl
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import build, load, shipped
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import Group, TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks import conversations, questions, rewards
from jaxrl_llm.tasks.reflection import WithReflection
from jaxrl_llm.tasks.tables import Question
from jaxrl_llm.tasks.task import UNGRADED, GradesGroups, Reward, RewardSettings, score_groups
from jaxrl_llm.tasks.tools import Toolbox
from jaxrl_llm.training import journal
from tests import public
from tests.tasks import templates

ROOT = pathlib.Path(__file__).parents[2]
USER = [{"role": "user", "content": "6 * 7?"}]
SOLUTION = "6 * 7 = <<6*7=42>>42\n#### 42"
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0},
}
CHAT = [
    {"role": "system", "content": "s"},
    *USER,
    {"role": "assistant", "content": "It is \\boxed{42}."},
]
LETTERS = {"question": "6 * 7?", "choices": ["41", "42", "43", "44"]}
ARC = {"text": ["41", "42", "43", "44"], "label": ["A", "B", "C", "D"]}
PICK = "6 * 7?\nA. 41\nB. 42\nC. 43\nD. 44"


def written(folder, rows, name="mine.jsonl"):
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "spec", "prompt", "truth"),
    [
        ({"question": "6 * 7?", "answer": SOLUTION}, "math", "6 * 7?", "42"),  # GSM8K
        ({"problem": "6 * 7?", "solution": "so $\\boxed{42}$.", "answer": "42"}, "math", "6 * 7?", "42"),
        ({"prompt": USER, "solution": "$42$"}, "math", tuple(USER), "$42$"),  # DeepMath for TRL
        (
            {"problem": "6 * 7?", "generated_solution": "no", "expected_answer": "42"},  # OpenMath
            *("math", "6 * 7?", "42"),
        ),
        (VERL, "math", tuple(USER), "42"),
        ({"messages": CHAT}, "math", tuple(CHAT[:2]), "42"),
        (LETTERS | {"answer": 1}, "choice", PICK, "B"),  # MMLU
        (LETTERS | {"answer": 1.0}, "choice", PICK, "B"),  # of a column with gaps
        (LETTERS | {"answer": "1"}, "choice", PICK, "B"),  # of a CSV file
        (LETTERS | {"choices": [*"4123"], "answer": "1"}, "choice", "6 * 7?\nA. 4\nB. 1\nC. 2\nD. 3", "B"),
        (LETTERS | {"answer": "B"}, "choice", PICK, "B"),
        (LETTERS | {"answer": "42"}, "choice", PICK, "B"),
        ({"question": "6 * 7?", "choices": ARC, "answerKey": "B"}, "choice", PICK, "B"),
        ({"question": "6 * 7?", "choices": ARC | {"label": [*"1234"]}, "answerKey": "2"}, "choice", PICK, "B"),
        ({"question": "6 * 7?", "choices": {"text": [*"4123"], "label": [*"1234"]}, "answerKey": "2"}, "choice",
         "6 * 7?\nA. 4\nB. 1\nC. 2\nD. 3", "B"),  # by its label, and not C by its text
        (LETTERS | {"choices": "['41', '42', '43', '44']", "answer": "B"}, "choice", PICK, "B"),  # of a CSV file
        ({"question": "6 * 7?", "options": dict(zip("ABCDE", ["41", "42", "43", "44", None], strict=True)),
          "answer": "B"}, "choice", PICK, "B"),  # as Parquet fills up what some rows lack
        *(({"question": "6 * 7?", "options": {"A": "41", "B": None, "C": "42"}, "answer": said}, "choice",
           "6 * 7?\nA. 41\nB. 42", "B") for said in ("C", "c", "42")),
        ({"question": "6 * 7?", "choices": {"label": ["B", "A"], "text": ["41", "42"]}, "answerKey": "A"},
         "choice", "6 * 7?\nA. 41\nB. 42", "B"),
        ({"question": "Which vitamin?", "choices": [*"CDAK"], "answer": "C"}, "choice",
         "Which vitamin?\nA. C\nB. D\nC. A\nD. K", "C"),  # the letter: most sets have that
        ({"query": "6 * 7?", "target": 42}, "exact", "6 * 7?", "42"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["mine.jsonl", "mine.json", "mine.parquet"])
def test_what_others_publish_is_understood(tmp_path, caplog, row, spec, prompt, truth, name):
    made = questions.task(written(tmp_path, [row], name), [spec], held_out=0)
    assert (made.train, made.test) == ([Question(prompt, (truth,), {})], [])
    assert caplog.messages == []


def test_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text('\ufeffquestion,answer,note\n"6 * 7,\nby head?",42,\n"1 + 1?",2,easy\n')
    [first, second] = questions.questions([path], needs=["math"])
    assert (first.prompt, first.truths) == ("6 * 7,\nby head?", ("42",))
    assert second.row == {"question": "1 + 1?", "answer": "2", "note": "easy"}


def test_tabs_need_no_quotes(tmp_path):
    """Where texts are not written in them, one that begins with one would swallow the rows after it."""
    path = tmp_path / "mine.tsv"
    path.write_text('question\tanswer\n"To be\tHamlet\nWho, 1, 2?\tB\nlast "one"\tC\n')
    found = [(one.prompt, *one.truths) for one in questions.questions([path])]
    assert found == [('"To be', "Hamlet"), ("Who, 1, 2?", "B"), ('last "one"', "C")]
    path.write_text('question\tanswer\n"a ""b""\tc"\tC\n')
    assert [one.prompt for one in questions.questions([path])] == ['a "b"\tc']


@pytest.mark.parametrize("name", ["mine.csv", "mine.tsv"])
def test_a_cell_may_be_long(tmp_path, name):
    """Python's reader refuses more than 131,072 characters, unless it is told otherwise."""
    path, text = tmp_path / name, "x" * 200_000
    between = "," if name == "mine.csv" else "\t"
    path.write_text(f"question{between}answer\n{text}{between}1\n")
    assert [(one.prompt, one.truths) for one in questions.questions([path])] == [(text, ("1",))]


def test_a_teacher_is_told_what_a_column_says(tmp_path):
    """Behind the question and before the instruction; nothing changes for the policy."""
    row = {"question": "6 * 7?", "answer": "42", "solution": "6 * 7 = 42"}
    path = written(tmp_path, [row], "mine.jsonl")
    plain = questions.task(path, held_out=0)
    made = questions.task(path, hint_column="solution", held_out=0)
    [one, *_] = made.train
    assert made.prompt(one) == plain.prompt(plain.train[0])
    assert plain.teacher_prompt(plain.train[0]) is None  # it reads the policy's
    instruction = questions.INSTRUCTIONS["math"]
    right = questions.HINTED.format("6 * 7 = 42")
    assert made.teacher_prompt(one) == f"6 * 7?\n\n{right}\n\n{instruction}"
    with pytest.raises(UserError, match=r"row 0: no proof among question, .*--hint-column"):
        questions.task(path, hint_column="proof")
    path = written(tmp_path, [row, row | {"question": "1 + 1?", "solution": None}], "some.jsonl")
    some = questions.task(path, hint_column="solution", held_out=0)
    assert sorted(one.hint for one in some.train) == ["", "6 * 7 = 42"]
    config = load(shipped() / "grpo.py")
    with pytest.raises(UserError, match="--hint-column is for a teacher: name it by --teacher"):
        config("m", path, hint_column="solution")


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# Files as they are published or exported: name, text (or rows of parquet), reward, prompt, truth.
FILES = {
    "gsm8k": ("train.jsonl", lines({"question": "6 * 7?", "answer": SOLUTION}), "math", "6 * 7?", "42"),
    "math": (
        *("train.jsonl", lines({"problem": "6 * 7?", "level": "Level 1", "type": "Algebra",
                                "solution": "We get $\\boxed{4\\text{2}}$, or\n\\[\\boxed{\\frac{84}{2}}.\\]"})),
        *("math", "6 * 7?", "\\frac{84}{2}"),
    ),
    "deepmath of trl": (
        *("train.parquet", [{"prompt": USER, "solution": "$\\dfrac{84}{2}$"}]),
        *("math", tuple(USER), "$\\dfrac{84}{2}$"),
    ),
    "openmathinstruct of nemo-rl": (
        *("train.parquet", [{"problem": "6 * 7?", "generated_solution": "So \\boxed{41}",
                             "expected_answer": "42", "problem_source": "augmented_gsm8k"}]),
        *("math", "6 * 7?", "42"),
    ),
    "gsm8k of verl": ("train.parquet", [VERL], "math", tuple(USER), "42"),
    "dapo-math": (
        *("train.parquet", [VERL | {"data_source": "math_dapo", "ability": "MATH",
                                    "reward_model": {"ground_truth": '["42"]', "style": "rule"}}]),
        *("math", tuple(USER), "42"),
    ),
    "numina": (
        *("train.jsonl", lines({"source": "olympiads", "problem": "6 * 7?", "solution": "so \\boxed{42}",
                                "messages": CHAT})),
        *("math", "6 * 7?", "42"),
    ),
    "messages": ("chat.json", json.dumps([{"messages": CHAT}]), "math", tuple(CHAT[:2]), "42"),
    "prompts with truths": ("p.jsonl", lines({"prompt": "6 * 7?", "ground_truth": 42.0}), "exact", "6 * 7?", "42"),
    "windows": ("train.jsonl", "\ufeff" + lines({"question": "6 * 7?", "answer": 42}).replace("\n", "\r\n"),
                "exact", "6 * 7?", "42"),
    "spreadsheet": ("mine.csv", "\ufeffquestion;answer\n6 * 7?;42\n", "exact", "6 * 7?", "42"),
    "tabs": ("mine.tsv", "question\tanswer\n6 * 7?\t42\n", "exact", "6 * 7?", "42"),
    "arc": ("test.jsonl", lines(LETTERS | {"choices": ARC, "answerKey": "B"}), "choice", PICK, "B"),
    "mmlu": ("test.parquet", [LETTERS | {"subject": "algebra", "answer": 1}], "choice", PICK, "B"),
    "gpqa": ("mine.csv", "Question,Correct Answer\n6 * 7?,42\n", "exact", "6 * 7?", "42"),
    "aime": ("train.jsonl", lines({"ID": "2024-I-1", "Problem": "6 * 7?", "Solution": "...", "Answer": 42}),
             "math", "6 * 7?", "42"),
}  # fmt: skip
FILES["alpaca"] = (
    *("alpaca.json", json.dumps([{"instruction": "Multiply.", "input": "6, 7", "output": "42"}])),
    *("exact", "Multiply.\n\n6, 7", "42"),
)
COLUMNS = {
    "alpaca": {"answer_column": "output"},
    "gpqa": {"prompt_column": "Question", "answer_column": "Correct Answer"},
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_others_are_read(tmp_path, caplog, name):
    file, content, spec, prompt, truth = FILES[name]
    path = tmp_path / file
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    else:
        written(tmp_path, content, file)
    columns = COLUMNS.get(name, {})
    [one] = questions.questions([path], needs=[spec], choice=spec == "choice", **columns)
    assert (one.prompt, one.truths) == (prompt, (truth,))
    assert caplog.messages == []


# Of sets for agents that search: a row, and all answers that it accepts. The first seven as one repository of many
# sets has them (id, question, golden_answers, metadata), the others as they were published.
SEARCHED = {
    "nq": ({"id": "test_0", "question": "q?", "golden_answers": ["14 December 1972 UTC", "December 1972"]},
           ("14 December 1972 UTC", "December 1972")),
    "triviaqa": ({"id": "test_0", "question": "q?", "golden_answers": ["Sinclair Lewis", "Harry Sinclair Lewis"],
                  "metadata": {}}, ("Sinclair Lewis", "Harry Sinclair Lewis")),
    "popqa": ({"id": "test_0", "question": "q?", "golden_answers": ["politician", "political leader"],
               "metadata": {"subj": "George Rankin", "prop": "occupation", "obj": "politician"}},
              ("politician", "political leader")),
    "hotpotqa": ({"id": "dev_0", "question": "q?", "golden_answers": ["yes"],
                  "metadata": {"type": "comparison", "level": "hard",
                               "supporting_facts": {"title": ["Scott Derrickson"], "sent_id": [0]}}}, ("yes",)),
    "2wikimultihopqa": ({"id": "dev_0", "question": "q?", "golden_answers": ["Małgorzata Braunek"],
                         "metadata": {"type": "compositional"}}, ("Małgorzata Braunek",)),
    "musique": ({"id": "dev_0", "question": "q?", "golden_answers": ["Maria Bello", "Maria Elena Bello"],
                 "metadata": {"2hop_answer": "no", "answerable": True}}, ("Maria Bello", "Maria Elena Bello")),
    "bamboogle": ({"id": "test_0", "question": "q?", "golden_answers": ["James K. Polk"]}, ("James K. Polk",)),
    "verl of search-r1": (
        {"id": "train_0", "question": "q?", "golden_answers": ["Lima"], "data_source": "nq", "prompt": USER,
         "reward_model": {"ground_truth": {"target": ["Lima", "Ciudad de los Reyes"]}, "style": "rule"}},
        ("Lima", "Ciudad de los Reyes")),
    "nq_open": ({"question": "q?", "answer": ["Lima", "Ciudad de los Reyes"]}, ("Lima", "Ciudad de los Reyes")),
    "trivia_qa": ({"question": "q?", "question_id": "tc_1", "answer": {
        "value": "Lima", "aliases": ["Lima", "Lima, Peru"], "type": "Freeform"}}, ("Lima", "Lima, Peru")),
    "PopQA": ({"question": "q?", "obj": "Lima", "possible_answers": '["Lima", "Zo\\u00eb"]'}, ("Lima", "Zoë")),
    "MuSiQue": ({"question": "q?", "answer": "Lima", "answer_aliases": ["Lima, Peru"]}, ("Lima", "Lima, Peru")),
    "Bamboogle": ({"Question": "q?", "Answer": "Lima"}, ("Lima",)),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("file", ["test.jsonl", "test.parquet", "test.csv"])
def test_questions_of_search_agents_have_all_their_answers(tmp_path, name, file):
    row, truths = SEARCHED[name]
    nested = any(isinstance(x, dict) and x for x in row.values())
    if file.endswith(".csv") and not nested:  # as a table writes lists
        table = io.StringIO()
        csv.writer(table).writerows([row, row.values()])
        (tmp_path / file).write_text(table.getvalue(), encoding="utf-8")
    else:
        file = file.replace("csv", "jsonl")
        written(tmp_path, [{key: x for key, x in row.items() if x != {}}], file)
    [one] = questions.questions([tmp_path / file], needs=["em"])
    assert (one.prompt, one.truths) == ("q?", truths)


def test_a_table_may_be_packed(tmp_path):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress(lines({"question": "q?", "answer": "Lima"}).encode()))
    assert [one.truths for one in questions.questions([path])] == [("Lima",)]
    whole = path.read_bytes()
    for broken in (whole[:-9], whole[:12] + b"\xff" * 20 + whole[32:], b"{}"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"cannot read .*mine.jsonl.gz"):
            questions.questions([path])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("mine.jsonl", "", "mine.jsonl holds no rows"),
        ("mine.csv", "question,answer\n", "mine.csv holds no rows"),
        ("mine.jsonl", '{"question": "q", "answer": "1"}\n{"question": "q", "ans', "line 2: not JSON"),
        ("mine.jsonl", '{"question": "q", "answer": "1"}\n{"question": "q", "answer": ' + "1" * 5000 + "}",
         r"mine.jsonl, line 2: a number of too many digits: write it as a text"),
        ("mine.jsonl", '{"question": "q", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
         r"mine.jsonl, line 1: lists or objects too deep in one another"),
        ("mine.json", '[{"question": "q", "answer": ' + "1" * 5000 + "}]", "mine.json: a number of too many"),
        ("mine.jsonl", lines({"question": "q", "answer": "1"}, {"question": "hi \ud83d", "answer": "1"}),
         r"mine.jsonl, row 1: a text has half a surrogate pair, '\\ud83d', so it is no valid Unicode: .* out"),
        ("mine.jsonl", lines({"messages": [*CHAT[:2], {"role": "user", "content": "\ud83d"}], "answer": "1"}),
         "mine.jsonl, row 0: a text has half a surrogate pair"),
        ("mine.json", '{"data": []}', "mine.json holds a dict, not a list of rows"),
        ("mine.parquet", "PAR1", "cannot read .*mine.parquet: "),
        ("mine.txt", "6 * 7?", r"cannot read .*mine.txt: its name ends in none of \.parquet, \.jsonl"),
        ("mine.csv", "question,answer\nq,1\nSum of 3,4 and 5?,12\n",
         "mine.csv, line 3: more cells than columns: put texts with ',' in quotes"),
        ("mine.csv", 'question,answer\n"Weird" who?,1\n', "cannot read .*mine.csv: ',' expected after '\"'"),
        ("mine.csv", 'question,answer\n"To be,1\nq,1\n', "cannot read .*mine.csv: unexpected end of data"),
        ("mine.csv", "6 * 7?,42\n1 + 1?,2\n", "row 0: no problem or .* among 6 \\* 7\\?, 42: .*--prompt-column"),
        ("mine.jsonl", lines({"conversations": [{"from": "human", "value": "6 * 7?"}]}),
         "row 0: no problem or .* among conversations: name the column by --prompt-column"),
        ("mine.jsonl", lines({"instruction": "Multiply.", "input": "6, 7", "output": "42"}),
         "row 0: no answer or .* among instruction, input, output: name the column by --answer-column"),
        ("mine.jsonl", lines({"question": "6 * 7?", "answers": {"text": ["42"]}}),
         "row 0: no answer or .* among question, answers: name the column by --answer-column"),
    ],
)  # fmt: skip
def test_files_that_hold_no_questions_are_refused_in_a_line(tmp_path, file, content, said):
    path = tmp_path / file
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said) as error:
        questions.questions([path], needs=["math"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"text": "q", "answer": "1"}, {}, "row 0: no problem or .* among text, answer: .*--prompt-column"),
        ({"question": "q", "messages": ["a", "b"]}, {}, "row 0: no answer or"),
        ({"question": "q"}, {}, "row 0: no answer or .* among question: name the column by --answer-column"),
        ({"question": "q", "answer": "1"}, {"answer_column": "truth"}, "row 0: no truth among question, answer"),
        ({"question": "q", "answer": "1"}, {"prompt_column": "x"}, "row 0: no x among question"),
        ({"question": 7, "answer": "1"}, {}, "row 0: a prompt is a text or messages with role and content, not 7"),
        ({"question": [], "answer": "1"}, {}, "row 0: a prompt with no text"),
        ({"question": "q", "answer": " "}, {}, "row 0: the answer is empty"),
        ({"question": "q", "answer": None}, {}, "row 0: its answer is empty: fill it in, or leave the row out"),
        ({"q": "q", "Truth": None}, {"prompt_column": "q", "answer_column": "Truth"}, "row 0: its Truth is empty"),
        (["q", "1"], {}, "row 0: a list, not a row with columns"),
        ({"prompt": USER, "choices": ["a"], "answer": 0}, {"specs": ["choice"]}, "choices into the prompt"),
        ({"question": "q", "choices": "a, b", "answer": "A"}, {"specs": ["choice"]}, "its choices are one text"),
        ({"question": "q", "answer": "1"}, {"held_out": -1}, "held_out = -1 must be at least 0"),
        (None, {}, "holds no rows"),
        ({"question": "q", "answer": "1"}, {"weights": (1, 2)}, "2 for 1 rewards"),
        ({"question": "q", "answer": "1"}, {"specs": ["exact", "exact"]}, "one name"),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused_with_its_row(tmp_path, row, settings, said):
    source = written(tmp_path, [] if row is None else [row])
    with pytest.raises(UserError, match=said) as error:
        questions.task(source, **({"specs": ["math"]} | settings))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lost", "spec"),
    [({"question": "q", "answer": "She has 48/2 = 24 clips, so many."}, "math"),
     (LETTERS | {"answer": "Z"}, "choice"), (LETTERS | {"answer": "E"}, "choice"),
     ({"question": "6 * 7?", "options": {"A": "41", "B": None, "C": "42"}, "answer": "B"}, "choice")],
)  # fmt: skip
def test_a_truth_that_nothing_can_match_is_a_warning_with_its_row(tmp_path, caplog, lost, spec):
    fine = LETTERS | {"answer": "B"}
    source = written(tmp_path, [fine, lost, fine, lost])
    with caplog.at_level(logging.WARNING):
        questions.task(source, [spec], held_out=0)
    [said] = caplog.messages
    assert f"{source}, row 1: no answer could ever be right there" in said
    assert said.endswith("2 of 4")


def hub(monkeypatch, folder, files):
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder, rows, name)
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: asked.append(name) or str(folder)
    )
    return asked


@pytest.mark.parametrize(
    ("files", "source", "sizes"),
    [
        (["train.jsonl", "test.jsonl"], "us/set", [3, 3]),
        (["data/train-0.parquet", "data/train-1.parquet", "data/validation-0.parquet"], "us/set", [6, 3]),
        (["train.jsonl"], "us/set", [2, 1]),
        (["nq/train.jsonl", "nq/dev.jsonl", "nq/test.jsonl", "popqa/test.jsonl"], "us/set:nq", [3, 3]),
        (["nq/test.jsonl", "2wikimultihopqa/train.jsonl", "2wikimultihopqa/dev.jsonl"],
         "us/set:2wikimultihopqa", [3, 3]),
        (["main/train.jsonl", "socratic/train.jsonl"], "us/set:main", [2, 1]),
        (["main/train.jsonl", "main/hard.jsonl"], "us/set:main:hard", [2, 1]),
        (["rc/train-0.jsonl", "rc.nocontext/train-0.jsonl", "rc/test.jsonl"], "us/set:rc", [3, 3]),
        (["algebra/train.jsonl", "intermediate_algebra/train.jsonl"], "us/set:algebra", [2, 1]),
        ([*(f"data/{one}_{part}-00000-of-00001.parquet" for one in ("train", "test") for part in ("sft", "gen")),
          "data/train_sft-00001-of-00002-0f0f0f0f0f0f0f0f.parquet"], "us/set::train_sft", [6, 3]),
        (["auxiliary_train.jsonl", "train.jsonl"], "us/set", [2, 1]),
        (["all/auxiliary_train.jsonl", "all/test.jsonl"], "us/set:all:auxiliary_train", [3, 3]),
        (["gsm8k_train.jsonl"], "us/set", [2, 1]),
        (["gsm_train_part1.jsonl", "gsm_train_part2.jsonl"], "us/set", [4, 1]),
        (["train.jsonl", "train.csv", "test.jsonl"], "us/set", [3, 3]),
        (["train.jsonl", "test.jsonl", "validation.jsonl"], "us/set::test", [3, 3]),
        (["train.jsonl", "test.jsonl"], "us/set::test", [2, 1]),
    ],
)  # fmt: skip
def test_of_a_set_at_the_hub_a_config_and_a_split_are_taken(
    monkeypatch, tmp_path, files, source, sizes
):
    asked = hub(monkeypatch, tmp_path, files)
    made = questions.task(source)
    assert [len(made.train), len(made.test)] == sizes
    assert asked == ["us/set"]


def test_a_prompt_that_is_held_out_is_not_trained_on(tmp_path):
    """All of its rows, and the same prompts whatever is trained: seeds are compared on them."""
    rows = [{"question": f"{n % 30} + 1?", "answer": str(n % 30 + 1)} for n in range(90)]
    made = questions.task(written(tmp_path, rows))
    assert [len(made.train), len(made.test)] == [81, 3]
    assert not {one.prompt for one in made.train} & {one.prompt for one in made.test}
    one = [{"question": "Sing.", "answer": "la"}] * 9
    with pytest.raises(UserError, match="has one prompt, and it is held out to test on"):
        questions.task(written(tmp_path, one))
    first, second = (
        jl.grpo(model="m", data=written(tmp_path, rows), seed=seed).task(tmp_path)
        for seed in (0, 1)
    )
    assert first.test == second.test


def test_a_message_that_cannot_be_read_is_told_with_its_row(tmp_path):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": "[]"}]
    path = written(tmp_path, [{"messages": chat}] * 2)
    with pytest.raises(UserError, match=r"mine\.jsonl, row 0: "):
        conversations.task(path)


@pytest.mark.parametrize("test", ["us/set", "us/set:main:test", "us/set:other:test"])
def test_the_hub_is_asked_once_for_a_set_that_is_named_twice(monkeypatch, tmp_path, test):
    files = ["main/train.jsonl", "main/test.jsonl", "other/test.jsonl"]
    asked = hub(monkeypatch, tmp_path, files[:2] if test == "us/set" else files)
    made = questions.task("us/set:main", test=test)
    assert [len(made.train), len(made.test)] == [3, 3]
    once = ["us/set"] * (1 if test == "us/set:main:test" else 2)  # for the files of each config
    assert asked == once
    questions.task("us/set:main", test=test)
    assert asked == once * 2  # a later task sees what has changed


def test_of_a_set_at_the_hub_the_files_of_one_config_are_fetched(monkeypatch, tmp_path):
    there = [
        "nq/train.jsonl",
        "nq/test.jsonl",
        "popqa/test.jsonl",
        "texts/wiki.jsonl",
        "nq/notes.md",
    ]
    fetched = []

    def download(name, *, allow_patterns, **_):
        fetched[:] = filter_repo_objects(there, allow_patterns=allow_patterns)
        for file in fetched:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(lines({"question": "q?", "golden_answers": ["a"]}) * 2)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    questions.task("us/set:nq", ["em"])
    assert fetched == there[:2]
    questions.task("us/set:nq", ["em"], test="us/set:popqa:test")
    assert fetched == ["popqa/test.jsonl"]
    with pytest.raises(UserError, match="no files of the split 'train' and the config 'popqa'"):
        questions.task("us/set:popqa", ["em"])


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        (["main/train.jsonl", "socratic/train.jsonl"], "us/set", r"several configs \(main, socratic\): .*:CONFIG"),
        (["main/train.jsonl"], "us/set:other", "no files of the split 'train' and the config 'other': main/train"),
        (["main/test.jsonl"], "us/set", "no files of the split 'train': main/test"),
        (["train.jsonl", "a/test.jsonl", "b/test.jsonl"], "us/set", r"'test' for several configs \(a, b\)"),
        (["data/train_sft-0.jsonl", "data/train_gen-0.jsonl"], "us/set",
         r"several splits with 'train' in their names \(train_gen, train_sft\): name one, as us/set::train_gen"),
        (["train.jsonl", "c/test_a.jsonl", "c/test_b.jsonl"], "us/set",
         r"'test' in their names \(test_a, test_b\)"),
    ],
)  # fmt: skip
def test_a_set_at_the_hub_that_is_not_clear_is_asked_about(
    monkeypatch, tmp_path, files, source, said
):
    hub(monkeypatch, tmp_path, files)
    with pytest.raises(UserError, match=said):
        questions.task(source)


def test_a_prompt_has_the_instruction_of_its_reward_and_the_system_message(tmp_path):
    source = written(tmp_path, [{"question": "6 * 7?", "answer": "42"}])
    made = questions.task(source, ["math"], held_out=0)
    box = questions.INSTRUCTIONS["math"]
    assert made.prompt(made.train[0]) == f"6 * 7?\n\n{box}"
    made = questions.task(source, ["math"], system="Be brief.", instruction="", held_out=0)
    assert made.prompt(made.train[0]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6 * 7?"},
    ]
    source = written(tmp_path, [VERL | {"prompt": [{"role": "user", "content": f"6 * 7? {box}"}]}])
    made = questions.task(source, ["math"], held_out=0)
    assert made.prompt(made.train[0]) == list(made.train[0].prompt)  # it is there


# Rewards by name.


def asked(*truths, **row):
    return Question("6 * 7?", truths, row)


@pytest.mark.parametrize(
    ("spec", "truth", "response", "score", "fields"),
    [
        ("math", "42", "It is \\boxed{42}.", 1, {"format": 1}),
        ("math", "0.5", "<think>\\boxed{9}</think>\\boxed{\\frac12}", 1, {"format": 1}),
        ("math", "42", "6 * 7 = 42\n#### 42", 1, {"format": 1}),
        ("math", "42", "It is 42.", 0, {"format": 0}),
        ("math", "42", "\\boxed{41}", 0, {"format": 1}),
        ("exact", "42", " 42\n", 1, {}),
        ("exact", "42", "<think>41</think>42", 1, {}),
        ("exact", "42", "It is 42", 0, {}),
        ("tagged", "42", "<think>6 * 7</think>\n<answer> 42 </answer>", 1, {"format": 1}),
        ("tagged", "42", "<answer>42</answer>", 0, {"format": 0}),
        ("tagged", "42", "<think></think><answer>41</answer>", 0, {"format": 1}),
        ("choice", "B", "So the answer is \\boxed{B}.", 1, {"format": 1}),
        ("choice", "B", "A is wrong. The answer is (B)", 1, {"format": 1}),
        ("choice", "B", "Answer: **B**", 1, {"format": 1}),
        ("choice", "B", "b", 1, {"format": 1}),
        ("choice", "B", "**Answer** (B)", 1, {"format": 1}),
        ("choice", "B", "Answer:\n\nB", 1, {"format": 1}),
        ("choice", "B", "The answer is B. That is the answer I would give.", 1, {"format": 1}),
        ("choice", "A", "I cannot find the answer. A guess: C.", 0, {"format": 0}),
        ("choice", "A", "The answer is C, and in my answer A is the area", 0, {"format": 1}),
        ("choice", "B", "\\boxed{(C)}", 0, {"format": 1}),
        ("choice", "B", "\\boxed{\\text{B}}", 1, {"format": 1}),
        ("choice", "B", "\\boxed{\\textbf{(B)}}", 1, {"format": 1}),
        ("choice", "B", "\\boxed{\\mathrm{B}. 42}", 1, {"format": 1}),
        ("choice", "B", "\\boxed{(B) 42}", 1, {"format": 1}),
        ("choice", "B", "\\boxed{B: A or C}", 1, {"format": 1}),
        ("choice", "B", "answer: \\text{B}", 1, {"format": 1}),
        ("choice", "A", "The answer is A, a bird", 1, {"format": 1}),
        ("choice", "A", "A. 41 is wrong", 0, {"format": 0}),
        ("choice", "A", "\\boxed{A bird}", 0, {"format": 0}),
        ("choice", "B", "I do not know", 0, {"format": 0}),
        ("regex:x = (\\d+)", "42", "x = 41, no, x = 42", 1, {"format": 1}),
        ("regex:x = (\\d+)", "42", "42", 0, {"format": 0}),
    ],
)
def test_a_reward_has_a_name(spec, truth, response, score, fields):
    assert rewards.reward(spec)(asked(truth), response) == Reward(score, score == 1, fields)


@pytest.mark.parametrize(
    ("truths", "answer", "em", "f1"),
    [
        (["Lima"], "Lima", 1, 1),
        (["Lima"], "  LIMA.\n", 1, 1),
        (["Lima"], "Quito", 0, 0),
        (["Lima"], "", 0, 0),
        (["The Beatles"], "beatles", 1, 1),
        (["Beatles"], "an (A) the Beatles!", 1, 1),
        (["Theatre"], "atre", 0, 0),  # no article
        (["B.B. King"], "bb  king", 1, 1),
        (["B.B. King"], "B B King", 0, 0.4),  # 1 word of 2 and 3: 2 / 5
        (["rock'n'roll"], "RocknRoll", 1, 1),
        (["in the city of Lima, Peru"], "Lima", 0, 1 / 3),  # 1 of 5 and 1: 2 / 6
        (["new york new york"], "New York", 0, 2 / 3),  # a word counts as often as it is there
        (["new york"], "york new york new", 0, 2 / 3),
        (["new york new york"], "new new york york city", 0, 8 / 9),
        (["Małgorzata Braunek"], "małgorzata braunek", 1, 1),
        (["Beyoncé"], "Beyonce", 0, 0),
        (["Ÿ"], "ÿ", 1, 1),
        (["“Lima”"], "Lima", 0, 0),  # punctuation is that of ASCII
        (["Quito", "Lima", "city of Lima"], "lima", 1, 1),
        (["Quito", "city of Lima"], "lima", 0, 0.5),
        (["1972"], "December 1972", 0, 2 / 3),
        (["yes"], "Yes.", 1, 1),
        (["yes"], "yes it is", 0, 0),
        (["yes it is"], "yes", 0, 0),
        (["no"], "no, never", 0, 0),
        (["yes", "yes it is"], "yes it was", 0, 2 / 3),
        (["noanswer"], "noanswer", 1, 1),
        (["The The"], "the", 1, 1),  # nothing is left of either
        (["The The"], "them", 0, 0),
    ],
)
def test_exact_match_and_f1(truths, answer, em, f1):
    """Worked out by hand, of the text behind the last tag."""
    for response in (
        f"<answer>{answer}</answer>",
        f"<answer>no</answer> <answer>{answer}</answer> so",
    ):
        for spec, score in (("em", em), ("f1", f1)):
            reward = rewards.reward(spec)(asked(*truths), f"<answer>x</think>{response}")
            assert reward.score == pytest.approx(score)
            assert reward.correct == bool(em)
            assert reward.fields == pytest.approx({"em": em, "f1": f1, "format": 1})


@pytest.mark.parametrize(
    "response", ["Lima", "<answer>Lima", "Lima</answer>", "</answer>Lima<answer>", "",
                 "<answer>Lima</answer></think>"]
)  # fmt: skip
@pytest.mark.parametrize("truth", ["Lima", "The"])
def test_an_answer_without_its_tags_is_none(response, truth):
    for spec in ("em", "f1"):
        none = {"em": 0, "f1": 0, "format": 0}
        assert rewards.reward(spec)(asked(truth), response) == Reward(0, False, none)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "maths",
            "there are math, exact, choice, tagged, em, f1, regex:PATTERN, and FILE.py:FUNCTION",
        ),
        ("regex:(", "no regular expression"),
        ("regex:x", "one group"),
        ("none.py:reward", "reward file 'none.py' does not exist"),
    ],
)
def test_a_reward_that_is_none_is_refused(spec, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        rewards.reward(spec)


def test_a_thought_that_does_not_end_is_no_answer():
    """Else a response that is cut while it thinks would be graded by what it tried last."""
    for response, answer in (
        ("<think>a</think> b ", "b"),
        ("b", "b"),
        ("<think>\\boxed{72} hm", ""),
        ("<think>a</think>so <think>b", "so"),
    ):
        assert rewards.final_part(response) == answer
    asked = Question("q", ("B",), {})
    assert not rewards.reward("choice")(asked, "<think>maybe the answer is B, or").correct
    again = "<think>a</think><think><answer>B</answer>"
    assert not rewards.reward("tagged")(asked, again).correct


def look(what: str) -> str:
    """Looks it up.

    Args:
        what: What to look for.
    """
    return what


@pytest.mark.parametrize("wrapped", [None, Toolbox([look]).for_task, WithReflection])
def test_a_thought_that_the_template_has_begun_is_one(wrapped):
    """Such templates end in `<think>`, so the response has only the end of it."""
    words = templates.of_bytes(templates.THINKING)
    told = [{"role": "user", "content": "?"}]
    for prompt, chat, begun in (("?", False, ""), (told, False, "<think>"), ("?", True, "<think>")):
        words.chats = chat
        asked = Question(prompt, ("B",), {})
        task = questions.Questions([], [], {"exact": (rewards.exact, 1.0)})
        graded = TokenTask(wrapped(task) if wrapped else task, words)
        for text, right in (("B", not begun), ("B</think>A", False), ("A</think>B", True)):
            assert graded.try_reward(asked, text).correct == right
            if wrapped is None:
                said = Trajectory(words.prompt(prompt), words.encode(text), [])
                [[one]] = (group.rewards for group in graded.grade([Group(asked, (said,))]))
                assert one.correct == right


# Functions that were written for this package, for TRL and for verl.

FUNCTIONS = '''
import asyncio
import re
import numpy
from jaxrl_llm.tasks.task import Reward

def ours(example, response):
    return Reward(0.5, False, {"length": len(response)}) if response == example["answer"] else 0

def brevity(example, response):
    return 1 - len(response) / 100

def trl_length(completions, **kwargs):
    return [float(len(set(completion))) for completion in completions]

def trl_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", c) else 0.0 for c in contents]

def trl_column(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]

def trl_none(completions, **kwargs):
    return [None for _ in completions]

async def trl_waits(completions, **kwargs):
    return [0.25 for _ in completions]

def trl_rare(completions, prompts, answer):
    assert len(prompts) == len(answer) == len(completions)
    return [1 / completions.count(one) for one in completions]

def rare(example, responses):
    return [Reward(1 / responses.count(one), False) for one in responses]

def too_few(example, responses):
    return [0.0]

def trl_missing(completions, level):
    return [0.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 0}
    return {"score": 0.75, "acc": solution_str == ground_truth, "pred": "x"}

def verl_nested(solution_str, ground_truth):
    return float(solution_str in ground_truth["names"])

def verl_more(solution_str, extra_info):
    return extra_info.get("index", 1)

def swapped(response, answer):
    return 0

def odd(a, b, c):
    return 0

def text(example, response):
    return "good"

def without_score(example, response):
    return {"reward": 1.0, "acc": 1.0}

def verl_numpy(solution_str):
    return {"score": numpy.float32(0.5), "acc": numpy.int64(1)}

def verl_scalars(solution_str):
    right = numpy.bool_(solution_str == "42")
    return {"score": numpy.array(0.5), "acc": right, "seen": right, "all": numpy.ones(2)}

def verl_verdict(solution_str):
    return {"score": numpy.True_}

def trl_array(completions, **kwargs):
    return numpy.asarray([0.5] * len(completions), numpy.float32)

def takes(example, response):
    return float(response == example.pop("reward_model")["ground_truth"])

def sorts(example, responses):
    example["prompt"].clear()
    responses.sort()
    return [float(response == "a") for response in responses]

def trl_marks(completions, prompts, extra_info):
    for prompt, more in zip(prompts, extra_info, strict=True):
        prompt[-1]["content"] += " (seen)"
        more["index"] += 1
    return [p[-1]["content"].count("seen") + m["index"] for p, m in zip(prompts, extra_info)]

async def waits(example, response):
    await asyncio.sleep(3600 if response == "hangs" else 0)
    return 1.0

def verl_marks(solution_str, extra_info):
    extra_info["index"] += 1
    return extra_info["index"]
'''  # fmt: skip


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    return lambda name: rewards.reward(f"{tmp_path / 'my.py'}:{name}")


def test_truths_that_no_reward_reads_are_a_functions(tmp_path, functions):
    """As Logic-RL's rows have them, or SQuAD's."""
    truth = {"names": ["A"], "solution_text_format": "A is a knight"}
    for row in (
        {"prompt": USER, "reward_model": {"ground_truth": truth}},
        {"question": "q", "answer": truth},
    ):
        source = written(tmp_path, [row])
        [one] = questions.task(source, [f"{tmp_path / 'my.py'}:verl_nested"], held_out=0).train
        assert functions("verl_nested")(one, "A").correct
        with pytest.raises(UserError, match="row 0: an answer is a text or a number"):
            questions.task(source, ["math"])


def test_a_list_that_a_text_shows_is_one_for_what_reads_answers(tmp_path):
    """What a program prints is as it is."""
    source = written(tmp_path, [{"question": "What does it print?", "answer": "['a', 'b']"}])
    for spec, truths in (
        ("exact", ("['a', 'b']",)),
        ("regex:(.*)", ("['a', 'b']",)),
        ("em", ("a", "b")),
    ):
        assert questions.task(source, [spec], held_out=0).train[0].truths == truths
    listed = written(tmp_path, [{"question": "q", "golden_answers": "['a', 'b']"}])
    assert questions.task(listed, ["exact"], held_out=0).train[0].truths == ("a", "b")


def test_functions_are_taken_as_they_are_written(functions, tmp_path):
    plain = Question("6 * 7?", ("42",), {"question": "6 * 7?", "answer": "42"})
    chat = Question(tuple(USER), ("42",), VERL)
    for name, question, response, reward in [
        ("ours", plain, "42", Reward(0.5, False, {"length": 2})),
        ("ours", plain, "4", Reward(0.0, False)),
        ("brevity", plain, "42", Reward(0.98, False)),
        ("trl_length", plain, "abca", Reward(3.0, True)),
        ("trl_format", chat, "<think>a</think><answer>b</answer>", Reward(1.0, True)),
        ("trl_format", chat, "b", Reward(0.0, False)),
        ("trl_column", plain, "42", Reward(1.0, True)),
        ("trl_waits", plain, "", Reward(0.25, False)),
        ("compute_score", chat, "42", Reward(0.75, True, {"acc": 1.0})),
        ("verl_numpy", chat, "", Reward(0.5, True, {"acc": 1.0})),
        ("verl_scalars", chat, "42", Reward(0.5, True, {"acc": 1.0, "seen": 1.0})),
        ("verl_scalars", chat, "41", Reward(0.5, False, {"acc": 0.0, "seen": 0.0})),
        ("verl_verdict", chat, "", Reward(1.0, True)),
        ("trl_array", plain, "", Reward(0.5, False)),
    ]:
        assert functions(name)(question, response) == reward
    assert functions("verl_more")(plain, "") == Reward(1.0, True)  # verl's extra_info is a dict
    assert functions("trl_none")(plain, "") is None
    with pytest.raises(UserError, match="takes level, of which the data have no column"):
        functions("trl_missing")(plain, "")
    with pytest.raises(TypeError, match="returned 'good', which is no number"):
        functions("text")(plain, "")
    with pytest.raises(
        TypeError, match="returned a dict without a score, of reward, acc: give score"
    ):
        functions("without_score")(plain, "")
    with pytest.raises(UserError, match=r"my.py names no function: write it as .*my.py:FUNCTION"):
        rewards.reward(f"{tmp_path / 'my.py'}")
    with pytest.raises(
        UserError, match=r"takes \(a, b, c\): write it as reward\(example, response\)"
    ):
        functions("odd")
    with pytest.raises(UserError, match=r"takes \(response, answer\): write it as reward"):
        functions("swapped")
    with pytest.raises(UserError, match="did you mean 'brevity'"):
        functions("brevty")


@pytest.mark.parametrize("name", ["trl_rare", "rare"])
def test_a_function_may_see_the_group(functions, tmp_path, name):
    source = written(tmp_path, [{"question": "6 * 7?", "answer": "42"}])
    spec = f"{tmp_path / 'my.py'}:{name}"
    made = questions.task(source, ["exact", spec], weights=(1.0, 0.1), held_out=0)
    got = made.rewards(made.train[0], ["42", "41", "42"])
    assert [one.score for one in got] == pytest.approx([1.05, 0.1, 1.05])
    assert [one.fields for one in got] == [
        {"exact": x, name: y} for x, y in ((1, 0.5), (0, 1), (1, 0.5))
    ]
    assert score_groups(made, [made.train[0]], [["41"]])[0][0].score == pytest.approx(0.1)
    few = questions.task(source, [f"{tmp_path / 'my.py'}:too_few"], held_out=0)
    assert score_groups(few, [few.train[0]], [["a", "b"]]) == [[UNGRADED] * 2]
    assert not isinstance(questions.task(source, ["exact"], held_out=0), GradesGroups)


@pytest.mark.parametrize("notebook", [False, True])
def test_a_reward_may_wait_where_an_event_loop_runs(functions, tmp_path, notebook):
    """As one does in a notebook; its time is limited there too."""
    spec = f"{tmp_path / 'my.py'}:waits"
    made = questions.task(written(tmp_path, [VERL]), [spec], held_out=0)
    responses, limit = ["a", "hangs", "b"], RewardSettings(seconds=0.5)
    score = lambda: score_groups(made, made.train, [responses], limit)

    async def cell():
        return score()

    [graded] = asyncio.run(cell()) if notebook else score()
    assert [(one.score, one.graded) for one in graded] == [(1, True), (0, False), (1, True)]


@pytest.mark.parametrize(
    ("name", "scores"),
    [("takes", (0, 0, 1)), ("sorts", (0, 1, 0)), ("trl_marks", (2, 2, 2)), ("verl_marks", (1, 1, 1))],
)  # fmt: skip
def test_a_reward_that_changes_what_it_is_given_changes_no_data(functions, tmp_path, name, scores):
    """Neither those that are trained on nor those that another response, or another reward, is graded by."""
    spec = f"{tmp_path / 'my.py'}:{name}"
    made = questions.task(written(tmp_path, [VERL]), [spec], held_out=0)
    [one], responses = made.train, ["b", "a", "42"]
    for _ in range(2):
        [graded] = score_groups(made, [one], [responses])
        assert [(each.score, each.graded) for each in graded] == [(x, True) for x in scores]
    assert (one.prompt, one.row, responses) == (tuple(USER), VERL, ["b", "a", "42"])


def test_what_has_no_copy_is_handed_on():
    row = {"lock": threading.Lock(), "names": ["a"]}
    copy = rewards.copied(row)
    assert copy["lock"] is row["lock"]
    assert copy["names"] == ["a"]
    assert copy["names"] is not row["names"]


@pytest.mark.parametrize("reward", [lambda example, response: 1.0, [len], 7])
def test_in_python_a_reward_is_named(reward):
    with pytest.raises(UserError, match=r"a reward is a name, .* or FILE\.py:FUNCTION, not "):
        jl.grpo("m", "mine.jsonl", reward=reward)


def test_fields_of_one_name_are_told_apart(tmp_path):
    source = written(tmp_path, [{"question": "q", "answer": "B"}])
    made = questions.task(source, ["exact", "choice", "tagged"], held_out=0)
    [one] = made.train
    assert made.reward(one, "B").fields == {
        "exact": 1.0, "choice": 1.0, "choice_format": 1.0, "tagged": 0.0, "tagged_format": 0.0,
    }  # fmt: skip
    made = questions.task(source, ["em", "f1"], held_out=0)
    both = made.reward(one, "<answer>B or C</answer>").fields
    assert both == {"em": 0.0, "f1": pytest.approx(0.5), "em_format": 1.0, "f1_format": 1.0}


def test_rewards_are_added_by_their_weights_and_each_is_a_field(tmp_path):
    (tmp_path / "my.py").write_text(FUNCTIONS)
    source = written(tmp_path, [{"question": "6 * 7?", "answer": "42"}])
    task = partial(questions.task, held_out=0)
    made = task(source, ["exact", f"{tmp_path / 'my.py'}:brevity"], weights=(1.0, 0.1))
    got = made.reward(made.train[0], "42")
    assert got.score == pytest.approx(1 + 0.1 * 0.98)
    assert (got.correct, got.fields) == (True, {"exact": 1.0, "brevity": 0.98})
    both = [f"{tmp_path / 'my.py'}:{name}" for name in ("trl_none", "brevity")]
    made = task(source, both)  # what says nothing of a question is left out, as TRL does
    got = made.reward(made.train[0], "42")
    assert (got.score, got.fields, got.graded) == (0.98, {"brevity": 0.98}, True)
    assert not task(source, both[:1]).reward(made.train[0], "42").graded
    free = task(written(tmp_path, [{"question": "Sing."}]), [f"{tmp_path / 'my.py'}:brevity"])
    assert free.reward(free.train[0], "la").score == 0.98  # which needs no answer


def test_an_error_in_a_reward_is_said_with_its_line(tmp_path, caplog):
    """Where the function is given as a file, the line is that file's."""
    (tmp_path / "boom.py").write_text(
        "import json\n\ndef reward(example, response):\n    return json.loads(response)\n"
    )
    source = written(tmp_path, [{"question": "6 * 7?", "answer": "42"}])
    made = questions.task(source, [f"{tmp_path / 'boom.py'}:reward"], held_out=0)
    assert score_groups(made, made.train[:1], [["{"]]) == [[UNGRADED]]
    assert f"JSONDecodeError in reward ({tmp_path / 'boom.py'}:4): " in caplog.text


def test_a_column_that_is_named_has_to_be_there(tmp_path):
    """A function may do without an answer, but not where its column is misspelt."""
    (tmp_path / "my.py").write_text("def reward(example, response):\n    return 1.0\n")
    source = written(tmp_path, [{"question": "6 * 7?", "answer": "42"}])
    spec = [f"{tmp_path / 'my.py'}:reward"]
    with pytest.raises(UserError, match="row 0: no truth among question, answer"):
        questions.task(source, spec, answer_column="truth")
    assert questions.task(source, spec, answer_column="answer", held_out=0).train[0].truths == (
        "42",
    )


# The config for tables of questions.


@pytest.mark.slow
def test_a_model_a_file_and_a_reward_are_a_run(tmp_path, capsys):
    """From the command line, with the file's questions for training, validation and the test."""
    public.write_model(tmp_path / "model")
    rows = [{"question": f"{a} {b}", "answer": a} for a in public.WORDS for b in public.WORDS]
    source = written(tmp_path, rows)
    out = tmp_path / "run"
    words = ["train", "grpo", "--model", tmp_path / "model", "--data", source, "--out", out]
    words += [
        "--reward",
        "exact",
        "--instruction",
        "",
        "--steps",
        "2",
        "--prompts",
        "2",
        "--group",
        "2",
    ]
    words += ["--prompt-length", "4", "--length", "4", "--validation", "3", "--no-bfloat16"]
    main([*map(str, words)])
    said = " ".join(capsys.readouterr().out.split())
    assert "chosen to fit: " in said
    assert "55 examples to learn from, 3 to choose the best checkpoint by, 6 to test on" in said
    assert [record["step"] for record in journal.read(out) if "reward" in record] == [1, 2]


def test_what_the_config_leaves_open():
    made = jl.grpo("a/model", "a/set", alpha=0.3, eta=0.5)
    assert made.sizes == {"slots": 0, "microbatches": 0}
    assert made.collate.minibatches == 1
    assert jl.grpo("a/model", "a/set", minibatches=4).collate.minibatches == 4
    assert made.model == jl.Pretrained("a/model", chat=None)
    assert made.loss.stages == 2
    served = jl.grpo("a/model", "a/set", ("math", "exact"), vllm="python", lora=8, length=100)
    assert isinstance(served.engine, jl.Vllm)
    assert served.engine.max_model_len == 612
    assert served.engine.dtype == "bfloat16"
    exact = jl.grpo("a/model", "a/set", vllm="python", bfloat16=False)
    assert isinstance(exact.engine, jl.Vllm)
    assert exact.engine.dtype == "float32"
    with pytest.raises(jl.UserError, match="config has no field 'lengths'; did you mean 'length'"):
        jl.grpo("a/model", "a/set", lengths=3)


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_run_needs_something_to_test_on(name):
    """Of a set at the hub that is known when its splits are."""
    path = shipped() / f"{name}.py"
    make = partial(build, load(path), path, "a/model")
    with pytest.raises(UserError, match=r"^--held-out 0 leaves nothing to test on: .* --test, or"):
        make("mine.jsonl", held_out=0)
    for data, settings in (("mine.jsonl", {"test": "test.jsonl"}), ("a/set", {})):
        assert make(data, held_out=0, **settings)


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m['content'] }}{% endfor %}"]
)
def test_a_chat_template_is_used_where_there_is_one(tmp_path, template):
    public.write_model(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    assert tokenizer.load(tmp_path, chat=None).chats == bool(template)
    assert not tokenizer.load(tmp_path).chats


def test_a_dry_run_shows_a_prompt_by_the_chat_template(tmp_path, capsys):
    public.write_model(tmp_path)
    settings, last = tmp_path / "tokenizer_config.json", public.WORDS[-1]
    template = "{% for m in messages %}{{ m['content'] }} " + last + "{% endfor %}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    rows = [{"question": f"{a} {b}", "answer": a} for a in public.WORDS for b in public.WORDS]
    data = written(tmp_path, rows)
    words = ["train", "grpo", "--model", tmp_path, "--data", data, "--reward", "exact", "--dry-run"]
    words += ["--instruction", "", "--prompt-length", 4, "--length", 4, "--no-bfloat16"]
    main([*map(str, words)])
    shown = capsys.readouterr().out.split("as the model reads it:")[1].split("memory and time")[0]
    assert len(shown.split()) == 3
    assert shown.split()[-1] == last


# What TRL and verl compute themselves, recorded by tests/reference/rewards/make.py.

RECORDED = json.loads((ROOT / "tests" / "golden" / "rewards.json").read_text())


@pytest.mark.parametrize(
    ("file", "names", "chat"),
    [
        ("trl_text.py", ["matches", "length"], False),
        ("trl_chat.py", ["format_reward"], True),
        ("trl_tasks.py", ["math_reward", "code_reward"], False),
        ("verl_plain.py", ["my_reward_fn"], False),
        ("verl_dict.py", ["compute_score"], False),
    ],
)
def test_reward_files_of_others_give_the_numbers_of_others(tmp_path, file, names, chat):
    path, rows = ROOT / "tests" / "reference" / "rewards" / file, []
    for i, row in enumerate(RECORDED["rows"]):
        said = [{"role": "user", "content": row["question"]}]
        verl = {"data_source": "openai/gsm8k" if i % 2 else "mine", "extra_info": {"index": i}}
        asked = {"prompt": said} if chat else {"question": row["question"]}
        rows.append(asked | verl | {name: row[name] for name in ("ground_truth", "task")})
    source = written(tmp_path, rows)
    specs = [f"{path}:{name}" for name in names]
    made = questions.task(source, specs, weights=(1.0, 0.5)[: len(names)], test=source)
    got = [
        made.reward(one, row["said"] or " " * file.startswith("verl"))
        for one, row in zip(made.train, RECORDED["rows"], strict=True)
    ]
    assert [reward.graded for reward in got] == [x is not None for x in RECORDED[file]]
    assert len({*RECORDED[file]}) > 1
    for reward, recorded in zip(got, RECORDED[file], strict=True):
        assert recorded is None or reward.score == pytest.approx(recorded, abs=1e-6)


def test_a_set_of_tensorflow_datasets(tmp_path):
    """In the form of TriviaQA there: text as bytes, lists as arrays, aliases in a mapping."""
    import tensorflow_datasets as tfds

    text, texts = tfds.features.Text(), tfds.features.Sequence(tfds.features.Text())

    class TriviaMini(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            answer = {"value": text, "aliases": texts}
            features = tfds.features.FeaturesDict({"question": text, "answer": answer})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: self._examples(split) for split in ("train", "validation")}

        def _generate_examples(self, split):
            raise NotImplementedError

        def _examples(self, split):
            for i in range(5):
                answer = {"value": f"{i}é", "aliases": [f"{i} e", "x"]}
                yield i, {"question": f"{split} {i}?", "answer": answer}

    TriviaMini(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    tfds.core.add_data_dir(tmp_path)
    task = questions.task("tfds:trivia_mini", ("em",))
    assert sorted(one.prompt for one in task.train) == [f"train {i}?" for i in range(5)]
    assert sorted(one.prompt for one in task.test) == [f"validation {i}?" for i in range(5)]
    one = next(one for one in task.test if one.prompt == "validation 3?")
    assert one.truths == ("3é", "3 e", "x")
    few = questions.task("tfds:trivia_mini:validation", ("em",), test="tfds:trivia_mini:train")
    assert len(few.test) == 5
    assert len(few.train) == 5
    with pytest.raises(UserError, match="has no files of the split 'dev'"):
        questions.task("tfds:trivia_mini:dev", ("em",))
    with pytest.raises(UserError, match="cannot make 'trivia_none' of tensorflow-datasets: "):
        questions.task("tfds:trivia_none", ("em",))
