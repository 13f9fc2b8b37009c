"""Agents behind an OpenAI endpoint: what they ask and are answered is what is learned from."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from jaxrl_llm.background import loop
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.groups import TokenTask, trajectories
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import endpoint as endpoints
from jaxrl_llm.tasks.agents import Agent
from jaxrl_llm.tasks.endpoint import endpoint
from jaxrl_llm.tasks.task import RewardSettings
from jaxrl_llm.training.leaving import Stop
from tests import tiny
from tests.adapters import adding
from tests.reference.peer import needed
from tests.tasks import templates
from tests.tasks.test_task import said as logged

FILES = Path(__file__).parent / "agents"
BYTES = templates.of_bytes(templates.QWEN25)
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
TOOL = {"name": "add", "description": "The sum of two numbers.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = 'So: <tool_call>{"arguments":{"b":4, "a":3},"name":"add"}</tool_call>'  # as no template writes it


class Sums:
    """The reward is 1 where the agent's answer is the sum."""

    name, train, test = "sums", ["3 + 4", "1 + 1"], ["2 + 2"]

    def prompt(self, example):
        return example

    def reward(self, example, response):
        right = response == str(sum(map(int, example.split(" + "))))
        return Reward(float(right), right)


def post(url, key, path="/chat/completions", **body):
    return httpx.post(
        url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=300
    )


def ask(url, key, messages, **more):
    reply = post(url, key, messages=messages, **more)
    reply.raise_for_status()
    return reply.json()["choices"][0]


def user(text):
    return {"role": "user", "content": text}


def adds(messages, message):
    """The messages after one with calls of `add`, with their results."""
    results = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": str(sum(json.loads(call["function"]["arguments"]).values())),
        }
        for call in message["tool_calls"]
    ]
    return [*messages, message, *results]


def tool_user(example, url, key):
    messages = [user(example)]
    while (choice := ask(url, key, messages, tools=TOOLS))["finish_reason"] == "tool_calls":
        messages = adds(messages, choice["message"])
    return ask(url, key, [user("So?")])["message"]["content"]


async def in_a_coroutine(*example):
    return await asyncio.to_thread(tool_user, *example)


def by_a_command(name):
    if name.endswith("mjs"):
        node = shutil.which("node") or pytest.skip("there is no node")
        return [node, str(FILES / name)]
    return [str(needed("JAXRL_VERIFIERS_PYTHON", "an interpreter with openai")), str(FILES / name)]


def known(run, tokenizer=BYTES, **settings):
    task = Agent(run).for_task(Sums())
    return TokenTask(task, tokenizer, RewardSettings(**settings))


def soon(work):
    return asyncio.run_coroutine_threadsafe(work, loop("environments"))


def texts(one, tokenizer=BYTES):
    """What the policy was given and what it said, in turn."""
    cuts = [0, *(place for span in one.turns for place in span)]
    return [tokenizer.decode(one.tokens[a:b], ended=False) for a, b in pairwise(cuts)]


ASKED = BYTES.decode(
    BYTES.turns([user("3 + 4")], tools=TOOLS, add_generation_prompt=True), ended=False
)
SO = "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
RESULT = (
    "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.parametrize(
    "run",
    [tool_user, in_a_coroutine, "tool_user.py", "tool_user.mjs"],
    ids=lambda run: getattr(run, "__name__", run),
)
def test_an_episode_is_what_the_agent_asks_and_is_answered(run):
    """What was sampled stays as it is, though the template would write it in another way."""
    run = by_a_command(run) if isinstance(run, str) else run
    [one] = known(run).replay(["3 + 4"], [[CALL, "It is 7", "7"]])
    end = "<|im_end|>"
    assert texts(one) == [ASKED, CALL + end, RESULT, f"It is 7{end}", SO, f"7{end}"]
    assert [span[0] for span in one.restarts] == [0, one.turns[1][1]]
    assert (one.reward, one.turn_rewards) == (Reward(1.0, True), (0.0, 0.0, 1.0))


def test_a_history_that_the_agent_edits_begins_anew():
    def forgets(example, url, key):
        messages = [user(example), *[ask(url, key, [user(example)])["message"]]]
        ask(url, key, [*messages, user("And?")])
        short = [{"role": "system", "content": "You said 1."}, user("And now?")]
        return ask(url, key, short)["message"]["content"]

    [one] = known(forgets).replay(["3 + 4"], [["1", "2", "7"]])
    header = "<|im_start|>assistant\n"
    assert texts(one)[2] == f"\n<|im_start|>user\nAnd?<|im_end|>\n{header}"
    short = (
        f"<|im_start|>system\nYou said 1.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n{header}"
    )
    assert texts(one)[4] == short
    assert [one.tokens[a:b] for a, b in one.restarts][1] == BYTES.encode(short)
    assert [BYTES.decode(prompt) for prompt, _, _ in one.segments][1] == short
    assert one.reward.score == 1.0


