"""What grades a response sees all of it but the token that ends it."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.models.tokenizer import EOS, PAD, Tokenizer, of_words

WORDS = of_words(["<answer>", "a", "b"])
A, B = WORDS.encode("a b")
PAD_ID = WORDS.encode(PAD)[0]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([A, B], "a b"),
        ([A, B, WORDS.eos], "a b"),
        ([A, WORDS.eos, B, WORDS.eos], f"a {EOS} b"),
        ([A, WORDS.eos, WORDS.eos], f"a {EOS}"),
        ([A, PAD_ID, B], f"a {PAD} b"),
        ([A, PAD_ID], "a"),
        ([WORDS.eos], ""),
        ([], ""),
        ([A, len(WORDS), B, WORDS.eos], "a\ufffdb"),
    ],
)
def test_only_the_last_end_is_cut_off(tokens, text):
    assert WORDS.decode(tokens) == text


def test_other_special_tokens_are_text_wherever_they_stand():
    inner = Fast(models.WordLevel({"<|end|>": 0, "<|im_start|>": 1, "a": 2}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<|end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, **special))
    assert tokenizer.decode([2, 1, 2, 1]) == "a <|im_start|> a <|im_start|>"
    assert tokenizer.decode([2, 1, 2, 0]) == "a <|im_start|> a"


def test_a_chat_model_has_several_ends():
    inner = WORDS._inner
    several = Tokenizer(inner, [B, WORDS.eos])
    assert several.stops == (WORDS.eos, B)
    assert several.decode([A, B]) == "a"
    assert several.decode([A, B, WORDS.eos]) == "a b"


def test_the_stops_of_a_pretrained_model_reach_the_sampler(tmp_path):
    from jaxrl_llm.config import Pretrained
    from jaxrl_llm.models import hf, qwen2
    from jaxrl_llm.runs import assemble
    from tests import tiny
    from tests.test_configs import load

    shape = tiny.shape(vocab_size=64)
    WORDS.save(tmp_path / "words")
    described = hf.hf_config(shape, "float32")
    (tmp_path / "words" / "config.json").write_text(json.dumps(described))
    hf.export(qwen2.init(shape), shape, tmp_path / "model", source=tmp_path / "words")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    config = load("kk_tiny").config()
    task = SimpleNamespace(name="none", train=[1], test=[2], prompt=str, reward=int)
    config = dataclasses.replace(
        config, model=Pretrained(str(tmp_path / "model")), task=lambda folder: task
    )
    parts = assemble.parts(config, tmp_path)
    assert parts.sampling(config).stop == (1, 4)
