"""What grades a response sees all of it but the token that ends it."""

import datetime
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

import jaxrl_llm as jl
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import families, hf, tokenizer
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


def fast(ids, *added, **special):
    """A tokenizer of these words, with tokens added after the last one."""
    inner = Fast(models.WordLevel(ids))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([*added])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS, **special)


def test_ids_with_gaps_have_the_bound_of_the_largest():
    gaps = Tokenizer(fast({EOS: 0, "a": 1, "b": 2, "c": 12}))
    assert len(gaps) == 13
    assert gaps.decode([1, 12, 0]) == "a c"
    assert gaps.decode([1, 5, 12]) == "a\ufffdc"  # no token has this id
    assert gaps.pieces([1, 12, 5]) == ["a", " c", "\ufffd"]


def of_gemma(folder):
    """As Gemma 3's text models are published: a token for images, one above the embedding's rows."""
    ids = {"<pad>": 0, EOS: 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 4, "<end_of_turn>": 5}
    inner = fast(ids | {"a": 6, "b": 7}, *ids, "<image_soft_token>", pad_token="<pad>")
    inner.chat_template = "{% for m in messages %}<start_of_turn> {{ m.content }}{% endfor %}"
    inner.save_pretrained(folder / "words")
    shape = replace(tiny.FAMILIES["gemma3"], vocab_size=len(ids) + 2)
    (folder / "words" / "config.json").write_text(json.dumps(families.config_of(shape, "float32")))
    hf.export(tiny.policy(shape)[1], shape, folder / "m", source=folder / "words")
    return folder / "m"


def test_gemma_has_a_token_that_its_embedding_has_not(tmp_path):
    """It can be neither sampled nor read, and all else works."""
    model = jl.load(of_gemma(tmp_path))
    known = model.tokenizer
    assert len(known) == model.shape.vocab_size == 8
    assert known.prompt([{"role": "user", "content": "a b"}]) == [4, 6, 7]
    assert known.decode([6, 8, 1]) == "a\ufffd"
    [response] = jl.generate(model, ["a b"], jl.Sampling(max_tokens=4))
    assert 1 <= len(response.tokens) <= 4
    for ask in (known.encode, lambda text: known.prompt([{"role": "user", "content": text}])):
        with pytest.raises(
            UserError, match=r"'<image_soft_token>' is token 8, and the model has 8"
        ):
            ask("a <image_soft_token> b")


@pytest.mark.parametrize("content", [None, "{", "[]", {"model": {"type": "Nobody"}}])
def test_a_folder_without_a_tokenizer_that_can_be_read_is_one_line(tmp_path, content):
    if content is not None:
        WORDS.save(tmp_path)
        path = tmp_path / "tokenizer.json"
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | content) if isinstance(content, dict) else content)
    with pytest.raises(UserError, match="holds no tokenizer that can be read") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_is_asked_for_nowhere(tmp_path, monkeypatch):
    """Its path may be a name at the hub too."""
    monkeypatch.setattr(tokenizer, "library", lambda: pytest.fail("the library is asked"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no folder kk/model"):
        load(Path("kk/model"))


@pytest.mark.parametrize(
    ("ids", "added"), [({EOS: 0, "a": 40}, ()), ({"a": 0, "b": 1}, (EOS,))], ids=["own", "end"]
)
def test_a_tokenizer_of_another_model_is_refused_by_its_largest_id(tmp_path, ids, added):
    """Of its own words, and of the token that ends a text."""
    shape = tiny.shape(vocab_size=max(ids.values()) + (1 if added else 0))
    fast(ids, *added).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(families.config_of(shape, "float32")))
    with pytest.raises(UserError, match="they are not of one model") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("words", [("a", "b", "a", "c"), ("a", PAD), (EOS, "a")])
def test_words_of_a_model_from_scratch_are_there_once(words):
    with pytest.raises(UserError, match=r"model: the word '(a|<pad>|<eos>)' is there twice"):
        jl.Scratch(tiny.shape(), words)


def test_a_model_from_scratch_has_no_adapters():
    with pytest.raises(UserError, match="model: a model from scratch has no adapters"):
        jl.Scratch(tiny.shape(lora=jl.Lora(4)), ("a",))


@pytest.mark.parametrize(
    "text", ["\u00e9a", "\u00e9\u00e9", "\U0001f600 a", "a \u00e9\U0001f600b", "\u00e9"]
)
def test_pieces_of_a_text_are_the_text(text):
    """Wherever a character of several tokens stands."""
    made = of_bytes()
    ids = made.encode(text)
    assert len(ids) > len(text)
    assert "".join(made.pieces(ids)) == text


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
    inner.decoder = decoders.ByteLevel()
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
    said = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    # what transformers 4 has not, or has as a mapping
    assert said["tokenizer_class"] != "TokenizersBackend"
    assert "extra_special_tokens" not in said
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
