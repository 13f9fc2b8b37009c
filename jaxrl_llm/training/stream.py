"""The stream of groups that a run learns from; the next may be sampled while the trainer updates."""

import time
from collections import deque
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import distributed
from jaxrl_llm.background import in_background
from jaxrl_llm.errors import StopRequested
from jaxrl_llm.learning import reinforce
from jaxrl_llm.learning.groups import Group, from_note, noted, trajectories
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.log import RunLog

Sampled = tuple[list[Group], float]  # this process's share of groups, and the seconds it took


class _Batch(NamedTuple):
    """The prompts of a step that is to come: the position in the data before them, their groups."""

    data: dict[str, int]
    examples: list[Any]
    own: futures.Future[Sampled]


class Rollouts:
    """Groups in the order of the data, by the sampler's newest weights or, with `max_lag`, older ones.

    `next` gives the groups of a step. Those whose rewards are all equal give way to groups of the
    next prompts, in `max_resamples` rounds. Batches of up to `max_lag` steps to come are sampled in
    the background meanwhile. With several processes each samples a share, and all have the whole.
    """

    def __init__(self, components: Components, sampler: Sampler, log: RunLog, stop: Stop):
        self._components, self.sampler, self._log, self._stop = components, sampler, log, stop
        self._config, self._sampling = components.config, components.sampling()
        self._task = components.token_task(log.clock.heartbeat, lambda: stop.requested)
        examples = components.splits.train
        self._data = Batches(examples, self._config.prompts, seed=self._config.seed + 1)
        self._ahead = deque[_Batch]()
        self._entered: tuple[int, dict[str, int], list[_Batch]] | None = None  # `next`, and where
        self._version: int | None = None  # the step of the sampler's weights
        self._started, self._sync = False, dict[str, float]()
        self._graded: list[Group] = []  # all that the step has sampled, and the seconds it took
        self._seconds = 0.0

    def next(self, step: int) -> list[Group]:
        """The graded groups to learn from after `step`, in all processes.

        StopRequested in all if one was asked to stop.
        """
        # a step that fails is asked for again from here
        self._entered = step, self._data.get_state(), [*self._ahead]
        self._graded, self._seconds = [], 0.0
        for nth in range(self._config.max_resamples + 1):
            useful = sum(not group.is_constant for group in self._graded)
            if missing := self._config.prompts - useful:
                batch = self._ahead.popleft() if self._ahead and not nth else None
                examples = batch.examples if batch else self._data.draw(missing)
                work = partial(self._answered, step, nth, examples, batch)
                self._graded += self._task.together(examples, work, self._stop)
        if self._config.max_resamples:
            self._go_ahead(step)
        # constant ones where there are no others; in the order of the data
        preferred = sorted(range(len(self._graded)), key=lambda i: self._graded[i].is_constant)
        return [self._graded[i] for i in sorted(preferred[: self._config.prompts])]

    def _answered(
        self, step: int, nth: int, examples: list[Any], batch: _Batch | None
    ) -> list[Group]:
        """This process's share of the groups, graded; sampled now unless it was ahead of the step."""
        with self._log.phase("rollout"):
            if batch is None:
                own, seconds = self._sample(step, nth, examples)
                self._log.clock.idle(self.sampler.counters.get("idle_seconds", 0.0))
            else:
                own, seconds = batch.own.result()
            self._seconds += seconds
        if not self._config.max_resamples:
            self._go_ahead(step)  # before rewards, which may take as long
        with self._log.phase("reward"):
            return self._task.grade(own)

    def _sample(self, step: int, nth: int, examples: list[Any]) -> Sampled:
        """This process's share of the responses; the seed is a function of step and round alone."""
        start = time.perf_counter()
        # the first round has no number: its seed is that of a run without resampling
        entropy = [self._config.seed, step, *([nth] if nth else [])]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        sampling = replace(self._sampling, seed=seed)
        own = self._task.sample(
            self.sampler, examples, n=self._config.group_size, sampling=sampling
        )
        return own, time.perf_counter() - start

    def _go_ahead(self, step: int) -> None:
        """After the last sampling for a step: begins that of the next steps, or makes room for the update."""
        count = min(self._config.max_lag, self._config.last_step - step - 1)
        if count < 1 and not self._ahead:
            self.release()
        if count < 1 or self._ahead:
            return
        batches = [self._next_batch() for _ in range(count)]

        def work() -> None:
            for n, batch in enumerate(batches, 1):
                try:
                    batch.own.set_result(self._sample(step + n, 0, batch.examples))
                except BaseException as error:
                    for other in batches[n - 1 :]:
                        other.own.set_exception(error)
                    return

        in_background(work)  # one batch after the other: each fills the servers

    def _next_batch(self) -> _Batch:
        self._ahead.append(_Batch(self._data.get_state(), next(self._data), futures.Future()))
        return self._ahead[-1]

    def refresh(self, params: Any, step: int) -> None:
        """Pushes, unless what the step and the one after it learn from is sampled, or being sampled."""
        if len(self._ahead) < 2:
            self.push(params, step)

    def push(self, params: Any, step: int) -> None:
        """Has the sampler use these weights of a step, once it has answered what it was asked.

        StopRequested in all processes if one was asked to stop; that cuts the wait for servers short.
        """
        if self._version == step:
            return
        self._settle()
        # the first push starts servers, which may take minutes
        with self._log.phase("sync" if self._started else "start"), suppress(StopRequested):
            self.sampler.push(self._components.merged(params), step)
        self._started, self._version, self._sync = True, step, self.sampler.sync
        distributed.check(self._stop)

    def release(self) -> None:
        """Frees the memory that the sampler's weights take of the trainer's."""
        if self._version is not None:
            self._version = None
            self.sampler.release()

    def _settle(self) -> None:
        """Waits until nothing is being sampled; `next` raises what went wrong."""
        if self._ahead:
            with self._log.phase("rollout"):
                futures.wait([batch.own for batch in self._ahead])

    def report(self, step: int, groups: list[Group]) -> dict[str, Any]:
        """Metrics of the groups that `next(step)` gave, of all that it sampled, and of the last push."""
        figures = reinforce.describe_answers(self._graded, self._seconds)
        if self._config.max_resamples:
            figures |= reinforce.describe_learned(groups, self._graded)
        lag = step - min(one.version for one in trajectories(groups))
        sync, self._sync = self._sync, {}
        return figures | {"lag": lag} | sync

    def state_dict(self, step: int, *, wait: bool) -> dict[str, Any]:
        """What a run that goes on after `step` begins with, for a note; all processes have to call it.

        That is the position in the data and the batches ahead, up to the first that any process has
        not; with `wait` they are all waited for. Groups that `next(step)` gave were not learned from.
        """
        if wait:
            self._settle()
        data, ahead = self._data.get_state(), [*self._ahead]
        if self._entered is not None and self._entered[0] == step:
            _, data, ahead = self._entered
        kept = []
        for batch in ahead:
            there = batch.own.done() and batch.own.exception() is None
            whole = self._task.whole(batch.examples, batch.own.result()[0] if there else None)
            if whole is None:  # this and later ones are sampled anew
                data = batch.data
                break
            kept.append([dict(batch.data), noted(whole)])
        return {"data": dict(data), **({"ahead": kept} if kept else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        for position, note in state.get("ahead", ()):
            self._data.set_state(position)
            batch = self._next_batch()
            pairs = zip(from_note(note), batch.examples, strict=True)
            groups = [replace(group, example=example) for group, example in pairs]
            batch.own.set_result((self._task.own(batch.examples, groups), 0.0))
        self._data.set_state(state["data"])
