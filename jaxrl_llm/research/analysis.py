"""Figures of arXiv:2505.12929 for a policy: which tokens its updates come from, which they move.

Every figure is plain numbers for JSON, means over several batches since one batch tells little.
An update "on some tokens" keeps their weights and sets the others' to 0, so that the gradients of
bins add up to that of all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from jaxrl_llm.config import Config, Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.learning.groups import Group, rewards, trajectories
from jaxrl_llm.learning.update import Credited, PolicyLogp, TrainState
from jaxrl_llm.objectives import Objective, factors, partition, recipes
from jaxrl_llm.research import token_gradients, words
from jaxrl_llm.research.statistics import mean
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.knights_knaves.tiny import FILLERS
from jaxrl_llm.training.components import Components, readable
from jaxrl_llm.training.leaving import Stop

EDGES = (0.25, 0.5, 0.75)
BINS = ["p < 0.25", "0.25 to 0.5", "0.5 to 0.75", "p ≥ 0.75"]
GROUPS = ["chatter", "reasoning", "answer"]
RESOLUTION = 1e-6  # log-probs that differ by less are the same in float32
Say = Callable[[str], None]
"""is called with a line of progress"""


@dataclass(frozen=True)
class Subject:
    """The policy to analyze, its optimizer state, reference, and the methods' alpha and eta."""

    components: Components
    state: TrainState
    reference: Any
    alpha: float
    eta: float

    @property
    def config(self) -> Config:
        return self.components.config


class Tokens(NamedTuple):
    """The tokens of a batch in its layout, arrays `[M,m,R,C]`; integers are -1 on padding."""

    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    bins: np.ndarray
    """index in BINS"""
    group: np.ndarray
    """index in GROUPS"""
    response: np.ndarray
    """index of the response"""
    position: np.ndarray
    """index of the token in its response"""


class Moved(NamedTuple):
    """The effect of an update: gradient norm of its first stage, way of the parameters, log-probs."""

    grad_norm: float
    distance: float
    logp: np.ndarray


@dataclass(frozen=True)
class Trial:
    """Updates to try on a batch, each on a copy of `state`.

    `step` is the run's train step, `gradient(credited)` that of one stage, and
    `score(params, inputs)` gives the log-probs after an update.
    """

    state: TrainState
    step: Callable[[TrainState, Credited], tuple[TrainState, Any]]
    gradient: Callable[[Credited], Any]
    score: Callable[[Any, Any], jax.Array]

    def by_optimizer(self, credited: Credited) -> Moved:
        """The effect of one train step."""
        state, visits = self.step(jax.tree.map(jnp.copy, self.state), credited)
        distance = _distance(state.params, self.state.params)
        return self._moved(visits["grad_norm"][0], distance, state.params, credited)

    def by_gradient(self, credited: Credited, rate: float) -> Moved:
        """The effect of a gradient-descent step, `params - rate * gradient`."""
        stepped, norm = _descend(self.state.params, self.gradient(credited), rate)
        return self._moved(norm, rate * norm, stepped, credited)

    def _moved(self, norm: Any, distance: Any, params: Any, credited: Credited) -> Moved:
        now = self.score(params, credited.inputs._replace(others=None))
        return Moved(float(norm), float(distance), np.asarray(now))


# Each one program: a program for every array, queued without waiting, can starve the reductions over
# virtual devices of a CPU, and XLA ends a process whose reduction waits for 40 seconds.
@jax.jit
def _distance(params: Any, before: Any) -> jax.Array:
    return optax.tree.norm(optax.tree.sub(params, before))


@jax.jit
def _descend(params: Any, gradient: Any, rate: float) -> tuple[Any, jax.Array]:
    """`(params - rate * gradient, the gradient's norm)`."""
    stepped = jax.tree.map(lambda x, g: x - rate * g, params, gradient)
    return stepped, optax.tree.norm(gradient)


