"""The interface of tasks (examples, prompts, rewards or environments), and how they are called."""

import inspect
import math
import operator
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    Protocol,
    SupportsIndex,
    TypeVar,
    runtime_checkable,
)

from jaxrl_llm import userfile
from jaxrl_llm.background import in_background
from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import LARGEST, UNGRADED, Reward

if TYPE_CHECKING:
    from jaxrl_llm.models.tokenizer import HiddenTokens

Prompt = str | Sequence[Mapping[str, str]]  # a text, or messages with a role and content
E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
E_contra = TypeVar("E_contra", contravariant=True)


class Source(Protocol[E_co]):
    """Random access to examples; a list will do."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> E_co: ...


def as_text(prompt: Prompt) -> str:
    """A prompt to be read: messages are paragraphs."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


Step = tuple[Sequence[int] | None, Reward]
Said = tuple[Sequence[int], bool] | None


class NewContext(list[int]):
    """Token ids in place of all that was said, the prompt included: they begin a new segment."""


class Hidden(tuple[Mapping[str, str], ...]):
    """A prompt that is not shown: the environment's `begin()` says what the policy sees first.

    People read it, and examples are told apart by it.
    """

    prompt: Prompt

    def __new__(cls, prompt: Prompt) -> "Hidden":
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        hidden = super().__new__(cls, messages)
        hidden.prompt = prompt
        return hidden

    def token_ids(self, tokenizer: Any) -> "HiddenTokens":
        from jaxrl_llm.models.tokenizer import HiddenTokens  # with JAX, which tasks do without

        return HiddenTokens(tokenizer.prompt(self.prompt))


class Task(Protocol[E]):
    """A named task: examples to train and test on, a prompt for each, a reward for a response.

    A prompt is a text, or a list of messages for the model's chat template, as
    `[{"role": "user", "content": "2 + 2?"}]`. An `Interactive` task needs no `reward`.
    """

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Source[E]: ...

    @property
    def test(self) -> Source[E]: ...

    def prompt(self, example: E, /) -> Prompt: ...

    def reward(self, example: E, response: str, /) -> Reward: ...


@dataclass(frozen=True)
class TaskExample:
    """An example of one of several tasks, with the name of that."""

    name: str
    example: Any
    task: Task[Any] = field(repr=False, compare=False)


def names_of_tasks(examples: Iterable[Any]) -> list[str]:
    """The names of the tasks that examples are of; none of those of a run's only task."""
    return sorted({one.name for one in examples if isinstance(one, TaskExample)})


@runtime_checkable
class GradesGroups(Protocol[E_contra]):
    """A task that grades the responses to an example together, in place of `reward`.

    In validation and the like that is one response.
    """

    def rewards(self, example: E_contra, responses: Sequence[str], /) -> Sequence[Reward]: ...


@runtime_checkable
class Demonstrator(Protocol[E_contra]):
    """A task that can also write a full-score response, for a supervised warm start.

    Of an episode it is the policy's turns, between which the environment is asked.
    """

    def demonstration(self, example: E_contra, /) -> str | Sequence[str]: ...


@runtime_checkable
class TeacherPrompter(Protocol[E_contra]):
    """A task that tells a teacher more than the policy, as a worked answer: it has a prompt of its own.

    By it the model before training can teach itself. None is the policy's prompt.
    """

    def teacher_prompt(self, example: E_contra, /) -> Prompt | None: ...


class Row(NamedTuple):
    """A conversation in tokens: spans of the policy's `turns`, and of prompts that begin a new context."""

    tokens: list[int]
    turns: list[tuple[int, int]]
    restarts: list[tuple[int, int]]


@runtime_checkable
class Supervised(Protocol[E_contra]):
    """A task of rows that are imitated as they are; its rewards tell something if it is `graded`."""

    @property
    def graded(self) -> bool: ...

    def row(self, example: E_contra, tokenizer: Any, /) -> Row: ...


Reply = Step | Awaitable[Step | Callable[[], Step]]


@runtime_checkable
class Environment(Protocol):
    """The other side of one episode, to which the policy talks."""

    def step(self, tokens: Sequence[int], /) -> Reply:
        """The answer to a turn of these tokens: token ids, or None at the end; the reward so far.

        If they are `NewContext`, the policy sees them alone. What is awaited may be a function that gives
        them, and is called in a thread.
        """
        ...


@runtime_checkable
class Begins(Protocol):
    """An environment that says what the policy sees first; the prompt of its task is `Hidden`."""

    def begin(self) -> Reply:
        """As `step`, before the first turn; the reward is not used."""
        ...


@runtime_checkable
class LogpEnvironment(Protocol):
    """An environment that is asked with the log-probs of the turn's tokens, in place of `step`."""

    def step_with_logps(self, tokens: Sequence[int], logps: Sequence[float], /) -> Reply: ...


@runtime_checkable
class Interactive(Protocol[E_contra]):
    """A task of several turns: the policy's first follows the prompt."""

    def environment(
        self, example: E_contra, tokenizer: Any, /
    ) -> Environment | LogpEnvironment: ...


