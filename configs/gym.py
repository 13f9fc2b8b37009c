"""A puzzle of reasoning-gym (`chain_sum`) for a small Qwen2.5 from scratch, on a laptop in minutes.

The SFT data are bad on purpose: most examples guess, the others write the sum so far after every number. The
model learns to imitate both; that working it out pays, it finds out by reinforcement. Any other generator needs a
vocabulary and demonstrations of its own, or a pretrained model, which needs neither:

    ReasoningGym("letter_counting")  # with model=Pretrained("Qwen/Qwen2.5-0.5B-Instruct")

It needs `pip install 'jaxrl_llm[gym]'`.
"""

from functools import partial
from random import Random

import optax

from jaxrl_llm.adapters.reasoning_gym import Puzzle, ReasoningGym, tagged
from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native

SHAPE = qwen2.Shape(
    vocab_size=32,
    hidden_size=128,
    intermediate_size=384,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    tied=True,
    kinds=(qwen2.LayerKind(theta=1e3),),
    max_length=128,
)
WORDS = ("<answer>", "</answer>", ";", "=", "+", "-", *map(str, range(10)))


def spaced(text: str) -> str:
    """Its characters, spaces aside, as words."""
    return " ".join(text.replace(" ", ""))


def frame(question: str) -> str:
    """The sum alone: what follows the colon."""
    return spaced(question.partition(":")[2])


def read(response: str) -> str | None:
    """The answer in a response, its digits without spaces."""
    answer = tagged(response)
    return None if answer is None else answer.replace(" ", "")


def worked(puzzle: Puzzle) -> str:
    """The sum after each number, then the answer."""
    terms = puzzle.question.partition(":")[2].replace("=", "").replace("- ", "+ -").split("+")
    sums = [sum(int(term.replace(" ", "")) for term in terms[: n + 1]) for n in range(len(terms))]
    return " ".join(
        (*(f"{spaced(str(s))} ;" for s in sums), f"<answer> {spaced(str(sums[-1]))} </answer>")
    )


def sft_example(puzzle: Puzzle, careless: float) -> str:
    """An SFT example, guessed or worked out, the same at every run."""
    rng = Random(puzzle.seed)  # noqa: S311 (not for secrets)
    guess = f"<answer> {spaced(str(rng.randint(-20, 40)))} </answer>"
    return guess if rng.random() < careless else worked(puzzle)


def config(
    *,
    terms: int = 5,
    careless: float = 0.6,
    steps: int = 40,
    warm_steps: int = 800,
    learning_rate: float = 2e-4,
    alpha: float = 0.3,
    eta: float = 0.5,
    seed: int = 0,
) -> Config:
    """A run of some minutes on two cores.

    Args:
        terms: numbers in a sum.
        careless: share of the demonstrators who guess.
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        learning_rate: of the reinforcement phase.
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        seed: of everything: initial weights, order of the data, sampling.
    """
    prompt, response = 4 * terms + 4, 6 * terms + 8
    return Config(
        task=lambda _: ReasoningGym(
            "chain_sum",
            frame=frame,
            read=read,
            min_terms=terms,
            max_terms=terms,
            min_digits=1,
            max_digits=1,
        ),
        model=Scratch(SHAPE, WORDS),
        objective=recipes.with_ar_and_lopti(recipes.grpo(response), alpha=alpha, eta=eta),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(prompt, response, minibatches=2, microbatches=16, pack=True),
        steps=steps,
        prompts=32,
        group_size=8,
        engine=Native(slots=128, prefill_prompts=32, block=32),
        warm_start=None
        if not warm_steps
        else WarmStart(
            steps=warm_steps,
            collate=Collator(prompt, response, microbatches=4, pack=True),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=64,
            demonstration=partial(sft_example, careless=careless),
        ),
        evaluation=Evaluation(every=10, validation=500),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
