"""Figures of arXiv:2505.12929 for a policy: which tokens its updates come from, which they move.

Every figure is plain numbers for JSON, means over several batches since one batch tells little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import jax
import numpy as np
import optax

from jaxrl_llm.config import Config, Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.learning.answers import Answers
from jaxrl_llm.learning.batch import Batch
from jaxrl_llm.learning.update import Credited
from jaxrl_llm.models import logprobs
from jaxrl_llm.research import probe, token_gradients, words
from jaxrl_llm.research.probe import Moved, Probe
from jaxrl_llm.research.statistics import mean
from jaxrl_llm.rollouts.sampler import Rollout, Sampler
from jaxrl_llm.tasks.knights_knaves.tiny import FILLERS
from jaxrl_llm.tasks.task import Reward
from jaxrl_llm.training.parts import Parts, readable

EDGES = (0.25, 0.5, 0.75)
BINS = ["p < 0.25", "0.25 to 0.5", "0.5 to 0.75", "p ≥ 0.75"]
GROUPS = ["chatter", "reasoning", "answer"]
Say = Callable[[str], None]
"""is called with a line of progress"""


@dataclass(frozen=True)
class Subject:
    """The policy to analyze, its optimizer state, reference, and the methods' alpha and eta."""

    config: Config
    parts: Parts
    state: update.TrainState
    reference: Any
    alpha: float
    eta: float


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch in its layout, arrays `[M,m,R,C]`; integers are -1 on padding."""

    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    group: np.ndarray
    """index in GROUPS"""
    response: np.ndarray
    """index of the response"""
    position: np.ndarray
    """index of the token in its response"""

    @property
    def bins(self) -> np.ndarray:
        """`[M,m,R,C]`: index of each token in BINS; -1 on padding."""
        return probe.by_probability(self.logp, self.mask, EDGES)


def measure(
    of: Subject, sampler: Sampler, *, prompts: int, batches: int, tokens: int, seed: int, say: Say
) -> dict[str, Any]:
    """All figures: means over `batches` batches of `prompts` prompts each, with "least" and "most".

    `tokens` single tokens get a gradient of their own. A UserError if all advantages of a batch
    are 0, as they are if each group's rewards are equal.
    """
    samples = draw(of, sampler, prompts, batches, seed)
    programs = Programs(of, max(len(one.rollout.responses) for one in samples))
    each, seen = [], []
    for number, sample in enumerate(samples, 1):
        told = lambda doing, number=number: say(f"batch {number} of {batches}: {doing}")
        credited, there = programs.credited(sample, _groups(of, sample.rollout))
        if not np.any(there.advantage):
            raise UserError(
                "all responses to each prompt earned the same, so there is nothing to learn from: "
                "take more --prompts or another --seed"
            )
        size = of.config.group_size
        each.append(
            {
                "updates": updates(credited["plain"], there, programs, told),
                "directions": directions(credited, there, programs.optimizer, told),
                "sources": sources(credited, there, programs.gradient, size, told),
            }
        )
        seen.append(there)
    spread = {"least": min, "most": max} if batches > 1 else {}
    texts, scores = checked(of, samples)
    model = of.config.model
    patterns = words.categories(model.words if isinstance(model, Scratch) else ())
    rewards = [reward for one in samples for reward in one.rewards]
    return {
        "sample": described(of, rewards, sum(int(one.mask.sum()) for one in seen)),
        **over_batches(each, fmean),
        "single_tokens": _single_tokens(of, samples[0].rollout, seen[0], tokens, seed, say),
        "words": words.frequencies(texts, scores, patterns),
        **{name: over_batches(each, pick) for name, pick in spread.items()},
    }


def draw(of: Subject, sampler: Sampler, prompts: int, batches: int, seed: int) -> list[Answers]:
    """Judged responses, a batch an item; no two batches share a training example."""
    config, parts = of.config, of.parts
    source = parts.task.train
    first = [source[i] for i in range(min(prompts * batches, len(source)))]
    known = readable(parts, first, config, "train")
    if len(known) < batches:
        raise UserError(f"{len(known)} prompts are too few for {batches} batches: take fewer")
    task, sampling = parts.token_task(config), parts.sampling(config, seed=seed)
    samples = []
    for number in range(batches):
        examples = [known[i] for i in range(number, len(known), batches)]
        rollout = task.sample(sampler, examples, n=config.group_size, sampling=sampling)
        samples.append(task.judge(examples, rollout))
    return samples


class Programs:
    """The programs to try on a batch: credit of each variant, updates, gradients; compiled once."""

    def __init__(self, of: Subject, responses: int):
        variants = probe.variants(of.config.objective, alpha=of.alpha, eta=of.eta)
        plain, collate = variants["plain"], of.config.collate
        share = responses / (of.config.prompts * of.config.group_size)
        slices = max(1, round(collate.minibatches * collate.microbatches * share))  # as in training
        collate = replace(collate, minibatches=1, microbatches=slices)
        config = replace(of.config, collate=collate, objective=plain)
        reference = of.state.params if of.reference is None else of.reference
        reference = reference if plain.reads("ref_logp") else None
        logp = of.parts.policy.logp(of.config.sampling.temperature)
        self._credit = {name: update.make_credit(one) for name, one in variants.items()}
        self._training = of.parts.programs(config, of.state, reference)
        self._params = of.state.params
        self._score = update.make_score(logp)
        self.optimizer = Probe(of.state, self._training.update, self._score)
        self.gradient = probe.make_gradient(logp, plain, self._params)

    def along(self, rate: float) -> Callable[[Credited], Moved]:
        """A function that takes a gradient-descent step of this rate on a batch."""
        return partial(probe.step_along, self._params, self.gradient, self._score, rate)

    def credited(
        self, sample: Answers, groups: Sequence[list[str]]
    ) -> tuple[dict[str, Credited], Tokens]:
        """The credited batch of each variant, and its tokens; `groups` as in `tokens_of`."""
        batch, reward = self._training.batch(sample.rollout, sample.rewards)
        scores, _ = self._training.score(self._params, batch)
        credited = {name: credit(batch, reward, **scores) for name, credit in self._credit.items()}
        plain = credited["plain"]
        logp = self._score(self._params, plain.inputs)
        return credited, tokens_of(batch, plain, logp, groups)


def tokens_of(batch: Batch, credited: Credited, logp: Any, groups: Sequence[list[str]]) -> Tokens:
    """The tokens of a batch; `groups` are the names in GROUPS of each response's tokens."""
    rows = np.asarray(batch.layout.in_rows)
    mask, width = rows >= 0, batch.mask.shape[1]
    response, position = np.divmod(rows, width)
    response, group = np.where(mask, response, -1), np.full(rows.shape, -1)
    where = zip(response[mask].tolist(), position[mask].tolist(), strict=True)
    group[mask] = [GROUPS.index(groups[i][t]) for i, t in where]
    return Tokens(mask, np.asarray(logp), np.asarray(credited.advantage), group, response, position)


