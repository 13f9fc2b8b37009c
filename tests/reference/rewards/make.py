"""Run by a Python with trl, and verl with ray and tensordict: writes ../../golden/rewards.json.

50 responses, and what TRL's trainer and verl's reward manager make of them with the files beside this one.
"""

import asyncio
import json
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from tensordict import TensorDict
from trl import GRPOTrainer
from verl import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import trl_chat  # noqa: E402
import trl_tasks  # noqa: E402
import trl_text  # noqa: E402
import verl_dict  # noqa: E402
import verl_plain  # noqa: E402

SAID = (
    "It is \\boxed{%d}.",
    "%d",
    "6 and 7 make\n#### %d",
    "<think>hm, %d?</think><answer>it is</answer>",
    "<think>a\nb</think>\n<answer>%d</answer>",
    "def f():\n    return %d\n\ndef g():\n    pass",
    "\\boxed{1} or \\boxed{%d}",
    "#### 1,0%d",
    "no <answer>%d</answer>",
    "",
)
ROWS = [
    {
        "said": SAID[n % 10] % (n if n % 3 else n + 1) if n % 10 < 9 else "",
        "ground_truth": str(n),
        "question": f"{n} is what?",
        "task": ("math", "code", "poetry")[n % 7 % 3],
    }
    for n in range(50)
]


def of_trl(functions, *, chat):
    """What the trainer learns from: the weighted sum of what each function says, by its own code."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    names = [function.__name__ for function in functions]
    ignore = lambda *_: None
    trainer = SimpleNamespace(
        accelerator=Accelerator(cpu=True), reward_funcs=functions, reward_func_names=names,
        reward_processing_classes=[None] * len(names), environments=None, async_loop=loop,
        _log_completion_extra=ignore, _log_metric=ignore, args=SimpleNamespace(report_to=[]),
        model=SimpleNamespace(training=False), state=SimpleNamespace(global_step=0),
    )  # fmt: skip
    said = [row["said"] for row in ROWS]
    prompts = [row["question"] for row in ROWS]
    if chat:
        said = [[{"role": "assistant", "content": text}] for text in said]
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    inputs = [{"prompt": p} | row for p, row in zip(prompts, ROWS, strict=True)]
    made = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, said, [[1]] * len(said))
    weights = torch.tensor([1.0, 0.5][: len(names)])
    total = (made * weights).nansum(dim=1)  # as `_generate_and_score_completions` has it
    unsaid = made.isnan().all(dim=1)
    return [None if none else float(x) for x, none in zip(total, unsaid, strict=True)]


class Characters:
    """A tokenizer whose tokens are characters."""

    eos_token = ""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids.tolist()))


def of_verl(function):
    """The score that the manager puts on the last token of each response."""
    longest = 1 + max(len(row["said"]) for row in ROWS)
    said = torch.zeros(len(ROWS), longest, dtype=torch.long)
    mask = torch.zeros(len(ROWS), 1 + longest, dtype=torch.long)
    mask[:, 0] = 1
    for i, row in enumerate(ROWS):
        codes = [*map(ord, row["said"])] or [32]  # verl has no empty responses
        said[i, : len(codes)], mask[i, 1 : 1 + len(codes)] = torch.tensor(codes), 1
    prompts = torch.full((len(ROWS), 1), 63)
    tensors = {"prompts": prompts, "responses": said, "attention_mask": mask}
    known = {
        "reward_model": np.array([{"ground_truth": r["ground_truth"]} for r in ROWS], dtype=object),
        "data_source": np.array(
            ["openai/gsm8k" if i % 2 else "mine" for i in range(50)], dtype=object
        ),
        "extra_info": np.array([{"index": i} for i in range(50)], dtype=object),
    }
    data = DataProto(TensorDict(tensors, batch_size=[len(ROWS)]), known)
    return NaiveRewardManager(Characters(), 0, function)(data).sum(dim=1).tolist()


made = {
    "versions": {name: version(name) for name in ("trl", "verl")},
    "rows": ROWS,
    "trl_text.py": of_trl([trl_text.matches, trl_text.length], chat=False),
    "trl_chat.py": of_trl([trl_chat.format_reward], chat=True),
    "trl_tasks.py": of_trl([trl_tasks.math_reward, trl_tasks.code_reward], chat=False),
    "verl_plain.py": of_verl(verl_plain.my_reward_fn),
    "verl_dict.py": of_verl(verl_dict.compute_score),
}
lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in made.items())
(HERE.parents[1] / "golden" / "rewards.json").write_text(f"{{{lines}}}\n")
