"""Guess a number in several turns, for a small Qwen2.5 from scratch.

A number from a range is hidden. The model says one a turn, and the environment whether the hidden one is higher or
lower; with five guesses a range of 31 can always be searched by halving. The SFT data are bad on purpose: most
games count up from the lowest number, which finds one in six; the others guess somewhere near the middle of
what is left. Reinforcement rewards the end of the game alone: from 20% of games won to 79 to 81% (three seeds).
With `--by-turn 0.5` half of a guess's credit is what it and later guesses narrow the range by, and the win.

    jaxrl-llm train configs/guess.py
    jaxrl-llm train configs/guess.py --by-turn 0.5
"""

import math
from dataclasses import replace
from functools import partial
from random import Random

import optax

from jaxrl_llm.config import Config, Evaluation, Pretrained, Scratch, WarmStart
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.objectives import advantages, recipes
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.task import Reward

GUESSES, NUMBERS, LEAST = 5, 40, 24  # turns, numbers there are, and in the smallest range
ROOM = 4 * GUESSES  # a guess and its end, an answer


class Hidden:
    """One game: it says higher or lower until the number is found or no guess is left."""

    def __init__(self, game, tokenizer):
        self.low, self.high, self.number = game
        self.tokenizer, self.guesses, self.start = tokenizer, 0, self.high - self.low + 1

    def step(self, tokens):
        self.guesses += 1
        said = self.tokenizer.decode(tokens)
        found = said == str(self.number)
        reward = Reward(float(found), correct=found, fields={"guesses": float(self.guesses)})
        if found or self.guesses == GUESSES or not said.isdecimal():
            return None, reward
        guess, before = int(said), self.high - self.low + 1
        if guess < self.number:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        narrowed = math.log(before / (self.high - self.low + 1), self.start)
        answer = self.tokenizer.encode("higher" if guess < self.number else "lower")
        return answer, replace(reward, score=narrowed)


class Guess:
    """Ranges of 24 to 31 of 40 numbers and one that is hidden; test ranges are not trained on."""

    name = "guess"

    def __init__(self):
        sizes = range(LEAST, 2**GUESSES)
        ranges = [(low, low + size - 1) for size in sizes for low in range(NUMBERS - size + 1)]
        Random(0).shuffle(ranges)  # noqa: S311 (not for secrets)
        games = lambda some: [
            (*one, number) for one in some for number in range(one[0], one[1] + 1)
        ]
        self.test, self.train = games(ranges[:20]), games(ranges[20:])

    def prompt(self, game):
        low, high, _ = game
        return f"{low} to {high} ?"

    def environment(self, game, tokenizer):
        return Hidden(game, tokenizer)


def sft_example(game, counting):
    """The guesses of an SFT example: counted up, or near the middle of what is left."""
    low, high, number = game
    rng = Random(f"{game}{counting}")  # noqa: S311
    if rng.random() < counting:
        return [str(low + i) for i in range(GUESSES)]
    guesses = []
    while len(guesses) < GUESSES and number not in guesses:
        guesses.append(min(max(low, (low + high) // 2 + rng.choice((-1, 0, 0, 1))), high))
        low, high = (guesses[-1] + 1, high) if guesses[-1] < number else (low, guesses[-1] - 1)
    return [str(guess) for guess in guesses]


def config(
    *,
    steps: int = 60,
    warm_steps: int = 800,
    counting: float = 0.6,
    layers: int = 3,
    learning_rate: float = 2e-4,
    alpha: float = 0.3,
    eta: float = 0.5,
    by_turn: float = 0.0,
    teacher: str = "",
    seed: int = 0,
) -> Config:
    """A run on two cores.

    Args:
        steps: of the reinforcement phase.
        warm_steps: of the supervised phase.
        counting: share of the SFT examples that count up.
        layers: of the model.
        learning_rate: of the reinforcement phase.
        alpha: strength of Advantage Reweighting; 0 switches it off.
        eta: probability that separates Lopti's two stages; 0 switches it off.
        by_turn: share of a guess's credit that is the rewards from it on, for narrowing the range too; the rest
            is the game's.
        teacher: folder of a model to learn from in place of rewards, as exported from a run; `--layers 6
            --counting 0` makes a better one than the policy.
        seed: of everything: initial weights, order of the data, sampling.
    """
    lengths = {"prompt_length": 4, "response_length": ROOM}
    objective = recipes.distillation(ROOM) if teacher else recipes.grpo(ROOM)
    if by_turn:
        credit = partial(advantages.by_turn, episode_share=1 - by_turn)
        objective = replace(objective, advantage=credit)
    return Config(
        task=lambda folder: Guess(),
        model=Scratch(
            qwen2.Shape(
                64,
                96,
                256,
                layers,
                4,
                2,
                tied=True,
                kinds=(qwen2.LayerKind(theta=1e3),),
                max_length=64,
            ),
            words=(*map(str, range(NUMBERS)), "to", "?", "higher", "lower"),
        ),
        objective=recipes.with_ar_and_lopti(objective, alpha=alpha, eta=eta),
        teacher=Pretrained(teacher) if teacher else None,
        optimizer=optimizers.adamw(learning_rate),
        collate=Collator(**lengths, minibatches=2, round_to=8),
        steps=steps,
        prompts=32,
        group_size=8,
        sampling=Sampling(max_turns=GUESSES),
        engine=Native(slots=128, prefill_prompts=32, block=32),
        warm_start=WarmStart(
            steps=warm_steps,
            collate=Collator(**lengths, round_to=8),
            optimizer=optimizers.muon(
                optax.warmup_cosine_decay_schedule(0.0, 4e-3, min(50, warm_steps - 1), warm_steps),
                qwen2.matrices,
            ),
            batch=64,
            demonstration=partial(sft_example, counting=counting),
        ),
        evaluation=Evaluation(every=10, validation=500),
        compute=qwen2.Compute(attend=attention.xla, remat=None),
        seed=seed,
    )
