"""`python transformers_distilled.py FOLDER`, with torch: the gradient of reweighted distillation, in float64.

Reads batch.json, `student` and `teacher` there; writes gradient.npz, by the names of the student's tensors.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
batch = json.loads((folder / "batch.json").read_text())
student, teacher = (
    AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64).eval()
    for name in ("student", "teacher")
)


def logps(model, prompt, response):
    whole = torch.tensor([prompt + response])
    found = model(whole).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    return found.gather(-1, torch.tensor(response)[:, None])[:, 0]


total, tokens, gap = 0.0, 0, 0.0
for prompt, response, sampled in batch["rows"]:
    now, mu = logps(student, prompt, response), torch.tensor(sampled, dtype=torch.float64)
    with torch.no_grad():
        behind = mu - logps(teacher, prompt, response)
        advantage = -behind * (batch["alpha"] * now.exp() + 1 - batch["alpha"])
    total -= ((now - mu).exp() * advantage).sum()
    tokens, gap = tokens + len(response), gap + float(behind.sum())
(total / tokens).backward()
named = {name: x.grad.numpy() for name, x in student.named_parameters()}
np.savez(folder / "gradient.npz", kl_teacher=gap / tokens, **named)
