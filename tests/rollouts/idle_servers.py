"""How long servers stand idle at a lag: `python -m tests.rollouts.idle_servers --max-lag 1`.

Four stand-ins for vLLM answer in a time by the length of a response, log-normal, the longest of a step about
ten times the median; the trainer sleeps in place of its update. All else is what a run does.
"""

import argparse
import json
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import rich.console

from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.vllm import client
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.journal import Journal
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.log import RunLog
from jaxrl_llm.training.stream import Rollouts
from tests.rollouts.fake_vllm import Fake
from tests.rollouts.test_vllm import WEIGHTS, sampler_of
from tests.training.test_evaluate import WORDS, Echo

MEDIAN, SIGMA = 50, 1.0  # tokens; of the logarithm


class Timed(Fake):
    """Responses of random length, 10 ms a token; notes how many it has at work, and since when."""

    def __init__(self):
        super().__init__()
        self.pace, self.changes = 0.01, [(time.monotonic(), 0)]

    def sample(self, body, whole):
        rng = random.Random(sum(body["prompt"][:2]) * 7919 + body["seed"] % 7919)
        [choice] = whole["choices"]
        size = min(int(MEDIAN * rng.lognormvariate(0, SIGMA)) + 1, body["max_tokens"])
        choice["token_ids"] = [9] * (size - 1) + [WORDS.eos]
        choice["logprobs"] = {"token_logprobs": [self.logp] * size}
        choice["finish_reason"] = "stop"
        self.changes.append((time.monotonic(), 1))
        try:
            return super().sample(body, whole)
        finally:
            self.changes.append((time.monotonic(), -1))

    def occupied(self, start, end):
        """Shares of the time with nothing at work, and the mean number at work."""
        at_work, idle, total, last = 0, 0.0, 0.0, start
        for moment, change in sorted(self.changes):
            if start < moment < end:
                idle += (moment - last) * (at_work == 0)
                total += (moment - last) * at_work
                last = moment
            if moment < end:
                at_work += change
        return idle / (end - start), total / (end - start)


def measured(
    max_lag: int, steps: int, update: float, servers: int, concurrency: int
) -> dict[str, Any]:
    """Seconds a step and idle shares, without the first `max_lag + 1` steps."""
    config: Any = SimpleNamespace(
        prompts=8,
        group_size=16,
        seed=0,
        max_resamples=0,
        loss=SimpleNamespace(reads=lambda field: False),
        max_lag=max_lag,
        last_step=steps + max_lag + 2,
    )
    task = Echo()
    task.train = tuple(range(2000))
    ask = lambda text: [4 + int(text) % 40, 4 + int(text) // 40 % 40]
    words: Any = SimpleNamespace(prompt=ask, decode=lambda tokens: "x", eos=WORDS.eos)
    splits = SimpleNamespace(train=task.train, parts=())
    components: Any = SimpleNamespace(
        config=config, token_task=lambda *_: TokenTask(task, words), merged=lambda params: params,
        sampling=lambda: Sampling(max_tokens=1000, stop=(WORDS.eos,)), splits=splits,
    )  # fmt: skip
    task.reward = lambda example, response: SimpleNamespace(score=0.0)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fakes = [stack.enter_context(Timed()) for _ in range(servers)]
        sampler = sampler_of(*fakes, root=root / "weights", concurrency=concurrency)
        log = RunLog(Journal(root, rich.console.Console(quiet=True)), stack.enter_context(Clock()))
        rollouts, marks, lags = Rollouts(components, sampler, log, Stop()), [], []
        rollouts.task = SimpleNamespace(**{
            name: getattr(rollouts.task, name) for name in dir(rollouts.task) if not name.startswith("__")
        } | {"grade": lambda groups: groups})  # fmt: skip
        for step in range(steps + max_lag + 1):
            marks.append(time.monotonic())
            rollouts.push(WEIGHTS, step)
            groups = rollouts.next(step)
            lags += [step - one.versions[0] for group in groups for one in group.trajectories]
            time.sleep(update)
        start, end = marks[max_lag + 1], time.monotonic()
        figures = [fake.occupied(start, end) for fake in fakes]
    return {
        "max_lag": max_lag,
        "seconds a step": (end - start) / steps,
        "idle": float(np.mean([idle for idle, _ in figures])),
        "at work": float(np.mean([busy for _, busy in figures])) / concurrency,
        "lag": float(np.mean(lags)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--update", type=float, default=1.0, help="seconds of an update")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=8)
    given = vars(parser.parse_args())
    client.CHECK_SECONDS = 0.05
    for lag in given.pop("max_lag"):
        print(json.dumps({k: round(v, 3) for k, v in measured(lag, **given).items()}), flush=True)
