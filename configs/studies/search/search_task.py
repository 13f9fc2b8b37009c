"""What a pretrained model does on many small tasks before any reinforcement: which of them can it learn?

    python configs/studies/search/search_task.py MODEL found.json                      # all that are not there yet
    python configs/studies/search/search_task.py MODEL found.json --only sum letters   # those of such a name

A task to learn from is sometimes solved, not always, and its responses have rare tokens. Each row of the file has
`accuracy` and `reward` of `n` responses at `temperature`, the share of prompts whose responses differ in reward
(`mixed`: only these teach), of tokens with p < 0.5 (`rare`), of responses that the limit cuts (`cut`), tokens a
prompt and a response, and seconds to sample.
The models are chat models in ChatML; it needs `pip install 'jaxrl_llm[gym]'`.
"""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import jaxrl_llm as jl
from jaxrl_llm.adapters.reasoning_gym import ReasoningGym, tagged
from jaxrl_llm.cli import parse
from jaxrl_llm.config import load
from jaxrl_llm.learning.groups import TokenTask
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves.generate import Recipe, generate

CONFIG = Path(__file__).parents[2] / "pretrained.py"
RESPONSES = 4  # to a prompt
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"
BRIEFLY = " Answer in one sentence."
STEPS = " Think step by step, then write 'Answer:' and the answer."
TAGGED = " Think first, then write the answer as <answer>...</answer>."


def turn(
    question: str, how: str = "", shots: Sequence[tuple[str, str]] = (), cut: str = "$"
) -> str:
    """Turns that show how, the question without what matches `cut`, the begin of the answer."""
    said = "".join(f"{USER}{asked}{ASSISTANT}{answer}{END}" for asked, answer in shots)
    short = re.sub(cut, "", question.strip(), flags=re.DOTALL)
    return f"{said}{USER}{short}{how}{ASSISTANT}"


def number(response: str) -> str | None:
    """The last number in a response."""
    found = re.findall(r"-?\d+(?:\.\d+)?", response.replace(",", ""))
    return found[-1] if found else None


def line(response: str) -> str:
    """The first line of a response."""
    return response.strip().partition("\n")[0].strip(" .\"'`")


def word(response: str) -> str | None:
    """The last word of a response."""
    found = re.findall(r"[A-Za-z-]+", response)
    return found[-1] if found else None


def gym(
    name: str,
    read: Callable[[str], str | None],
    /,
    *shots: tuple[str, str],
    how: str = "",
    cut: str = "$",
    **settings: Any,
):
    """A task of reasoning-gym with turns that show how; it is made when it is called."""
    frame = partial(turn, how=how, shots=shots, cut=cut)
    return partial(ReasoningGym, name, frame=frame, read=read, **settings)


def puzzles(people: int) -> Any:
    """Knights and Knaves under the paper's prompt and reward."""
    recipe = Recipe(people=(people,), depth=1, train=64, test=1)
    return knights_knaves.english([*generate(recipe, "train")], [])


def sums(terms: int, digits: int = 1) -> dict[str, int]:
    """Settings of chain_sum."""
    return {"min_terms": terms, "max_terms": terms, "min_digits": 1, "max_digits": digits}


