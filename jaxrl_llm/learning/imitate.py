"""One supervised step: demonstrations as if they had been sampled, with advantage 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import metrics, update
from jaxrl_llm.learning.answers import TokenTask
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.programs import Programs
from jaxrl_llm.models import sharding
from jaxrl_llm.objectives import Objective, advantages, losses
from jaxrl_llm.rollouts.sampler import Rollout
from jaxrl_llm.tasks.task import Interactive

IMITATION = Objective(advantage=advantages.imitation, surrogate=losses.reinforce)


@dataclass(frozen=True)
class Step:
    """A step of imitation; cut demonstrations are not learned from. `frozen` is not trained."""

    programs: Programs
    collate: Collator
    mesh: Mesh
    frozen: Any = None

    def batch(self, rollout: Rollout) -> update.Credited:
        """Demonstrations ready to learn from."""
        batch = update.place(self.collate(rollout, rollout.finished), self.mesh)
        everywhere = partial(sharding.replicated, mesh=self.mesh)
        zero = everywhere(np.zeros(batch.layout.in_rows.shape, np.float32))
        reward = everywhere(np.ones((len(rollout.responses), 1), np.float32))
        return self.programs.credit(batch, reward, old_logp=zero)

    def update(self, state: update.TrainState, credited: update.Credited) -> Any:
        """The new state, and metrics by visit; the old state is donated."""
        return self.programs.update(state, credited, frozen=self.frozen)


def demonstrations(
    task: TokenTask,
    demonstration: Callable[[Any], Any],
    longest: int,
    examples: Sequence[Any],
) -> Rollout:
    """Solutions, texts or the turns of episodes, as a rollout.

    One over `longest` tokens is cut and not `finished`.
    """
    said = map(demonstration, examples)
    if isinstance(task.task, Interactive):
        played = task.played(examples, list(said))
        whole, spans, again = played.responses, played.turns, played.restarts
    else:
        whole, spans, again = [*map(task.turn, examples, said)], (), ()
    fits = [len(response) <= longest for response in whole]
    if not any(fits):
        raise UserError(
            f"no demonstration of a batch of {len(whole)} fits into {longest} tokens: raise the "
            "response_length of the warm start"
        )
    responses = [response[:longest] for response in whole]
    logps = [[0.0] * len(r) for r in responses]
    turns = [each if fit else [(0, longest)] for fit, each in zip(fits, spans, strict=False)]
    again = [each if fit else [] for fit, each in zip(fits, again, strict=False)]
    prompts = task.prompts(examples)
    return Rollout(prompts, responses, logps, fits, turns=turns, restarts=again)


def describe(visits: Any, too_long: int) -> dict[str, Any]:
    """Metrics of a step, fetched from the devices; `too_long` demonstrations were cut."""
    visits = jax.device_get(visits)
    return {
        "loss": visits["loss"].mean(),
        "grad_norm": visits["grad_norm"].mean(),
        "too_long": too_long,
        **metrics.count_updates(visits),
    }
