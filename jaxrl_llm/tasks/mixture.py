"""Several tasks as one, from which a run draws by weight."""

import math
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.task import (
    Demonstrator,
    Evaluated,
    GradesGroups,
    Interactive,
    Mapped,
    Prompt,
    Relearned,
    Remembers,
    Source,
    Supervised,
    Task,
    TaskExample,
    TeacherPrompter,
    check_members,
)

CHANGES = "remembers (`remember`), or is another task in evaluations (`evaluated`)"


class Mixture:
    """Tasks by name, each with its weight: `Mixture({"math": (task, 0.7), "kk": (task, 0.3)})`.

    Of every so many examples that a run draws, a task has its share of the weights; of each it draws in
    an order of its own, again and again. An example is a `TaskExample`. The test has the tests of
    all tasks, spread evenly. Raises UserError where the tasks cannot be mixed.

    >>> from types import SimpleNamespace as Some
    >>> sums, words = (Some(name=n, train=[1], test=[2], prompt=str, reward=max) for n in "ab")
    >>> jl.Mixture({"sums": (sums, 3.0), "words": (words, 1.0)}).shares
    {'sums': 0.75, 'words': 0.25}
    """

    def __init__(self, tasks: Mapping[str, tuple[Task[Any], float]]):
        if not tasks:
            raise UserError("mixture: it has no tasks")
        for name, (task, weight) in tasks.items():
            self._check(name, task, weight)
        kinds = {isinstance(task, Interactive): name for name, (task, _) in tasks.items()}
        if len(kinds) > 1:
            raise UserError(
                f"mixture: {kinds[True]!r} has an environment and {kinds[False]!r} has none: give it one, as "
                "Toolbox([...]).for_task(task) does"
            )
        self.tasks = {name: task for name, (task, _) in tasks.items()}
        total = sum(weight for _, weight in tasks.values())
        self.shares = {name: weight / total for name, (_, weight) in tasks.items()}
        self.name = "+".join(tasks)
        self.train = self._joined({name: task.train for name, task in self.tasks.items()})
        self.test = self._joined({name: task.test for name, task in self.tasks.items()})
        # members that only some tasks have
        if True in kinds:
            self.environment = lambda one, tokenizer: one.task.environment(one.example, tokenizer)
        if all(isinstance(task, Demonstrator) for task in self.tasks.values()):
            self.demonstration = lambda one: one.task.demonstration(one.example)
        if any(isinstance(task, TeacherPrompter) for task in self.tasks.values()):
            self.teacher_prompt = self._teacher_prompt

    @staticmethod
    def _check(name: str, task: Task[Any], weight: float) -> None:
        if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name == "all":
            raise UserError(f"mixture: {name!r} is no name for a task: it is one in the metrics")
        if not 0 < weight < math.inf:
            raise UserError(f"mixture: the weight of {name!r} is {weight}: it must be above 0")
        if isinstance(task, Mixture):
            raise UserError(f"mixture: {name!r} is a mixture itself: name its tasks here")
        if isinstance(task, Supervised):
            raise UserError(f"mixture: {name!r} has rows to imitate, and a mixture is of rewards")
        if isinstance(task, Relearned):
            raise UserError(f"mixture: {name!r} changes what is learned from, for all of a run")
        if isinstance(task, Remembers | Evaluated):
            raise UserError(f"mixture: {name!r} {CHANGES}, which a mixture does not hand on")
        check_members(task, f"mixture: {name!r}")
        if not len(task.train):
            raise UserError(f"mixture: {name!r} has no examples to train on")

    def _joined(self, sources: Mapping[str, Source[Any]]) -> Mapped[TaskExample]:
        """The examples of all, spread evenly, so that the first ones are of all tasks."""
        spread = [
            ((i + 0.5) / len(source), name, i)
            for name, source in sources.items()
            for i in range(len(source))
        ]
        spread.sort(key=lambda place: place[0])

        def example(place: tuple[float, str, int]) -> TaskExample:
            _, name, i = place
            return TaskExample(name, sources[name][i], self.tasks[name])

        return Mapped(spread, example)

    def prompt(self, one: TaskExample) -> Prompt:
        return one.task.prompt(one.example)

    def _teacher_prompt(self, one: TaskExample) -> Prompt | None:
        if isinstance(one.task, TeacherPrompter):
            return one.task.teacher_prompt(one.example)
        return None

    def reward(self, one: TaskExample, response: str) -> Reward:
        return one.task.reward(one.example, response)


def check_single(task: Task[Any], wrapper: str, *, episodes: bool = False) -> None:
    """Raises a UserError if a wrapper of tasks whose responses are graded alone cannot take this one.

    With `episodes` the task may have an environment.
    """
    check_members(task, f"{wrapper}: the task")
    if isinstance(task, Mixture):
        raise UserError(f"{wrapper}: the task is a mixture: wrap each of its tasks")
    if isinstance(task, Supervised):
        raise UserError(f"{wrapper}: the task has rows to imitate, and no rewards")
    if isinstance(task, GradesGroups):
        raise UserError(f"{wrapper}: the task grades groups, here each response is graded alone")
    if isinstance(task, Relearned) or (isinstance(task, Interactive) and not episodes):
        raise UserError(f"{wrapper}: the task has an environment of its own: change that one")
    if isinstance(task, Remembers | Evaluated):
        raise UserError(f"{wrapper}: the task {CHANGES}, which is not handed on")
