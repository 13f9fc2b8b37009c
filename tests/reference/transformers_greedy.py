"""`python transformers_greedy.py FOLDER`, with torch: reads prompts.json there, writes greedy.json."""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
asked = json.loads((folder / "prompts.json").read_text())
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
answers = {}
with torch.no_grad():
    prompts = sorted(asked["prompts"], key=len)
    for start in range(0, len(prompts), 10):
        some = prompts[start : start + 10]
        width = max(map(len, some))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in some])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=asked["new"], do_sample=False, pad_token_id=0
        )
        answers |= {str(p): row[width:].tolist() for p, row in zip(some, out, strict=True)}
(folder / "greedy.json").write_text(json.dumps([answers[str(p)] for p in asked["prompts"]]))
