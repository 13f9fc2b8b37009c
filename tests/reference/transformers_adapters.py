"""Log-probs of adapted models by PEFT: of folders that we wrote, and of adapters that PEFT wrote.

Arguments are folders with a model, `adapter/`, and tokens.npy; found.npz and `theirs/` are added.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model


def read(folder):
    """The model without adapters."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    ).eval()


def logp(model, tokens):
    """Log-probs of all tokens at each position."""
    return torch.log_softmax(model(tokens).logits, -1).detach().numpy()


for folder in map(pathlib.Path, sys.argv[1:]):
    tokens = torch.tensor(np.load(folder / "tokens.npy"))
    ours = logp(PeftModel.from_pretrained(read(folder), folder / "adapter").eval(), tokens)
    config = LoraConfig(r=3, lora_alpha=5, use_rslora=True, target_modules="all-linear")
    model = get_peft_model(read(folder), config).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder / "theirs")
    np.savez(folder / "found.npz", ours=ours, theirs=logp(model, tokens))