def test_an_answer_is_of_the_form_that_clients_read():
    heard = []

    def agent(example, url, key):
        auth = {"Authorization": f"Bearer {key}"}
        heard.append(httpx.get(f"{url}/models", headers=auth).json()["data"][0]["id"])
        heard.append(
            post(url, key, "/completions", prompt="3 + 4 =", temperature=9, max_tokens=1).json()
        )
        heard.append(post(url, key, messages=[user(example)], tools=TOOLS, logprobs=True).json())
        heard.append(post(url, key, messages=[user(example)], tools=TOOLS, stream=True).text)
        return "7"

    [one] = known(agent).replay(["3 + 4"], [["7!", CALL, CALL]])
    name, completion, chat, stream = heard
    assert name == "policy"
    assert completion["choices"] == [{"index": 0, "finish_reason": "stop", "text": "7!"}]
    assert completion["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    [choice] = chat["choices"]
    assert choice["message"]["content"] == "So:"
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "b": 4}
    assert "".join(x["token"] for x in choice["logprobs"]["content"]) == f"{CALL}<|im_end|>"
    chunk, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert done == "[DONE]"
    [choice] = json.loads(chunk)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["tool_calls"][0]["index"] == 0
    assert one.reward.score == 1.0


def test_requests_at_the_same_time_are_turns_one_after_the_other():
    def agent(example, url, key):
        with ThreadPoolExecutor(4) as pool:
            said = [*pool.map(lambda i: ask(url, key, [user(str(i))]), range(4))]
        return "".join(sorted(one["message"]["content"] for one in said))

    [one] = known(agent).replay(["3 + 4"], [["1", "2", "3", "4"]])
    assert len(one.segments) == len(one.turns) == 4
    assert one.reward == Reward(0.0, False)  # "1234" is no sum


RETURNED = [("7", 1.0), ("8", 0.0), (0.5, 0.5), (1, 1.0), (Reward(2.0, True), 2.0)]


@pytest.mark.parametrize(("returned", "score"), RETURNED, ids=str)
def test_the_reward_is_of_what_the_agent_returns(returned, score):
    agent = lambda example, url, key: ask(url, key, [user("?")]) and returned
    assert known(agent).try_reward("3 + 4", ["7"]) == Reward(score, score >= 1)


def never_asks(example, url, key):
    return "7"


def hangs(example, url, key):
    time.sleep(3600)


def raises(example, url, key):
    raise LookupError("no such file")


def raises_later(example, url, key):
    ask(url, key, [user("?")])
    raise LookupError("no such file")


def is_refused(example, url, key):
    ask(url, key, [user("?")], n=2)


BAD = [
    (never_asks, "RuntimeError in .*the agent ended before it was answered"),
    (hangs, "TimeoutError in .*no result after 1 s"),
    (raises, r"LookupError in raises \(.*test_agents.py:\d+\): no such file"),
    (raises_later, r"LookupError in raises_later \(.*test_agents.py:\d+\): no such file"),
    (is_refused, "HTTPStatusError in .*400 Bad Request"),
    (lambda *_: 1 / 0, "ZeroDivisionError in "),
    (lambda *_: sys.exit(0), r"RuntimeError in .*it called exit\(0\)"),
    ([sys.executable, "-c", "exit(3)"], "RuntimeError in .*the agent ended with 3"),
    (["/nonexistent/agent"], "FileNotFoundError in .*/nonexistent/agent"),
]


@pytest.mark.parametrize(("run", "message"), BAD)
def test_an_agent_that_fails_leaves_its_episode_ungraded(run, message, caplog):
    played = known(run, seconds=1.0).replay(["3 + 4"] * 2, [["7"]] * 2)
    assert [one.reward.graded for one in played] == [False] * 2
    [line] = logged(caplog)
    assert re.search(message, line), line


def test_an_agent_whose_answer_is_cut_has_the_reward_that_it_comes_to():
    """One that asks for more than there is has 0."""
    task, cut = known(tool_user).task, BYTES.encode("7, I th")
    for more, score in ((False, 1.0), (True, 0.0)):
        reasons = []

        def agent(example, url, key, more=more, reasons=reasons):
            choice = ask(url, key, [user(example)])
            reasons.append(choice["finish_reason"])
            return tool_user(example, url, key) if more else choice["message"]["content"][0]

        episode = Agent(agent).for_task(task.task).environment("3 + 4", BYTES)
        assert soon(episode.begin()).result(60)
        step = episode.step_with_logps(cut, [0.0] * len(cut))
        said = soon(step).result(60)
        given, reward = said() if callable(said) else said
        assert (given, reward.score, reasons) == (None, score, ["length"])


