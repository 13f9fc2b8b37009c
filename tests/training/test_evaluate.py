"""The figures of an evaluation, against a policy whose answers are known."""

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import evaluate, imitate
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import UNGRADED, Reward
from jaxrl_llm.training.leaving import Stop
from tests import tiny
from tests.rollouts.fake import Scripted

WORDS = tokenizer.of_words([str(i) for i in range(10)])


class Echo:
    """Right is the digit of the prompt; examples below 4 are of group 1, the others of group 2."""

    name = "echo"
    train = test = tuple(range(8))

    def prompt(self, example):
        return str(example)

    def reward(self, example, response):
        if example == 7:
            raise RuntimeError("no reward for 7")
        right = response == str(example)
        return Reward(float(right), right, {"group": 1.0 if example < 4 else 2.0})


def right_for_even(prompt, number):
    """Greedy and every second sample are right where the digit is even; 0 never stops."""
    digit = prompt[0] - 2
    answer = prompt[0] if digit % 2 == 0 and number % 2 == 0 else 2 + (digit + 1) % 10
    return [answer] if digit == 0 else [answer, WORDS.eos]


def evaluated(task):
    sampling = Sampling(temperature=1.0, max_tokens=4, stop=(WORDS.eos,))
    sampler, task = Scripted(right_for_even), TokenTask(task, WORDS)
    return evaluate.evaluate(sampler, task, Echo.test, sampling, samples=4, by="group", stop=Stop())


@pytest.fixture
def result():
    return evaluated(Echo())


def test_shares_by_group(result):
    first, second, total = result.lines
    assert (first.name, first.examples, first.greedy) == ("1", 4, 0.5)
    assert (second.name, second.examples) == ("2", 3)  # the one without a reward has no group
    assert second.greedy == pytest.approx(2 / 3)
    assert total.examples == 7  # nobody knows about the last
    assert total.greedy == 4 / 7
    assert total.mean_k == pytest.approx(2 / 7)
    assert total.pass_k == pytest.approx(4 / 7)
    assert total.score == pytest.approx(4 / 7)
    assert total.truncated == pytest.approx(1 / 7)
    assert result.ungraded == result.metrics()["ungraded"] == 1 + 4
    assert result.metrics()["accuracy/1"] == 0.5
    metrics = result.metrics()
    assert metrics["pass@4"] == total.pass_k
    for name, ends in (("accuracy", total.interval), ("avg@4", total.mean_interval),
                       ("pass@4", total.pass_interval)):  # fmt: skip
        assert (metrics[f"{name}_low"], metrics[f"{name}_high"]) == ends
        assert ends[0] < metrics[name] < ends[1]


@pytest.mark.parametrize(("k", "n", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634),
                                                     (81, 263, 0.2553, 0.3662)])  # fmt: skip
def test_wilson_against_published_values(k, n, low, high):
    """The third is Newcombe's example (Statistics in Medicine, 1998)."""
    assert evaluate.wilson(k, n) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_of_a_mean_sees_that_samples_of_a_prompt_are_alike(result):
    """Whole prompts right or wrong: k samples tell no more than one."""
    rewards = [Reward(0.0, False)] * 20
    alike = _rewards(np.repeat(np.arange(20)[:, None] % 2 == 0, 8, axis=1))
    line = evaluate._line("all", list(range(20)), rewards, _responses(20), alike)
    low, high = line.mean_interval
    assert (low, high) == pytest.approx(evaluate.wilson(10, 20), abs=0.02)
    halves = np.tile(np.arange(8) % 2 == 0, (20, 1))
    halves[0, 0] = False  # prompts more alike than by chance tell no more than all their samples
    line = evaluate._line("all", list(range(20)), rewards, _responses(20), _rewards(halves))
    assert line.mean_interval == pytest.approx(evaluate.wilson(79, 160))
    mixed = _rewards(np.tile(np.arange(8) % 2 == 0, (20, 1)))
    line = evaluate._line("all", list(range(20)), rewards, _responses(20), mixed)
    assert line.mean_interval == pytest.approx(evaluate.wilson(10, 20))


def test_where_nothing_is_checked_nothing_is_known():
    line = evaluate._line("all", [], [UNGRADED] * 2, _responses(2), [[UNGRADED] * 3] * 2)
    assert (line.examples, line.greedy, line.interval) == (0, 0.0, (0.0, 1.0))
    assert (line.mean_k, line.pass_k, line.pass_interval) == (0.0, 0.0, (0.0, 1.0))


def test_unchecked_samples_leave_the_others_of_their_prompt():
    right, wrong = Reward(1.0, True), Reward(0.0, False)
    drawn = [[right, UNGRADED], [right, wrong], [UNGRADED, UNGRADED]]
    line = evaluate._line("all", [0, 1, 2], [right] * 3, _responses(3), drawn)
    assert (line.k, line.mean_k) == (2, 0.75)
    # nobody knows what k samples of the first would have had: pass@k of one sample is another number
    assert (line.pass_k, line.pass_interval) == (1.0, evaluate.wilson(1, 1))
    drawn[0] = [wrong, UNGRADED]
    line = evaluate._line("all", [0, 1, 2], [right] * 3, _responses(3), drawn)
    assert (line.mean_k, line.pass_k, line.pass_interval) == (0.25, 1.0, evaluate.wilson(1, 1))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([20250101.0, 20250102.0, 1234567.0], ["1234567", "20250101", "20250102"]),
        ([0.1, 0.1000001, 1e-07], ["1e-07", "0.1", "0.1000001"]),
        ([2.0, -0.0, 0.0, 1e300], ["0", "2", "1e+300"]),
    ],
)
def test_a_group_is_a_number_and_has_it_as_its_name(values, names):
    task = Echo()
    task.reward = lambda example, response: Reward(
        1.0, True, {"group": values[example % len(values)]}
    )
    lines = evaluated(task).lines
    assert [line.name for line in lines] == [*names, "all"]
    assert sum(line.examples for line in lines[:-1]) == lines[-1].examples == 8


