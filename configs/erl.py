"""ERL (arXiv:2602.13949) on a laptop: keys whose moves nobody knows; the policy writes its own instructions.

Each of five keys makes one of five moves, always the same one. A question names the moves, an answer presses the
keys: without knowing them one of 120 is right. After a wrong answer the policy sees what it pressed and what
moved, writes down the keys, and answers again under that. What it is rewarded for, it learns to do without.

    jaxrl-llm train erl --stage start --out runs/erl-start
    jaxrl-llm train erl --from runs/erl-start
    jaxrl-llm train erl --stage plain --from runs/erl-start --out runs/erl-plain
    jaxrl-llm plot runs/erl runs/erl-plain

The first teaches a small Qwen2.5 from scratch how to read and write such instructions, in worlds whose keys differ
from question to question; the others have one world. `plain` is GRPO on single attempts, as many a step.
"""

from functools import partial
from itertools import permutations
from random import Random
from typing import Literal

import optax

from jaxrl_llm.config import Config, Evaluation, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.reflection import WithReflection
from jaxrl_llm.tasks.task import Reward

MOVES, KEYS = ("up", "down", "left", "right", "jump"), ("a", "b", "c", "d", "e")
PROMPT = 2 + len(MOVES)
ROOM = 40  # tokens: two attempts, a reflection, the second attempt again; or a reflection's prompt


def world(seed):
    """The move of each key."""
    return dict(zip(KEYS, Random(seed).sample(MOVES, len(MOVES)), strict=True))  # noqa: S311


def written(moves):
    """Instructions for a world: the key of each move."""
    keys = {move: key for key, move in moves.items()}
    return " ".join(f"{move} {keys[move]}" for move in MOVES if move in keys)


class Keys:
    """Moves to make in a world; with `many`, in one of its own for each example."""

    name = "keys"

    def __init__(self, seed, many):
        rng = Random(seed)  # noqa: S311 (not for secrets)
        orders = rng.sample([*permutations(MOVES)], 120)
        where = lambda i: world(f"{seed} {i if many else ''}")
        numbers = range(20_000) if many else range(90)
        self.train = [(orders[i % 90], where(i)) for i in numbers]
        self.test = [(order, where(-i)) for i, order in enumerate(orders[90:])]

    def prompt(self, example):
        order, _ = example
        return f"go {' '.join(order)} :"

    def reward(self, example, response):
        order, moves = example
        right = [moves.get(key) for key in response.split()] == [*order]
        return Reward(float(right), correct=right)


def moved(example, attempt, reward):
    """What the keys of an attempt did."""
    _, moves = example
    return " ".join(moves.get(key, "?") for key in attempt.split())


def ask(many, known, task, attempt, feedback):
    """What a reflection reads; where there are many worlds, with instructions that may be right or wrong."""
    if many:
        rng = Random(f"{task} {attempt} {feedback}")  # noqa: S311
        seen = dict(zip(attempt.split(), feedback.split(), strict=False))
        known = rng.choice(["", written(seen), written(world(rng.random()))])
    return f"known {known} {task} {attempt} moved {feedback} ?"


def sft_example(example):
    """A first attempt that guesses, what it tells, and a second attempt that knows."""
    order, moves = example
    keys = {move: key for key, move in moves.items()}
    guess = Random(f"{example}").sample(KEYS, len(KEYS))  # noqa: S311
    return [" ".join(guess), written(moves), " ".join(keys[move] for move in order)]


def config(
    *,
    stage: Literal["start", "erl", "plain"] = "erl",
    steps: int = 40,
    warm_steps: int = 700,
    learning_rate: float = 1e-3,
    alpha: float = 0.0,
    eta: float = 0.0,
    seed: int = 0,
) -> Config:
    """A run on two cores.

    Args:
        stage: supervised, in many worlds; then ERL or plain GRPO, in one.
        steps: of reinforcement.
        warm_steps: of the supervised stage.
        learning_rate: of reinforcement.
        alpha: strength of Advantage Reweighting.
        eta: probability that separates Lopti's two stages.
        seed: of everything: the world, initial weights, order of the data, sampling.
    """
    start, lengths = stage == "start", {"prompt_length": PROMPT, "response_length": ROOM}
    recipe = recipes.grpo if stage == "plain" else recipes.erl
    return Config(
        task=lambda folder: WithReflection(
            Keys(seed, start),
            ask=partial(ask, start),
            feedback=moved,
            attempts=1 if stage == "plain" else 2,
        ),
        model=Scratch(
            qwen2.Shape(
                64, 96, 256, 3, 4, 2, tied=True, kinds=(qwen2.LayerKind(theta=1e3),), max_length=128
            ),
            words=(*MOVES, *KEYS, "go", ":", "known", "moved", "?"),
        ),
        objective=recipes.with_ar_and_lopti(recipe(ROOM), alpha=alpha, eta=eta),
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(**lengths, round_to=8),
        steps=0 if start else steps,
        prompts=16,
        group_size=8,
        sampling=Sampling(max_turns=3),
        engine=Native(slots=128, prefill_prompts=32, block=32),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(PROMPT, 2 * ROOM, round_to=8),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=64,
            demonstration=sft_example,
        )
        if start
        else None,
        evaluation=Evaluation(every=5, validation=200 if start else 22),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
