"""`python transformers_families.py FOLDER ...`, with torch: reads tokens.npy in each, writes found.npz."""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

for folder in map(pathlib.Path, sys.argv[1:]):
    # float64, so that a difference is ours; only experts one after the other are products of it
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    routed = []  # of a mixture: inputs of each layer's router, and the experts it chose
    note = lambda module, x, y, to=routed: to.append((x[0].detach().numpy(), y[2].numpy()))
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(note)
    tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
    logp = model(tokens).logits.log_softmax(-1)
    inputs, chosen = [x for x, _ in routed], [chosen for _, chosen in routed]
    logp[:, :-1].gather(-1, tokens[:, 1:, None]).mean().backward()
    gradient = model.get_input_embeddings().weight.grad
    prompt = tokens[:1, :9]
    greedy = model.generate(
        prompt, max_new_tokens=24, do_sample=False, eos_token_id=95, pad_token_id=95
    )
    np.savez(
        folder / "found.npz",
        logp=logp.detach().numpy(),
        gradient=gradient.numpy(),
        greedy=greedy[0, 9:].numpy(),
        inputs=inputs,
        chosen=chosen,
    )
