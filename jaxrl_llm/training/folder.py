"""A run's folder: written when a run starts, read when it is resumed, evaluated or sampled from.

run.json               id, flags and sessions of the run, and the run whose warm start it used
config.py files/       copies of the config file and of other files by the user that it ran
model/                 tokenizer and config.json in Hugging Face format
metrics.jsonl tensorboard/ samples/ curves.png
checkpoints/N/         the state after step N
initial/N/             the policy before reinforcement: the reference, and the start of --from
lock                   names the process that writes to the folder
"""

import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Self

from jaxrl_llm import config as configs
from jaxrl_llm import distributed, storage, userfile
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.models import families, hf, lora, qwen2, sharding
from jaxrl_llm.training import journal, record
from jaxrl_llm.training.checkpoint import ARRAYS, Checkpoints, DamageError, reason
from jaxrl_llm.training.components import DAY, PRETRAINED, TEACHER, TOKENIZER, Components
from jaxrl_llm.training.journal import REINFORCE
from jaxrl_llm.training.record import CONFIG, Source

CHECKPOINTS, INITIAL = "checkpoints", "initial"
SAVED = "saved"  # in run.json: there was a checkpoint
WILD = "[]*?\\"  # orbax takes a path with these for a pattern, and misses its own files
MODEL, FILES = "model", "files"
FEW_READ = (ARRAYS, "tensorboard", "samples", "tokens")  # stay in a bucket until they are asked for
SHARED = 60.0  # seconds within which all processes must see files of the first


