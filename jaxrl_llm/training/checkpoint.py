"""Checkpoints: written in the background, checked when they are read, the newest, the best and the last few kept.

Beside the arrays lies a note in JSON with the form and the fingerprint of each: orbax notices a file that is cut
short, not one with a flipped bit. A damaged checkpoint is renamed, and only once an older one was read; what may
be no fault of the checkpoint (the disk, memory, another optimizer) changes nothing.
"""

import errno
import json
import logging
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxrl_llm import distributed, storage
from jaxrl_llm.errors import Leaving, UserError, causes
from jaxrl_llm.errors import first_line as first_line_of
from jaxrl_llm.models import sharding
from jaxrl_llm.training.fingerprint import describe, same_form

T = TypeVar("T")
logger = logging.getLogger(__name__)
FOLDERS = ("checkpoints", "initial")  # of a run, in which checkpoints come and go
ARRAYS, NOTE, WHOLE = "state", "note", "_CHECKPOINT_METADATA"
WRITTEN = 1200  # seconds that a process waits at most for what the others are writing
_PASSING = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|ABORTED|out of memory|timed out|"
    "Input/output error|Permission denied|Too many open files|Stale file handle|No space left",
    re.IGNORECASE,
)
_MISSING = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class DamageError(Exception):
    """What lies on the disk is not what was written there."""


