"""Code that runs by the Python of `verifiers`, not the trainer's: its environments, and a server on
the loopback interface.

Environments ask it for turns by `/inference/v1/generate`, the trainer brings them by `/step`. What
an episode says last is its reward, or an error. All have to know the key.
"""

import asyncio
import hmac
import itertools
import json
import os
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from aiohttp import web


@dataclass
class Episode:
    """An episode under way: the turns brought to it, and what it says."""

    work: Any = None
    cut: bool = False  # its last turn was cut, so there is no other
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    says: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)


async def main(config: dict[str, Any], count: int, renderer: dict[str, Any]) -> None:
    """Serves episodes of the first `count` tasks until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    env = vf.load_environment(vf.resolve_env_config(config))
    tasks, episodes = list(itertools.islice(env.taskset, count)), dict[str, Episode]()
    key = secrets.token_urlsafe(32)

    async def play(episode: Episode, name: str, task: Any, tokenizer: str) -> dict[str, Any]:
        """The last message of an episode."""
        client = vf.TrainClientConfig(
            base_url=url,
            api_key_var="",  # none
            headers={"X-Key": key},
            renderer=renderer,
            renderer_model_name=tokenizer,
        )
        slot = await env.run_slot(env.slots(task)[0], vf.ModelContext(name, client))
        errors = [*slot.errors, *(error for trace in slot.traces for error in trace.errors)]
        if errors and not episode.cut:
            return {"error": f"{errors[-1].type}: {errors[-1].message}"}
        fields = {key: x for trace in slot.traces for key, x in trace.metrics.items()}
        fields |= {key: x and x.value for trace in slot.traces for key, x in trace.rewards.items()}
        fields = {key: float(x) for key, x in fields.items() if x is not None}
        reward = sum(trace.reward for trace in slot.traces) / len(slot.traces)
        return {"reward": float(reward), "fields": fields}

    async def work(episode: Episode, *task: Any) -> None:
        try:
            reply = await play(episode, *task)
        except Exception as error:  # environments raise anything
            reply = {"error": f"{type(error).__name__}: {error}"}
        episode.says.put_nowait(reply)

    async def step(request: web.Request) -> web.Response:
        """A turn for an episode (or a task for a new one), then what it says; or its end."""
        message = await request.json()
        name = message["id"]
        if "task" in message:
            episodes[name] = Episode()
        if (episode := episodes.get(name)) is None:
            raise web.HTTPBadRequest(text="the episode is over")
        if "task" in message:
            playing = work(episode, name, tasks[message["task"]], message["tokenizer"])
            episode.work = asyncio.create_task(playing)
        elif "tokens" in message:
            episode.turns.put_nowait(message)
        answer = {} if message.get("end") else await episode.says.get()
        if "prompt" not in answer or message.get("heard"):
            over = episodes.pop(name, episode)
            over.work.cancel()
            over.says.put_nowait({"error": "ended"})  # to a step that was given up
        return web.json_response(answer)

    async def generate(request: web.Request) -> web.Response:
        """Token ids in, a turn's token ids and log-probs out."""
        body = await request.json()
        if (episode := episodes.get(body["model"])) is None:
            raise web.HTTPBadRequest(text="the episode is over")
        async with episode.asking:
            if episode.cut:
                raise web.HTTPBadRequest(text="the episode is cut")
            episode.says.put_nowait({"prompt": body["token_ids"]})
            turn = await episode.turns.get()
            episode.cut = turn["cut"]
        pairs = zip(turn["tokens"], turn["logps"], strict=True)
        choice = {
            "token_ids": turn["tokens"],
            "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": x} for t, x in pairs]},
            "finish_reason": "length" if turn["cut"] else "stop",
        }
        return web.json_response({"request_id": secrets.token_hex(8), "choices": [choice]})

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> Any:
        if not hmac.compare_digest(request.headers.get("X-Key", ""), key):
            raise web.HTTPUnauthorized
        return await handler(request)

    app = web.Application(middlewares=[guard], client_max_size=2**28)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/step", step)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0])
    async with env.serving():
        rows = [(task.data.system_prompt or "", task.data.prompt_text) for task in tasks]
        print(json.dumps([url, key, rows]), file=out, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*json.loads(sys.argv[1])))
