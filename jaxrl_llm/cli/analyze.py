"""`jaxrl-llm analyze`: which tokens a run's updates come from, and which they move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import desk
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.config import Config, Scratch
from jaxrl_llm.errors import UserError, cannot_write
from jaxrl_llm.learning import analysis, probe, token_gradients, update, words
from jaxrl_llm.learning.token_task import Answers
from jaxrl_llm.models import activations
from jaxrl_llm.reports import analysis as report
from jaxrl_llm.rollouts.sampler import Rollout, Sampler
from jaxrl_llm.runs import assemble, folder, terminal
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.tasks.knights_knaves.tiny import FILLERS
from jaxrl_llm.tasks.task import Reward


def main(
    run: Path,
    /,
    *,
    step: int | None = None,
    prompts: int = 0,
    batches: int = 4,
    tokens: int = 256,
    alpha: float = 0.3,
    eta: float = 0.5,
    seed: int = 0,
    fresh: bool = False,
    out: Path | None = None,
    data: DataFolder = folder.DATA,
) -> None:
    """Measure a run's policy as arXiv:2505.12929 does, on batches that it samples now.

    Updates are tried on a copy, with the run's optimizer. It executes the folder's config.py: analyze only
    runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint (default: the best).
        prompts: of a batch, from the training examples, each answered as often as in training (default: the
            config's).
        batches: each of other prompts. Figures are their mean, whiskers the least and the most of them: one batch
            tells little.
        tokens: how many are looked at one by one.
        alpha: of Advantage Reweighting, where it is tried.
        eta: of Lopti, where it is tried.
        seed: of the responses and the choice of tokens.
        fresh: the optimizer begins anew, so that what an update does is not the momentum of those before.
        out: the folder of analysis.json and the figures (default: RUN/analysis).
        data: where data sets are kept.
    """
    if prompts < 0 or tokens < 1 or batches < 1:
        raise UserError(
            f"--prompts {prompts} --batches {batches} --tokens {tokens}: they are counts, the last two from 1 on"
        )
    run = folder.at_hand(run)
    console, target = terminal.plain(), desk.at_hand(out or run / "analysis")
    with opened(run, data, step) as (config, parts, sampler, chosen):
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(target, error) from error
        with console.status("sampling") as status:
            state = folder.state(run, parts, config.optimizer, chosen)
            if fresh:
                state = update.init_state(state.params, config.optimizer)
            of = _Subject(config, parts, state, folder.reference(run, parts), alpha, eta)
            samples = _samples(of, sampler, prompts or config.prompts, batches, seed)
            found = {
                "run": desk.named(run),
                "step": chosen,
                "alpha": alpha,
                "eta": eta,
                "seed": seed,
                "batches": batches,
            }
            say = status.update if console.is_terminal else console.print
            found |= _measured(of, samples, tokens, seed, say)
    console.print(report.table(found))
    report.write(found, target)
    desk.store(target)
    console.print(f"written to {desk.named(target)}")


@dataclass(frozen=True)
class _Subject:
    """The policy that is looked at, and the methods that are tried."""

    config: Config
    parts: Parts
    state: update.TrainState
    reference: Any
    alpha: float
    eta: float


class _Sample(NamedTuple):
    """A batch of what it said."""

    rollout: Rollout
    answers: Answers


def _samples(
    of: _Subject, sampler: Sampler, prompts: int, batches: int, seed: int
) -> list[_Sample]:
    config, parts = of.config, of.parts
    first = assemble.first(parts.task.train, prompts * batches)
    readable = assemble.readable(parts, first, config, "train")
    if len(readable) < batches:
        raise UserError(f"{len(readable)} prompts are too few for {batches} batches: take fewer")
    task, sampling = parts.token_task(config), parts.sampling(config, seed=seed)

    def sample(number: int) -> _Sample:
        examples = [readable[i] for i in range(number, len(readable), batches)]
        rollout = sampler.generate(task.prompts(examples), n=config.group_size, sampling=sampling)
        return _Sample(rollout, task.answers(examples, rollout))

    return [sample(number) for number in range(batches)]


def _in_one(config: Config, responses: int) -> Config:
    """The config with one mini-batch of all responses, in micro-batches as large as in training."""
    there = config.collate
    share = responses / (config.prompts * config.group_size)
    slices = max(1, round(there.minibatches * there.microbatches * share))
    return replace(config, collate=replace(there, minibatches=1, microbatches=slices))


class _Programs:
    """What is tried on a batch, compiled once for all."""

    def __init__(self, of: _Subject, responses: int):
        variants = probe.variants(of.config.objective, alpha=of.alpha, eta=of.eta)
        self._credit = {name: update.make_credit(one) for name, one in variants.items()}
        plain = variants["plain"]
        config = replace(_in_one(of.config, responses), objective=plain)
        reference = of.state.params if of.reference is None else of.reference
        reference = reference if plain.reads("ref_logp") else None
        self._training = assemble.reinforcement(config, of.parts, of.state, reference)
        self._params = of.state.params
        logp = of.parts.policy.logp(of.config.sampling.temperature)
        self.score = update.make_score(logp)
        self.optimizer = probe.Probe(of.state, self._training.update, self.score)
        self.gradient = probe.make_gradient(logp, plain, self._params)

    def along(self, rate: float) -> Callable[[update.Credited], probe.Moved]:
        """A plain step."""
        return partial(probe.step_along, self._params, self.gradient, self.score, rate)

    def credited(
        self, sample: _Sample, groups: list[list[str]]
    ) -> tuple[dict[str, update.Credited], analysis.Tokens]:
        """The batch as each variant sees it, and its tokens."""
        batch, reward = self._training.batch(sample.rollout, sample.answers.rewards)
        scores, _ = self._training.score(self._params, batch)
        credited = {name: credit(batch, reward, **scores) for name, credit in self._credit.items()}
        plain = credited["plain"]
        logp = self.score(self._params, plain.inputs)
        return credited, analysis.tokens_of(batch, plain, logp, groups)


def _measured(
    of: _Subject, samples: list[_Sample], tokens: int, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All figures, one after the other: means over the batches, and the least and the most of them."""
    programs = _Programs(of, max(len(one.rollout.responses) for one in samples))
    each, there = [], []
    for number, sample in enumerate(samples, 1):
        told = lambda what, number=number: say(f"batch {number} of {len(samples)}: {what}")
        credited, found = programs.credited(sample, _groups(of, sample.rollout))
        if not np.any(found.advantage):
            raise UserError(
                "all responses to each prompt earned the same, so there is nothing to learn from: "
                "take more --prompts or another --seed"
            )
        plain, optimizer = credited["plain"], programs.optimizer
        each.append(
            {
                "updates": analysis.updates(plain, found, optimizer, programs.along, told),
                "directions": analysis.directions(credited, found, optimizer, told),
                "sources": analysis.sources(
                    credited, found, programs.gradient, of.config.group_size, told
                ),
            }
        )
        there.append(found)
    model = of.config.model
    vocabulary = model.words if isinstance(model, Scratch) else ()
    rewards = [reward for one in samples for reward in one.answers.rewards]
    spread = {
        name: analysis.over_batches(each, pick)
        for name, pick in {"least": min, "most": max}.items()
        if len(each) > 1
    }
    return {
        "sample": _described(of, rewards, sum(int(one.mask.sum()) for one in there)),
        **analysis.over_batches(each, fmean),
        "single_tokens": _single_tokens(of, samples[0].rollout, there[0], tokens, seed, say),
        "words": words.frequencies(*_checked(samples), words.categories(vocabulary)),
        **spread,
    }


def _single_tokens(
    of: _Subject,
    rollout: Rollout,
    there: analysis.Tokens,
    count: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    bins = there.bins["probability"][1]
    index = token_gradients.spread(bins.ravel(), count, seed)
    where = zip(there.response.ravel()[index], there.position.ravel()[index], strict=True)
    chosen = token_gradients.choose(rollout, [(int(i), int(t)) for i, t in where])
    definition, temperature = of.parts.policy.definition, of.config.sampling.temperature or 1.0
    logits = partial(activations.logits, definition, temperature=temperature)
    offsets = activations.no_offsets(definition, of.state.params, chosen.tokens.shape[1])
    return {
        "advantage": there.advantage.ravel()[index].tolist(),
        **analysis.single_tokens(of.state.params, chosen, logits, offsets, say),
    }


def _checked(samples: list[_Sample]) -> tuple[list[str], list[float]]:
    """The responses whose reward is known, and their rewards."""
    both = [
        pair for one in samples for pair in zip(one.answers.texts, one.answers.rewards, strict=True)
    ]
    known = [(text, reward.score) for text, reward in both if reward.checked]
    return [text for text, _ in known], [score for _, score in known]


def _groups(of: _Subject, rollout: Rollout) -> list[list[str]]:
    """The group of every token; fillers are known as such in a vocabulary of words that has them all."""
    model, tokenizer = of.config.model, of.parts.tokenizer
    known = isinstance(model, Scratch) and set(FILLERS) <= set(model.words)
    fillers = frozenset(FILLERS if known else ())
    pieces = ([tokenizer.decode([t]) for t in r] for r in rollout.responses)
    return [words.group(piece, fillers) for piece in pieces]


def _described(of: _Subject, rewards: list[Reward], tokens: int) -> dict[str, Any]:
    known = [reward for reward in rewards if reward.checked]
    return {
        "responses": len(rewards),
        "tokens": tokens,
        "unchecked": len(rewards) - len(known),
        "reward": probe.mean(np.asarray([r.score for r in known])),
        "accuracy": probe.mean(np.asarray([r.correct for r in known])),
        "optimizer_steps_before": int(of.state.step),
    }
