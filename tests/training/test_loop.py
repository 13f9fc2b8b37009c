"""The order of the steps, what is recorded and saved when, and that no batch is lost or learned from twice."""

import json
import math
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxrl_llm import distributed
from jaxrl_llm.config import Config
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.learning.groups import TokenTask, rewards, trajectories
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Reward, RewardSettings
from jaxrl_llm.training import clock, loop, run
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.journal import REINFORCE, WARM_START, Journal
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.loop import Point
from jaxrl_llm.training.stream import Cursor, Stream
from tests import tiny
from tests.rollouts.fake import Scripted
from tests.training.test_evaluate import WORDS
from tests.training.test_evaluate import Echo as Digits


class Echo(Digits):
    """Every response has a reward."""

    def reward(self, example, response):
        return Reward(float(example), True)


class State(NamedTuple):
    """What was learned from, in its order, as a number."""

    params: jax.Array


def learn(state, responses):
    rows = [*(one.prompt for one in responses), *(one.tokens for one in responses)]
    tokens = [token for row in rows for token in row]
    number = (int(state.params) * 31 + sum(i * t for i, t in enumerate(tokens, 1))) % 100_003
    return State(jnp.int32(number))


class Trial:
    """Runs a phase with programs that only count; `log` says what happened in its order.

    `at` is what to do before something of the log happens.
    """

    def __init__(self, folder, *, scores=(), at=None, task=Echo, reply=None, **changes):
        self.log, self.saved, self.stop, self.at, self.task = [], {}, Stop(), at or {}, task
        self.scores, self.demonstrate = dict(scores), str
        self.journal = Journal(folder, rich.console.Console(quiet=True))
        inner = self.journal.record
        self.journal.record = lambda step, *rest: (self.note(f"record {step}"), inner(step, *rest))
        self.config = SimpleNamespace(
            steps=6, last_step=6, warm_steps=0, warm_start=None, prompts=2, group_size=1, seed=0,
            evaluation=SimpleNamespace(every=3),
            collate=None, optimizer=None, objective=None, sampling=Sampling(), order=None, ratios="trainer",
            drop_even_groups=False, redraws=0, oversample=1.0, max_lag=0, most_unchecked=1.0,
            offloads=lambda what: False, saves=lambda step: step % 2 == 0,
        )  # fmt: skip
        vars(self.config).update(changes)
        self.config.last_step = self.config.steps
        self.config.draws_more = Config.draws_more.fget(self.config)
        imitation = SimpleNamespace(batch=list, update=lambda *args: self.update(*args))
        step = SimpleNamespace(
            batch=lambda groups: (trajectories(groups), rewards(groups)),
            score=lambda params, batch: ({}, {}),
            credit=lambda batch, reward: batch,
            update=lambda *args: self.update(*args),
            look=lambda *_: {},
        )
        self.components = SimpleNamespace(
            config=self.config, token_task=lambda *_: TokenTask(task(), WORDS),
            sampling=lambda: Sampling(stop=(WORDS.eos,)), policy=None, collator=lambda _: None, mesh=None,
            initial_params=lambda: jnp.int32(0), frozen=None, merged=lambda params: params, task=None,
            step=lambda *_: step, imitation=lambda *_: imitation,
        )  # fmt: skip
        self.sampler = Scripted(reply or (lambda prompt, number: [prompt[0], WORDS.eos]))
        self.sampler.counters, self.sampler.sync = {}, {}
        for name in ("push", "release", "generate"):
            setattr(self.sampler, name, partial(self._sampler, name, getattr(self.sampler, name)))

    def note(self, event):
        self.log.append(event)
        self.at.get(event, lambda: None)()

    def _sampler(self, name, inner, *args, **how):
        self.note(f"push {args[1]}" if name == "push" else name)
        return inner(*args, **how)

    def update(self, state, responses):
        self.note(f"learn {self.log.count('learn') + 1}")
        return learn(state, responses), {}

    def save(self, step, state, cursor):
        self.note(f"save {step}")
        note = json.loads(json.dumps(run._noted(cursor)))
        self.saved[step] = (state, run._cursor(note))

    def evaluate(self, phase, step):
        self.note(f"evaluate {step}")
        score = self.scores.get(step, 0.0)
        self.journal.record(step, phase, {"eval/accuracy": score})
        return score

    def reinforce(self, start=0):
        with self.journal:
            self.journal.start(after=start.step if isinstance(start, Point) else -1)
            loop.reinforcement(
                self.components, self.task.train, self.sampler, self.journal, self.stop, start,
                jnp.int32(0), None, clock=Clock(), save=self.save, evaluate=partial(self.evaluate, REINFORCE),
                show=lambda *_: None,
            )  # fmt: skip
        return self

    def imitate(self, start=None):
        collate = SimpleNamespace(response_length=5)
        self.config.warm_start = SimpleNamespace(
            steps=5, evaluate_every=3, batch=2, optimizer=None, collate=collate, demonstration=self.demonstrate
        )  # fmt: skip
        with self.journal:
            self.journal.start(after=start.step if start else -1)
            return loop.warm_start(
                self.components, Echo.train, self.sampler, self.journal, self.stop, start,
                clock=Clock(), save=self.save, evaluate=partial(self.evaluate, WARM_START),
            )  # fmt: skip

    @property
    def last(self):
        """Where it can go on: the newest of what was saved."""
        step = max(self.saved)
        return step, *self.saved[step]