@runtime_checkable
class Evaluated(Protocol[E]):
    """A task with another one in its place in validation and tests."""

    @property
    def evaluated(self) -> Task[E]: ...


@runtime_checkable
class Remembers(Protocol):
    """A task that a run changes as it goes: by the groups of each step, in all processes."""

    def remember(self, groups: Sequence[Any], tokenizer: Any, /) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Its memory, for a note in JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@runtime_checkable
class Relearned(Protocol):
    """A task that changes responses before they are learned from, to at most `limit` sampled tokens.

    Log-probs of tokens that stand after another prompt than they were sampled after are NaN: the
    trainer's own take their place.
    """

    def learned(self, response: Any, /, limit: int) -> Any: ...


class Mapped(Generic[E]):
    """A random-access source whose examples go through a function at each access."""

    def __init__(self, source: Source[Any], function: Callable[[Any], E]):
        self._source = source
        self._function = function

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> E:
        return self._function(self._source[index])

    def __iter__(self) -> Iterator[E]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class RewardSettings:
    """How rewards and environments are called: `threads` at a time, each for at most `seconds`.

    `heartbeat` is called before each and while it has time, in any thread. `stop_requested` is looked
    at as often; if it is true, StopRequested is raised. `reported` are the kinds of errors (type and place)
    that are not logged any more; new ones are added.
    """

    threads: int = 1
    seconds: float = 300.0
    heartbeat: Callable[[], None] = lambda: None
    stop_requested: Callable[[], bool] = lambda: False
    reported: set[str] = field(default_factory=set)


def score_groups(
    task: Task[E],
    examples: Sequence[E],
    groups: Sequence[Sequence[str]],
    settings: RewardSettings | None = None,
) -> list[list[Reward]]:
    """The rewards of responses to each example; ungraded where it raises, is not finite or takes too long.

    A group that its task grades together is one call: it is ungraded as a whole. Logs a reward that
    takes over SLOW seconds, and each new kind of error. With one thread (the main one) a late reward
    is interrupted. With several it is given up and goes on in the background; there an endless
    regular expression, which keeps the GIL, stops all else for good, so several are for rewards that
    wait. A task's UserError is raised, and StopRequested if a stop is requested.
    """
    from jaxrl_llm.tasks import deadline

    settings, calls = settings or RewardSettings(), list[deadline.Call]()
    errors, count = deadline.Errors(settings.reported), sum(map(len, groups))
    first = 1
    for example, responses in zip(examples, groups, strict=True):
        by, inner = task, example
        if isinstance(example, TaskExample):
            by, inner = example.task, example.example
        for some in [responses] if isinstance(by, GradesGroups) else [[one] for one in responses]:
            if isinstance(by, GradesGroups):
                work, check = partial(by.rewards, inner, some), partial(_plain_each, len(some))
            else:
                work, check = partial(by.reward, inner, *some), _plain
            which = f"the reward of response {first} of {count}"
            calls.append(deadline.Call(work, check, example, which, settings, len(some)))
            first += len(some)
    rewards = list[Reward]()
    for call, one in zip(calls, deadline.run(calls, settings.threads, errors), strict=True):
        rewards += one if isinstance(one, list) else [one or UNGRADED] * call.size
    errors.log(count)
    each = iter(rewards)
    return [[next(each) for _ in responses] for responses in groups]


