"""A small model in a Hugging Face folder, with a tokenizer of words, for the examples of the documentation."""

import json
import pathlib

from jaxrl_llm.models import families, hf, tokenizer
from tests import tiny

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
SHAPE = tiny.shape(vocab_size=len(WORDS) + 2)


def write_model(folder: pathlib.Path, words=WORDS, seed=0) -> None:
    """As `jaxrl-llm export` writes the policy of a run that began from scratch."""
    shape = tiny.shape(vocab_size=len(words) + 2)
    source = folder.with_name(f"{folder.name}-words")
    tokenizer.of_words(words).save(source)
    (source / "config.json").write_text(json.dumps(families.config_of(shape, "float32")))
    hf.export(tiny.policy(shape, seed=seed)[1], shape, folder, source=source)
