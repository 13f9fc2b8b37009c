"""A whole run: `train`, to be read from top to bottom."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import jax
import rich.console

from jaxrl_llm import accelerators, distributed, storage
from jaxrl_llm.background import repeating
from jaxrl_llm.config import Config
from jaxrl_llm.errors import StopRequested, UserError, first_line, out_of_memory
from jaxrl_llm.learning import imitate, update
from jaxrl_llm.learning.evaluate import Result, evaluate
from jaxrl_llm.learning.groups import Group
from jaxrl_llm.learning.update import TrainState
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.tasks.task import Source as Examples
from jaxrl_llm.tasks.task import Supervised
from jaxrl_llm.training import alarms, record, terminal
from jaxrl_llm.training.checkpoint import Checkpoints, DamageError
from jaxrl_llm.training.clock import Clock, spent
from jaxrl_llm.training.components import DATA, Components, Splits
from jaxrl_llm.training.fingerprint import not_finite
from jaxrl_llm.training.folder import RunFolder, Start
from jaxrl_llm.training.journal import (
    BEST_BY,
    BEST_BY_REWARD,
    LOSS,
    LOWEST,
    REINFORCE,
    WARM_START,
    Journal,
    Score,
    read,
    scores,
)
from jaxrl_llm.training.leaving import FACTOR, LEAST, Stop, stall_watchdog
from jaxrl_llm.training.log import WAIT, RunLog
from jaxrl_llm.training.phases import Imitation, Phase, Reinforcement, Resumed
from jaxrl_llm.training.record import Source
from jaxrl_llm.training.stream import Rollouts

Resume = bool | int | Literal["auto"]


@dataclass
class Session:
    """How a process runs a config; nothing of it changes what the run computes.

    The run ends, saved, when `stop` is asked, and with code 76 when a phase makes no progress for
    `stall[0]` seconds and `stall[1]` times as long as ever before. `on_record` is called with each
    new record of metrics.jsonl, by the first process.

    >>> seen = []
    >>> jl.Session(on_record=seen.append).stop.requested
    False
    """

    stop: Stop = field(default_factory=Stop)
    console: rich.console.Console = field(
        default_factory=lambda: terminal.console(quiet=not distributed.first())
    )
    on_record: Callable[[Mapping[str, Any]], None] | None = None
    stall: tuple[float, float] = (LEAST, FACTOR)


def train(
    config: Config,
    out: str | Path,
    *,
    resume: Resume = False,
    init_from: str | Path | None = None,
    source: Source | None = None,
    data: str | Path = DATA,
    session: Session | None = None,
) -> Path:
    """Runs a config: warm start, reinforcement, test, and a picture of curves; returns its folder.

    `resume` goes on from the newest checkpoint ("auto": if there is a run), or from that of a step,
    and keeps the later ones aside. `init_from` is a run whose warm start to use. `source` records how
    the config was made, for later commands. Raises StopRequested, after saving, when the session's
    `stop` is asked; a UserError for faults outside the program.
    """
    with Run.open(
        config,
        out,
        resume=resume,
        init_from=init_from,
        source=source,
        data=data,
        session=session or Session(),
    ) as run:
        start = run.resumed
        if start is None or start.phase == WARM_START:
            with _saying_what_fits(run.components, WARM_START):
                start = run.warm_up()
        with _saying_what_fits(run.components, REINFORCE):
            run.fit(Reinforcement(run.components, run.rollouts, run.folder, start))
            run.test()
    return run.folder.path


@dataclass
class Run:
    """One training in its folder: its phases, one after the other. It knows no algorithm."""

    components: Components
    folder: RunFolder
    checkpoints: Checkpoints
    log: RunLog
    rollouts: Rollouts
    stop: Stop
    resumed: Resumed | None  # where it goes on: the newest checkpoint, or that of a step
    init_from: RunFolder | None  # the run whose warm start is used

    @classmethod
    @contextmanager
    def open(
        cls,
        config: Config,
        out: str | Path,
        *,
        resume: Resume,
        init_from: str | Path | None,
        source: Source | None,
        data: str | Path,
        session: Session,
    ) -> Iterator[Self]:
        """Opens the run's folder, log and engine for the block."""
        stop, console = session.stop, session.console
        clock, (least, factor) = Clock(since=time.perf_counter()), session.stall
        stalled = partial(distributed.stalled, stop=stop)
        with ExitStack() as stack:
            stack.enter_context(clock)
            stack.enter_context(stall_watchdog(clock, least=least, factor=factor, stalled=stalled))
            stack.enter_context(distributed.watched(lambda: clock.last_here, clock.others_went_on))
            start = Start.make(config, out, resume, init_from)
            folder, resuming = start.folder, start.resuming
            components, sizes = _components(start.config, data, console)
            stack.callback(storage.try_push, components.data)  # a judge's marks, of the test too
            config, first = components.config, components.config.warm_steps
            now = start.new_record(components, source, sizes)
            record.require_alike(now, resume)
            start.require_steps(components)
            # what this process does when it is stopped, or makes no progress
            stop.save_seconds = 60 * config.save_minutes or math.inf
            if storage.shared(folder.path):  # a mirror goes with its process
                stop.stacks = folder.path / f"stacks-{distributed.index()}.txt"

            # the folder, which the first process alone writes to
            stack.enter_context(_explained(folder, console))
            if distributed.first():
                stack.enter_context(folder.open(components, now, resume=resuming))
            # the others go on when they see the same run: --out may be another disk there
            folder.wait_for(distributed.from_first(lambda: record.identity(folder.path)))
            stack.enter_context(jax.set_mesh(components.mesh))
            # all decide by the same records (the best so far, what is evaluated), read once
            records = distributed.from_first(lambda: read(folder.path))
            journal = stack.enter_context(
                Journal(
                    folder.path,
                    console,
                    records,
                    writes=distributed.first(),
                    on_record=session.on_record,
                )
            )
            checkpoints = stack.enter_context(
                folder.checkpoints(config.keep_checkpoints, config.saves, lambda: journal.records)
            )
            if distributed.first():  # what a killed process has left half written
                checkpoints.clean()
                folder.initials.clean()

            # where it goes on; records of steps that are made again are dropped
            resumed = _resumed(components, checkpoints, start.earlier) if resuming else None
            if resuming:
                journal.say(_goes_on(resumed, first, config.steps))
            records = journal.records
            journal.start(after=-1 if resumed is None else resumed.step)
            lost = sum(spent(records).values()) - sum((so_far := spent(journal.records)).values())
            clock.begin(so_far, lost=lost)
            if resumed is None:
                if distributed.first() and components.graded:
                    _try_reward(components, journal, stop)
                distributed.check(stop)

            # the engine
            def alive() -> None:  # called while it waits for servers
                clock.heartbeat()
                stop.check()

            sampler = stack.enter_context(
                config.engine.start(components.policy, components.mesh, folder.path, alive)
            )
            sampler.prompt_length = components.prompt_length
            teach = alarms.equal_rewards_teach(config.loss)
            log = RunLog(journal, clock, config.max_ungraded, teach)
            stack.enter_context(repeating(log.tell, WAIT))
            rollouts = Rollouts(components, sampler, log, stop)
            stack.callback(rollouts.close)
            yield cls(components, folder, checkpoints, log, rollouts, stop, resumed, start.other)

    def warm_up(self) -> Any:
        """The parameters that reinforcement begins with, which are kept where they are read again."""
        config = self.components.config
        if self.init_from is not None:  # 1. those of another run
            params = self.init_from.start_params(self.components)
        elif config.warm_start:  # 2. those that this run's ends with
            imitation = Imitation(self.components, self.rollouts, self.resumed, self.stop)
            params = self.fit(imitation).params
        else:  # 3. the pretrained model, or random ones by the run's seed
            params = self.components.initial_params()
        if config.keeps_reference or config.warm_start:
            with self.log.phase("save"):
                self.folder.initials.replace(config.warm_steps, params)
        return params

    def fit(self, phase: Phase) -> TrainState:
        """Makes the steps of a phase, evaluates and saves; the state after the last.

        Where the run ends early its state is saved, unless an update has consumed it.
        """
        step, state = phase.start()
        # before anything is recorded of it, as records alone mean it is gone; there is one already where
        # a warm start was made shorter by --steps, and ends at its own checkpoint
        if phase.saves_first and not distributed.from_first(lambda: step in self.checkpoints.steps):
            self.save(phase, step, state)
        saved = step
        self.log.begin(phase.name, phase.steps, step, phase.every)
        try:
            while True:
                best = phase.evaluates_at(step) and self.evaluate(phase, step, state)
                due = best or self.components.config.saves(step) or self.stop.wants_save
                if due and step != saved and phase.keeps(step):
                    self.save(phase, step, state)
                    saved = step
                if step >= phase.steps.stop:
                    self.log.flush()
                    self.log.require_progress()
                    return state
                distributed.check(self.stop)  # all leave after the same step
                with self.log.step(step + 1):
                    state = phase.train_step(state, step, self.log)
                    step += 1
        except (StopRequested, UserError) as error:
            # not what another step has consumed; of several processes only on a stop, on which all agree
            whole = not any(x.is_deleted() for x in jax.tree.leaves(state))
            agreed = isinstance(error, StopRequested) or distributed.count() == 1
            if step != saved and phase.keeps(step) and whole and agreed:
                self.save(phase, step, state)
            raise

    def save(self, phase: Phase, step: int, state: TrainState) -> None:
        """Saves a checkpoint, with the responses that are there."""
        self.log.flush()
        note = {"phase": phase.name, **phase.state_dict(step)}
        with self.log.phase("save"):
            _require_finite(step, state, self.checkpoints.steps)
            self.log.journal.sync()
            first = not self.checkpoints.steps
            self.checkpoints.save(step, state, note)
            # a run that goes on gets the same marks of a judge
            storage.try_push(self.components.data)
            if first:  # records without any mean from now on that they are gone
                self.checkpoints.wait()
                if distributed.first():
                    self.folder.note_saved()
        # time counts from the end: a save that takes long is not due again at once
        self.stop.wants_save, self.stop.saved = False, time.monotonic()

    def evaluate(self, phase: Phase, step: int, state: TrainState) -> bool:
        """Validates the policy, unless that is recorded; whether it is the best of reinforcement so far.

        The policy that reinforcement begins with does not count.
        """
        if isinstance(self.components.task, Supervised):
            return self._evaluate_rows(phase.name, step, state.params)
        if self.log.journal.find("eval/accuracy", step, phase.name) is not None:
            return False
        self.log.flush()
        self.rollouts.push(state.params, step)
        first, known = self.components.config.warm_steps, scores(self.log.journal.records)
        highest = max((score for at, score in known.items() if at > first), default=LOWEST)
        return self.validate(phase.name, step) > highest and step > first

    def _evaluate_rows(self, phase: str, step: int, params: Any) -> bool:
        """The same of rows to imitate, by the loss on other rows; accuracy too where there are rewards."""
        journal = self.log.journal
        if journal.find(LOSS, step, phase) is not None:
            return False
        self.log.flush()
        # a stop may have come between the two
        if self.components.graded and journal.find("eval/accuracy", step, phase) is None:
            self.rollouts.push(params, step)
            self.validate(phase, step)
        known = scores(journal.records)
        loss, seconds = self._loss(params, self.components.splits.validation)
        journal.record(step, phase, {LOSS: loss, "time/evaluation": seconds})
        journal.say(f"  step {step}: validation loss {loss:.4f}")
        highest = max((score for at, score in known.items() if at), default=LOWEST)
        return (-loss, 0.0) > highest and step > 0

    def _loss(self, params: Any, rows: Examples[Any]) -> tuple[float, float]:
        """The loss on rows, and the seconds that took."""
        begun = time.perf_counter()
        with self.log.phase("evaluation"):
            loss = self.components.held_out(
                params, [rows[i] for i in range(len(rows))], self._between
            )
        return loss, time.perf_counter() - begun

    def _between(self) -> None:
        """Between batches of what takes long: there is progress; all leave if one is asked to stop."""
        self.log.clock.heartbeat()
        distributed.check(self.stop)

    def validate(self, phase: str, step: int) -> Score:
        """The score of the sampler's greedy responses in validation; recorded and printed."""
        result, seconds = self._answered(examples := self.components.splits.validation)
        values = {f"eval/{name}": value for name, value in result.metrics().items()}
        best_by = self.components.config.evaluation.best_by
        score = result.score(best_by)
        values |= dict(zip((BEST_BY, BEST_BY_REWARD), score, strict=True)) if result.tasks else {}
        self.log.journal.record(step, phase, values | {"time/evaluation": seconds})
        total = result.total
        low, high = (100 * bound for bound in total.interval)
        text = f"{100 * total.greedy:.1f}% ({low:.1f} to {high:.1f})"
        text += f", mean reward {total.score:.3g}" * total.by_reward
        text += f", mean length {total.length:.0f}"
        for line in result.lines[: len(result.tasks)]:
            text += f", {line.name} " + (
                f"{100 * line.greedy:.1f}%" if line.examples else "unknown"
            )
        if result.ungraded:
            text = f"{text}, {result.ungraded} ungraded"
        if not total.examples:
            text = f"unknown: all {len(examples)} responses are ungraded"
        self.log.journal.say(f"  step {step}: validation accuracy {text}")
        if (phase, step) == (REINFORCE, self.components.config.warm_steps) and result.first:
            self._show_example(result.first)
        return score if total.examples else LOWEST

    def _show_example(self, group: Group) -> None:
        """Prints an example as the model reads it, special tokens too, with its response and reward."""
        decode, response = self.components.tokenizer.decode, group.trajectories[0]
        prompt = decode(response.prompt, ended=False)
        self.log.journal.say(
            f"an example before the first step, as the model reads it:\n{terminal.excerpt(prompt)}\n"
            f"its response, of {response.length} tokens, {response.reward}:\n"
            f"{terminal.excerpt(decode(response.tokens))}"
        )

    def test(self) -> None:
        """Tests the best checkpoint (else the newest), unless that is recorded; draws the curves."""
        with self.log.phase("save"):
            self.checkpoints.wait()
            self.checkpoints.prune()  # the last evaluation may have come after the last save
        tested, journal = None, self.log.journal
        of_last = partial(journal.find, step=self.components.config.last_step, phase=REINFORCE)
        if of_last("test/accuracy") is None and of_last("test/loss") is None:
            tested = self._tested()
        journal.say(self.log.clock.in_words())
        if distributed.first():
            best = self.checkpoints.best
            _summarise(self.components.config, self.folder.path, tested, best, journal)

    def _tested(self) -> tuple[int, Result | None]:
        """The step that was chosen, and its results on the test set, which is read only here."""
        components, journal = self.components, self.log.journal
        read = lambda step: self.checkpoints.restore(step, components.like, part="params")
        found = self.checkpoints.first_whole(read, prefer=self.checkpoints.best)
        assert found is not None  # the last step was saved
        step, params = found
        figures: dict[str, Any] = {"test/step": step}
        test, validation = components.splits.test, components.splits.validation
        count = components.config.evaluation.examples or len(test)
        examples = [test[i] for i in range(min(count, len(test)))]
        if isinstance(components.task, Supervised):
            loss, seconds = self._loss(params, examples)
            figures |= {"test/loss": loss, "time/evaluation": seconds}
            journal.say(f"test loss of step {step}: {loss:.4f}")
        if not components.graded:
            journal.record(components.config.last_step, REINFORCE, figures)
            return step, None
        self.rollouts.push(params, step)
        named = {"eval/accuracy", "time/evaluation"}
        measured = [r["time/evaluation"] for r in journal.records if named <= r.keys()]
        # a test takes as long an example as the last validation did
        share = len(examples) / len(validation)
        expected = f", about {terminal.duration(measured[-1] * share)}" if measured else ""
        journal.say(f"test of step {step} on {len(examples)} examples{expected}")
        result, seconds = self._answered(examples)
        figures |= {f"test/{name}": x for name, x in result.metrics().items()}
        figures["time/evaluation"] = seconds
        journal.record(components.config.last_step, REINFORCE, figures)
        return step, result

    def _answered(self, examples: Examples[Any]) -> tuple[Result, float]:
        """The results of the sampler's policy on examples, and the seconds they took."""
        config, begun = self.components.config, time.perf_counter()
        settings = config.evaluation
        with self.log.phase("evaluation"):
            result = evaluate(
                self.rollouts.sampler,
                self.components.token_task(
                    self.log.clock.heartbeat, lambda: self.stop.requested, evaluates=True
                ),
                examples,
                self.components.sampling(
                    examples, temperature=settings.temperature, seed=config.seed
                ),
                samples=settings.samples,
                by=settings.by,
                stop=self.stop,
            )
        return result, time.perf_counter() - begun


