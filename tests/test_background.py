"""Work in threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from jaxrl_llm import background


def test_what_is_made_once_is_made_once_whoever_asks_at_a_time():
    gate, made = threading.Barrier(8), []

    @background.once
    def make(name):
        made.append(name)
        return object()

    def ask(_):
        gate.wait()
        return make("one"), background.loop("a test's")

    with ThreadPoolExecutor(8) as pool:
        assert len({*pool.map(ask, range(8))}) == 1
    assert made == ["one"]
    assert make("two") is not make("one")
