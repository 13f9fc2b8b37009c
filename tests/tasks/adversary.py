"""Makes wrong answers that a grader might take for right ones, and right ones it might refuse; counts mistakes.

`python -m tests.tasks.adversary --count 10000 --busy 8` grades 10,000 wrong answers by each grader, and every
published truth in five equivalent ways and a wrong one, on a quiet machine and beside busy processes.
"""

import argparse
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxrl_llm.tasks.math.expression import UnreadableError, parse
from jaxrl_llm.tasks.math.grade import split
from jaxrl_llm.tasks.math.records import Problem, from_file, truths
from jaxrl_llm.tasks.math.task import MathTask
from jaxrl_llm.tasks.math.worker import AnswerChecker
from jaxrl_llm.tasks.task import Reward
from tests.shared import reference
from tests.tasks.tricks import Case, wrong_math, wrong_puzzles


def minerva_style(rng: random.Random, count: int) -> Iterator[Problem]:
    """Truths as printed lists, in the manner of a suite of science problems."""
    for _ in range(count):
        number = rng.choice((f"{rng.randint(1, 99)}.{rng.randint(1, 99)}", str(rng.randint(2, 10**6)),
                             rf"{rng.randint(2, 9)} \times 10^{{{rng.randint(3, 20)}}}",
                             f"{rng.randint(1, 9)}.{rng.randint(1, 9)}e{rng.choice((-19, -3, 8, 33))}",
                             rf"\frac{{{rng.randint(1, 9)}}}{{{rng.choice((10, 11, 16))}}}",
                             rf"{rng.randint(2, 9)}\sqrt{{{rng.choice((2, 3, 5, 7))}}}"))  # fmt: skip
        yield Problem("?", truths(repr([number + "\n"])))


def equivalents(truth: str) -> list[str]:
    """Five ways to write a truth: every rewriting that applies to it, padded out with plain ones."""
    out = [rewrite(truth) for rewrite in REWRITES]
    changed = [text for text in dict.fromkeys(out) if text is not None and text != truth]
    plain = [f" {truth} ", f"${truth}$", f"{truth}.", f"{{{truth}}}", rf"\displaystyle {truth}"]
    return (changed + plain)[:5]


def _decimal(truth: str) -> str | None:
    try:
        number = parse(truth).rational
    except UnreadableError:
        return None
    if number is None or number.denominator == 1:
        return None
    digits = number.denominator.bit_length()  # enough, if any number of digits is
    if (number * 10**digits).denominator > 1:
        return None
    while (number * 10 ** (digits - 1)).denominator == 1:
        digits -= 1
    whole, rest = divmod(abs(int(number * 10**digits)), 10**digits)
    return f"{'-' * (number < 0)}{whole}.{rest:0{digits}d}"


def _plain(truth: str) -> bool:
    return re.fullmatch(r"-?[\d.]+|-?\\d?frac\{\d+\}\{\d+\}", truth) is not None


def _reordered(truth: str) -> str | None:
    parts = [] if re.fullmatch(_THOUSANDS, truth) else split(truth, ",")
    return ", ".join(reversed(parts)) if len(parts) > 1 and truth[:1] not in "([" else None


_THOUSANDS = r"(\\\$)?\d{1,3}(,(\\! ?)?\d{3})+"


def _thousands(truth: str) -> str | None:
    return f"{int(truth):,}" if re.fullmatch(r"\d{4,}", truth) else None


REWRITES: list[Callable[[str], str | None]] = [
    _decimal,
    _reordered,
    _thousands,
    lambda t: t.replace(r"\dfrac", r"\frac") if r"\dfrac" in t else t.replace(r"\frac", r"\dfrac"),
    lambda t: f"x = {t}" if _plain(t) else None,
    lambda t: re.sub(r"e(-?\d+)$", r" \\times 10^{\1}", t) if re.search(r"\de-?\d", t) else None,
    lambda t: rf"{t}\text{{ units}}" if _plain(t) else None,
    lambda t: t.replace(r"\left", "").replace(r"\right", "") if r"\left" in t
    else t.replace("(", r"\left(").replace(")", r"\right)") if r"\(" not in t else None,
    lambda t: re.sub(r"\\text\{\(?([^{}()]*)\)?\}", r"\1", t) if t.startswith(r"\text") else None,
    lambda t: t.replace("+", " + ").replace("-", " - "),
    lambda t: re.sub(r"^\\frac\{(\w+)\}\{(\w+)\}$", r"(\1)/(\2)", t),
    lambda t: re.sub(r"\\sqrt\{(\d)\}(?!\d)", r"\\sqrt \1", t),
    lambda t: t.replace(r"^\circ", "") if t.endswith(r"^\circ") else None,
]  # fmt: skip