def measure(
    of: Subject, sampler: Sampler, *, prompts: int, batches: int, tokens: int, seed: int, say: Say
) -> dict[str, Any]:
    """All figures: means over `batches` batches of `prompts` prompts each, with "least" and "most".

    `tokens` single tokens get a gradient of their own. A UserError if all advantages of a batch
    are 0, as they are if each group's rewards are equal.
    """
    samples = draw(of, sampler, prompts, batches, seed)
    learned = [of.components.as_learned(groups) for groups in samples]
    trial, credit = compiled(of, max(len(trajectories(groups)) for groups in samples))
    each, each_data = [], []
    for number, (sample, changed) in enumerate(zip(samples, learned, strict=True), 1):
        tell = lambda doing, number=number: say(f"batch {number} of {batches}: {doing}")
        credited, there = credit(changed)
        if not np.any(there.advantage):
            if not all(group.is_constant() for group in sample):
                raise UserError(
                    "the objective gives no token an advantage, so there is nothing to analyze: it learns from "
                    "penalties alone"
                )
            raise UserError(
                "all responses to each prompt earned the same, so there is nothing to learn from: "
                "take more --prompts or another --seed"
            )
        gradient = lambda batch: np.asarray(ravel_pytree(trial.gradient(batch))[0])
        each.append(
            {
                "updates": updates(credited["plain"], there, trial, tell),
                "directions": directions(credited, there, trial, tell),
                "sources": sources(credited, there, gradient, of.config.group_size, tell),
            }
        )
        each_data.append(there)
    spread = {"least": min, "most": max} if batches > 1 else {}
    model = of.config.model
    patterns = words.categories(model.words if isinstance(model, Scratch) else ())
    texts, scores = checked(of, samples)
    return {
        "sample": {
            **described(samples),
            "tokens": sum(int(one.mask.sum()) for one in each_data),
            "optimizer_steps_before": int(of.state.step),
        },
        **over_batches(each, fmean),
        "single_tokens": _single_tokens(
            of, trajectories(learned[0]), each_data[0], tokens, seed, say
        ),
        "words": words.frequencies(texts, scores, patterns),
        **{name: over_batches(each, pick) for name, pick in spread.items()},
    }


def draw(of: Subject, sampler: Sampler, prompts: int, batches: int, seed: int) -> list[list[Group]]:
    """Graded groups, a batch an item; no two batches share a training example."""
    components, config = of.components, of.config
    source = components.task.train
    first = [source[i] for i in range(min(prompts * batches, len(source)))]
    usable = readable(components, first, "train")
    if len(usable) < batches:
        raise UserError(f"{len(usable)} prompts are too few for {batches} batches: take fewer")
    task, sampling = components.token_task(), components.sampling(seed=seed)
    samples = []
    for number in range(batches):
        examples = [usable[i] for i in range(number, len(usable), batches)]
        n = config.group_size
        samples.append(task.answer(sampler, examples, n=n, sampling=sampling, stop=Stop()))
    return samples


def compiled(
    of: Subject, responses: int
) -> tuple[Trial, Callable[[list[Group]], tuple[dict[str, Credited], Tokens]]]:
    """The programs for batches of up to so many responses; and the batch, by variant, of groups."""
    tried = variants(of.config.loss, alpha=of.alpha, eta=of.eta)
    plain, collate, params = tried["plain"], of.config.collate, of.state.params
    share = responses / (of.config.prompts * of.config.group_size)
    slices = max(1, round(collate.minibatches * collate.microbatches * share))  # as in training
    collate = replace(collate, minibatches=1, microbatches=slices)
    config = replace(of.config, collate=collate, objective=plain)
    reference = params if of.reference is None else of.reference
    reference = reference if plain.reads("ref_logp") else None
    logp = of.components.policy.logp(of.config.sampling.temperature)
    changed = replace(of.components, config=config)
    training, score = changed.step(of.state, reference), update.make_score(logp)
    credit = {name: update.make_credit(one) for name, one in tried.items()}

    def credited(sample: list[Group]) -> tuple[dict[str, Credited], Tokens]:
        batch, reward = training.batch(sample)
        scores, _ = training.score(params, batch, sample)
        by_variant = {name: make(batch, reward, **scores) for name, make in credit.items()}
        rows = np.asarray(batch.layout.in_rows)
        mask = rows >= 0
        response, position = np.divmod(rows, batch.mask.shape[1])
        group, groups = np.full(rows.shape, -1), _groups(of, trajectories(sample))
        where = zip(response[mask].tolist(), position[mask].tolist(), strict=True)
        group[mask] = [GROUPS.index(groups[i][t]) for i, t in where]
        now = np.asarray(score(params, batch.inputs))
        return by_variant, Tokens(
            mask,
            now,
            np.asarray(by_variant["plain"].advantage),
            by_probability(now, mask, EDGES),
            group,
            np.where(mask, response, -1),
            position,
        )

    gradient = make_gradient(logp, plain, params)
    step = partial(training.programs.update, frozen=training.frozen)
    return Trial(of.state, step, gradient, score), credited


def make_gradient(
    policy_logp: PolicyLogp, objective: Objective, params: Any
) -> Callable[[Credited], Any]:
    """A function that gives a train step's gradient, for one mini-batch and one stage."""

    def keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), updates

    keeps = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), keep)
    step = update.make_train_step(policy_logp, objective, keeps)
    state = update.init_state(params, keeps)
    return lambda credited: step(jax.tree.map(jnp.copy, state), credited)[0].opt_state


