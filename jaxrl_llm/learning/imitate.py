"""One supervised step: demonstrations as if they had been sampled, with advantage 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import metrics, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.learning.programs import Programs
from jaxrl_llm.models import sharding
from jaxrl_llm.objectives import Objective, advantages, losses
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import Demonstrator, Interactive

IMITATION = Objective(advantage=advantages.imitation, surrogate=losses.reinforce)


@dataclass(frozen=True)
class Step:
    """A step of imitation; cut demonstrations are not learned from. `frozen` is not trained."""

    programs: Programs
    collate: Collator
    mesh: Mesh
    frozen: Any = None

    def batch(self, trajectories: Sequence[Trajectory]) -> update.Credited:
        """Demonstrations ready to learn from."""
        batch = update.place(
            self.collate(trajectories, [one.finished for one in trajectories]), self.mesh
        )
        everywhere = partial(sharding.replicated, mesh=self.mesh)
        zero = everywhere(np.zeros(batch.layout.in_rows.shape, np.float32))
        reward = everywhere(np.ones((len(trajectories), 1), np.float32))
        return self.programs.credit(batch, reward, old_logp=zero)

    def update(self, state: update.TrainState, credited: update.Credited) -> Any:
        """The new state, and metrics by visit; the old state is donated."""
        return self.programs.update(state, credited, frozen=self.frozen)


def demonstrations(
    task: TokenTask,
    demonstration: Callable[[Any], Any],
    longest: int,
    examples: Sequence[Any],
) -> list[Trajectory]:
    """Solutions, texts or the turns of episodes, as if they had been sampled.

    One over `longest` tokens is cut and not `finished`.
    """
    said = map(demonstration, examples)
    if isinstance(task.task, Interactive):
        whole = [replace(one, finished=True) for one in task.replay(examples, list(said))]
    else:
        texts = [*map(task.turn, examples, said)]
        pairs = zip(task.prompts(examples), texts, strict=True)
        whole = [Trajectory(prompt, text, [0.0] * len(text)) for prompt, text in pairs]
    if all(len(one.tokens) > longest for one in whole):
        raise UserError(
            f"no demonstration of a batch of {len(whole)} fits into {longest} tokens: raise the "
            "response_length of the warm start"
        )
    return [one if len(one.tokens) <= longest else _cut(one, longest) for one in whole]


def _cut(one: Trajectory, longest: int) -> Trajectory:
    """Its first tokens, which are not learned from."""
    tokens, turns = one.tokens[:longest], ((0, longest),) if one.turns else ()
    return Trajectory(one.prompt, tokens, one.logps[:longest], finished=False, turns=turns)


def demonstration(made_by: Callable[[Any], Any] | None, task: Any) -> Callable[[Any], Any]:
    """The function that gives an example's demonstration, this or the task's; its errors are UserErrors."""
    if made_by is None and not isinstance(task, Demonstrator):
        raise UserError(f"task {task.name} has no demonstration(example): warm_start needs one")
    return userfile.user_code("a demonstration cannot be made")(made_by or task.demonstration)


def describe(visits: Any, demonstrations: Sequence[Trajectory]) -> dict[str, Any]:
    """Metrics of a step, fetched from the devices; those that are not finished were cut."""
    visits = jax.device_get(visits)
    return {
        "loss": visits["loss"].mean(),
        "grad_norm": visits["grad_norm"].mean(),
        "too_long": sum(not one.finished for one in demonstrations),
        **metrics.count_updates(visits),
    }
