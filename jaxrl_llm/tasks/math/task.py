"""Math problems as a task: the reward is 1 if the boxed answer is right and worked out, else 0."""

from dataclasses import dataclass

from jaxrl_llm.reward import Reward
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.math.worker import AnswerChecker, Verdict, equals_any
from jaxrl_llm.tasks.tables import boxed
from jaxrl_llm.tasks.task import Source

_PROMPT = (
    "<|im_start|>system\nWork the problem out between <think> and </think>. After that, state the final "
    "answer within \\boxed{}.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n<think>"
)


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
        """1 if the answer equals any truth; else 0, ungraded if a comparison was undecided."""
        answer = boxed_answer(response)
        if answer is None:
            return Reward(0.0, False, {"boxed": 0.0})
        verdict = equals_any(self.checker, example.truths, answer, example.question)
        correct = verdict is Verdict.EQUAL
        return Reward(float(correct), correct, {"boxed": 1.0}, verdict is not Verdict.UNDECIDED)


def boxed_answer(response: str) -> str | None:
    r"""The text in the last `\boxed{}` after `</think>`; None without one."""
    return boxed(response.partition("</think>")[2])
