"""Servers that are sick, each in its own way: no one of them ends a run or keeps the others waiting."""

import threading
import time
from collections import Counter

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts import work
from jaxrl_llm.rollouts.server import NoAnswer, Response
from jaxrl_llm.rollouts.work import Task, Work

TASKS = [Task((i,), i, i) for i in range(200)]


class Server:
    """Answers after `seconds`; `fault(number, prompt)` may raise."""

    def __init__(self, url, fault=lambda number, prompt: None, seconds=0.001):
        self.url, self.fault, self.seconds = url, fault, seconds
        self.asked = Counter()
        self.looked = 0
        self.name = "a-1"
        self._lock = threading.Lock()

    def ask(self, prompt, seed):
        with self._lock:
            self.asked[prompt] += 1
            number = self.asked.total()
        time.sleep(self.seconds)
        self.fault(number, prompt)
        return Response([seed], [-1.0], False)

    def label(self):
        return self.name


def look(server):
    server.looked += 1
    return server.name


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(work, "REST", (0.02, 0.1))


def done(servers, tasks=TASKS, width=16, patience=30.0, label=look):
    made = Work(tasks, servers, width, Server.ask, label)
    threads = made.threads()
    for thread in threads:
        thread.start()
    try:
        made.wait(lambda: None, patience)
    finally:
        made.stop()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert {place: r.tokens for place, r in made.responses.items()} == {
        t.place: [t.seed] for t in tasks
    }
    return made


def sick(number, prompt):
    raise NoAnswer("sick")


def test_one_sick_server_of_two_ends_nothing():
    well, ill = Server("well", seconds=0.01), Server("ill", sick)
    made = done([ill, well])
    assert well.asked.total() == len(TASKS)
    assert ill.asked.total() < 16 + 40  # one incident of sixteen, then one task after each rest
    assert made.retries == ill.asked.total()


def test_the_last_task_is_not_given_up_while_a_server_can_do_it():
    """The sick one has time to fail it many times over, while the other is at work on a long one."""
    well, ill = Server("well", seconds=1.0), Server("ill", sick)
    done([ill, well], tasks=TASKS[:2], width=1)
    assert max(ill.asked.values()) <= work.ATTEMPTS


def test_many_failures_of_one_cause_are_one_incident():
    """A server that is gone for a moment with sixteen responses: it rests once, and they come again."""
    gone = threading.Event()

    def fault(number, prompt):
        del prompt
        if number == 20:
            gone.set()
        if gone.is_set():
            raise NoAnswer("gone")

    def label(server):
        gone.clear()  # it is back by the time that somebody looks
        return look(server)

    server = Server("a", fault, seconds=0.005)
    made = done([server], label=label)
    assert 1 <= made.retries <= 20
    assert server.looked == 2


def test_a_task_that_every_server_fails_is_given_up():
    def fault(number, prompt):
        del number
        if prompt == (7,):
            raise NoAnswer("a poison")

    servers = [Server("a", fault), Server("b", fault)]
    with pytest.raises(
        UserError, match=r"a prompt of 1 tokens failed 5 times, last at .*: a poison"
    ):
        done(servers)
    assert all(server.asked[7,] <= work.ATTEMPTS for server in servers)


def test_a_server_that_fails_now_and_then_does_its_share():
    def fault(number, prompt):
        del prompt
        if number % 10 == 0:
            raise NoAnswer("now and then")

    a, b = Server("a", fault, seconds=0.01), Server("b", seconds=0.01)
    done([a, b], width=4)
    assert a.asked.total() > 10


def test_looking_after_a_server_that_hangs_keeps_no_other_waiting():
    hung, well = Server("hung"), Server("well")
    free = threading.Event()

    def label(server):
        if server is hung:
            free.wait(60)
        return look(server)

    start = time.monotonic()
    try:
        made = Work(TASKS, [hung, well], 16, Server.ask, label)
        for thread in made.threads():
            thread.start()
        made.wait(lambda: None, 30.0)
        assert time.monotonic() - start < 30
    finally:
        free.set()


def test_a_response_of_weights_that_came_meanwhile_is_asked_for_again():
    server = Server("a")

    def fault(number, prompt):
        del prompt
        if number == 30:
            server.name = "b-1"

    server.fault = fault
    made = done([server])
    assert 1 <= made.retries <= 16
    assert server.asked.total() == len(TASKS) + made.retries


def test_a_server_that_starts_again_meanwhile():
    server = Server("a")

    def fault(number, prompt):
        del prompt
        if number == 30:
            server.name = None

    def label(server):
        server.name = server.name or "c-1"
        return look(server)

    server.fault = fault
    assert done([server], label=label).retries >= 1
