"""Text to token ids and back, by any Hugging Face tokenizer or one made of a list of words."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models import hf
from jaxrl_llm.userfile import valid_unicode

PAD, EOS = "<pad>", "<eos>"
_THINK = "<think>"


@runtime_checkable
class TokenPrompt(Protocol):
    """Messages that are other tokens than those of the chat template, as where tools are told of."""

    def token_ids(self, tokenizer: Any, /) -> list[int]: ...


class HiddenTokens(list[int]):
    """The token ids of a prompt that is not shown: an environment says what the policy sees first."""


class Tokenizer:
    """The methods of a tokenizer that this package needs.

    `eos` ends a text; `stops` are all tokens that end a response: chat models have several. With
    `chat` a prompt that is a text is what the user says. Ids from `room` on, of tokens that were
    added, the model has not: Gemma's for images. `day` is what a template writes as today.
    """

    reads = True  # whether there is one

    def __init__(
        self,
        inner: Any,
        stops: Sequence[int] = (),
        *,
        chat: bool = False,
        room: int = sys.maxsize,
        day: date | None = None,
    ):
        self._inner, self.chats, self._room = inner, chat, room
        self.day = day or date.today()
        if inner.eos_token_id is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token: set eos_token in its config"
            )
        self.eos: int = inner.eos_token_id
        self.stops: tuple[int, ...] = tuple(dict.fromkeys((self.eos, *stops)))
        self._ends = {*self.stops, inner.pad_token_id}
        vocabulary, added = inner.get_vocab(), inner.get_added_vocab()
        most = max([self.eos, *(i for text, i in vocabulary.items() if text not in added)])
        if most >= room:
            raise UserError(
                f"the tokenizer has token {most}, the model {room}: they are not of one model"
            )
        self._ids = frozenset(i for i in vocabulary.values() if i < room)

    def __len__(self) -> int:
        return max(self._ids) + 1  # there may be gaps

    @property
    def digest(self) -> str:
        """A checksum of the vocabulary, the chat template and the tokens that end a response."""
        vocabulary = sorted(self._inner.get_vocab().items())
        written = json.dumps([vocabulary, self._inner.chat_template, self.stops])
        return hashlib.sha256(written.encode()).hexdigest()[:16]

    def difference(self, other: "Tokenizer") -> tuple[int, str, str | None] | None:
        """The first of these tokens that is another in `other`: its id and both texts; None without one."""
        ours, theirs = (
            {i: text for text, i in one._inner.get_vocab().items() if i in one._ids}
            for one in (self, other)
        )
        others = ((i, ours[i], theirs.get(i)) for i in sorted(ours) if ours[i] != theirs.get(i))
        return next(others, None)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without special tokens; a UserError if it cannot be encoded."""
        try:
            tokens = self._inner.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions, as for an unknown word
            valid_unicode(text)
            known = self._inner.get_vocab()
            words = [word for word in text.split() if word not in known]
            raise UserError(
                f"the tokenizer cannot read {(words or [text])[0]!r}: {error}"
            ) from error
        return self._of_model(tokens)

    def _of_model(self, tokens: list[int]) -> list[int]:
        """The tokens; a UserError if one is none of the model's."""
        if (most := max(tokens, default=0)) >= self._room:
            raise UserError(
                f"{self._inner.convert_ids_to_tokens(most)!r} is token {most}, and the model has "
                f"{self._room}: leave it out"
            )
        return tokens

    def prompt(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a prompt; messages, and all where `chat` is set, go by the chat template."""
        if isinstance(prompt, TokenPrompt):
            return prompt.token_ids(self)
        if isinstance(prompt, str) and not self.chats:
            return self.encode(prompt)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return self.turns(said, add_generation_prompt=True)

    def opened(self, prompt: str | Sequence[Mapping[str, str]], tokens: Sequence[int]) -> str:
        """The beginning of a response that the chat template has written: `<think>`, or nothing.

        `tokens` are what the response follows, by this prompt. A text that goes by no template is the
        task's, which knows how it ends.
        """
        plain = isinstance(prompt, str) and not self.chats
        return _THINK * (not plain and self.decode(tokens[-9:], False).rstrip().endswith(_THINK))

    def turns(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Token ids of messages by the chat template, to which `settings` go; else a UserError."""
        inner = self._inner
        try:
            template = self._dated(inner.get_chat_template(tools=settings.get("tools")))
            settings |= {"tokenize": True, "return_dict": False, "chat_template": template}
            tokens = inner.apply_chat_template(messages, **settings)
        except Exception as error:  # what templates raise, and the library where there is none
            valid_unicode(json.dumps(messages, ensure_ascii=False, default=str))
            reason = first_line(error)
            raise UserError(
                f"the tokenizer's chat template does not take {messages!r:.80}: {reason}"
            ) from error
        return self._of_model(tokens)

    def end(self, prompt: str | Sequence[Mapping[str, str]]) -> int:
        """The token that ends a response to this prompt: a turn's, where it goes by the template."""
        return self.eos if isinstance(prompt, str) and not self.chats else self._end_of_turn

    @cached_property
    def _end_of_turn(self) -> int:
        """The first token that stops after what an assistant says; `eos` without a template."""
        asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
        try:
            before = self.turns([asked], add_generation_prompt=True)
            after = self.turns([asked, said])
        except UserError:
            return self.eos
        before, after = ([t for t in tokens if t in self.stops] for tokens in (before, after))
        return [*after[len(before) :], self.eos][0]

    def _dated(self, template: str) -> str:
        """The template with `day` in place of today, for which the library lets nobody set another."""
        if "strftime_now" not in template:
            return template
        parts = {f"%{part}": self.day.strftime(f"%{part}") for part in "aAbBdjmyY"}
        written = " | ".join(["form", *(f"replace({part!r}, {x!r})" for part, x in parts.items())])
        return f"{{% macro strftime_now(form) %}}{{{{ {written} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"

    @property
    def marks(self) -> list[str]:
        """Texts but spaces and letters that are always one token, such as those around turns."""
        return [text for text in self._inner.get_added_vocab() if len(text.strip()) > 1]

    def decode(self, tokens: Sequence[int], ended: bool | None = None) -> str:
        """The text of a response without the token that ends it (`ended` None: if it is an end).

        Other special tokens are written out, and ids outside the vocabulary become U+FFFD: graders
        must see all that the policy wrote.
        """
        if ended is None:
            ended = len(tokens) > 0 and tokens[-1] in self._ends
        pieces: list[list[int]] = [[]]
        for token in tokens[:-1] if ended else tokens:
            if token in self._ids:
                pieces[-1].append(token)
            else:
                pieces.append([])
        return "\ufffd".join(
            self._inner.decode(piece, skip_special_tokens=False) for piece in pieces
        )

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token adds; nothing where a later one completes its character."""
        text = lambda some: self._inner.decode(some, skip_special_tokens=False)
        out, last, since = [], [], []  # `last`: that ended the last whole character, if one did
        for i, token in enumerate(tokens):
            if token not in self._ids:
                out.append("\ufffd")
                continue
            since.append(token)
            before, now = text(last), text([*last, *since])
            if now.endswith("\ufffd") and i + 1 < len(tokens):
                out.append("")
            else:
                out.append(now[len(before) :])
                last, since = [token], []
        return out

    def save(self, folder: Path) -> None:
        """Writes the files that `load` reads, class and special tokens by names that transformers 4 knows."""
        self._inner.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


class Missing(Tokenizer):
    """In place of the tokenizer of a folder that has none: whatever needs one is a UserError."""

    reads = False

    def __init__(self, folder: Path, stops: Sequence[int]):
        self._folder, self.stops = folder, tuple(stops)

    def __getattr__(self, name: str) -> Any:
        raise UserError(f"{self._folder} has no tokenizer: add tokenizer.json, or give token ids")


def load(folder: Path, *, chat: bool | None = False, day: date | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder; it stops where generation_config.json says so too.

    `chat` None puts prompts into its chat template if it has one.
    """
    if not folder.is_dir():  # its name may be one at the hub too
        raise UserError(f"there is no folder {folder}, which should hold a tokenizer")
    # tokenizer.json is complete; AutoTokenizer would look at config.json first and use the class
    # of Qwen2, with its rules for splitting text, whatever the vocabulary is
    whole = (folder / "tokenizer.json").exists()
    kind = "PreTrainedTokenizerFast" if whole else "AutoTokenizer"
    of_model = (folder / "config.json").exists()
    room = hf.load_shape(folder).vocab_size if of_model else sys.maxsize
    stops = hf.stop_tokens(folder, room) if of_model else ()
    try:
        inner = getattr(library(), kind).from_pretrained(folder, trust_remote_code=False)
        chats = inner.chat_template is not None if chat is None else chat
        tokenizer = Tokenizer(inner, stops, chat=chats, room=room, day=day)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except Exception as error:  # the library raises bare Exceptions for a file it cannot read
        reason = first_line(error)
        raise UserError(f"{folder} holds no tokenizer that can be read: {reason}") from error
    return tokenizer


def load_or_missing(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, or what says that there is none once text is asked for."""
    if any(re.match("tokenizer|vocab", path.name) for path in folder.iterdir()):
        return load(folder)
    return Missing(folder, hf.stop_tokens(folder, hf.load_shape(folder).vocab_size))


def of_words(words: Sequence[str]) -> Tokenizer:
    """One token per word; words are separated by spaces, an unknown one is a UserError."""
    from tokenizers import Tokenizer as Words
    from tokenizers import models, pre_tokenizers

    fast = library().PreTrainedTokenizerFast
    ids = {word: i for i, word in enumerate((PAD, EOS, *words))}
    inner = Words(models.WordLevel(ids))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(fast(tokenizer_object=inner, eos_token=EOS, pad_token=PAD))


def library():
    """The library, imported late (it takes seconds) and without its notice on missing PyTorch."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    return transformers
