"""Math problems as a task: the reward is 1 if the boxed answer is right and worked out, else 0."""

from dataclasses import dataclass

from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.math.worker import AnswerChecker, Verdict
from jaxrl_llm.tasks.task import Reward, Source

_PROMPT = (
    "<|im_start|>system\nWork the problem out between <think> and </think>. After that, state the final "
    "answer within \\boxed{}.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n<think>"
)
_BOX = "\\boxed{"
NESTED = 8  # the most boxes in boxes that are opened


@dataclass(frozen=True)
class MathTask:
    """Problems checked by `checker`; `prompt_format` has `{question}` and ends in `<think>`."""

    train: Source[Problem]
    test: Source[Problem]
    checker: AnswerChecker
    name: str = "math"
    prompt_format: str = _PROMPT

    def prompt(self, example: Problem) -> str:
        return self.prompt_format.replace("{question}", example.question)

    def reward(self, example: Problem, response: str) -> Reward:
        """1 if the answer equals any truth; else 0, unchecked if a comparison was undecided."""
        answer = boxed_answer(response)
        verdict = Verdict.DIFFERENT
        for truth in example.truths:
            if answer is None:
                break
            found = self.checker.check(truth, answer, example.question)
            if found is not Verdict.DIFFERENT:
                verdict = found
            if found is Verdict.EQUAL:
                break
        correct = verdict is Verdict.EQUAL
        fields = {"boxed": float(answer is not None)}
        return Reward(float(correct), correct, fields, checked=verdict is not Verdict.UNDECIDED)


def boxed_answer(response: str) -> str | None:
    r"""The text in the last `\boxed{}` (the innermost of nested ones) after `</think>`, or None.

    A box around more than another box is returned as it is, and cannot be read as an answer.
    """
    text = response.partition("</think>")[2]
    inside, start = None, text.find(_BOX)
    while start >= 0:
        inside = _braced(text, start + len(_BOX))
        if inside is None:
            return None
        start = text.find(_BOX, start + len(_BOX) + len(inside))
    for _ in range(NESTED):
        if inside is None or not inside.strip().startswith(_BOX):
            break
        inner = _braced(inside.strip(), len(_BOX))
        if inner is None or len(inner) + len(_BOX) + 1 < len(inside.strip()):
            return inside
        inside = inner
    return inside


def _braced(text: str, start: int) -> str | None:
    """The text from `start`, behind an open brace, up to the brace that closes it; None if none."""
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place]
        place += 1
    return None