def figures(made):
    """What was recorded, but the clock, and how old a batch was: one that was dropped is sampled anew."""
    timed = lambda name: name == "lag" or name.startswith("time/")
    return [{k: v for k, v in r.items() if not timed(k)} for r in made.journal.records]


@pytest.fixture(autouse=True)
def trial(tmp_path, monkeypatch):
    trials = []

    def make(**how):
        trials.append(Trial(tmp_path, **how))
        return trials[-1]

    monkeypatch.setattr(
        loop.reinforce, "describe_update", lambda visits, described, host: {"updates": 1, **host}
    )
    monkeypatch.setattr(loop.imitate, "describe", lambda visits, cut: {"updates": 1, "cut": cut})
    monkeypatch.setattr(loop.update, "init_state", lambda params, *_, **__: State(params))
    return make


def test_the_order_of_a_run(trial):
    """Records come a step late, but before an evaluation and a save; the best is saved whenever it is found."""
    log = trial(scores={0: 0.9, 3: 0.5, 6: 0.4}).reinforce().log
    skipped = [event for event in log if event not in ("generate", "release")]
    assert ", ".join(skipped).replace("learn 1", "learn") == (
        "save 0, push 0, evaluate 0, record 0, learn, push 1, learn, record 1, push 2, record 2, save 2, "
        "learn, push 3, record 3, evaluate 3, record 3, save 3, learn, push 4, record 4, save 4, "
        "learn, push 5, learn, record 5, push 6, record 6, evaluate 6, record 6, save 6"
    )


@pytest.mark.parametrize(("phase", "first", "step"), [("reinforce", 0, 1), ("imitate", 3, 4)])
def test_the_start_of_servers_is_of_no_step(trial, phase, first, step, monkeypatch):
    """They start at the first push."""
    taken = []
    now = lambda: time.perf_counter() + sum(taken)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=now))
    made = trial(at={f"push {first}": lambda: taken.append(1e4)})
    getattr(made, phase)()
    [found] = [r for r in made.journal.records if r["step"] == step and "time/step" in r]
    assert found["time/start"] >= 1e4
    assert found["time/step"] + found["time/other"] < 1e4


@pytest.mark.parametrize("score", [0.0, 0.5])
def test_what_is_as_good_as_the_best_is_not_saved_for_it(trial, score):
    made = trial(scores={3: 0.5, 6: 0.9, 9: 0.9}, steps=9, saves=lambda step: step == 9).reinforce()
    assert [*made.saved] == [0, 3, 6, 9]
    made = trial(scores={3: 0.5, 6: score}, steps=7, saves=lambda step: step == 7).reinforce()
    assert [*made.saved] == [0, 3, 7]


def test_a_start_beyond_the_end_is_the_end(trial):
    """Whoever has let it in: it would else go on for ever."""
    made = trial(steps=2, at={"learn 3": pytest.fail})
    made.reinforce(Point(REINFORCE, 5, State(jnp.int32(0))))
    assert "learn 1" not in made.log