@pytest.fixture
def waiting():
    """The URL and key of an agent that waits for an answer, and one of another."""
    keys, leave = [], threading.Event()

    def agent(example, url, key):
        keys.append(key)
        leave.wait(120)
        ask(url, key, [user("?")])

    task = Agent(agent).for_task(Sums())
    episodes = [task.environment("3 + 4", BYTES) for _ in range(2)]
    begun = [soon(one.begin()) for one in episodes]
    while len(keys) < 2:
        time.sleep(0.01)
    yield endpoint().url, *keys
    leave.set()
    del episodes
    for one in begun:
        one.cancel()


def test_requests_that_are_not_an_agents_are_refused(waiting):
    url, key, other = waiting
    name, proof = key.split("-")
    wrong = ["x", name, f"{name}-", f"{name}-{other.split('-')[1]}", f"x-{proof}", "é-é"]
    for one in wrong:
        bytes_ = b"Bearer " + one.encode()
        reply = httpx.post(f"{url}/chat/completions", json={}, headers={"Authorization": bytes_})
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, 401), one
    assert httpx.post(f"{url}/chat/completions", json={}).status_code == 401
    auth = {"Authorization": f"Bearer {key}"}
    for path in (
        "/../v1/models",
        "/v1/../../etc/passwd",
        "/v1/%2e%2e/models",
        "//",
        "/",
        "/v1/models/x",
    ):
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            assert raw.recv(100).startswith(b"HTTP/1.1 404 "), path
    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"7", b"null", b"{}"):
        reply = httpx.post(f"{url}/chat/completions", content=body, headers=auth)
        assert (reply.status_code, "Traceback" in reply.text) == (400, False), body[:9]
    bad = [
        {"messages": []} | {"n": 2},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"content": "x"}]},
        {"messages": ["x"]},
        {"messages": "x"},
        {"messages": [user("x")], "stop": ["\n"]},
        {"messages": [user("x")], "response_format": {"type": "json_object"}},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
    ]
    for one in bad:
        reply = post(url, key, **one)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "Bad Request"), one


def test_what_is_too_long_or_too_slow_is_not_read(waiting, monkeypatch):
    url, key, _ = waiting
    place = "127.0.0.1", httpx.URL(url).port
    head = f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
    for field, status in (
        ("Content-Length: 100000000", b"413"),
        ("Transfer-Encoding: chunked", b"411"),
    ):
        with socket.create_connection(place) as raw:
            raw.sendall(f"{head}{field}\r\n\r\n".encode() + b"x" * 1000)
            assert raw.recv(100).startswith(b"HTTP/1.1 " + status)
    monkeypatch.setattr(endpoints, "_SECONDS", 0.3)
    for sent in (f"{head}Content-Length: 9\r\n\r\n12", head, "", "x" * 70_000, "a b\r\n\r\n"):
        with socket.create_connection(place) as raw:
            raw.settimeout(60)
            raw.sendall(sent.encode())
            with suppress(ConnectionResetError):
                assert raw.recv(100) == b""  # closed
    assert post(url, key, n=2).status_code == 400  # others are answered


def test_it_listens_on_the_loopback_interface_alone():
    assert endpoint()._server.result().sockets[0].getsockname()[0] == "127.0.0.1"
    assert endpoint() is endpoint()


def test_an_agent_that_asks_after_the_end_is_told_so():
    late, heard, keys = threading.Event(), [], []

    def agent(example, url, key):
        ask(url, key, [user("?")])
        keys.append(key)

        def again():
            late.wait(120)
            heard.append(post(url, key, messages=[user("?")]))

        threading.Thread(target=again).start()
        return "7"

    assert known(agent).try_reward("3 + 4", ["7"]).score == 1.0
    late.set()
    while not heard:
        time.sleep(0.01)
    assert heard[0].status_code == 410
    assert heard[0].json()["error"]["message"] == "the episode is over"
    assert keys[0] not in endpoint().answers


@pytest.mark.parametrize("late", [False, True])
def test_a_command_ends_with_all_that_it_has_started(late, tmp_path):
    """When it ends, and when it is too late."""
    program = (
        "import os, subprocess, sys, time\n"
        "other = subprocess.Popen(['sleep', '3600'])\n"
        "apart = subprocess.Popen(['sleep', '3600'], process_group=0)\n"  # as `timeout` does
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{other.pid}} {{apart.pid}}')\n"
        f"time.sleep({3600 if late else 0})\n"
    )
    reward = known([sys.executable, "-c", program], seconds=3.0).try_reward("3 + 4", ["7"])
    assert not reward.graded
    for pid in (tmp_path / "pids").read_text().split():
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(0.02)