def _components(
    config: Config, data: str | Path, console: rich.console.Console
) -> tuple[Components, dict[str, int]]:
    """All that the config makes; and the sizes that it leaves open, chosen to fit."""
    accelerators.begin(config.shared)  # now, since the next line starts JAX
    distributed.require_joined()
    components = Components.make(config, data)
    splits = components.splits
    _describe(components, splits, console)
    chosen, warm = {}, config.warm_start
    if (steps := components.warm_steps) != config.warm_steps:
        assert warm is not None
        chosen["warm_steps"] = steps
        config = config.sized(chosen)
        components = replace(components, config=config)
        console.print(f"{warm.epochs:g} epochs: {steps} steps of {warm.batch} rows")
    if opened := [name for name, size in config.sizes.items() if not size]:
        from jaxrl_llm.planning import machines, report, sizes  # most configs leave none open

        here = machines.machine("here")
        config, planned = sizes.fitted(config, here, components.shape, only=("update",))
        components = replace(components, config=config)
        chosen |= {name: config.sizes[name] for name in opened}
        verdict = f": {report.verdict(planned)}" if planned else ""
        console.print(f"chosen to fit: {report.sized(config.sizes)}{verdict}")
    vars(components)["splits"] = splits  # as they were read: making them again may take minutes
    return components, chosen


