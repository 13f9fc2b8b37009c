"""What each stage of the math grader earns: the verdicts that change when it is switched off.

`python -m tests.tasks.stages` prints the table of docs/math.md; `--plain` grades a sample by math-verify alone.
"""

import argparse
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache

from jaxrl_llm.tasks.math import grade, worker
from jaxrl_llm.tasks.math.expression import Node
from jaxrl_llm.tasks.workers import limit_time
from tests.tasks import adversary
from tests.tasks.answers import QUESTIONS, pairs
from tests.tasks.tricks import integer_tricks

Case = tuple[str, str, str, str, bool]  # group, truth, answer, question, whether it is right

_NEVER = re.compile("(?!)")
STAGES = {
    "no more operations than the truth": ("_worked_out", lambda answer, truth: True),
    "not the question's expression": ("_asked", lambda question: frozenset()),
    "percent only where it is asked for": ("_in_percent", lambda form: False),
    "one spelling": ("_SPELLINGS", []),
    "thousands": ("_without_thousands", lambda text: text),
    "two numbers may be meant": ("_readings", lambda text, question: [text]),
    "units": ("_unit_split", lambda text: (text, "")),
    "words that are no unit": ("_is_unit", lambda unit: True),
    "names of units": ("_SYNONYMS", ()),
    "lists and sets": ("_list", lambda text, depth: None),
    "equations and inequalities": ("_relation", lambda text, depth: None),
    "unions": ("_union", lambda text, depth: None),
    "tuples, matrices, ratios": ("_group", lambda text, depth: None),
    "the truth's notation": ("_alike", lambda form, other: form),
    "number bases": ("_BASED", _NEVER),
    "words": ("_WORD", _NEVER),
    "lettered choices": ("_CHOICE", _NEVER),
}


def cases() -> list[Case]:
    """Published truths in other words and spoiled, made-up wrong answers, and the tables of the tests."""
    out: list[Case] = []
    for problem in adversary.published():
        truth = problem.truths[0]
        right = adversary.equivalents(truth)
        out += [("published", truth, text, problem.question, True) for text in right]
        out.append(("spoiled", truth, adversary.spoiled(truth), problem.question, False))
    rng = random.Random(0)
    for n in (7, 112, 123_456):
        out += [("made up", str(n), text, "", False) for text in integer_tricks(n, rng).values()]
    out += [("tables", truth, answer, "", right) for truth, answer, right in pairs()]
    return out + [("questions", t, a, q, right) for q, t, a, right in QUESTIONS]


def apart(same: Callable[[], bool]) -> bool | None:
    """What it returns within two seconds of CPU time, in a process of its own; None if it took longer."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            limit_time(2.0)
            code = 0 if same() else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: True, 1: False}.get(code)


@cache
def algebra(truth: Node, answer: Node) -> bool | None:
    return apart(lambda: worker.equivalent(truth, answer))


def verdict(case: Case) -> bool | None:
    """By the grader as it is now; None if it took too long."""
    _, truth, answer, question, _ = case
    unknown: list[Node] = []

    def engine(true: Node, given: Node) -> bool:
        found = algebra(true, given)
        unknown.extend([given] if found is None else [])
        return bool(found)

    equal = grade.same(truth, answer, question, engine)
    return None if unknown and not equal else equal


def plain(case: Case) -> bool | None:
    """By math-verify, which reads and compares the two itself."""
    from math_verify import parse as read
    from math_verify import verify

    def same() -> bool:
        true, given = (read(rf"\boxed{{{text}}}", parsing_timeout=0) for text in case[1:3])
        return bool(verify(true, given, timeout_seconds=0))

    return apart(same)


def graded(found: list[Case], judge: Callable[[Case], bool | None]) -> list[bool | None]:
    """The verdicts, and a line with how many of each group are accepted."""
    grade.read.cache_clear()
    verdicts = [judge(case) for case in found]
    total = Counter((case[0], case[4]) for case in found)
    accepted = Counter((c[0], c[4]) for c, v in zip(found, verdicts, strict=True) if v)
    groups = [f"{accepted[g]} of {total[g]} {g[0]} {'right' if g[1] else 'wrong'}" for g in total]
    print("accepted:", "; ".join(groups), flush=True)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the cases, grades each n-th")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    worker.warm()
    found = cases()[:: options.every]
    if options.plain:
        graded(found, plain)
        return
    whole = graded(found, verdict)
    for name, (attribute, without) in STAGES.items():
        own = getattr(grade, attribute)
        setattr(grade, attribute, without)
        print(f"without {name}: ", end="")
        now = graded(found, verdict)
        setattr(grade, attribute, own)
        changed = [(c, v) for c, b, v in zip(found, whole, now, strict=True) if b != v]
        kinds = Counter((c[0], "right" if c[4] else "wrong") for c, v in changed if v is not c[4])
        print(f"    lost: {dict(kinds)}; mended: {sum(v is c[4] for c, v in changed)}")


if __name__ == "__main__":
    main()
