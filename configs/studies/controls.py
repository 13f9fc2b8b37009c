"""Is it the low probabilities that Lopti puts first, or only that its two optimizer steps go farther?

arXiv:2505.12929 ascribes the gain to low-probability tokens coming first. Controls that the paper does not have.
Of the same number of steps: a random split of the same share, two plain steps, a fixed share in place of a
threshold, and the order of the authors' code, a stage over all mini-batches before the next. Steps of AdamW do not
shrink with the gradient, so two may go twice as far as one: two steps at half the rate go no farther than plain,
and plain at twice the rate as far as two.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../kk_tiny.py",
    variants={
        "plain": {"eta": 0.0},
        "plain, twice the rate": {"eta": 0.0, "learning_rate": 1.2e-4},
        "Lopti": {"eta": 0.5},
        "random split": {"eta": 0.5, "stages": "random_matched"},
        "two plain steps": {"stages": "twice"},
        "two steps, half the rate": {"stages": "twice", "learning_rate": 3e-5},
        "lowest 30%": {"eta": 0.3, "stages": "quantile"},
        "stage-major": {"eta": 0.5, "stage_major": True},
    },
    baseline="plain",
    flags={"chatter": 0.35, "learning_rate": 6e-5, "alpha": 0.0},
    warm=("chatter", "people", "warm_steps"),
)
