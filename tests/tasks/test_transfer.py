"""Rewards for what another model makes of the beginning of a response."""

import importlib.util
import json
import pathlib
import time
from dataclasses import replace

import numpy as np
import pytest

import jaxrl_llm as jl
from jaxrl_llm.models import tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks import rewards
from jaxrl_llm.tasks.questions import Questions
from jaxrl_llm.tasks.tables import Question
from jaxrl_llm.tasks.task import GradesGroups, RewardSettings, TeacherPrompter, score_groups
from jaxrl_llm.tasks.transfer import Receiver, Transfer, served
from tests import public
from tests.tasks import templates
from tests.tasks.server import Server

WORDS = tokenizer.of_words(["so", "then", *map(str, range(10)), "wrong"])


class Last:
    """Right is a response that ends with the example; a third of a point for each `so`."""

    name, train, test = "last", [1, 2], [3]

    def prompt(self, example):
        return f"then {example}"

    def reward(self, example, response):
        right = response.split()[-1:] == [str(example)]
        return Reward(right + response.count("so") / 3, right, {"so": response.count("so")})


def receiving(said, asked):
    """A receiver that says this, and notes what it was asked."""

    def go_on(prompt, begun):
        asked.append((prompt, begun))
        return [f"{WORDS.decode(part)} {more}" for part, more in zip(begun, said, strict=True)]

    return lambda: Receiver(WORDS, go_on)


def test_a_right_answer_of_the_receiver_is_worth_its_weight():
    """Beside the task's own reward, which alone says what is right; it reads the prompt, and a part each."""
    asked = []
    task = Transfer(Last(), receiving(["1", "wrong", "1"], asked), weight=0.5)
    responses = ["so so 1", "so 1", "then 2"]
    [group] = score_groups(task, [1], [responses], RewardSettings())
    assert group == [
        Reward(1 + 2 / 3 + 0.5, True, {"so": 2, "transfer": 1.0}),
        Reward(1 + 1 / 3, True, {"so": 1, "transfer": 0.0}),
        Reward(0.5, False, {"so": 0, "transfer": 1.0}),
    ]
    [(prompt, begun)] = asked
    assert prompt == WORDS.prompt("then 1")
    for part, whole in zip(begun, map(WORDS.encode, responses), strict=True):
        assert part == whole[: len(part)]
    score_groups(task, [1], [responses], RewardSettings())
    assert asked[1] == asked[0]  # as in a run that goes on
    [[alone]] = score_groups(task, [1], [["so 1"]], RewardSettings())
    assert alone == Last().reward(1, "so 1")
    assert len(asked) == 2


def test_what_the_receiver_has_no_tokens_for_is_worth_nothing_to_it():
    """The other responses are graded, and none ends the run."""
    asked = []
    task = Transfer(Last(), receiving(["1"], asked))
    [group] = score_groups(task, [1], [["\ufffd 1", "so 1"]], RewardSettings())
    assert [one.fields["transfer"] for one in group] == [0.0, 1.0]
    assert [one.score for one in group] == pytest.approx([1.0, 7 / 3])
    [(_, begun)] = asked
    assert len(begun) == 1


def test_a_thought_that_the_receiver_does_not_end_is_no_answer():
    """Its template begins one, so it goes on with the inside of a thought."""
    words = templates.of_bytes(templates.THINKING)
    task = Questions([], [], {"exact": (rewards.exact, 1.0)})
    for said, right in (("B", 0.0), ("</think>B", 1.0)):
        go_on = lambda prompt, begun, said=said: [said for _ in begun]
        made = Transfer(task, lambda go_on=go_on: Receiver(words, go_on))
        group = made.rewards(Question("?", ("B",), {}), ["<think>a", "<think>b"])
        assert [one.fields["transfer"] for one in group] == [right] * 2


def test_what_nobody_could_judge_of_the_receiver_is_ungraded():
    class Unsure(Last):
        def reward(self, example, response):
            return replace(super().reward(example, response), graded="wrong" not in response)

    task = Transfer(Unsure(), receiving(["1", "wrong"], []))
    [group] = score_groups(task, [1], [["so 1", "so so 1"]], RewardSettings())
    assert [one.graded for one in group] == [True, False]