class Episodes:
    """The environments of a task's `examples`; a call takes the tokens of a turn of one of them.

    It gives a future of what the environment says next, and whether anew; None at the end. With None in
    place of tokens that is what the policy sees first; one that fails at it is not asked again.
    `rewards` are the newest, `turn_rewards` the scores of all.
    A step that raises, says what are no tokens of the tokenizer or takes too long ends its episode
    ungraded. Steps that are coroutines need no thread. What is logged when the block ends is what
    `score_groups` logs.
    """

    def __init__(
        self,
        task: Interactive[E],
        tokenizer: Any,
        examples: Sequence[E],
        settings: RewardSettings | None = None,
    ):
        from jaxrl_llm.tasks import deadline

        settings = settings or RewardSettings()
        self.rewards = [UNGRADED] * len(examples)
        self.turn_rewards: list[list[float]] = [[] for _ in examples]
        self._left = len(examples)
        self._task, self._tokenizer, self._examples = task, tokenizer, examples
        self._environments: dict[int, Environment | LogpEnvironment] = {}
        self._failed = set[int]()  # those that did not begin
        self._settings = settings
        self._errors = deadline.Errors(settings.reported)
        self._workers = deadline.Threads(settings.threads)

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._left)

    def end(self, count: int) -> None:
        """So many of the episodes are over; with the last of them all ends."""
        self._left -= count
        if self._left:
            return
        self._workers.close()
        self._environments.clear()  # they end now, not when cycles are collected
        self._errors.log(len(self.rewards))

    def finish(self, index: int) -> None:
        """Ends the environment of an episode that is over: it may hold processes."""

        def drop() -> None:  # nothing is returned: it ends in this thread, as it may wait for that
            self._environments.pop(index, None)

        if index in self._environments:
            in_background(drop)

    def __call__(
        self, index: int, tokens: Sequence[int] | None, logps: Sequence[float] = ()
    ) -> Future[Said]:
        from jaxrl_llm.tasks import deadline

        which = f"a step of episode {index + 1} of {len(self.rewards)}"
        begins = tokens is None
        work = partial(self._step, index, None if begins else list(tokens), list(logps))
        check = partial(self._plain, begins=begins)
        call = deadline.Call(work, check, self._examples[index], which, self._settings)
        reply: Future[Said] = Future()
        if index in self._failed:
            reply.set_result(None)
            return reply

        def settle(done: Future[deadline.Outcome]) -> None:
            try:
                settled = self._errors.settled(call, done.result()) or (None, UNGRADED)
                tokens, reward = settled
                if not begins:
                    self.rewards[index] = reward
                    self.turn_rewards[index].append(reward.score)
                elif tokens is None:
                    self._failed.add(index)
                anew = isinstance(tokens, NewContext)
                reply.set_result(None if tokens is None else (tokens, anew))
            except BaseException as error:
                reply.set_exception(error)

        self._workers.submit(call).add_done_callback(settle)
        return reply

    def _step(self, index: int, tokens: list[int] | None, logps: list[float]) -> Any:
        environment = self._environments.get(index)
        if environment is None:
            environment = self._task.environment(self._examples[index], self._tokenizer)
            self._environments[index] = environment
        if tokens is None:
            if not isinstance(environment, Begins):
                raise TypeError("its prompt is Hidden, and its environment has no begin()")
            return environment.begin()
        if isinstance(environment, LogpEnvironment):
            return environment.step_with_logps(tokens, logps)
        return environment.step(tokens)

    def _plain(self, result: Any, *, begins: bool) -> Any:
        """The result of a step, in plain numbers; TypeError or ValueError for anything else.

        What is awaited is none yet, and stays as it is.
        """
        if inspect.isawaitable(result):
            return result
        reply, reward = result
        reward = _plain(reward)
        if reply is None:
            return None, reward
        known = range(len(self._tokenizer))  # a NumPy number would be compared with each of these
        plain = lambda x: operator.index(x) if isinstance(x, SupportsIndex) else x
        tokens = [*map(plain, reply)]
        if wrong := [token for token in tokens if token not in known]:
            raise ValueError(f"step() returned {wrong[0]!r}, which is no token of {len(known)}")
        if not tokens and (begins or isinstance(reply, NewContext)):
            raise ValueError(
                f"{'begin' if begins else 'step'}() returned a context without a token"
            )
        return (NewContext if isinstance(reply, NewContext) else list)(tokens), reward


def _plain_each(count: int, rewards: Sequence[Reward]) -> list[Reward]:
    """As `_plain`, of a group's rewards."""
    plain = [*map(_plain, rewards)]
    if len(plain) != count:
        raise ValueError(f"rewards() returned {len(plain)} for {count} responses")
    return plain


def _plain(reward: Reward) -> Reward:
    """The reward in plain floats; TypeError or ValueError if the task returned something else."""
    if not isinstance(reward, Reward):
        raise TypeError(f"reward() returned {type(reward).__name__}, not Reward")
    fields = {str(key): float(value) for key, value in reward.fields.items()}
    score = float(reward.score)
    if not all(map(math.isfinite, (score, *fields.values()))) or abs(score) > LARGEST:
        raise ValueError(
            f"reward() returned a number that is not finite, or a score over 1e15: {reward!r}"
        )
    return Reward(score, bool(reward.correct), fields, bool(reward.graded))


def load_task(spec: str) -> Task[Any]:
    """The task named by `path/to/file.py:name`; UserError if there is none or it is no Task."""
    path, separator, name = spec.rpartition(":")
    if not (separator and path and name):
        raise UserError(f"task {spec!r}: write it as path/to/file.py:name")
    module = userfile.run(Path(path), "task")
    task = userfile.member(module, name, f"task {spec!r}: {path}")
    check_members(task, f"task {spec!r}")
    return task


def check_members(task: Any, where: str) -> None:
    """Raises a UserError that names the first member of a Task that `task` lacks or has wrong."""
    if isinstance(task, type):
        raise UserError(f"{where} is a class: an instance is wanted, as {task.__name__}()")
    scores = "rewards" if isinstance(task, GradesGroups) else "reward"
    scores = "environment" if isinstance(task, Interactive) else scores
    for member in ("name", "train", "test", "prompt", scores):
        if not hasattr(task, member):
            raise UserError(f"{where}: it has no {member!r} (see jaxrl_llm/tasks/task.py)")
    for member in ("prompt", scores):
        if not callable(getattr(task, member)):
            raise UserError(f"{where}: {member!r} is not a function")
    for member in ("train", "test"):
        source = getattr(task, member)
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise UserError(
                f"{where}: {member!r} needs a length and access by index, as a list has"
            )
