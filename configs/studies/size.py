"""Does what the methods do grow with the size of the model?

The paper's models (arXiv:2505.12929) have 3B and 7B parameters. Here a model has 5M, six times
as many as in `main`.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={"5M": {"size": "5M"}},
    variants={
        "plain": {"alpha": 0.0, "eta": 0.0},
        "reweighting": {"alpha": 0.3, "eta": 0.0},
        "Lopti": {"alpha": 0.0, "eta": 0.5},
        "both": {"alpha": 0.3, "eta": 0.5},
    },
    baseline="plain",
    flags={"chatter": 0.35, "learning_rate": 6e-5},
    warm=("chatter", "people", "size", "warm_steps"),
)