WORKED = (
    ("5 + 8 - 4 =", "5 + 8 = 13, 13 - 4 = 9. The answer is 9."),
    ("2 - 6 + 7 =", "2 - 6 = -4, -4 + 7 = 3. The answer is 3."),
)
TERSE = (("5 + 8 - 4", "5 + 8 = 13, 13 - 4 = 9"),)
TERSER = ("2 - 6 + 7", "2 - 6 = -4, -4 + 7 = 3")
SUMS = (("5 + 8 - 4 =", "The answer is 9."), ("2 - 6 + 7 =", "The answer is 3."))
PRODUCTS = (
    ("34 * 6", "30 * 6 = 180, 4 * 6 = 24, 180 + 24 = 204. The answer is 204."),
    ("7 * 52", "7 * 50 = 350, 7 * 2 = 14, 350 + 14 = 364. The answer is 364."),
)
EQUATIONS = (
    ("3*e + 4 = 19", "3*e = 19 - 4 = 15, e = 15 / 3 = 5. The answer is 5."),
    ("7*k - 10 = 4", "7*k = 4 + 10 = 14, k = 14 / 7 = 2. The answer is 2."),
)
SPELLED = (("queen", "q u e e n, n e e u q. neeuq"), ("bat", "b a t, t a b. tab"))
REVERSED = (("hundred, go, acute", "acute, go, hundred"), ("is, tree, old, I", "I, old, tree, is"))
COUNTED = (
    (
        'How many times does the letter "n" appear in the text: "hundred thousand"?',
        "hundred has 1, thousand has 1. The answer is 2.",
    ),
    (
        'How many times does the letter "e" appear in the text: "the week on"?',
        "the has 1, week has 2, on has 0. The answer is 3.",
    ),
)
SMALL = {"min_words": 2, "max_words": 4}
TASKS: dict[str, tuple[Callable[[], Any], int]] = {  # and the most tokens of a response
    "configs/pretrained.py": (lambda: load(CONFIG)().task(Path()), 48),
    "sum of 3 digits, worked once": (
        gym("chain_sum", number, *TERSE, cut=".*: | =", **sums(3)),
        48,
    ),
    "sum of 3 digits, tersely": (
        gym("chain_sum", number, *TERSE, TERSER, cut=".*: | =", **sums(3)),
        48,
    ),
    "sum of 3 digits, worked": (gym("chain_sum", number, *WORKED, cut=".*: ", **sums(3)), 64),
    "sum of 4 digits, worked": (gym("chain_sum", number, *WORKED, cut=".*: ", **sums(4)), 64),
    "sum of 3 numbers, worked": (gym("chain_sum", number, *WORKED, cut=".*: ", **sums(3, 2)), 64),
    "sum of 3 digits, shown": (gym("chain_sum", number, *SUMS, cut=".*: ", **sums(3)), 64),
    "product, worked": (
        gym("products", number, *PRODUCTS, cut=r".*: |\. Give.*", max_digits=2),
        64,
    ),
    "equation, worked": (
        gym("simple_equations", number, *EQUATIONS, cut=".*: ", max_terms=2, max_value=10),
        64,
    ),
    "spelling backward, shown": (
        gym("spell_backward", word, *SPELLED, cut=".*: ", min_word_len=3, max_word_len=5),
        64,
    ),
    "reversing words, shown": (
        gym("word_sequence_reversal", line, *REVERSED, cut=".*: ", max_words=5),
        64,
    ),
    "letters, worked": (gym("letter_counting", number, *COUNTED, **SMALL), 64),
    "sum of 3 digits": (gym("chain_sum", number, **sums(3)), 64),
    "sum of 3 digits, steps": (gym("chain_sum", number, how=STEPS, **sums(3)), 64),
    "sum of 3 digits, tagged": (gym("chain_sum", tagged, how=TAGGED, **sums(3)), 64),
    "arithmetic": (gym("basic_arithmetic", number, max_terms=3, max_digits=1), 64),
    "product": (gym("products", number, max_digits=1), 64),
    "letters": (gym("letter_counting", number, **SMALL), 64),
    "letters, a sentence": (gym("letter_counting", number, how=BRIEFLY, **SMALL), 64),
    "spelling backward": (gym("spell_backward", line, min_word_len=3, max_word_len=5), 64),
    "sorting numbers": (gym("number_sorting", line, max_numbers=4, max_decimals=0), 64),
    "sorting words": (gym("word_sorting", line, max_words=4, max_word_length=6), 64),
    "reversing words": (gym("word_sequence_reversal", line, max_words=4), 64),
    "legs": (gym("leg_counting", number, min_animals=2, max_animals=2, max_instances=4), 64),
    "divisor": (gym("gcd", number, max_value=30), 64),
    "multiple": (gym("lcm", number, max_value=12), 64),
    "primes": (gym("count_primes", number, max_n=30), 64),
    "bits": (gym("count_bits", number, max_n=63), 64),
    "kin": (gym("family_relationships", word, max_family_size=4), 64),
    "sisters": (gym("aiw", number), 64),
    "weekday": (gym("calendar_arithmetic", word, tasks=["weekday_of_date"]), 64),
    "series": (gym("number_sequence", number, max_terms=6, max_complexity=1), 64),
    "least or largest": (gym("number_format", number, max_n=10000), 64),
    "syllogism": (gym("syllogism", word), 64),
    "needle": (gym("needle_haystack", word, min_num_statements=5, max_num_statements=8), 64),
    "factors": (gym("prime_factorization", line, max_value=40), 64),
    "fraction": (gym("fraction_simplification", line, max_value=10, max_factor=5), 64),
    "palindrome": (gym("palindrome_generation", line, max_length=5), 64),
    "2 knights, gym's words": (gym("knights_knaves", line), 64),
    "2 knights, the paper's prompt": (partial(puzzles, 2), 192),
    "3 knights, the paper's prompt": (partial(puzzles, 3), 192),
}