def spoiled(truth: str) -> str:
    """The truth with another number, sign or word in it."""
    digits = list(re.finditer(r"\d", truth))
    if digits:
        place = digits[0].start()
        return truth[:place] + str((int(truth[place]) + 1) % 9 + 1) + truth[place + 1 :]
    return f"-{truth}" if "text" not in truth else truth.replace("{", "{non")


def published() -> list[Problem]:
    """MATH-500 and AIME, and printed lists like Minerva's."""
    files = ("math500", "aime_2021_2024")
    problems = [p for f in files for p in from_file(reference("data", "math", f"{f}.parquet"))]
    return problems + list(minerva_style(random.Random(7), 200))


def boxed(answer: str) -> str:
    return rf"so </think> The answer is \boxed{{{answer}}}"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """As many processes that do nothing but work."""
    running = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def wrongly_accepted(count: int, seed: int, checker: AnswerChecker) -> tuple[list[Case], int]:
    """The wrong answers that were taken for right, and how many were left ungraded."""
    task = MathTask([], [], checker)
    accepted, ungraded = [], 0
    for case in wrong_math(count, seed):
        reward = task.reward(case[1], boxed(case[2]))
        ungraded += not reward.graded
        if reward.correct:
            accepted.append(case)
    return accepted, ungraded


def verdicts(
    problems: list[Problem], checker: AnswerChecker
) -> list[tuple[str, str, bool, Reward]]:
    """For each truth its rewritings and a spoiled one: the truth, the text, whether it is right, the reward."""
    task = MathTask([], [], checker)
    out = []
    for problem in problems:
        truth = problem.truths[0]
        answers = [(text, True) for text in equivalents(truth)] + [(spoiled(truth), False)]
        out += [(truth, text, right, task.reward(problem, boxed(text))) for text, right in answers]
    return out


def report(count: int, seed: int, checker: AnswerChecker) -> list[tuple]:
    """Prints the figures of one pass, and returns its verdicts."""
    accepted, ungraded = wrongly_accepted(count, seed, checker)
    print(f"math: {count} wrong answers, {len(accepted)} accepted, {ungraded} ungraded")
    for case in accepted[:20]:
        print("  accepted:", case[0], case[1].truths, case[2])
    taken = {trick for trick, reward in wrong_puzzles(count, seed) if reward.correct}
    print(f"puzzles: {count} wrong responses, accepted: {taken or 'none'}")
    graded = verdicts(published(), checker)
    right = [g for g in graded if g[2]]
    refused = [g for g in right if not g[3].correct]
    wrong = [g for g in graded if not g[2] and g[3].correct]
    print(
        f"published: {len(right) - len(refused)} of {len(right)} right answers accepted, "
        f"{len(wrong)} of {len(graded) - len(right)} wrong ones, "
        f"{sum(not g[3].graded for g in graded)} ungraded"
    )
    for truth, text, _, _ in refused[:20] + wrong[:20]:
        print("  mistaken:", repr(truth), repr(text))
    return [(case[0], case[1].truths, case[2]) for case in accepted] + graded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--busy", type=int, default=0)
    options = parser.parse_args()
    with AnswerChecker(workers=1) as checker:
        quiet = report(options.count, options.seed, checker)
        if options.busy:
            with busy(options.busy):
                print(f"beside {options.busy} busy processes:")
                loaded = report(options.count, options.seed, checker)
            print("the same verdicts" if quiet == loaded else "OTHER VERDICTS")


if __name__ == "__main__":
    main()
