"""The steps of a run: imitation of demonstrations, then reinforcement.

A step is a function of the state, the cursor in the data and its own number, so a resumed run
repeats the uninterrupted one bit for bit (on a CPU). Steps are numbered through both phases.
`save`, `evaluate` and `show` are passed in: nothing here knows of folders.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm import distributed, userfile
from jaxrl_llm.config import WarmStart
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.learning import imitate, reinforce, update
from jaxrl_llm.learning.groups import Group, trajectories
from jaxrl_llm.learning.update import TrainState
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Demonstrator, Source
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.components import Components
from jaxrl_llm.training.journal import REINFORCE, WARM_START, Journal, Recorder, scores
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.stream import Cursor, Stream

Save = Callable[[int, TrainState, Cursor], None]
Evaluate = Callable[[int], float]
Look = Callable[[Sequence[int]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Point:
    """A run after `step` steps: its state, and the cursor in its data (None: at the start)."""

    phase: str
    step: int
    state: TrainState
    cursor: Cursor | None = None


def warm_start(
    components: Components,
    examples: Source[Any],
    sampler: Sampler,
    journal: Journal,
    stop: Stop,
    start: Point | None,
    *,
    clock: Clock,
    save: Save,
    evaluate: Evaluate,
) -> Any:
    """Supervised steps on demonstrations to the end of the phase; returns the parameters.

    The next step's batch is made on the host while the devices work.
    """
    config, warm = components.config, components.config.warm_start
    assert warm is not None
    if start is None:
        offload = config.offloads("optimizer")
        state = update.init_state(components.initial_params(), warm.optimizer, offload=offload)
        start = Point(WARM_START, 0, state)
    step = saved = start.step
    state, every = start.state, warm.evaluate_every or warm.steps
    task = components.token_task(clock.beat)
    data = Batches(examples, warm.batch, seed=config.seed)
    if start.cursor is not None:
        data.set_state(start.cursor.data)
    learn = components.imitation(state)
    demonstrate = partial(
        imitate.demonstrations,
        task,
        demonstration(warm, components.task),
        warm.collate.response_length,
    )

    def prepare() -> tuple[update.Credited, int]:
        shown = demonstrate(next(data))
        return learn.batch(shown), sum(not one.finished for one in shown)

    cursor = Cursor(data.get_state())
    recorder = Recorder(
        journal, WARM_START, range(warm.steps), start.step, config.most_unchecked, every
    )
    recorder.begin()
    try:
        with clock("collate"):
            credited, too_long = prepare()
        while step < warm.steps:
            if step and step % every == 0 and not _evaluated(journal, step, WARM_START):
                push(sampler, components.merged(state.params), step, clock, stop)
                evaluate(step)
                sampler.release()
            if step != saved and (config.saves(step) or stop.save):
                save(step, state, cursor)
                saved = step
            distributed.check(stop)
            clock.restart()
            with clock("update"):
                state, visits = learn.update(state, credited)
                step += 1
                cursor, cut = Cursor(data.get_state()), too_long
                if step < warm.steps:
                    credited, too_long = prepare()
                figures = imitate.describe(visits, cut)
            recorder.hold(step, partial(dict, figures | clock.lap()))
            recorder.flush()
            recorder.check()
    except (StopRequested, UserError) as error:
        # not the last step: reinforcement saves it when it begins
        if saved < step < warm.steps and _can_save(error, state):
            recorder.flush()
            save(step, state, cursor)
        raise
    return state.params


def reinforcement(
    components: Components,
    examples: Source[Any],
    sampler: Sampler,
    journal: Journal,
    stop: Stop,
    start: Point | int,
    params: Any,
    reference: Any,
    *,
    clock: Clock,
    save: Save,
    evaluate: Evaluate,
    show: Callable[[int, list[Group], Look], None],
) -> None:
    """Policy-gradient steps to the run's end: rollout, reward, batch, score, credit, update, sync.

    `start` is the point to resume from, or the step at which the phase begins with `params`, which
    are consumed (donated).
    """
    config, first = components.config, components.config.warm_steps
    last, every = config.last_step, config.evaluation.every or max(config.steps, 1)
    task = components.token_task(clock.beat, lambda: stop.asked)
    sampling = components.sampling()

    def sample(step: int, prompts: Sequence[Any], *nth: int) -> list[Group]:
        seed = int(np.random.SeedSequence([config.seed, step, *nth]).generate_state(1)[0])
        settings = replace(sampling, seed=seed)
        return task.sample(sampler, prompts, n=config.group_size, sampling=settings)

    stream = Stream(
        Batches(examples, config.prompts, seed=config.seed + 1),
        sample,
        whole=task.whole,
        own=task.own,
        cursor=start.cursor if isinstance(start, Point) else None,
    )
    if isinstance(start, Point):
        step, state = start.step, start.state
    else:
        step = start
        state = update.init_state(params, config.optimizer, offload=config.offloads("optimizer"))
        save(step, state, stream.cursor())
    saved = step
    learn = components.step(state, reference)

    def answer(examples: list[Any], nth: int) -> list[Group]:
        """This process's share of the groups of a draw, graded; a stop may discard it."""
        with clock("rollout"):
            own = stream.answer(step, examples, nth) if nth else stream.take(step, examples)
        if not config.redraws:
            onward()
        with clock("reward"):
            return task.grade(own)

    def onward() -> None:
        """After the last rollout of a step: those of the next steps, or room for the update."""
        count = 0 if stream.ahead else min(config.max_lag, last - step - 1)
        if count:
            stream.begin(step + 1, count)
        elif not stream.ahead:
            sampler.release()

    def draw() -> tuple[list[Group], list[Group]]:
        """All groups graded in the step, and those to learn from.

        Groups of equal rewards give way to others, which are drawn `redraws` times at most; those
        beyond what the step needs are left for the next one.
        """

        def drawn_for(missing: int, nth: int) -> list[Group]:
            count = math.ceil(config.oversample * missing)
            examples = stream.draw(count) if nth else stream.examples(count)
            return task.together(examples, partial(answer, examples, nth), stop)

        pool = stream.surplus
        older = len(pool)
        pool += drawn_for(config.prompts - older, 0)
        if not config.draws_more:
            return pool, pool
        useful = lambda: [i for i, group in enumerate(pool) if not group.is_constant]
        for nth in range(1, config.redraws + 1):
            if (missing := config.prompts - len(useful())) <= 0:
                break
            pool += drawn_for(missing, nth)
        if config.redraws:
            onward()
        constant = [i for i, group in enumerate(pool) if group.is_constant]
        chosen = [*useful(), *constant][: config.prompts]
        more_than_needed = useful()[config.prompts :][: config.prompts - 1]
        stream.keep(pool[older:], [i - older for i in more_than_needed])  # those come first
        return pool[older:], [pool[i] for i in sorted(chosen)]

    push(sampler, components.merged(state.params), step, clock, stop)
    pushed = step
    recorder = Recorder(journal, REINFORCE, range(first, last), step, config.most_unchecked, every)
    recorder.begin()
    try:
        while True:
            better, due = False, step >= last or (step - first) % every == 0
            if due and not _evaluated(journal, step, REINFORCE):
                recorder.flush()
                if pushed != step:
                    with clock("rollout"):
                        stream.settle()
                    push(sampler, components.merged(state.params), step, clock, stop)
                    pushed = step
                highest = _highest_score(journal, first)
                better = evaluate(step) > highest and step > first
            if step != saved and (better or config.saves(step) or stop.save):
                recorder.flush()
                with clock("rollout"):
                    stream.settle()
                save(step, state, stream.cursor())
                saved = step
            if step >= last:
                break
            clock.restart()
            drawn, groups = draw()
            with clock("collate"):
                batch, reward = learn.batch(groups)
            with clock("score"):
                seen, described = jax.block_until_ready(learn.score(state.params, batch))
                reinforce.require_our_policy(groups, step, described, sampler.tolerance)
            with clock("update"):
                credited = learn.credit(batch, reward, **seen)
                state, visits = learn.update(state, credited)
                step += 1
                stream.advance()
                recorder.flush()  # metrics of the previous step, while the devices work
                jax.block_until_ready(state)
            host = reinforce.describe_answers(drawn, stream.seconds)
            if config.draws_more:
                host |= reinforce.describe_learned(groups, drawn)
            host |= {"lag": step - 1 - min(one.version for one in trajectories(groups))}
            recorder.hold(step, partial(reinforce.describe_update, visits, described, host))
            show(step, groups, partial(learn.look, state.params, batch, reward, credited))
            try:
                if stream.ahead < 2:  # the next step samples with the newest weights
                    with clock("rollout"):
                        stream.settle()
                    push(sampler, components.merged(state.params), step, clock, stop, "sync")
                    pushed = step
                    host |= sampler.sync
            finally:
                # the recorder fetches `host` later, with these in it
                host |= clock.lap(sampler.counters.get("idle_seconds", 0.0))
            recorder.check()
    except (StopRequested, UserError) as error:
        if step > saved and _can_save(error, state):
            recorder.flush()
            save(step, state, stream.cursor())
        raise


