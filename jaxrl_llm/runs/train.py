"""A run under way: both phases from where they were left, each step recorded, saved, evaluated and shown.

Steps are numbered through both phases. What a step computes is in `learning.imitate` and `learning.reinforce`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxrl_llm import hosts
from jaxrl_llm.config import Config, WarmStart
from jaxrl_llm.errors import Leaving, UserError
from jaxrl_llm.learning import evaluate, imitate, reinforce, update
from jaxrl_llm.learning.clock import Clock
from jaxrl_llm.learning.step import Step
from jaxrl_llm.learning.stream import Cursor
from jaxrl_llm.learning.token_task import Answers, remark
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.runs import anchor, assemble, journal
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.journal import Journal
from jaxrl_llm.runs.leaving import Stop
from jaxrl_llm.runs.notes import REINFORCE, WARM_START, Notes
from jaxrl_llm.runs.progress import shown
from jaxrl_llm.runs.recorder import Recorder
from jaxrl_llm.runs.splits import Splits
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.tasks.task import Demonstrator, Source, Task

REFERENCE = "reference"


@dataclass
class Run:
    """What a run works with; `stop` says when it is time to leave, `best` is the best validation score so far."""

    config: Config
    parts: Parts
    sampler: Sampler
    journal: Journal
    checkpoints: Checkpoints
    splits: Splits
    stop: Stop = field(default_factory=Stop)
    best: float | None = None
    saved: int = -1

    @property
    def warm_steps(self) -> int:
        """Length of the first phase."""
        return self.config.warm_start.steps if self.config.warm_start else 0

    @property
    def last_step(self) -> int:
        """The number of the step that ends the run."""
        return self.warm_steps + self.config.steps


def train(run: Run, *, resume: bool, warmed: Callable[[], Any] | None = None) -> None:
    """Both phases, each from where the newest checkpoint left it.

    With `warmed`, which where nothing is saved gives the parameters that a warm start ended with, the first phase
    is taken as done. Leaving, or a UserError, ends it before; the last state that is whole is saved then.
    """
    config, parts = run.config, run.parts
    start, state, params = (0 if warmed is None else run.warm_steps), None, None
    notes = Notes(WARM_START if config.warm_start and warmed is None else REINFORCE)
    if resume and run.checkpoints.steps:
        like = lambda found: _state_like(config, parts, Notes.from_json(found).phase)
        start, state, found = run.checkpoints.newest(like)
        notes, run.saved = Notes.from_json(found), start
    elif warmed is not None:
        params = warmed()
    run.best = notes.best
    with hosts.together():
        run.journal.start(after=-1 if state is None else start)
    if notes.phase == WARM_START:
        assert config.warm_start
        params = _warm_start(run, config.warm_start, start, state, notes.cursor)
        start, state, notes = run.warm_steps, None, Notes(REINFORCE)
    elif state is None and params is None:
        params = assemble.fresh_params(config, parts)
    _reinforce(run, start, state, notes.cursor, params)


def conclude(run: Run) -> tuple[int, evaluate.Result] | None:
    """The best checkpoint (else the newest) on the test set, which is read here only; None if that was done."""
    if _recorded(run, "test/accuracy", run.last_step, REINFORCE) is not None:
        return None
    run.checkpoints.wait()
    step, params = run.checkpoints.restore_best(assemble.like_params(run.parts), part="params")
    run.sampler.push(params, step)
    examples = assemble.first(run.splits.test, run.config.evaluation.examples)
    result, seconds = _measured(run, examples)
    values = {f"test/{name}": value for name, value in result.metrics().items()}
    values |= {"test/step": step, "time/evaluation": seconds}
    with hosts.together():
        run.journal.record(run.last_step, REINFORCE, values)
    return step, result


def _warm_start(
    run: Run, warm: WarmStart, start: int, state: update.TrainState | None, cursor: Cursor | None
) -> Any:
    """The supervised phase from `start` on; returns the parameters."""
    config, parts = run.config, run.parts
    data = Batches(run.splits.train, warm.batch, seed=config.seed)
    if cursor is not None:
        data.set_state(cursor.data)
    demonstrate = partial(
        imitate.demonstrations,
        parts.token_task(config),
        warm.demonstration or _demonstration(parts.task),
        warm.collate.response_length,
    )
    clock, every = Clock(), warm.evaluate_every or warm.steps
    if state is None:
        params = assemble.fresh_params(config, parts)
        state = update.init_state(params, warm.optimizer, offload=config.offloads("optimizer"))
    elif start % every == 0 and start < warm.steps:
        _catch_up(run, start, WARM_START, state.params, clock)
        run.sampler.release()
    steps = imitate.imitate(
        range(start, warm.steps),
        state,
        data,
        demonstrate,
        imitate.compiled(
            parts.policy, warm.optimizer, parts.collator(warm.collate), parts.mesh, state
        ),
        clock,
    )
    with _recording(run, WARM_START, range(warm.steps), start) as recorder:
        for step in steps:
            state = step.state
            recorder.hold(step)
            recorder.flush()
            if step.number == warm.steps:
                break
            run.stop.check()
            recorder.check()
            if step.number % every == 0:
                run.sampler.push(state.params, step.number)
                _evaluate(run, step.number, WARM_START, clock)
                run.sampler.release()
            if config.saves(step.number):
                _save(run, step.number, WARM_START, state, step.cursor)
    return state.params


def _begin(run: Run, start: int, params: Any, cursor: Cursor) -> update.TrainState:
    """The first state of reinforcement: the reference is kept, the policy saved and evaluated as it is."""
    config = run.config
    if config.keeps_reference:
        anchor.write(run.journal.folder / REFERENCE, params)
    state = update.init_state(params, config.optimizer, offload=config.offloads("optimizer"))
    if run.saved != start:
        _save(run, start, REINFORCE, state, cursor)
    run.sampler.push(state.params, start)
    _evaluate(run, start, REINFORCE)
    return state


def _reinforce(
    run: Run, start: int, state: update.TrainState | None, cursor: Cursor | None, params: Any
) -> None:
    """Policy-gradient steps from `start` to the end; without a state they begin with `params`."""
    config, parts = run.config, run.parts
    whole = range(run.warm_steps, run.last_step)
    every, show_every = config.evaluation.every or config.steps, config.show_samples_every
    due = lambda step: step == whole.stop or (step - whole.start) % every == 0
    stream = assemble.stream(config, parts, run.sampler, run.splits.train, cursor)
    clock = Clock()
    if state is None:
        state = _begin(run, start, params, stream.cursor())
    elif due(start):
        score = _catch_up(run, start, REINFORCE, state.params, clock)
        if start > whole.start:  # the policy before reinforcement is no candidate
            better = run.best is None or score > run.best
            if better or config.saves(start):  # else it would not have been saved
                run.checkpoints.judge(start, score)
            run.best = score if run.best is None else max(run.best, score)
    else:
        run.sampler.push(state.params, start)
    reference = None
    if config.keeps_reference:
        reference = assemble.reference(config, parts, run.journal.folder / REFERENCE)

    def show(step: Step) -> None:
        if step.answers and show_every and (step.number - 1 - whole.start) % show_every == 0:
            _show(run.journal, parts.task, step.number, step.answers, config.group_size)

    with _recording(run, REINFORCE, whole, start, show) as recorder:
        for step in reinforce.reinforce(
            range(start, whole.stop),
            state,
            stream,
            parts.token_task(config),
            assemble.reinforcement(config, parts, state, reference),
            run.sampler,
            clock,
            look_ahead=config.look_ahead,
            meanwhile=recorder.flush,
            droppable=run.stop.droppable,
        ):
            recorder.hold(step)
            if step.trouble is not None:
                raise step.trouble
            run.stop.check()
            recorder.check()
            score = None
            if due(step.number):
                recorder.flush()
                score = _evaluate(run, step.number, REINFORCE, clock)
            best = score is not None and (run.best is None or score > run.best)
            if best or config.saves(step.number):
                recorder.flush()
                _save(run, step.number, REINFORCE, step.state, step.cursor, score)
        recorder.flush()


@contextmanager
def _recording(
    run: Run, phase: str, steps: range, start: int, show: Callable[[Step], None] = lambda _: None
) -> Iterator[Recorder]:
    """A recorder for the block; where that ends early, the last step that it holds is saved."""
    with shown(run.journal, phase, steps, start - steps.start) as advance:
        recorder = Recorder(
            run.journal, phase, advance, most_unchecked=run.config.most_unchecked, show=show
        )
        try:
            yield recorder
        except (UserError, Leaving) as error:
            hosts.announce(error)
            recorder.flush()
            step = recorder.last
            if step is not None and step.number > run.saved and _whole(step.state):
                _save(run, step.number, phase, step.state, step.cursor)
            raise


def _whole(state: update.TrainState) -> bool:
    """Whether no later step has consumed the state."""
    return not any(x.is_deleted() for x in jax.tree.leaves(state))


def _show(
    journal: Journal, task: Task[Any], number: int, answers: Answers, group_size: int
) -> None:
    """The first response to each of the first four prompts, for people."""
    examples, texts, rewards = answers
    entries = [
        (task.prompt(examples[i]), texts[i], remark(rewards[i]))
        for i in range(0, min(len(texts), 4 * group_size), group_size)
    ]
    journal.samples(number, "Sampled responses", entries)


def _evaluate(run: Run, step: int, phase: str, clock: Clock | None = None) -> float:
    """Greedy accuracy of what the sampler holds on the validation examples; it is recorded and said.

    Its time is taken out of the step that `clock` times.
    """
    result, seconds = _measured(run, run.splits.validation)
    if clock is not None:
        clock.pause(seconds)
    values = {f"eval/{name}": value for name, value in result.metrics().items()}
    with hosts.together():
        run.journal.record(step, phase, values | {"time/evaluation": seconds})
    total = result.total
    low, high = (100 * bound for bound in total.interval)
    run.journal.say(
        f"  step {step}: validation accuracy {100 * total.greedy:.1f}% ({low:.1f} to {high:.1f}), "
        f"mean length {total.length:.0f}"
    )
    return total.greedy


def _measured(run: Run, examples: Source[Any]) -> tuple[evaluate.Result, float]:
    """What the sampler's policy does on these examples, and the seconds it took; it may be dropped."""
    settings, timer = run.config.evaluation, Clock()
    with timer("evaluation"), run.stop.droppable():
        result = evaluate.evaluate(
            run.sampler,
            run.parts.token_task(run.config),
            examples,
            run.parts.sampling(run.config, temperature=settings.temperature, seed=run.config.seed),
            samples=settings.samples,
            by=settings.by,
        )
    return result, timer.lap()["time/evaluation"]


