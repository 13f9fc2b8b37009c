"""Does RLTR's reward of transfer (arXiv:2602.08489) help a small model on the laptop's puzzles?

    jaxrl-llm train kk_tiny --careless 0 --steps 0 --out runs/receiver
    jaxrl-llm export runs/receiver receiver

Of equal episodes, and at equal cost: a receiver goes on from every response here too, for nothing.
"""

from jaxrl_llm.research.study import Study

study = Study(
    config="../rltr.py",
    variants={
        "GRPO": {"weight": 0.0},
        "transfer": {"weight": 1.0},
        "transfer, three times": {"weight": 3.0},
    },
    baseline="GRPO",
    flags={"receiver": "receiver", "alpha": 0.0, "eta": 0.0},
    warm=("receiver",),
    seeds=range(3),
)
