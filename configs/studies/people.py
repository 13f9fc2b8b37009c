"""Does what the methods do grow with the length of the responses?

The paper's responses (arXiv:2505.12929) are hundreds to thousands of tokens long, where low-probability tokens
have more to dominate. With four people the worked answers are about twice as long as with three.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    panels={"three people": {"people": 3}, "four people": {"people": 4}},
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