def tried(
    model: jl.Model, make: Callable[[], Any], prompts: int, sampling: jl.Sampling
) -> tuple[dict[str, Any], list[str]]:
    """The row of a task, and some responses."""
    task = TokenTask(make(), model.tokenizer)
    examples = [task.task.train[i] for i in range(prompts)]
    asked, engine = task.prompts(examples), jl.Native(slots=64, block=32)
    began = time.perf_counter()
    made = jl.generate(model, asked, sampling, n=RESPONSES, engine=engine)
    seconds = time.perf_counter() - began
    each = [example for example in examples for _ in range(RESPONSES)]
    rewards = [task.task.reward(e, r.text) for e, r in zip(each, made, strict=True)]
    groups = [rewards[i : i + RESPONSES] for i in range(0, len(rewards), RESPONSES)]
    figures = {
        "accuracy": fmean(r.correct for r in rewards),
        "reward": fmean(r.score for r in rewards),
        "mixed": fmean(len({r.score for r in group}) > 1 for group in groups),
        "rare": fmean(p < math.log(0.5) for r in made for p in r.logps),
        "prompt": fmean(map(len, asked)),
        "length": fmean(len(r.tokens) for r in made),
        "cut": fmean(not r.finished for r in made),
        "seconds": seconds,
    }
    said = [f"{r.score:g} {one.text!r}" for r, one in zip(rewards, made, strict=True)]
    return {"n": len(made), **{k: round(v, 3) for k, v in figures.items()}}, said


def main(
    model: str,
    file: Path,
    /,
    *,
    only: tuple[str, ...] = (),
    prompts: int = 64,
    temperature: float = 1.0,
) -> None:
    """Sample each task once and append its row to a file.

    Args:
        model: a folder, or a name of the hub.
        file: rows in JSON, made where it is not there.
        only: parts of names of tasks; none for all.
        prompts: of a task, with four responses each.
        temperature: of sampling.
    """
    rows = json.loads(file.read_text()) if file.exists() else []
    loaded, name = jl.load(model), Path(model).name
    for task, (make, most) in TASKS.items():
        known = {"model": name, "task": task, "temperature": temperature}
        there = any(
            known.items() <= row.items() and row["n"] >= prompts * RESPONSES for row in rows
        )
        if there or (only and not any(part in task for part in only)):
            continue
        sampling = jl.Sampling(temperature=temperature, max_tokens=most, seed=1)
        row, said = tried(loaded, make, prompts, sampling)
        rows = [row for row in rows if not known.items() <= row.items()]
        rows.append({**known, "most": most, **row})
        file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
        print(json.dumps(rows[-1]), *said[:: RESPONSES * 4], sep="\n  ", flush=True)


if __name__ == "__main__":
    parse.call(main, sys.argv[1:], "search_task")
