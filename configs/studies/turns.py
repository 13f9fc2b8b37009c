"""Does a game teach faster where each turn has a reward of its own?

A guess is worth what it narrows the range by, and has the credit of the guesses from it on; a game that is won
is worth 1, as before.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../guess.py",
    variants={
        "the game alone": {"by_turn": 0.0},
        "half by turn": {"by_turn": 0.5},
        "all by turn": {"by_turn": 1.0},
    },
    baseline="the game alone",
    flags={"alpha": 0.0, "eta": 0.0},
    warm=(),
    seeds=range(3),
)