class Checkpoints:
    """The checkpoints in a folder: of those saved the newest stays, the `best`, and the last `keep` (all if None)
    of those whose step is `regular`, so that what is saved on the way out takes no other's place.

    `best` gives the best of some steps, None if none is known.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        *,
        regular: Callable[[int], bool] = lambda step: True,
        best: Callable[[list[int]], int | None] = lambda steps: None,
    ):
        self.folder, self._keep, self._regular, self._best = folder, keep, regular, best
        self._under_way: Future[None] | None = None

    @cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        who = _writers(self.folder)
        return ocp.AsyncCheckpointer(
            _handler(who), timeout_secs=WRITTEN, multiprocessing_options=who
        )

    @cached_property
    def _reader(self) -> ocp.Checkpointer:
        """Of this process alone: one that finds damage leaves no other waiting in a barrier of orbax."""
        who = _alone()
        return ocp.Checkpointer(_handler(who), multiprocessing_options=who)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for what is under way; after an error only that of the error is told."""
        try:
            self.wait()
        except UserError:
            if kind is None or issubclass(kind, Leaving):  # who leaves is told that it was saved
                raise

    def clean(self) -> None:
        """Makes the folder, without what killed writers have left half written; for the one writer of the run."""
        self.folder.mkdir(exist_ok=True)
        for half in (*self.folder.glob("*.orbax-checkpoint-tmp*"), *self.folder.glob(".*.gone")):
            shutil.rmtree(half)
        for path in self.folder.glob("[0-9]*"):
            if not (
                path / WHOLE
            ).exists():  # stored in a bucket, or removed there, as far as that went
                storage.remove(path)

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        found = self.folder.glob(f"*/{WHOLE}")
        return sorted(int(path.parent.name) for path in found if path.parent.name.isdigit())

    @property
    def best(self) -> int | None:
        """The best step, if any is known."""
        return self._best(self.steps)

    def save(self, step: int, state: Any, note: dict[str, Any]) -> None:
        """Copies the state and returns; it is written in the background, after all that was recorded before.

        `note` is what JSON can say. An error of the one before is raised here, or by `wait`.
        """
        self.wait()
        where = self.folder / str(step)
        if distributed.first() and where.exists():
            raise UserError(
                f"{where} is there already: it was written by another run; move it away"
            )
        note = {**note, "arrays": describe(state)}
        note["sum"] = _checksum(note)
        if _gathers(self.folder):
            state = jax.tree.map(sharding.on_first_host, state)
        if distributed.first():
            self._require_room(state)
        items = {ARRAYS: ocp.args.PyTreeSave(state), NOTE: ocp.args.JsonSave(note)}
        if distributed.first() or not _gathers(self.folder):
            try:
                self._writer.save(where.absolute(), args=ocp.args.Composite(**items))
            except (OSError, ValueError, RuntimeError) as error:
                raise self._cannot_write(error) from error
            self._under_way = in_background(lambda: self._finish(where))

    def replace(self, step: int, state: Any) -> None:
        """Saves in place of what was there, and returns when it is on disk."""
        if distributed.first():
            storage.remove(self.folder / str(step))
        elif _gathers(self.folder):  # what this process has read of it
            shutil.rmtree(self.folder / str(step), ignore_errors=True)
        distributed.agree("")  # nobody writes before it is gone
        self.save(step, state, {})
        self.wait()

    def _finish(self, where: Path) -> None:
        """What follows a save: the files to the disk, and to where they are stored; the records go first."""
        self._writer.wait_until_finished()
        if distributed.first():
            storage.sync_tree(where)
            storage.sync(self.folder)
            storage.push(self.folder.parent, but=FOLDERS)
            storage.push(where)

    def wait(self) -> None:
        """Returns when everything is on disk; older checkpoints go now. Raises what went wrong."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            under_way.result()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._cannot_write(error) from error
        self.prune()

    def prune(self) -> None:
        """Removes what need not be kept."""
        if self._keep is None or not distributed.first():
            return
        steps = self.steps
        regular = [step for step in steps if self._regular(step)]
        kept = {*regular[-self._keep :], *steps[-1:], self._best(steps)}
        for step in steps:
            if step not in kept:
                storage.remove(self.folder / str(step))

    def note(self, step: int) -> dict[str, Any]:
        """What was noted beside the arrays of a step."""
        storage.pull(self.folder / str(step) / NOTE)
        found = self._read(step, NOTE, ocp.args.JsonRestore())
        if not isinstance(found, dict) or found.pop("sum", None) != _checksum(found):
            raise DamageError("the note is not the one that was saved")
        return found

    def restore(self, step: int, like: Any, *, part: str | None = None) -> Any:
        """The arrays of a step, placed as `like` (arrays or shapes with shardings) lies; or one `part` of them.

        Raises a UserError if they are of another form, a DamageError if they are not what was saved.
        """
        storage.pull(self.folder / str(step))
        expected = self.note(step)["arrays"]
        if part is not None:  # .params['a'] in a record, ['params']['a'] in a dictionary
            name = re.compile(rf"(\.{part}|\['{part}'\])(.*)")
            expected = {m[2]: expected[k] for k in expected if (m := name.fullmatch(k))}
        same_form(f"checkpoint {step} of {self.folder}", expected, like)
        wanted = like if part is None else {part: like}
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        how = ocp.args.PyTreeRestore(
            wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=part is not None,
        )
        state = self._read(step, ARRAYS, how)
        state = state if part is None else state[part]
        if describe(state) != expected:
            raise DamageError("the arrays are not the ones that were saved")
        return state

    def first_whole(
        self, steps: Iterable[int], read: Callable[[int], T], *, rename: bool = False
    ) -> tuple[int, T]:
        """The first of these steps that can be read, and what `read` makes of it; the same in all processes.

        With `rename` damaged ones are renamed, once another was read: were all unreadable, the fault would
        hardly be theirs.
        """
        damaged: dict[int, str] = {}
        for step in distributed.from_first(lambda: [*steps]):
            try:
                found = read(step)
            except DamageError as error:
                damaged[step] = first_line(error)
                continue
            for other, reason in damaged.items():
                logger.warning("checkpoint %d is damaged (%s): %d is taken", other, reason, step)
                if rename and distributed.first():
                    self._rename(other)
            return step, found
        said = "; ".join(f"checkpoint {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"{self.folder} holds no checkpoint that can be read{f' ({said})' if said else ''}; nothing was "
            "changed: repair it, or start anew with another --out"
        )

    def _rename(self, step: int) -> None:
        """Gives a damaged checkpoint a name that is free, so that its step can be saved again."""
        number = 0
        while (aside := self.folder / f"damaged-{step}-{number}").exists():
            number += 1
        (self.folder / str(step)).rename(aside)
        storage.push(aside)
        storage.remove(self.folder / str(step))

    def _read(self, step: int, item: str, how: Any) -> Any:
        """An item of a checkpoint; a DamageError in all processes if one cannot read what is its own of it."""
        found, fault = None, ""
        try:
            where = (self.folder / str(step)).absolute()
            found = self._reader.restore(where, args=ocp.args.Composite(**{item: how}))[item]
        except Exception as error:  # a damaged file raises almost anything
            if _may_pass(error):
                raise UserError(
                    f"cannot read checkpoint {step} of {self.folder} ({first_line(error)}), which may be no "
                    "fault of the files: nothing was changed, try again"
                ) from error
            fault = first_line(error)
        if faults := [*filter(None, distributed.agree(fault))]:
            raise DamageError(faults[0])
        return found

    def _require_room(self, state: Any) -> None:
        """Asked before anything is written: orbax reports a full disk late, and in many lines."""
        needed = 1.1 * sum(x.nbytes for x in jax.tree.leaves(state))
        if (free := shutil.disk_usage(self.folder).free) < needed:
            said = f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
            raise self._cannot_write(OSError(said))

    def _cannot_write(self, error: BaseException) -> UserError:
        last = f"the last whole one is step {self.steps[-1]}" if self.steps else "there is none yet"
        return UserError(
            f"cannot write a checkpoint to {self.folder}: {first_line(error)} ({last}): make room or permit "
            "writing, then go on with --resume"
        )


def _checksum(note: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(note, sort_keys=True).encode())


def in_background(work: Callable[[], T]) -> Future[T]:
    """The future of a call; its thread does not keep a process alive that ends, as one of a pool would."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def first_line(error: BaseException) -> str:
    """The innermost cause in a line; the libraries wrap an OSError in errors of their own."""
    *_, innermost = causes(error)
    line = first_line_of(innermost)
    return "another process has not written its part" if "Barrier timed out" in line else line


