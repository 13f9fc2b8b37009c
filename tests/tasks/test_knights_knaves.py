import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from jaxrl_llm.tasks.knights_knaves.english import answer
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
from jaxrl_llm.tasks.knights_knaves.logic import canonical_key, to_nested
from jaxrl_llm.tasks.knights_knaves.task import (
    english,
    paper_prompt,
    read_published,
    reward,
    tiny,
    well_formed,
    without,
)
from tests.shared import GOLDEN, reference
from tests.tasks.brute import brute_form

NAMES = ("Ida", "Ola", "Tor")
ROLES = (True, False, True)


def respond(roles):
    return f" so </think>\n<answer>\n{answer(NAMES, roles)}\n</answer>"


def test_reward_reproduces_the_published_scores():
    cases = json.loads((GOLDEN / "kk_reward.json").read_text())
    assert len(cases) == 240
    for case in cases:
        assert case["prompt_tail"].endswith("<think>")  # what `reward` takes for granted
        roles = tuple(line.endswith("a knight") for line in case["solution"].splitlines())
        given = reward(case["names"], roles, case["response"])
        assert given.score == case["score"], case
        assert given.correct == (case["score"] == 3)


@given(st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_only_the_full_solution_is_correct(roles):
    given = reward(NAMES, ROLES, respond(roles))
    assert given.score == (3.0 if roles == ROLES else -0.5)
    assert given.correct == (roles == ROLES)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (respond(ROLES).replace("</think>", ""), -3.0),
        (respond(ROLES) + "<think>", -3.0),
        (respond(ROLES).replace("Ida is a knight", "Ida is no knight"), -1.0),
        (respond(ROLES).replace("</answer>", "and more knights</answer>"), -1.0),
        (respond(ROLES).replace("Ida", "Idabel"), -1.0),
        (respond(ROLES).replace("(1)", "It is false that"), -1.0),
        (respond(ROLES).replace("(2)", "I doubt that (2)"), -1.0),
        (respond(ROLES).replace("</answer>", "All of this is a lie.</answer>"), -1.0),
        (respond(ROLES).replace("Ida is a knight", "Ida is a knight or not"), -1.0),
        (respond(ROLES).replace("Ida is a knight", "<answer>Ida is a knight"), -3.0),
        (respond(ROLES).replace("Ida is a knight", "<b>Ida is a knight"), -1.0),
        (respond(ROLES).replace("(3) Tor is a knight", "(3) Ida is a knave"), -1.0),
        (respond(ROLES).replace("\n(", ", and ("), 3.0),
        (respond(ROLES).replace("(1)", "1.").replace("(2)", "-"), 3.0),
        (respond(ROLES).replace("Ida", "IDA").replace("knight", "Knight"), 3.0),
        ("", -3.0),
    ],
)
def test_scores_of_near_misses(response, score):
    assert reward(NAMES, ROLES, response).score == score


@given(st.permutations(["<think>", "</think>", "<answer>", "</answer>"]))
def test_well_formed_means_in_order(tags):
    expected = tags == ["<think>", "</think>", "<answer>", "</answer>"]
    assert well_formed(" x ".join(tags)) == expected


@pytest.mark.parametrize("build", [english, tiny])
def test_task_demonstrates_what_it_rewards(build):
    recipe = Recipe(tuple(range(2, 9)), 2, 70, 14)
    task = build(*(list(generate(recipe, split)) for split in ("train", "test")))
    assert (len(task.train), len(task.test)) == (70, 14)
    for example in [*task.train, *task.test]:
        prompt, response = task.prompt(example), task.demonstration(example)
        assert prompt.endswith("<think>")
        assert task.reward(example, response).score == 3
        assert task.reward(example, response).fields["people"] == len(example.names)
        assert all(name in prompt for name in example.names)


def test_tiny_task_keeps_the_puzzles():
    puzzles = list(generate(Recipe((3,), 1, 5, 1), "train"))
    task = tiny(puzzles, puzzles)
    assert [p.statements for p in task.train] == [p.statements for p in puzzles]
    assert task.train[0].names == kk_tiny.TINY_NAMES[:3]


@pytest.fixture(scope="module")
def published():
    paths = [reference("data", "kk", f"{split}_3to7.parquet") for split in ("train", "test")]
    rows = [pyarrow.parquet.read_table(path).to_pylist() for path in paths]
    return [(read_published(path), row) for path, row in zip(paths, rows, strict=True)]


def test_published_puzzles_are_read_as_they_are_told(published):
    for puzzles, rows in published:
        for puzzle, row in zip(puzzles, rows, strict=True):
            assert paper_prompt(puzzle) == row["prompt"][0]["content"]
            assert answer(puzzle.names, puzzle.solution) == row["solution_text_format"]
            assert str(tuple(map(to_nested, puzzle.statements))) == row["statements"]


def test_published_train_puzzles_that_are_test_puzzles_renamed_are_left_out(published):
    (train, _), (test, _) = published
    kept = without(train, test)
    held_out = {canonical_key(p.statements) for p in test}
    assert len(kept) < len(train)
    assert not held_out & {canonical_key(p.statements) for p in kept}
    held_out_forms = {brute_form(p.statements) for p in test if len(p.names) <= 4}
    dropped = [p for p in train if canonical_key(p.statements) in held_out]
    assert all(brute_form(p.statements) in held_out_forms for p in dropped if len(p.names) <= 4)


def row(**change):
    statements = "(('telling-truth', 1), ('<=>', ('lying', 0), ('telling-truth', 0)))"
    puzzle = {"quiz": "?", "names": ["A", "B"], "statements": statements}
    return puzzle | {"solution": [False, False]} | change


def write(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_importer_reads_a_file_in_the_published_format(tmp_path):
    (puzzle,) = read_published(write(tmp_path / "p.parquet", row()))
    assert (puzzle.names, puzzle.solution) == (("A", "B"), (False, False))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(solution=[True, True]), "not the only solution"),
        (row(statements="(('telling-truth', 7), ('lying', 0))"), "not in the puzzle"),
        (row(statements="(('says', 1), ('lying', 0))"), "unreadable statements"),
        (row(statements="(('lying', 1"), "unreadable statements"),
        (row(statements="(('lying', 1),)"), "1 statements by 2 people"),
        (row(names=["A"], solution=[True], statements="(('lying', 0),)"), "2 to 8"),
    ],
)
def test_importer_names_the_bad_row(tmp_path, bad, message):
    path = write(tmp_path / "p.parquet", row(), bad)
    with pytest.raises(UserError, match=f"p.parquet, row 1: .*{message}"):
        read_published(path)


def test_importer_refuses_other_files(tmp_path):
    (tmp_path / "no.parquet").write_text("words")
    for path in (tmp_path / "no.parquet", tmp_path / "missing.parquet"):
        with pytest.raises(UserError, match="cannot read"):
            read_published(path)
    with pytest.raises(UserError):
        read_published(write(tmp_path / "other.parquet", {"quiz": "?"}))