@contextmanager
def _explained(folder: RunFolder, console: rich.console.Console) -> Iterator[None]:
    """For the block, says where a run that leaves is saved, and that its folder cannot be written to."""
    try:
        yield
    except StopRequested:
        known = folder.checkpoints().steps
        saved = f"stopped and saved in {storage.shown(folder.path)}; go on with --resume"
        console.print(saved if known else "stopped before there was anything to save")
        raise
    except OSError as error:
        if error.filename and not Path(str(error.filename)).is_relative_to(folder.path):
            raise
        raise UserError(
            f"cannot write to {folder.path}: {first_line(error)}: make room or permit writing, then go on with "
            "--resume"
        ) from error


@contextmanager
def _saying_what_fits(components: Components, phase: str) -> Iterator[None]:
    """For the block, adds to an error for want of memory the sizes that would fit."""
    warm = components.config.warm_start if phase == WARM_START else None
    try:
        yield
    except Exception as error:
        if warm and out_of_memory(error):
            less = f"a smaller batch than {warm.batch}, or more micro-batches than {warm.collate.microbatches}"
            error.add_note(f"in warm_start {less} (of its collate), need less")
        elif out_of_memory(error):
            from jaxrl_llm.planning import machines, sizes

            with suppress(Exception):  # compiling may want memory too: the error is what is said
                here = machines.machine("here")
                error.add_note(sizes.smaller(components.config, here, components.shape))
        raise


