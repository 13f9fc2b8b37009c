"""TRL's GRPOTrainer: a whole step, which samples by transformers, rewards and updates."""

import queue
import threading

import torch  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class Paced(TrainerCallback):
    """Begins a step when it is told to, and says when it has ended."""

    def __init__(self):
        self.go, self.done = queue.Queue(), queue.Queue()

    def on_step_begin(self, args, state, control, **kwargs):
        self.go.get()

    def on_step_end(self, args, state, control, **kwargs):
        self.done.put(None)


def step(job):
    """The share of even tokens is the reward; words are the tokens' numbers."""
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(model.config.vocab_size)}, "0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "0", "eos_token": "1"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    prompts = [{"prompt": " ".join(map(str, prompt))} for prompt in job["prompts"]]
    group, new, pace = job["group"], job["new_tokens"], Paced()

    def even(completion_ids, **kwargs):
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    arguments = GRPOConfig(
        output_dir="out",
        use_cpu=not torch.cuda.is_available(),
        bf16=job["bfloat16"],
        per_device_train_batch_size=len(prompts) * group // job["microbatches"],
        gradient_accumulation_steps=job["microbatches"],
        num_generations=group,
        max_completion_length=new,
        generation_kwargs={"min_new_tokens": new},
        gradient_checkpointing=False,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[even],
        args=arguments,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        callbacks=[pace],
    )
    failed = []

    def train():
        try:
            trainer.train()
        except BaseException as error:
            failed.append(error)
            pace.done.put(None)
            raise

    threading.Thread(target=train, daemon=True).start()

    def work():
        pace.go.put(None)
        pace.done.get()
        if failed:
            raise failed[0]

    return {}, work
