"""At which probability should Lopti divide the tokens?

arXiv:2505.12929 sets eta to 0.5; 0 is without.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={f"eta {eta:g}": {"eta": eta} for eta in (0.0, 0.25, 0.5, 0.75)},
    baseline="eta 0",
    flags={"chatter": 0.35, "learning_rate": 6e-5, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
