"""`jaxrl-llm analyze`: which tokens a run's updates come from, and which they move."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax
import rich.console

from jaxrl_llm import desk
from jaxrl_llm.cli.opened import DataFolder, opened
from jaxrl_llm.config import Config, Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import analysis, probe, token_gradients, update, words
from jaxrl_llm.learning.token_task import Answers
from jaxrl_llm.models import activations
from jaxrl_llm.reports import analysis as report
from jaxrl_llm.rollouts.sampler import Rollout, Sampler
from jaxrl_llm.runs import assemble, folder
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.tasks.knights_knaves.tiny import FILLERS


def main(
    run: Path,
    /,
    *,
    step: int | None = None,
    prompts: int = 0,
    tokens: int = 256,
    alpha: float = 0.3,
    eta: float = 0.5,
    seed: int = 0,
    fresh: bool = False,
    out: Path | None = None,
    data: DataFolder = folder.DATA,
) -> None:
    """Measure a run's policy as arXiv:2505.12929 does, on a batch that it samples now.

    Updates are tried on a copy, with the run's optimizer. It executes the folder's config.py: analyze only
    runs whose author you trust.

    Args:
        run: the folder or URL of a run.
        step: which checkpoint (default: the best).
        prompts: from the training examples, each answered as often as in training (default: the config's).
        tokens: how many are looked at one by one.
        alpha: of Advantage Reweighting, where it is tried.
        eta: of Lopti, where it is tried.
        seed: of the responses and the choice of tokens.
        fresh: the optimizer begins anew, so that what an update does is not the momentum of those before.
        out: the folder of analysis.json and the figures (default: RUN/analysis).
        data: where data sets are kept.
    """
    if prompts < 0 or tokens < 1:
        raise UserError(
            f"--prompts {prompts} --tokens {tokens}: they are counts, the latter from 1 on"
        )
    run = folder.at_hand(run)
    console, target = (
        rich.console.Console(markup=False, soft_wrap=True),
        desk.at_hand(out or run / "analysis"),
    )
    with opened(run, data, step) as (config, parts, sampler, chosen):
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {target}: {error.strerror}") from error
        with console.status("sampling") as status:
            sampled = _sample(config, parts, sampler, prompts or config.prompts, seed)
            state = folder.state(run, parts, config.optimizer, chosen)
            if fresh:
                state = update.init_state(state.params, config.optimizer)
            reference = folder.reference(run, parts)
            of = _Subject(config, parts, state, reference, sampled, alpha, eta)
            found = {
                "run": desk.named(run),
                "step": chosen,
                "alpha": alpha,
                "eta": eta,
                "seed": seed,
            }
            say = status.update if console.is_terminal else console.print
            found |= _measured(of, tokens, seed, say)
    report.write(found, target)
    console.print(report.table(found))
    desk.store(target)
    console.print(f"written to {desk.named(target)}")


@dataclass(frozen=True)
class _Subject:
    """The policy that is looked at, and what it said."""

    config: Config
    parts: Parts
    state: update.TrainState
    reference: Any
    sampled: tuple[Rollout, Answers]
    alpha: float
    eta: float


def _sample(
    config: Config, parts: Parts, sampler: Sampler, prompts: int, seed: int
) -> tuple[Rollout, Answers]:
    first = assemble.first(parts.task.train, prompts)
    readable = assemble.readable(parts, first, config, "train")
    examples = [readable[i] for i in range(len(readable))]
    task, sampling = parts.token_task(config), parts.sampling(config, seed=seed)
    rollout = sampler.generate(task.prompts(examples), n=config.group_size, sampling=sampling)
    return rollout, task.answers(examples, rollout)


def _in_one(config: Config, responses: int) -> Config:
    """The config with one mini-batch of all responses, in micro-batches as large as in training."""
    there = config.collate
    share = responses / (config.prompts * config.group_size)
    slices = max(1, round(there.minibatches * there.microbatches * share))
    return replace(config, collate=replace(there, minibatches=1, microbatches=slices))


def _measured(of: _Subject, tokens: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All figures, one after the other."""
    rollout, answers = of.sampled
    params, policy = of.state.params, of.parts.policy
    temperature = of.config.sampling.temperature or 1.0
    objectives = probe.variants(of.config.objective, alpha=of.alpha, eta=of.eta)
    config = replace(_in_one(of.config, len(rollout.responses)), objective=objectives["plain"])
    reference = params if of.reference is None else of.reference
    reference = reference if config.objective.reads("ref_logp") else None
    programs = assemble.reinforcement(config, of.parts, of.state, reference)
    batch, reward = programs.batch(rollout, answers.rewards)
    scores, _ = programs.score(params, batch)
    credited = {
        name: update.make_credit(objective)(batch, reward, **scores)
        for name, objective in objectives.items()
    }
    score = update.make_score(policy.logp(temperature))
    plain = credited["plain"]
    groups = _groups(of)
    there = analysis.tokens_of(batch, plain, score(params, batch.inputs), groups)
    if not np.any(there.advantage):
        raise UserError(
            "all responses to each prompt earned the same, so there is nothing to learn from: "
            "take more --prompts or another --seed"
        )

    def gradient(rate: float) -> probe.Probe:
        ascent = optax.sgd(rate)
        step = update.make_train_step(policy.logp(temperature), objectives["plain"], ascent)
        return probe.Probe(update.init_state(params, ascent), step, score)

    optimizer = probe.Probe(of.state, programs.update, score)
    vocabulary = config.model.words if isinstance(config.model, Scratch) else ()
    return {
        "sample": _described(of, there),
        "updates": analysis.updates(plain, there, optimizer, gradient, say),
        "directions": analysis.directions(credited, there, optimizer, say),
        "sources": analysis.sources(credited, there, optimizer, config.group_size, say),
        "single_tokens": _single_tokens(of, there, tokens, seed, temperature, say),
        "words": words.frequencies(*_checked(answers), words.categories(vocabulary)),
    }


def _single_tokens(
    of: _Subject,
    there: analysis.Tokens,
    count: int,
    seed: int,
    temperature: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    bins = there.bins["probability"][1]
    index = token_gradients.spread(bins.ravel(), count, seed)
    where = zip(there.response.ravel()[index], there.position.ravel()[index], strict=True)
    chosen = token_gradients.choose(of.sampled[0], [(int(i), int(t)) for i, t in where])
    definition = of.parts.policy.definition
    logits = partial(activations.logits, definition, temperature=temperature)
    offsets = activations.no_offsets(definition, of.state.params, chosen.tokens.shape[1])
    return {
        "advantage": there.advantage.ravel()[index].tolist(),
        **analysis.single_tokens(of.state.params, chosen, logits, offsets, say),
    }


def _checked(answers: Answers) -> tuple[list[str], list[float]]:
    """The responses whose reward is known, and their rewards."""
    known = [(t, r.score) for t, r in zip(answers.texts, answers.rewards, strict=True) if r.checked]
    return [text for text, _ in known], [score for _, score in known]


def _groups(of: _Subject) -> list[list[str]]:
    """The group of every token; fillers are known as such in a vocabulary of words that has them all."""
    model, tokenizer = of.config.model, of.parts.tokenizer
    known = isinstance(model, Scratch) and set(FILLERS) <= set(model.words)
    fillers = frozenset(FILLERS if known else ())
    pieces = ([tokenizer.decode([t]) for t in r] for r in of.sampled[0].responses)
    return [words.group(piece, fillers) for piece in pieces]


def _described(of: _Subject, there: analysis.Tokens) -> dict[str, Any]:
    rewards = of.sampled[1].rewards
    return {
        "responses": len(rewards),
        "tokens": int(there.mask.sum()),
        "reward": probe.mean(np.asarray([r.score for r in rewards])),
        "accuracy": probe.mean(np.asarray([r.correct for r in rewards])),
        "optimizer_steps_before": int(of.state.step),
    }
