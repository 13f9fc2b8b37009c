"""`python transformers_distilled.py FOLDER`, with torch: the gradient of a loss of distillation, in float64.

Reads batch.json, `student` and `teacher` there; writes gradient.npz, by the names of the student's tensors. With
`beta` it is that of the generalised Jensen-Shannon divergence over the student's vocabulary and the rest of the
teacher's, else of reweighted on-policy distillation.
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


def distributions(model, prompt, response):
    whole = torch.tensor([prompt + response])
    return model(whole).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]


def logps(model, prompt, response):
    found = distributions(model, prompt, response)
    return found.gather(-1, torch.tensor(response)[:, None])[:, 0]


def divergence(beta, prompt, response):
    """The sum over tokens."""
    p = distributions(student, prompt, response).exp()
    with torch.no_grad():
        q = distributions(teacher, prompt, response).exp()
    least, size = torch.tensor(1e-6, dtype=torch.float64), p.shape[1]
    rest = [torch.maximum(1 - x[:, :size].sum(-1, keepdim=True), least) for x in (p, q)]
    p, q = (torch.cat([x[:, :size], y], -1) for x, y in zip((p, q), rest, strict=True))
    middle = beta * q + (1 - beta) * p
    of_teacher, of_student = ((x * (x / middle).log()).sum() for x in (q, p))
    if beta == 0:
        return (q * (q / p).log()).sum()
    return of_student if beta == 1 else beta * of_teacher + (1 - beta) * of_student


total, tokens, gap = 0.0, 0, 0.0
for prompt, response, sampled in batch["rows"]:
    now, mu = logps(student, prompt, response), torch.tensor(sampled, dtype=torch.float64)
    with torch.no_grad():
        behind = mu - logps(teacher, prompt, response)
        advantage = -behind * (batch["alpha"] * now.exp() + 1 - batch["alpha"])
    if batch["beta"] is None:
        total -= ((now - mu).exp() * advantage).sum()
    else:
        total += divergence(batch["beta"], prompt, response)
    tokens, gap = tokens + len(response), gap + float(behind.sum())
(total / tokens).backward()
named = {name: x.grad.numpy() for name, x in student.named_parameters()}
np.savez(folder / "gradient.npz", kl_teacher=gap / tokens, **named)
