"""Agents that ask an OpenAI endpoint for turns, in any language, as the other side of episodes."""

import asyncio
import inspect
import json
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxrl_llm.background import in_background, loop
from jaxrl_llm.childprocess import end_session, environment
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.models.tokenizer import Tokenizer
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.endpoint import RefusedError, endpoint
from jaxrl_llm.tasks.mixture import check_single
from jaxrl_llm.tasks.task import (
    Hidden,
    NewContext,
    Reply,
    Task,
)
from jaxrl_llm.tasks.tools import Form, Toolbox, call_arguments, following

_OUTPUT = 1 << 20  # bytes of what a command prints that are read
_FIXED = {  # what a request may say of these, beside nothing: the run decides, or no engine can
    "n": (1,),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "top_logprobs": (0,),
}


@dataclass(frozen=True)
class Agent:
    """A program that asks a model at an OpenAI endpoint, as it is but for the URL and the key.

    `run` is a function `(example, url, key)`, which has a thread and may be `async`, or a command,
    which has them as OPENAI_BASE_URL and OPENAI_API_KEY, the example as JSON on its standard
    input, and `variables` of ours beside PATH and HOME. `form` reads the calls of tools, as in `Toolbox`.
    """

    run: Callable[[Any, str, str], Any] | Sequence[str]
    variables: Sequence[str] = ()
    form: Form | None = None

    def __post_init__(self):
        if isinstance(self.run, str):
            raise UserError(f"agent: run = {self.run!r} is one text: write its words, as in a list")

    def for_task(self, task: Task[Any]) -> "WithAgent":
        """The task, with episodes in which the agent asks the policy.

        `task.reward` gets the text that the agent returns or prints. A function may also return a
        Reward, or a number, which is correct from 1 on. The prompt is for people alone.
        """
        return WithAgent(task, self)


class WithAgent:
    """A task whose episodes are runs of an agent."""

    def __init__(self, task: Task[Any], agent: Agent):
        check_single(task, "agent")
        self.name, self.train, self.test = task.name, task.train, task.test
        self.task, self.agent = task, agent

    def prompt(self, example: Any) -> Hidden:
        return Hidden(self.task.prompt(example))

    def environment(self, example: Any, tokenizer: Tokenizer) -> "Episode":
        return Episode(self.agent, partial(self.task.reward, example), example, tokenizer)


class Episode:
    """An episode, whose turns answer the requests of an agent that begins with it."""

    def __init__(
        self, agent: Agent, judge: Callable[[str], Reward], example: Any, tokenizer: Tokenizer
    ):
        self._judge = judge
        self._session = _Session(agent, example, tokenizer)

    async def begin(self) -> Any:
        self._session.start()
        return await self._next()

    async def step_with_logps(self, tokens: Sequence[int], logps: Sequence[float]) -> Any:
        if not self._session.turn.done():  # the agent may have ended meanwhile
            self._session.turn.set_result(([*tokens], [*logps]))
        return await self._next()

    async def _next(self) -> Reply:
        """The tokens of the next request, or a reward; it is made in a thread, for it may take long."""
        try:
            message = await self._session.says.get()
        except asyncio.CancelledError:  # it takes too long
            self._session.end()
            raise
        if isinstance(message, list):
            return message, Reward(0.0, False)
        if isinstance(message, BaseException) and self._session.cut:
            return None, Reward(0.0, False)
        return partial(self._graded, message)  # pyright: ignore[reportReturnType]

    def _graded(self, end: Any) -> tuple[None, Reward]:
        if isinstance(end, BaseException):
            raise end
        if isinstance(end, str):
            return None, self._judge(end)
        return None, end if isinstance(end, Reward) else Reward(float(end), end >= 1)

    def __del__(self):
        loop("environments").call_soon_threadsafe(self._session.end)


