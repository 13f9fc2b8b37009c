"""Python functions as tools: how a policy is told of them, calls them and hears what they return."""

import asyncio
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.errors import UserError, at_least, first_line
from jaxrl_llm.models.tokenizer import Tokenizer, library
from jaxrl_llm.tasks import deadline
from jaxrl_llm.tasks.mixture import check_single
from jaxrl_llm.tasks.task import (
    Demonstrator,
    Prompt,
    Reward,
    Step,
    Task,
    TeacherPrompter,
)

UNSAYABLE = "error"  # in place of results that a vocabulary of words has no tokens for
_TOLD = "You can call functions, which are described here in JSON, one a line:\n"
_HOW = (
    '\nTo call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call> and end your turn. '
    "You are then given its result. An answer without a call is final."
)
_ASKED = {"role": "user", "content": "?"}
_SAID = {"role": "assistant", "content": "!"}
_CALL = {"name": "f", "arguments": {"x": 1}}
_CALLED = _SAID | {
    "content": "",
    "tool_calls": [{"id": "call00000", "type": "function", "function": _CALL}],
}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array"}
_TYPES |= {dict: "object"}
_MARKS = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>\s*", re.DOTALL)

# a call: the name, and arguments by name or a text for the first one; or what is wrong with it
Call = tuple[str, Mapping[str, Any] | str] | str
Form = Callable[[str], list[Call]]  # the calls of a turn
Said = Sequence[Mapping[str, Any]]  # messages


def hermes(turn: str) -> list[Call]:
    """Calls as Hermes and Qwen write them: JSON in `<tool_call>`, any number; none in a thought."""
    calls, at = list[Call](), 0
    while mark := _MARKS.search(turn, at):
        begin = at = mark.end()
        if mark[0].startswith("<tool_call>"):
            with suppress(ValueError, RecursionError):  # its texts may have any mark in them
                at = json.JSONDecoder().raw_decode(turn, begin)[1]
            at += len(turn[at:].partition("</tool_call>")[0])
            calls.append(_in_json(turn[begin:at], "arguments"))
    return calls


def llama(turn: str) -> list[Call]:
    """The call that a whole turn of Llama 3.1 or 3.2 is: JSON, or what follows its tag."""
    said = turn.strip().removeprefix("<|python_tag|>")
    is_call = said != turn.strip() or (said.startswith("{") and '"name"' in said)
    return [_in_json(said, "parameters")] if is_call else []


def words(turn: str) -> list[Call]:
    """Calls in plain words, each up to a semicolon: `add 3 4 ;` gives `add` the text "3 4"."""
    pieces = [piece.strip().partition(" ") for piece in turn.split(";")[:-1]]
    return [(name, rest.strip()) for name, _, rest in pieces]


def call_arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of a call, which OpenAI has as a text of JSON, as chat templates want them."""
    given = function.get("arguments", {})
    with suppress(ValueError, RecursionError):  # what it is not, templates write as it is
        return json.loads(given) if isinstance(given, str) else given
    return given


def _in_json(text: str, key: str) -> Call:
    try:
        match json.loads(text):
            case {"name": str(name), **rest}:
                given = rest.get("arguments", rest.get("parameters", {}))
                if isinstance(given, dict):
                    return name, given
    except (ValueError, RecursionError) as error:
        return f"the call is no JSON: {first_line(error)}"
    return f'a call is {{"name": ..., "{key}": {{...}}}}'


@runtime_checkable
class SelfLimited(Protocol):
    """A tool that gives up late calls by itself: for it a toolbox's `seconds` do not count."""

    limits_itself: bool

    def __call__(self, *args: Any, **named: Any) -> Any: ...