def updates(plain: Credited, tokens: Tokens, programs: Programs, say: Say) -> dict[str, Any]:
    """Fig. 1: gradient norm of each bin, and how far an update on all tokens or one bin moves each.

    Updates are tried by the run's optimizer, and by plain gradient descent at the rate that makes
    the step on all tokens as long as the optimizer's.
    """
    say("update on all tokens")
    whole, bins = programs.optimizer(plain), tokens.bins
    rate = whole.distance / max(float(whole.grad_norm[0]), 1e-30)
    records = probe.described(BINS, bins, tokens.logp, tokens.advantage)
    tried: dict[str, Any] = {}
    for by, step in (("optimizer", programs.optimizer), ("gradient", programs.along(rate))):
        moved = {"all": whole if by == "optimizer" else step(plain)}
        for b, name in enumerate(BINS):
            if (bins == b).any():
                say(f"update on {name}, by the {by}")
                moved[name] = step(probe.only(plain, bins == b))
                records[b]["gradient_norm"] = float(moved[name].grad_norm[0])
        sizes = {on: np.abs(after.logp - tokens.logp) for on, after in moved.items()}
        tried[by] = {
            on: {"logp_size": [mean(size[bins == b]) for b in range(len(BINS))]}
            for on, size in sizes.items()
        }
    found = {"bins": records, "updates": tried}
    return {"gradient_norm": float(whole.grad_norm[0]), "rate": rate, "probability": found}


def directions(
    credited: Mapping[str, Credited], tokens: Tokens, optimizer: Probe, say: Say
) -> dict[str, Any]:
    """Fig. 3: share of tokens that each variant's update moves in their advantage's direction."""
    found = {}
    for name, batch in credited.items():
        say(f"update by {name}")
        after = optimizer(batch).logp
        found[name] = probe.direction(tokens.bins, len(BINS), tokens.advantage, tokens.logp, after)
    return {"probability": {"bins": BINS, "variants": found}}


