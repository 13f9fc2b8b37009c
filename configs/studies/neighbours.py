"""How do methods that single out tokens in other ways compare?

arXiv:2505.12929: low-probability tokens over-dominate. Others keep only the tokens of high entropy (80/20),
protect the unlikely ones (Lp-Reg), hold back those that drive entropy down (KL-Cov), or bound the change of
probability instead of its ratio (DPPO).
"""

from jaxrl_llm.research.study import Study

PLAIN = {"alpha": 0.0, "eta": 0.0}
study = Study(
    config="../kk_tiny.py",
    variants={
        "GRPO": PLAIN,
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "80/20": {"algo": "entropy_80_20", **PLAIN},
        "Lp-Reg": {"algo": "lp_reg", **PLAIN},
        "KL-Cov": {"algo": "kl_cov", **PLAIN},
        "DPPO": {"algo": "dppo", **PLAIN},
    },
    baseline="GRPO",
    flags={"chatter": 0.35, "learning_rate": 6e-5},
    warm=("chatter", "people", "warm_steps"),
)
