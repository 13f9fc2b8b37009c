"""Checkpoints: written in the background, verified when read; newest, best and last few are kept.

A note (JSON) beside the arrays has dtype, shape and checksum of each: orbax notices a file that is
cut short, not a flipped bit. A damaged checkpoint is renamed, but only after an older one was read;
errors that may have other causes (disk, memory, another optimizer) change nothing.
"""

import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import jax
import orbax.checkpoint as ocp

from jaxrl_llm import distributed, storage
from jaxrl_llm.background import in_background
from jaxrl_llm.errors import StopRequested, UserError, causes, first_line
from jaxrl_llm.models import sharding
from jaxrl_llm.training.fingerprint import checksum, describe, same_form
from jaxrl_llm.training.journal import Score

T = TypeVar("T")
logger = logging.getLogger(__name__)
ARRAYS, NOTE, WHOLE = "state", "note", "_CHECKPOINT_METADATA"
BACK = "going-back"  # a file: the step that the run goes back to, until all later ones are renamed
WRITTEN = 1200  # seconds that a process waits at most for the writes of others
_STEP = re.compile("0|[1-9][0-9]*")  # the name of a checkpoint's folder
# errors with other causes than damage
_PASSING = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|ABORTED|out of memory|timed out|"
    "Input/output error|Permission denied|Too many open files|Stale file handle|No space left",
    re.IGNORECASE,
)
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # OSErrors that are damage


class DamageError(Exception):
    """The files of a checkpoint are not as they were written."""


