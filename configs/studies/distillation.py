"""What does a teacher teach, and does the weight of rare tokens matter there?

    jaxrl-llm train kk_tiny --careless 0 --size 1.6M --steps 0 --out runs/teacher
    jaxrl-llm export runs/teacher teacher

The student has half of the teacher's layers, and was shown guesses more often than worked answers. On-policy
distillation has an advantage for each token; nobody has published what reweighting or Lopti do to that.
"""

from jaxrl_llm.research.study import Study

distilled = {"algo": "distillation", "teacher": "teacher"}
study = Study(
    config="../kk_tiny.py",
    variants={
        "GRPO": {},
        "distillation": distilled,
        "distillation by distributions": {"algo": "gkd", "teacher": "teacher"},
        "distillation, reweighting": distilled | {"alpha": 0.3},
        "distillation, Lopti": distilled | {"eta": 0.5},
        "distillation, both": distilled | {"alpha": 0.3, "eta": 0.5},
    },
    baseline="GRPO",
    flags={"alpha": 0.0, "eta": 0.0},
    warm=("people", "warm_steps"),
    seeds=range(3),
)
