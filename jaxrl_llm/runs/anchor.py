"""The policy before reinforcement, in a folder beside the checkpoints: written once, read on every start."""

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxrl_llm import desk, files, hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import sharding
from jaxrl_llm.runs import record, writers
from jaxrl_llm.runs.disk import DamageError, first_line, patiently, writing
from jaxrl_llm.runs.fingerprint import describe, same_form
from jaxrl_llm.runs.seal import sealed, unsealed


def write(folder: Path, params: Any) -> None:
    """Parameters alone, in place of what was there, and beside them what they are and of which run."""
    note = sealed({"run": record.identity(folder.parent), "arrays": describe(params)})
    if writers.gathers(folder):
        params = jax.tree.map(sharding.on_first_host, params)
    with hosts.together(), writing(folder.parent, folder.name, params):
        if hosts.first() or not writers.gathers(folder):
            with ocp.StandardCheckpointer(multiprocessing_options=writers.of(folder)) as writer:
                writer.save(folder.absolute(), params, force=True)
        with hosts.together():
            if hosts.first():
                files.sync_tree(folder)
                files.write(_note_of(folder), json.dumps(note, indent=1) + "\n")
                desk.drop(folder)
                desk.store(folder)
                desk.store(_note_of(folder))


def read(folder: Path, like: Any) -> Any:
    """What `write` wrote in this run, placed as `like` lies."""
    cure = "take the folder from a copy of the run, or start anew with another --out"
    desk.fetch(folder)
    desk.fetch(_note_of(folder))
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        note = unsealed(patiently(str(folder), lambda: json.loads(_note_of(folder).read_bytes())))
        if note["run"] != record.identity(folder.parent):
            raise DamageError("it is of another run")
        same_form(str(folder), note["arrays"], like)
        with ocp.StandardCheckpointer(multiprocessing_options=writers.of(folder)) as reader:
            params = patiently(str(folder), lambda: reader.restore(folder.absolute(), wanted))
        if describe(params) != note["arrays"]:
            raise DamageError("the arrays are not the ones that were saved")
    except DamageError as error:
        raise UserError(
            f"{folder}, the policy before reinforcement, cannot be used ({first_line(error)}): {cure}"
        ) from error
    return params


def _note_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")
