"""Episodes of several turns: the trainer scores exactly the tokens that the engine saw, and nothing waits."""

import dataclasses
import functools
import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config import Config, Evaluation, Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.tokenizer import HiddenTokens
from jaxrl_llm.objectives import Objective, TokenData, advantages
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Draft, Sampling
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.training import run, terminal
from jaxrl_llm.training import tokens as kept_tokens
from tests import tiny
from tests.rollouts.fake_vllm import LOGP, Fake, tokens_of
from tests.rollouts.test_vllm import ready

STOP = tuple(range(7, 19))
SAMPLING = Sampling(max_tokens=40, max_turns=6, stop=STOP)
DEFINITION, _ = qwen2.graph(tiny.SHAPE)


DECODER = partial(ScannedGenerator, block=16)


@functools.cache
def engine(kind=DECODER, slots=32, shape=tiny.SHAPE):
    model = kind(qwen2.graph(shape)[0], mesh=tiny.mesh_of())
    made = NativeSampler(model, slots=slots, prefill_prompts=8, steps=24)
    made.push(tiny.policy(shape)[1], 1)
    return made


def prompts(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 96, rng.integers(1, 12)).tolist() for _ in range(count)]


class Random:
    """Random environments: replies of 0 to 8 tokens, ends and new beginnings at random.

    `heard` is what each was told, what it told, and whether anew.
    """

    def __init__(self, seed=0, late=0.0, anew=0.2):
        self.seed, self.late, self.anew, self.heard = seed, late, anew, {}
        self.pool = ThreadPoolExecutor(8) if late else None

    def answer(self, index, tokens):
        rng = np.random.default_rng((self.seed, index, len(self.heard.get(index, ()))))
        time.sleep(self.late * rng.random())
        end = rng.random() < 0.2
        anew = rng.random() < self.anew
        reply = None if end else rng.integers(0, 96, rng.integers(anew, 9 + 9 * anew)).tolist()
        self.heard.setdefault(index, []).append((list(tokens), reply, anew))
        return None if end else (reply, anew)

    def __call__(self, index, tokens, logps):
        assert len(logps) == len(tokens or ())
        if self.pool:
            return self.pool.submit(self.answer, index, tokens)
        done = Future()
        done.set_result(self.answer(index, tokens))
        return done


class Beginning(Random):
    """Those that say what is seen first, `opened`, in place of a hidden prompt; one in eight fails at it."""

    def __init__(self, seed=0, late=0.0):
        super().__init__(seed, late)
        self.opened = {}

    def __call__(self, index, tokens, logps):
        return super().__call__(index, tokens, () if tokens is None else logps)

    def answer(self, index, tokens):
        if tokens is None:
            rng = np.random.default_rng((self.seed, index))
            begun = rng.integers(0, 96, rng.integers(1, 40)).tolist()
            self.opened[index] = begun if index % 8 else None
            return self.opened[index] and (begun, False)
        reply = super().answer(index, tokens)
        return reply if self.opened[index] else None


def hidden(count, seed=0):
    return [*map(HiddenTokens, prompts(count, seed))]


def seen_by_the_engine(episodes, heard, opened=None):
    """Each episode as its environment heard it: tokens, and where the sampled ones are, by segment."""
    for i, one in enumerate(episodes):
        segments = [(list((opened and opened[i]) or one.prompt), [])]
        for n, (turn, reply, anew) in enumerate(heard[i]):
            tokens, sampled = segments[-1]
            sampled += range(len(tokens), len(tokens) + len(turn))
            tokens += turn
            if n < len(heard[i]) - 1 and anew:
                segments.append((list(reply), []))
            elif n < len(heard[i]) - 1:
                tokens += reply
        yield segments


def trainer(episodes, **how):
    """The trainer's log-probs of a batch in `[B,T]`, and the batch."""
    batch = Collator(prompt_length=12, response_length=40, round_to=8, **how)(episodes)
    score = update.make_score(partial(logprobs.of_responses, DEFINITION))
    return np.asarray(batch.layout.to_rows(score(tiny.policy()[1], batch.inputs))), batch


def forward(sequences):
    """Log-probs of every token but the first, of plain sequences."""
    inputs = logprobs.of_sequences([np.asarray(s, np.int32) for s in sequences], len(sequences), 64)
    policy, params = tiny.policy()
    return np.asarray(jax.jit(policy)(params, inputs))


