"""What grades a response sees all of it but the token that ends it."""

import datetime
import json

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import families, hf
from jaxrl_llm.models.tokenizer import EOS, PAD, Tokenizer, load, of_words
from tests import tiny

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


def of_bytes():
    """Bytes and the turns of a chat, split as no other tokenizer does it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    turns = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, **turns))


def of_qwen():
    """The class of Qwen2's own, with some merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {piece: i for i, piece in enumerate([*letters, "ab", "\u0120a"])}
    merges = [("a", "b"), ("\u0120", "a")]
    return Tokenizer(Qwen2Tokenizer(vocab=ids, merges=merges, eos_token="<|endoftext|>"))


@pytest.mark.parametrize(
    ("made", "texts"),
    [
        (of_words(["a", "b", "it's", "<think>"]), ["a b it's", "<think> b", "a  a"]),
        (of_bytes(), ["ab a  b\n", "<|im_start|>a<|im_end|>", "it's 12345 \u00e9"]),
        (of_qwen(), ["ab a  b\n", "it's 12345 \u00e9", "e\u0301<|endoftext|>"]),
    ],
    ids=["words", "bytes", "qwen"],
)
def test_an_exported_folder_gives_the_same_ids(tmp_path, made, texts):
    """Whatever the class: its config.json, which says qwen2, has no part in it."""
    shape = tiny.shape(vocab_size=len(made))
    made.save(tmp_path / "words")
    described = families.config_of(shape, "float32")
    (tmp_path / "words" / "config.json").write_text(json.dumps(described))
    hf.export(tiny.policy(shape)[1], shape, tmp_path / "model", source=tmp_path / "words")
    again = load(tmp_path / "model")
    assert len(again) == len(made)
    assert (again.eos, again.stops) == (made.eos, made.stops)
    for text in texts:
        ids = made.encode(text)
        assert again.encode(text) == ids != []
        assert again.decode([*ids, made.eos]) == made.decode([*ids, made.eos])


def test_a_folder_with_vocab_and_merges_alone_is_read(tmp_path):
    made = of_qwen()
    made.save(tmp_path)
    inner = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(inner["vocab"]))
    (tmp_path / "merges.txt").write_text("".join(" ".join(m) + "\n" for m in inner["merges"]))
    (tmp_path / "config.json").write_text(
        json.dumps(families.config_of(tiny.shape(vocab_size=len(made)), "float32"))
    )
    assert load(tmp_path).encode("ab a b") == made.encode("ab a b")


def test_a_folder_says_which_tokens_end_a_response(tmp_path):
    shape = tiny.shape(vocab_size=64)
    WORDS.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(families.config_of(shape, "float32")))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 1]}')
    assert load(tmp_path).stops == (1, 4)


def test_a_template_writes_the_day_that_it_is_given(tmp_path):
    """Not today's: the prompts of a run would be others after midnight."""
    inner = of_bytes()._inner
    inner.chat_template = (
        "\n{% set d = strftime_now('%d %b %Y') %}{{ d }}, {{ messages[0].content }}"
    )
    Tokenizer(inner).save(tmp_path)
    for day, said in (
        (datetime.date(2024, 7, 26), "26 Jul 2024"),
        (datetime.date(2025, 1, 1), "01 Jan 2025"),
    ):
        made = load(tmp_path, chat=True, day=day)
        assert (made.day, made.prompt("a")) == (day, made.encode(f"\n{said}, a"))
    assert load(tmp_path, chat=True).day in {datetime.date.today(), made.day}


def test_messages_and_chats_go_by_the_template():
    """A text is what the user says only if `chat` is set; without a template that is one line."""
    inner = of_bytes()._inner
    inner.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
    )
    plain, chat = Tokenizer(inner), Tokenizer(inner, chat=True)
    said = [{"role": "user", "content": "ab"}]
    assert plain.prompt("ab") == plain.encode("ab")
    want = plain.encode("<|im_start|>user ab<|im_end|><|im_start|>a")
    assert plain.prompt(said) == chat.prompt("ab") == chat.prompt(said) == want
    with pytest.raises(UserError, match="chat template does not take"):
        WORDS.prompt(said)
