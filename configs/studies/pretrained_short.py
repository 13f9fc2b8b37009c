"""Does either method help a pretrained model in its first steps? The part of `pretrained` that two cores can do.

`pretrained.md` says under which rules, and what it leaves open.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../pretrained.py",
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
        "two plain steps": {"alpha": 0.0, "stages": "twice"},
        "plain, twice the rate": {"alpha": 0.0, "eta": 0.0, "learning_rate": 2e-5},
    },
    baseline="plain",
    flags={"model": "smollm2", "learning_rate": 1e-5, "steps": 24},
    seeds=range(2, 7),
)
