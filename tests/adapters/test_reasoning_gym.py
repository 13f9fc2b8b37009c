"""The puzzles of reasoning-gym: every generator loads, takes its own answers and refuses wrong ones."""

import os
import signal
from contextlib import closing

import pytest

from jaxrl_llm.adapters.reasoning_gym import ReasoningGym, framed, library, tagged
from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.python import confined

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
LENIENT = {"game_of_life_halting"}  # takes any text but one of the two answers for the other one


@pytest.fixture(scope="module")
def sums():
    with closing(ReasoningGym("chain_sum", train=20, test=5, workers=1)) as task:
        yield task


def test_examples_are_repeated_and_those_to_test_are_others(sums):
    with closing(ReasoningGym("chain_sum", train=20, test=5, workers=1)) as again:
        assert list(sums.train) == list(again.train)
    assert not {e.question for e in sums.train} & {e.question for e in sums.test}


def test_a_question_of_the_test_is_not_trained_on():
    settings = {"min_trials": 1, "max_trials": 5}
    with closing(ReasoningGym("coin_flip", train=40, test=40, workers=1, **settings)) as task:
        tested = {puzzle.question for puzzle in task.test}
        known = [puzzle.question for puzzle in map(task._puzzle, range(40))]
        assert tested & {*known}  # so the law has teeth
        trained = [puzzle.question for puzzle in task.train]
    assert not tested & {*trained}
    kept = [(new, old) for new, old in zip(trained, known, strict=True) if old not in tested]
    assert all(new == old for new, old in kept)


def test_the_last_tagged_answer_is_read():
    assert tagged("<answer>0</answer> <answer> 1 </answer> 2</answer>") == "1"
    assert [tagged(text) for text in ("", "<answer>1", "1</answer>")] == [None] * 3


def test_the_verifier_decides(sums):
    example = sums.train[3]
    right = sums.reward(example, f"so <answer>0</answer>, no: <answer> {example.answer} </answer>")
    assert (right.score, right.correct, right.graded) == (1.0, True, True)
    for wrong in (f"<answer>{example.answer}1</answer>", str(example.answer), "<answer></answer>"):
        reward = sums.reward(example, wrong)
        assert (reward.score < 1, reward.correct, reward.graded) == (True, False, True)
    assert sums.reward(example, "nothing").fields == {"answered": 0.0}


def test_a_prompt_asks_for_what_is_read(sums):
    [message] = sums.prompt(sums.train[0])
    assert sums.train[0].question in message["content"]
    assert tagged(framed("?")[0]["content"]) == "..."


def test_what_ends_its_worker_is_unchecked_and_the_next_answer_is_judged(sums):
    example = sums.train[0]
    right = f"<answer>{example.answer}</answer>"
    os.kill(sums._workers._workers[0].process.pid, signal.SIGKILL)
    assert not sums.reward(example, right).graded
    assert sums.reward(example, right).correct


# what a model may write where a verifier evaluates it, in Python
HOSTILE = [
    "[__import__('os').write(i, b'1.0\\n') for i in range(1, 9)]",
    "__import__('os').system('echo 1.0 >&2; touch OUTSIDE')",
    "open('OUTSIDE', 'w')",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os')._exit(0)",
    "input()",
    "exit()",
]


@pytest.mark.parametrize("name", ["binary_matrix", "countdown"])
def test_an_answer_that_is_evaluated_harms_nothing(name, tmp_path):
    """It is wrong, and says nothing of other answers; it is not judged where it ends its judge."""
    outside = tmp_path / "outside"
    with closing(ReasoningGym(name, train=3, test=1, workers=1)) as task:
        one, two, _ = task.train
        for text in HOSTILE:
            reward = task.reward(one, f"<answer>{text.replace('OUTSIDE', str(outside))}</answer>")
            assert (reward.score < 1, reward.correct) == (True, False), text
            assert task.reward(two, f"<answer>{two.answer}</answer>").correct
            assert task.reward(two, "<answer>no</answer>").score < 1
        assert task._puzzle(one.seed) == one
    assert not outside.exists()


def test_an_answer_that_takes_too_long_is_not_judged():
    with closing(ReasoningGym("binary_matrix", train=2, test=1, workers=1, seconds=0.5)) as task:
        [one, _] = task.train
        assert not task.reward(one, "<answer>sum(0 for _ in iter(int, 1))</answer>").graded
        assert task.reward(one, f"<answer>{one.answer}</answer>").correct


def test_puzzles_do_not_depend_on_the_process():
    """Its generator puts variables into a set."""
    with closing(ReasoningGym("polynomial_multiplication", workers=1, train=5)) as task:
        for example in task.train:
            assert task.reward(example, f"<answer>{example.answer}</answer>").correct


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [("sums_of_chains", {}, "sums_of_chains"), ("chain_sum", {"min_terms": 0}, "min_terms")],
)
def test_a_wrong_name_or_setting_is_refused(name, settings, words):
    with pytest.raises(UserError, match=words):
        ReasoningGym(name, **settings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the package needs leaves files open
@pytest.mark.parametrize("quarter", range(4))
def test_every_generator(quarter, tmp_path):
    """All but one that needs others: 100 know an answer, which is right by their verifier."""
    names = sorted(set(library().factory.DATASETS) - {"composite"})
    assert len(names) > 100
    for name in names[quarter::4]:
        made = library().create_dataset(name, size=3, seed=0)
        for entry in made:
            wrong, right = _scores(made, entry, tmp_path)
            assert wrong < 1 or name in LENIENT, name
            assert (entry["answer"] is None) == (name in WITHOUT_ANSWER), name
            assert right == 1 or name in WITHOUT_ANSWER, name


def _scores(made, entry, folder):
    """Of no answer, and of the answer, as the task would have them, and within its limits."""
    scores = []
    for text in ("no such answer", tagged(f"<answer>{entry['answer']}</answer>")):
        judge = lambda text=text: print(f"\nscore {float(made.score_answer(text, entry))}")
        said, _ = confined(judge, str(folder), 5.0, 500.0, 4 << 30)
        # a verifier that cannot read the wrong one says nothing: no score of 1
        scores.append(float(said.rpartition("score ")[2]) if "score " in said else 0.0)
    return scores
