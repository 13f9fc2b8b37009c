"""Environments of the package `verifiers`, unmodified, in a Python of their own."""

import socket
import sys
import threading
from contextlib import closing
from itertools import pairwise
from random import Random

import httpx
import pytest

from jaxrl_llm.adapters import verifiers
from jaxrl_llm.adapters.verifiers import Verifiers
from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import TokenTask, trajectories
from jaxrl_llm.models import qwen2, tokenizer
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.qwen2 import Shape
from jaxrl_llm.objectives import Objective, advantages
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.training import journal
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.run import train
from tests import tiny
from tests.adapters import adding
from tests.tasks import templates

HEADER = "<|im_start|>assistant"  # which the default renderer looks for, whatever the template
WORDS = (*map(str, range(8)), "?", "ask", "first", "second", ":", HEADER)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}: {{ m.content }} <eos> {% else %}"
    "{{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
)


def task_of(forgets=False):
    renderer = {"name": "default", "chat_template": TEMPLATE}
    return adding.task_of("bigger", renderer, {"forgets": forgets})


@pytest.fixture
def task():
    with closing(task_of()) as made:
        yield made


def test_the_tokens_are_those_of_its_requests(task):
    words, row = tokenizer.of_words(WORDS), task.train[0]
    known = TokenTask(task, words)
    first, second, _ = row.question.split()
    larger = max(first, second)
    assert [words.decode(p) for p in known.prompts(task.train[:2])] == [
        f"{one.question} :" for one in task.train[:2]
    ]
    said = [["ask", larger], [min(first, second)], ["ask", "ask", "ask"], ["? ? ?"]]
    played = known.replay([row] * 4, said)
    told = "first" if first == larger else "second"
    assert [words.decode(one.tokens).replace("<eos> ", "") for one in played] == [
        f"ask {told} : {larger}",
        min(first, second),
        f"ask {told} : ask {told} : ask",
        "? ? ?",
    ]
    rewards = [one.reward for one in played]
    assert [(r.score, r.correct) for r in rewards] == [(1.0, True)] + [(0.0, False)] * 3
    assert [r.fields["asked"] for r in rewards] == [1.0, 0.0, 2.0, 0.0]
    assert [r.graded for r in rewards] == [True] * 4


def demonstration(row):
    """Some ask, and choose at random all the same."""
    rng = Random(row.question)
    return [*rng.choice([[], ["ask"]]), rng.choice(row.question.split()[:2])]


def config(task, *, steps=3, warm=3, forgets=False):
    collate = Collator(prompt_length=8, response_length=16)
    return Config(
        task=lambda folder: task,
        model=Scratch(Shape(32, 64, 128, 2, 2, 1, tied=True), words=WORDS),
        objective=Objective(advantage=advantages.grpo),
        optimizer=optimizers.adamw(2e-3),
        collate=collate,
        sampling=Sampling(max_turns=4),
        steps=steps,
        prompts=8,
        group_size=4,
        warm_start=WarmStart(
            steps=warm,
            collate=collate,
            optimizer=optimizers.adamw(3e-3),
            demonstration=demonstration,
        ),
        evaluation=Evaluation(every=steps, validation=10),
    )


@pytest.mark.slow
def test_a_run_learns_from_its_rewards(task, tmp_path):
    train(config(task), tmp_path / "run")
    steps = [r for r in journal.read(tmp_path / "run") if "reward" in r]
    assert [r["step"] for r in steps] == [4, 5, 6]
    assert all(r["ungraded"] == 0 for r in steps)
    assert all(r["turns"] >= 1 and "reward/asked" in r for r in steps)


@pytest.mark.slow
def test_a_request_that_leaves_something_out_begins_a_segment(tmp_path):
    with closing(task_of(forgets=True)) as task:
        words, row = tokenizer.of_words(WORDS), task.train[0]
        first, second, _ = row.question.split()
        told = "first" if first > second else "second"
        [played] = TokenTask(task, words).replay([row], [["ask", max(first, second)]])
        again = f"{first} {second} ? {told} :"
        assert words.decode(played.tokens) == f"ask <eos> {again} {max(first, second)}"
        assert (played.turns, played.restarts) == (((0, 2), (7, 9)), ((2, 7),))
        assert played.reward.score == 1.0
        train(config(task, forgets=True), tmp_path / "run")
    steps = [r for r in journal.read(tmp_path / "run") if "reward" in r]
    assert all(r["ungraded"] == 0 for r in steps)
    assert max(r.get("segments", 1.0) for r in steps) > 1


