"""Does a game teach faster where each turn has a reward of its own?

A guess that narrows the range is worth what it narrows; the game is worth 1 if it is won, as before.
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
