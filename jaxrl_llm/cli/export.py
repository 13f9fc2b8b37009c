"""`jaxrl-llm export`: a run's policy as a Hugging Face folder."""

from dataclasses import replace

import jax

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, lora
from jaxrl_llm.training import card
from jaxrl_llm.training.folder import MODEL, RunFolder


def main(
    run: str,
    target: str,
    /,
    *,
    step: int | None = None,
    dtype: str = "float32",
    merge: bool = False,
    base: str = "",
    push: str | None = None,
) -> None:
    """Write a run's policy as a Hugging Face folder: safetensors, config.json, tokenizer, model card.

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
        push: a repository of the hub, OWNER/NAME, to upload the folder to; a new one is private.
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
        if shape.family == "gemma4_text" and "text_config" in hf.read_config(folder.base()):
            raise UserError(
                "PEFT knows the layers of a Gemma 4 that has parts for images by other names: write the model "
                "with its adapters, by --merge --base"
            )
        lora.export(params, there, source=folder.path / MODEL, dtype=kind)
    card.write(folder, chosen, there, adapters=shape.lora is not None and not merge)
    storage.push(there)
    print(f"step {chosen} of {run} written to {target}")
    if push is not None:
        print(f"uploaded to {card.push(there, push)}")