def variants(objective: Objective, *, alpha: float, eta: float) -> dict[str, Objective]:
    """The objective without the paper's two methods, with each, and with both."""
    methods = (factors.linear_in_probability,)
    function = lambda factor: factor.func if isinstance(factor, partial) else factor
    others = (factor for factor in objective.factors if function(factor) not in methods)
    plain = replace(objective, factors=tuple(others), partition=partition.together)
    tamed = partial(recipes.with_ar_and_lopti, plain)
    return {
        "plain": plain,
        "reweighting": tamed(alpha=alpha, eta=0.0),
        "Lopti": tamed(alpha=0.0, eta=eta),
        "both": tamed(alpha=alpha, eta=eta),
    }


def only(credited: Credited, where: Any) -> Credited:
    """The batch with the weights of tokens outside `where` set to 0; the others keep theirs."""
    return credited._replace(weight=jnp.where(jnp.asarray(where)[None], credited.weight, 0.0))


def by_probability(logp: np.ndarray, mask: np.ndarray, edges: Sequence[float]) -> np.ndarray:
    """The bin of each token, -1 on padding; bin b is [edges[b - 1], edges[b]) in probability."""
    return np.where(mask, np.searchsorted(np.log(edges), logp, side="right"), -1)


def updates(plain: Credited, tokens: Tokens, trial: Trial, say: Say) -> dict[str, Any]:
    """Fig. 1: gradient norm of each bin, and how far an update on all tokens or one bin moves each.

    Updates are tried by the run's optimizer, and by plain gradient descent at the rate that makes
    the step on all tokens as long as the optimizer's.
    """
    inside = {name: tokens.bins == b for b, name in enumerate(BINS)}
    records = {
        name: {
            "name": name,
            "tokens": int(here.sum()),
            "share": float(here.sum()) / max(int(tokens.mask.sum()), 1),
            "probability": mean(np.exp(tokens.logp[here])),
            "advantage": mean(tokens.advantage[here]),
            "advantage_size": mean(np.abs(tokens.advantage[here])),
        }
        for name, here in inside.items()
    }
    say("update on all tokens")
    whole = trial.by_optimizer(plain)
    if not np.isfinite(whole.grad_norm):
        raise UserError(f"the gradient of a batch is {whole.grad_norm}: no update can be tried")
    rate = whole.distance / max(whole.grad_norm, 1e-30)
    tried: dict[str, Any] = {}
    for by, step in (
        ("optimizer", trial.by_optimizer),
        ("gradient", partial(trial.by_gradient, rate=rate)),
    ):
        moved = {"all": whole if by == "optimizer" else step(plain)}
        for name, here in inside.items():
            if here.any():
                say(f"update on {name}, by the {by}")
                moved[name] = step(only(plain, here))
                records[name]["gradient_norm"] = moved[name].grad_norm
        sizes = {on: np.abs(after.logp - tokens.logp) for on, after in moved.items()}
        tried[by] = {
            on: {"logp_size": [mean(size[here]) for here in inside.values()]}
            for on, size in sizes.items()
        }
    found = {"bins": [*records.values()], "updates": tried}
    return {"gradient_norm": whole.grad_norm, "rate": rate, "probability": found}


def directions(
    credited: Mapping[str, Credited], tokens: Tokens, trial: Trial, say: Say
) -> dict[str, Any]:
    """Fig. 3: share of tokens that each variant's update moves in their advantage's direction."""
    found = {}
    for name, batch in credited.items():
        say(f"update by {name}")
        found[name] = direction(tokens, trial.by_optimizer(batch).logp)
    return {"probability": {"bins": BINS, "variants": found}}


def direction(tokens: Tokens, after: np.ndarray) -> dict[str, list]:
    """Of the tokens that moved, the share in their advantage's direction, by bin, then in all bins.

    Also the number of tokens that moved, and the share of those with an advantage that did not.
    """
    up, moved = after > tokens.logp, np.abs(after - tokens.logp) > RESOLUTION
    bins = [*(tokens.bins == b for b in range(len(BINS))), tokens.bins >= 0]
    inside = [here & (tokens.advantage != 0) for here in bins]
    good, bad = moved & (tokens.advantage > 0), moved & (tokens.advantage < 0)
    return {
        "rising": [mean(up[here & good]) for here in inside],
        "falling": [mean(~up[here & bad]) for here in inside],
        "good_tokens": [int((here & good).sum()) for here in inside],
        "bad_tokens": [int((here & bad).sum()) for here in inside],
        "unmoved": [mean(~moved[here]) for here in inside],
    }


