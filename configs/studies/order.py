"""Does the order of Lopti's two updates matter?

arXiv:2505.12929: low probabilities must come first; with the order reversed, high first, training collapses.
"""

from jaxrl_llm.reports.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={
        "Lopti": {"eta": 0.5},
        "plain": {"eta": 0.0},
        "reversed": {"eta": 0.5, "stages": "reversed"},
    },
    baseline="Lopti",
    flags={"chatter": 0.35, "learning_rate": 6e-5, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
