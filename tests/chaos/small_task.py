"""Say words that the prompt holds: a reward that the first steps move."""

import os
import signal
import time
from random import Random

from jaxrl_llm.tasks.task import Reward

FORKS = os.environ.get("CHAOS_FORKS", " -1").split(" ")  # what a child does, of which reward
RESPONSES = iter(range(10**9))


def fork():
    """As graders do that work in processes, or have a limit of time."""
    how, number = FORKS
    if next(RESPONSES) != int(number):
        return
    if not (child := os.fork()):
        time.sleep(60)
        os._exit(0)
    if how == "terminated":
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


class Words:
    name = "words"

    def __init__(self):
        draw = Random(0)
        some = [" ".join(f"w{draw.randrange(62)}" for _ in range(6)) for _ in range(40)]
        self.train, self.test = some[:32], some[32:]

    def prompt(self, example):
        return example

    def reward(self, example, response):
        fork()
        said = response.split()
        share = sum(int(word[1:]) % 2 for word in said if word[1:].isdigit()) / max(len(said), 1)
        return Reward(share, share > 0.5)

    def demonstration(self, example):
        return " ".join(reversed(example.split()))


task = Words()
