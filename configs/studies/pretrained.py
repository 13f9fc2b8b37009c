"""Do both methods help a pretrained model, whose rare tokens are its own?

arXiv:2505.12929 trains Qwen2.5 of 3B and 7B parameters; here one of 135M learns to add. `pretrained.md` has
the rules of this study, which were written before its first run.
"""

from jaxrl_llm.research.study import Study

RATE = 1e-5  # to be chosen by pretrained_rate.py

study = Study(
    config="../pretrained.py",
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
        "two plain steps": {"alpha": 0.0, "stages": "twice"},
        "plain, twice the rate": {"alpha": 0.0, "eta": 0.0, "learning_rate": 2 * RATE},
    },
    baseline="plain",
    flags={"model": "smollm2", "learning_rate": RATE},
    seeds=range(2, 7),
)