def _describe(components: Components, splits: Splits, console: rich.console.Console) -> None:
    """Prints the devices, the sizes of the splits, and warnings."""
    console.print(accelerators.described([*components.mesh.devices.flat]))
    count = qwen2.parameter_count(components.shape) / 1e6
    trained = sum(x.size for x in jax.tree.leaves(components.like)) / 1e6
    some = f"{trained:,.1f}M in adapters are" if components.shape.lora else "all are"
    console.print(
        f"{components.base[0] or 'a new model'}: {count:,.1f}M parameters, {some} trained"
    )
    teacher, model = components.teacher, components.config.teacher
    if teacher and model:
        count = qwen2.parameter_count(teacher.shape) / 1e6
        console.print(f"{model.name}: {count:,.1f}M parameters, the teacher")
    what = "they are" if isinstance(components.task, Supervised) else "their prompts are"
    if splits.skipped:
        console.print(f"{splits.skipped} examples are left out: {what} too long to learn from")
    console.print(
        f"{len(splits.train)} examples to learn from, {len(splits.validation)} to choose the best "
        f"checkpoint by, {len(splits.test)} to test on"
    )
    config = components.config
    if (times := config.steps * config.prompts / len(splits.train)) > 1:
        console.print(f"{config.steps} steps of {config.prompts} read each about {times:.2g} times")
    whole = sharding.left_whole(components.like, components.mesh)
    for warning in filter(None, (*whole, splits.overlap)):
        console.print(warning)


