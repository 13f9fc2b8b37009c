"""`page`: the tokens that runs kept, and their curves, as one HTML file without a network."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import tokenizer
from jaxrl_llm.training import curves, journal, tokens
from jaxrl_llm.training.folder import MODEL
from jaxrl_llm.training.journal import REINFORCE

CURVES = ("reward", "eval/accuracy", "entropy", "kl_reference", "length", "clip", "grad_norm")

Written = tuple[tokens.Step, list[str]]  # a kept step, and the text of each of its tokens


def page(data: dict[str, Any]) -> str:
    """The HTML file that shows `data`; the only scripts that it may run are its own."""
    template = resources.files("jaxrl_llm.research").joinpath("page.html").read_text()
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'"
        for x in re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    )
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return template.replace("SCRIPTS", allowed).replace("DATA", text)


def gathered(runs: Sequence[Path], most: int) -> dict[str, Any]:
    """The data of a page of these runs: of steps evenly apart so many that `most` tokens suffice.

    A UserError if a folder has no tokens.
    """
    pages = [_run(*one, most // len(runs)) for one in zip(runs, curves.names(runs), strict=True)]
    steps = [step for _, steps_of_run in pages for step, _ in steps_of_run]
    texts = [text for _, steps_of_run in pages for _, written in steps_of_run for text in written]
    pieces = list(dict.fromkeys(texts))
    place = {text: i for i, text in enumerate(pieces)}
    sampled = np.concatenate([step.sampled for step in steps])
    names = dict.fromkeys(name for step in steps for name in step.numbers)
    shown, at = [], 0
    for run, (_, steps_of_run) in enumerate(pages):
        for step, _ in steps_of_run:
            responses = []
            for response in step.responses:
                responses.append({**response, "start": at})
                at += response["tokens"]
            shown.append({"run": run, "step": step.step, "responses": responses})
    return {
        "runs": [about for about, _ in pages],
        "steps": shown,
        "pieces": pieces,
        "token": _packed(np.asarray([place[text] for text in texts], np.int32)),
        "sampled": _packed(sampled.astype(np.uint8)),
        "numbers": {name: _packed(_column(name, steps, sampled)) for name in names},
    }


def _run(folder: Path, name: str, most: int) -> tuple[dict[str, Any], list[Written]]:
    """A run's name and curves; and steps whose tokens it has."""
    steps = tokens.steps(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    if not steps:
        raise UserError(
            f"{folder} has kept no tokens: is it the folder of a run, with keep_tokens above 0?"
        )
    records = journal.read(folder)
    last = max((r["step"] for r in records if r["phase"] == REINFORCE), default=0)
    read = [written(folder, step) for step in _spread(folder, steps, last, most)]
    shown = {k: x for curve in CURVES for k, x in curves.series(records, curve).items()}
    return {"name": name, "kept": len(steps), "curves": shown}, read


def _spread(folder: Path, steps: list[int], last: int, most: int) -> list[int]:
    """Steps evenly apart, the first and the last among them, of about `most` tokens in all."""
    known = [step for step in steps if step <= last] or steps[:1]
    of_one = len(written(folder, known[-1])[1])
    count = min(len(known), max(2, most // max(of_one, 1)))
    return [known[i] for i in sorted({*np.linspace(0, len(known) - 1, count).round().astype(int)})]


def written(folder: Path, step: int) -> Written:
    """A kept step and the text of each token; read once while its file stays as it is.

    Raises a UserError if it is missing or damaged.
    """
    path = tokens.at(folder, step)
    return _as_of(folder, step, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=1024)
def _as_of(folder: Path, step: int, changed: int) -> Written:
    del changed
    kept = tokens.read(folder, step)
    ends = np.cumsum([response["tokens"] for response in kept.responses])
    rows = np.split(kept.tokens, ends[:-1])
    words = _tokenizer(folder)
    return kept, [text for row in rows for text in words.pieces(row.tolist())]


@lru_cache
def _tokenizer(folder: Path) -> tokenizer.Tokenizer:
    return tokenizer.load(folder / MODEL)


def _column(name: str, steps: Sequence[tokens.Step], sampled: np.ndarray) -> np.ndarray:
    """A number for each token; NaN where it was not sampled, or the number is not known."""
    column = np.full(len(sampled), np.nan, np.float32)
    unknown = lambda step: np.full(int(step.sampled.sum()), np.nan)
    column[sampled] = np.concatenate([step.numbers.get(name, unknown(step)) for step in steps])
    return column


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
