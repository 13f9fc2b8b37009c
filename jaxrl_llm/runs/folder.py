"""A run's folder: what is written when a run starts, and read when it is resumed, evaluated or talked to.

run.json               who the run is: its id, flags and sessions, and the run whose warm start it began with
config.py files/       the config file and the task files that it was started with
model/                 tokenizer and config.json in Hugging Face format
metrics.jsonl tensorboard/ samples/ curves.png
checkpoints/ reference/
lock/                  who works in it, if anybody does

Of a run in a bucket all but checkpoints/ and reference/ is written in a folder of this machine first, and stored
with every checkpoint and at the end.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import config, desk, files, hosts, userfile
from jaxrl_llm.config import Config
from jaxrl_llm.errors import ELSEWHERE, UserError, cannot_write
from jaxrl_llm.learning import update
from jaxrl_llm.models import hf, qwen2, sharding
from jaxrl_llm.runs import anchor, assemble, journal, lock, record, seal
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.runs.disk import DamageError, first_line
from jaxrl_llm.runs.notes import REINFORCE, Notes
from jaxrl_llm.runs.record import CONFIG

WILD = "[]*?\\"  # in a path orbax takes them for a pattern, and misses its own files
SHARED = 60.0  # seconds until all processes see what the first has written
DATA = Path("~/.cache/jaxrl_llm").expanduser()
_BROUGHT = (record.NAME, CONFIG, journal.METRICS, journal.DAMAGED, "reference.json")


def at_hand(where: Path) -> Path:
    """The folder of a run by its path or URL; what a run is and has recorded is fetched."""
    here = desk.at_hand(where)
    for name in _BROUGHT:
        desk.bring(here / name)
    for name in ("files", "model"):
        desk.fetch(here / name)
    return here


def of(out: Path | None, made_by: Path) -> Path:
    """Where a run of this config goes, on this machine."""
    return at_hand(out or Path("runs") / made_by.stem)


def resumable(folder: Path) -> bool:
    """Whether a run was started here, so that it can only be resumed."""
    return (folder / record.NAME).exists()


def began_with(folder: Path) -> str | None:
    """Whose warm start a run that goes on has begun with."""
    return record.read(folder)["from"] if resumable(folder) else None


def require_at_most(folder: Path, steps: int) -> None:
    """A UserError if a run that goes on has made more."""
    if not resumable(folder):
        return
    there = folder / "checkpoints"
    names = [*desk.entries(there), *(path.name for path in there.glob("*"))]
    done = max((int(name) for name in names if name.isdigit()), default=0)
    if done > steps:
        raise UserError(
            f"{folder} has made {done} steps, and would have {steps} with these --steps: "
            f"give {done - steps} more, or leave --steps out"
        )


@contextmanager
def opened(
    folder: Path,
    made_by: Path,
    flags: dict[str, Any],
    parts: Parts,
    *,
    resume: bool,
    origin: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Callable[[], None]]:
    """The folder of a run, started or found to be the same run, held against other trainers for the block.

    Yields a function that raises once the folder is no longer held. Of several processes the first holds it.
    """
    with ExitStack() as stack:
        check: Callable[[], None] = lambda: None
        with hosts.together():
            if hosts.first():
                held = _held(folder, made_by, flags, parts, resume, origin, say)
                check = stack.enter_context(held)
        if not hosts.first():
            at_hand(folder)  # as the first has left it
        _require_shared(folder)
        yield check


@contextmanager
def _held(
    folder: Path,
    made_by: Path,
    flags: dict[str, Any],
    parts: Parts,
    resume: bool,
    origin: Path | None,
    say: Callable[[str], None],
) -> Iterator[Callable[[], None]]:
    if resume and not resumable(folder):
        raise UserError(f"{folder} holds no run to resume: leave --resume out, or check --out")
    if wild := sorted({*WILD} & {*str(folder.absolute())}):
        raise UserError(
            f"{folder}: no checkpoint can be kept under {' '.join(wild)}: choose another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error, ELSEWHERE) from error
    with lock.hold(folder, say) as check:
        at_hand(folder)  # anew: another trainer may have held it until now
        try:
            (_continue if resume else _start)(folder, made_by, flags, parts, origin)
        except OSError as error:
            raise cannot_write(folder, error, ELSEWHERE) from error
        try:
            journal.store(folder)
            yield check
        finally:
            journal.store(folder)


def _require_shared(folder: Path) -> None:
    """A UserError if processes do not see the same folder; a new file may take a moment to be seen elsewhere."""
    expected, until = hosts.told(lambda: record.identity(folder)), time.monotonic() + SHARED
    with hosts.together():
        while (found := record.identity(folder)) != expected:
            if found is not None or time.monotonic() > until:
                there = "nothing" if found is None else "another run"
                raise UserError(
                    f"there is {there} in {folder} here: --out has to be storage that all processes see"
                )
            time.sleep(1.0)


def _start(
    folder: Path, made_by: Path, flags: dict[str, Any], parts: Parts, origin: Path | None
) -> None:
    """Writes what the run is; run.json comes last, for it says that the folder holds a run.

    A run that has saved nothing may be started anew.
    """
    checkpoints = folder / "checkpoints"
    if resumable(folder) and (desk.entries(checkpoints) or [*checkpoints.glob("*")]):
        raise UserError(
            f"{folder} already holds a run: add --resume to go on, or choose another --out"
        )
    run = record.new(made_by, flags, userfile.ran(but=made_by), origin)
    (folder / "model").mkdir(exist_ok=True)
    parts.tokenizer.save(folder / "model")
    described = json.dumps(hf.hf_config(parts.shape, "float32"), indent=2) + "\n"
    files.write(folder / "model" / "config.json", described)
    ends = json.dumps({"eos_token_id": [*parts.tokenizer.stops]}, indent=2) + "\n"
    files.write(folder / "model" / "generation_config.json", ends)
    files.copy(made_by, folder / CONFIG)
    (folder / "files").mkdir(exist_ok=True)
    for original, copy in run["files"].items():
        files.copy(Path(original), folder / copy)
    sums = {name: seal.of_file(folder / name) for name in (CONFIG, *run["files"].values())}
    record.write(folder, run | {"sums": sums})


def _continue(
    folder: Path, made_by: Path, flags: dict[str, Any], parts: Parts, origin: Path | None
) -> None:
    """Refuses what would make it another run, and notes the session."""
    run = record.read(folder)
    record.require_sources(folder, run)
    if changed := record.changed(folder, run, made_by):
        raise UserError(
            f"{changed[0]} has changed since {folder} was started: resume with the run's own copy, "
            f"{changed[1]}, or start anew with another --out"
        )
    if not record.begins_with(run, origin):
        there = run["from"]
        given = f"with --from {there}" if there else "without --from"
        raise UserError(f"{folder} was started {given}: resume it so")
    run = record.continued(folder, run, flags)
    same_model(folder, hf.hf_config(parts.shape, "float32"))
    record.write(folder, run)


def same_model(folder: Path, wanted: dict[str, Any]) -> None:
    """A UserError if the folder holds a run of another model."""
    there = hf.read_config(folder / "model")
    for name, value in wanted.items():
        if there.get(name) != value:
            raise UserError(
                f"{folder} is a run of another model: {name} is {there.get(name)} there and {value} in the "
                "config: resume with the config and flags it was started with"
            )


def reopen(folder: Path) -> Config:
    """The config of a run, made again by its own file and flags; it executes that file."""
    run = record.read(folder)
    record.require_sources(folder, run)
    path = Path(run.get("config", folder / CONFIG)).absolute()
    copies = {Path(original): folder / copy for original, copy in run["files"].items()}
    copies[path.resolve()] = folder / CONFIG
    with userfile.instead(copies):
        make: Callable[..., Config] = config.load(path)
        made = config.build(make, folder / CONFIG, **record.flags_for(make, run["flags"]))

    def task(data: Path) -> Any:
        with userfile.instead(copies):
            return made.task(data)

    return replace(made, task=task)


def params(folder: Path, parts: Parts, step: int | None = None) -> tuple[int, Any]:
    """`(step, parameters)` of a checkpoint: the one asked for, else the best, else the newest."""
    like = assemble.like_params(parts)
    return _restored(folder, step, lambda there, chosen: there.restore(chosen, like, part="params"))


def steps(folder: Path) -> list[int]:
    """Of which steps there are checkpoints."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
    try:
        return checkpoints.steps
    finally:
        checkpoints.close()