@dataclass(frozen=True)
class Toolbox:
    """Functions as tools: their annotations and docstrings (with `Args:`) are told to the model.

    Types are those of JSON (int, float, str, bool, list[...], dict), unions of them and Literal. A
    function may be `async`. A wrong call, an exception or no result in `seconds` is answered by a
    line that says so. At most `calls` of a turn are made, and a result is cut after `characters`.
    `form` reads calls: `hermes`, `llama`, `words` or your own (None: as the chat template writes
    them; `hermes` if it does not know tools, `words` if there is none). Raises UserError for a
    function that is not described.
    """

    functions: Sequence[Callable[..., Any]]
    form: Form | None = None
    calls: int = 8
    seconds: float = 30.0
    characters: int = 2000

    def __post_init__(self):
        at_least(1, "tools", self, "calls", "characters")
        if len(self.schemas) < len(self.functions):
            raise UserError("tools: two functions have one name: rename one")
        for name, function in zip(self.schemas, self.functions, strict=True):
            kinds = {one.kind.name for one in inspect.signature(function).parameters.values()}
            if kinds - {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}:
                raise UserError(f"tools: {name}(): a model gives arguments by name: no *, ** or /")

    def for_task(self, task: Task[Any], *, whole: bool = False) -> "WithTools":
        """The task, with a policy that may call these tools before it answers.

        `task.reward` gets the last turn, which has no call (`whole`: all turns, on lines).
        """
        return WithTools(task, self, whole)

    @cached_property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The functions by name, as chat templates take them."""
        try:
            get = library().utils.chat_template_utils.get_json_schema
            return {function.__name__: get(function) for function in self.functions}
        except Exception as error:  # the library has an exception for each kind of mistake
            raise UserError(f"tools: {first_line(error)}") from error

    def answer(self, call: Call) -> tuple[str, bool]:
        """The result of a call as text, and whether it is one; UserError if the tool raises it."""
        try:
            function, arguments = self._checked(call)
            seconds = None if isinstance(function, SelfLimited) else self.seconds
            work = partial(function, **arguments)
            return self._shown(deadline.in_thread(work, seconds, self._late)), True
        except (Exception, SystemExit) as error:  # the call's mistakes, and tools raise anything
            return _wrong(error), False

    async def awaited(self, call: Call) -> tuple[str, bool]:
        """As `answer`; no thread waits for a coroutine."""
        try:
            function, arguments = self._checked(call)
            if not inspect.iscoroutinefunction(function):
                return await asyncio.to_thread(self.answer, call)
            work = function(**arguments)
            return self._shown(await deadline.awaited(work, self.seconds, self._late)), True
        except (Exception, SystemExit) as error:
            return _wrong(error), False

    def _late(self) -> Exception:
        return TimeoutError(f"no result in {self.seconds:g} s")

    def _shown(self, outcome: deadline.Outcome) -> str:
        """A result as text, cut after `characters`; TypeError or ValueError if it is no JSON."""
        made, error = outcome
        if error is not None:
            raise error
        text = made if isinstance(made, str) else json.dumps(made, default=str)
        text = text.encode(errors="replace").decode()  # JSON may have halves of characters
        more = len(text) - self.characters
        return f"{text[:-more]}... ({more} more characters)" if more > 0 else text

    def _checked(self, call: Call) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        """The function and its arguments, by name."""
        if isinstance(call, str):
            raise ValueError(call)
        name, arguments = call
        if name not in self.schemas:
            raise ValueError(f"no tool {name!r}: there is {', '.join(self.schemas)}")
        function = self.functions[[*self.schemas].index(name)]
        schema = self.schemas[name]["function"]["parameters"]["properties"]
        if isinstance(arguments, str):
            arguments = dict.fromkeys([*schema][:1], arguments)
        inspect.signature(function).bind(**arguments)
        for key, value in arguments.items():
            if not _fits(value, schema[key]):
                raise TypeError(f"{key} must be {json.dumps(schema[key])}")
        return function, arguments

    def prompt_ids(self, tokenizer: Tokenizer, messages: Said) -> list[int]:
        """Token ids of messages as a prompt that names the tools."""
        tools, reads = [*self.schemas.values()], _template(tokenizer)[1]
        if self.form or reads:
            tokens = tokenizer.turns(messages, tools=tools, add_generation_prompt=True)
            if reads or tokens != tokenizer.turns(messages, add_generation_prompt=True):
                return tokens
        text = _TOLD + "\n".join(json.dumps(one["function"]) for one in tools)
        text += _HOW if self.form in (None, hermes) else ""
        if messages[0]["role"] == "system":
            text, messages = f"{messages[0]['content']}\n\n{text}", messages[1:]
        system = {"role": "system", "content": text}
        return tokenizer.turns([system, *messages], add_generation_prompt=True)

    def read(self, tokenizer: Tokenizer, turn: str, after: Sequence[int] = ()) -> list[Call]:
        """The calls of a turn after these tokens, with which a thought may have begun."""
        there, form = _template(tokenizer)
        turn = tokenizer.opened((), after) + turn
        return (self.form or form or (hermes if there else words))(turn)

    def replied(
        self, tokenizer: Tokenizer, results: Sequence[str], prompt: Said = (_ASKED,)
    ) -> list[int]:
        """The tokens that follow a turn with calls, after the one that ended it.

        They are what the template adds to an assistant's turn after the prompt, for these results and
        the next turn. Without a template they are the results alone, or `UNSAYABLE` if no words of the
        vocabulary.
        """
        there, form = _template(tokenizer)
        for mark in tokenizer.marks:  # in a result they are text
            results = [text.replace(mark, f"{mark[:1]} {mark[1:]}") for text in results]
        if not there:
            try:
                return tokenizer.encode("\n".join(results))
            except UserError:
                return tokenizer.encode(UNSAYABLE)
        if form:
            tool = {"role": "tool", "name": "f", "tool_call_id": "call00000"}
            turn, given = _CALLED, [tool | {"content": text} for text in results]
        else:
            text = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in results)
            turn, given = _SAID, [{"role": "user", "content": text}]
        return following(tokenizer, partial(self.prompt_ids, tokenizer), [*prompt, turn], given)


def following(
    tokenizer: Tokenizer, write: Callable[[Said], list[int]], messages: Said, more: Said
) -> list[int]:
    """The tokens of `more` after those that end a turn, the last one of the messages."""
    before, after = write(messages), write([*messages, *more])
    ended = sum(token in tokenizer.stops for token in before)
    ends = [i for i, token in enumerate(after, 1) if token in tokenizer.stops]
    if not 0 < ended <= len(ends):
        raise UserError(
            "tools: the chat template ends a turn with no token that ends a response: name that "
            "in eos_token_id of generation_config.json"
        )
    return after[ends[ended - 1] :]


class Asked(tuple[Mapping[str, str], ...]):
    """A prompt as messages, whose tokens name the tools too if it goes by the chat template."""

    prompt: Prompt
    tools: Toolbox

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        plain = isinstance(self.prompt, str) and not tokenizer.chats
        return tokenizer.prompt(self.prompt) if plain else self.tools.prompt_ids(tokenizer, self)

    @classmethod
    def of(cls, prompt: Prompt, tools: Toolbox) -> "Asked":
        """A prompt, with these tools."""
        one = cls([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        one.prompt, one.tools = prompt, tools
        return one


class WithTools:
    """A task of episodes: turns with calls are answered by tools; one without ends it.

    Rewards have further fields, of the whole episode: `tool_used` (0 or 1), `tool_calls` and
    `tool_errors`.
    """

    def __init__(self, task: Task[Any], tools: Toolbox, whole: bool = False):
        check_single(task, "tools")
        self.name, self.train, self.test = task.name, task.train, task.test
        self.task, self.tools, self.whole = task, tools, whole
        if isinstance(task, Demonstrator):
            self.demonstration = task.demonstration
        if isinstance(task, TeacherPrompter):
            self._teacher_prompt = task.teacher_prompt
            self.teacher_prompt = self._for_teacher

    def prompt(self, example: Any) -> Asked:
        return Asked.of(self.task.prompt(example), self.tools)

    def _for_teacher(self, example: Any) -> Asked | None:
        prompt = self._teacher_prompt(example)
        return None if prompt is None else Asked.of(prompt, self.tools)

    def environment(self, example: Any, tokenizer: Tokenizer) -> "_Turns":
        join = "\n".join if self.whole else lambda said: said[-1]
        reward, asked = lambda said: self.task.reward(example, join(said)), self.prompt(example)
        opened = partial(tokenizer.opened, asked.prompt)
        return _Turns(self.tools, tokenizer, reward, asked, tokenizer.prompt(asked), opened)


@dataclass
class _Turns:
    """An episode with tools: what the policy said, how many calls that had, how many were wrong."""

    tools: Toolbox
    tokenizer: Tokenizer
    reward: Callable[[list[str]], Reward]
    prompt: Said
    context: Sequence[int]  # what the turn follows
    opened: Callable[[Sequence[int]], str]  # what the template has begun of a turn after these
    turns: list[str] = field(default_factory=list)
    calls: int = 0
    wrong: int = 0

    def __post_init__(self):
        if not _template(self.tokenizer)[0]:
            self.tokenizer.encode(UNSAYABLE)  # now, and not at the first result that it stands for

    def step(self, tokens: Sequence[int]) -> Step | Awaitable[Callable[[], Step]]:
        turn = self.tokenizer.decode(tokens)
        self.turns.append(self.opened(self.context) + turn)
        ended = len(tokens) > 0 and tokens[-1] in self.tokenizer.stops
        calls = self.tools.read(self.tokenizer, turn, self.context) if ended else []
        made = calls[: self.tools.calls]
        if any(map(inspect.iscoroutinefunction, self.tools.functions)):
            return self._later(calls, made)
        return self._replied(calls, [self.tools.answer(call) for call in made])

    async def _later(self, calls: list[Call], first: list[Call]) -> Callable[[], Step]:
        """The rest of the step, which is for a thread: a reward may take long."""
        answers = await asyncio.gather(*map(self.tools.awaited, first))
        return partial(self._replied, calls, answers)

    def _replied(self, calls: list[Call], answers: list[tuple[str, bool]]) -> Step:
        most = self.tools.calls
        answers += [(f"error: only {most} calls of a turn are made", False)] * (len(calls) > most)
        self.calls += len(calls)
        self.wrong += sum(not fine for _, fine in answers)
        counts = {"used": self.calls > 0, "calls": self.calls, "errors": self.wrong}
        counts = {f"tool_{name}": float(count) for name, count in counts.items()}
        reward = self.reward(self.turns)  # at every turn, since the episode may be cut after it
        reward = replace(reward, fields={**reward.fields, **counts})
        results = [text for text, _ in answers]
        if not calls:
            return None, reward
        self.context = self.tools.replied(self.tokenizer, results, self.prompt)
        return self.context, reward


@lru_cache(maxsize=8)
def _template(tokenizer: Tokenizer) -> tuple[bool, Form | None]:
    """True if there is a chat template, and in which form it writes a call (None: it does not)."""
    try:
        before = tokenizer.turns([_ASKED], add_generation_prompt=True)
    except UserError:
        return False, None
    try:
        turn = tokenizer.turns([_ASKED, _CALLED])[len(before) :]
    except UserError:
        return True, None
    end = next((i for i, token in enumerate(turn) if token in tokenizer.stops), len(turn))
    text = tokenizer.decode(turn[:end])
    return True, next(
        (form for form in (hermes, llama) if form(text) == [(*_CALL.values(),)]), None
    )


def _wrong(error: BaseException) -> str:
    """The text in place of a result; raises a UserError, which is for the caller."""
    if isinstance(error, UserError):
        raise error
    return f"error: {type(error).__name__}: {first_line(error)}"


def _fits(value: Any, kind: Mapping[str, Any]) -> bool:
    """True if a value read from JSON is of a schema; a whole number is a float too."""
    if value is None and kind.get("nullable"):
        return True
    if "anyOf" in kind:
        return any(_fits(value, one) for one in kind["anyOf"])
    if "enum" in kind:
        return any((type(one), one) == (type(value), value) for one in kind["enum"])
    if isinstance(value, list):
        kinds = kind.get("prefixItems", [kind.get("items", {})] * len(value))
        if len(kinds) != len(value) or not all(map(_fits, value, kinds)):
            return False
    if isinstance(value, dict):
        inner = kind.get("additionalProperties", {})
        if not all(_fits(one, inner) for one in value.values()):
            return False
    own, wanted = _TYPES.get(type(value)), kind.get("type", [])
    wanted = [wanted] if isinstance(wanted, str) else wanted
    return not wanted or own in wanted or (own == "integer" and "number" in wanted)
