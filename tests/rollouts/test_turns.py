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

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.learning.answers import Answers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.generation import AcceleratorGenerator, CpuGenerator
from jaxrl_llm.objectives import Objective, advantages
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Rollout, Sampling
from jaxrl_llm.tasks.task import Reward
from tests import tiny
from tests.rollouts.fake_vllm import LOGP, Fake, tokens_of
from tests.rollouts.test_vllm import ready

STOP = tuple(range(7, 19))
SAMPLING = Sampling(max_tokens=40, max_turns=6, stop=STOP)
DEFINITION, _ = qwen2.graph(tiny.SHAPE)


DECODER = partial(CpuGenerator, block=16)


@functools.cache
def engine(kind=DECODER, slots=32):
    model = kind(DEFINITION, mesh=tiny.mesh_of())
    made = NativeSampler(model, slots=slots, prefill_prompts=8, steps=24)
    made.push(tiny.policy()[1], 1)
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
        assert len(logps) == len(tokens)
        if self.pool:
            return self.pool.submit(self.answer, index, tokens)
        done = Future()
        done.set_result(self.answer(index, tokens))
        return done


def seen_by_the_engine(rollout, heard):
    """Each episode as its environment heard it: tokens, and where the sampled ones are, by segment."""
    for i, prompt in enumerate(rollout.prompts):
        segments = [(list(prompt), [])]
        for n, (turn, reply, anew) in enumerate(heard[i]):
            tokens, sampled = segments[-1]
            sampled += range(len(tokens), len(tokens) + len(turn))
            tokens += turn
            if n < len(heard[i]) - 1 and anew:
                segments.append((list(reply), []))
            elif n < len(heard[i]) - 1:
                tokens += reply
        yield segments


def trainer(rollout, **how):
    """The trainer's log-probs of a batch in `[B,T]`, and the batch."""
    batch = Collator(prompt_length=12, response_length=40, round_to=8, **how)(rollout)
    score = update.make_score(partial(logprobs.of_responses, DEFINITION))
    return np.asarray(batch.layout.to_rows(score(tiny.policy()[1], batch.inputs))), batch


def forward(sequences):
    """Log-probs of every token but the first, of plain sequences."""
    inputs = logprobs.of_sequences([np.asarray(s, np.int32) for s in sequences], len(sequences), 64)
    policy, params = tiny.policy()
    return np.asarray(jax.jit(policy)(params, inputs))


def furthest(rollout, heard, **how):
    """The largest distance between the trainer's log-probs and a forward on what the engine saw."""
    ours, batch = trainer(rollout, **how)
    episodes = list(seen_by_the_engine(rollout, heard))
    plain = iter(forward([tokens for segments in episodes for tokens, _ in segments]))
    gaps = []
    for i, segments in enumerate(episodes):
        theirs = np.concatenate([next(plain)[np.asarray(where) - 1] for _, where in segments])
        if int(batch.mask[i].sum()) != len(theirs):
            return np.inf
        gaps.append(np.abs(ours[i, : len(theirs)] - theirs).max())
    return max(gaps)


@functools.cache
def rollout_of(count=125, seed=0):
    environments = Random(seed)
    made = engine().generate(prompts(count), n=4, sampling=SAMPLING, reply=environments)
    return made, environments.heard


@pytest.mark.parametrize("pack", [False, True])
def test_the_trainer_scores_what_the_engine_saw(pack):
    """Over 500 random environments, with empty replies, empty turns and cuts at every place."""
    rollout, heard = rollout_of()
    counts = [len(x) for x in heard.values()]
    assert len(counts) == 500
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    assert any(reply == [] for turns in heard.values() for _, reply, _ in turns)
    assert any(len(turn) == 1 for turns in heard.values() for turn, _, _ in turns)
    assert {len(again) for again in rollout.restarts} >= {0, 1, 2, 3}
    cut = [i for i, finished in enumerate(rollout.finished) if not finished]
    assert {len(rollout.responses[i]) for i in cut if not rollout.restarts[i]} > {38, 39, 40}
    assert furthest(rollout, heard, pack=pack) < 1e-5
    ours, batch = trainer(rollout, pack=pack)
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(np.asarray(batch.sampler_logp)[mask], ours[mask], atol=1e-4)


def shifted(rollout):
    turns = [[(a + (a > 0), min(b + 1, len(r))) for a, b in spans]
             for spans, r in zip(rollout.turns, rollout.responses, strict=True)]  # fmt: skip
    return dataclasses.replace(rollout, turns=turns)


def tokenised_anew(rollout):
    """As a tokenizer may: two tokens of a reply become others of the same text."""
    responses = [list(r) for r in rollout.responses]
    for spans, response in zip(rollout.turns, responses, strict=True):
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start - end > 1:
                response[end] = (response[end] + 1) % 96
    return dataclasses.replace(rollout, responses=responses)


@pytest.mark.parametrize("wrong", [shifted, tokenised_anew])
@pytest.mark.parametrize("pack", [False, True])
def test_the_law_sees_other_tokens(wrong, pack):
    rollout, heard = rollout_of()
    assert furthest(wrong(rollout), heard, pack=pack) > 1e-2