class RunFolder:
    """A run's folder, by path or URL: written by one process, read by any."""

    def __init__(self, where: str | Path, *, bring: bool = True):
        self.path = storage.local(where, but=FEW_READ, bring=bring)

    def pull(self) -> Path:
        """Brings what others have written to a bucket until now; the folder."""
        return storage.local(storage.as_url(self.path), but=FEW_READ)

    @property
    def holds_run(self) -> bool:
        """True if there is a run, which can only be resumed."""
        return (self.path / record.NAME).exists()

    @property
    def initials(self) -> Checkpoints:
        """The policy before reinforcement, as a checkpoint of its step."""
        return Checkpoints(self.path / INITIAL)

    @contextmanager
    def open(self, components: Components, now: record.Run, *, resume: bool) -> Iterator[None]:
        """Starts or resumes the run in the folder, with this process as its only writer for the block.

        `now` is a new run's record, whose session is added where one goes on. Raises a UserError if the
        folder holds another run or, without `resume`, any other content.
        """
        self.require_place(resume)
        self.path.mkdir(parents=True, exist_ok=True)
        with storage.locked(self.path):
            self.pull()  # another may have written until now
            storage.clear(self.path)
            if resume:
                run = self.continued(components, now)
                had = run.get(SAVED, False) or bool(self.checkpoints().steps)
                record.write(self.path, run | {SAVED: had})
            else:
                self._require_new()  # again: another may have begun while this one waited for the lock
                self._start(components, now)
            storage.push(self.path)  # other hosts wait for the record of this session
            try:
                yield
            finally:
                storage.push(self.path)

    def continued(self, components: Components, now: record.Run) -> record.Run:
        """The run's record with the session of `now`; a UserError if that is of another run."""
        run = record.continued(self.path, record.read(self.path), now)
        self.require_model(components)
        return run

    def wait_for(self, identity: str | None) -> None:
        """Returns when this process sees the run that the first has opened, by its id.

        Raises a UserError if the folder is another here, or still empty after a minute.
        """
        until = time.monotonic() + SHARED
        while (found := record.identity(self.pull())) != identity:
            if (storage.shared(self.path) and found is not None) or time.monotonic() > until:
                raise UserError(
                    f"{self.path} is another folder here: --out has to be storage that all processes see"
                )
            time.sleep(1.0)

    def require_place(self, resume: bool) -> None:
        """A UserError unless a run may begin here, or with `resume` go on."""
        if resume and not self.holds_run:
            raise UserError(
                f"{self.path} holds no run to resume: leave --resume out, or check --out"
            )
        if wild := sorted({*WILD} & {*str(self.path.absolute())}):
            raise UserError(
                f"{self.path}: no checkpoint can be kept under {' '.join(wild)}: choose another --out"
            )
        if not resume:
            self._require_new()

    def _require_new(self) -> None:
        """A UserError unless the folder is new or empty, or its run has saved no checkpoint."""
        if self.holds_run:
            # one that ended before its first checkpoint has nothing to lose, and may begin again
            if any((self.path / CHECKPOINTS).glob("*")) or self._had_checkpoint():
                raise UserError(
                    f"{self.path} already holds a run: add --resume (in Python resume=True) to go on, or choose "
                    "another --out"
                )
            return
        there = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        begun = storage.LOCK in there or not storage.shared(self.path)  # by a killed process
        left = there - ({storage.LOCK, CONFIG, FILES, MODEL} if begun else set())
        if any(not re.fullmatch(r"\..*\.new|stacks-\d+\.txt", name) for name in left):
            raise UserError(
                f"{self.path} is not empty and holds no run: choose a new folder as --out"
            )

    def _start(self, components: Components, run: record.Run) -> None:
        """Writes the files of a new run; run.json last, because it marks the folder as a run."""
        # a folder of Hugging Face's form: `export` copies it, and reads the shape from it
        components.tokenizer.save(self.path / MODEL)
        described = {
            **_described(components),
            "generation_config.json": {"eos_token_id": [*components.tokenizer.stops]},
        }
        for name, content in described.items():
            storage.write(self.path / MODEL / name, json.dumps(content, indent=2) + "\n")
        if run["config"] is not None:
            (self.path / FILES).mkdir(exist_ok=True)
            for original, copy in ((run["config"], CONFIG), *run["files"].items()):
                mode = stat.S_IMODE(os.stat(original).st_mode)  # a private file stays private
                content = Path(original).read_bytes()
                if hashlib.sha256(content).hexdigest() != run["sums"][copy]:
                    raise UserError(
                        f"{original} has changed while the run was starting: start it again"
                    )
                storage.write(self.path / copy, content, mode=mode)
        record.write(self.path, run)

    def require_model(self, components: Components) -> None:
        """A UserError if the run has another model or tokenizer, or adapters that have another base now."""
        ours, adapted = _described(components), (self.path / MODEL / lora.CONFIG).exists()
        if adapted != (lora.CONFIG in ours):
            raise UserError(
                f"{self.path} is a run {'of' if adapted else 'without'} adapters, unlike the config: "
                "use the config and flags it was started with"
            )
        for file, described in ours.items():
            there = hf.read_json(self.path / MODEL / file)
            for name, value in described.items():
                # the commit is compared below; `rope_parameters` say the same of scaling
                if name not in ("revision", "rope_scaling") and there.get(name) != value:
                    raise UserError(
                        f"{self.path} is a run of another model: {name} is {there.get(name)} there and "
                        f"{value} in the config: use the config and flags it was started with"
                    )
        with tempfile.TemporaryDirectory() as there:  # to compare it as it would be written
            components.tokenizer.save(Path(there))
            written = [where / "tokenizer.json" for where in (self.path / MODEL, Path(there))]
            if written[0].read_bytes() != written[1].read_bytes():
                raise UserError(f"{self.path}: its tokenizer is another than that of the config")
        named = {TOKENIZER} | ({PRETRAINED} if adapted else set())
        record.require_given(
            self.path, {k: x for k, x in components.identity.items() if k in named}
        )

    def base(self) -> Path:
        """The model that the run's adapters belong to; a UserError if it is another than at the start."""
        run, config = record.read(self.path), lora.read_config(self.path / MODEL)[1]
        name, revision = config["base_model_name_or_path"], _commit(run) or config["revision"]
        # a relative path is that of the folder in which the run was started
        there = Path(run.get("folder", "")) / name
        found = hf.resolve(there if there.is_dir() else name, revision)
        record.require_given(self.path, {PRETRAINED: hf.version(found)})
        return found

    def require_warm_start(self, components: Components, steps: int) -> None:
        """A UserError unless the run ended a warm start of `steps` steps, with the same model.

        Without steps any checkpoint is one to begin with.
        """
        record.read(self.path)
        if steps and steps not in (found := self.initials.steps):
            said = (
                f"its warm start has {found[0]} steps" if found else "it has not ended a warm start"
            )
            raise UserError(f"--from {self.path}: {said}, that of the config has {steps}")
        self.require_model(components)
        if not steps and not self.checkpoints().steps:
            raise UserError(f"--from {self.path}: it has no checkpoint yet")

    def _had_checkpoint(self) -> bool:
        """True if one was whole: its note is there, or records of reinforcement, of which none is without."""
        noted = record.read(self.path).get(SAVED, False)
        return noted or any(r["phase"] == REINFORCE for r in journal.read(self.path))

    def note_saved(self) -> None:
        """Notes that the run has a checkpoint: records without one mean from now on that it is gone."""
        record.write(self.path, record.read(self.path) | {SAVED: True})

    def require_at_most(self, first: int, steps: int, earlier: int | None = None) -> None:
        """A UserError if the run has made more than `steps` steps after the `first` of a warm start.

        By the step that it goes back to, if one is given; also if its checkpoints are not there.
        """
        where = self.path / CHECKPOINTS  # may be a link to another disk, which may not be mounted
        there, dangling = Checkpoints(where).steps, where.is_symlink() and not where.exists()
        if not there and (dangling or self._had_checkpoint()):
            raise UserError(
                f"{self.path} has records, and its checkpoints are gone: mount or put back {where}, "
                "or start anew with another --out"
            )
        if there and earlier not in (None, *there):
            raise UserError(f"--resume {earlier}: there are checkpoints of {there}")
        done = (max(there, default=0) if earlier is None else earlier) - first
        if done > steps:
            made = f"{done} steps of reinforcement, more than --steps {steps}"
            if not steps:
                done += first
                made = f"{done} steps, more than the {first} that are asked for"
            raise UserError(
                f"{self.path} has made {made}: give --steps {done} or more, or leave it out"
            )

    def pinned(self, config: Config) -> Config:
        """The config, with the sizes, the hub's commits and the day that the run in the folder began with."""
        run = record.read(self.path)
        day = date.fromisoformat(run["given"][DAY]) if DAY in run["given"] else None

        def at_start(model: Any, name: str) -> Any:
            if not isinstance(model, Pretrained):
                return model
            return replace(
                model, revision=model.revision or _commit(run, name), day=model.day or day
            )

        models = {
            "model": at_start(config.model, PRETRAINED),
            "teacher": at_start(config.teacher, TEACHER),
        }
        return replace(config.sized(run["given"]), **models)

    def config(self) -> Config:
        """The config of a run, made by the run's own copies of its files, which are executed."""
        run = record.read(self.path)
        record.require_sources(self.path, run)
        if run["config"] is None:
            raise UserError(
                f"{self.path} was made by a program, not by a config file: only that can open it"
            )
        path = Path(run["config"])
        # the files may have changed since: each is read from the run's copy when it is asked for
        copies = {Path(original): self.path / copy for original, copy in run["files"].items()}
        copies[path] = self.path / CONFIG
        begun_in = Path(run.get("folder", ""))
        with userfile.redirected(copies, begun_in):
            make: Callable[..., Config] = configs.load(path)
            config = configs.build(make, self.path / CONFIG, **record.flags_for(make, run["flags"]))

        def task(data: Path) -> Any:  # made later, and may read files of its own
            with userfile.redirected(copies, begun_in):
                return config.task(data)

        return self.pinned(replace(config, task=task))

    def checkpoints(
        self,
        keep: int | None = None,
        regular: Callable[[int], bool] = lambda step: True,
        records: Callable[[], list[journal.Record]] | None = None,
    ) -> Checkpoints:
        """The checkpoints of a run, scored by its `records`, which are read if they are not given."""
        known = records or (lambda: journal.read(self.path))
        return Checkpoints(
            self.path / CHECKPOINTS,
            keep,
            regular=regular,
            scores=lambda: journal.fit(known(), regular),
        )

    def params(self, components: Components, step: int | None = None) -> tuple[int, Any]:
        """`(step, parameters)` of checkpoint `step`, else of the best, else of the newest."""
        chosen, found = self._params(components, step)
        return chosen, components.merged(found)

    def _params(self, components: Components, step: int | None) -> tuple[int, Any]:
        """As `params`, without those that adapters leave as they were."""
        read = lambda there, s: there.restore(s, components.like, part="params")
        return self._restored(step, read)

    def state(self, components: Components, step: int | None = None) -> update.TrainState:
        """The state for reinforcement at a checkpoint; in a warm start with a fresh optimizer state."""
        optimizer = components.config.optimizer
        like = update.state_like(components.like, optimizer)

        def read(there: Checkpoints, chosen: int) -> update.TrainState:
            if there.note(chosen)["phase"] == REINFORCE:
                return there.restore(chosen, like)
            # the optimizer state of a warm start has another form
            return update.init_state(there.restore(chosen, like.params, part="params"), optimizer)

        return self._restored(step, read)[1]

    def init_from(self, where: str | Path | None, resuming: bool) -> "RunFolder | None":
        """The run whose warm start is used, of a path or URL or as recorded; None without one.

        Nothing of it is brought where it is not needed any more: it may be gone.
        """
        recorded = record.read(self.path)["init_from"] if resuming else None
        if (where := where or recorded) is None:
            return None
        there = RunFolder(where, bring=False)
        # once this run has a checkpoint it needs nothing of the other
        if storage.as_url(there.path) != recorded or not self.checkpoints().steps:
            there.pull()
        if not resuming:
            record.read(there.path)  # that it is a run
        return there

    def reference_params(self, components: Components) -> Any:
        """The reference policy's parameters, in the model's precision, where they are kept."""
        params = self.initial_params(components)
        if params is None:
            raise UserError(
                f"{self.path / INITIAL}, the policy before reinforcement, is gone: take it from a copy of the run"
            )
        return components.placed(components.policy.cast_frozen(params))

    def initial_params(self, components: Components) -> Any:
        """The parameters that reinforcement began with; None if none were saved."""
        step, there = components.config.warm_steps, self.initials
        if step not in distributed.from_first(lambda: there.steps):
            return None
        try:
            return there.restore(step, components.like)
        except DamageError as error:
            raise UserError(
                f"{there.folder / str(step)} is damaged ({reason(error)}): take it from a copy of the run"
            ) from error

    def start_params(self, components: Components) -> Any:
        """The parameters with which another run begins: where its config has no warm start, the best."""
        if components.config.warm_steps:
            return self.initial_params(components)
        return self._params(components, None)[1]

    def weights(self, step: int | None = None) -> tuple[int, qwen2.Shape, Any]:
        """`(step, shape, parameters)`, sharded over all devices; executes no file of the run.

        Where the shape has adapters the parameters are theirs alone.
        """
        record.read(self.path)
        shape = hf.load_shape(self.path / MODEL)
        if (self.path / MODEL / lora.CONFIG).exists():
            shape = replace(shape, lora=lora.read_config(self.path / MODEL)[0])
        mesh = sharding.make_mesh(1, -1, 1)
        like = sharding.params_like(lora.trained(shape), mesh)
        chosen, found = self._restored(step, lambda there, s: there.restore(s, like, part="params"))
        return chosen, shape, found

    def _restored(
        self, step: int | None, read: Callable[[Checkpoints, int], Any]
    ) -> tuple[int, Any]:
        there = self.checkpoints()
        steps = there.steps
        if not steps:
            raise UserError(f"{self.path} has no checkpoint yet")
        # without an evaluation none is known to be the best
        best = lambda: there.best or steps[-1]  # of which processes may have other views
        chosen = distributed.from_first(best) if step is None else step
        if chosen not in steps:
            raise UserError(f"{self.path} has no checkpoint of step {chosen}, only of {steps}")
        try:
            return chosen, read(there, chosen)
        except DamageError as error:
            others = [s for s in steps if s != chosen]
            advice = f"try --step with one of {others}" if others else "there is no other"
            found = f"is damaged ({reason(error)}): {advice}"
            if chosen not in there.steps:  # by a run under way, which keeps a few
                found = "was removed meanwhile: try again"
            raise UserError(f"checkpoint {chosen} of {self.path} {found}") from error


