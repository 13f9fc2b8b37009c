"""One step of reinforcement: batch, score, credit, update, and its metrics.

`Reinforcement.train_step` (training/phases.py) calls them in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import metrics, update
from jaxrl_llm.learning.batch import Batch, Collator, Layout
from jaxrl_llm.learning.groups import Group, rewards, trajectories
from jaxrl_llm.learning.programs import Programs
from jaxrl_llm.models import sharding
from jaxrl_llm.models.primitives import merge_params
from jaxrl_llm.objectives import Objective
from jaxrl_llm.objectives.token_data import batch_mean
from jaxrl_llm.tasks.task import names_of_tasks

FIGURES = ("loss", "policy", "penalty", "kl", "clip", "clip_dual", "share", "grad_norm", "moved")


@dataclass(frozen=True)
class Step:
    """A step of reinforcement between the responses and the new state.

    `reference` are the parameters of the reference policy, or None; `frozen` are those of both that
    are not trained. `teacher(inputs)` are the log-probs of another model and what `teacher_score` says
    of its likeliest tokens, asked by `teacher_prompts` of examples, or as the policy. With `sampler_ratios`
    `old_logp` is the sampler's. `learned_from` says which responses count.
    """

    programs: Programs
    objective: Objective
    collate: Collator
    mesh: Mesh
    reference: Any = None
    frozen: Any = None
    teacher: Callable[[Any], tuple[jax.Array, Any]] | None = None
    teacher_prompts: Callable[[Sequence[Any]], Sequence[Sequence[int] | None]] | None = None
    sampler_ratios: bool = False
    drop_constant_groups: bool = False

    def batch(self, groups: Sequence[Group]) -> tuple[Batch, jax.Array]:
        """The batch on the devices, and its rewards `[P,G]`."""
        drop = self.drop_constant_groups
        keep = learned_from(groups, drop, drop and self.objective.reads("turn_reward"))
        batch = update.place(self.collate(trajectories(groups), keep.tolist()), self.mesh)
        reward = np.asarray([[r.score for r in group.rewards] for group in groups], np.float32)
        return batch, sharding.replicated(reward, self.mesh)

    def score(
        self, params: Any, batch: Batch, groups: Sequence[Group]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scores by the policy, its reference and its teacher, as `credit` takes them, and metrics of them.

        `batch` is that of the `groups`.
        """
        now = self._scores(params, batch.inputs)
        # another model's tokens go where its own router sends them
        free = batch._replace(inputs=batch.inputs._replace(experts=None))
        ref = None if self.reference is None else self._scores(self.reference, free.inputs).logp
        teacher, top = self._taught(self.teacher, free, groups) if self.teacher else (None, None)
        sampler = _of_sampler(batch, now.logp)
        old, shown = (sampler, now.logp) if self.sampler_ratios else (now.logp, None)
        data = now._asdict() | {"old_logp": old, "ref_logp": ref, "teacher_logp": teacher}
        data |= {"sampler_logp": sampler, "teacher_top": top, "trainer_logp": shown}
        data = {name: x for name, x in data.items() if x is not None and name != "logp"}
        return data, _describe_scores(batch, now, sampler, ref, teacher)

    @cached_property
    def token_stats(self) -> Callable[..., dict[str, np.ndarray]]:
        """`(params, batch, reward, credited, rows)`: numbers of these rows' tokens after the update."""
        from jaxrl_llm.learning import tokens  # plans do without

        return tokens.token_stats(self.objective, self._scores, self.mesh)

    def _taught(self, teacher: Any, batch: Batch, groups: Sequence[Group]) -> tuple[Any, Any]:
        """Log-probs by the teacher, and of its likeliest tokens, in the model's layout."""
        ask = self.teacher_prompts or (lambda examples: [None] * len(examples))
        prompts = ask([group.example for group in groups])
        if not any(prompts):
            return teacher(batch.inputs)
        prompted = [
            replace(
                group,
                trajectories=tuple(
                    replace(one, prompt=one.prompt if p is None else p, experts=())
                    for one in group.trajectories
                ),
            )
            for group, p in zip(groups, prompts, strict=True)
        ]
        theirs, _ = self.batch(prompted)
        return _as_laid_out(teacher(theirs.inputs), theirs.layout, batch.layout)

    def _scores(self, trained: Any, inputs: Any) -> Any:
        return self.programs.score(merge_params(trained, self.frozen), inputs)


@jax.jit
def _of_sampler(batch: Batch, ours: jax.Array) -> jax.Array:
    """The sampler's log-probs in the model's layout; `ours` of tokens that it sampled after another prompt."""
    theirs = batch.layout.to_bins(batch.sampler_logp)
    return jnp.where(jnp.isnan(theirs), ours, theirs)


@jax.jit
def _as_laid_out(arrays: Any, now: Layout, then: Layout) -> Any:
    """Numbers of the same tokens, from one layout into another."""
    return jax.tree.map(lambda x: then.to_bins(now.to_rows(x)), arrays)