@pytest.mark.parametrize(("seconds", "saved"), [(-1.0, range(7)), (1e9, [0, 3, 6])])
def test_saves_by_time(trial, seconds, saved):
    """Where it is time at each step, and where it never is: at the evaluations that are the best so far."""
    made = trial(steps=6, saves=lambda step: step == 6)
    made.stop.save_seconds = seconds
    assert [*made.reinforce().saved] == [*saved]


def leave(made):
    """A signal: work that looks at it is dropped."""
    made.stop.ask()
    raise StopRequested


def fail(made):
    raise UserError("no server answers")


def hear(made):
    """A signal while nobody looks."""
    made.stop.ask()


DROPPED = [
    ("generate", 0),
    ("generate", 2),
    ("generate", 5),
    ("push 2", 0),
    ("evaluate 3", 0),
    ("evaluate 6", 0),
]
HEARD = [
    ("learn 1", 0),
    ("record 3", 0),
    ("save 4", 0),
    ("push 2", 0),
    ("generate", 2),
    ("evaluate 6", 0),
]


class Even(Echo):
    """Of even examples both responses have the same reward."""

    train = tuple(range(10))

    def reward(self, example, response):
        return Reward(float(example % 2 and len(response) > 1), True)


def both(prompt, number):
    return [prompt[0], *[prompt[0]] * number, WORDS.eos]


def redrawn(**how):
    return {"group_size": 2, "task": Even, "reply": both, **how}


@pytest.mark.parametrize(
    ("redraws", "oversample", "ahead"),
    [(0, 1, 0), (0, 1, 1), (1, 1, 0), (1, 1, 1), (9, 1, 0), (9, 1, 1), (0, 2.5, 0), (1, 2, 0), (9, 2.5, 0)],
)  # fmt: skip
def test_groups_of_equal_rewards_give_way_to_the_next_prompts(trial, redraws, oversample, ahead):
    """Two groups a step; those that are left over are the first of the next step."""
    how = redrawn(redraws=redraws, max_lag=ahead, oversample=oversample)
    made = trial(**how, steps=12, saves=lambda step: True)
    learned, surplus = [], []
    made.update = lambda state, made: (learned.append(made), (learn(state, made), {}))[1]
    made.reinforce()
    stream = data(Even.train, seed=1)
    records = [r for r in made.journal.records if "reward" in r]
    for responses, record in zip(learned, records, strict=True):
        every = stream.draw(math.ceil(oversample * (2 - len(surplus))))
        pool = surplus + every
        for _ in range(redraws):
            if (missing := 2 - sum(e % 2 for e in pool)) > 0:
                more = stream.draw(math.ceil(oversample * missing))
                every, pool = every + more, pool + more
        order = sorted(range(len(pool)), key=lambda i: (pool[i] % 2 == 0, i))
        kept = [pool[i] for i in sorted(order[:2])]
        prompts = [one.prompt[0] - 2 for one in responses]
        assert prompts == [e for e in kept for _ in range(2)]
        assert [len(one.tokens) for one in responses] == [2, 3, 2, 3]
        odd = [e % 2 for e in every]
        assert record["reward"] == sum(odd) / len(odd) / 2
        assert record["even_groups"] == pytest.approx(1 - sum(odd) / len(odd))
        if redraws or oversample > 1:
            assert record["drawn"] == len(every)
            assert record["learned/reward"] == sum(e % 2 for e in kept) / 4
            assert record["learned/even_groups"] == sum(e % 2 == 0 for e in kept) / 2
        else:
            assert not {"drawn", "learned/reward"} & set(record)
        if not ahead:
            assert record["lag"] == (len(surplus) > 0)
        surplus = [pool[i] for i in order[2:] if pool[i] % 2][:1] if oversample > 1 else []
    if redraws == 9:
        assert all(r["learned/even_groups"] == 0 for r in records)
    assert stream.get_state() == made.last[2].data
    assert oversample == 1 or any(r["lag"] for r in records)


EARLY = [(0, {}), (1, {}), (3, {}), (0, redrawn(redraws=2)), (1, redrawn(redraws=2))]
EARLY += [(0, redrawn(redraws=1, oversample=2.0))]


