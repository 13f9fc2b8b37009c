"""Checkpoints with orbax: written in the background, whole or absent, read back before an older one goes.

A checkpoint holds the arrays of a state and a note in JSON with the form and the fingerprint of every array
and a checksum of itself, so what was altered or cut short on the disk is found. Nothing here deletes a
checkpoint but the keeping of the last few, after the newest was read back. A damaged one is renamed when
another can be read; what may be no fault of the checkpoint (the disk, memory, another optimizer) touches nothing.

In a bucket a checkpoint is what was written here, read back, and then stored, after all that was recorded before
it; its arrays are fetched when they are restored.
"""

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxrl_llm import desk, files, hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import sharding
from jaxrl_llm.runs import stored, writers
from jaxrl_llm.runs.disk import DamageError, first_line, patiently, silence_given_up, writing
from jaxrl_llm.runs.fingerprint import describe, on_host, same_form
from jaxrl_llm.runs.seal import sealed, unsealed
from jaxrl_llm.runs.settling import Settling

T = TypeVar("T")
logger = logging.getLogger(__name__)
SCORE = "score.json"  # in the folder of a step that was judged after it was saved
HALF = "*.orbax-checkpoint-tmp*"  # what a save is called until it is whole
GONE = "gone.orbax-checkpoint-tmp"  # where one lies that is being deleted
WRITTEN = 1200  # seconds that a process waits at most for what the others are writing