def _resumed(
    components: Components, checkpoints: Checkpoints, earlier: int | None
) -> Resumed | None:
    """The checkpoint that a resumed run goes on from: the newest readable one, or that of a step.

    None without any. A UserError if that of the step cannot be read.
    """

    config = components.config

    def restore(step: int) -> Resumed:
        note = checkpoints.note(step)
        # the optimizer of the phase that the checkpoint is of says what its state looks like
        warm = config.warm_start if note["phase"] == WARM_START else None
        if warm is None and step < config.warm_steps:
            raise UserError(
                f"the warm start has ended after {step} steps, and cannot be made longer to {config.warm_steps}: "
                "leave --steps out to go on, or start anew with another --out"
            )
        optimizer = warm.optimizer if warm else config.optimizer
        like = update.state_like(components.like, optimizer, offload=config.offloads("optimizer"))
        return Resumed(note["phase"], step, checkpoints.restore(step, like), note)

    if earlier is not None:
        known = distributed.from_first(lambda: checkpoints.steps)
        if earlier not in known:
            raise UserError(f"--resume {earlier}: there are checkpoints of {known or 'no step'}")
        try:
            point = restore(earlier)
        except DamageError as error:
            raise UserError(f"--resume {earlier}: that checkpoint is damaged ({error})") from error
        checkpoints.go_back(earlier)
        return point
    found = checkpoints.first_whole(restore, rename=True)
    return found and found[1]


