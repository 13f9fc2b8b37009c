"""Every recipe of the cookbook, plain and with the paper's two methods: three steps on the puzzles of kk_tiny.

The responses are the SFT examples of kk_tiny, guessed and worked out, with their true rewards; the
sampler is a little off. `-m slow -s` prints the whole table.
"""

import dataclasses
import importlib.util
import inspect
import pathlib
from functools import cache, partial
from itertools import islice
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import rich.table

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import imitate, optimizers, update
from jaxrl_llm.models import logprobs, qwen2, tokenizer
from jaxrl_llm.objectives import Objective, losses, recipes
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.knights_knaves import generate, tiny
from jaxrl_llm.tasks.knights_knaves.task import reward
from tests import tiny as test_tiny

PROMPTS, GROUP, STEPS = 4, 4, 3
VARIANTS = {"plain": (0.0, 0.0), "both": (0.3, 0.5)}  # as published, and with the paper's methods
OPTIMIZER = optimizers.adamw(1e-4)


@cache
def kk_tiny():
    path = pathlib.Path(__file__).parents[1] / "configs" / "kk_tiny.py"
    spec = importlib.util.spec_from_file_location("kk_tiny", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bigram(params, inputs, *, proxy=0.0, top=None):
    """`Scores` of a policy that looks at the token before only: recipes meet log-probs, whatever made them."""
    before = jnp.take_along_axis(inputs.tokens, inputs.index, axis=1)
    hidden = params["embedding"][before]
    how = logprobs.Settings(proxy=proxy, top=top), inputs.others
    return logprobs.chunked(
        hidden, params["head"], inputs.target, inputs.scored, how[0], others=how[1]
    )


def model(kind, shape):
    """Scores `(params, inputs, proxy=, top=)` and parameters: of bigrams, or of one layer of a transformer."""
    if kind == "bigram":
        rng = np.random.default_rng(0)
        draw = lambda: jnp.asarray(rng.normal(size=(shape.vocab_size, 32)), jnp.float32) / 4
        return bigram, {"embedding": draw(), "head": draw()}
    shape = dataclasses.replace(shape, hidden_size=32, num_layers=1)
    return partial(logprobs.scores, qwen2.graph(shape)[0]), qwen2.init(shape)


@cache
def batches(kind):
    """Three batches with their rewards; a policy that has imitated them for a while, its parameters and scores."""
    config = kk_tiny().config()
    words = tokenizer.of_words(config.model.words)
    collate = dataclasses.replace(config.collate, microbatches=2)
    puzzles = islice(generate.puzzles("train", 3, 1, 0), STEPS * PROMPTS)
    rng, made = Random(0), []
    for _ in range(STEPS):
        prompts, responses, scores = [], [], []
        for puzzle in map(tiny.retell, islice(puzzles, PROMPTS)):
            for number in range(GROUP):
                text = tiny.guess(puzzle, rng) if number else tiny.demonstration(puzzle)
                prompts.append(words.encode(tiny.prompt(puzzle)))
                responses.append([*words.encode(text), words.eos])
                scores.append(reward(puzzle.names, puzzle.solution, " " + text).score)
        logps = [[-rng.random() - 3.5 for _ in r] for r in responses]
        batch = collate([*map(Trajectory, prompts, responses, logps)])
        made.append((batch, np.asarray(scores, np.float32).reshape(PROMPTS, GROUP)))
    assert all(len(np.unique(scores)) > 1 for _, scores in made)
    scores, params = model(kind, config.model.shape)

    def policy(params, inputs):
        found = scores(params, inputs)
        return found.logp if inputs.others is None else (found.logp, found.others)

    score = update.make_score(partial(scores, proxy=0.02, top=logprobs.Top(8, 64)))
    return made, policy, imitator(policy, params, made), score


def imitator(policy, params, made):
    """The parameters after 30 supervised steps: some tokens are likely by then, others are not."""
    optimizer, credit = optimizers.adamw(1e-2), update.make_credit(imitate.IMITATION)
    step = update.make_train_step(policy, imitate.IMITATION, optimizer)
    state = update.init_state(params, optimizer)
    for number in range(30):
        batch, scores = made[number % STEPS]
        zero = np.zeros(batch.layout.in_rows.shape, np.float32)
        state, _ = step(state, credit(batch, scores, old_logp=zero))
    return state.params


def check(name, variant, kind):
    """The rows of metrics of three steps of a recipe, after what holds for all of them was checked."""
    alpha, eta = VARIANTS[variant]
    recipe = recipes.BY_NAME[name](kk_tiny().config().collate.response_length)
    objective = recipes.with_ar_and_lopti(recipe, alpha=alpha, eta=eta)
    made, policy, params, score = batches(kind)
    before = jax.tree.map(np.asarray, params)
    step = update.make_train_step(policy, objective, OPTIMIZER)
    credit = update.make_credit(objective)
    state, reported = update.init_state(jax.tree.map(jnp.copy, params), OPTIMIZER), []
    for batch, scores in made:
        found = score(state.params, batch.inputs)
        data = {"old_logp": found.logp, "entropy": found.entropy, "proxy_logp": found.proxy_logp}
        data |= {"ref_logp": found.logp - 0.01, "teacher_logp": 0.9 * found.logp}
        if objective.reads("teacher_top"):  # half as sure of the same
            tokens, likeliest = found.top
            data["teacher_top"] = tokens, jax.nn.log_softmax(likeliest / 2) - 0.1
        state, rows = step(state, credit(batch, scores, **data))
        reported.append(jax.device_get(rows))
    assert int(state.skipped) == 0
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), state.params, before)
    assert 0 < max(jax.tree.leaves(moved)) < 0.01
    rows, stages = {k: np.concatenate([r[k] for r in reported]) for k in reported[0]}, 1 + bool(eta)
    assert objective.stages == stages
    assert rows["loss"].shape == (STEPS * 2 * stages,)
    assert all(np.isfinite(x).all() for x in rows.values()), name
    assert rows["grad_norm"].max() > 0
    assert np.all(rows["share"].reshape(-1, stages).mean(0) > 0.02)  # each stage has tokens
    return rows