@pytest.mark.parametrize(
    ("event", "nth", "happens"),
    [(*one, happens) for happens in (leave, fail) for one in DROPPED]
    + [(*one, hear) for one in HEARD],
)
@pytest.mark.parametrize(("ahead", "how"), EARLY)
def test_a_run_that_ends_early_goes_on_to_the_same(trial, how, event, nth, happens, ahead):
    how = {"scores": {3: 0.5}, "max_lag": ahead, **how}
    whole = trial(**how).reinforce()
    expected, made, calls = figures(whole), trial(**how), iter(range(100))
    made.at[event] = lambda: happens(made) if next(calls) == nth else None
    try:
        made.reinforce()
    except (StopRequested, UserError):
        step, state, cursor = made.last
        again = trial(**how)
        again.reinforce(Point(REINFORCE, step, state, cursor))
        again.saved = made.saved | again.saved
        made = again
    assert int(made.last[1].params) == int(whole.last[1].params)
    assert figures(made) == expected


def test_a_signal_loses_no_step(trial):
    made = trial(saves=lambda step: step == 6)
    made.at["push 5"] = made.stop.ask
    with pytest.raises(StopRequested):
        made.reinforce()
    assert [*made.saved] == [0, 3, 5]  # the best, and on the way out


@pytest.mark.parametrize("here", [True, False])
def test_a_push_is_left_by_all_if_one_is_asked_to_stop(trial, monkeypatch, here):
    """Here, where the wait for servers is cut short, or elsewhere; the step is whole, and so is its record."""
    made, said = trial(saves=lambda step: step == 6), []
    elsewhere = lambda: "" if here or "push 5" not in made.log else "leave"
    monkeypatch.setattr(distributed, "agree", lambda word: said.append(word) or [elsewhere(), word])
    made.at["push 5"] = (lambda: leave(made)) if here else (lambda: None)
    with pytest.raises(StopRequested):
        made.reinforce()
    assert made.log[made.log.index("push 5") :] == ["push 5", "record 5", "save 5"]
    assert [word for word in said if word] == ["leave"] * here
    assert "time/step" in made.journal.records[-1]


def test_a_signal_while_the_reward_is_tried_waits_for_where_all_agree():
    """The first process alone tries it: if it left there, the others would go on without it."""
    stop = Stop()
    stop.ask()
    token_task = lambda stop_requested: TokenTask(
        Echo(), WORDS, RewardSettings(stop_requested=stop_requested)
    )
    config = SimpleNamespace(warm_start=None)
    made: Any = SimpleNamespace(config=config, task=Echo(), token_task=token_task)
    run._try_reward(made, Echo.train[0], None, stop)  # pyright: ignore[reportArgumentType]
    assert stop.asked


ERRORS = [FileNotFoundError(2, "gone", "data.jsonl"), ZeroDivisionError("by zero"), SystemExit(0)]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_a_task_raises_where_no_reward_is_due_costs_no_step(trial, error):
    class Raises(Echo):
        def prompt(self, example):
            if "record 4" in made.log:
                raise error
            return super().prompt(example)

    made = trial(task=Raises, saves=lambda step: step == 6)
    with pytest.raises(UserError, match=f"a prompt cannot be made: {type(error).__name__}"):
        made.reinforce()
    assert [*made.saved] == [0, 3, 5]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_a_demonstration_raises_costs_no_step(trial, error):
    def demonstrate(example):
        if "record 3" in made.log:
            raise error
        return str(example)

    made = trial(saves=lambda step: step == 6)
    made.demonstrate = demonstrate
    with pytest.raises(UserError, match=f"a demonstration cannot be made: {type(error).__name__}"):
        made.imitate()
    assert [*made.saved] == [4]


def test_a_state_that_another_step_has_consumed_is_not_saved(trial):
    made = trial(saves=lambda step: step == 6)

    def update(state, responses):
        if "save 3" in made.log:
            state.params.delete()
            raise UserError("in the middle of an update")
        return learn(state, responses), {}

    made.update = update
    with pytest.raises(UserError, match="in the middle"):
        made.reinforce()
    assert [*made.saved] == [0, 3]


def test_a_warm_start_keeps_no_copy_of_the_policy_beyond_an_evaluation(trial):
    log = (made := trial()).log
    assert int(made.imitate()) > 0
    assert ", ".join(log).replace("learn 1", "learn") == (
        "learn, record 1, learn, record 2, save 2, learn, record 3, push 3, evaluate 3, record 3, release, "
        "learn, record 4, save 4, learn, record 5"
    )


