"""The stream of groups that a run learns from; later ones may be sampled while the trainer updates."""

import json
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm import distributed, userfile
from jaxrl_llm.errors import StopRequested
from jaxrl_llm.learning import reinforce
from jaxrl_llm.learning.groups import Group, Pending, from_note, noted, together, trajectories
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Remembers
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.log import RunLog


class Rollouts:
    """Groups in the order of the data, by the sampler's newest weights or, with `max_lag`, older ones.

    `next` gives the groups of a step. Those whose rewards are all equal give way to groups of the
    next prompts, in `max_resamples` rounds. Up to `max_lag + 1` steps of groups are asked for and
    not learned from; each is learned from in its turn, however long others take, and new weights
    take over in the middle of a response. Each process samples a share, and all have the whole.
    """

    def __init__(self, components: Components, sampler: Sampler, log: RunLog, stop: Stop):
        self._components, self.sampler, self._log, self._stop = components, sampler, log, stop
        self._config, self._sampling = components.config, components.sampling()
        # then groups teach in which these alone differ
        self._turns = self._config.loss.reads("turn_reward")
        self.task = components.token_task(log.clock.heartbeat, lambda: stop.requested)
        splits, seed = components.splits, self._config.seed + 1
        self._data = Batches(splits.train, self._config.prompts, seed=seed, parts=splits.parts)
        self._queue: list[Pending] = []  # asked for and not learned from, in the order of the data
        self._entered: tuple[int, dict[str, Any], list[Pending]] | None = None  # `next`, and where
        self._version: int | None = None  # the step of the sampler's weights
        self._started, self._sync = False, dict[str, float]()
        self._graded: list[Group] = []  # all that the step has sampled, and the seconds it took
        self._seconds, self._came = 0.0, 0.0

    def next(self, step: int) -> list[Group]:
        """The graded groups to learn from after `step`, in all processes.

        StopRequested in all if one was asked to stop.
        """
        config = self._config
        # a step that fails is asked for again from here
        self._entered = step, self._position(), [*self._queue]
        self._graded, self._seconds = [], 0.0
        for nth in range(config.max_resamples + 1):
            useful = sum(not group.is_constant(self._turns) for group in self._graded)
            if missing := config.prompts - useful:
                wanted = (config.last_step - step) * config.prompts - useful  # by the whole run
                self._admit(min(missing + config.max_lag * config.prompts, wanted), step, nth)
                head, self._queue = self._queue[:missing], self._queue[missing:]
                self._graded += together(head, partial(self._answered, head), self._stop)
        if not self._queue:
            self.release()  # room for the update
        if isinstance(self.task.task, Remembers):
            with userfile.user_code("the task cannot remember"):
                self.task.task.remember(self._graded, self.task.tokenizer)
        # constant ones where there are no others; in the order of the data
        constant = [group.is_constant(self._turns) for group in self._graded]
        preferred = sorted(range(len(constant)), key=constant.__getitem__)
        return [self._graded[i] for i in sorted(preferred[: config.prompts])]

    def _admit(self, count: int, step: int, nth: int) -> None:
        """Adds the next groups of the data until so many are in the queue."""
        first = self._data.get_state()["taken"]
        examples = self._data.draw(max(0, count - len(self._queue)))
        places = range(first, first + len(examples))
        self._queue += self.task.pending(
            examples, places, [self._seed(place, step, nth) for place in places]
        )

    def _seed(self, place: int, step: int, nth: int) -> int:
        """Of a group: with lag its own, since what is asked for at a step depends on the run so far."""
        # the first round has no number: its seed is that of a run without resampling
        of_step = [step, *([nth] if nth else [])]
        entropy = [self._config.seed, *([place, 0, 0] if self._config.max_lag else of_step)]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    def _answered(self, head: list[Pending]) -> list[Group]:
        """This process's of the first groups, graded; asks for all in the queue that are not yet."""
        config = self._config
        with self._log.phase("rollout"):
            begun = time.perf_counter()
            new = [one for one in [*head, *self._queue] if not one.responses]
            self._log.progress = partial(self._progress, head)
            self.task.submit(self.sampler, new, n=config.group_size, sampling=self._sampling)
            mine = self.task.collect(self.sampler, head)
            self._log.progress = str
            self._log.clock.idle(self.sampler.counters.get("idle_seconds", 0.0))
            # with lag the samplers have worked since the groups before these came
            start = self._came if config.max_lag and self._came else begun
            self._came = time.perf_counter()
            self._seconds += self._came - start
        with self._log.phase("reward"):
            return self.task.grade(mine)

    def _progress(self, head: list[Pending]) -> str:
        """How many responses of a step this process has."""
        mine = [one for one in head if one.is_mine]
        size = self._config.group_size
        # the embedded engine answers all at once, and counts
        left = self.sampler.counters.get("left", size * sum(not one.is_there for one in mine))
        return f", {size * len(mine) - left} of {size * len(mine)} responses are there"

    def push(self, params: Any, step: int) -> None:
        """Has the sampler use these weights of a step, also for what is under way.

        StopRequested in all processes if one was asked to stop; that cuts the wait for servers short.
        """
        if self._version == step:
            return
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

    def close(self) -> None:
        """Calls off what is under way."""
        for one in self._queue:
            one.call_off()

    def report(self, step: int, groups: list[Group]) -> dict[str, Any]:
        """Metrics of the groups that `next(step)` gave, of all that it sampled, and of the last push."""
        figures = reinforce.describe_answers(self._graded, self._seconds, turns=self._turns)
        if self._config.max_resamples:
            figures |= reinforce.in_short(groups, "learned", turns=self._turns)
            figures["drawn"] = float(len(self._graded))
        lags = [step - one.versions[0] for one in trajectories(groups)]
        figures["lag"] = float(np.median(lags))
        if self._config.max_lag:
            figures["lag_max"] = max(lags)
        sync, self._sync = self._sync, {}
        return figures | sync

    def state_dict(self, step: int) -> dict[str, Any]:
        """The stream as a run that goes on after `step` begins with it, for a note; all processes have to call it.

        That is the position in the data, and the groups before it that were not learned from: those
        that `next(step)` gave, too. Those that are not there are asked for anew.
        """
        position, queue = self._position(), self._queue
        if self._entered is not None and self._entered[0] == step:
            _, position, queue = self._entered
        if not queue:
            return position
        there = [one for one in queue if one.is_there]
        groups = {"places": [one.place for one in there], **noted([one.group() for one in there])}
        payloads = distributed.gather(json.dumps(groups).encode())
        return {
            **position,
            "queue": [one.place for one in queue],
            "there": [json.loads(payload) for payload in payloads],
        }

    def _position(self) -> dict[str, Any]:
        """The place in the data, and the memory that the task has of the groups before."""
        task = self.task.task
        memory = {}
        if isinstance(task, Remembers):
            with userfile.user_code("the task cannot say what it remembers"):
                memory["task"] = task.state_dict()
        return {"data": dict(self._data.get_state()), **memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self._data.set_state(state["data"])
        if isinstance(self.task.task, Remembers):
            with userfile.user_code("the task cannot be told what it remembered"):
                self.task.task.load_state_dict(state["task"])
        places = state.get("queue", [])
        examples, seeds = [*map(self._data.at, places)], [self._seed(p, 0, 0) for p in places]
        self._queue = self.task.pending(examples, places, seeds)
        by_place = {one.place: one for one in self._queue}
        for part in state.get("there", ()):
            for place, group in zip(part["places"], from_note(part), strict=True):
                if (one := by_place[place]).is_mine:
                    one.put(replace(group, example=one.example))