class Checkpoints:
    """The checkpoints in a folder; kept are the newest, the best, and the last `keep` regular ones.

    `keep` None keeps all. `regular(step)` tells regular saves from those made when the run is
    stopped, which thus displace no other. `scores()` are those of the steps that may be the best.
    Both are asked when a step is saved, and noted: what was known then is true of it for ever.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = None,
        *,
        regular: Callable[[int], bool] = lambda step: True,
        scores: Callable[[], Mapping[int, Score]] = dict,
    ):
        self.folder, self._keep, self._regular, self._scores = folder, keep, regular, scores
        self._notes: dict[int, dict[str, Any]] = {}  # why each step was saved
        self._under_way: Future[None] | None = None
        # each host has a mirror of its own: the first process writes for all
        self._gathers = distributed.count() > 1 and not storage.shared(folder)

    @cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        everyone = range(1 if self._gathers else distributed.count())
        return _checkpointer(ocp.AsyncCheckpointer, everyone, timeout_secs=WRITTEN)

    @cached_property
    def _reader(self) -> ocp.Checkpointer:
        """Of this process alone: if it finds damage, no other waits in a barrier of orbax."""
        return _checkpointer(ocp.Checkpointer, [distributed.index()])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for a save under way; after another error only that one is raised."""
        try:
            self.wait()
        except UserError:
            if kind is None or issubclass(kind, StopRequested):  # a stop must report a failed save
                raise

    def clean(self) -> None:
        """Removes unfinished checkpoints; for the run's only writer."""
        for half in (*self.folder.glob("*.orbax-checkpoint-tmp*"), *self.folder.glob(".*.gone")):
            storage.delete(half)
        for path in self.folder.glob("[0-9]*"):
            # an upload or removal was interrupted
            if _STEP.fullmatch(path.name) and not (path / WHOLE).exists():
                storage.remove(path)
        self._finish_going_back()

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, ascending."""
        found = [path.parent.name for path in self.folder.glob(f"*/{WHOLE}")]
        return sorted(int(name) for name in found if _STEP.fullmatch(name))

    @property
    def best(self) -> int | None:
        """The best step, None if unknown."""
        storage.pull(self.folder, but=(ARRAYS,))  # a cleaner may have taken old files of a mirror
        return self._best(self.steps)

    def _best(self, steps: list[int]) -> int | None:
        """Of these steps the one of the highest score, the later of equals."""
        noted = {step: score for step in steps if (score := self._why(step)["score"]) is not None}
        known = {**self._scores(), **noted}
        return max((s for s in steps if s in known), key=lambda s: (known[s], s), default=None)

    def _why(self, step: int) -> dict[str, Any]:
        """Why a step was saved, by its note or, where this process cannot read that, by the records."""
        if step not in self._notes:
            found = {"regular": self._regular(step), "score": None}
            with suppress(Exception):  # damage is told where it is restored
                found |= self._note(step)
                if (score := found["score"]) is not None:  # of older runs it is the accuracy alone
                    found["score"] = tuple(score) if isinstance(score, list) else (score, 0.0)
            self._notes[step] = {name: found[name] for name in ("regular", "score")}
        return self._notes[step]

    def save(self, step: int, state: Any, note: dict[str, Any]) -> None:
        """Copies the state and returns; it is written in the background, after the run's records.

        `note` has to fit into JSON. Errors of the previous save are raised here, or by `wait`.
        """
        self.wait()
        why = {"regular": self._regular(step), "score": self._scores().get(step)}
        self._notes[step] = why
        note = {**note, **why, "arrays": describe(state)}
        note["sum"] = checksum(note)
        if self._gathers:
            state = jax.tree.map(sharding.on_first_host, state)
            if not distributed.first():
                return
        where = self.folder / str(step)
        items = {ARRAYS: ocp.args.PyTreeSave(state), NOTE: ocp.args.JsonSave(note)}
        try:
            self._writer.save(where.absolute(), args=ocp.args.Composite(**items))
            if any(map(sharding.waits, jax.tree.leaves(state))):
                # what lies in host memory is written as it lies there, and the next step gives it away
                self._writer.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._cannot_write(error) from error
        self._under_way = in_background(lambda: self._finish(where))

    def replace(self, step: int, state: Any) -> None:
        """Saves in place of all that are there; returns when it is on disk."""
        for other in self.steps:
            if distributed.first():
                storage.remove(self.folder / str(other))
            elif self._gathers:  # this host's copy, pulled earlier
                shutil.rmtree(self.folder / str(other), ignore_errors=True)
        distributed.barrier()  # nobody writes before they are removed
        self.save(step, state, {})
        self.wait()

    def _finish(self, where: Path) -> None:
        """Ends a save: syncs its files to disk, and pushes the run, what marks it whole last."""
        self._writer.wait_until_finished()
        if distributed.first():
            storage.sync_tree(where)
            storage.push(self.folder.parent)

    def wait(self) -> None:
        """Returns when the last save is on disk, and prunes; a UserError if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        try:
            under_way.result()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._cannot_write(error) from error
        self.prune()

    def prune(self) -> None:
        """Removes the checkpoints that need not be kept."""
        if self._keep is None or not distributed.first():
            return
        steps = self.steps
        regular = [step for step in steps if self._why(step)["regular"]]
        kept = {*regular[-self._keep :], *steps[-1:], self._best(steps)}
        for step in steps:
            if step not in kept:
                storage.remove(self.folder / str(step))

    def note(self, step: int) -> dict[str, Any]:
        """The note saved with a step; a DamageError if its checksum differs."""
        storage.pull(self.folder / str(step) / NOTE)
        return self._read(step, lambda: self._note(step))

    def _note(self, step: int) -> dict[str, Any]:
        """The note as this process alone sees it."""
        found = self._restore(step, NOTE, ocp.args.JsonRestore())
        if not isinstance(found, dict) or found.pop("sum", None) != checksum(found):
            raise DamageError("the note is not the one that was saved")
        return found

    def restore(self, step: int, like: Any, *, part: str | None = None) -> Any:
        """The arrays of a step (or one `part`, such as "params"), placed as `like` is.

        `like` has arrays, or shapes with shardings. Raises a UserError if dtypes or shapes differ
        from it, a DamageError if checksums differ from those saved.
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
        state = self._read(step, lambda: self._restore(step, ARRAYS, how))
        state = state if part is None else state[part]
        if describe(state) != expected:
            raise DamageError("the arrays are not the ones that were saved")
        return state

    def first_whole(
        self, read: Callable[[int], T], *, prefer: int | None = None, rename: bool = False
    ) -> tuple[int, T] | None:
        """`(step, read(step))` of the newest step that can be read; the same in all processes.

        `prefer` is tried first. With `rename` damaged ones are renamed once another was read: if
        none can be, the cause is hardly in the files. None without any checkpoint; a UserError if
        none can be read.
        """
        damaged: dict[int, str] = {}
        prefer, steps = distributed.from_first(lambda: (prefer, self.steps[::-1]))
        if not steps:
            return None
        for step in steps if prefer is None else [prefer, *steps]:
            if step in damaged:
                continue
            try:
                content = read(step)
            except DamageError as error:
                damaged[step] = reason(error)
                continue
            for other, why in damaged.items():
                logger.warning("checkpoint %d is damaged (%s): %d is taken", other, why, step)
                if rename and distributed.first():
                    self._rename(other)
            return step, content
        said = "; ".join(f"checkpoint {step}: {why}" for step, why in damaged.items())
        raise UserError(
            f"{self.folder} holds no checkpoint that can be read ({said}); nothing was changed: repair it, "
            "or start anew with another --out"
        )

    def go_back(self, step: int) -> None:
        """Moves all later checkpoints aside, so that a run can go on from this one."""
        if distributed.first():
            storage.write(self.folder / BACK, str(step))
            storage.push(self.folder / BACK)
            self._finish_going_back()
        distributed.barrier()  # nobody saves one of them again before

    def _finish_going_back(self) -> None:
        """Does what `go_back` does; also after it was killed, or the run would go on from a later step."""
        if not (mark := self.folder / BACK).exists():
            return
        for later in [s for s in self.steps if s > int(mark.read_text())]:
            self._rename(later, "later")
        storage.remove(mark)

    def _rename(self, step: int, why: str = "damaged") -> None:
        """Moves a checkpoint aside, so that its step can be saved again."""
        number = len([*self.folder.glob(f"{why}-{step}-*")])
        storage.rename(self.folder / str(step), f"{why}-{step}-{number}")

    def _restore(self, step: int, item: str, how: Any) -> Any:
        """One item of a checkpoint, or this process's part of it."""
        where = (self.folder / str(step)).absolute()
        return self._reader.restore(where, args=ocp.args.Composite(**{item: how}))[item]

    def _read(self, step: int, restore: Callable[[], T]) -> T:
        """Calls `restore`; a DamageError in all processes if any cannot read its part."""
        content, fault = None, ""
        try:
            content = restore()
        except Exception as error:  # a damaged file raises almost anything
            if _may_pass(error):
                raise UserError(
                    f"cannot read checkpoint {step} of {self.folder} ({reason(error)}), which may be no "
                    "fault of the files: nothing was changed, try again"
                ) from error
            fault = reason(error)
        if faults := [*filter(None, distributed.agree(fault))]:
            raise DamageError(faults[0])
        return cast(T, content)

    def _cannot_write(self, error: BaseException) -> UserError:
        last = f"the last whole one is step {self.steps[-1]}" if self.steps else "there is none yet"
        return UserError(
            f"cannot write a checkpoint to {self.folder}: {reason(error)} ({last}): make room or permit "
            "writing, then go on with --resume"
        )


