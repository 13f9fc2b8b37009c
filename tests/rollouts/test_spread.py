"""Servers that are sick, each in its own way: none of them ends a run or keeps the others waiting."""

import asyncio
from collections import Counter

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm import client, sampler
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Response
from jaxrl_llm.rollouts.vllm.sampler import Request, Spread

REQUESTS = [Request((i,), i, i) for i in range(200)]


class Server(client.Server):
    """Answers after `seconds`; `fault(number, prompt)` may raise. `look` may bring it into order."""

    def __init__(self, url, fault=lambda number, prompt: None, seconds=0.001):
        super().__init__(f"http://{url}")
        self.fault, self.seconds = fault, seconds
        self.asked = Counter()
        self.looked, self.flying, self.most = 0, 0, 0
        self.name = "a-1"

    async def ask(self, request):
        self.asked[request.prompt] += 1
        number = self.asked.total()
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(self.seconds)
            self.fault(number, request.prompt)
        finally:
            self.flying -= 1
        return Response([request.seed], [-1.0], False)

    async def label(self):
        return self.name

    async def look(self):
        self.looked += 1
        return self.name


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sampler, "REST", (0.02, 0.1))


def done(*servers, requests=REQUESTS, width=16):
    async def all_done():
        made = Spread(requests, servers, width, Server.ask, lambda server: server.look())  # pyright: ignore
        await made.all_done(lambda: None, 30.0)
        return made

    made = asyncio.run(all_done())
    assert {i: r.tokens for i, r in made.responses.items()} == {x.index: [x.seed] for x in requests}
    assert all(server.most <= width and not server.flying for server in servers)
    return made


def sick(number, prompt):
    raise NoAnswer("sick")


def test_one_sick_server_of_two_ends_nothing():
    well, ill = Server("well", seconds=0.01), Server("ill", sick)
    done(ill, well)
    assert well.asked.total() == len(REQUESTS)
    assert ill.asked.total() < 16 + 40  # sixteen at once, then one after each rest


def test_the_last_request_is_not_given_up_while_a_server_can_do_it():
    """The sick one has time to fail it many times over, while the other is at work on a long one."""
    well, ill = Server("well", seconds=1.0), Server("ill", sick)
    done(ill, well, requests=REQUESTS[:2], width=1)
    assert max(ill.asked.values()) <= sampler.ATTEMPTS


def test_many_failures_of_one_cause_are_one():
    """A server that is gone for a moment with sixteen responses: it rests once, and they come again."""
    gone = []

    def fault(number, prompt):
        if number == 20:
            gone.append(True)
        if gone:
            raise NoAnswer("gone")

    class Returning(Server):
        async def look(self):
            gone.clear()  # it is back by the time that somebody looks
            return await super().look()

    server = Returning("a", fault, seconds=0.005)
    assert 1 <= done(server).retries <= 16
    assert server.looked == 2


def test_a_request_that_every_server_fails_is_given_up():
    def fault(number, prompt):
        if prompt == (7,):
            raise NoAnswer("a poison")

    servers = [Server("a", fault), Server("b", fault)]
    with pytest.raises(UserError, match=r"of 1 tokens failed 5 times, last at .*: a poison"):
        done(*servers)
    assert all(server.looked > 1 for server in servers)


def test_a_server_that_fails_now_and_then_does_its_share():
    def fault(number, prompt):
        if number % 10 == 0:
            raise NoAnswer("now and then")

    a, b = Server("a", fault, seconds=0.01), Server("b", seconds=0.01)
    done(a, b, width=4)
    assert a.asked.total() > 10


def test_looking_after_a_server_that_hangs_keeps_no_other_waiting():
    class Hung(Server):
        async def look(self):
            await asyncio.sleep(1000)
            raise AssertionError("nobody waits for it")

    done(Hung("hung"), Server("well"))


@pytest.mark.parametrize("after", [None, "b-1"])
def test_a_response_of_weights_that_came_meanwhile_is_asked_for_again(after):
    """A server that starts again has no label, another trainer's has another."""

    def fault(number, prompt):
        if number == 30:
            server.name = after

    class Mended(Server):
        async def look(self):
            self.name = self.name or "c-1"
            return await super().look()

    server = Mended("a", fault)
    assert done(server).retries >= 1
    assert server.asked.total() > len(REQUESTS)