def test_a_cut_episode_is_not_finished_and_ends_with_a_sampled_token():
    rollout, heard = rollout_of()
    for i, (response, logps, spans) in enumerate(
        zip(rollout.responses, rollout.logps, rollout.turns, strict=True)
    ):
        assert spans[0][0] == 0
        assert spans[-1][1] == len(response) == len(logps)
        assert len(response) - sum(b - a for a, b in rollout.restarts[i]) <= 40
        longest = max(len(p) + end - start for p, start, end in rollout.segments(i))
        assert longest <= len(rollout.prompts[i]) + 40
        assert len(spans) == len(heard[i]) <= 6
        given = set(range(len(response))) - set(rollout.sampled(i))
        assert all(logps[t] == 0.0 for t in given)
        turn, reply, _ = heard[i][-1]
        assert rollout.finished[i] == (reply is None and turn[-1] in STOP)


def test_turns_are_numbered_in_the_batch():
    rollout, _ = rollout_of()
    for pack in (False, True):
        _, batch = trainer(rollout, pack=pack)
        for i, spans in enumerate(rollout.turns):
            numbers = [n for n, (a, b) in enumerate(spans, 1) for _ in range(a, b)]
            assert batch.turn[i].tolist() == numbers + [0] * (batch.turn.shape[1] - len(numbers))


def test_segments_share_a_reward_and_count_once():
    """Credit does not see where an episode was rewritten; the update is one however it is cut."""
    rollout, _ = rollout_of()
    group = next(g for g in range(125) if sum(map(len, rollout.restarts[4 * g : 4 * g + 4])) > 3)
    made = Answers(range(125), rollout, [Reward(0.0, False)] * 500).groups([group]).rollout
    sampled = [[tokens[t] for t in made.sampled(i)] for i, tokens in enumerate(made.responses)]
    plain = Rollout(made.prompts, sampled, [[-1.0] * len(tokens) for tokens in sampled])
    reward = jnp.asarray([[0.0, 1.0, 0.0, 2.0]])
    objective = Objective(advantage=advantages.grpo)
    policy, params = tiny.policy()
    collate = partial(Collator, prompt_length=12, response_length=40, round_to=8)

    assert sum(len(made.segments(i)) for i in range(4)) > 7

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
    other = engine(AcceleratorGenerator).generate(asked, n=4, sampling=SAMPLING, reply=Random())
    assert (other.responses, other.restarts) == (base.responses, base.restarts)


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
    assert plain.turns == ()
    assert dataclasses.replace(ended, turns=(), restarts=()) == plain


def test_others_do_not_wait_for_a_slow_environment():
    """One of 64 replies only when three quarters of the others have ended."""
    ended, others = set(), threading.Event()

    class OneSlow(Random):
        def answer(self, index, tokens):
            if index == 0:
                assert others.wait(60), f"{len(ended)} others had ended"
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


def test_requests_hold_exactly_the_tokens_so_far(tmp_path):
    asked, heard = [[1, 2], [3, 4], [5]], Random(late=0.01)
    sampling = Sampling(max_tokens=30, max_turns=4, stop=tuple(range(0, 50, 5)))
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        before = len(fake.bodies)
        rollout = made.generate(asked, n=8, sampling=sampling, reply=heard)
        again = made.generate(asked, n=8, sampling=sampling, reply=Random())
        bodies = fake.bodies[before:]
    assert again == rollout
    sent = {tuple(b["prompt"]): b for b in bodies}
    turns = 0
    for i, segments in enumerate(seen_by_the_engine(rollout, heard.heard)):
        limit, used = len(rollout.prompts[i]) + 30, 0
        for (tokens, _), (prompt, first, last) in zip(segments, rollout.segments(i), strict=True):
            assert [*prompt, *rollout.responses[i][first:last]] == tokens
            for start, end in [span for span in rollout.turns[i] if first <= span[0] < last]:
                turns += 1
                before = len(prompt) + start - first
                body = sent[tuple(tokens[:before])]
                assert body["max_tokens"] == min(30 - used - start + first, limit - before)
                if start:
                    made_of = tokens_of(body["prompt"], body["seed"], end - start)
                    assert list(rollout.responses[i][start:end]) == made_of
            used += last - first
        assert {rollout.logps[i][t] for t in rollout.sampled(i)} == {LOGP}
    assert turns > 40
    assert any(rollout.restarts)
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
        rollout = made.generate(asked, n=6, sampling=sampling, reply=heard)
    assert made.counters["retries"] > 0
    assert (rollout.responses, rollout.turns) == (whole.responses, whole.turns)
    assert [len(heard.heard[i]) for i in range(12)] == [len(turns) for turns in rollout.turns]


def test_a_rollout_knows_its_sampled_tokens():
    rollout = Rollout(
        [[1]] * 2, [[2, 3, 4, 5], [6]], [[-1.0] * 4, [-1.0]], turns=[[(0, 1), (3, 4)], [(0, 1)]]
    )
    assert rollout.sampled(0) == [0, 3]
    assert rollout.lengths == [2, 1]
