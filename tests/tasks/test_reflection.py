"""Episodes of two attempts with a reflection between them, and what is learned from them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm.config import Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import Group, TokenTask
from jaxrl_llm.models import tokenizer
from jaxrl_llm.objectives import advantages, recipes
from jaxrl_llm.objectives.token_data import TokenData
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.reflection import WithReflection, reflection_prompt, under, wrong
from jaxrl_llm.tasks.task import NewContext
from jaxrl_llm.tasks.tools import Toolbox
from jaxrl_llm.training import folder, journal, run, terminal
from tests import tiny
from tests.tasks import templates
from tests.training import quick

SAID = ["say", "what", "loud", "known", "said", "no", "yes", "a", "b", "c", "<think>", "</think>"]
WORDS = tokenizer.of_words(SAID)
EOS = WORDS.end("")


class Say:
    """Right is the letter of the example; `loud` before it is worth a tenth of a point more."""

    name, train, test = "say", ["a", "b", "c"], ["a"]

    def prompt(self, example):
        return "say what"

    def reward(self, example, response):
        right = response.split()[-1:] == [example]
        return Reward(
            right + 0.1 * ("loud" in response), right, {"loud": float("loud" in response)}
        )


class Game(Say):
    """As `Say`, in two turns, of which the second counts."""

    def environment(self, example, words):
        task = self

        class Turns:
            turn = 0

            def step(self, tokens):
                self.turn += 1
                reward = task.reward(example, words.decode(tokens))
                return (words.encode("what") if self.turn == 1 else None), reward

        return Turns()


def ask(known, task, attempt, feedback):
    return f"known {known} {task} said {attempt} {feedback}"


def reflecting(task=None, **changes):
    how = {"ask": ask, "feedback": lambda example, attempt, reward: "no"} | changes
    return WithReflection(task or Say(), "loud", **how)


def replayed(task, example, *turns):
    [one] = TokenTask(task, WORDS).replay([example], [turns])
    return one


def ids(text, end=False):
    return [*WORDS.encode(text), *([EOS] if end else [])]


def test_an_episode_by_hand():
    """Attempt, reflection, attempt under what it says, and that attempt once more under the first words."""
    task = reflecting()
    one = replayed(task, "b", "a", "say b", "loud b")
    reading = ids("known loud say what said a no")
    assert [*one.prompt] == ids("loud say what")
    under_new = ids("say b say what")
    whole = [ids("a", True), reading, ids("say b", True), under_new, ids("loud b", True)]
    assert [*one.tokens] == [token for part in whole for token in part]
    ends = np.cumsum([len(part) for part in whole]).tolist()
    assert [*one.restarts] == [(ends[0], ends[1]), (ends[2], ends[3])]
    assert [*one.turns] == [(0, ends[0]), (ends[1], ends[2]), (ends[3], ends[4])]
    assert one.turn_rewards == (0.0, 0.0, 1.1)
    assert one.reward == Reward(1.1, True, {"loud": 1.0, "first": 0.0, "second": 1.1})

    again = task.learned(one, limit=20)
    assert [*again.tokens] == [*one.tokens, *ids("loud say what"), *ids("loud b", True)]
    end = ends[4]
    assert [*again.restarts] == [*one.restarts, (end, end + 3)]
    assert [*again.turns] == [*one.turns, (end + 3, end + 6)]
    assert [*again.turn_rewards] == [0.0, 0.0, 1.1, 1.1]
    assert np.isnan(again.logps).tolist() == [False] * (end + 3) + [True] * 3
    assert task.learned(one, limit=again.length) == again
    assert task.learned(one, limit=again.length - 1) == one  # it has no room
    assert again.segments[3] == (ids("loud say what"), end + 3, end + 6)
    # experts that the sampler chose are those of its own contexts: after another prompt nobody has chosen any
    routed = replace(one, experts=tuple(np.full((n, 2, 1), n, np.int16) for n in (4, 9, 6)))
    batch = Collator(3, 48)([task.learned(routed, limit=20)])
    chosen = batch.inputs.experts[0, 0, :, :, 0, 0]
    assert [[n for n in row if n >= 0] for row in chosen.tolist()] == [
        [4] * 4,
        [9] * 9,
        [6] * 6,
        [],
    ]


def test_what_is_right_at_once_or_ungraded_or_alone_has_no_reflection():
    class Broken(Say):
        def reward(self, example, response):
            return Reward(0.0, False, graded=False)

    for task, example in (
        (reflecting(), "a"),
        (reflecting(Broken()), "b"),
        (reflecting(attempts=1), "b"),
    ):
        one = replayed(task, example, "a", "say b", "b")
        assert not one.restarts
        assert [*one.tokens] == ids("a", True)
        assert task.learned(one, limit=99) == one
    wrong_twice = replayed(reflecting(), "b", "a", "say c", "c")
    assert wrong_twice.reward == Reward(0.0, False, {"loud": 0.0, "first": 0.0, "second": 0.0})
    assert reflecting().learned(wrong_twice, limit=99) == wrong_twice  # worth nothing


def test_what_the_policy_writes_and_no_token_stands_for_ends_the_episode():
    """As ids behind a vocabulary of words: the run goes on."""
    task = reflecting()
    episode = task.environment("b", WORDS)
    reply, _ = episode.step(ids("a", end=True))
    assert reply is not None
    unknown = [len(WORDS) + 1]
    assert "\ufffd" in WORDS.decode(unknown)
    assert episode.step(unknown) == (None, Reward(0.0, False, {"loud": 0.0, "first": 0.0}))


def test_an_attempt_of_several_turns():
    one = replayed(reflecting(Game()), "b", "loud b", "a", "say b", "c", "b")
    reading = ids("known loud say what said loud b what a no")
    assert [*one.tokens[one.restarts[0][0] : one.restarts[0][1]]] == reading
    assert len(one.turns) == 5
    again = reflecting(Game()).learned(one, limit=99)
    start = one.restarts[1][1]
    assert [*again.tokens[len(one.tokens) :]] == [*one.prompt, *one.tokens[start:]]
    assert np.isnan(again.logps[len(one.tokens) + len(one.prompt) :]).tolist() == [
        True, True, False, True, True,
    ]  # fmt: skip
    batch = Collator(16, 32, round_to=8)([again])
    at = batch.turn[0] > 0
    assert batch.segment[0][at].tolist() == [1] * 5 + [2] * 3 + [3] * 4 + [4] * 4
    assert (
        batch.turn[0][at].tolist()
        == [1] * 3 + [2] * 2 + [3] * 3 + [4] * 2 + [5] * 2 + [6] * 2 + [7] * 2
    )


def test_reflections_see_the_last_instructions_that_led_to_a_right_attempt():
    task = reflecting()
    tries = [("b", "a", "say b", "b"), ("c", "a", "say c", "c"), ("c", "a", "say a", "a")]
    groups = [Group(example, (replayed(task, example, *turns),)) for example, *turns in tries]
    assert task.memory == "loud"
    task.remember(groups, WORDS)
    assert task.memory == "say c"  # the third was wrong
    one = replayed(task, "b", "a", "say b", "b")
    assert [*one.tokens[2 : one.restarts[0][1]]] == ids("known say c say what said a no")
    assert [*one.prompt] == ids("loud say what")  # first attempts have the first ones
    other = reflecting()
    other.load_state_dict(task.state_dict())
    assert other.memory == "say c"
    alone = task.evaluated
    assert [*replayed(alone, "b", "a", "say b", "b").tokens] == ids("a", True)
    assert alone.prompt("b") == task.prompt("b")


def test_thoughts_of_a_reflection_are_no_instructions():
    """As everywhere else; a prompt may have begun them."""
    task = reflecting(ask=lambda *_: "known <think>")
    for written, kept in (
        ("yes </think> say b", "say b"),
        ("yes", "loud"),
        ("yes </think>", "loud"),
        ("</think> no <think> yes", "no"),
    ):
        one = replayed(task, "b", "a", written, "b")
        (_, second) = one.restarts
        again = [*one.tokens[slice(*second)]]
        assert again == ids((f"{kept} " if kept != "loud" else "") + "say what")
        task.memory = "loud"
        task.remember([Group("b", (one,))], WORDS)
        assert task.memory == kept


def test_attempts_have_the_tools_that_the_first_prompt_names():
    """In chat templates that tell of them, and for prompts that are texts or messages."""

    def population(city: str) -> str:
        """How many live there.

        Args:
            city: Its name.
        """
        return city

    made, tools = templates.of_bytes(templates.QWEN25), Toolbox([population])
    task = WithReflection(tools.for_task(Say()), "Think twice.")
    text = made.decode(made.prompt(task.prompt("a")))
    assert "population" in text
    assert text.index("Think twice.") < text.index("say what")
    assert text == made.decode(
        made.prompt(under("Think twice.", tools.for_task(Say()).prompt("a")))
    )


def test_prompts():
    assert under("", "ask") == "ask"
    assert under("do", "ask") == "do\n\nask"
    assert under("do", [{"role": "user", "content": "ask"}]) == [
        {"role": "system", "content": "do"},
        {"role": "user", "content": "ask"},
    ]
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "ask"}]
    assert under("do", asked) == [{"role": "system", "content": "do\n\nbe"}, asked[1]]
    text = reflection_prompt("", "2 + {2}?", "5", wrong(None, "5", Reward(0.0, False)))
    for part in ("(none)", "2 + {2}?", "\n5\n", "reward of 0."):
        assert part in text


@pytest.mark.parametrize(
    ("reply", "message"),
    [("later", "has to answer at once"), ("anew", "may not begin contexts of its own")],
)
def test_environments_that_cannot_be_reflected_on_are_refused(reply, message):
    class Odd(Say):
        def environment(self, example, words):
            class Turns:
                async def later(self):
                    return None, Reward(0.0, False)

                def step(self, tokens):
                    if reply == "later":
                        coroutine = self.later()
                        coroutine.close()
                        return coroutine
                    return NewContext([1]), Reward(0.0, False)

            return Turns()

    with pytest.raises(UserError, match=message):
        replayed(reflecting(Odd()), "b", "a")


def by_the_definition(first, second, copied, contexts, alone):
    """Advantages of arXiv:2602.13949 in float64: `second` and `copied` are NaN where there is none."""

    def standardised(scores):
        there = [x for x in scores if not np.isnan(x)]
        if alone:
            return [x / (1 + 1e-6) for x in scores]
        if len(there) < 2 or max(there) == min(there):
            return [0.0] * len(scores)
        return [(x - np.mean(there)) / (np.std(there, ddof=1) + 1e-6) for x in scores]

    one, two = standardised(first), standardised(second)
    rows = []
    for i, row in enumerate(contexts):
        of_second = 0.0 if np.isnan(second[i]) else two[i]
        of = {0: 0.0, 1: one[i], 2: of_second, 3: of_second, 4: max(copied[i], 0.0)}
        rows.append([of[context] for context in row])
    return np.asarray(rows)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_advantages_are_those_of_the_definition(size):
    """Groups of first attempts, and of second ones where there are any; a reflection may be cut."""
    rng = np.random.default_rng(size)
    for _ in range(30):
        first, second, contexts, rewards = [], [], [], []
        for _ in range(size):
            kinds = rng.choice([1, 2, 3, 4])
            first.append(rng.normal())
            second.append(rng.normal() if kinds > 2 else np.nan)
            lengths = rng.integers(1, 4, kinds)
            row = np.repeat(np.arange(1, kinds + 1), lengths)
            contexts.append(np.pad(row, (0, 12 - len(row))))
            # rewards of turns: the last of a context counts
            each = np.where(
                contexts[-1] == 1, first[-1], np.where(contexts[-1] == 2, 0.3, second[-1])
            )
            if lengths[0] > 1:
                each[0] = 9.0
            rewards.append(np.where(contexts[-1] > 0, each, 0.0))
        contexts, rewards = np.asarray(contexts), np.asarray(rewards)
        data = TokenData(
            mask=jax.numpy.asarray(contexts > 0),
            old_logp=jax.numpy.zeros(contexts.shape),
            segment=jax.numpy.asarray(contexts),
            turn_reward=jax.numpy.asarray(rewards, jax.numpy.float32),
        )
        got = advantages.erl(jax.numpy.zeros((1, size)), data)
        expected = by_the_definition(first, second, second, contexts, size == 1)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def quiet():
    return run.Session(console=terminal.console(quiet=True))


class Lucky(Say):
    """Right is a response of an even number of words."""

    train, test = [f"{a} {b}" for a in "abc" for b in "abc"], ["c"]

    def prompt(self, example):
        return f"say {example}"

    def reward(self, example, response):
        right = len(response.split()) % 2 == 0
        return Reward(float(right), right)


@pytest.mark.slow
def test_a_run_that_goes_on_remembers(tmp_path):
    """Bit for bit, its instructions too; validation has first attempts alone."""
    shape = replace(tiny.shape(num_layers=1, max_length=128), vocab_size=12)
    config = replace(
        quick.config(steps=4, warm_steps=0),
        task=lambda folder: reflecting(Lucky()),
        model=Scratch(shape, words=("say", "what", "loud", "known", "said", "no", "yes", *"abc")),
        objective=recipes.erl(64),
        collate=Collator(8, 64, pack=True),
        prompts=4,
        group_size=4,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run.train(config, whole, session=quiet())
    run.train(replace(config, steps=2), parts, session=quiet())
    run.train(config, parts, resume=True, session=quiet())
    read = lambda out: [
        {name: x for name, x in record.items() if not name.startswith("time/")}
        for record in journal.read(out)
        if record["step"] > 2 and "test/step" not in record  # parts has a best one earlier
    ]
    assert read(parts) == read(whole)
    notes = [folder.RunFolder(out).checkpoints().note(4)["task"] for out in (whole, parts)]
    assert notes[0] == notes[1]
    assert notes[0] != {"memory": "loud"}
    records = journal.read(whole)
    assert max(record.get("segments", 0) for record in records) > 1
    assert all("eval/turns" not in record or record["eval/turns"] == 1 for record in records)
