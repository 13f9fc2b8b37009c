"""Rewards by name, and functions written for other trainers, as functions of a question and a response."""

import asyncio
import inspect
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from jaxrl_llm import userfile
from jaxrl_llm.background import in_background, once
from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.tables import LETTERS, Question, answer_of, boxed, final

Scored = Callable[[Question, str], Reward | None]  # None: it says nothing of that question


@dataclass(frozen=True)
class OfGroup:
    """A reward of all responses to a question, called with them together; one alone is a group."""

    rewards: Callable[[Question, Sequence[str]], list[Reward | None]]

    def __call__(self, question: Question, response: str) -> Reward | None:
        [reward] = self.rewards(question, [response])
        return reward


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STYLED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s*\{([^{}]*)\}")
_ALONE = re.compile(rf"[\s().:*]*([{LETTERS}])[\s().:*]*", re.IGNORECASE)
_LABEL = re.compile(rf"[\s(]*([{LETTERS}])[.:)]+\s.*", re.IGNORECASE | re.DOTALL)  # of `B. Lima`
# "answer" with `is`, a colon or marks before the letter: A and I are words too
_BEHIND = re.compile(
    r"\b[Aa]nswer\b[ *_]{0,4}(?:\bis\b\W{0,10}|:\W{0,10}|[(\[*_\n][\s(\[*_]{0,9})([A-J])\b"
)


def reward(spec: str) -> Scored:
    """The reward of a name, `regex:PATTERN`, or `FILE.py:FUNCTION`; a UserError for anything else."""
    kind, _, rest = spec.rpartition(":") if ".py:" in spec else spec.partition(":")
    if kind.endswith(".py") and not rest:
        raise UserError(f"--reward {kind} names no function: write it as {kind}:FUNCTION")
    if kind.endswith(".py"):
        module = userfile.run(Path(kind), "reward")
        return adapted(userfile.member(module, rest, f"reward file {kind}"), spec)
    if kind == "regex":
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise UserError(f"--reward {spec}: no regular expression: {error}") from error
        if pattern.groups != 1:
            raise UserError(f"--reward {spec}: one group (...) has to say what the answer is")
        return partial(by_pattern, pattern=pattern)
    if spec not in BY_NAME:
        raise UserError(
            f"--reward {spec}: there are {', '.join(BY_NAME)}, regex:PATTERN, and FILE.py:FUNCTION"
        )
    return BY_NAME[spec]()


def final_part(response: str) -> str:
    """The part of a response after its thoughts; empty where they do not end."""
    return response.rpartition("</think>")[2].partition("<think>")[0].strip()


def _judged(question: Question, answer: str | None, **fields: float) -> Reward:
    right = answer is not None and answer.strip() in question.truths
    return Reward(float(right), right, fields)


def exact(question: Question, response: str) -> Reward:
    """1 for a response that is one of the answers, but for space around it."""
    return _judged(question, final_part(response))


def tagged(question: Question, response: str) -> Reward:
    """1 for an answer between <answer> and </answer>, after thoughts between <think> and </think>."""
    before, there, rest = response.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    _, ended, since = before.rpartition("</think>")
    formed = bool(there and closed and ended and "<think>" not in since)
    return _judged(question, answer if formed else None, format=float(formed))


def choice(question: Question, response: str) -> Reward:
    """1 for the letter of the right choice: in a box, behind "answer", or alone."""
    text = _STYLED.sub(r"\1", final_part(response))
    inside, behind = boxed(text) or "", _BEHIND.findall(text)
    chosen = _LABEL.fullmatch(inside)
    chosen = chosen or _ALONE.fullmatch(inside or "".join(behind[-1:]) or text)
    letter = chosen[1].upper() if chosen else None
    return _judged(question, letter, format=float(chosen is not None))


def by_pattern(question: Question, response: str, *, pattern: re.Pattern[str]) -> Reward:
    """1 if the group of the last match of a regular expression is one of the answers."""
    found = pattern.findall(final_part(response))
    return _judged(question, found[-1] if found else None, format=float(bool(found)))


def by_words(question: Question, response: str, *, field: str) -> Reward:
    """EM or F1 (`field`) of the last <answer>...</answer> with the nearest of the answers, as SQuAD has them."""
    before, closed, _ = final_part(response).rpartition("</answer>")
    _, there, answer = before.rpartition("<answer>")
    formed = bool(there and closed)
    pairs = [(normalised(answer), normalised(truth)) for truth in question.truths if formed]
    em = any(answer == truth for answer, truth in pairs)
    f1 = max((_overlap(*pair) for pair in pairs), default=0.0)
    fields = {"em": float(em), "f1": f1, "format": float(formed)}
    return Reward(fields[field], em, fields)


def normalised(text: str) -> str:
    """A text in lower case, without punctuation, articles and needless space."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _overlap(answer: str, truth: str) -> float:
    """F1 of their words; HotpotQA's yes, no and noanswer are like nothing but themselves."""
    if answer == truth or {answer, truth} & {"yes", "no", "noanswer"}:
        return float(answer == truth)
    ours, theirs = Counter(answer.split()), Counter(truth.split())
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def math() -> Scored:
    r"""1 for an answer in `\boxed{}`, or behind `####`, that equals the truth as mathematics."""
    from jaxrl_llm.tasks.math.worker import AnswerChecker, Verdict, equals_any

    checker = once(AnswerChecker)  # its workers start when there is something to check

    def checked(question: Question, response: str) -> Reward:
        text = final_part(response)
        answer = final(text) if boxed(text) is not None or "####" in text else None
        if answer is None:
            return Reward(0.0, False, {"format": 0.0})
        asked = (
            question.prompt if isinstance(question.prompt, str) else question.prompt[-1]["content"]
        )
        verdict = equals_any(checker(), question.truths, answer, asked)
        right = verdict is Verdict.EQUAL
        return Reward(float(right), right, {"format": 1.0}, verdict is not Verdict.UNDECIDED)

    return checked