def furthest(episodes, heard, opened=None, **how):
    """The largest distance between the trainer's log-probs and a forward on what the engine saw."""
    ours, batch = trainer(episodes, **how)
    seen = list(seen_by_the_engine(episodes, heard, opened))
    plain = iter(forward([tokens for segments in seen for tokens, _ in segments]))
    gaps = []
    for i, segments in enumerate(seen):
        theirs = np.concatenate([next(plain)[np.asarray(where) - 1] for _, where in segments])
        if int(batch.mask[i].sum()) != len(theirs):
            return np.inf
        gaps.append(np.abs(ours[i, : len(theirs)] - theirs).max())
    return max(gaps)


@functools.cache
def episodes_of(count=125, seed=0):
    environments = Random(seed)
    made = engine().generate(prompts(count), n=4, sampling=SAMPLING, reply=environments)
    return made, environments.heard


@pytest.mark.parametrize("pack", [False, True])
def test_the_trainer_scores_what_the_engine_saw(pack):
    """Over 500 random environments, with empty replies, empty turns and cuts at every place."""
    episodes, heard = episodes_of()
    counts = [len(x) for x in heard.values()]
    assert len(counts) == 500
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    assert any(reply == [] for turns in heard.values() for _, reply, _ in turns)
    assert any(len(turn) == 1 for turns in heard.values() for turn, _, _ in turns)
    assert {len(one.restarts) for one in episodes} >= {0, 1, 2, 3}
    cut = [one for one in episodes if not one.finished]
    assert {len(one.tokens) for one in cut if not one.restarts} > {38, 39, 40}
    assert furthest(episodes, heard, pack=pack) < 1e-5
    ours, batch = trainer(episodes, pack=pack)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(np.asarray(batch.sampler_logp)[mask], ours[mask], atol=1e-4)


