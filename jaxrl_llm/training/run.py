"""A whole run: `train`, to be read from top to bottom."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import rich.console

from jaxrl_llm import accelerators, distributed, storage, userfile
from jaxrl_llm.config import Config
from jaxrl_llm.errors import StopRequested, UserError, first_line, out_of_memory
from jaxrl_llm.learning import update
from jaxrl_llm.learning.evaluate import Result, evaluate
from jaxrl_llm.learning.groups import Group, from_note, noted
from jaxrl_llm.models import sharding
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampler
from jaxrl_llm.tasks.task import Source as Examples
from jaxrl_llm.tasks.task import as_text
from jaxrl_llm.training import loop, terminal
from jaxrl_llm.training.checkpoint import Checkpoints, DamageError
from jaxrl_llm.training.clock import Clock, spent
from jaxrl_llm.training.components import DATA, Components, Splits
from jaxrl_llm.training.fingerprint import not_finite
from jaxrl_llm.training.folder import RunFolder
from jaxrl_llm.training.journal import REINFORCE, WARM_START, Journal, read, scores
from jaxrl_llm.training.leaving import FACTOR, LEAST, Stop, watched
from jaxrl_llm.training.loop import Point
from jaxrl_llm.training.record import Source, identity, modules, new, require_alike
from jaxrl_llm.training.stream import Cursor


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool | int | Literal["auto"] = False,
    origin: str | Path | None = None,
    source: Source | None = None,
    data: str | Path = DATA,
    stall: tuple[float, float] = (LEAST, FACTOR),
    stop: Stop | None = None,
    console: rich.console.Console | None = None,
    told: Callable[[Mapping[str, Any]], None] | None = None,
) -> Path:
    """Runs a config: warm start, reinforcement, test, and a picture of curves; returns its folder.

    `resume` goes on from the newest checkpoint ("auto": if there is a run), or from that of a step,
    and keeps the later ones aside. `origin` is a run whose warm start to use. `source` records how
    the config was made, for later commands. `stall`: the process ends, with code 76, when a phase
    makes no progress for so many seconds, and so many times as long as ever before. `told` is called
    with each new record of metrics.jsonl, by the first process. Raises StopRequested, after saving, when
    `stop` is asked; a UserError for faults outside the program.
    """
    stop, console = stop or Stop(), console or terminal.console(quiet=not distributed.first())
    clock, (least, factor) = Clock(since=time.perf_counter()), stall
    stalled = partial(distributed.stalled, stop=stop)
    with clock, watched(clock, least=least, factor=factor, stalled=stalled):
        folder = RunFolder(out)
        if resume is not False and folder.holds_run:
            config = folder.pinned(config)
        if isinstance(config.engine, Vllm) and config.engine.share:
            accelerators.leave(config.engine.share)
        distributed.require_joined()
        components = Components.make(config, data)
        if source is not None:  # making the task ran its file
            ran = userfile.ran(but=source.path)
            source = replace(source, files=tuple(dict.fromkeys([*source.files, *ran])))
        splits = components.splits
        _describe(components, splits, console)
        chosen = {}
        if opened := [name for name, size in config.sizes.items() if not size]:
            from jaxrl_llm.planning import machines, report, sizes  # most configs leave none open

            here = machines.machine("here")
            config, planned = sizes.fitted(config, here, components.shape, only=("update",))
            components = replace(components, config=config)
            chosen = {name: config.sizes[name] for name in opened}
            verdict = f": {report.verdict(planned)}" if planned else ""
            console.print(f"chosen to fit: {report.sized(config.sizes)}{verdict}")
        first = config.warm_steps
        resuming = distributed.from_first(
            lambda: folder.holds_run if resume == "auto" else resume is not False
        )
        begun = folder.init_from(origin, resuming)
        given = {
            "the data of the task": splits.checksum,
            **components.identity,
            **chosen,
            **modules(),
        }
        if distributed.count() > 1:
            require_alike(new(source, begun and begun.path, given), resume)
        earlier = None if isinstance(resume, (bool, str)) else resume
        if resuming:
            folder.require_at_most(first, config.steps, earlier)
        if begun is not None and not folder.checkpoints().steps:
            begun.require_warm_start(components, first)
        stop.save_seconds = 60 * config.save_minutes or math.inf
        if storage.shared(folder.path):  # a mirror goes with its process
            stop.stacks = folder.path / f"stacks-{distributed.index()}.txt"
        with _told(folder, console), ExitStack() as stack:
            if distributed.first():
                stack.enter_context(
                    folder.open(components, source, given, resume=resuming, init_from=begun)
                )
            folder.wait_for(distributed.from_first(lambda: identity(folder.path)))
            stack.enter_context(jax.set_mesh(components.mesh))
            known = distributed.from_first(lambda: read(folder.path))
            journal = stack.enter_context(
                Journal(folder.path, console, known, writes=distributed.first(), told=told)
            )
            checkpoints = stack.enter_context(
                folder.checkpoints(config.keep_checkpoints, config.saves, lambda: journal.records)
            )
            initial = folder.initials
            if distributed.first():
                checkpoints.clean()
                initial.clean()
            start = _resumed(components, checkpoints, earlier) if resuming else None
            if resuming:
                journal.say(_goes_on(start, first, config.steps))
            known = journal.records
            journal.start(after=-1 if start is None else start.step)
            lost = sum(spent(known).values()) - sum((kept := spent(journal.records)).values())
            clock.begin(kept, lost=lost)

            if start is None:
                if distributed.first():
                    _try_reward(components, splits.train[0], journal, stop)
                distributed.check(stop)

            def alive() -> None:
                clock.beat()
                stop.check()

            sampler = stack.enter_context(
                config.engine.start(components.policy, components.mesh, folder.path, alive)
            )
            measure = partial(_measure, components, sampler, journal, clock, stop)

            def save(phase: str, step: int, state: update.TrainState, cursor: Cursor) -> None:
                with clock("save"):
                    _require_finite(step, state, checkpoints.steps)
                    journal.sync()
                    checkpoints.save(step, state, {"phase": phase, **_noted(cursor)})
                    if not checkpoints.steps:  # records without any mean that they are gone
                        checkpoints.wait()
                stop.save, stop.saved = False, time.monotonic()

            params = None
            if start is None or start.phase == WARM_START:
                if begun is not None:
                    params = begun.initial_params(components)
                elif config.warm_start:
                    params = loop.warm_start(
                        components, splits.train, sampler, journal, stop, start,
                        clock=clock,
                        save=partial(save, WARM_START),
                        evaluate=partial(measure, splits.validation, phase=WARM_START),
                    )  # fmt: skip
                else:
                    params = components.initial_params()
                start = None
                if config.keeps_reference or config.warm_start:
                    with clock("save"):
                        initial.replace(first, params)

            reference = folder.reference_params(components) if config.keeps_reference else None
            stack.enter_context(_saying_what_fits(components))
            loop.reinforcement(
                components, splits.train, sampler, journal, stop, start or first, params, reference,
                clock=clock,
                save=partial(save, REINFORCE),
                evaluate=partial(measure, splits.validation, phase=REINFORCE),
                show=partial(_show, components, journal),
            )  # fmt: skip

            with clock("save"):
                checkpoints.wait()
                checkpoints.prune()  # the last evaluation may have come after the last save
            tested = None
            if journal.find("test/accuracy", config.last_step, REINFORCE) is None:
                tested = _test(components, splits, sampler, journal, clock, checkpoints, stop)
            journal.say(clock.in_words())
            if distributed.first():
                _summarise(config, folder.path, tested, checkpoints.best, journal)
        return folder.path


@contextmanager
def _told(folder: RunFolder, console: rich.console.Console) -> Iterator[None]:
    """For the block, says where a run that leaves is saved, and that its folder cannot be written to."""
    try:
        yield
    except StopRequested:
        known = folder.checkpoints().steps
        saved = f"stopped and saved in {storage.spoken(folder.path)}; go on with --resume"
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
def _saying_what_fits(components: Components) -> Iterator[None]:
    """For the block, adds to an error for want of memory the sizes that would fit."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            from jaxrl_llm.planning import machines, sizes

            with suppress(Exception):  # compiling may want memory too: the error is what is said
                here = machines.machine("here")
                error.add_note(sizes.smaller(components.config, here, components.shape))
        raise


