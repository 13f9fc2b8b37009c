"""Laws of what an analysis measures: updates tried on a batch, gradients of single tokens."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.primitives import Inputs
from jaxrl_llm.objectives import Objective, advantages, factors, partition
from jaxrl_llm.research import analysis, token_gradients
from tests import tiny

DEFINITION = qwen2.graph(tiny.SHAPE)[0]


def tokens_of(mask, **known):
    """Tokens with these arrays, and no other."""
    return analysis.Tokens(
        **(dict.fromkeys(analysis.Tokens._fields, mask) | {"mask": mask >= 0} | known)
    )


def logits(params, offsets, tokens, index):
    return token_gradients.next_logits(DEFINITION, params, offsets, tokens, index, temperature=0.7)


@pytest.fixture(scope="module")
def params():
    return tiny.policy()[1]


@pytest.fixture(scope="module")
def tokens():
    responses = tiny.responses()
    where = [(i, len(one.tokens) - 1) for i, one in enumerate(responses)]
    return token_gradients.choose(responses, where)


@pytest.fixture(scope="module")
def norms(params, tokens):
    offsets = token_gradients.no_offsets(tiny.SHAPE, tokens.tokens.shape[1])
    return token_gradients.make_norms(logits)(params, offsets, tokens)


@pytest.fixture(scope="module")
def credited(params):
    batch = tiny.collator(microbatches=2)(tiny.responses())
    policy_logp = tiny.policy()[0]
    old = update.make_score(policy_logp)(params, batch.inputs)
    reward = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)
    return update.make_credit(tiny.objective(penalties=()))(batch, reward, old_logp=old)


@pytest.mark.parametrize("seed", range(5))
def test_bins_partition_the_tokens(seed):
    rng = np.random.default_rng(seed)
    logp, mask = -rng.exponential(size=(3, 17)), rng.random((3, 17)) < 0.7
    logp[0, :4] = np.log((*analysis.EDGES, 0.25))  # edges, and a tie
    bins = analysis.by_probability(logp, mask, analysis.EDGES)
    assert np.array_equal(bins >= 0, mask)
    for b, (low, high) in enumerate(zip((0, *analysis.EDGES), (*analysis.EDGES, 1.1), strict=True)):
        inside = np.exp(logp)[bins == b]
        assert ((inside >= low - 1e-12) & (inside < high + 1e-12)).all()


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_the_slope_is_that_of_the_log_prob_and_keeps_the_bounds(scale):
    rng = np.random.default_rng(0)
    for vocab in (2, 7, 500):
        for _ in range(20):
            z = jnp.asarray(scale * rng.normal(size=vocab), jnp.float32)
            target = jnp.int32(rng.choice([int(z.argmax()), int(rng.integers(vocab))]))
            unit, rest = token_gradients.slope(z, target)
            expected = jax.grad(lambda z, t=target: jax.nn.log_softmax(z)[t])(z)
            np.testing.assert_allclose(unit * rest, expected, atol=3e-6)
            exact = np.asarray(z, np.float64) - np.float64(z[target])
            others = np.delete(np.exp(exact - exact.max()), target)
            whole = others.sum() + np.exp(-exact.max())
            np.testing.assert_allclose(rest, others.sum() / whole, rtol=1e-4, atol=1e-37)
            low, high = token_gradients.bounds(np.float64(1.0), vocab)
            assert low * (1 - 1e-5) <= jnp.linalg.norm(unit) <= high * (1 + 1e-5)


def test_norms_over_parameters_are_those_of_the_trained_log_probs(params, tokens, norms):
    def logp(params, token):
        row = jnp.asarray(token.tokens)[None]
        one = lambda x: jnp.asarray([[x]], jnp.int32)
        inputs = Inputs(row, jnp.arange(row.shape[1])[None], None, one(token.index),
                        one(token.target), jnp.ones((1, 1), bool))  # fmt: skip
        return logprobs.of_responses(DEFINITION, params, inputs, temperature=0.7).sum()

    pull = jax.jit(jax.value_and_grad(logp))
    for i in range(3):
        value, grads = pull(params, token_gradients.Chosen(*(x[i] for x in tokens)))
        assert 1 - np.exp(value) == pytest.approx(float(norms.rest[i]), abs=1e-6)
        # `logits` are already divided by the temperature, so these are gradients of the same log-prob
        assert float(optax.tree.norm(grads)) == pytest.approx(float(norms.over_params[i]), rel=1e-4)


def test_every_token_of_a_model_keeps_the_bounds_at_every_layer(params, tokens, norms):
    offsets = token_gradients.no_offsets(tiny.SHAPE, tokens.tokens.shape[1])
    stretch = token_gradients.make_stretch(logits)(params, offsets, tokens)
    low, high = token_gradients.bounds(np.asarray(norms.rest), tiny.SHAPE.vocab_size)
    assert (low <= norms.at_logits * 1.0001).all()
    assert (norms.at_logits <= high * 1.0001).all()
    at = np.asarray(norms.at_layers)
    assert at.shape == stretch.shape[:2] == (8, tiny.SHAPE.num_layers + 1)
    pushed = np.asarray(norms.at_logits)[:, None]
    assert (at <= stretch[..., 1] * pushed * 1.001).all()
    assert (at >= stretch[..., 0] * pushed * 0.999).all()
    assert (at > 0).all()


@pytest.mark.slow
def test_gradients_of_bins_add_up_to_the_whole(params, credited):
    policy_logp, ascent = tiny.policy()[0], optax.sgd(1.0)
    step = update.make_train_step(policy_logp, tiny.objective(penalties=()), ascent)
    state = update.init_state(params, ascent)
    mask = np.asarray(credited.data.mask)
    bins = np.where(mask, np.cumsum(mask).reshape(mask.shape) % 3, -1)

    def moved(batch):
        after, _ = step(jax.tree.map(jnp.copy, state), batch)
        return jax.tree.map(jnp.subtract, after.params, params)

    whole = moved(credited)
    parts = [moved(analysis.only(credited, bins == b)) for b in range(3)]
    assert all(optax.tree.norm(part) > 1e-3 for part in parts)
    total = jax.tree.map(lambda *x: sum(x), *parts)
    assert optax.tree.norm(jax.tree.map(jnp.subtract, total, whole)) < 1e-4 * optax.tree.norm(whole)


def test_a_trial_is_the_train_step_on_a_copy(params, credited):
    policy_logp, adam = tiny.policy()[0], optax.adam(1e-3)
    step = update.make_train_step(policy_logp, tiny.objective(penalties=()), adam)
    score = update.make_score(policy_logp)
    state = update.init_state(jax.tree.map(jnp.copy, params), adam)
    before = jax.tree.map(np.array, state)
    found = analysis.Trial(state, step, lambda _: None, score).by_optimizer(credited)
    assert jax.tree.all(jax.tree.map(np.array_equal, state, before))
    after, visits = step(state, credited)
    np.testing.assert_array_equal(found.logp, score(after.params, credited.inputs))
    assert found.grad_norm == visits["grad_norm"][0]
    apart = jax.tree.map(jnp.subtract, after.params, before.params)
    assert found.distance == pytest.approx(float(optax.tree.norm(apart)), rel=1e-5)


def test_a_gradient_is_what_a_step_goes_along(params, credited):
    policy_logp, objective, ascent = tiny.policy()[0], tiny.objective(penalties=()), optax.sgd(0.5)
    trial = analysis.Trial(
        update.init_state(jax.tree.map(jnp.copy, params), ascent),
        update.make_train_step(policy_logp, objective, ascent),
        analysis.make_gradient(policy_logp, objective, params),
        update.make_score(policy_logp),
    )
    found, expected = trial.by_gradient(credited, 0.5), trial.by_optimizer(credited)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.grad_norm > 1e-3
    assert found.distance == pytest.approx(expected.distance, rel=1e-4)
    np.testing.assert_allclose(found.logp, expected.logp, atol=1e-6)


def test_a_gradient_that_is_no_number_is_a_line():
    """A step with it changes nothing, and would be reported as one that moves no token."""
    tokens = tokens_of(np.zeros((1, 3), int), logp=np.zeros((1, 3)), advantage=np.ones((1, 3)))
    stuck = SimpleNamespace(by_optimizer=lambda _: analysis.Moved(np.nan, 0.0, tokens.logp))
    with pytest.raises(UserError, match="the gradient of a batch is nan"):
        analysis.updates(None, tokens, stuck, lambda _: None)


def test_the_cosine_of_nothing_is_none():
    assert analysis.cosine(np.ones(3), np.zeros(3)) is None
    assert analysis.cosine(np.ones(3), -np.ones(3)) == pytest.approx(-1.0)


def test_figures_over_batches_are_those_of_all_that_have_them():
    one = {"name": "x", "of": {"a": 1.0, "b": [1, None]}}
    other = {"name": "x", "of": {"a": 3.0, "c": None, "b": [2, 5.0]}}
    assert analysis.over_batches([one, other], max) == {
        "name": "x",
        "of": {"a": 3.0, "b": [2, 5.0], "c": None},
    }
    assert analysis.over_batches([one], min) == one


def test_variants_replace_what_the_run_had():
    other = factors.truncated
    run = Objective(
        advantage=advantages.grpo,
        factors=(other, factors.linear_in_probability),
        partition=partition.reversed,
    )
    made = analysis.variants(run, alpha=0.2, eta=0.4)
    assert made["plain"].factors == (other,)
    assert [objective.stages for objective in made.values()] == [1, 1, 2, 2]
    assert [len(objective.factors) for objective in made.values()] == [1, 2, 1, 2]


def test_direction_counts_those_that_moved():
    before = np.log([0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    after = before + np.array([0.1, -0.1, 1e-8, -0.2, 0.3, 0.4])
    advantage, bins = np.array([1.0, 1, 1, -1, -1, 0]), np.array([0, 0, 0, 1, 1, 1])
    found = analysis.direction(tokens_of(bins, logp=before, advantage=advantage, bins=bins), after)
    in_all = lambda name: [found[name][i] for i in (0, 1, -1)]
    assert in_all("rising") == [0.5, None, 0.5]
    assert in_all("falling") == [None, 0.5, 0.5]
    assert in_all("good_tokens") == [2, 0, 2]
    assert in_all("unmoved") == [1 / 3, 0.0, 0.2]


def test_tokens_are_drawn_evenly_and_with_what_came_before():
    bins = np.array([0] * 50 + [1] * 3 + [-1] * 9 + [2] * 20)
    index = token_gradients.spread(bins, 15, seed=1)
    assert np.bincount(bins[index]).tolist() == [6, 3, 6]
    assert len(set(index.tolist())) == 15
    assert sorted(token_gradients.spread(bins, 999, 0)) == np.flatnonzero(bins >= 0).tolist()
    responses = tiny.trajectories([[5, 6], [7]], [[1, 2], [3, 4, 2]])
    chosen = token_gradients.choose(responses, [(0, 0), (1, 2)])
    assert chosen.tokens.tolist() == [[5, 6, 0], [7, 3, 4]]
    assert chosen.index.tolist() == [1, 2]
    assert chosen.target.tolist() == [1, 2]


class Vectors:
    """Gradients of single tokens, which add up."""

    def __init__(self, tokens):
        self.of = np.random.default_rng(3).normal(size=(*tokens.mask.shape, 5)) + 0.5

    def gradient(self, where):
        return self.of[where].sum(0)

    def __call__(self, credited):
        return np.einsum("smrc,mrcd->d", credited.weight[:, 0], self.of)


def test_sources_are_those_of_the_gradients_of_tokens():
    """Against the vectors themselves: who is along the whole, and whether prompts agree."""
    response = np.repeat(np.arange(8), 6).reshape(2, 4, 6)
    response[:, :, -1] = -1
    mask, rng = response >= 0, np.random.default_rng(4)
    group = np.where(mask, rng.integers(0, 2, mask.shape), -1)
    tokens = tokens_of(response, group=group, response=response)
    weight = np.broadcast_to(mask, (1, 1, *mask.shape)).astype(float)
    batch, given = update.Credited(None, None, weight, None), Vectors(tokens)
    found = analysis.sources({"plain": batch}, tokens, given, 2, lambda _: None)
    assert {*found} == {"tokens", "plain"}
    assert {*found["tokens"]} == {"chatter", "reasoning"}
    even = np.isin(response, (0, 1, 4, 5))  # the first and the third prompt, two responses each
    cosine = lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    halves = lambda here: cosine(given.gradient(here & even), given.gradient(here & ~even))
    whole = given.gradient(mask)
    assert found["plain"]["agreement"] == pytest.approx(halves(mask), abs=1e-5)
    for b, part in enumerate(found["plain"]["groups"].values()):
        mine, others = given.gradient(group == b), given.gradient(mask & (group != b))
        assert part["norm"] == pytest.approx(np.linalg.norm(mine), rel=1e-5)
        assert part["share"] == pytest.approx(mine @ whole / (whole @ whole), abs=1e-5)
        assert part["cosine"] == pytest.approx(cosine(mine, others), abs=1e-5)
        assert part["agreement"] == pytest.approx(halves(group == b), abs=1e-5)