@pytest.mark.parametrize("pack", [False, True])
def test_an_environment_may_say_what_is_seen_first(pack):
    """The prompt is not seen, but where that fails: there a token ends the episode."""
    asked, environments = hidden(16), Beginning()
    episodes = engine().generate(asked, n=4, sampling=SAMPLING, reply=environments)
    opened = environments.opened
    assert sorted(opened) == [*range(64)]
    assert furthest(episodes, environments.heard, opened, pack=pack) < 1e-5
    for i, one in enumerate(episodes):
        begun = opened[i] or []
        assert one.prompt == asked[i // 4]
        assert list(one.tokens[: len(begun)]) == begun
        assert one.turns[0][0] == len(begun)
        assert one.restarts[:1] == (((0, len(begun)),) if begun else ())
        if not begun:
            assert (one.length, len(one.tokens)) == (1, 1)
        assert max(len(p) + end - start for p, start, end in one.segments) <= len(one.prompt) + 40
    assert max(len(one.segments) for one in episodes) > 1
    few = engine(slots=8).generate(asked, n=4, sampling=SAMPLING, reply=Beginning(late=0.02))
    assert few == episodes


def test_a_beginning_without_room_is_one_line():
    with pytest.raises(UserError, match=r"begins with 42 tokens.* in 42: raise response_length"):
        Draft(SAMPLING, HiddenTokens([1, 2])).goes_on(([3] * 42, False))


def test_weights_that_sampled_nothing_are_not_of_a_response():
    """A turn that was interrupted before its first token is the next weights'."""
    draft = Draft(SAMPLING, [1, 2])
    for tokens, version in (([], 3), ([5], 4), ([6, 7], 5)):
        draft.add(tokens, [-1.0] * len(tokens), version == 5, version, whole=version == 5)
    assert draft.done(episode=True).versions == (4, 5)


def shifted(one):
    turns = tuple((a + (a > 0), min(b + 1, len(one.tokens))) for a, b in one.turns)
    return dataclasses.replace(one, turns=turns)


def tokenised_anew(one):
    """As a tokenizer may: two tokens of a reply become others of the same text."""
    tokens = list(one.tokens)
    for (_, end), (start, _) in itertools.pairwise(one.turns):
        if start - end > 1:
            tokens[end] = (tokens[end] + 1) % 96
    return dataclasses.replace(one, tokens=tokens)


@pytest.mark.parametrize("wrong", [shifted, tokenised_anew])
@pytest.mark.parametrize("pack", [False, True])
def test_the_law_sees_other_tokens(wrong, pack):
    episodes, heard = episodes_of()
    assert furthest([*map(wrong, episodes)], heard, pack=pack) > 1e-2


@pytest.mark.parametrize("kind", [DECODER, UnrolledGenerator])
def test_a_recurrence_goes_on_where_its_turn_ended(kind):
    """However long others take: a state that waits is kept, and a new segment begins with its own."""
    shape = tiny.FAMILIES["qwen3_5"]
    environments = Random(3, late=0.05, anew=0.3)
    made = engine(kind, 8, shape).generate(prompts(12), n=2, sampling=SAMPLING, reply=environments)
    policy, params = tiny.policy(shape)
    seen = [x for one in seen_by_the_engine(made, environments.heard) for x in one]
    sequences = [np.asarray(tokens, np.int32) for tokens, _ in seen]
    inputs = logprobs.of_sequences(sequences, len(sequences), 64)
    logps = np.asarray(jax.jit(policy)(params, inputs))
    theirs = np.concatenate(
        [row[np.asarray(where) - 1] for row, (_, where) in zip(logps, seen, strict=True)]
    )
    ours = np.concatenate([np.asarray(one.logps)[one.sampled] for one in made])
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert len(ours) > 100


def test_a_cut_episode_is_not_finished_and_ends_with_a_sampled_token():
    episodes, heard = episodes_of()
    for i, one in enumerate(episodes):
        assert one.turns[0][0] == 0
        assert one.turns[-1][1] == len(one.tokens) == len(one.logps)
        assert len(one.tokens) - sum(b - a for a, b in one.restarts) <= 40
        longest = max(len(p) + end - start for p, start, end in one.segments)
        assert longest <= len(one.prompt) + 40
        assert len(one.turns) == len(heard[i]) <= 6
        given = set(range(len(one.tokens))) - set(one.sampled)
        assert all(one.logps[t] == 0.0 for t in given)
        turn, reply, _ = heard[i][-1]
        assert one.finished == (reply is None and turn[-1] in STOP)


def test_turns_are_numbered_in_the_batch():
    episodes, _ = episodes_of()
    for pack in (False, True):
        _, batch = trainer(episodes, pack=pack)
        for i, one in enumerate(episodes):
            numbers = [n for n, (a, b) in enumerate(one.turns, 1) for _ in range(a, b)]
            assert batch.turn[i].tolist() == numbers + [0] * (batch.turn.shape[1] - len(numbers))


@pytest.mark.parametrize("pack", [False, True])
def test_a_token_has_the_reward_and_the_advantage_of_its_turn(pack):
    episodes = [
        dataclasses.replace(one, turn_rewards=[0.5 * i + k for k in range(len(one.turns))])
        for i, one in enumerate(episodes_of()[0][:8])
    ]
    batch = Collator(12, 40, round_to=8, pack=pack)(episodes)
    for i, one in enumerate(episodes):
        want = [
            x for x, (a, b) in zip(one.turn_rewards, one.turns, strict=True) for _ in range(a, b)
        ]
        assert batch.turn_reward[i].tolist() == want + [0] * (batch.mask.shape[1] - len(want))
    reward = jnp.asarray(np.arange(8).reshape(2, 4) % 3, jnp.float32)
    old = jnp.zeros(batch.layout.in_rows.shape)
    objective = Objective(advantage=partial(advantages.by_turn, discount=0.9))
    got = update.make_credit(objective)(batch, reward, old_logp=old).advantage
    data = TokenData(batch.mask, batch.mask * 0.0, turn=batch.turn, turn_reward=batch.turn_reward)
    compiled = jax.jit(partial(advantages.by_turn, discount=0.9))  # as it is in a step
    want = compiled(reward, jax.tree.map(jnp.asarray, data))
    np.testing.assert_array_equal(batch.layout.to_rows(got), want)
    assert np.ptp(np.asarray(want)[0][batch.mask[0]]) > 0


class Warmer:
    """Three turns, of which those that say an even number are worth something; in the end the last counts."""

    name, train, test = "warmer", [*range(8)], [8, 9]
    prompt = str

    def environment(self, example, tokenizer):
        return Warm(tokenizer)


class Warm:
    def __init__(self, tokenizer):
        self.tokenizer, self.turns = tokenizer, 0

    def step(self, tokens):
        self.turns += 1
        even = tokens[0] % 2 == 0
        reward = Reward(0.5 * even * (self.turns < 3) + float(even), even)
        return None if self.turns == 3 else self.tokenizer.encode("next"), reward


@pytest.mark.slow
def test_a_game_with_rewards_on_the_way_is_learned_from(tmp_path):
    collate = Collator(4, 24, round_to=8)
    config = Config(
        task=lambda folder: Warmer(),
        model=Scratch(qwen2.Shape(16, 32, 64, 1, 2, 1, tied=True), (*map(str, range(10)), "next")),
        objective=Objective(advantage=advantages.by_turn),
        optimizer=optax.sgd(0.1),
        collate=collate,
        steps=2,
        prompts=2,
        group_size=4,
        sampling=Sampling(max_turns=3),
        engine=Native(slots=8, prefill_prompts=4, block=8),
        evaluation=Evaluation(every=0, validation=2),
    )
    run.train(config, tmp_path / "run", session=run.Session(console=terminal.console(quiet=True)))
    kept = [kept_tokens.read(tmp_path / "run", step) for step in (1, 2)]
    responses = [one for step in kept for one in step.responses]
    assert all(len(one["turn_rewards"]) == len(one["turns"]) for one in responses)
    assert all(one["reward"] == one["turn_rewards"][-1] for one in responses)
    several, advantage = [], kept[0].numbers["advantage"]
    ends = np.cumsum([sum(b - a for a, b in one["turns"]) for one in kept[0].responses])
    for one, row in zip(kept[0].responses, np.split(advantage, ends[:-1]), strict=True):
        parts = np.split(row, np.cumsum([b - a for a, b in one["turns"]])[:-1])
        assert all(np.ptp(part) == 0 for part in parts)
        several.append(len({float(part[0]) for part in parts}) > 1)
    assert any(several)


def test_segments_share_a_reward_and_count_once():
    """Credit does not see where an episode was rewritten; the update is one however it is cut."""
    episodes, _ = episodes_of()
    groups = [episodes[i : i + 4] for i in range(0, 500, 4)]
    made = next(group for group in groups if sum(len(one.restarts) for one in group) > 3)
    sampled = [[one.tokens[t] for t in one.sampled] for one in made]
    plain = tiny.trajectories([one.prompt for one in made], sampled)
    reward = jnp.asarray([[0.0, 1.0, 0.0, 2.0]])
    objective = Objective(advantage=advantages.grpo)
    policy, params = tiny.policy()
    collate = partial(Collator, prompt_length=12, response_length=40, round_to=8)

    assert sum(len(one.segments) for one in made) > 7

    def credit(batch):
        old = update.make_score(policy)(params, batch.inputs)
        made = update.make_credit(objective)(batch, reward, old_logp=old)
        rows = (batch.layout.to_rows(x) for x in (made.advantage, made.weight[0]))
        return [np.asarray(x) for x in rows]

    want = credit(collate()(plain))
    states = []
    for how in ({}, {"pack": True}, {"microbatches": 2, "shards": 2}):
        batch = collate(**how)(made)
        for ours, theirs in zip(credit(batch), want, strict=True):
            np.testing.assert_array_equal(ours[:, : theirs.shape[1]], theirs)
        state, _ = tiny.run_step(
            policy, tiny.policy()[1], batch, reward, objective=objective, optimizer=optax.sgd(1.0)
        )
        states.append(state.params)
    for other in states[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), states[0], other)
    moved = jax.tree.map(lambda a, b: float(abs(a - b).max()), states[0], params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_episodes_do_not_depend_on_company_or_time():
    """The same tokens from late environments, in fewer slots, by the engine of accelerators."""
    asked = prompts(12)
    base = engine().generate(asked, n=4, sampling=SAMPLING, reply=Random())
    for made in (engine(slots=8), engine()):
        again = made.generate(asked, n=4, sampling=SAMPLING, reply=Random(late=0.03))
        assert again == base
    other = engine(UnrolledGenerator).generate(asked, n=4, sampling=SAMPLING, reply=Random())
    said = lambda episodes: [(one.tokens, one.restarts) for one in episodes]
    assert said(other) == said(base)


def test_one_turn_is_as_it_was():
    """An environment that ends at once changes nothing."""

    def end(index, tokens, logps):
        del index, tokens, logps
        done = Future()
        done.set_result(None)
        return done

    asked = prompts(12)
    plain = engine().generate(asked, n=4, sampling=SAMPLING)
    ended = engine().generate(asked, n=4, sampling=SAMPLING, reply=end)
    assert {one.turns for one in plain} == {()}
    assert [dataclasses.replace(one, turns=(), restarts=()) for one in ended] == plain


def test_others_do_not_wait_for_a_slow_environment():
    """One of 64 replies only when three quarters of the others have ended."""
    ended, others = set(), threading.Event()

    class OneSlow(Random):
        def answer(self, index, tokens):
            if index == 0:
                assert others.wait(300), f"{len(ended)} others had ended"
            reply = super().answer(index, tokens)
            if index and (reply is None or tokens[-1] not in STOP or len(self.heard[index]) == 6):
                ended.add(index)
            if len(ended) >= 48:
                others.set()
            return reply

    engine().generate(prompts(64), n=1, sampling=SAMPLING, reply=OneSlow(late=1e-4))
    assert others.is_set()


def test_an_environment_that_fails_for_the_caller_ends_the_rollout():
    def fail(index, tokens, logps):
        del index, tokens, logps
        done = Future()
        done.set_exception(UserError("the tool is not installed"))
        return done

    with pytest.raises(UserError, match="not installed"):
        engine().generate(prompts(2), n=1, sampling=SAMPLING, reply=fail)


# vLLM, by its stand-in: a request a turn.


def test_requests_begin_with_what_the_environment_says(tmp_path):
    asked, heard = [HiddenTokens([1, 2]), HiddenTokens([3])], Beginning(late=0.01)
    sampling = Sampling(max_tokens=60, max_turns=4, stop=tuple(range(0, 50, 5)))
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        before = len(fake.bodies)
        episodes = made.generate(asked, n=8, sampling=sampling, reply=heard)
        again = made.generate(asked, n=8, sampling=sampling, reply=Beginning())
        sent = {tuple(b["prompt"]) for b in fake.bodies[before:]}
    assert again == episodes
    seen = seen_by_the_engine(episodes, heard.heard, heard.opened)
    for i, (one, segments) in enumerate(zip(episodes, seen, strict=True)):
        assert tuple(heard.opened[i] or one.prompt) in sent
        assert heard.opened[i] or len(one.tokens) == 1
        for (tokens, _), (prompt, first, last) in zip(segments, one.segments, strict=True):
            assert [*prompt, *one.tokens[first:last]] == tokens


def test_requests_hold_exactly_the_tokens_so_far(tmp_path):
    asked, heard = [[1, 2], [3, 4], [5]], Random(late=0.01)
    sampling = Sampling(max_tokens=30, max_turns=4, stop=tuple(range(0, 50, 5)))
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        before = len(fake.bodies)
        episodes = made.generate(asked, n=8, sampling=sampling, reply=heard)
        again = made.generate(asked, n=8, sampling=sampling, reply=Random())
        bodies = fake.bodies[before:]
    assert again == episodes
    sent = {tuple(b["prompt"]): b for b in bodies}
    turns = 0
    for one, segments in zip(episodes, seen_by_the_engine(episodes, heard.heard), strict=True):
        limit, used = len(one.prompt) + 30, 0
        for (tokens, _), (prompt, first, last) in zip(segments, one.segments, strict=True):
            assert [*prompt, *one.tokens[first:last]] == tokens
            for start, end in [span for span in one.turns if first <= span[0] < last]:
                turns += 1
                before = len(prompt) + start - first
                body = sent[tuple(tokens[:before])]
                assert body["max_tokens"] == min(30 - used - start + first, limit - before)
                if start:
                    made_of = tokens_of(body["prompt"], body["seed"], end - start)
                    assert list(one.tokens[start:end]) == made_of
            used += last - first
        assert {one.logps[t] for t in one.sampled} == {LOGP}
    assert turns > 40
    assert any(one.restarts for one in episodes)
    assert len({b["seed"] for b in bodies}) == len(bodies) // 2 == turns


def test_a_server_that_fails_repeats_only_the_turn(tmp_path):
    asked, sampling = [[1, 2], [3]], Sampling(max_tokens=20, stop=tuple(range(0, 50, 5)))
    with Fake() as fake:
        whole = ready(fake, root=tmp_path / "a").generate(
            asked, n=6, sampling=sampling, reply=Random()
        )
    fault = lambda path, body, number: (
        (500, b"") if path == "/v1/completions" and number > 4 and number % 7 == 0 else None
    )
    heard = Random()
    with Fake(fault=fault) as fake:
        made = ready(fake, root=tmp_path / "b")
        episodes = made.generate(asked, n=6, sampling=sampling, reply=heard)
    assert made.counters["retries"] > 0
    said = lambda episodes: [(one.tokens, one.turns) for one in episodes]
    assert said(episodes) == said(whole)
    assert [len(heard.heard[i]) for i in range(12)] == [len(one.turns) for one in episodes]


def test_a_trajectory_knows_its_sampled_tokens():
    one = Trajectory([1], [2, 3, 4, 5], [-1.0] * 4, turns=((0, 1), (3, 4)))
    assert (one.sampled, one.length) == ([0, 3], 2)
    plain = dataclasses.replace(one, turns=())
    assert (plain.sampled, plain.length) == ([0, 1, 2, 3], 4)
