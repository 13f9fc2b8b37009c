"""A table of conversations as a task: the assistant's turns are imitated, and graded if there is a reward."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.tasks import questions, tables
from jaxrl_llm.tasks.questions import Questions
from jaxrl_llm.tasks.tables import Question
from jaxrl_llm.tasks.task import Prompt, Row
from jaxrl_llm.tasks.tools import call_arguments
from jaxrl_llm.userfile import valid_unicode

ROLES = ("system", "user", "assistant", "tool")
COMPLETIONS = ("completion", "response", "output", *tables.ANSWERS)


class _WithTools(tuple[Mapping[str, Any], ...]):
    """Messages as a prompt that names tools, as the chat template does."""

    tools: Sequence[Any]

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.turns(self, tools=self.tools, add_generation_prompt=True)


@dataclass(frozen=True)
class Conversation(Question):
    """A row of a table: messages, of which the assistant's from number `first` on are learned from.

    Its prompt is what comes before the last of these.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    first: int = 0
    tools: Sequence[Any] | None = None
    where: str = field(default="", compare=False, repr=False)  # the data are the same elsewhere


@dataclass(frozen=True)
class Conversations(Questions):
    """Conversations to imitate; a response to the last prompt of one is graded if there are `terms`."""

    name: str = "conversations"

    @property
    def graded(self) -> bool:
        return bool(self.terms)

    def prompt(self, example: Conversation) -> Prompt:
        return example.prompt

    def demonstration(self, example: Conversation) -> str:
        """The assistant's last words."""
        return next(x["content"] for x in reversed(example.messages) if x["role"] == "assistant")

    def row(self, example: Conversation, tokenizer: Tokenizer) -> Row:
        """A conversation in tokens, those of the chat template.

        What a turn was asked with is the template's prompt for the messages before it. Where that is no
        continuation of what was said (some templates take thoughts out of earlier turns), it begins a
        new context.
        """
        if isinstance(example.prompt, str) and not tokenizer.chats:
            asked = tokenizer.prompt(example.prompt)
            text = tokenizer.encode(self.demonstration(example))
            self._require_no_end(text, tokenizer, example.where)
            whole = [*asked, *text, tokenizer.end(example.prompt)]
            return Row(whole, [(len(asked), len(whole))], [])
        tokens, turns, restarts, begin = list[int](), [], [], 0
        turn = partial(tokenizer.turns, tools=example.tools)
        for i in range(example.first, len(example.messages)):
            if example.messages[i]["role"] != "assistant":
                continue
            where = f"{example.where}, message {i}"
            try:
                before = turn(example.messages[:i], add_generation_prompt=True)
                after = turn(example.messages[: i + 1])
                content = tokenizer.encode(example.messages[i]["content"])
            except UserError as error:
                raise UserError(f"{where}: {error}") from error
            if not before or after[: len(before)] != before:
                raise UserError(
                    f"{where}: the chat template begins this turn otherwise than one that it asks for (are there "
                    "thoughts that it takes out, or a space in front?): change the row, or leave it out"
                )
            self._require_no_end(content, tokenizer, where)
            ends = [at for at in range(len(before), len(after)) if after[at] in tokenizer.stops]
            if not ends:
                raise UserError(
                    f"{where}: the chat template ends the turn with no token that ends a response: name that in "
                    "eos_token_id of the model's generation_config.json"
                )
            if before[: len(tokens) - begin] != tokens[begin:]:
                begin = len(tokens)
                restarts.append((begin, begin + len(before)))
            tokens += before[len(tokens) - begin :]
            turns.append((len(tokens), len(tokens) + ends[0] + 1 - len(before)))
            tokens += after[len(before) : ends[0] + 1]
        return Row(tokens, turns, restarts)

    @staticmethod
    def _require_no_end(content: Sequence[int], tokenizer: Tokenizer, where: str) -> None:
        """A UserError if a turn has a token in it that would end it."""
        if not {*content}.isdisjoint(tokenizer.stops):
            raise UserError(
                f"{where}: there is a token in it that ends a response: change the row, or leave it out"
            )