@pytest.mark.parametrize("name", ["grpo", "kl_cov", "gkd"])
def test_with_both_methods(name):
    """Through the transformer: a loss by token, and one by selection, entropy and proxy."""
    check(name, "both", "transformer")


@pytest.mark.long
def test_the_whole_table():
    """Mean loss and gradient norm of three steps; nothing is refused."""
    shown = ["plain", "both"]
    table = rich.table.Table("recipe", *shown, title="loss and gradient norm, three steps")
    for name in recipes.BY_NAME:
        cells = [check(name, variant, "bigram") for variant in shown]
        table.add_row(
            name, *(f"{x['loss'].mean():+.4f} {x['grad_norm'].mean():.3f}" for x in cells)
        )
    rich.console.Console(width=120).print(table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "surrogate",
    [losses.gspo, losses.gmpo, losses.opsm],
)
def test_stages_of_response_level_losses_add_up_to_the_plain_gradient(surrogate):
    """With Lopti a stage scores whole responses: its slopes are those of the plain loss, token by token."""
    plain = dataclasses.replace(recipes.gspo(112), surrogate=surrogate)
    made, policy, params, score = batches("transformer")
    batch, scores = made[0]
    old = score(params, batch.inputs).logp - 0.1

    def gradient(objective):
        credited = update.make_credit(objective)(batch, scores, old_logp=old)

        @jax.jit
        @jax.grad
        def slope(params, weight):
            micro = jax.tree.map(lambda x: x[0, 0], credited._replace(weight=weight))
            each = objective.per_token(policy(params, micro.inputs), micro.advantage, micro.data)
            return (micro.weight * sum(each)).sum()

        parts = [slope(params, weight) for weight in credited.weight]
        return jax.tree.map(lambda *x: sum(x), *parts)

    both = gradient(plain), gradient(recipes.with_ar_and_lopti(plain, alpha=0.0))
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_table_of_names_is_the_file():
    """The command line offers every recipe of the cookbook, and each fits on a few lines."""
    written = [
        name
        for name, value in vars(recipes).items()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["length"]
    ]
    assert list(recipes.BY_NAME) == written
    assert max(len(inspect.getsource(f).splitlines()) for f in recipes.BY_NAME.values()) <= 12