def call(a, b, name="add"):
    arguments = f'{{"a": {a}, "b": {b}}}'
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAID = {  # turns about "0 3 ?", what a tool says after each but the last, the reward (None: ungraded)
    "a call": ([call(0, 3), "3"], ["3"], 1.0),
    "written as by no template": (
        ['So: <tool_call>{"arguments":{"b":3, "a":0},"name":"add"}</tool_call>', " 3 "], ["3"], 1.0
    ),
    "two calls": (
        [call(0, 3) + call(1, 1), "2"], ["3\n</tool_response>\n<tool_response>\n2"], 0.0
    ),
    "what the tool refuses": ([call(9, 3), "3"], ["Error executing tool add: too large"], 1.0),
    "no JSON": (['<tool_call>{"name": "add", </tool_call>'], [], 0.0),
    "what the harness fails at": ([call(0, 3, "sub")], [], None),
}  # fmt: skip
GIVEN = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)


def test_results_of_tools_are_given_tokens():
    with closing(adding.task_of("adder", {"name": "qwen3"}, train=4, test=0)) as task:
        made, row = templates.of_bytes(None), task.train[3]
        known = TokenTask(task, made)
        played = known.replay([row] * len(SAID), [turns for turns, *_ in SAID.values()])
    assert '"description": "The sum of two numbers below 8."' in made.decode(played[0].prompt)
    for one, (turns, results, reward) in zip(played, SAID.values(), strict=True):
        response, spans, found = one.tokens, one.turns, one.reward
        assert [made.decode(response[start:end]) for start, end in spans] == turns
        given = [made.decode(response[end:start]) for (_, end), (start, _) in pairwise(spans)]
        assert given == [GIVEN.format(result) for result in results]
        assert (found.score if found.graded else None) == reward
    assert adding.require_what_the_package_has(played) == [1, 1, 2, 1, 0]


def test_a_policy_that_calls_tools():
    made = adding.words()
    shape = tiny.shape(vocab_size=len(made), tied=False)
    model = Policy(qwen2.graph(shape)[0])
    known = adding.task_of("adder", {"name": "qwen3"}, train=4, test=0)
    with closing(known) as task, Native().start(model, tiny.mesh_of()) as sampler:
        sampler.push(adding.weights(shape, made), 1)
        sampling = Sampling(max_tokens=60, max_turns=4, stop=made.stops)
        groups = TokenTask(task, made).answer(
            sampler, task.train, n=8, sampling=sampling, stop=Stop()
        )
    results = adding.require_what_the_package_has(trajectories(groups))
    assert len(results) > 16
    assert {0, 1} < {*results}


def test_an_episode_that_is_given_up_ends(task, monkeypatch):
    words, row = tokenizer.of_words(WORDS), task.train[0]
    known, start = TokenTask(task, words), task._start(row)
    known.prompts([row])
    monkeypatch.setattr(task, "_start", lambda _: start)
    known.replay([row], [["ask"]])  # and then nothing
    with httpx.Client(**{**task.server, "timeout": 300}) as client:
        assert client.post("/step", json={"id": start["id"]}).text == "the episode is over"


def test_an_environment_that_fails_leaves_its_episode_ungraded(task):
    words = tokenizer.of_words(WORDS)
    known = TokenTask(task, words)
    known.prompts(task.train[:1])
    task.close()
    assert not known.try_reward(task.train[0], ["ask", "3"]).graded


def test_the_routes_want_the_key_on_the_loopback_interface(task):
    url = task.server["base_url"]
    assert url.startswith("http://127.0.0.1:")
    for route in ("/step", "/inference/v1/generate"):
        for headers in ({}, {"X-Key": "no"}):
            assert httpx.post(url + route, json={}, headers=headers).status_code == 401


def test_what_does_not_end_is_ended(tmp_path, monkeypatch):
    """As where an environment blocks its process."""
    monkeypatch.setattr(verifiers, "_GRACE", 0.2)
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho \'["http://127.0.0.1:1", "", [["", "1 2 ?"]]]\'\nexec sleep 60\n'
    )
    python.chmod(0o755)
    task = Verifiers("bigger", python=python, train=1, test=0)
    _, _, (process, _), _ = task.close.peek()
    task.close()
    assert process.returncode == -9


def test_an_episode_that_is_given_up_waits_for_no_server(monkeypatch):
    monkeypatch.setattr(verifiers, "_GRACE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        episode = verifiers.Episode({"base_url": url, "timeout": None}, {}, [], [])
        episode._name = "one"
        ending = threading.Thread(target=episode.__del__, daemon=True)
        ending.start()
        ending.join(120)
        assert not ending.is_alive()


def test_what_does_not_start_is_one_line():
    with pytest.raises(UserError, match="cannot be started"):
        Verifiers("bigger", python="/nonexistent/python")
    with pytest.raises(UserError, match="did not start"):
        Verifiers("bigger", python=sys.executable)  # has no verifiers
