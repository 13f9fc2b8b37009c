"""`python transformers_figures.py FOLDER RATE [float32]`, with torch: figures of arXiv:2505.12929 for a batch.

Reads `model` and sample.json there: prompts, responses, rewards, the size of a group, alpha, and the single tokens
(response, number) whose gradients are wanted. RATE is AdamW's. Writes figures.json, in the form of analysis.json.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
rate_of_adam = float(sys.argv[2])
dtype = getattr(torch, (sys.argv[3:] or ["float64"])[0])
sample = json.loads((folder / "sample.json").read_text())
model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).eval()
weights = [*model.parameters()]
pairs = [*zip(sample["prompts"], sample["responses"], strict=True)]
total = sum(len(response) for _, response in pairs)


def logps(prompt, response):
    whole = torch.tensor([prompt + response])
    found = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return found.gather(-1, torch.tensor(response)[:, None])[:, 0]


def every_logp():
    with torch.no_grad():
        return [logps(*pair).numpy().astype(np.float64) for pair in pairs]


def gradient(factor):
    """Of the loss, whose clipping and KL do nothing yet: minus factor times advantage times log-prob, a token."""
    sums = [torch.zeros_like(p) for p in weights]
    for i, pair in enumerate(pairs):
        if advantages[i] and factor[i].any():
            each = torch.tensor(factor[i] * advantages[i] / total).to(dtype)
            for into, g in zip(
                sums, torch.autograd.grad(-(each * logps(*pair)).sum(), weights), strict=True
            ):
                into += g
    return sums


def norm(gradients):
    return float(torch.sqrt(sum(g.double().square().sum() for g in gradients)))


def moved(change):
    """Log-probs after the weights are changed so, and how long the change is; the weights are put back."""
    before = [p.detach().clone() for p in weights]
    steps = [change(i, p.detach()) for i, p in enumerate(weights)]
    with torch.no_grad():
        for p, step in zip(weights, steps, strict=True):
            p += step
    after = every_logp()
    with torch.no_grad():
        for p, old in zip(weights, before, strict=True):
            p.copy_(old)
    return after, norm(steps)


def by_adamw(gradients):
    """A first step: after clipping to 1 both moments are the gradient's own, so that its size cancels."""
    scale = min(1.0, 1.0 / norm(gradients))
    return moved(
        lambda i, p: (
            -rate_of_adam
            * (gradients[i] * scale / ((gradients[i] * scale).abs() + 1e-8) + 0.01 * p)
        )
    )


def sizes(after):
    differences = [np.abs(a - b) for a, b in zip(after, now, strict=True)]
    return [
        float(np.concatenate([d[h] for d, h in zip(differences, here, strict=True)]).mean())
        for here in inside
    ]


def direction(after):
    up = [a > b for a, b in zip(after, now, strict=True)]
    far = [np.abs(a - b) > 1e-6 for a, b in zip(after, now, strict=True)]

    def share(sign, here):
        of = [
            (x if sign > 0 else ~x)[h & f]
            for x, f, h, a in zip(up, far, here, advantages, strict=True)
            if a * sign > 0
        ]
        return float(np.concatenate(of).mean()) if of and sum(map(len, of)) else None

    return {
        name: [share(sign, here) for here in [*inside, ones]]
        for name, sign in (("rising", 1), ("falling", -1))
    }


rewards = np.asarray(sample["rewards"], np.float64).reshape(-1, sample["group"])
spread = rewards.std(1, ddof=1, keepdims=True)
advantages = np.where(
    spread > 0, (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-6), 0
).ravel()
now = every_logp()
edges = np.log([0.25, 0.5, 0.75])
inside = [[np.searchsorted(edges, x, side="right") == b for x in now] for b in range(4)]
ones = [np.ones(len(x), bool) for x in now]

whole = gradient(ones)
after, length = by_adamw(whole)
rate = length / norm(whole)
tried = {
    "optimizer": {"all": sizes(after)},
    "gradient": {"all": sizes(moved(lambda i, p: -rate * whole[i])[0])},
}
bins = []
for name, here in zip(["p < 0.25", "0.25 to 0.5", "0.5 to 0.75", "p ≥ 0.75"], inside, strict=True):
    part = gradient(here)
    tried["optimizer"][name] = sizes(by_adamw(part)[0])
    tried["gradient"][name] = sizes(moved(lambda i, p, part=part: -rate * part[i])[0])
    bins.append(
        {"name": name, "tokens": int(sum(h.sum() for h in here)), "gradient_norm": norm(part)}
    )
    print(bins[-1], flush=True)
reweighted = gradient([sample["alpha"] * np.exp(x) + 1 - sample["alpha"] for x in now])
directions = {"plain": direction(after), "reweighting": direction(by_adamw(reweighted)[0])}
single = [norm(torch.autograd.grad(logps(*pairs[i])[t], weights)) for i, t in sample["single"]]
rest = [float(-np.expm1(now[i][t])) for i, t in sample["single"]]
(folder / "figures.json").write_text(
    json.dumps(
        {
            "gradient_norm": norm(whole),
            "bins": bins,
            "updates": tried,
            "directions": directions,
            "one_minus_p": rest,
            "over_parameters": single,
        },
        indent=1,
    )
)