def _describe(components: Components, splits: Splits, console: rich.console.Console) -> None:
    """Prints the devices, the sizes of the splits, and warnings."""
    console.print(accelerators.described([*components.mesh.devices.flat]))
    if splits.skipped:
        console.print(
            f"{splits.skipped} examples are left out: their prompts are too long to learn from"
        )
    console.print(
        f"{len(splits.train)} examples to learn from, {len(splits.validation)} to choose the best "
        f"checkpoint by, {len(splits.test)} to test on"
    )
    whole = sharding.left_whole(components.like, components.mesh)
    for said in (*whole, splits.overlap(components.task)):
        if said:
            console.print(said)


def _resumed(components: Components, checkpoints: Checkpoints, earlier: int | None) -> Point | None:
    """Where a resumed run goes on: at the newest readable checkpoint, or that of a step.

    None without any. A UserError if that of the step cannot be read.
    """

    config = components.config

    def read(step: int) -> Point:
        note = checkpoints.note(step)
        warm = config.warm_start if note["phase"] == WARM_START else None
        optimizer = warm.optimizer if warm else config.optimizer
        like = update.state_like(components.like, optimizer, offload=config.offloads("optimizer"))
        return Point(note["phase"], step, checkpoints.restore(step, like), _cursor(note))

    if earlier is not None:
        known = distributed.from_first(lambda: checkpoints.steps)
        if earlier not in known:
            raise UserError(f"--resume {earlier}: there are checkpoints of {known or 'no step'}")
        try:
            point = read(earlier)
        except DamageError as error:
            raise UserError(f"--resume {earlier}: that checkpoint is damaged ({error})") from error
        checkpoints.go_back(earlier)
        return point
    found = checkpoints.first_whole(read, rename=True)
    return found and found[1]