PLAIN = Objective(advantage=print)
PUBLISHED = {  # at a limit of 90 tokens, defaults of functions too
    "grpo": "grpo; clipped(low 0.2, high 0.24, dual 10); 0.001 k3",
    "reinforce_plus_plus": (
        "reinforce_plus_plus(kl_coef 0.001, gamma 1, estimator k1); clipped(low 0.2, high 0.24, dual 10)"
    ),
    "rloo": "rloo; reinforce; seq_mean_token_sum",
    "dr_grpo": "dr_grpo; clipped(low 0.2, high 0.2, dual 10); constant_length(length 90)",
    "dapo": (
        "shaped(then grpo, by overlong(buffer 18, factor 1, floor -1, longest 90)); "
        "clipped(low 0.2, high 0.28, dual 10)"
    ),
    "gspo": "grpo; gspo(low 0.0003, high 0.0004); seq_mean_token_mean",
    "cispo": "grpo; cispo(low 1, high 4, anchor trainer)",
    "dppo": "dr_grpo; dppo_tv(low 0.15, high 0.15, anchor sampler, then cispo(low 1, high 9, anchor sampler))",
    "dppo_kl": "dr_grpo; dppo_kl(low 0.05, high 0.05, anchor sampler, then cispo(low 1, high 9, anchor sampler))",
    "gmpo": "grpo; gmpo(low 0.4, high 0.4); seq_mean_token_mean",
    "sapo": "grpo; sapo(tau_positive 1, tau_negative 1.05); seq_mean_token_mean",
    "ce_gppo": "grpo; ce_gppo(low 0.2, high 0.2, dual 10, beta1 0.75, beta2 1)",
    "aspo": "grpo; calm(quantile 0.8); aspo(calm 0.2, open 0.4, dual 3)",
    "topr": "dr_grpo; topr(positive positive_reward, weights 1 1)",
    "kl_cov": "grpo; covariance(share 0.002, logp None); importance(anchor trainer); 1 drift_of_selected",
    "clip_cov": (
        "grpo; "
        "without(select covariance_band(share 0.0002, lower 1, upper 5, low 1, high 1, seed 0, logp None)); "
        "clipped(low 1, high 1, dual 10)"
    ),
    "entropy_80_20": (
        "shaped(then grpo, by overlong(buffer 18, factor 1, floor -1, longest 90)); "
        "only(select highest_entropy(share 0.2)); clipped(low 0.2, high 0.28, dual 10)"
    ),
    "lp_reg": "grpo; lowest_probability(share 0.01, positive_share 0, logp None); lp_reg(low 1, high 9, coef 1)",
    "w_reinforce": "w_reinforce(positive 0.1); clipped(low 0.2, high 0.2, dual 10)",
    "maxrl": "maxrl; importance(anchor trainer)",
    "opo": "opo; importance(anchor trainer)",
    "asymre": "asymre(shift -0.1); reinforce",
    "unlikeliness": (
        "shaped(then grpo, by unlikeliness(beta 0.25)); clipped(low 0.2, high 0.24, dual 10); 0.001 k3"
    ),
    "tis": "grpo; truncated(cap 2, floor 0, weight token_ratio); clipped(low 0.2, high 0.24, dual 10); 0.001 k3",
    "icepop": "grpo; masked(low 0.5, high 5, weight token_ratio); clipped(low 0.2, high 0.24, dual 10); 0.001 k3",
    "mis": "grpo; masked(low 0, high 3, weight response_ratio); clipped(low 0.2, high 0.24, dual 10); 0.001 k3",
    "distillation": "distilled(coef 1, reward_coef 0, of_reward grpo); importance(anchor sampler)",
    "gkd": "nothing; 1 of_top(beta 0.5)",
    "erl": "erl; clipped(low 0.2, high 0.28, dual 10); 0.001 k3; seq_mean_token_sum",
    "opsm": "grpo; opsm(delta 0.0001, anchor trainer, then clipped(low 0.2, high 0.24, dual 10)); 0.001 k3",
}


def said(part):
    """A function with its settings in words, or several."""
    if isinstance(part, tuple):
        return " ".join(map(said, part))
    if not callable(part):
        return str(part) if part is None else f"{part:g}"
    function, given = (part.func, part.keywords) if isinstance(part, partial) else (part, {})
    known = inspect.signature(function).parameters.values()
    settings = {p.name: p.default for p in known if p.default is not p.empty} | given
    inside = ", ".join(f"{name} {said(value)}" for name, value in settings.items())
    return f"{function.__name__}({inside})" if inside else function.__name__


@pytest.mark.parametrize("name", recipes.BY_NAME)
def test_settings_are_the_published_ones(name):
    made = recipes.BY_NAME[name](90)
    fields = [field.name for field in dataclasses.fields(made)]
    changed = [getattr(made, x) for x in fields if getattr(made, x) != getattr(PLAIN, x)]
    assert "; ".join(map(said, changed)) == PUBLISHED[name]


def test_both_methods_come_after_what_a_recipe_has():
    tamed = recipes.with_ar_and_lopti(recipes.tis(90))
    assert said(tamed.factors) == (
        "truncated(cap 2, floor 0, weight token_ratio) linear_in_probability(alpha 0.3)"
    )
    assert said(tamed.partition) == "lopti(eta 0.5)"


@pytest.mark.parametrize(
    "strengths",
    [{"alpha": 3.0}, {"alpha": -0.3}, {"alpha": np.nan}, {"eta": 50.0}, {"eta": -1.0}],
    ids=str,
)
def test_alpha_and_eta_are_from_0_to_1(strengths):
    """Beyond that rare tokens would be learned from with the other sign, or one stage would have all."""
    [name] = strengths
    with pytest.raises(UserError, match=f"{name} = .* from 0 to 1"):
        recipes.with_ar_and_lopti(recipes.grpo(14), **strengths).try_out()


@pytest.mark.parametrize("rate", [-1e-6, np.nan, np.inf])
def test_a_learning_rate_is_a_number_from_0_on(rate):
    with pytest.raises(UserError, match="learning rate"):
        optimizers.adamw(rate)
    with pytest.raises(UserError, match="learning rate"):
        optimizers.muon(rate, lambda params: params)
    optimizers.adamw(0.0)


def test_a_constant_of_the_model_does_not_decay():
    """Gemma 4's `layer_scalar` has no gradient, and is no weight."""
    _, params = test_tiny.policy(test_tiny.FAMILIES["gemma4"])
    optimizer, still = optimizers.adamw(1e-3), jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(params), params, step=0)
    left = {
        jax.tree_util.keystr(path).rpartition("[")[2]
        for path, update in jax.tree_util.tree_leaves_with_path(updates)
        if not update.any()
    }
    assert left == {"'layer_scalar']"}
