"""The order of the steps, what is recorded and saved when, and that no batch is lost or learned from twice."""

import json
import random
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import rich.console

from jaxrl_llm import distributed
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.learning.groups import Group, TokenTask, rewards, trajectories
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Reward, RewardSettings
from jaxrl_llm.training import alarms, clock, phases, run
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.journal import REINFORCE, Journal
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.log import RunLog
from jaxrl_llm.training.phases import Imitation, Reinforcement, Resumed
from jaxrl_llm.training.run import Run
from jaxrl_llm.training.stream import Rollouts
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
        self.log, self.saved, self.stop, self.at = [], {}, Stop(), at or {}
        self.scores, self.demonstrate, self.task = dict(scores), str, task
        self.journal = Journal(folder, rich.console.Console(quiet=True))
        inner = self.journal.record
        self.journal.record = lambda step, *rest: (self.note(f"record {step}"), inner(step, *rest))
        config = SimpleNamespace(
            steps=6, last_step=6, warm_steps=0, warm_start=None, prompts=2, group_size=1, seed=0,
            evaluation=SimpleNamespace(every=3), optimizer=None, max_resamples=0, max_lag=0, keep_tokens=0,
            show_samples_every=0, keeps_reference=False, offloads=lambda what: False,
            saves=lambda step: step % 2 == 0, loss=SimpleNamespace(reads=lambda field: False),
        )  # fmt: skip
        vars(config).update(changes)
        config.last_step = config.steps
        programs = SimpleNamespace(
            credit=lambda batch, reward: batch, update=lambda *args, frozen: self.update(*args)
        )
        imitation = SimpleNamespace(batch=list, programs=programs, frozen=None)
        step = SimpleNamespace(
            batch=lambda groups: (trajectories(groups), rewards(groups)),
            score=lambda params, batch, groups: ({}, {}),
            programs=programs,
            frozen=None,
            token_stats=lambda *_: {},
        )
        splits = SimpleNamespace(train=task.train, parts=())
        components: Any = SimpleNamespace(
            config=config, token_task=self.token_task, task=task(),
            sampling=lambda: Sampling(stop=(WORDS.eos,)), splits=splits,
            initial_params=lambda: jnp.int32(0), merged=lambda params: params,
            step=lambda *_: step, imitation=lambda *_: imitation, as_learned=list, data=Path("data"),
        )  # fmt: skip
        sampler: Any = Scripted(reply or (lambda prompt, number: [prompt[0], WORDS.eos]))
        for name in ("push", "release", "submit"):
            setattr(sampler, name, partial(self._sampler, name, getattr(sampler, name)))
        log = RunLog(self.journal, Clock())
        checkpoints: Any = SimpleNamespace(save=self.save, wait=lambda: None, steps=[])
        rollouts = Rollouts(components, sampler, log, self.stop)
        folder, self.noted = RunFolder(folder), 0
        folder.note_saved = lambda: setattr(self, "noted", len(self.saved))
        self.run = Run(components, folder, checkpoints, log, rollouts, self.stop, None, None)
        self.run.validate = self.validate

    def note(self, event):
        self.log.append(event)
        self.at.get(event, lambda: None)()

    def token_task(self, heartbeat=lambda: None, stop_requested=lambda: False):
        settings = RewardSettings(2, 60.0, heartbeat, stop_requested)
        return TokenTask(self.task(), WORDS, settings)

    def _sampler(self, name, inner, *args, **how):
        self.note(f"push {args[1]}" if name == "push" else name)
        return inner(*args, **how)

    def update(self, state, responses):
        self.note(f"learn {self.log.count('learn') + 1}")
        return learn(state, responses), {}

    def save(self, step, state, note):
        self.note(f"save {step}")
        self.run.checkpoints.steps.append(step)
        self.saved[step] = (state, json.loads(json.dumps(note)))

    def validate(self, phase, step):
        self.note(f"evaluate {step}")
        score = self.scores.get(step, 0.0)
        self.journal.record(step, phase, {"eval/accuracy": score})
        return score, 0.0

    def reinforce(self, resumed=None):
        start = jnp.int32(0) if resumed is None else resumed
        with self.journal:
            self.journal.start(after=resumed.step if resumed else -1)
            run = self.run
            run.fit(Reinforcement(run.components, run.rollouts, run.folder, start))
        return self

    def imitate(self, resumed=None):
        collate = SimpleNamespace(response_length=5)
        self.run.components.config.warm_steps = 5
        self.run.components.config.warm_start = SimpleNamespace(
            steps=5, evaluate_every=3, batch=2, optimizer=None, collate=collate, demonstration=self.demonstrate
        )  # fmt: skip
        with self.journal:
            self.journal.start(after=resumed.step if resumed else -1)
            phase = Imitation(self.run.components, self.run.rollouts, resumed, self.stop)
            return self.run.fit(phase).params

    @property
    def last(self):
        """Where it can go on: the newest of what was saved."""
        step = max(self.saved)
        state, note = self.saved[step]
        return Resumed(note["phase"], step, state, note)


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
        phases.reinforce, "describe_update", lambda visits, described, host: {"updates": 1, **host}
    )
    monkeypatch.setattr(phases.imitate, "describe", lambda *_: {"updates": 1})
    monkeypatch.setattr(phases.update, "init_state", lambda params, *_, **__: State(params))
    return make


