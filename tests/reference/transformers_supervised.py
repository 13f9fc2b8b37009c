"""`python transformers_supervised.py FOLDER`, with torch: rows.json there gives loss.json, of float64.

A row is [tokens, labels]; the loss is that of all rows as one padded batch.
"""

import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
rows = json.loads((folder / "rows.json").read_text())
longest = max(len(tokens) for tokens, _ in rows)
padded = lambda row, pad: row + [pad] * (longest - len(row))
batch = {
    "input_ids": torch.tensor([padded(tokens, 0) for tokens, _ in rows]),
    "attention_mask": torch.tensor([padded([1] * len(tokens), 0) for tokens, _ in rows]),
    "labels": torch.tensor([padded(labels, -100) for _, labels in rows]),
}
with torch.no_grad():
    (folder / "loss.json").write_text(json.dumps(model(**batch).loss.item()))
