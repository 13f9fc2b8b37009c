"""Does what the methods do need time, larger steps, or more optimizer steps a batch?

The paper (arXiv:2505.12929) trains for hundreds of steps, with two mini-batches a step. The curve of 300 steps
holds those of 30 and of 100. Rates have panels of 80 steps, but for the largest, with which nothing improves after
ten.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={
        "300 steps": {"steps": 300},
        "4 mini-batches": {"minibatches": 4},
        "8 mini-batches": {"minibatches": 8},
        "rate 3e-6": {"learning_rate": 3e-6, "steps": 80},
        "rate 3e-5": {"learning_rate": 3e-5, "steps": 80},
        "rate 1e-4": {"learning_rate": 1e-4, "steps": 80},
        "rate 3e-4": {"learning_rate": 3e-4},
    },
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