@jax.jit
def _describe_scores(
    batch: Batch, scores: Any, sampler: jax.Array, ref: Any, teacher: Any
) -> dict[str, jax.Array]:
    to_rows = partial(jax.tree.map, batch.layout.to_rows)
    scores, sampler, ref, teacher = to_rows((scores, sampler, ref, teacher))
    described = metrics.describe_mismatch(scores.logp, sampler, batch.mask)
    if teacher is not None:
        # an estimate of KL(policy || teacher), in nats a token
        described["kl_teacher"] = batch_mean(sampler - teacher, batch.mask)
    return metrics.describe_policy(scores.logp, scores.entropy, batch.mask, ref) | described


def require_our_policy(
    groups: Sequence[Group], step: int, described: Mapping[str, Any], tolerance: float | None
) -> None:
    """A UserError, before anything is learned, if responses come from the wrong weights.

    Compares log-probs, where the sampler has the same weights as the trainer, by its `tolerance`.
    """
    if tolerance is None or any(one.versions != (step, step) for one in trajectories(groups)):
        return
    gap = float(jax.device_get(described["mismatch_mean"]))
    if not gap <= tolerance:
        raise UserError(
            f"step {step + 1}: the log-probs that came with the responses are {gap:.3g} from the trainer's on "
            f"the mean (tolerance {tolerance:g}): a server computes in another precision or, where the metric "
            "sync/proof is not 1, with other weights, or its answers are altered; look into that, then go on "
            "with --resume"
        )


def learned_from(groups: Sequence[Group], drop_constant: bool, turns: bool = False) -> np.ndarray:
    """`[B]`: the responses to learn from: checked ones, but no lone checked one of a larger group.

    With `drop_constant` none of a group whose rewards are all equal, with `turns` those of turns too.
    """
    checked = np.asarray([[r.graded for r in group.rewards] for group in groups], bool)
    keep = checked & (checked.sum(1, keepdims=True) >= min(checked.shape[1], 2))
    if drop_constant:
        keep &= ~np.asarray([group.is_constant(turns) for group in groups], bool)[:, None]
    return keep.ravel()


def describe_answers(
    groups: Sequence[Group], seconds: float, *, turns: bool = False
) -> dict[str, float]:
    """Metrics of a step's responses; reward metrics are means over the checked ones, if any.

    `seconds` is how long sampling took, 0 if unknown (a batch restored from a checkpoint); with `turns` a
    constant group has equal rewards of turns too.
    """
    responses, checked = trajectories(groups), [r for r in rewards(groups) if r.graded]
    lengths = [one.length for one in responses]
    out = {
        "length": float(np.mean(lengths)),
        "truncated": 1.0 - float(np.mean([one.finished for one in responses])),
        "ungraded": len(lengths) - len(checked),
        "ungraded_share": 1.0 - len(checked) / len(lengths),
        "time/sampling": seconds,
    }
    if seconds:
        out["time/tokens_per_second"] = sum(lengths) / seconds
    if any(one.turns for one in responses):
        out["turns"] = float(np.mean([len(one.turns) for one in responses]))
    if any(one.restarts for one in responses):
        out["segments"] = float(np.mean([len(one.segments) for one in responses]))
    comparable = [group for group in groups if sum(r.graded for r in group.rewards) > 1]
    if comparable:
        out["constant_groups"] = float(np.mean([one.is_constant(turns) for one in comparable]))
    if checked:
        out["reward"] = float(np.mean([r.score for r in checked]))
        out["accuracy"] = float(np.mean([r.correct for r in checked]))
    for name in dict.fromkeys(name for reward in checked for name in reward.fields):
        out[f"reward/{name}"] = float(
            np.mean([r.fields[name] for r in checked if name in r.fields])
        )
    for task in names_of_tasks(group.example for group in groups):
        ours = [replace(group, example=None) for group in groups if group.example.name == task]
        out |= in_short(ours, f"task/{task}", turns=turns)
    return out


def in_short(groups: Sequence[Group], of: str, *, turns: bool = False) -> dict[str, float]:
    """The first metrics of some of a step's groups, under names that begin with `of`."""
    names = ("length", "reward", "accuracy", "constant_groups")
    found = describe_answers(groups, 0.0, turns=turns)
    return {f"{of}/{name}": found[name] for name in names if name in found}


def describe_update(visits: Any, described: Any, host: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics fetched from the devices, with `host` added; per stage, means over its updates."""
    visits, described = jax.device_get((visits, described))
    stages, done = int(visits["stage"].max()) + 1, metrics.updates(visits)
    out: dict[str, float] = {**described, **metrics.count_updates(visits)}
    for s in range(stages):
        here = (visits["stage"] == s) & done
        tail = f"/stage{s + 1}" if stages > 1 else ""
        for name in (name for name in FIGURES if name in visits):
            out[name + tail] = float(visits[name][here].mean()) if here.any() else 0.0
    return out | dict(host)
