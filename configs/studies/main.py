"""Do Advantage Reweighting and Lopti help, each and together, with GRPO and with REINFORCE++?

The main claim of arXiv:2505.12929: low-probability tokens over-dominate the update, and taming them by either
method, or by both, raises accuracy on Knights and Knaves.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={"GRPO": {"algo": "grpo"}, "REINFORCE++": {"algo": "reinforce_plus_plus"}},
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
    },
    baseline="plain",
    flags={"chatter": 0.35, "learning_rate": 6e-5},
    warm=("chatter", "people", "warm_steps"),
)