@pytest.mark.parametrize("event", ["record 2", "evaluate 3", "record 5"])
@pytest.mark.parametrize("happens", [fail, hear])
def test_a_warm_start_that_ends_early_goes_on_to_the_same(trial, event, happens):
    whole = trial().imitate()
    made = trial()
    calls = iter(range(100))
    made.at[event] = lambda: happens(made) if next(calls) == 0 else None
    try:
        found = made.imitate()
    except (StopRequested, UserError):
        step, state, cursor = made.last
        assert step < 5  # whose checkpoint is that of reinforcement
        found = trial().imitate(Point(WARM_START, step, state, cursor))
    assert int(found) == int(whole)


# The stream of batches.


def data(source=range(20), seed=3):
    return Batches(source, 2, seed=seed)


def answer(step, examples):
    made = tiny.trajectories(
        [[e] for e in examples], [[step, e] for e in examples], [[-0.1] * 2] * 2, [True, False],
        version=[step] * 2,
    )  # fmt: skip
    return tiny.groups(made, n=1, examples=examples)


def taken(stream, step):
    """The examples of the next batch, each with what was answered."""
    groups = stream.take(step, stream.examples(2))
    return [(group.example, *group.trajectories) for group in groups]


def test_a_stream_goes_on_from_its_cursor_with_what_was_sampled_ahead():
    whole, stream = Stream(data(), answer), Stream(data(), answer)
    made = []
    for step in range(3):
        made.append(taken(whole, step))
        assert taken(stream, step) == made[-1]
        stream.advance()
        stream.begin(step + 1)
        stream.settle()
    unused = lambda step, examples: pytest.fail("sampled again")
    reached = stream.cursor()
    assert taken(Stream(data(), unused, cursor=reached), 3) == taken(whole, 3)
    taken(stream, 3)  # and not learned from
    assert stream.cursor() == reached
    stream.advance()
    assert stream.cursor().ahead == ()
    after = Stream(data(), answer, cursor=stream.cursor())
    assert taken(after, 4) == taken(whole, 4)


def test_several_batches_ahead_go_on_from_the_first_that_was_dropped():
    """Those before it are kept, with the position of each; one that is learned from is not."""

    def stopped(step, examples):
        if step > 2:
            raise StopRequested
        return answer(step, examples)

    whole, stream = Stream(data(), answer), Stream(data(), stopped)
    stream.begin(0, 4)
    stream.settle()
    assert (taken(stream, 0), stream.ahead) == (taken(whole, 0), 3)
    stream.advance()
    cursor = stream.cursor()
    assert len(cursor.ahead) == 2
    again = Stream(data(), answer, cursor=cursor)
    for step in range(1, 6):
        assert taken(again, step) == taken(whole, step)
        again.advance()
    assert again.cursor() == Cursor({**data().get_state(), "taken": 12})


def test_the_next_batch_is_sampled_while_the_caller_goes_on():
    entered, leave = threading.Event(), threading.Event()

    def slow(step, examples):
        entered.set()
        assert leave.wait(300)
        return answer(step, examples)

    stream = Stream(data(), slow)
    stream.begin(0)
    assert entered.wait(300)
    leave.set()
    stream.settle()
    assert taken(stream, 0)[0][1].tokens[0] == 0


@pytest.mark.parametrize("error", [ValueError("step 7"), StopRequested()])
def test_what_goes_wrong_in_the_background_is_raised_and_leaves_the_cursor_before_it(error):
    def broken(step, examples):
        raise error

    stream = Stream(data(), broken)
    stream.begin(7)
    if isinstance(error, StopRequested):
        stream.settle()
    else:
        with pytest.raises(ValueError, match="step 7"):
            stream.settle()
    assert stream.cursor() == Cursor(data().get_state())


def test_responses_are_brought_together_once():
    calls = []
    whole = lambda examples, groups: (calls.append(len(examples)), groups)[1]
    stream = Stream(data(), answer, whole=whole)
    stream.begin(0)
    stream.settle()
    cursor = stream.cursor()
    for made in (stream, Stream(data(), answer, cursor=cursor, whole=whole)):
        taken(made, 0)
        made.advance()
        made.cursor()
    assert calls == [2]
