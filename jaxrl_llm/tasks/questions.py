"""A table of questions as a task: prompts for a chat model, a weighted sum of rewards."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from jaxrl_llm.errors import UserError
from jaxrl_llm.reward import UNGRADED, Reward
from jaxrl_llm.tasks import rewards, tables
from jaxrl_llm.tasks.tables import Question
from jaxrl_llm.tasks.task import Prompt
from jaxrl_llm.userfile import valid_unicode

logger = logging.getLogger(__name__)
Q = TypeVar("Q", bound=Question)

INSTRUCTIONS = {  # by the first reward that has one
    "math": "Reason step by step, and put your final answer within \\boxed{}.",
    "choice": "Think about each choice, and end with the letter of the right one within \\boxed{}.",
    "tagged": "Think between <think> and </think>, then give the answer between <answer> and </answer>.",
    "exact": "Say nothing but the answer.",
    **dict.fromkeys(
        ("em", "f1"), "Think, then give the answer, in a few words, between <answer> and </answer>."
    ),
}
HINTED = "A response to it that is right:\n{}\n\nNow respond in your own words."
HELD_OUT = 200  # questions to test on without a test split, or a tenth of them if that is less
_WRONG = (UserError, TypeError, ValueError, LookupError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Questions:
    """Questions with a sum of rewards (`terms`: by name, with weights); a response is right by the first.

    What has no verdict on an example is left out of its sum.
    """

    train: Sequence[Question]
    test: Sequence[Question]
    terms: Mapping[str, tuple[rewards.Scored, float]]
    system: str = ""
    instruction: str = ""
    name: str = "questions"

    def prompt(self, example: Question) -> Prompt:
        return self._messages(example.prompt)

    def teacher_prompt(self, example: Question) -> Prompt | None:
        if not example.hint:
            return None
        return self._messages(example.prompt, HINTED.format(example.hint))

    def _messages(self, question: tables.Asked, more: str = "") -> Prompt:
        messages = (
            [{"role": "user", "content": question}] if isinstance(question, str) else list(question)
        )
        text = messages[-1]["content"]
        instruction = "" if self.instruction in text else self.instruction
        text = "\n\n".join(part for part in (text, more, instruction) if part)
        messages[-1] = {**messages[-1], "content": text}
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return messages[0]["content"] if isinstance(question, str) and not self.system else messages

    def reward(self, example: Question, response: str) -> Reward:
        return self._sum({name: call(example, response) for name, (call, _) in self.terms.items()})

    def _sum(self, scored: Mapping[str, Reward | None]) -> Reward:
        parts = {name: part for name, part in scored.items() if part is not None}
        if not parts:
            return UNGRADED
        score = sum(self.terms[name][1] * part.score for name, part in parts.items())
        if len(scored) > 1:
            fields = {name: part.score for name, part in parts.items()}
            for name, part in parts.items():
                kept = {key: x for key, x in part.fields.items() if key not in self.terms}
                fields |= {f"{name}_{key}": x for key, x in kept.items()}
        else:
            fields = next(iter(parts.values())).fields
        checked = all(part.graded for part in parts.values())
        return Reward(score, next(iter(parts.values())).correct, fields, checked)


class GroupQuestions(Questions):
    """Questions whose responses are graded together, as one of the terms wants it."""

    def rewards(self, example: Question, responses: Sequence[str]) -> list[Reward]:
        scored = {
            name: call.rewards(example, responses)
            if isinstance(call, rewards.OfGroup)
            else [call(example, response) for response in responses]
            for name, (call, _) in self.terms.items()
        }
        return [
            self._sum({name: each[i] for name, each in scored.items()})
            for i in range(len(responses))
        ]


def task(
    source: str,
    specs: Sequence[str] = ("math",),
    *,
    weights: Sequence[float] = (),
    test: str = "",
    held_out: int = HELD_OUT,
    prompt_column: str = "",
    answer_column: str = "",
    hint_column: str = "",
    system: str = "",
    instruction: str | None = None,
    judge: rewards.Scored | None = None,
) -> Questions:
    """Questions of a file or a data set at the hub, with rewards; a UserError that says what is wrong.

    `source` is `mine.jsonl`, `owner/name[:config[:split]]` at the hub, or `tfds:name[/config][:split]`.
    Without a `test` source the set's test or validation split is the test, else `held_out` questions,
    the same ones each time. A `judge` is one more reward, the last.
    """
    calls = terms(specs, weights, judge)
    by_name = [name for spec in specs if (name := spec.partition(":")[0]) in rewards.NEEDS_TRUTH]
    columns: dict[str, Any] = {"prompt_column": prompt_column, "answer_column": answer_column}
    columns |= {"hint_column": hint_column, "needs": by_name[:1], "choice": "choice" in specs}
    train, held = split(source, test, held_out, partial(questions, **columns))
    if instruction is None:
        instruction = next((INSTRUCTIONS[one] for one in specs if one in INSTRUCTIONS), "")
    together = any(isinstance(call, rewards.OfGroup) for call, _ in calls.values())
    kind = GroupQuestions if together else Questions
    return kind(train, held, calls, system, instruction)


def require_test(source: str, test: str, held_out: int) -> None:
    """A UserError if a run on a file would have nothing to test on; a set at the hub may have a split for it."""
    if held_out < 1 and not test and tables.is_local(source):
        raise UserError(
            f"--held-out {held_out} leaves nothing to test on: name other data by --test, or hold out 1 or more"
        )


def terms(
    specs: Sequence[str], weights: Sequence[float] = (), judge: rewards.Scored | None = None
) -> dict[str, tuple[rewards.Scored, float]]:
    """Rewards by their names in the metrics, with their weights; the judge, if there is one, is the last."""
    short = lambda spec: spec.rpartition(":")[2] if ".py:" in spec else spec.partition(":")[0]
    called = [(short(spec), rewards.reward(spec)) for spec in specs]
    called += [("judge", judge)] if judge else []
    if weights and len(weights) != len(called):
        raise UserError(f"--weights: {len(weights)} for {len(called)} rewards: give one each")
    weights = weights or (1.0,) * len(called)
    calls = {name: (call, x) for (name, call), x in zip(called, weights, strict=True)}
    if len(calls) < len(called):
        raise UserError("--reward: two have one name, and would be one field of the metrics")
    return calls


def split(
    source: str, test: str, held_out: int, read: Callable[[Sequence[Path]], list[Q]]
) -> tuple[list[Q], list[Q]]:
    """The rows of a source that `read` has read of its files, and those to test on, or held out for that."""
    if held_out < 0:
        raise UserError(f"held_out = {held_out} must be at least 0")
    trained, tested = _files(source, test)
    train = read(trained)
    if tested:
        held = read(tested)
    else:
        first = {str(row.prompt): row for row in reversed(train)}
        order = [*reversed(first)]
        Random(0).shuffle(order)  # noqa: S311 (the same for all seeds of a run, which are compared)
        count = min(held_out, max(1, len(order) // 10))
        aside = {prompt: first[prompt] for prompt in order[:count]}
        held = [*aside.values()]
        train = [row for row in train if str(row.prompt) not in aside]
    if not train:
        raise UserError(f"{source} has one prompt, and it is held out to test on: give more")
    return train, held


def read_rows(files: Sequence[Path], read: Callable[[tables.Row, str], Q]) -> list[tuple[str, Q]]:
    """Each row, read, with where it is; the place is in the error of a wrong one."""
    placed = []
    for path in files:
        for number, row in enumerate(tables.rows(path)):
            where = f"{path}, row {number}"
            try:
                if not isinstance(row, Mapping):
                    raise UserError(f"a {type(row).__name__}, not a row with columns")
                one = read(row, where)
                asked = one.prompt
                texts = [asked] if isinstance(asked, str) else [each["content"] for each in asked]
                valid_unicode("".join(texts))
                placed.append((where, one))
            except _WRONG as error:
                raise UserError(f"{where}: {error}") from error
    if not placed:
        raise UserError(f"{', '.join(map(str, files))} holds no rows")
    return placed


def questions(
    files: Sequence[Path],
    *,
    prompt_column: str = "",
    answer_column: str = "",
    hint_column: str = "",
    needs: Sequence[str] = (),
    choice: bool = False,
) -> list[Question]:
    """The questions in files; `needs` are rewards for which each has to have an answer."""

    def read(row: tables.Row, _: str) -> Question:
        question = _question(row, prompt_column, answer_column, needs, choice)
        if not hint_column or row.get(hint_column, "") is None:
            return question
        named = tables.column(row, hint_column, (), "--hint-column")
        return replace(question, hint=str(row[named]))

    placed = read_rows(files, read)
    lost = [where for where, one in placed if needs and not _can_be_met(one, needs[0])]
    if lost:
        truth = dict(placed)[lost[0]].truths
        text = "%s: no answer could ever be right there, the truth being %.80r; rows like this one: %d of %d"
        logger.warning(text, lost[0], truth, len(lost), len(placed))
    return [one for _, one in placed]


def _files(source: str, test: str) -> tuple[list[Path], list[Path]]:
    """The files to train on, and those to test on; none of these where there is no such split."""
    of_hub = cache(tables.of_hub)  # the hub is asked once for a set that both name

    def at_hub(source: str) -> tuple[tables.HubData, str]:
        """The data set `owner/name[:config[:split]]` or `tfds:name[/config][:split]`, and that split."""
        if source.startswith("tfds:"):
            _, name, split = [*source.split(":", 2), ""][:3]
            return tables.of_published(name), split
        name, config, split = [*source.split(":", 2), "", ""][:3]
        return of_hub(f"{name}:{config}"), split

    held = []
    if tables.is_local(source):
        trained = [Path(source)]
    else:
        data, split = at_hub(source)
        trained = data.require(split or "train")
        kinds = ("test", "dev", "validation")
        like = [split.replace("train", kind) for kind in kinds if "train" in split]
        beside = map(data.find, () if test else (*like, *kinds))  # test_sft beside train_sft
        held = next((files for files in beside if files and not {*files} & {*trained}), [])
    if test and tables.is_local(test):
        held = [Path(test)]
    elif test:
        data, split = at_hub(test)
        held = data.require(*([split] if split else ["test", "dev", "validation", "train"]))
    return trained, held


def _question(
    row: tables.Row, prompt_column: str, answer_column: str, needs: Sequence[str], choice: bool
) -> Question:
    content = tables.prompt_of(row, prompt_column)
    try:
        answer = tables.answer_of(row, answer_column)
    except UserError:
        if needs or (answer_column and answer_column not in row):
            raise
        answer = None
    if choice and (choices := tables.choices_of(row)):
        listed = "\n".join(
            f"{letter}. {text}"
            for letter, text in zip(tables.LETTERS, choices.values(), strict=False)
        )
        if not isinstance(content, str):
            raise UserError(
                "a prompt of messages and a column of choices: write the choices into the prompt"
            )
        return Question(f"{content}\n{listed}", (tables.letter_of(answer, choices),), row)
    as_written = {*needs} & {*rewards.AS_WRITTEN}
    try:
        truths = () if answer is None else tables.truths(answer, printed=not as_written)
    except TypeError:  # of what no reward here reads, a function may
        if needs:
            raise
        truths = ()
    if needs and not truths:
        raise UserError(f"the answer is empty, and --reward {needs[0]} needs one")
    return Question(content, truths, row)


def _can_be_met(question: Question, spec: str) -> bool:
    """True if some answer could be right by the reward of this name."""
    if spec == "choice":
        return question.truths[0] in (*tables.LETTERS,)
    if spec == "math":
        from jaxrl_llm.tasks.math.records import is_read

        return any(map(is_read, question.truths))
    return True
