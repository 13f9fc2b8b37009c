"""Does the order of Lopti's two updates matter?

arXiv:2505.12929: low probabilities must come first; with the order reversed, high first, training collapses. The
larger the steps, the less two of them commute, so a larger rate should show it sooner.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={"rate 6e-5": {"learning_rate": 6e-5}, "rate 3e-4": {"learning_rate": 3e-4}},
    variants={
        "Lopti": {"eta": 0.5},
        "plain": {"eta": 0.0},
        "reversed": {"eta": 0.5, "stages": "reversed"},
    },
    baseline="Lopti",
    flags={"chatter": 0.35, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
