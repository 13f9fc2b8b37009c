"""Loggers beside metrics.jsonl: TensorBoard, Weights & Biases, trackio, SwanLab, MLflow.

None of them can end a run that has begun: what one raises becomes a warning, once, and it is left
out from there on; so is one that does not return in LIMIT seconds.
"""

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from jaxrl_llm.background import in_background
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.training import journal

ASKED = "JAXRL_LOGGERS"  # the environment variable that names loggers, with commas between
LIMIT = 120.0  # seconds that each may take for a record, or to close
HUBS = {"wandb": "Weights & Biases", "trackio": "trackio", "swanlab": "SwanLab", "mlflow": "MLflow"}
_event = cast(Any, event_pb2)  # members are made on import
logger = logging.getLogger(__name__)
Columns = Sequence[str]
Rows = Sequence[Sequence[str]]


class Logger(Protocol):
    """Takes metrics of a step by name, and tables of text; may raise whatever it likes."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def table(self, step: int, name: str, columns: Columns, rows: Rows) -> None: ...

    def close(self, *, finished: bool) -> None: ...


class Loggers:
    """TensorBoard, and those that are asked for, of the run in a folder.

    `purge` is the step from which on earlier records are void, if there are any. Raises a UserError
    for an unknown name, and if one does not start with a new run; a resumed run goes on without.
    """

    def __init__(self, folder: Path, purge: int | None):
        self._loggers: dict[str, Logger] = {}
        asked = [name for name in os.environ.get(ASKED, "").replace(" ", "").split(",") if name]
        for name in {*asked} - {*HUBS}:
            raise UserError(f"{ASKED}: there is no logger {name!r}, only {', '.join(HUBS)}")
        for name in ("tensorboard", *dict.fromkeys(asked)):
            try:
                if name not in HUBS:
                    started = _Board(folder, purge)
                else:
                    identity = json.loads((folder / "run.json").read_bytes())["id"]
                    started = (_Mlflow if name == "mlflow" else _Hub)(name, folder, identity)
                self._loggers[HUBS.get(name, "TensorBoard")] = started
            except Exception as error:  # the libraries' own errors have no common base
                failure = f"{HUBS.get(name, 'TensorBoard')} does not start ({first_line(error)})"
                if name not in HUBS or purge:
                    logger.warning("%s: the run goes on without", failure)
                    continue
                self.close(finished=False)
                raise UserError(
                    f"{failure}: pip install {name}, log in to it, or leave it out of {ASKED}"
                ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hands on metrics of a step."""
        self._each(lambda one: one.log(step, values))

    def table(self, step: int, name: str, columns: Columns, rows: Rows) -> None:
        """Hands on a table of text."""
        self._each(lambda one: one.table(step, name, columns, rows))

    def close(self, *, finished: bool) -> None:
        """Closes all; `finished` if the run is at its end."""
        self._each(lambda one: one.close(finished=finished))
        self._loggers = {}

    def _each(self, call: Callable[[Logger], Any]) -> None:
        for name, one in [*self._loggers.items()]:
            try:
                in_background(partial(call, one)).result(LIMIT)
            except Exception as error:  # as above
                late = isinstance(error, TimeoutError) and f"it takes more than {LIMIT:g} s"
                logger.warning("%s is left out from here on: %s", name, late or first_line(error))
                del self._loggers[name]
                in_background(partial(one.close, finished=False))


