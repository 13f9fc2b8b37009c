"""One supervised step: demonstrations as if they had been sampled, with advantage 1."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import metrics, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.learning.programs import Programs
from jaxrl_llm.models import sharding
from jaxrl_llm.models.primitives import merge_params
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.objectives import Objective, advantages, losses
from jaxrl_llm.rollouts.trajectory import Trajectory
from jaxrl_llm.tasks.task import Demonstrator, Interactive, Supervised

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

    def held_out(
        self, params: Any, rows: Sequence[Trajectory], batch: int, between: Callable[[], object]
    ) -> float:
        """The mean of -log p over all that would be learned of rows, `batch` at a time.

        `between` is called before each batch.
        """
        params, total = merge_params(params, self.frozen), 0.0
        for i in range(0, len(rows), batch):
            between()
            some = rows[i : i + batch]
            more = batch - len(some)  # empty: one shape is one program
            keep = [True] * len(some) + [False] * more
            inputs = update.place(self.collate([*some, *[rows[0]] * more], keep), self.mesh).inputs
            logp = self.programs.score(params, inputs).logp
            total -= float(jnp.where(inputs.scored, logp, 0.0).sum())
        return total / sum(one.length for one in rows)


def of_row(task: Supervised[Any], tokenizer: Tokenizer, example: Any) -> Trajectory:
    """A row of a task as if it had been sampled after its first token, so one limit is of all of it."""
    with userfile.user_code("a row cannot be made"):
        tokens, *spans = task.row(example, tokenizer)
    turns, restarts = ([(start - 1, end - 1) for start, end in some] for some in spans)
    logps = [0.0] * (len(tokens) - 1)
    return Trajectory(tokens[:1], tokens[1:], logps, turns=turns, restarts=restarts)


def demonstrations(
    task: TokenTask, demonstration: Callable[[Any], Any], longest: int, examples: Sequence[Any]
) -> list[Trajectory]:
    """Solutions, texts or the turns of episodes, as if they had been sampled.

    One over `longest` tokens is cut and not `finished`.
    """
    if isinstance(task.task, Supervised):  # of which those that are too long were left out
        return [of_row(task.task, task.tokenizer, one) for one in examples]
    said = map(demonstration, examples)
    if isinstance(task.task, Interactive):
        whole = [replace(one, finished=True) for one in task.replay(examples, list(said))]
    else:
        whole = []
        for example, text in zip(examples, said, strict=True):
            prompt = task.ask(example)
            tokens = task.turn(prompt, text)
            whole.append(Trajectory(task.tokenizer.prompt(prompt), tokens, [0.0] * len(tokens)))
    return [one if one.size <= longest else _cut(one, longest) for one in whole]


def _cut(one: Trajectory, longest: int) -> Trajectory:
    """Its first tokens, which are not learned from."""
    tokens, turns = one.tokens[:longest], ((0, longest),) if one.turns else ()
    return Trajectory(one.prompt, tokens, one.logps[:longest], finished=False, turns=turns)


def demonstration(made_by: Callable[[Any], Any] | None, task: Any) -> Callable[[Any], Any]:
    """The function that gives an example's demonstration, this or the task's; its errors are UserErrors."""
    if made_by is None and not isinstance(task, Demonstrator):
        raise UserError(f"task {task.name} has no demonstration(example): warm_start needs one")
    make, turns = made_by or task.demonstration, isinstance(task, Interactive)
    return userfile.user_code("a demonstration cannot be made")(partial(_checked, make, turns))


def _checked(make: Callable[[Any], Any], turns: bool, example: Any) -> Any:
    """The demonstration that `make` gives; a TypeError if it is no text and not one or more `turns`."""
    said = make(example)
    several = turns and isinstance(said, list | tuple) and len(said) > 0
    if not isinstance(said, str) and not (several and all(isinstance(x, str) for x in said)):
        wanted = "a str" + ", or a list of one or more, the turns" * turns
        raise TypeError(f"it is {said!r:.60}, not {wanted}")
    return said


def describe(
    visits: Any, demonstrations: Sequence[Trajectory], left_out: int = 0
) -> dict[str, Any]:
    """Metrics of a step, fetched from the devices; those that are not finished were cut.

    `left_out` rows of the data were too long from the start.
    """
    visits = jax.device_get(visits)
    done = metrics.updates(visits)
    mean = lambda name: float(visits[name][done].mean()) if done.any() else 0.0
    return {
        "loss": mean("loss"),
        "grad_norm": mean("grad_norm"),
        "too_long": left_out + sum(not one.finished for one in demonstrations),
        **metrics.count_updates(visits),
    }