def state(folder: Path, parts: Parts, optimizer: Any, step: int | None = None) -> update.TrainState:
    """The state that reinforcement went on from at a checkpoint: a fresh one at those of a warm start."""
    like = update.state_like(assemble.like_params(parts), optimizer)

    def read(there: Checkpoints, chosen: int) -> update.TrainState:
        if Notes.from_json(there.notes(chosen)).phase == REINFORCE:
            return there.restore(chosen, like)
        return update.init_state(there.restore(chosen, like.params, part="params"), optimizer)

    return _restored(folder, step, read)[1]


def reference(folder: Path, parts: Parts) -> Any:
    """The parameters of the reference policy; None before reinforcement began."""
    there = folder / "reference"
    desk.fetch(there)  # for whether it is there
    return anchor.read(there, assemble.like_params(parts)) if there.exists() else None


def weights(folder: Path, step: int | None = None) -> tuple[int, qwen2.Shape, Any]:
    """`(step, shape, parameters)`, spread over all devices; nothing of the run's is executed."""
    record.read(folder)
    shape = hf.load_shape(folder / "model")
    mesh = sharding.make_mesh(1, -1, 1, jax.devices())
    like = sharding.params_like(qwen2.graph(shape)[1], mesh)
    read = lambda there, chosen: there.restore(chosen, like, part="params")
    chosen, found = _restored(folder, step, read)
    return chosen, shape, found


def _restored(
    folder: Path, step: int | None, read: Callable[[Checkpoints, int], Any]
) -> tuple[int, Any]:
    checkpoints = Checkpoints(folder / "checkpoints", keep=None, read_only=True)
    steps = checkpoints.steps
    if not steps:
        raise UserError(f"{folder} has no checkpoint yet")
    chosen = checkpoints.chosen if step is None else step
    if chosen not in steps:
        raise UserError(f"{folder} has no checkpoint of step {step}, only of {steps}")
    try:
        return chosen, read(checkpoints, chosen)
    except DamageError as error:
        others = [s for s in steps if s != chosen]
        advice = f"try --step with one of {others}" if others else "there is no other"
        raise UserError(
            f"checkpoint {chosen} of {folder} is damaged ({first_line(error)}): {advice}"
        ) from error
    finally:
        checkpoints.close()
