"""The phases of a run, step by step: imitation of demonstrations, then reinforcement.

A step is a function of the state, the phase's `state_dict` and its own number, so a resumed run
repeats the uninterrupted one bit for bit (on a CPU). Steps are numbered through both phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_llm import distributed
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import imitate, reinforce, update
from jaxrl_llm.learning.groups import Group
from jaxrl_llm.learning.update import TrainState
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Supervised, as_text
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.journal import REINFORCE, WARM_START
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.log import RunLog
from jaxrl_llm.training.stream import Rollouts

BATCHES = 3  # in a row without a demonstration that fits end a run


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run goes on from: the state after `step`, and its note."""

    phase: str
    step: int
    state: TrainState
    note: dict[str, Any]


class Phase(Protocol):
    """A stretch of steps with one way to learn. `every` is how many steps lie between evaluations.

    In `train_step` nothing may raise a UserError or StopRequested after the update, which consumes
    the old state: what may goes to `log.at_end`.
    """

    name: str
    steps: range
    every: int
    saves_first: bool  # the state that `start` gives

    def start(self) -> tuple[int, TrainState]:
        """The state to begin with, and its step."""
        ...

    def evaluates_at(self, step: int) -> bool: ...

    def keeps(self, step: int) -> bool:
        """True if the state after `step` is the phase's to save."""
        ...

    def train_step(self, state: TrainState, step: int, log: RunLog) -> TrainState:
        """The state after `step + 1`; donates the old one."""
        ...

    def state_dict(self, step: int) -> dict[str, Any]:
        """All that it needs beside the state to go on after `step`; in all processes."""
        ...


class Imitation:
    """The warm start: supervised steps on the task's demonstrations, or the config's."""

    name, saves_first = WARM_START, False

    def __init__(
        self, components: Components, rollouts: Rollouts, resumed: Resumed | None, stop: Stop
    ):
        warm = components.config.warm_start
        assert warm is not None
        self.steps, self.every = range(warm.steps), warm.evaluate_every or warm.steps
        self._components, self._rollouts, self._resumed = components, rollouts, resumed
        self._stop = stop
        self._optimizer = warm.optimizer
        splits, seed = components.splits, components.config.seed
        self._data = Batches(splits.train, warm.batch, seed=seed, parts=splits.parts)
        self._demonstrate = partial(
            imitate.demonstrations,
            rollouts.task,
            imitate.demonstration(warm.demonstration, components.task),
            warm.collate.response_length,
        )
        self._supervised = isinstance(components.task, Supervised)
        self._in_vain, self._longest = 0, warm.collate.response_length

    def start(self) -> tuple[int, TrainState]:
        components, resumed, self._resumed = self._components, self._resumed, None
        if resumed is None:
            params, offload = components.initial_params(), components.config.offloads("optimizer")
            step, state = 0, update.init_state(params, self._optimizer, offload=offload)
        else:
            self._data.set_state(resumed.note["data"])
            step, state = resumed.step, resumed.state
        self._learn = components.imitation(state)
        return step, state

    def evaluates_at(self, step: int) -> bool:
        """Not at its end, where reinforcement does; at its start only if all there is to learn are rows."""
        return (self._supervised or step > 0) and step < self.steps.stop and step % self.every == 0

    def keeps(self, step: int) -> bool:
        """Not the last one: reinforcement saves it when it begins."""
        return step < self.steps.stop

    def train_step(self, state: TrainState, step: int, log: RunLog) -> TrainState:
        self._rollouts.release()  # an evaluation may have pushed weights
        with log.phase("update"):  # the host makes a batch while the devices do the step before
            self._data.seek(step)
            # replayed in environments, which may take long
            replay = partial(self._demonstrate, next(self._data))
            demonstrations = distributed.in_step(replay, self._stop)
            self._in_vain = 0 if any(one.finished for one in demonstrations) else self._in_vain + 1
            if self._in_vain == min(BATCHES, len(self.steps)):
                raise UserError(
                    f"no demonstration of {self._in_vain} batches fits into {self._longest} tokens: raise "
                    "the response_length of the warm start"
                )
            credited = self._learn.batch(demonstrations)  # advantage 1 on [B, T]
            state, visits = self._learn.programs.update(state, credited, frozen=self._learn.frozen)
            log.flush()
        left_out = self._components.splits.skipped if self._supervised else 0
        log.later(imitate.describe, visits, demonstrations, left_out)
        return state

    def state_dict(self, step: int) -> dict[str, Any]:
        self._data.seek(step)
        return {"data": self._data.get_state()}