class Checkpoints:
    """The checkpoints of a run, in one folder: the newest stays, the best, and the last `keep` (all if None)
    of those whose step is `regular`, so that what is saved on the way out takes no other's place.

    `check` is called before anything is written: it raises where the folder is no longer ours.
    """

    def __init__(
        self,
        folder: Path,
        keep: int | None = 2,
        *,
        read_only: bool = False,
        regular: Callable[[int], bool] = lambda step: True,
        check: Callable[[], None] = lambda: None,
    ):
        self.folder, self._keep, self._check = folder, keep, check
        self._regular = regular
        self._gathers = writers.gathers(folder)
        for name in ("absl", "asyncio"):  # they say again what is raised here
            logging.getLogger(name).setLevel(logging.CRITICAL)
        silence_given_up()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.LatestN(None),  # what goes, goes in `_prune`
            lightweight_initialize=True,
            read_only=read_only,
            create=False,
            multiprocessing_options=writers.of(folder),
            todelete_subdir=None if read_only else GONE,
            async_options=ocp.AsyncOptions(timeout_secs=WRITTEN),
        )
        stored.bring(folder, read_only=read_only or not hosts.first())
        try:
            if not read_only:
                folder.mkdir(parents=True, exist_ok=True)
                for half in folder.glob(HALF) if hosts.first() else ():  # its writer ended
                    shutil.rmtree(half)
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options)
        except OSError as error:
            raise UserError(f"cannot write checkpoints to {folder}: {error.strerror}") from error
        self._unjudged: set[int] = set()  # steps whose score could not be read: they stay
        self._scores = {step: self._score(step) for step in self.steps}
        self._settling: Settling | None = None

    def save(
        self, step: int, state: Any, notes: dict[str, Any], score: float | None = None
    ) -> None:
        """Copies the state and returns; it is written, and read back, in the background."""
        arrays = describe(state)
        note = sealed({"notes": notes, "score": score, "arrays": arrays})
        self.wait()
        with hosts.together():
            self._check()
        if self._gathers:
            state = jax.tree.map(sharding.on_first_host, state)
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(state), notes=ocp.args.JsonSave(note))
        with hosts.together(), self._writing(state):
            if hosts.first() or not self._gathers:
                self._manager.save(step, args=items)
        self._scores[step] = score
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        self._settling = Settling(step, lambda: self._settle(step, like, arrays))

    def judge(self, step: int, score: float) -> None:
        """Gives a score to a step that was saved before it had one, and was restored since: older ones may go."""
        if self._scores.get(step) is None:
            self.wait()
            with hosts.together(), self._writing():
                if hosts.first():
                    self._check()
                    there = self.folder / str(step) / SCORE
                    files.write(there, json.dumps(sealed({"score": score})))
                    desk.store(there)
                self._scores[step] = score
                self._prune()

    def wait(self) -> None:
        """Returns when everything is on disk and was read back; an error of the writing is raised here.

        Older checkpoints go now, if the newest was read back as it was written.
        """
        with hosts.together(), self._writing():
            settling, self._settling = self._settling, None
            if settling is not None:
                settling.join()
                fault, verified = hosts.told(lambda: (settling.fault, settling.verified))
                if fault is not None:
                    said = f"it was not read back as it was written: {fault}"
                    self._set_aside({settling.step: said})
                elif verified:
                    self._prune()
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends the background threads."""
        self.wait()
        self._manager.close()

    @property
    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    @property
    def ranked(self) -> list[int]:
        """The steps, the best first, the latest of equals; those without a score come last."""
        known = {s: self._scores[s] for s in self.steps if self._scores.get(s) is not None}
        value = lambda step: (known.get(step, -math.inf), step)
        return sorted(self.steps, key=value, reverse=True)

    @property
    def best(self) -> int | None:
        """The step with the best score, if any was saved with one."""
        return next((s for s in self.ranked if self._scores.get(s) is not None), None)

    @property
    def chosen(self) -> int:
        """The best step, else the newest."""
        return self.ranked[0]

    def notes(self, step: int) -> dict[str, Any]:
        """What was noted beside the arrays of a step."""
        return self._note(step)["notes"]

    def restore(self, step: int, like: Any, *, part: str | None = None) -> Any:
        """The arrays of a step, placed as `like` (arrays or shapes with shardings) lies; or one `part` of it."""
        elsewhere = self._gathers and not hosts.first()
        if elsewhere:  # the first process may have saved it since
            stored.bring(self.folder, read_only=True)
            self._manager.reload()
        expected = self._note(step)["arrays"]
        desk.fetch(self.folder / str(step))
        if part is not None:  # .params['a'] in a record, ['params']['a'] in a dictionary
            name = re.compile(rf"(\.{part}|\['{part}'\])(.*)")
            expected = {m[2]: expected[k] for k in expected if (m := name.fullmatch(k))}
        same_form(f"checkpoint {step} of {self.folder}", expected, like)
        wanted = like if part is None else {part: like}
        arguments = ocp.args.PyTreeRestore(
            jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted),
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=part is not None,
        )
        state = self._read(step, state=arguments)
        state = state if part is None else state[part]
        if elsewhere:
            desk.release(self.folder / str(step) / stored.ARRAYS)
        if describe(state) != expected:
            raise DamageError("the arrays are not the ones that were saved")
        return state

    def newest(self, like: Callable[[dict[str, Any]], Any]) -> tuple[int, Any, dict[str, Any]]:
        """The newest checkpoint that can be read; `like(notes)` gives the form of its state."""

        def read(step: int) -> tuple[dict[str, Any], Any]:
            notes = self.notes(step)
            return notes, self.restore(step, like(notes))

        step, (notes, state) = self._first_of(self.steps[::-1], read)
        with hosts.together(), self._writing():
            self._prune()  # who wrote it may have ended before
        return step, state, notes

    def restore_best(self, like: Any, *, part: str) -> tuple[int, Any]:
        """The best checkpoint that can be read, else the newest, and a part of it as by `restore`."""
        ranked = hosts.told(lambda: self.ranked)
        return self._first_of(ranked, lambda step: self.restore(step, like, part=part))

    def _first_of(self, steps: Iterable[int], read: Callable[[int], T]) -> tuple[int, T]:
        """The first of these steps that can be read, and what `read` makes of it.

        Damaged ones are passed over, and set aside once another was read: were all of them unreadable, the
        fault would hardly be theirs.
        """
        damaged: dict[int, str] = {}
        for step in steps:
            found, fault = None, ""
            with hosts.together():
                try:
                    found = read(step)
                except DamageError as error:
                    fault = first_line(error) or "damaged"
            if faults := [one for one in hosts.agree(fault) if one]:
                damaged[step] = faults[0]
                continue
            self._set_aside(damaged)
            return step, cast(T, found)
        said = "; ".join(f"checkpoint {step}: {reason}" for step, reason in damaged.items())
        raise UserError(
            f"{self.folder} holds no checkpoint that can be read{f' ({said})' if said else ''}; "
            "nothing was changed: repair it, or start anew with another --out"
        )

    def _note(self, step: int) -> dict[str, Any]:
        return unsealed(self._read(step, notes=ocp.args.JsonRestore()))

    def _read(self, step: int, **item: Any) -> Any:
        """One item of a checkpoint."""
        [name], wanted = item, ocp.args.Composite(**item)
        return patiently(
            f"checkpoint {step} of {self.folder}",
            lambda: self._manager.restore(step, args=wanted)[name],
        )

    def _score(self, step: int) -> float | None:
        """The score of a checkpoint, noted or given later; none for one that cannot be read now."""
        later = self.folder / str(step) / SCORE
        try:
            found = self._note(step)["score"]
            if found is None and later.exists():
                found = unsealed(json.loads(later.read_bytes()))["score"]
        except (DamageError, UserError, OSError, ValueError) as error:
            said = "checkpoint %d stays, and counts as without a score, which cannot be read: %s"
            logger.warning(said, step, first_line(error))
            self._unjudged.add(step)
            return None
        return found

    def _settle(self, step: int, like: Any, arrays: dict[str, Any]) -> bool:
        """What follows a save: to the disk, read back by one process, stored; whether it could be read back."""
        self._manager.wait_until_finished()
        if not hosts.first():
            return False
        folder = self.folder.absolute() / str(step)
        files.sync_tree(folder)
        verified = True
        try:
            _verify(folder / "state", like, arrays)
        except UserError as error:
            verified = False
            logger.warning("%s; older checkpoints are kept until one was read back", error)
        stored.put(folder)
        return verified

    def _prune(self) -> None:
        with hosts.together():
            self._check()
        if self._keep is None or (self._gathers and not hosts.first()):
            return
        steps = self.steps
        regular = [step for step in steps if self._regular(step)]
        kept = {*regular[-self._keep :], *steps[-1:], self.best, *self._unjudged}
        for step in steps:
            if step not in kept:
                self._manager.delete(step)  # renames it: what a kill leaves is no checkpoint
                desk.drop(self.folder / str(step))
        if hosts.first():
            shutil.rmtree(self.folder / GONE, ignore_errors=True)

    def _set_aside(self, damaged: dict[int, str]) -> None:
        """Renames damaged checkpoints, so that their steps can be saved again and nothing of them is lost."""
        with hosts.together():
            for step, reason in damaged.items() if hosts.first() else ():
                self._check()
                aside = desk.named(stored.set_aside(self.folder / str(step)))
                logger.warning(
                    "checkpoint %d is damaged (%s): it was set aside as %s", step, reason, aside
                )
        if damaged:
            self._manager.reload()

    @contextmanager
    def _writing(self, state: Any = None) -> Iterator[None]:
        last = f"the last whole one is step {self.steps[-1]}" if self.steps else "there is none yet"
        with writing(self.folder, f"a checkpoint ({last})", state):
            yield


def _verify(folder: Path, like: Any, arrays: dict[str, Any]) -> None:
    """Reads what lies on the disk, one array at a time, on the host: Damaged if it is not what was saved."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    how = jax.tree.unflatten(tree, [ocp.RestoreArgs(restore_type=np.ndarray) for _ in leaves])
    alone = writers.alone("verify")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        for i, (path, leaf) in enumerate(leaves):
            one = [leaf if j == i else ocp.PLACEHOLDER for j in range(len(leaves))]
            wanted = ocp.args.PyTreeRestore(item=jax.tree.unflatten(tree, one), restore_args=how)
            read = patiently(str(folder), lambda wanted=wanted: reader.restore(folder, args=wanted))
            name = jax.tree_util.keystr(path)
            if on_host(jax.tree.leaves(read)[i]) != arrays[name]:
                raise DamageError(f"{name} differs")
