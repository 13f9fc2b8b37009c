"""At which rate does a pretrained model learn best without either method?

The rate of `pretrained` is chosen here, by plain GRPO and with other seeds; `pretrained.md` has the rule.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../pretrained.py",
    variants={f"rate {rate:g}": {"learning_rate": rate} for rate in (1e-5, 3e-6, 3e-5)},
    baseline="rate 1e-05",
    flags={"model": "smollm2", "alpha": 0.0, "eta": 0.0},
    seeds=(0, 1),
)
