"""A run that begins with the warm start of another one."""

import tempfile
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.runs import folder as folders
from jaxrl_llm.runs import journal
from jaxrl_llm.runs.assemble import Parts
from jaxrl_llm.runs.notes import REINFORCE


def check(folder: Path, parts: Parts, warm_steps: int) -> None:
    """A UserError unless there is the end of a warm start of `warm_steps` that suits a run of these parts."""
    begun = [r["step"] for r in journal.read(folder) if r["phase"] == REINFORCE]
    if not begun:
        raise UserError(f"--from {folder}: there is no run there that has ended its warm start")
    if begun[0] != warm_steps:
        raise UserError(
            f"--from {folder}: its warm start has {begun[0]} steps, that of the config {warm_steps}"
        )
    folders.same_model(folder, hf.hf_config(parts.shape, "float32"))
    with tempfile.TemporaryDirectory() as ours:
        parts.tokenizer.save(Path(ours))
        written = [where / "tokenizer.json" for where in (folder / "model", Path(ours))]
        if written[0].read_bytes() != written[1].read_bytes():
            raise UserError(f"--from {folder}: its tokenizer is another than that of the config")
    _require(folder, warm_steps)


def params(folder: Path, parts: Parts, warm_steps: int) -> Any:
    """The parameters that the warm start ended with."""
    _require(folder, warm_steps)
    return folders.params(folder, parts, warm_steps)[1]


def _require(folder: Path, warm_steps: int) -> None:
    if warm_steps not in folders.steps(folder):
        raise UserError(
            f"--from {folder}: its checkpoint of step {warm_steps}, the end of its warm start, is gone: begin "
            "anew without --from, or with a run of --steps 0, which keeps it"
        )
