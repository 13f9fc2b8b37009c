"""Warnings and reasons to stop, found in the metrics of a run's steps."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.objective import Objective

Records = Sequence[Mapping[str, float]]

WINDOW = 3  # steps that a mean is taken over
FLAT = 5  # steps without a difference between rewards
_FORMAT = re.compile(r"reward/(\w+_)?(format|boxed|answered|formatted)")
BEGIN = 2  # steps at the begin of a run after which a reward that never differs is told
FAILING = 0.1  # share of ungraded responses
COLLAPSED = 0.1  # share of the value at the start of reinforcement


def equal_rewards_teach(objective: Objective) -> bool:
    """True if something is learned from responses to a prompt that are all worth the same.

    By a teacher, by the rewards of turns, or since they have an advantage over those to another prompt.
    """
    if objective.reads("teacher_logp", "teacher_top", "turn_reward"):
        return True

    def has_advantage() -> jax.Array:
        prompts, count, _ = objective.tried_on
        reward = jnp.repeat(jnp.arange(prompts, dtype=jnp.float32)[:, None], count, 1)
        data = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), objective.example())
        data = data._replace(reward=data.old_logp * reward.reshape(-1, 1))
        return jnp.any(jnp.nan_to_num(objective.advantage(reward, data)))

    return bool(jax.jit(has_advantage)())


def alarms(records: Records, equal_rewards_teach: bool = False) -> dict[str, str]:
    """Warnings about the last of these records: texts by kind."""
    checks = {
        "ungraded": _ungraded,
        "skipped": _skipped,
        **({} if equal_rewards_teach else {"reward": _same_reward, "flat": _flat}),
        "entropy": lambda found: _collapsed("entropy", found),
        "length": lambda found: _collapsed("length", found),
    }
    return {kind: text for kind, check in checks.items() if (text := check(records))}


def reason_to_stop(records: Records, max_ungraded: float) -> str:
    """Why the run should not go on; empty if it may."""
    last = records[-WINDOW:]
    if len(last) < WINDOW:
        return ""
    if (share := _mean("ungraded_share", last)) > max_ungraded:
        return (
            f"{share:.0%} of the responses of the last {WINDOW} steps are ungraded, more than max_ungraded = "
            f"{max_ungraded:g}: the warnings say why; mend the reward and start anew with another --out, or, if "
            "only something it needs was away, go on with --resume"
        )
    if all(map(_all_skipped, last)):
        return (
            f"no gradient of the last {WINDOW} steps was finite: look into model and reward, or export an earlier "
            "checkpoint (jaxrl-llm export RUN FOLDER --step N) and train it with a lower learning rate by a "
            "config with model=Pretrained(FOLDER) and warm_start=None"
        )
    return ""


def _ungraded(records: Records) -> str:
    share = _mean("ungraded_share", records[-WINDOW:])
    if share <= FAILING:
        return ""
    return (
        f"{share:.0%} of the last responses have no reward: warnings say why, or it returned None"
    )


def _skipped(records: Records) -> str:
    if not _all_skipped(records[-1]):
        return ""
    return "no gradient of the step was finite: nothing was learned in it"


def _same_reward(records: Records) -> str:
    """All responses of the first steps have one reward; with the likeliest reason."""
    if len(records) != BEGIN or any(r.get("constant_groups") != 1.0 for r in records):
        return ""
    rewards = {record.get("reward") for record in records}
    if len(rewards) > 1 or None in rewards:
        return ""
    truncated, accuracy = _mean("truncated", records), _mean("accuracy", records)
    if accuracy == 1.0:
        reason = "all are right, so the examples are too easy for this model"
    elif truncated > 0.5:
        reason = f"{truncated:.0%} are cut at response_length, likely before their answer: raise it (--length)"
    elif any(x == 0.0 and _FORMAT.fullmatch(name) for r in records for name, x in r.items()):
        reason = "none has the format that the reward looks for: show it in the prompt"
    else:
        reason = (
            "likely true answers have another form than the reward expects, or the task is too hard"
        )
    return f"every response so far has the reward {rewards.pop():g}: {reason} (docs/reward.md)"


def _flat(records: Records) -> str:
    last = records[-FLAT:]
    if len(last) < FLAT or any(record.get("constant_groups", 0.0) < 1.0 for record in last):
        return ""
    return f"all responses to a prompt were worth the same for {FLAT} steps: there is nothing to learn from"


def _collapsed(name: str, records: Records) -> str:
    def begin_of(some: Iterable[Mapping[str, float]]) -> list[float]:
        """The first numbers, read from one end, so that long runs are no slower."""
        values = (record[name] for record in some if name in record and _learned(record))
        return list(islice(values, 2 * WINDOW))

    if name not in records[-1]:  # nor is it in any other of a warm start
        return ""
    start, end = begin_of(records), begin_of(reversed(records))
    if len(start) < 2 * WINDOW:
        return ""
    first, last = (sum(some[:WINDOW]) / WINDOW for some in (start, end))
    if last >= COLLAPSED * first:
        return ""
    return f"{name} has fallen from {first:.3g} to {last:.3g} since reinforcement began"


def _learned(record: Mapping[str, float]) -> bool:
    """True if the batch had any tokens: without, its entropy and length mean nothing."""
    return record.get("updates", 0) + record.get("skipped", 0) > 0


def _all_skipped(record: Mapping[str, float]) -> bool:
    return record.get("skipped", 0) > 0 and record.get("updates", 0) == 0


def _mean(name: str, records: Records) -> float:
    return sum(record.get(name, 0.0) for record in records) / max(len(records), 1)