class _Session:
    """The requests of an agent and the turns that answer them, in the loop of environments."""

    def __init__(self, agent: Agent, example: Any, tokenizer: Tokenizer):
        self.agent, self.example, self.tokenizer = agent, example, tokenizer
        self.says = asyncio.Queue[Any]()  # the tokens of a request; or what the agent ends with
        self.turn: asyncio.Future[tuple[list[int], list[float]]] = asyncio.Future(
            loop=loop("environments")
        )
        self.cut = False
        self._key, self._context, self._calls = endpoint().new_key(), list[int](), 0
        self._messages, self._tools = list[dict[str, Any]](), list[Any]()  # also the answer
        self._asking = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the agent."""
        endpoint().answers[self._key] = self._answer
        self._running = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        """Ends a command, and answers nothing more."""
        endpoint().answers.pop(self._key, None)
        if self._running:
            self._running.cancel()
        if not self.turn.done():
            self.turn.cancel()

    async def _run(self) -> None:
        run, where = self.agent.run, (endpoint().url, self._key)
        try:
            if callable(run):
                call = partial(_returned, run, self.example, *where)
                end = await asyncio.shield(asyncio.wrap_future(in_background(call)))
            else:
                end = await self._printed(run, *where)
        except Exception as error:
            end = error
        if not self._context and not isinstance(end, BaseException):
            end = RuntimeError("the agent ended before it was answered")
        self.says.put_nowait(end)
        self.end()

    async def _printed(self, command: Sequence[str], url: str, key: str) -> str:
        """The text that the command prints; its process ends with all of its session."""
        variables = environment("HOME", "SSL_CERT_FILE", *self.agent.variables)
        variables |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        # files, not pipes: whoever does not read them holds up nobody
        with tempfile.TemporaryFile() as example, tempfile.TemporaryFile() as out:
            example.write(json.dumps(self.example, default=str).encode())
            example.seek(0)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=example, stdout=out, env=variables, start_new_session=True
            )
            end = weakref.finalize(self, end_session, process.pid)  # with the program, too
            try:
                status = await process.wait()
            finally:
                end()
            if status:
                raise RuntimeError(f"the agent ended with {status}: see its message above")
            out.seek(0)
            return out.read(_OUTPUT).decode(errors="replace").strip()

    async def _answer(self, path: str, body: Any) -> tuple[str, str]:
        """The answer to a request: a turn, as OpenAI's API has it."""
        chat = path.endswith("/chat/completions")
        async with self._asking:  # one after the other
            tokens, messages, tools = self._read(body, chat)
            anew = isinstance(tokens, NewContext)
            before = tokens if anew else [*self._context, *tokens]
            if self.cut or self._key not in endpoint().answers:
                raise RefusedError(410, "the episode is over")
            self.turn = asyncio.get_running_loop().create_future()
            self.says.put_nowait(tokens)
            try:
                turn, logps = await self.turn
            except asyncio.CancelledError:
                raise RefusedError(410, "the episode is over") from None
            self.cut = turn[-1] not in self.tokenizer.stops
            message, reason = self._as_message(turn, before if tools else None)
            self._context = [*before, *turn]
            self._messages, self._tools = [*messages, _plain(message)], tools
        size = {"prompt_tokens": len(before), "completion_tokens": len(turn)}
        reply: dict[str, Any] = {
            "id": f"chatcmpl-{self._key[:8]}-{len(self._context)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": body.get("model") or "policy",
            "usage": {**size, "total_tokens": len(self._context)},
        }
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if self.cut else reason}
        choice |= {"message": message} if chat else {"text": self.tokenizer.decode(turn)}
        if chat and body.get("logprobs"):
            pairs = zip(self.tokenizer.pieces(turn), logps, strict=True)
            each = [{"token": x, "logprob": y, "bytes": None, "top_logprobs": []} for x, y in pairs]
            choice["logprobs"] = {"content": each}
        if not body.get("stream"):
            return "application/json", json.dumps({**reply, "choices": [choice]})
        if chat:  # all of it in one piece
            reply["object"] = "chat.completion.chunk"
            calls = [{"index": i, **x} for i, x in enumerate(message.get("tool_calls", []))]
            choice["delta"] = choice.pop("message") | ({"tool_calls": calls} if calls else {})
        whole = json.dumps({**reply, "choices": [choice]})
        return "text/event-stream", f"data: {whole}\n\ndata: [DONE]\n\n"

    def _read(
        self, body: Any, chat: bool
    ) -> tuple[list[int], list[dict[str, Any]], list[Mapping[str, Any]]]:
        """The tokens that a request adds, or begins with anew; its messages and tools."""
        try:
            for name, fine in _FIXED.items():
                if body.get(name) not in (None, *fine):
                    raise RefusedError(400, f"{name} = {body[name]!r:.80} is not supported here")
            messages, tools = [*map(_plain, body["messages"])] if chat else [], []
            if chat:
                tools = body.get("tools") or []
                write = partial(
                    self.tokenizer.turns, tools=tools or None, add_generation_prompt=True
                )
                before, more = self._messages, messages[len(self._messages) :]
                if before and more and [*before, *more] == messages and tools == self._tools:
                    tokens = following(self.tokenizer, write, before, more)
                    return tokens, messages, tools
                tokens = write(messages)
            else:
                tokens = self.tokenizer.encode(body["prompt"])
        except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise RefusedError(400, f"the request cannot be read: {reason}") from error
        if not tokens:
            raise RefusedError(400, "the request has no token")
        size = len(self._context)
        if size and tokens[:size] == self._context and len(tokens) > size:
            return tokens[size:], messages, tools
        return NewContext(tokens), messages, tools

    def _as_message(
        self, turn: Sequence[int], after: Sequence[int] | None
    ) -> tuple[dict[str, Any], str]:
        """A turn as a message, and why it ended; it has calls only `after` what named tools."""
        text, calls = self.tokenizer.decode(turn), list[Any]()
        if after is not None and turn[-1] in self.tokenizer.stops:
            calls = Toolbox((), self.agent.form).read(self.tokenizer, text, after)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not calls or any(isinstance(one, str) for one in calls):
            return message, "stop"
        before, mark, _ = text.partition("<tool_call>")
        message |= {"content": before.strip() if mark else None, "tool_calls": []}
        for name, arguments in calls:
            self._calls += 1
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"id": f"call{self._calls:05}", "type": "function", "function": function}
            message["tool_calls"].append(call)
        return message, "tool_calls"


def _plain(one: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: a text, and arguments that are no text of JSON."""
    content = one.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    role = "system" if one["role"] == "developer" else one["role"]
    plain = {"role": role, "content": content}
    plain |= {key: one[key] for key in ("name", "tool_call_id") if one.get(key)}
    if calls := one.get("tool_calls"):
        plain["tool_calls"] = [
            {
                **call,
                "function": {**call["function"], "arguments": call_arguments(call["function"])},
            }
            for call in calls
        ]
    return plain


def _returned(run: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call, or the error that it raises, an exit too."""
    try:
        made = run(*arguments)
        return asyncio.run(made) if inspect.iscoroutine(made) else made
    except BaseException as error:
        return error