def sources(
    credited: Mapping[str, Credited],
    tokens: Tokens,
    gradient: Callable[[Credited], Any],
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
            one = probe.stage(batch, s)
            if not bool((one.weight > 0).any()):
                continue  # a stage without tokens is no step
            say(f"gradients of the groups, {variant}")
            halves = {
                name: [gradient(probe.only(one, here & half)) for half in (even, ~even)]
                for name, here in inside.items()
            }
            name = variant + (f", stage {s + 1}" if stages > 1 else "")
            out[name] = _sources_of(halves)
    return out


def _sources_of(halves: Mapping[str, list[Any]]) -> dict[str, Any]:
    """The record of a stage, from each group's gradients of even and of odd prompts."""
    added = lambda trees: jax.tree.map(lambda *x: sum(x), *trees)
    groups = {name: added(both) for name, both in halves.items()}
    whole = added(groups.values())
    return {
        "gradient_norm": float(optax.tree.norm(whole)),
        "agreement": probe.cosine(*(added(half) for half in zip(*halves.values(), strict=True))),
        "groups": {
            name: {
                "norm": float(optax.tree.norm(mine)),
                "share": probe.along(mine, whole),
                "cosine": probe.cosine(mine, optax.tree.sub(whole, mine)),
                "agreement": probe.cosine(*halves[name]),
            }
            for name, mine in groups.items()
        },
    }


def _single_tokens(
    of: Subject, rollout: Rollout, there: Tokens, count: int, seed: int, say: Say
) -> dict[str, Any]:
    """Fig. 2, for `count` tokens drawn evenly from the bins."""
    index = token_gradients.spread(there.bins.ravel(), count, seed)
    where = zip(there.response.ravel()[index], there.position.ravel()[index], strict=True)
    chosen = token_gradients.choose(rollout, [(int(i), int(t)) for i, t in where])
    definition, temperature = of.parts.policy.definition, of.config.sampling.temperature or 1.0
    logits = partial(logprobs.next_logits, definition, temperature=temperature)
    offsets = logprobs.no_offsets(of.parts.shape, chosen.tokens.shape[1])
    return token_gradients.single_tokens(of.state.params, chosen, logits, offsets, say)


def _groups(of: Subject, rollout: Rollout) -> list[list[str]]:
    """The group of every token; 'chatter' only if the model's own words include all fillers."""
    model, tokenizer = of.config.model, of.parts.tokenizer
    known = isinstance(model, Scratch) and set(FILLERS) <= set(model.words)
    fillers = frozenset(FILLERS if known else ())
    pieces = ([tokenizer.decode([t]) for t in r] for r in rollout.responses)
    return [words.group(piece, fillers) for piece in pieces]


def checked(of: Subject, samples: Sequence[Answers]) -> tuple[list[str], list[float]]:
    """The texts of responses that could be checked, and their scores."""
    decode = of.parts.tokenizer.decode
    both = [
        (decode(response), reward)
        for one in samples
        for response, reward in zip(one.rollout.responses, one.rewards, strict=True)
    ]
    known = [(text, reward.score) for text, reward in both if reward.checked]
    return [text for text, _ in known], [score for _, score in known]


def described(of: Subject, rewards: Sequence[Reward], tokens: int) -> dict[str, Any]:
    """Counts and means of the responses; means leave out unchecked ones."""
    known = [reward for reward in rewards if reward.checked]
    return {
        "responses": len(rewards),
        "tokens": tokens,
        "unchecked": len(rewards) - len(known),
        "reward": mean(np.asarray([r.score for r in known])),
        "accuracy": mean(np.asarray([r.correct for r in known])),
        "optimizer_steps_before": int(of.state.step),
    }


def over_batches(found: Sequence[Any], of: Callable[[list], float]) -> Any:
    """Merges records of the same form; each number is `of` all values that are not None."""
    known = [x for x in found if x is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        names = dict.fromkeys(name for x in known for name in x)
        return {name: over_batches([x.get(name) for x in known], of) for name in names}
    if isinstance(known[0], list):
        return [over_batches(x, of) for x in zip(*known, strict=True)]
    return known[0] if isinstance(known[0], str) else of(known)