def reason(error: BaseException) -> str:
    """One line of the innermost cause: the libraries wrap OSErrors in their own errors."""
    *_, innermost = causes(error)
    line = first_line(innermost)
    return "another process has not written its part" if "Barrier timed out" in line else line


def _checkpointer(kind: Callable[..., T], processes: Iterable[int], **options: Any) -> T:
    """Orbax's checkpointer for these processes; named, or it runs its barriers on the devices."""
    first, *others = processes
    who = ocp.options.MultiprocessingOptions(
        primary_host=first,
        active_processes={first, *others},
        barrier_sync_key_prefix=None if others else f"alone-{first}",
    )
    for name in ("absl", "asyncio"):  # they log errors that are raised here too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _silence_tasks_of_orbax()
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=who),
        **{
            # or on GPUs all of the state is copied to pinned memory, which is never given back
            ARRAYS: ocp.PyTreeCheckpointHandler(
                multiprocessing_options=who, enable_pinned_host_transfer=False
            ),
            NOTE: ocp.JsonCheckpointHandler(multiprocessing_options=who),
        },
    )
    return kind(handler, multiprocessing_options=who, **options)


def _may_pass(error: BaseException) -> bool:
    """True if the error may come from disk, network or memory instead of damaged files."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and not isinstance(cause, _ABSENT))
        or _PASSING.search(str(cause)) is not None
        for cause in causes(error, implicit=True)
    )


def _silence_tasks_of_orbax() -> None:
    """Hides tracebacks of tasks that orbax abandoned after an error: hundreds of lines."""
    before, orbax = sys.unraisablehook, str(Path(ocp.__file__).parent)

    def silenced(unraised: Any) -> None:
        code = getattr(unraised.object, "cr_code", None)
        of_orbax = code is not None and code.co_filename.startswith(orbax)
        if not of_orbax and str(unraised.exc_value) != "Event loop is closed":
            before(unraised)

    if getattr(before, "__name__", "") != silenced.__name__:
        sys.unraisablehook = silenced