def _try_reward(components: Components, example: Any, journal: Journal, stop: Stop) -> None:
    """Warns, before anything takes long, if a first response's reward raises or is unchecked."""
    what, response = "an empty response", ""
    if warm := components.config.warm_start:
        what, response = "a demonstration", loop.demonstration(warm, components.task)(example)
    task = components.token_task(stop_requested=lambda: stop.asked)
    with suppress(StopRequested):  # other processes do not know: they agree on that later
        if not task.tried(example, response).checked:
            journal.say(
                f"warning: so the reward, tried on {what} for the first example, leaves it unchecked; nothing "
                "is learned from responses like it"
            )


def _goes_on(start: Point | None, first: int, steps: int) -> str:
    """Where a resumed run goes on, in words."""
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


def _noted(cursor: Cursor) -> dict[str, Any]:
    """The cursor for the note of a checkpoint."""
    note: dict[str, Any] = {"data": cursor.data}
    if cursor.ahead:
        note["ahead"] = [[position, noted(groups)] for position, groups in cursor.ahead]
    if cursor.surplus:
        places, groups = zip(*cursor.surplus, strict=True)
        note["surplus"] = {"places": places, "groups": noted(groups)}
    return note


def _cursor(note: dict[str, Any]) -> Cursor:
    """What was `_noted`."""
    ahead = tuple((at, from_note(kept)) for at, kept in note.get("ahead", ()))
    more = note.get("surplus")
    surplus = tuple(zip(more["places"], from_note(more["groups"]), strict=True)) if more else ()
    return Cursor(note["data"], ahead, surplus)


def _measure(
    components: Components,
    sampler: Sampler,
    journal: Journal,
    clock: Clock,
    stop: Stop,
    examples: Examples[Any],
    step: int,
    *,
    phase: str,
) -> float:
    """Greedy accuracy of the sampler's policy in validation; recorded and printed."""
    result, seconds = _timed(components, sampler, examples, clock, stop)
    values = {f"eval/{name}": value for name, value in result.metrics().items()}
    journal.record(step, phase, values | {"time/evaluation": seconds})
    total = result.total
    low, high = (100 * bound for bound in total.interval)
    said = f"{100 * total.greedy:.1f}% ({low:.1f} to {high:.1f}), mean length {total.length:.0f}"
    if result.unchecked:
        said = f"{said}, {result.unchecked} unchecked"
    if not total.examples:
        said = f"unknown: all {len(examples)} responses are unchecked"
    journal.say(f"  step {step}: validation accuracy {said}")
    return total.greedy