def sources(
    credited: Mapping[str, Credited],
    tokens: Tokens,
    gradient: Callable[[Credited], np.ndarray],
    group_size: int,
    say: Say,
) -> dict[str, Any]:
    """How much of the gradient each group of tokens gives, by variant and stage; no update is made.

    Of each group: the norm of its gradient g; its share, g.G / G.G with the whole gradient G
    (shares add up to 1; one that points against G is negative); and the cosine of g and G - g.
    Agreement is the cosine of the gradients of even-numbered and of odd-numbered prompts.
    """
    total, even = int(tokens.mask.sum()), tokens.response // group_size % 2 == 0
    inside = {name: tokens.group == b for b, name in enumerate(GROUPS) if (tokens.group == b).any()}
    out: dict[str, Any] = {"tokens": {name: int(x.sum()) / total for name, x in inside.items()}}
    for variant, batch in credited.items():
        stages = batch.weight.shape[0]
        for s in range(stages):
            one = batch._replace(weight=batch.weight[s : s + 1])
            if not bool((one.weight > 0).any()):
                continue  # a stage without tokens is no step
            say(f"gradients of the groups, {variant}")
            halves = {
                name: [gradient(only(one, here & half)) for half in (even, ~even)]
                for name, here in inside.items()
            }
            groups = {group: np.add(*both) for group, both in halves.items()}
            whole = np.sum([*groups.values()], axis=0)
            name = variant + (f", stage {s + 1}" if stages > 1 else "")
            out[name] = {
                "gradient_norm": norm(whole),
                "agreement": cosine(*np.sum([*halves.values()], axis=0)),
                "groups": {
                    group: {
                        "norm": norm(mine),
                        "share": float(mine @ whole / (whole @ whole)) if whole.any() else None,
                        "cosine": cosine(mine, whole - mine),
                        "agreement": cosine(*halves[group]),
                    }
                    for group, mine in groups.items()
                },
            }
    return out


def norm(x: Any) -> float:
    """The length of a vector."""
    return float(np.linalg.norm(x))


def cosine(x: Any, y: Any) -> float | None:
    """The cosine of two gradients; None if one of them is 0."""
    size = norm(x) * norm(y)
    return float(x @ y / size) if size else None


def _single_tokens(
    of: Subject, responses: Sequence[Trajectory], there: Tokens, count: int, seed: int, say: Say
) -> dict[str, Any]:
    """Fig. 2, for `count` tokens drawn evenly from the bins."""
    index = token_gradients.spread(there.bins.ravel(), count, seed)
    where = zip(there.response.ravel()[index], there.position.ravel()[index], strict=True)
    chosen = token_gradients.choose(responses, [(int(i), int(t)) for i, t in where])
    definition, temperature = of.components.policy.definition, of.config.sampling.temperature or 1.0
    logits = partial(token_gradients.next_logits, definition, temperature=temperature)
    offsets = token_gradients.no_offsets(of.components.shape, chosen.tokens.shape[1])
    return token_gradients.single_tokens(of.state.params, chosen, logits, offsets, say)


def _groups(of: Subject, responses: Sequence[Trajectory]) -> list[list[str]]:
    """The group of every sampled token; 'chatter' only if the model's own words include all fillers."""
    model, tokenizer = of.config.model, of.components.tokenizer
    known = isinstance(model, Scratch) and set(FILLERS) <= set(model.words)
    fillers = frozenset(FILLERS if known else ())
    sampled = [[one.tokens[t] for t in one.sampled] for one in responses]
    pieces = ([tokenizer.decode([t]) for t in tokens] for tokens in sampled)
    return [words.group(piece, fillers) for piece in pieces]


def checked(of: Subject, samples: Sequence[list[Group]]) -> tuple[list[str], list[float]]:
    """The texts of responses that could be checked, and their scores."""
    scored = [
        (of.components.tokenizer.decode(one.tokens), one.reward.score)
        for groups in samples
        for one in trajectories(groups)
        if one.reward and one.reward.graded
    ]
    return [text for text, _ in scored], [score for _, score in scored]


def described(samples: Sequence[list[Group]]) -> dict[str, Any]:
    """Counts and means of the responses; means leave out ungraded ones."""
    each = [reward for groups in samples for reward in rewards(groups)]
    known, count = [reward for reward in each if reward.graded], len(each)
    return {
        "responses": count,
        "ungraded": count - len(known),
        "reward": mean(np.asarray([r.score for r in known])),
        "accuracy": mean(np.asarray([r.correct for r in known])),
    }


def over_batches(values: Sequence[Any], of: Callable[[list], float]) -> Any:
    """Merges records of the same form; each number is `of` all values that are not None."""
    there = [x for x in values if x is not None]
    if not there:
        return None
    if isinstance(there[0], dict):
        names = dict.fromkeys(name for x in there for name in x)
        return {name: over_batches([x.get(name) for x in there], of) for name in names}
    if isinstance(there[0], list):
        return [over_batches(x, of) for x in zip(*there, strict=True)]
    return there[0] if isinstance(there[0], str) else of(there)