def _try_reward(components: Components, journal: Journal, stop: Stop) -> None:
    """Warns, before anything takes long, if a first response's reward raises or is ungraded."""
    what, response, example = "an empty response", "", components.splits.train[0]
    if warm := components.config.warm_start:
        demonstrate = imitate.demonstration(warm.demonstration, components.task)
        what, response = "a demonstration", demonstrate(example)
    task = components.token_task(stop_requested=lambda: stop.requested)
    with suppress(StopRequested):  # other processes do not know: they agree on that later
        if not task.try_reward(example, response).graded:
            journal.say(
                f"warning: the reward was tried on {what} to the first example, and gave no verdict (it raised, "
                "or returned None): nothing is learned from such responses"
            )


def _goes_on(start: Resumed | None, first: int, steps: int) -> str:
    """The step that a resumed run goes on from, in words."""
    if start is None:
        return "resumed without a checkpoint: it begins anew"
    if start.phase == WARM_START:
        return f"resumed after step {start.step} of the warm start's {first}"
    return f"resumed after step {start.step - first} of reinforcement's {steps}"


def _require_finite(step: int, state: update.TrainState, saved: list[int]) -> None:
    """A UserError if a parameter is not finite: such a state is never saved."""
    if (name := not_finite(state.params)) is not None:
        back = (
            f"resume with a lower learning rate ({saved[-1]} is saved)" if saved else "start anew"
        )
        raise UserError(
            f"step {step}: {name} is not finite though its gradient was: the state is not saved; look into "
            f"the optimizer's schedule, then {back}"
        )


def _summarise(
    config: Config,
    folder: Path,
    tested: tuple[int, Result | None] | None,
    best: int | None,
    journal: Journal,
) -> None:
    """Draws the curves; prints the test table, validation accuracy and further commands."""
    from jaxrl_llm.training import curves, tables

    curves.draw([folder], folder / curves.PICTURE)
    where = storage.shown(folder)
    if tested is None:
        journal.say(f"nothing was left to do in {where}")
        return
    step, result = tested
    if result is not None:
        which = "the best on the validation examples" if step == best else "the newest"
        title = f"test accuracy in percent (95% interval) of step {step}, {which}"
        journal.say(tables.accuracies(title, result, config.evaluation.by))
        if result.total.examples and journal.find(LOSS, config.last_step, REINFORCE) is None:
            graded = {s: x for s, x in scores(journal.records).items() if x > LOWEST}
            first = config.warm_steps
            journal.say(_progress(graded, step, first) if graded else "validation: all ungraded")
    go_on = (
        f"evaluate it: jaxrl-llm eval {where}"
        if result
        else f"go on: jaxrl-llm train grpo --from {where}"
    )
    more = f"talk to it: jaxrl-llm sample {where}   {go_on}"
    if record.read(folder)["config"] is None:  # no command can make a program's config
        more = f"look at it: jaxrl-llm view {where}   keep it: jaxrl-llm export {where} FOLDER"
    journal.say(f"curves: {where}/{curves.PICTURE}   {more}")


def _progress(scored: dict[int, Score], step: int, first: int) -> str:
    """How reinforcement, after `first`, changed validation accuracy up to a step, as text; else the reward."""
    name, tell, gain = "accuracy", "{:.1%}".format, lambda x: f"{100 * x:+.1f} points"
    values = {s: accuracy for s, (accuracy, _) in scored.items()}
    if not any(values.values()):
        name, tell, gain = "reward", "{:.3g}".format, "{:+.3g}".format
        values = {s: reward for s, (_, reward) in scored.items()}
    start, chosen = values.get(first), values.get(step, values[max(values)])
    text = f"validation {name}: {'unknown' if start is None else tell(start)} before reinforcement"
    later = [values[s] for s in sorted(values) if s > first][-3:]
    if not later:  # a run of no steps
        return text
    mean = sum(later) / len(later)
    text += f", {tell(chosen)} at step {step}"
    if len(later) > 1:
        text += f", mean of the last {len(later)}: {tell(mean)}"
    if start is None:
        return text
    text += f" ({gain(mean - start)})"
    if chosen <= start:
        text += "\nwarning: no checkpoint is better than the start of reinforcement"
    return text
