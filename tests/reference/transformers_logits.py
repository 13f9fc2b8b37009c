"""`python transformers_logits.py FOLDER`, with torch: tokens.npy there gives logits.npy, of float64."""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
with torch.no_grad():
    logits = model(torch.from_numpy(np.load(folder / "tokens.npy"))).logits
np.save(folder / "logits.npy", logits.numpy())