BY_NAME: dict[str, Callable[[], Scored]] = {
    "math": math,
    "exact": lambda: exact,
    "choice": lambda: choice,
    "tagged": lambda: tagged,
    "em": lambda: partial(by_words, field="em"),
    "f1": lambda: partial(by_words, field="f1"),
}
AS_WRITTEN = ("exact", "tagged", "regex")  # by these a truth is its text, if that shows a list too
NEEDS_TRUTH = (*BY_NAME, "regex")


def adapted(function: Callable[..., Any], name: str) -> Scored:
    """A function of somebody as a reward, called by the names of its parameters.

    `(example, response)`, with the row as the example, is this package's, as is `(example, responses)`
    of a group; `(completions, **columns)` TRL's, called with a group;
    `(data_source, solution_str, ground_truth, extra_info)` verl's. Each call has copies of the data,
    which it may change.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind in kinds}

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        if missing := needed - {*values}:
            raise UserError(
                f"--reward {name} takes {', '.join(sorted(missing))}, of which the data have no column"
            )
        return {n: x for n, x in values.items() if takes_all or n in parameters}

    def for_trl(question: Question, responses: Sequence[str]) -> Any:
        chat, count = not isinstance(question.prompt, str), len(responses)
        messages = [[{"role": "assistant", "content": one}] for one in responses]
        prompt = list(question.prompt) if chat else question.prompt
        columns = {n: x for n, x in question.row.items() if n not in ("prompt", "completion")}
        given = named(columns | {"prompts": prompt, "completions": ()})
        each = {n: [copied(x) for _ in range(count)] for n, x in given.items()}
        return function(**each | {"completions": messages if chat else [*responses]})

    def for_verl(question: Question, response: str) -> Any:
        row, truth = question.row, next(iter(question.truths), None)
        if truth is None:  # none that a reward by name could read
            with suppress(UserError):
                truth = answer_of(row)
        parts = {
            "data_source": row.get("data_source", ""),
            "solution_str": response,
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth", truth),
            "extra_info": row.get("extra_info") or {},
        }
        return function(**copied(named(parts)))

    if "completions" in parameters:
        call = for_trl
    elif "solution_str" in parameters:
        call = for_verl
    elif len(needed) == 2 and next(iter(parameters)) != "response":
        call = lambda question, said: function(copied(question.row), copied(said))
    else:
        raise UserError(
            f"--reward {name} takes ({', '.join(parameters)}): write it as reward(example, response), as "
            "(example, responses), as TRL's (completions, **columns), or as verl's (data_source, "
            "solution_str, ground_truth, extra_info)"
        )

    def scored(question: Question, response: str) -> Reward | None:
        [reward] = each(question, response, 1)
        return reward

    def each(question: Question, responses: Any, count: int) -> list[Reward | None]:
        result = _plain(waited_for(call(question, responses)))
        listed = [*result] if isinstance(result, list | tuple) else [result]
        if len(listed) != count:
            raise ValueError(f"{name} returned {len(listed)} for {count} responses")
        return [None if one is None else as_reward(one, name) for one in listed]

    if {"completions", "responses"} & {*parameters}:
        return OfGroup(lambda question, responses: each(question, responses, len(responses)))
    return scored


def waited_for(result: Any) -> Any:
    """The result of a call, which may be of an `async` function: in this thread, unless it runs a loop."""
    if not inspect.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    # a loop of its own: one that all share would stand still with a function that blocks
    return in_background(partial(asyncio.run, result)).result()


def copied(value: Any) -> Any:
    """A copy for a function that may change it; what has none, as a lock or a client, is handed on."""
    if isinstance(value, Mapping):
        return {name: copied(x) for name, x in value.items()}
    try:
        return deepcopy(value)
    except Exception:
        return value


def _plain(result: Any) -> Any:
    """A number or an array of NumPy or torch as Python's own."""
    return result.tolist() if hasattr(result, "tolist") else result


def as_reward(result: Any, name: str) -> Reward:
    """The result of a function as a Reward: a number, or verl's dict with a score."""
    if isinstance(result, Reward):
        return result
    fields: dict[str, float] = {}
    if isinstance(result, Mapping):
        plain = {n: _plain(x) for n, x in result.items()}
        numbers = {n: float(x) for n, x in plain.items() if isinstance(x, Real)}
        fields = {n: x for n, x in numbers.items() if n != "score"}
        if "score" not in numbers:
            has = ", ".join(map(str, result)) or "nothing"
            raise TypeError(
                f"{name} returned a dict without a score, of {has}: give score a number"
            )
        result = numbers["score"]
    try:
        score = float(result)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} returned {result!r:.60}, which is no number") from error
    return Reward(score, fields.get("acc", score) >= 1, fields)