LEAVES = """
import asyncio, pathlib, sys, time
from jaxrl_llm.background import loop
from jaxrl_llm.tasks.agents import Agent
from tests.tasks.test_agents import BYTES, Sums

place = pathlib.Path(sys.argv[1])
agent = Agent(["sh", "-c", f"echo $$ > {place}; exec sleep 3600"]).for_task(Sums())
episode = agent.environment("3 + 4", BYTES)
asyncio.run_coroutine_threadsafe(episode.begin(), loop("environments"))
while not (place.exists() and place.read_text()):
    time.sleep(0.02)
sys.exit(7)
"""


def test_a_command_ends_with_the_program(tmp_path):
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "pid")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 7
    place = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
    while place.exists() and " Z " not in (place / "stat").read_text():
        time.sleep(0.02)


def test_a_command_gets_the_example_and_few_variables(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("WANTED", "2")
    program = (
        "import json, os, sys, urllib.request\n"
        "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/completions',"
        " b'{\"prompt\": \"?\"}', {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
        "urllib.request.urlopen(request)\n"
        "print(json.load(sys.stdin)['x'], 'SECRET' in os.environ, os.environ['WANTED'])\n"
    )
    task = Sums()
    task.prompt = lambda example: "?"
    task.reward = lambda example, said: Reward(float(said == "5 False 2"), True)
    agent = Agent([sys.executable, "-c", program], variables=("WANTED",)).for_task(task)
    assert TokenTask(agent, BYTES).try_reward({"x": 5}, ["7"]).score == 1.0


# With an engine.

SPACED = """
{%- for m in messages %}<|im_start|> {{ m.role }} {{ m.content }}
{%- for call in m.tool_calls %} <tool_call> ? </tool_call>{% endfor %} <|im_end|> {% endfor %}
{%- if add_generation_prompt %}<|im_start|> assistant{% endif %}"""


def test_eight_agents_are_answered_by_an_engine_and_learned_from():
    """Texts are those of the tokens, and log-probs those of the trainer."""
    words, heard = adding.words(), {}
    words._inner.chat_template = SPACED

    def agent(example, url, key):
        messages, heard[key] = [user(example)], []
        while len(heard[key]) < 3:
            choice = ask(url, key, messages, tools=TOOLS, logprobs=True)
            heard[key].append(choice)
            if choice["finish_reason"] == "tool_calls":
                messages = adds(messages, choice["message"])
            else:
                messages = [*messages, choice["message"], user("?")]
        return "7"

    shape = tiny.shape(vocab_size=len(words), tied=False)
    definition = qwen2.graph(shape)[0]
    model, score = Policy(definition), jax.jit(partial(logprobs.of_responses, definition))
    params = adding.weights(shape, words)
    task = TokenTask(Agent(agent).for_task(Sums()), words)
    with Native(slots=8, prefill_prompts=4).start(model, tiny.mesh_of()) as sampler:
        sampler.push(params, 1)
        sampling = Sampling(max_tokens=120, max_turns=4, stop=words.stops)
        groups = task.answer(sampler, ["3 + 4"] * 2, n=4, sampling=sampling, stop=Stop())
    played = trajectories(groups)
    assert all(one.reward.graded and one.restarts[0][0] == 0 for one in played)
    by_text = {}
    for turns in heard.values():
        said = tuple("".join(x["token"] for x in one["logprobs"]["content"]) for one in turns)
        logps = [x["logprob"] for one in turns for x in one["logprobs"]["content"]]
        by_text.setdefault(said, []).append(logps)
    assert len(heard) == 8
    called = 0
    for one in played:
        said = tuple("".join(words.pieces(one.tokens[a:b])) for a, b in one.turns)
        ours = [one.logps[t] for t in one.sampled]
        assert any(np.allclose(ours, theirs, atol=0) for theirs in by_text[said[:3]])
        called += "<tool_call>" in "".join(said)
        for prompt, start, end in one.segments:
            row = np.asarray([*prompt, *one.tokens[start:end]], np.int32)
            inputs = logprobs.of_sequences([row], 1, 256)
            theirs = np.asarray(score(params, inputs))[0]
            for t in (t for t in one.sampled if start <= t < end):
                assert abs(theirs[len(prompt) + t - start - 1] - one.logps[t]) < 1e-4
    assert called > 2


def test_a_command_is_a_list_of_words():
    with pytest.raises(UserError, match=r"run = 'python agent.py' is one text: write its words"):
        Agent("python agent.py")