def test_the_order_of_a_run(trial):
    """Records come a step late, but before an evaluation and a save; the best is saved whenever it is found."""
    log = trial(scores={0: 0.9, 3: 0.5, 6: 0.4}).reinforce().log
    skipped = [event for event in log if event not in ("submit", "release")]
    assert ", ".join(skipped).replace("learn 1", "learn") == (
        "save 0, push 0, evaluate 0, record 0, learn, push 1, learn, record 1, record 2, save 2, "
        "push 2, learn, record 3, push 3, evaluate 3, record 3, save 3, learn, record 4, save 4, "
        "push 4, learn, push 5, learn, record 5, record 6, push 6, evaluate 6, record 6, save 6"
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
    made.reinforce(Resumed(REINFORCE, 5, State(jnp.int32(0)), {"data": data().get_state()}))
    assert "learn 1" not in made.log


@pytest.mark.parametrize(("seconds", "saved"), [(-1.0, range(7)), (1e9, [0, 3, 6])])
def test_saves_by_time(trial, seconds, saved):
    """Where it is time at each step, and where it never is: at the evaluations that are the best so far."""
    made = trial(steps=6, saves=lambda step: step == 6)
    made.stop.save_seconds = seconds
    assert [*made.reinforce().saved] == [*saved]


def leave(made):
    """A signal: work that looks at it is dropped."""
    made.stop.request()
    raise StopRequested


def fail(made):
    raise UserError("no server answers")


def hear(made):
    """A signal while nobody looks."""
    made.stop.request()


DROPPED = [
    ("submit", 0),
    ("submit", 2),
    ("submit", 5),
    ("push 2", 0),
    ("evaluate 3", 0),
    ("evaluate 6", 0),
]
HEARD = [
    ("learn 1", 0),
    ("record 3", 0),
    ("save 4", 0),
    ("push 2", 0),
    ("submit", 2),
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


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("max_resamples", [0, 1, 9])
def test_groups_of_equal_rewards_give_way_to_the_next_prompts(trial, max_resamples, ahead):
    """Two groups a step."""
    how = redrawn(max_resamples=max_resamples, max_lag=ahead)
    made = trial(**how, steps=12, saves=lambda step: True)
    learned = []
    made.update = lambda state, made: (learned.append(made), (learn(state, made), {}))[1]
    made.reinforce()
    stream = data(Even.train)
    records = [r for r in made.journal.records if "reward" in r]
    for responses, record in zip(learned, records, strict=True):
        every = stream.draw(2)
        for _ in range(max_resamples):
            if (missing := 2 - sum(e % 2 for e in every)) > 0:
                every = every + stream.draw(missing)
        order = sorted(range(len(every)), key=lambda i: (every[i] % 2 == 0, i))
        kept = [every[i] for i in sorted(order[:2])]
        prompts = [one.prompt[0] - 2 for one in responses]
        assert prompts == [e for e in kept for _ in range(2)]
        assert [len(one.tokens) for one in responses] == [2, 3, 2, 3]
        odd = [e % 2 for e in every]
        assert record["reward"] == sum(odd) / len(odd) / 2
        assert record["constant_groups"] == pytest.approx(1 - sum(odd) / len(odd))
        if max_resamples:
            assert record["drawn"] == len(every)
            assert record["learned/reward"] == sum(e % 2 for e in kept) / 4
            assert record["learned/constant_groups"] == sum(e % 2 == 0 for e in kept) / 2
        else:
            assert not {"drawn", "learned/reward"} & set(record)
        assert ahead or record["lag"] == 0
    if max_resamples == 9:
        assert all(r["learned/constant_groups"] == 0 for r in records)
    assert stream.get_state() == made.last.note["data"]


def test_data_that_a_task_writes_are_pushed_with_each_checkpoint(trial, monkeypatch):
    """As the marks of a judge, which a run that goes on has to get again."""
    made = trial()
    monkeypatch.setattr(run.storage, "push", lambda path: made.note(f"pushed {path}"))
    made.reinforce()
    saved = [made.log.index(event) for event in made.log if event.startswith("save ")]
    assert saved
    assert all(made.log[i + 1] == "pushed data" for i in saved)


@pytest.mark.parametrize("read", [{"turn_reward"}, set()])
def test_resampling_looks_at_the_rewards_of_turns_where_the_objective_does(
    trial, read, monkeypatch
):
    """And so does the metric of constant groups."""
    inner, asked = Group.is_constant, set()
    noted = lambda self, turns=False: asked.add(turns) or inner(self, turns)
    monkeypatch.setattr(Group, "is_constant", noted)
    loss = SimpleNamespace(reads=lambda *fields: not read.isdisjoint(fields))
    trial(**redrawn(max_resamples=1, loss=loss)).reinforce()
    assert asked == {bool(read)}


EARLY = [(0, {}), (1, {}), (3, {}), (0, redrawn(max_resamples=2)), (1, redrawn(max_resamples=2))]


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
        again = trial(**how)
        again.reinforce(made.last)
        again.saved = made.saved | again.saved
        made = again
    assert int(made.last.state.params) == int(whole.last.state.params)
    assert figures(made) == expected


def test_a_signal_loses_no_step(trial):
    made = trial(saves=lambda step: step == 6)
    made.at["push 5"] = made.stop.request
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
    stop.request()
    token_task = lambda stop_requested: TokenTask(
        Echo(), WORDS, RewardSettings(stop_requested=stop_requested)
    )
    config = SimpleNamespace(warm_start=None)
    made: Any = SimpleNamespace(
        config=config, task=Echo(), token_task=token_task, splits=SimpleNamespace(train=Echo.train)
    )
    run._try_reward(made, None, stop)  # pyright: ignore[reportArgumentType]
    assert stop.requested


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
    assert [*made.saved] == [3]


def test_a_stop_is_heard_while_demonstrations_are_replayed(trial):
    """Environments may take longer than there is until the process is ended."""
    steps = []

    class Slow(Echo):
        def environment(self, example, words):
            return self

        def step(self, tokens):
            steps.append(tokens)
            made.stop.requested = len(steps) == 3  # in the second batch
            return None, Reward(0.0, False)

    made = trial(task=Slow, saves=lambda step: False)
    with pytest.raises(StopRequested):
        made.imitate()
    assert [*made.saved] == [1]
    assert made.log.count("learn 2") == 0


def test_the_last_steps_are_looked_at_too(trial, monkeypatch):
    """Each is recorded while the next one is made; a run does not end as if they were good."""
    enough = lambda records, _: "for nothing" if len(records) == alarms.WINDOW else ""
    monkeypatch.setattr(alarms, "reason_to_stop", enough)
    made = trial(steps=alarms.WINDOW)
    with pytest.raises(UserError, match="for nothing"):
        made.reinforce()
    assert alarms.WINDOW in made.saved


@pytest.mark.parametrize("there", [True, False])
def test_reinforcement_begins_with_a_checkpoint(trial, there):
    """Its own, or that of a warm start that was made shorter; the run notes that there is one."""
    made = trial()
    made.run.checkpoints.steps += [0] * there
    made.reinforce()
    assert (0 in made.saved) is not there
    assert made.noted == (0 if there else 1)


def test_a_batch_of_demonstrations_that_are_too_long_is_passed_over(trial):
    """Several in a row end the run: then none is likely to fit."""
    made = trial()
    second = lambda: "record 1" in made.log and "record 2" not in made.log
    made.demonstrate = lambda example: " ".join(["1"] * (60 if second() else 1))
    made.imitate()
    assert "record 5" in made.log
    made = trial()
    made.demonstrate = lambda example: " ".join(["1"] * 60)
    with pytest.raises(
        UserError, match=r"no demonstration of 3 batches fits into \d+ tokens: raise"
    ):
        made.imitate()


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
        "learn, learn, record 1, record 2, save 2, learn, record 3, push 3, evaluate 3, record 3, release, "
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
        assert made.last.step < 5  # whose checkpoint is that of reinforcement
        found = trial().imitate(made.last)
    assert int(found) == int(whole)


# The stream of groups.


def data(source=Echo.train, seed=1):
    return Batches(source, 2, seed=seed)


def sampled(made, step):
    """The groups of a step, each with its example and what was answered."""
    groups = made.run.rollouts.next(step)
    return [(group.example, *group.trajectories) for group in groups]


def state_of(made, step):
    return json.loads(json.dumps(made.run.rollouts.state_dict(step)))


@pytest.fixture
def pushed(trial):
    """A trial whose sampler has weights, and goes on from a state."""

    def make(state=None, **how):
        made = trial(**{"max_lag": 1, "steps": 12, **how})
        if state is not None:
            made.run.rollouts.load_state_dict(state)
        made.run.rollouts.push(jnp.int32(0), 0)
        return made

    return make


class Apart(Scripted):
    """Has weights of its own: what it is asked for is answered when it is waited for, or before at random."""

    def __init__(self, rng):
        super().__init__(lambda prompt, number: [prompt[0], WORDS.eos])
        self.rng, self.asked, self.waiting = rng, [], {}

    def submit(self, prompts, *, n, sampling, reply=None):
        self.asked += [(prompt[0], sampling.seed) for prompt in prompts]
        whole, begun = super().submit(prompts, n=n, sampling=sampling), self.version
        late = [Future() for _ in whole]
        made = [one.result() for one in whole]
        self.waiting |= {one: (response, begun) for one, response in zip(late, made, strict=True)}
        return late

    def wait(self, responses):
        for future in [*self.waiting]:
            if future in responses or self.rng.random() < 0.3:
                one, begun = self.waiting.pop(future)
                future.set_result(replace(one, versions=(begun, self.version)))
        return super().wait(responses)


def apart(pushed, rng, state=None, **how):
    made = pushed(state, **how)
    sampler = made.run.rollouts.sampler = Apart(rng)
    return made, sampler


@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_a_stream_with_lag_loses_no_group_and_keeps_to_its_bound(pushed, max_lag):
    """Groups come in the order of the data, each once, with seeds of their own, whatever is there in a save."""
    rng = random.Random(max_lag)
    made, sampler = apart(pushed, rng, max_lag=max_lag)
    places, samplers, state = [], [sampler], None
    for step in range(12):
        made.run.rollouts.push(jnp.int32(step), step)
        for example, one in sampled(made, step):
            places.append(example)
            assert step - max_lag <= one.versions[0] <= one.versions[1] <= step
        state = state_of(made, step + 1)
        assert len(state.get("queue", ())) == min(max_lag, 11 - step) * 2
        if rng.random() < 0.4:
            made, sampler = apart(pushed, rng, state, max_lag=max_lag)
            samplers.append(sampler)
    stream = data()
    assert places == [example for _ in range(12) for example in stream.draw(2)]
    assert state == {"data": stream.get_state()}
    asked = [seed for sampler in samplers for _, seed in sampler.asked]
    assert len(asked) > len(set(asked)) == 24  # some were asked for anew, with their seeds


def test_a_slow_response_holds_up_its_own_group_alone(pushed):
    """All that may be asked for is asked for before the first is waited for."""
    made, sampler = apart(pushed, random.Random(0), max_lag=2)
    sampled(made, 0)
    assert len(sampler.asked) == 6
    sampled(made, 1)
    assert len(sampler.asked) == 8


def test_a_stream_goes_on_from_its_state_with_what_was_sampled_ahead(pushed):
    whole, stream = pushed(), pushed()
    for step in range(3):
        assert sampled(stream, step) == sampled(whole, step)
    reached = state_of(stream, 3)
    again = pushed(reached, at={"submit": lambda: pytest.fail("sampled again")}, max_lag=0)
    assert sampled(again, 3) == sampled(whole, 3)
    sampled(stream, 3)  # and not learned from
    assert state_of(stream, 3) == reached
    again = pushed(state_of(stream, 4))
    assert sampled(again, 4) == sampled(whole, 4)


@pytest.mark.parametrize("error", [ValueError("step 7"), StopRequested()])
def test_what_goes_wrong_in_the_background_is_raised_in_its_turn_and_leaves_the_state_before_it(
    pushed, error
):
    made, sampler = apart(pushed, random.Random(0))
    sampled(made, 0)
    late = [*sampler.waiting]
    [future] = late[-1:]
    sampler.waiting.pop(future)
    future.set_exception(error)
    state = state_of(made, 1)
    assert state["data"]["taken"] == 4
    assert len(state["queue"]) == 2
    assert sum(len(part["places"]) for part in state["there"]) == 2 - len(late)
    with pytest.raises(type(error)):
        made.run.rollouts.next(1)
    assert state_of(made, 1)["queue"] == state["queue"]


def test_the_sampler_has_the_weights_that_were_pushed(pushed):
    """Not sent twice; but again where they were let go of."""
    made = pushed(max_lag=0)
    for step in (0, 0, 1):
        made.run.rollouts.push(jnp.int32(0), step)
    made.run.rollouts.release()
    made.run.rollouts.release()
    made.run.rollouts.push(jnp.int32(0), 1)
    assert made.log == ["push 0", "push 1", "release", "push 1"]