def _gathers(folder: Path) -> bool:
    """Whether the first process writes for all, because the folders are not one and the same."""
    return distributed.count() > 1 and not storage.shared(folder)


def _writers(folder: Path) -> ocp.options.MultiprocessingOptions:
    """Who writes together. They are named: else orbax's threads wait by programs on the devices."""
    if distributed.count() == 1 or _gathers(folder):
        return _alone()
    everyone = {*range(distributed.count())}
    return ocp.options.MultiprocessingOptions(active_processes=everyone)


def _alone() -> ocp.options.MultiprocessingOptions:
    """This process by itself."""
    if distributed.count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = distributed.index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"alone-{me}"
    )


def _handler(who: ocp.options.MultiprocessingOptions) -> ocp.CompositeCheckpointHandler:
    """Orbax's, for arrays and a note."""
    for name in ("absl", "asyncio"):  # they repeat what is raised here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _silence_tasks_of_orbax()
    handlers = {
        ARRAYS: ocp.PyTreeCheckpointHandler(multiprocessing_options=who),
        NOTE: ocp.JsonCheckpointHandler(multiprocessing_options=who),
    }
    options = ocp.CompositeOptions(multiprocessing_options=who)
    return ocp.CompositeCheckpointHandler(composite_options=options, **handlers)


def _may_pass(error: BaseException) -> bool:
    """Whether an error is of the disk, the network or the memory, and not of what was read."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and cause.errno not in _MISSING)
        or _PASSING.search(str(cause)) is not None
        for cause in causes(error, implicit=True)
    )


def _silence_tasks_of_orbax() -> None:
    """What its tasks report that were given up after an error is no news: a traceback each, hundreds of lines."""
    before, orbax = sys.unraisablehook, str(Path(ocp.__file__).parent)
    if getattr(before, "silences_orbax", False):
        return

    def report(found: Any) -> None:
        code = getattr(found.object, "cr_code", None)
        of_orbax = code is not None and code.co_filename.startswith(orbax)
        if not of_orbax and str(found.exc_value) != "Event loop is closed":
            before(found)

    report.silences_orbax = True  # pyright: ignore[reportFunctionMemberAccess]
    sys.unraisablehook = report
