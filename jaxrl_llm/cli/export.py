"""`jaxrl-llm export`: a run's policy as others read it."""

from pathlib import Path

import jax

from jaxrl_llm import desk
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.runs import folder


def main(run: Path, target: Path, /, *, step: int | None = None, dtype: str = "float32") -> None:
    """Write a run's policy as a Hugging Face folder: safetensors, config.json and tokenizer.

    It reads the model and the checkpoint; the run's config file is not executed.

    Args:
        run: the folder or URL of a run.
        target: a new folder, or a URL where nothing lies yet.
        step: which checkpoint (default: the best).
        dtype: float32 or bfloat16.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype}: choose float32 or bfloat16")
    run, target = folder.at_hand(run), desk.at_hand(target)
    if desk.entries(target):
        raise UserError(f"{target} is not empty: export to a new place")
    chosen, shape, params = folder.weights(run, step)
    hf.export(params, shape, target, source=run / "model", dtype=jax.numpy.dtype(dtype))
    desk.store(target)
    print(desk.spoken(f"step {chosen} of {run} written to {target}"))