@dataclass(frozen=True)
class Start:
    """A run that may begin in its folder or, with `resuming`, go on there; nothing is written yet."""

    folder: RunFolder
    resuming: bool
    earlier: int | None  # the step that it goes back to
    other: RunFolder | None  # the run whose warm start is used
    config: Config  # of a run that goes on: sizes and the model's commit are as at its start

    @classmethod
    def make(
        cls,
        config: Config,
        out: str | Path,
        resume: bool | int | str,
        init_from: str | Path | None,
    ) -> Self:
        """A UserError where the run can neither begin nor go on."""
        folder = RunFolder(out)
        # one run, the same in all processes, that can go on or begin
        resuming = distributed.from_first(
            lambda: folder.holds_run if resume == "auto" else resume is not False
        )
        if distributed.first():  # before what takes minutes
            folder.require_place(resuming)
        other = folder.init_from(init_from, resuming)
        earlier = None if isinstance(resume, (bool, str)) else resume
        return cls(folder, resuming, earlier, other, folder.pinned(config) if resuming else config)

    def new_record(
        self, components: Components, source: Source | None, sizes: Mapping[str, int]
    ) -> record.Run:
        """The record of a new run that starts so, with the `sizes` that were chosen for it."""
        if source is not None:  # files are read in making the task, too
            read = userfile.files_read(but=source.path)
            source = replace(source, files=tuple(dict.fromkeys([*source.files, *read])))
        # what its numbers depend on beside the config
        inputs = {**components.splits.checksums, **components.identity, **record.modules(), **sizes}
        return record.new(source, self.other and self.other.path, inputs)

    def require_steps(self, components: Components) -> None:
        """A UserError where the run, or the one whose warm start it takes, has not the config's steps."""
        first = components.warm_steps
        if self.resuming:
            self.folder.require_at_most(first, components.config.steps, self.earlier)
        if self.other is not None and not self.folder.checkpoints().steps:
            self.other.require_warm_start(components, first)


def _commit(run: record.Run, name: str = PRETRAINED) -> str | None:
    """The commit of the hub's model that the run began with; None for a folder."""
    version = run["given"].get(name, "")
    return version.removeprefix(hf.COMMIT) if version.startswith(hf.COMMIT) else None


def _described(components: Components) -> dict[str, dict[str, Any]]:
    """The files that describe the model, by name."""
    found = {"config.json": families.config_of(components.shape, "float32")}
    if components.shape.lora is None:
        return found
    return found | {lora.CONFIG: lora.config_of(components.shape.lora, *components.base)}
