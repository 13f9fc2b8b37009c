"""Checkpoints where they lie: in a bucket stored when they were read back, and fetched without arrays at first."""

from pathlib import Path

from jaxrl_llm import desk
from jaxrl_llm.runs import journal

ARRAYS = "state"  # the part of a checkpoint that is large
_WHOLE = "_CHECKPOINT_METADATA"  # of desk.LAST: what says that a checkpoint is whole


def bring(folder: Path, *, read_only: bool) -> None:
    """Whole checkpoints, but for their arrays; half a one is removed by who may write."""
    for step, names in desk.entries(folder).items():
        if step.isdigit() and _WHOLE in names:
            for name in names:
                if not name.startswith(f"{ARRAYS}/"):
                    desk.bring(folder / step / name)
        elif step.isdigit() and not read_only:
            desk.drop(folder / step)


def put(checkpoint: Path) -> None:
    """A checkpoint, after all that the run has recorded; the arrays here, and those of older ones, go."""
    journal.store(checkpoint.parent.parent)
    desk.store(checkpoint)
    for arrays in checkpoint.parent.glob(f"*/{ARRAYS}"):
        desk.release(arrays)


def set_aside(checkpoint: Path) -> Path:
    """Gives a damaged checkpoint, here and in the bucket, a name that is free, and says which."""
    number = 0
    while desk.exists(aside := checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")):
        number += 1
    desk.fetch(checkpoint)
    checkpoint.rename(aside)
    desk.store(aside)
    desk.drop(checkpoint)
    return aside
