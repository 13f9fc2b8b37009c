"""PyTorch with transformers, by their defaults: the standard attention, nothing recomputed."""

import contextlib

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def update(job):
    """A clipped GRPO step with k3 and AdamW; logits of the response only."""
    model = _load(job, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    prompts, responses = (torch.tensor(job[x], device=DEVICE) for x in ("prompts", "responses"))
    advantages = torch.tensor(job["advantages"], device=DEVICE)[:, None]
    ids, length = torch.cat([prompts, responses], 1), responses.shape[1]
    narrow = torch.autocast(DEVICE, torch.bfloat16) if job["bfloat16"] else contextlib.nullcontext()
    parts = torch.arange(len(ids)).chunk(job["microbatches"])

    def logp(part):
        with narrow:
            logits = model(ids[part], logits_to_keep=length + 1).logits[:, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, responses[part, :, None])[..., 0]

    with torch.no_grad():
        old = torch.cat([logp(part) for part in parts])

    def gradient():
        for part in parts:
            new, before, advantage = logp(part), old[part], advantages[part]
            ratio = (new - before).exp()
            policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            penalty = (before - new).exp() - (before - new) - 1
            ((policy + 1e-3 * penalty).sum() / responses.numel()).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()

    def step():
        gradient()
        optimizer.step()
        optimizer.zero_grad()
        return next(model.parameters()).detach().flatten()[0].item()  # waits for the device

    values = {"logp": old.tolist(), "grad_norm": gradient()}
    optimizer.zero_grad()
    return values, step


def rollout(job):
    """Greedy generation for all prompts in one batch."""
    dtype = torch.bfloat16 if job["bfloat16"] else torch.float32
    model = _load(job, dtype).eval()
    model.generation_config.eos_token_id = None
    ids, new = torch.tensor(job["prompts"], device=DEVICE), job["new_tokens"]
    length = {"max_new_tokens": new, "min_new_tokens": new}

    @torch.no_grad()
    def generate():
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
        return out[:, ids.shape[1] :].tolist()

    return {"tokens": generate()}, generate


def _load(job, dtype):
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    return model.to(DEVICE)