class Reinforcement:
    """Policy-gradient steps on the rewards of groups of responses."""

    name = REINFORCE

    def __init__(
        self, components: Components, rollouts: Rollouts, folder: RunFolder, start: Resumed | Any
    ):
        """Goes on from `start`, or begins with these parameters, which are consumed."""
        config = components.config
        self.steps = range(config.warm_steps, config.last_step)
        self.every = config.evaluation.every or max(config.steps, 1)
        self.saves_first = not isinstance(start, Resumed)
        self._components, self._rollouts, self._folder = components, rollouts, folder
        self._start = start

    def start(self) -> tuple[int, TrainState]:
        components, start, self._start = self._components, self._start, None
        config, reference = components.config, None
        if config.keeps_reference:
            reference = self._folder.reference_params(components)
        if isinstance(start, Resumed):
            self._rollouts.load_state_dict(start.note)
            step, state = start.step, start.state
        else:
            step, offload = self.steps.start, config.offloads("optimizer")
            state = update.init_state(start, config.optimizer, offload=offload)
        self._learn = components.step(state, reference)
        return step, state

    def evaluates_at(self, step: int) -> bool:
        # also at its end, whatever `every` is: the best checkpoint is chosen by it
        return step >= self.steps.stop or (step - self.steps.start) % self.every == 0

    def keeps(self, step: int) -> bool:
        del step
        return True

    def train_step(self, state: TrainState, step: int, log: RunLog) -> TrainState:
        self._rollouts.push(state.params, step)
        groups = self._rollouts.next(step)  # P groups of G responses, sampled now or ahead of time
        with log.phase("collate"):
            groups = self._components.as_learned(groups)
            batch, reward = self._learn.batch(groups)  # [B, T], or packed in bins; [P, G]
        with log.phase("score"):  # the trainer's own log-probs, and the reference's
            scores, described = jax.block_until_ready(
                self._learn.score(state.params, batch, groups)
            )
            reinforce.require_our_policy(groups, step, described, self._rollouts.sampler.tolerance)
        with log.phase("update"):
            # credit is all that is constant in the parameters: advantages and weights
            credited = self._learn.programs.credit(batch, reward, **scores)
            state, visits = self._learn.programs.update(state, credited, frozen=self._learn.frozen)
            log.flush()  # metrics of the step before, while the devices work
            jax.block_until_ready(state)
        host = self._rollouts.report(step, groups)
        log.later(reinforce.describe_update, visits, described, host)
        tokens = partial(self._learn.token_stats, state.params, batch, reward, credited)
        log.at_end(self._show, log, step + 1, groups, tokens)
        return state

    def state_dict(self, step: int) -> dict[str, Any]:
        return self._rollouts.state_dict(step)

    def _show(self, log: RunLog, step: int, groups: Sequence[Group], tokens: Any) -> None:
        """Writes the tokens of a few groups, and every so many steps samples of responses as text.

        The samples are the first responses to the first four prompts.
        """
        components, config = self._components, self._components.config
        task = components.token_task()
        text = lambda group: as_text(task.ask(group.example))
        # all processes run this program, and the first one writes what it gives
        if kept := groups[: config.keep_tokens]:
            numbers: dict[str, np.ndarray] = tokens(range(len(kept) * config.group_size))
            if distributed.first():
                from jaxrl_llm.training import tokens as pages

                pages.write(log.journal.folder, step, kept, [*map(text, kept)], numbers)
        every = config.show_samples_every
        if not every or (step - 1 - self.steps.start) % every:
            return
        first = [(group, group.trajectories[0]) for group in groups[:4]]
        log.journal.samples(
            step,
            [
                (
                    text(group),
                    components.tokenizer.decode(one.tokens),
                    f"{one.reward}, by the weights of step {one.versions[0]}",
                )
                for group, one in first
            ],
        )