def _catch_up(run: Run, step: int, phase: str, params: Any, clock: Clock) -> float:
    """The score of a resumed step; it is evaluated if that was dropped when the run ended there."""
    run.sampler.push(params, step)
    found = _recorded(run, "eval/accuracy", step, phase)
    return _evaluate(run, step, phase, clock) if found is None else found


def _recorded(run: Run, name: str, step: int, phase: str) -> float | None:
    """The figure of that name in the records of a step, if it is there."""
    here = lambda r: r["step"] == step and r["phase"] == phase and name in r
    found = lambda: (r[name] for r in journal.read(run.journal.folder) if here(r))
    return hosts.told(lambda: next(found(), None))


def _save(
    run: Run,
    step: int,
    phase: str,
    state: update.TrainState,
    cursor: Cursor,
    score: float | None = None,
) -> None:
    """Writes a checkpoint in the background; the best `score` is kept."""
    if score is not None:
        run.best = score if run.best is None else max(run.best, score)
    with hosts.together():
        run.journal.sync()
    run.checkpoints.save(step, state, Notes(phase, run.best, cursor).to_json(), score)
    run.saved = step


def _state_like(config: Config, parts: Parts, phase: str) -> update.TrainState:
    """The form of the state in a phase."""
    warm, like = config.warm_start, assemble.like_params(parts)
    optimizer = warm.optimizer if warm and phase == WARM_START else config.optimizer
    return update.state_like(like, optimizer, offload=config.offloads("optimizer"))


def _demonstration(task: Any) -> Callable[[Any], str]:
    if not isinstance(task, Demonstrator):
        raise UserError(f"task {task.name} has no demonstration(example): warm_start needs one")
    return task.demonstration