class Unsure(Echo):
    """Nobody knows whether 2 is right: the greedy answer to 2, and every one to 1."""

    def reward(self, example, response):
        if response == "2":
            raise RuntimeError("no reward for 2")
        return super().reward(example, response)


def test_the_samples_of_an_example_count_whose_greedy_response_is_ungraded():
    first, _, total = evaluated(Unsure()).lines
    assert (first.examples, first.greedy) == (2, 0.5)  # 0 and 3
    assert (first.mean_k, first.pass_k) == (pytest.approx(1 / 6), 0.5)  # the mean has 2 as well
    assert (total.examples, total.mean_k) == (5, 0.25)


def _rewards(correct):
    return [[Reward(float(c), bool(c)) for c in row] for row in correct]


def _responses(n):
    return tiny.trajectories([[1]] * n, [[1]] * n)


def test_words_are_tokens_and_survive_a_folder(tmp_path):
    ids = WORDS.encode("3 1 4")
    assert ids == [5, 3, 6]
    assert WORDS.decode([*ids, WORDS.eos]) == "3 1 4"
    WORDS.save(tmp_path)
    again = tokenizer.load(tmp_path)
    assert (again.encode("3 1 4"), again.eos, len(again)) == (ids, WORDS.eos, 12)
    with pytest.raises(UserError, match="cannot read 'eleven'"):
        again.encode("3 eleven")


class Noting(Scripted):
    """Notes how it was asked."""

    def __init__(self):
        super().__init__(right_for_even)
        self.asked = []

    def submit(self, prompts, *, n, sampling, reply=None):
        self.asked.append((n, sampling))
        return super().submit(prompts, n=n, sampling=sampling, reply=reply)


def test_greedy_is_greedy_and_drawn_is_drawn():
    sampler, task = Noting(), TokenTask(Echo(), WORDS)
    sampling = Sampling(temperature=0.7, max_tokens=4, stop=(WORDS.eos,))
    evaluate.evaluate(sampler, task, Echo.test, sampling, samples=4, stop=Stop())
    assert [(n, how.temperature) for n, how in sampler.asked] == [(1, 0.0), (4, 0.7)]


def test_what_comes_before_a_later_context_needs_no_room_in_the_response():
    """A demonstration is cut where the collator would refuse it, and nowhere else."""

    class Played(Echo):
        def environment(self, example, tokenizer):
            raise AssertionError

    class Told(TokenTask):
        def replay(self, examples, turns):
            return [
                Trajectory([1] * 2, [*[2] * 4, *[3] * 4, *[2] * more], [0.0] * (8 + more),
                           turns=[(0, 4), (8, 8 + more)], restarts=[(4, 8)])
                for more in turns
            ]  # fmt: skip

    task = Told(Played(), WORDS)
    made = imitate.demonstrations(task, lambda more: more, 8, [2, 4, 5])
    assert [one.finished for one in made] == [True, True, False]
    assert [one.size for one in made[:2]] == [6, 8]
    Collator(2, 8, pack=True)(made[:2])
    assert len(made[2].tokens) == 8


def test_figures_of_a_supervised_step_are_of_its_updates():
    """A mini-batch without tokens has no loss, and one whose gradient is not finite none to speak of."""
    visits = {"loss": [2.0, np.nan, 0.0], "grad_norm": [1.0, np.nan, 0.0], "share": [0.5, 0.5, 0.0]}
    visits = {name: np.asarray(values) for name, values in visits.items()}
    said = imitate.describe(visits, [])
    assert (said["loss"], said["grad_norm"], said["updates"], said["skipped"]) == (2.0, 1.0, 1, 1)
    said = imitate.describe({name: values[1:] for name, values in visits.items()}, [])
    assert (said["loss"], said["updates"]) == (0.0, 0)


@pytest.mark.parametrize("said", [None, 3, ["1"], [], ["1", None], b"1"])
@pytest.mark.parametrize("turns", [False, True])
def test_a_demonstration_is_a_text_or_the_turns_of_an_episode(said, turns):
    class Played(Echo):
        def environment(self, example, tokenizer):
            raise AssertionError

    made = imitate.demonstration(lambda example: said, Played() if turns else Echo())
    if turns and said == ["1"]:
        assert made(0) == said
        return
    with pytest.raises(
        UserError, match=r"a demonstration cannot be made: TypeError: it is .*, not"
    ) as error:
        made(0)
    assert ("turns" in str(error.value)) == turns


def test_a_demonstration_over_the_limit_is_cut():
    task = TokenTask(Echo(), WORDS)
    made = imitate.demonstrations(task, lambda e: "1 2 3" if e else "1", 2, [0, 1])
    assert [one.finished for one in made] == [True, False]
    assert [len(one.tokens) for one in made] == [2, 2]
