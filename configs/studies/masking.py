"""Which tokens does learning need: those of low, or those of high probability?

arXiv:2505.12929 masks either in turn: if low-probability tokens over-dominate the update, the policy moves
mostly by them, and what the others could teach is lost. Below 0.2 lie the meaningless words; the first word of an
answer, which decides whether it thinks, has a probability of about 0.3.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={
        "all tokens": {"eta": 0.0},
        "without p < 0.5": {"eta": 0.5, "stages": "drop_low"},
        "only p < 0.5": {"eta": 0.5, "stages": "drop_high"},
        "without p < 0.2": {"eta": 0.2, "stages": "drop_low"},
        "only p < 0.2": {"eta": 0.2, "stages": "drop_high"},
    },
    baseline="all tokens",
    flags={"chatter": 0.35, "learning_rate": 6e-5, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
