"""The questions of `distillation` where responses are games of several turns.

    jaxrl-llm train guess --counting 0 --layers 6 --steps 0 --out runs/teacher-guess
    jaxrl-llm export runs/teacher-guess teacher-guess

The student has half of the teacher's layers, and was shown games that count up more often than not.
"""

from jaxrl_llm.research.study import Study

distilled = {"teacher": "teacher-guess"}
study = Study(
    config="../guess.py",
    variants={
        "GRPO": {},
        "distillation": distilled,
        "distillation, reweighting": distilled | {"alpha": 0.3},
        "distillation, Lopti": distilled | {"eta": 0.5},
        "distillation, both": distilled | {"alpha": 0.3, "eta": 0.5},
    },
    baseline="GRPO",
    flags={"alpha": 0.0, "eta": 0.0},
    warm=(),
    seeds=range(3),
)
