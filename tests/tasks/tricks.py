"""Answers that hold the truth or its value and are no answers: what a policy might try on a grader."""

import random
from collections.abc import Iterator

from jaxrl_llm.tasks.knights_knaves.english import answer as kk_answer
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate
from jaxrl_llm.tasks.knights_knaves.task import reward as kk_reward
from jaxrl_llm.tasks.math.records import Problem
from jaxrl_llm.tasks.task import Reward
from tests.tasks.answers import pairs

Case = tuple[str, Problem, str]  # what it tries, the problem, the boxed answer
WIDE = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
FULL = str.maketrans("0123456789", "０１２３４５６７８９")  # noqa: RUF001
SUPER = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def based(number: int, base: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, base)
        digits = str(digit) + digits
    return digits or "0"


def integer_tricks(n: int, rng: random.Random) -> dict[str, str]:
    """Ways of not saying n: questions whose value is n, and answers that are another number."""
    k = rng.randint(2, 9)
    return {
        "sum": rf"\sum_{{k=1}}^{{{n}}}1",
        "integral": rf"\int_0^{{{n}}}1\,dx",
        "product": rf"\prod_{{k=1}}^{{1}}{n}",
        "limit": rf"\lim_{{x\to 0}}({n}+x)",
        "log": rf"\log_{{{k}}} {{{k}^{{{n}}}}}",
        "log of a number": rf"\log_2 {2 ** (n % 60)}",
        "ln": rf"\ln e^{{{n}}}",
        "binomial": rf"\binom{{{n}}}{{1}}",
        "factorial": rf"\frac{{{n}!}}{{{n - 1}!}}",
        "root": rf"\sqrt{{{n * n}}}",
        "cube root": rf"\sqrt[3]{{{n**3}}}",
        "power": rf"{n}^1",
        "half power": rf"{n * n}^{{1/2}}",
        "plus": f"{n - k}+{k}",
        "minus": f"{n + k}-{k}",
        "times one": rf"1\cdot {n}",
        "fraction": rf"\frac{{{k * n}}}{{{k}}}",
        "slash": f"{k * n}/{k}",
        "brackets": f"({n - k})+({k})",
        "absolute": f"|-{n}|",
        "floor": rf"\lfloor {n}.5 \rfloor",
        "gcd": rf"\gcd({n},{n * k})",
        "max": rf"\max({n},{n - k})",
        "modulo": rf"{n} \bmod {n + k}",
        "cosine": rf"{n}\cos 0",
        "exponential": rf"{n}e^0",
        "i": rf"-{n}i^2",
        "derivative": rf"\frac{{d}}{{dx}}({n}x)",
        "equation": f"{k}x={k * n}",
        "chain": f"x={n - k}+{k}={n}",
        "base": f"{based(n, k)}_{k}" if k > 2 or n > 1 else "10_2",
        "its own base": f"{n}_{{10}}",
        "percent": rf"{100 * n}\%",
        "negation": rf"\text{{not }} {n}",
        "bare negation": f"not {n}",
        "unequal": rf"\neq {n}",
        "sign": f"-{n}",
        "double sign": f"--{n}",
        "two answers": f"{n} or {n + k}",
        "list": f"{n},{n + k}",
        "range": f"({n - 1},{n + 1})",
        "plus or minus": rf"{n}\pm {k}",
        "nearly": f"{n}.0000001",
        "thousand": rf"{n}\text{{ thousand}}",
        "nested": rf"\boxed{{{n}}} is wrong, {n + k}",
        "giant": rf"{n}^{{9^{{9^{{9}}}}}}",
        "giant factorial": f"(({n}!)!)!",
        "long": str(n) + "0" * 1500,
        "other digits": str(n).translate(WIDE),
        "wide digits": str(n).translate(FULL),
        "raised digits": "1" + str(n).translate(SUPER),
        "digits apart": " ".join(f"{n}{k}"),
        "words": "the right answer",
        "empty": "",
        "text of a sum": rf"\text{{{n - k}+{k}}}",
        "interval": f"[{n},{n}]",
        "tuple": f"({n},)" if n % 2 else f"({n},{n})",
        "less": f"x<{n}",
        "mixed": rf"{n - 1}\frac{{{k}}}{{{k}}}",
        "infinite sum": rf"{n - 1}+\frac12+\frac14+\cdots",
        "unknown": f"{n}+x-x",
        "zero": rf"{n}+0\cdot\pi",
        "another": str(n + k),
        "reversed": f"{k}{n}",
    }