def _test(
    components: Components,
    splits: Splits,
    sampler: Sampler,
    journal: Journal,
    clock: Clock,
    checkpoints: Checkpoints,
    stop: Stop,
) -> tuple[int, Result]:
    """Tests the best checkpoint (else the newest) on the test set, which is read only here."""
    read = lambda step: checkpoints.restore(step, components.like, part="params")
    found = checkpoints.first_whole(read, prefer=checkpoints.best)
    assert found is not None  # the last step was saved
    step, params = found
    loop.push(sampler, components.merged(params), step, clock, stop)
    count = components.config.evaluation.examples or len(splits.test)
    examples = [splits.test[i] for i in range(min(count, len(splits.test)))]
    named = {"eval/accuracy", "time/evaluation"}
    measured = [r["time/evaluation"] for r in journal.records if named <= r.keys()]
    share = len(examples) / len(splits.validation)
    expected = f", about {terminal.duration(measured[-1] * share)}" if measured else ""
    journal.say(f"test of step {step} on {len(examples)} examples{expected}")
    result, seconds = _timed(components, sampler, examples, clock, stop)
    values: Mapping[str, Any] = {f"test/{name}": x for name, x in result.metrics().items()}
    journal.record(
        components.config.last_step,
        REINFORCE,
        {**values, "test/step": step, "time/evaluation": seconds},
    )
    return step, result


def _timed(
    components: Components,
    sampler: Sampler,
    examples: Examples[Any],
    clock: Clock,
    stop: Stop,
) -> tuple[Result, float]:
    """Evaluates the sampler's policy on the examples; returns the seconds too."""
    config, begun = components.config, time.perf_counter()
    settings = config.evaluation
    with clock("evaluation"):
        result = evaluate(
            sampler,
            components.token_task(clock.beat, lambda: stop.asked),
            examples,
            components.sampling(temperature=settings.temperature, seed=config.seed),
            samples=settings.samples,
            by=settings.by,
            stop=stop,
        )
    return result, time.perf_counter() - begun


def _show(
    components: Components,
    journal: Journal,
    step: int,
    groups: list[Group],
    look: loop.Look,
) -> None:
    """Writes the tokens of a few groups, and every so many steps samples of responses as text.

    The samples are the first responses to the first four prompts.
    """
    config = components.config
    ask = userfile.user_code("a prompt cannot be made")(components.task.prompt)
    text = lambda group: as_text(ask(group.example))
    if kept := groups[: config.keep_tokens]:
        numbers = look(range(len(kept) * config.group_size))  # a program of all processes
        if distributed.first():
            from jaxrl_llm.training import tokens

            tokens.write(journal.folder, step, kept, [*map(text, kept)], numbers)
    every = config.show_samples_every
    if not every or (step - 1 - config.warm_steps) % every:
        return
    first = [(group, group.trajectories[0]) for group in groups[:4]]
    entries = [
        (
            text(group),
            components.tokenizer.decode(one.tokens),
            f"{one.reward}, by the weights of step {one.version}",
        )
        for group, one in first
    ]
    journal.samples(step, entries)


def _summarise(
    config: Config,
    folder: Path,
    tested: tuple[int, Result] | None,
    best: int | None,
    journal: Journal,
) -> None:
    """Draws the curves; prints the test table, validation accuracy and further commands."""
    from jaxrl_llm.training import curves, tables

    curves.draw([folder], folder / curves.PICTURE)
    where = storage.spoken(folder)
    if tested is None:
        journal.say(f"nothing was left to do in {where}")
        return
    step, result = tested
    which = "the best on the validation examples" if step == best else "the newest"
    title = f"test accuracy in percent (95% interval) of step {step}, {which}"
    journal.say(tables.accuracies(title, result, config.evaluation.by))
    if result.total.examples:
        journal.say(_progress(scores(journal.records), step))
    journal.say(
        f"curves: {where}/{curves.PICTURE}   talk to it: jaxrl-llm sample {where}   "
        f"evaluate it: jaxrl-llm eval {where}"
    )


def _progress(known: dict[int, float], step: int) -> str:
    """How reinforcement changed validation accuracy, up to the chosen step, as text."""
    start, chosen = known[min(known)], known.get(step, known[max(known)])
    said = f"validation accuracy: {100 * start:.1f}% before reinforcement"
    later = [known[s] for s in sorted(known)[1:]][-3:]
    if not later:  # a run of no steps
        return said
    mean = sum(later) / len(later)
    said += f", {100 * chosen:.1f}% at step {step}"
    if len(later) > 1:
        said += f", mean of the last {len(later)}: {100 * mean:.1f}%"
    said += f" ({100 * (mean - start):+.1f} points)"
    if chosen <= start:
        said += "\nwarning: no checkpoint is better than the start of reinforcement"
    return said
