import os
import subprocess
import sys
import tempfile

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks import builders
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.pipeline import Batches

RECIPE = Recipe((2, 3), depth=2, train=40, test=10)
PROBLEMS = [
    Problem("one?", ("1",)),
    Problem("half? \\", (r"\frac{1}{2}", "0.5")),
    Problem("π?", ("\\pi",)),
]


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_built_puzzles_are_the_generated_ones(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    splits = builders.knights_knaves(RECIPE, tmp_path)
    assert not list((tmp_path / "temporary").iterdir())
    for split, source in zip(("train", "test"), splits, strict=True):
        by_question = {p.question: p for p in generate(RECIPE, split)}
        assert {p.question: p for p in source} == by_question
        assert len(source) == len(by_question)


def test_a_built_data_set_is_reused_and_other_recipes_do_not_mix_with_it(tmp_path):
    first = [list(split) for split in builders.knights_knaves(RECIPE, tmp_path)]
    before = files(tmp_path)
    again = [list(split) for split in builders.knights_knaves(RECIPE, tmp_path)]
    assert (again, files(tmp_path)) == (first, before)
    other = Recipe((2, 3), depth=2, train=40, test=10, seed=1)
    assert [list(split) for split in builders.knights_knaves(other, tmp_path)] != first


def test_a_data_set_that_was_half_there_is_built_anew(tmp_path):
    """As it comes out of a bucket while another process stores it."""
    first = [list(split) for split in builders.knights_knaves(RECIPE, tmp_path)]
    [said] = tmp_path.rglob("dataset_info.json")
    said.unlink()
    assert [list(split) for split in builders.knights_knaves(RECIPE, tmp_path)] == first
    assert said.exists()


def test_a_failed_build_leaves_nothing_that_looks_built(tmp_path):
    impossible = Recipe((2,), depth=1, train=20, test=500)
    for _ in range(2):
        with pytest.raises(UserError, match="distinct test puzzles"):
            builders.knights_knaves(impossible, tmp_path)
    assert not list(tmp_path.rglob("*.array_record*"))


def test_an_unusable_data_folder_is_a_one_line_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot build the data set"):
        builders.knights_knaves(RECIPE, tmp_path / "file")


@pytest.mark.slow
def test_a_race_between_two_builds_is_won_by_both(tmp_path):
    command = (
        "import sys; from jaxrl_llm.tasks import builders; "
        "from jaxrl_llm.tasks.knights_knaves.generate import Recipe; "
        "train, test = builders.knights_knaves(Recipe((3,), 1, 400, 100), sys.argv[1]); "
        "print(sum(len(p.question) for p in train))"
    )
    run = [sys.executable, "-c", command, str(tmp_path)]
    both = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1] != ""


def test_a_build_that_another_has_finished_meanwhile_is_opened(tmp_path):
    """It was begun while nothing was there, and so knows nothing of what is."""

    def late():
        builder = builders.MathBuilder(PROBLEMS, PROBLEMS, data_dir=tmp_path)
        if not builder.data_path.exists():
            builders.math_problems(PROBLEMS, PROBLEMS, tmp_path)
        return builder

    train, _ = builders._prepared(late, lambda row: row["question"].decode())
    assert sorted(train) == sorted(p.question for p in PROBLEMS)


def test_configs_cover_each_number_of_people_and_the_mix():
    recipes = {
        name: vars(config)["recipe"].people
        for name, config in builders.KnightsKnavesBuilder.builder_configs.items()
    }
    assert recipes == {f"people{n}": (n,) for n in range(2, 9)} | {"mixed": tuple(range(2, 9))}


def test_built_math_problems_are_the_given_ones(tmp_path):
    train, test = builders.math_problems(PROBLEMS[:2], PROBLEMS[2:], tmp_path)
    assert sorted(train, key=repr) == sorted(PROBLEMS[:2], key=repr)
    assert list(test) == PROBLEMS[2:]
    train, test = builders.math_problems(PROBLEMS[:1], PROBLEMS[2:], tmp_path)
    assert list(train) == PROBLEMS[:1]


def test_built_data_feeds_the_pipeline(tmp_path):
    train, _ = builders.knights_knaves(RECIPE, tmp_path)
    seen = Batches(train, 8, seed=0).draw(len(train))
    assert sorted(seen, key=repr) == sorted(generate(RECIPE, "train"), key=repr)


def test_the_builder_prints_nothing_and_needs_neither_tensorflow_nor_jax(tmp_path):
    command = (
        "import sys; from jaxrl_llm.tasks import builders, knights_knaves, math, task; "
        "from jaxrl_llm.tasks.knights_knaves.generate import Recipe; "
        "builders.knights_knaves(Recipe((3,), 1, 20, 5), sys.argv[1]); "
        "assert not {'tensorflow', 'jax', 'torch'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", command, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
