"""`jaxrl-llm export`: a run's policy as a Hugging Face folder."""

from dataclasses import replace

import jax

from jaxrl_llm import storage
from jaxrl_llm.cli import parse
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, lora
from jaxrl_llm.training.folder import MODEL, RunFolder


def run(words: list[str]) -> None:
    """Parse the words after `export` and run `main`."""
    parse.call(main, words, "export")


def main(
    run: str,
    target: str,
    /,
    *,
    step: int | None = None,
    dtype: str = "float32",
    merge: bool = False,
    base: str = "",
) -> None:
    """Write a run's policy as a Hugging Face folder: safetensors, config.json and tokenizer.

    It reads the model and the checkpoint; the run's config file is not executed. Of a run of
    adapters (LoRA) they alone are written, in PEFT's format.

    Args:
        run: the folder or URL of a run.
        target: a new folder, or a URL where nothing lies yet.
        step: which checkpoint; if not given, the best.
        dtype: float32 or bfloat16.
        merge: write adapters merged into the model that they belong to.
        base: the folder or hub name of the model that the run began with, if that has parts for
            images: they are copied.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"--dtype {dtype}: choose float32 or bfloat16")
    folder, there = RunFolder(run), storage.local(target)
    chosen, shape, params = folder.weights(step)
    model, kind = folder.path / MODEL, jax.numpy.dtype(dtype)
    model = hf.resolve(base) if base else model
    if shape.lora is None:
        if merge:
            raise UserError(f"{run} has no adapters: leave --merge out")
        hf.export(params, shape, there, source=model, dtype=kind)
    elif merge:
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        whole = hf.load(folder.base(), shape, mesh, "float32")
        whole = lora.merge(whole, shape.lora, params)
        hf.export(whole, replace(shape, lora=None), there, source=model, dtype=kind)
    else:
        lora.export(params, there, source=model, dtype=kind)
    storage.push(there)
    print(f"step {chosen} of {run} written to {target}")
