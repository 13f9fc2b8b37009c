"""Does what the methods do grow with the share of low-probability tokens?

If such tokens over-dominate (arXiv:2505.12929), the more of them there are, the more taming them helps. Chatter
sets their share: at the start of reinforcement 6, 16, 30 and 67 of 100 tokens have p < 0.5; the paper's runs have
about 30.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={f"chatter {share:g}": {"chatter": share} for share in (0.0, 0.15, 0.35, 0.6)},
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
    },
    baseline="plain",
    flags={"learning_rate": 6e-5},
    warm=("chatter", "people", "warm_steps"),
)
