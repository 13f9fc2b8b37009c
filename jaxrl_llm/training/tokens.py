"""tokens/step-N.npz: numbers of each token of a few responses of a step (`jaxrl-llm view`).

Flat arrays over the tokens of all responses, in order; JSON says what belongs to whole responses.
"""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import Group, rewards
from jaxrl_llm.learning.tokens import rounded

FOLDER = "tokens"


@dataclass(frozen=True)
class Step:
    """The figures of a step's tokens: `numbers[name]` has a value for each `sampled` token.

    `tokens` and `sampled` are flat over `responses`, dicts of the fields written by `write`.
    """

    step: int
    responses: list[dict[str, Any]]
    tokens: np.ndarray
    sampled: np.ndarray
    numbers: dict[str, np.ndarray]


def write(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    prompts: Sequence[str],
    numbers: Mapping[str, np.ndarray],
) -> None:
    """Writes the tokens of the first groups of a step; `prompts` are their texts."""
    rows = [(i, one) for i, group in enumerate(groups) for one in group.trajectories]
    ours: list[np.ndarray] = [np.asarray(one.tokens, np.int32) for _, one in rows]
    marked = [np.isin(np.arange(len(one.tokens)), one.sampled) for _, one in rows]
    counts = [int(x.sum()) for x in marked]
    responses = [
        {
            "group": i,
            "prompt": prompts[i],
            "tokens": len(one.tokens),
            "reward": reward.score,
            "correct": reward.correct,
            "graded": reward.graded,
            "fields": dict(reward.fields),
            "finished": bool(one.finished),
            "version": one.versions[0],
            **({"turns": [[*span] for span in one.turns]} if one.turns else {}),
            **({"turn_rewards": [*one.turn_rewards]} if one.turn_rewards else {}),
        }
        for (i, one), reward in zip(rows, rewards(groups), strict=True)
    ]
    flat = lambda x: np.concatenate([row[:n] for row, n in zip(x, counts, strict=True)])
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        tokens=np.concatenate(ours),
        sampled=np.concatenate(marked),
        about=np.frombuffer(json.dumps(responses).encode(), np.uint8),
        **{f"of_{name}": flat(x) for name, x in rounded(numbers).items()},
    )
    (folder / FOLDER).mkdir(exist_ok=True)
    storage.write(at(folder, step), buffer.getvalue())


def at(folder: Path, step: int) -> Path:
    """The file of a step."""
    return folder / FOLDER / f"step-{step:06d}.npz"


def steps(folder: Path) -> list[int]:
    """The steps of which tokens are kept."""
    storage.pull(folder / FOLDER)  # nobody else needs them
    found = [path.stem[5:] for path in (folder / FOLDER).glob("step-*.npz")]
    return sorted(int(name) for name in found if re.fullmatch("[0-9]+", name))


def read(folder: Path, step: int) -> Step:
    """Reads the file of a step; a UserError if the file is missing or damaged."""
    path = at(folder, step)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            kept = dict(found)
        responses = json.loads(kept["about"].tobytes())
        numbers = {k[3:]: x.astype(np.float32) for k, x in kept.items() if k.startswith("of_")}
        return Step(step, responses, kept["tokens"], kept["sampled"], numbers)
    except Exception as error:  # zip, zlib and numpy have no common base
        raise UserError(f"{path} cannot be read: leave it out, or delete it") from error
