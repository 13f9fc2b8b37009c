"""How strong should Advantage Reweighting be?

arXiv:2505.12929 sets alpha to 0.3 on Knights and Knaves; 0 is without.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={f"alpha {alpha:g}": {"alpha": alpha} for alpha in (0.0, 0.1, 0.3, 0.6, 1.0)},
    baseline="alpha 0",
    flags={"chatter": 0.35, "learning_rate": 6e-5, "eta": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