def test_a_receiver_is_not_asked_for_nothing():
    asked = []
    task = Transfer(Last(), receiving([], asked))
    [group] = score_groups(task, [1], [["\ufffd 1", "\ufffd 1"]], RewardSettings())
    assert [one.score for one in group] == [1.0, 1.0]
    assert not asked


def test_the_receiver_is_made_once(monkeypatch):
    made = []

    def receiver():
        made.append(1)
        time.sleep(0.05)
        return receiving(["1", "1"], [])()

    task = Transfer(Last(), receiver)
    groups = score_groups(task, [1] * 4, [["so 1", "1"]] * 4, RewardSettings(threads=4))
    assert [one.fields["transfer"] for group in groups for one in group] == [1.0] * 8
    assert len(made) == 1


def test_cuts_are_uniform_and_of_prompt_number_and_seed():
    task = Transfer(Last(), lambda: pytest.fail("it was made"))
    tokens = [*range(9)]
    counts = np.bincount([len(task.begun("p", i, tokens)) for i in range(9000)], minlength=10)
    assert counts[9] <= 3  # all of it where the draw is 1 alone
    assert ((counts[:9] > 900) & (counts[:9] < 1100)).all()
    lengths = [len(task.begun(p, 0, [*range(10**6)])) for p in ("p", "q")]
    other = len(Transfer(Last(), lambda: None, seed=1).begun("p", 0, [*range(10**6)]))
    assert len({*lengths, other}) == 3


def test_a_transfer_grades_groups_and_keeps_the_prompt_for_a_teacher():
    assert isinstance(Transfer(Last(), lambda: None), GradesGroups)
    told = Last()
    told.teacher_prompt = lambda example: "so"
    assert Transfer(told, lambda: None).teacher_prompt(1) == "so"
    assert not isinstance(Transfer(Last(), lambda: None), TeacherPrompter)


def completions(status, body):
    said = [{"index": i, "text": f" {i}"} for i in range(len(body["prompt"]))]
    return status, json.dumps({"choices": said[::-1]})


@pytest.fixture
def server():
    with Server(200, answer=completions) as made:
        yield made


def test_a_server_goes_on_with_token_ids(server, monkeypatch):
    monkeypatch.setenv("JAXRL_RECEIVER_KEY", "sk-secret")
    receiver = served(server.url, "larger", WORDS, max_tokens=7)
    begun = [WORDS.encode("so then"), []]
    assert receiver.go_on([5, 6], begun) == ["so then 0", " 1"]
    [(path, key, body)] = server.asked
    assert (path, key) == ("/v1/completions", "Bearer sk-secret")
    assert body == {
        "model": "larger",
        "prompt": [[5, 6, *begun[0]], [5, 6]],
        "max_tokens": 7,
        "temperature": 0,
    }
    server.answers = [401]
    with pytest.raises(ConnectionError, match="refuses: status 401") as error:
        receiver.go_on([5], begun)
    assert "sk-secret" not in str(error.value)


def test_the_embedded_engine_goes_on_as_the_model_does(tmp_path):
    """Its own greedy response, cut anywhere, is gone on with to the same end."""
    public.write_model(tmp_path)
    path = pathlib.Path(__file__).parents[2] / "configs" / "rltr.py"
    spec = importlib.util.spec_from_file_location("rltr", path)
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    words, go_on = config.embedded(str(tmp_path), 12)
    model, prompt = jl.load(tmp_path), words.prompt("one two")
    [one] = jl.generate(model, [prompt], jl.Sampling(temperature=0.0, max_tokens=12))
    begun = [one.tokens[:n] for n in range(4)]
    for n, text in enumerate(go_on(prompt, begun)):
        assert text.startswith(one.text)
        assert len(words.encode(text)) == (12 + n if not one.finished else len(one.tokens) - 1)