def push(
    sampler: Sampler, params: Any, step: int, clock: Clock, stop: Stop, phase: str = ""
) -> None:
    """Pushes, the first time outside of a step: that starts servers, which may take minutes.

    Raises StopRequested in all processes if one was asked to stop; that cuts the wait for servers short.
    """
    with clock(phase or ("sync" if sampler.sync else "start")), suppress(StopRequested):
        sampler.push(params, step)
    distributed.check(stop)


def _evaluated(journal: Journal, step: int, phase: str) -> bool:
    """Whether a step's evaluation is recorded; one cut short by a stop is not."""
    return journal.find("eval/accuracy", step, phase) is not None


def _highest_score(journal: Journal, first: int) -> float:
    """The best validation accuracy so far, without the policy before reinforcement."""
    known = scores(journal.records)
    return max((score for step, score in known.items() if step > first), default=-1.0)


def _can_save(error: BaseException, state: TrainState) -> bool:
    """Whether the state can be saved after an error: not if another step has consumed it.

    With several processes only on a stop, on which all agree; an error is one process's alone.
    """
    whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
    return whole and (isinstance(error, StopRequested) or distributed.count() == 1)


def demonstration(warm: WarmStart, task: Any) -> Callable[[Any], Any]:
    """The warm start's demonstrations, or the task's; their errors are UserErrors."""
    if warm.demonstration is None and not isinstance(task, Demonstrator):
        raise UserError(f"task {task.name} has no demonstration(example): warm_start needs one")
    guarded = userfile.user_code("a demonstration cannot be made")
    return guarded(warm.demonstration or task.demonstration)
