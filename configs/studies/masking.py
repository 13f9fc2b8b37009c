"""Which tokens does learning need: those of low, or those of high probability?

arXiv:2505.12929 masks either in turn: if low-probability tokens over-dominate the update, the policy moves mostly
by them, and what the others could teach is lost.
"""

from jaxrl_llm.reports.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={
        "all tokens": {"eta": 0.0},
        "without low": {"eta": 0.5, "stages": "drop_low"},
        "without high": {"eta": 0.5, "stages": "drop_high"},
    },
    baseline="all tokens",
    flags={"chatter": 0.35, "learning_rate": 3e-6, "steps": 80, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