@dataclass(frozen=True)
class Later:
    """`make`s a task when a run begins; that it is `graded` is known before its data are read."""

    make: Callable[[], Conversations]
    graded: bool

    def __call__(self, folder: Path, /) -> Conversations:
        del folder
        return self.make()


def task(
    source: str,
    specs: Sequence[str] = (),
    *,
    weights: Sequence[float] = (),
    test: str = "",
    held_out: int = questions.HELD_OUT,
    **columns: str,
) -> Conversations:
    """Conversations of a file or a data set at the hub, as `questions.task` has questions.

    A row has `messages` and perhaps `tools`, or a prompt and a completion, each a text or messages.
    With rewards (`specs`) it needs what these need, such as an answer. The columns are named by
    `prompt_column`, `completion_column` and `answer_column`.
    """
    terms = questions.terms(specs, weights)
    needs = any(spec.partition(":")[0] in questions.rewards.NEEDS_TRUTH for spec in specs)
    each = partial(_conversation, needs=needs, **columns)
    read = lambda files: [one for _, one in questions.read_rows(files, each)]
    return Conversations(*questions.split(source, test, held_out, read), terms)


def _conversation(
    row: Any,
    where: str,
    *,
    needs: bool = False,
    prompt_column: str = "",
    completion_column: str = "",
    answer_column: str = "",
) -> Conversation:
    """The conversation in a row; a UserError that says what is wrong with it."""
    text = False
    if not (prompt_column or completion_column) and row.get("messages") is not None:
        messages, first = _messages(row["messages"]), 0
    else:
        name = tables.column(row, prompt_column, tables.PROMPTS, "--prompt-column")
        said = row[tables.column(row, completion_column, COMPLETIONS, "--completion-column")]
        asked = tables.prompt_of(row, prompt_column) if isinstance(row[name], str) else row[name]
        text = isinstance(asked, str) and isinstance(said, str)
        before = _messages(asked, "user")
        messages, first = [*before, *_messages(said, "assistant")], len(before)
    spoken = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    if not spoken:
        raise UserError("there is no turn of the assistant to learn from")
    tools = row.get("tools")
    tools = _without_none(json.loads(tools) if isinstance(tools, str) and tools else tools) or None
    prompt: Any = (_WithTools if tools else tuple)(messages[: spoken[-1]])
    if tools:
        prompt.tools = tools
    truths = ()
    if needs:
        try:
            answer = tables.answer_of(row, answer_column)
        except UserError:
            if answer_column:
                raise
            answer = messages[spoken[-1]]["content"]
        truths = tables.truths(answer)
    if needs and not truths:
        raise UserError("the answer is empty, and a reward needs one")
    prompt = messages[0]["content"] if text else prompt
    return Conversation(
        prompt, truths, row, messages=messages, first=first, tools=tools, where=where
    )


def _messages(value: Any, role: str | None = None) -> list[dict[str, Any]]:
    """Messages as chat templates take them; a text is one by this role."""
    if isinstance(value, str):  # a spreadsheet has messages as JSON
        listed = role is None and value.lstrip().startswith("[")
        value = json.loads(value) if listed else [{"role": role, "content": value}]
    try:
        messages = [_without_none({**one}) for one in value]
    except (AttributeError, TypeError) as error:
        raise UserError(f"messages are a list of role and content, not {value!r:.60}") from error
    for i, one in enumerate(messages):
        if one.get("role") not in ROLES:
            known = ", ".join(ROLES)
            raise UserError(f"message {i} has the role {one.get('role')!r}, none of {known}")
        content, role = one.setdefault("content", ""), one["role"]
        if not isinstance(content, str):
            raise UserError(f"message {i} has as its content no text: {content!r:.60}")
        valid_unicode(content)
        if role in ("user", "assistant") and not content.strip() and not one.get("tool_calls"):
            raise UserError(f"message {i}, of the {role}, is empty")
        for call in one.get("tool_calls", ()):
            function = call.get("function", call)
            function["arguments"] = call_arguments(function)
    return messages


def _without_none(value: Any) -> Any:
    """Without the fields that parquet adds, where another row has them."""
    if isinstance(value, Mapping):
        return {key: _without_none(x) for key, x in value.items() if x is not None}
    return [*map(_without_none, value)] if isinstance(value, list | tuple) else value