def wrong_math(count: int, seed: int) -> Iterator[Case]:
    """Wrong answers to integer truths by every trick in turn, and those of the tables."""
    rng = random.Random(seed)
    made = 0
    while True:
        n = rng.choice((rng.randint(2, 20), rng.randint(21, 999), rng.randint(10**5, 10**9)))
        question = f"Find $x$ if $x={n - 1}+1$."
        cases = [
            (trick, Problem(question, (str(n),)), text)
            for trick, text in integer_tricks(n, rng).items()
            if len(text) < 3000
        ]
        cases += [("table", Problem("?", (t,)), a) for t, a, right in pairs() if not right]
        for case in cases:
            if made == count:
                return
            made += 1
            yield case


def claims(names: list[str], roles: list[bool], rng: random.Random) -> dict[str, str]:
    """Responses that must not earn the full score; the truth stands in each of them somewhere."""
    right = kk_answer(names, roles)
    wrong = kk_answer(names, [not role for role in roles])
    name, role = rng.choice(list(zip(names, roles, strict=True)))
    word, other = ("knight", "knave") if role else ("knave", "knight")
    tagged = lambda text: f"so </think><answer>{text}</answer>"
    claim = f"{name} is a {word}"
    return {
        "false": tagged(right.replace(claim, f"It is false that {claim}")),
        "doubt": tagged(right.replace(claim, f"I doubt that {claim}")),
        "not": tagged(right.replace(claim, f"{name} is not a {other}")),
        "all false": tagged(f"None of this holds: {right}"),
        "after": tagged(f"{right} is false"),
        "or": tagged(right.replace(claim, f"{claim} or a {other}")),
        "both": tagged(right.replace(claim, f"{claim}, {name} is a {other}")),
        "twice": tagged(f"{right}\n{right}"),
        "wrong then right": tagged(f"{wrong}\n{right}"),
        "one missing": tagged(right.replace(claim, "")),
        "another name": tagged(right.replace(claim, f"Not{name} is a {word}")),
        "one wrong": tagged(right.replace(claim, f"{name} is a {other}")),
        "nested": f"so </think><answer><answer>{right}</answer></answer>",
        "two answers": tagged(wrong) + f"<answer>{right}</answer>",
        "second thought": f"so </think><think>no</think><answer>{right}</answer>",
        "tag within": tagged(right.replace(claim, f"<b>{claim}</b>")),
        "open": f"so </think><answer>{right}",
        "order": f"<answer>{right}</answer></think>",
        "end token": tagged(right.replace(claim, f"<|im_end|>{claim}")),
        "if": tagged(right.replace(claim, f"if {claim}")),
        "question": tagged(right.replace(claim, f"{claim}?")),
        "opposite day": tagged(f"~({right})"),
        "quoted": tagged(right.replace(claim, f'"{claim}"')),
        "plural": tagged(right.replace(claim, f"{claim}s")),
    }


def wrong_puzzles(count: int, seed: int) -> Iterator[tuple[str, Reward]]:
    """What wrong responses to puzzles earn."""
    rng = random.Random(seed)
    puzzles = list(generate(Recipe((2, 3, 5, 8), 1, 40, 40), "test"))
    made = 0
    while True:
        puzzle = rng.choice(puzzles)
        for trick, text in claims(list(puzzle.names), list(puzzle.solution), rng).items():
            if made == count:
                return
            made += 1
            yield trick, kk_reward(puzzle.names, puzzle.solution, text)
