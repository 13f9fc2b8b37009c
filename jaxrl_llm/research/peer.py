"""The work of `bench` in PyTorch with transformers, for `--peer-python`: once per line of input.

With PyTorch's defaults: float32, the default attention kernel, nothing recomputed backwards.
"""

import sys
from collections.abc import Callable

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM


def update(model, rows: int, prompt: int, response: int) -> Callable[[], None]:
    """A clipped GRPO step with k3 and AdamW on random responses; logits of the response only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt + response))
    advantage = torch.linspace(-1, 1, rows)[:, None]

    def logp():
        logits = model(ids, logits_to_keep=response + 1).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[:, prompt:, None])[..., 0]

    with torch.no_grad():
        old = logp()

    def step():
        new = logp()
        ratio = (new - old).exp()
        policy = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.24))
        penalty = (old - new).exp() - (old - new) - 1
        (policy + 1e-3 * penalty).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rollout(model, rows: int, prompt: int, new: int) -> Callable[[], None]:
    """Greedy generation of `new` tokens for each of `rows` random prompts, in one batch."""
    model.eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(0, model.config.vocab_size, (rows, prompt))
    length = {"max_new_tokens": new, "min_new_tokens": new}

    @torch.no_grad()
    def generate():
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)

    return generate


def main(kind: str, folder: str, *sizes: str) -> None:
    """Loads the model, then does the work once per line of input and prints "done"."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    work = {"update": update, "rollout": rollout}[kind](model, *map(int, sizes))
    for _ in sys.stdin:
        work()
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