class _Board:
    """TensorBoard event files, written at once, a new one after each `journal.PART` steps.

    tensorboardX's own writer has a thread, which would wait for ever on a full disk.
    """

    def __init__(self, folder: Path, purge: int | None):
        (folder / "tensorboard").mkdir(parents=True, exist_ok=True)
        self._files, self._steps = str(folder / "tensorboard" / "events"), 0
        self._writer = EventsWriter(self._files)
        if purge is not None:  # makes TensorBoard drop later steps
            start = _event.SessionLog(status=_event.SessionLog.START)
            self._write(step=purge, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        record: Any = summary.Summary
        self._steps += 1
        if self._steps % journal.PART == 0:
            self._writer.close()
            self._writer = EventsWriter(self._files)
        points = [record.Value(tag=name, simple_value=x) for name, x in values.items()]
        self._write(step=step, summary=record(value=points))

    def table(self, step: int, name: str, columns: Columns, rows: Rows) -> None:
        cells = [columns, ["---"] * len(columns), *([*map(_shown, row)] for row in rows)]
        text = "\n".join(f"| {' | '.join(row)} |" for row in cells)
        self._write(step=step, summary=summary.text(name, text))

    def close(self, *, finished: bool) -> None:
        del finished
        self._writer.close()

    def _write(self, **event: Any) -> None:
        self._writer.write_event(_event.Event(wall_time=time.time(), **event))
        self._writer.flush()


class _Hub:
    """Weights & Biases, or those that have its interface; a resumed run goes on there by its id."""

    def __init__(self, name: str, folder: Path, identity: str):
        self._module, self._name = importlib.import_module(name), name
        project = os.environ.get(f"{name.upper()}_PROJECT", "jaxrl_llm")
        label = folder.absolute().name
        settings: dict[str, Any] = {"project": project, "resume": "allow", "name": label}
        if name == "trackio":  # which knows runs by name
            settings["name"] += f"-{identity[:8]}"
        elif name == "swanlab":
            settings |= {"id": identity, "log_dir": str(folder / "swanlog"), "reinit": True}
        else:
            settings |= {"id": identity, "dir": folder}
        init = partial(self._module.init, **settings)
        with self._quiet():  # in the main thread SwanLab would take Ctrl-C for itself
            self._run = in_background(init).result(LIMIT) if name == "swanlab" else init()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, step: int, name: str, columns: Columns, rows: Rows) -> None:
        if self._name == "swanlab":  # which has texts, and no tables
            said = ["\n\n".join(map(": ".join, zip(columns, row, strict=True))) for row in rows]
            made = [self._module.Text(text) for text in said]
        else:
            made = self._module.Table(columns=[*columns], data=[[*row] for row in rows])
        self._run.log({name: made}, step=step)

    def close(self, *, finished: bool) -> None:
        if finished:
            with self._quiet():
                self._module.finish()

    def _quiet(self) -> contextlib.AbstractContextManager[Any]:
        """Welcomes and goodbyes do not get among what the run says; those of wandb are errors already."""
        return (
            contextlib.nullcontext()
            if self._name == "wandb"
            else contextlib.redirect_stdout(sys.stderr)
        )


class _Mlflow:
    """The MLflow server of MLFLOW_TRACKING_URI; a resumed run is found there by its tag."""

    def __init__(self, name: str, folder: Path, identity: str):
        self._module: Any = importlib.import_module(name)
        self._client: Any = self._module.MlflowClient()
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxrl_llm")
        where = self._module.set_experiment(project).experiment_id
        tag = f"tags.jaxrl_llm = '{identity}'"
        known = self._client.search_runs([where], tag, max_results=1)
        label, tags = folder.absolute().name, {"jaxrl_llm": identity}
        found = known[0] if known else self._client.create_run(where, run_name=label, tags=tags)
        self._run = found.info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._module.entities.Metric, int(1000 * time.time())
        named = {re.sub(r"[^\w\-. :/]", "_", name): x for name, x in values.items()}  # pass@2
        made = [metric(name, float(x), now, step) for name, x in named.items()]
        self._client.log_batch(self._run, metrics=made)

    def table(self, step: int, name: str, columns: Columns, rows: Rows) -> None:
        table = {"columns": [*columns], "data": [[*row] for row in rows]}
        self._client.log_dict(self._run, table, f"{name}/{step}.json")

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def _shown(text: str) -> str:
    """Text for a cell of a table in Markdown, whatever is in it."""
    plain = re.sub(r"[!-/:-@\[-`{-~]", lambda found: f"&#{ord(found[0])};", text)
    return plain.replace("\n", "<br>")
