"""The puzzles of reasoning-gym, with its verifiers: `pip install 'jaxrl_llm[gym]'`.

They are made and judged in workers (this module), since some generators follow the order of a set,
which is one process's own. Some verifiers evaluate what a model wrote as Python: each answer is
judged in a process of its own, with the limits of the tool `python`.
"""

import importlib.util
import json
import secrets
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.reward import UNGRADED, Reward
from jaxrl_llm.tasks.python import confined, warn_of_reach
from jaxrl_llm.tasks.task import Mapped, Prompt
from jaxrl_llm.tasks.workers import Workers, serve

_MAKING = 60.0  # seconds a puzzle may take to be made
_SLOWER = 100  # wall-clock seconds for one of CPU time: the load of the machine decides nothing
_MEMORY = 4 << 30  # bytes of address space that a verifier may use
_TRIES = 20  # seeds tried for a puzzle to train on that is none of the test's


@dataclass(frozen=True)
class Puzzle:
    """A question, and the seed it is made of again; no `answer` where only a verifier knows it."""

    question: str
    answer: str | None
    seed: int


def tagged(response: str) -> str | None:
    """The text in the last `<answer>` of a response; None without one."""
    before, closed, _ = response.rpartition("</answer>")
    _, opened, text = before.rpartition("<answer>")
    return text.partition("</answer>")[0].strip() if opened and closed else None


def framed(question: str) -> Prompt:
    """A question as a message that asks for a tagged answer."""
    asked = f"{question}\n\nThink first. Then write the final answer as <answer>...</answer>."
    return [{"role": "user", "content": asked}]


class ReasoningGym:
    """Puzzles of the generator `name`, which `settings` go to; an example is a `Puzzle`.

    The score is the verifier's, 0 to 1, and 1 is correct; what it cannot read is wrong. A verifier
    that takes over `seconds` of CPU time leaves a response ungraded. `frame` makes a prompt of a
    question, `read` takes the answer from a response (None: it gives none). A question of the test
    is not trained on, unless 20 seeds make no other.
    """

    def __init__(
        self,
        name: str,
        *,
        train: int = 10_000,
        test: int = 500,
        seed: int = 0,
        frame: Callable[[str], Prompt] = framed,
        read: Callable[[str], str | None] = tagged,
        workers: int = 2,
        seconds: float = 5.0,
        **settings: Any,
    ):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UserError("these puzzles need reasoning-gym: pip install 'jaxrl_llm[gym]'")
        self.name, self._frame, self._read, self._seconds = name, frame, read, seconds
        module = "jaxrl_llm.adapters.reasoning_gym"
        warn_of_reach()
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._workers = Workers(workers, module, name, json.dumps(settings), folder)
        self._stride = train + test
        self.train = Mapped(range(seed, seed + train), self._new)
        self.test = Mapped(range(seed + train, seed + train + test), self._puzzle)
        try:
            self._puzzle(seed)
        except UserError:
            self.close()
            raise

    def prompt(self, example: Puzzle) -> Prompt:
        return self._frame(example.question)

    def reward(self, example: Puzzle, response: str) -> Reward:
        answer = self._read(response)
        if answer is None:
            return Reward(0.0, False, {"answered": 0.0})
        # the worker only waits
        reply = self._workers.ask([example.seed, answer, self._seconds], 10 * self._seconds)
        if reply in ("", "unjudged"):
            return UNGRADED
        score = 0.0 if reply == "failed" else float(reply)
        return Reward(score, score == 1.0, {"answered": 1.0})

    def close(self) -> None:
        """Ends the workers; garbage collection does the same."""
        self._workers.close()

    @cached_property
    def _tested(self) -> frozenset[str]:
        return frozenset(puzzle.question for puzzle in self.test)

    def _new(self, seed: int) -> Puzzle:
        """The puzzle of the first seed, from this one on, whose question is none of the test's."""
        seeds = range(seed, seed + _TRIES * self._stride, self._stride)
        for puzzle in map(self._puzzle, seeds):
            if puzzle.question not in self._tested:
                return puzzle
        return self._puzzle(seed)

    def _puzzle(self, seed: int) -> Puzzle:
        reply = self._workers.ask([seed, None, _MAKING], _MAKING)
        if not reply.startswith("{"):
            raise UserError(f"reasoning-gym: {reply or f'no puzzle in {_MAKING:.0f} s'}")
        return Puzzle(seed=seed, **json.loads(reply))


def library() -> Any:
    """The package; the first import compiles it, and what it needs has warnings."""
    with warnings.catch_warnings(action="ignore"):
        import reasoning_gym
    return reasoning_gym


@lru_cache(maxsize=4096)
def _entry(name: str, settings: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A generator with one puzzle, and the puzzle."""
    made = library().create_dataset(name, size=1, seed=seed, **json.loads(settings))
    return made, made[0]


def _answer(seed: int, answer: str | None, seconds: float) -> str:
    """The score of an answer; without one the puzzle in JSON, or what its generator says."""
    name, settings, folder = sys.argv[1:]
    if answer is not None:
        made, entry = _entry(name, settings, seed)
        mark = secrets.token_hex()  # what is evaluated may print too, and does not know it

        def judge() -> None:
            print(f"\n{mark}", flush=True)
            print(f"\n{mark}{float(made.score_answer(answer, entry))!r}")

        said, why = confined(judge, folder, seconds, _SLOWER * seconds, _MEMORY)
        _, *scores = said.split(mark)  # none where it did not come to judging
        if not scores or "took more" in why:
            return "unjudged"
        return scores[1].strip() if len(scores) == 2 else "failed"
    try:
        entry = _entry(name, settings, seed)[1]
    except Exception as error:  # what generators raise, and the package for a wrong name
        return f"{name} {settings}: {first_line(error)}"
    return json.dumps({"question": entry["question"], "answer": entry["answer"]})


if __name__ == "__main__":
    serve(_answer, library)
