"""A pretrained model and a table of conversations: supervised learning of what the assistant says in them.

    jaxrl-llm sft --model Qwen/Qwen2.5-0.5B-Instruct --data mine.jsonl
    jaxrl-llm sft --model Qwen/Qwen3-0.6B --data owner/name --test test.jsonl --lora 32 --epochs 1
    jaxrl-llm train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main --from runs/sft

`train sft` is the same. It is a warm start without reinforcement after it; docs/sft.md tells which files are read
and what is learned of them.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Evaluation, Pretrained, WarmStart
from jaxrl_llm.learning import imitate, optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2
from jaxrl_llm.tasks import conversations, questions


def config(
    model: str,
    data: str,
    *,
    test: str = "",
    held_out: int = questions.HELD_OUT,
    prompt_column: str = "",
    completion_column: str = "",
    answer_column: str = "",
    reward: tuple[str, ...] = (),
    weights: tuple[float, ...] = (),
    chat: bool | None = None,
    lora: int = 0,
    learning_rate: float = 0.0,
    epochs: float = 3.0,
    steps: int = 0,
    batch: int = 32,
    length: int = 1024,
    microbatches: int = 0,
    evaluate_every: int = 20,
    validation: int = 100,
    bfloat16: bool = True,
    seed: int = 0,
) -> Config:
    """What the assistant says in conversations, learned.

    Args:
        model: a Hugging Face folder or hub name.
        data: a parquet, JSONL, JSON or CSV file, or owner/name[:config[:split]] at the hub.
        test: as data, to test on; else the hub's test split, or rows that are held out.
        held_out: how many, where there is no test split (a tenth of them at most).
        prompt_column: of what is asked, where rows have no messages and it has none of the usual names.
        completion_column: the same of what is answered.
        answer_column: of the right answer, for rewards.
        reward: as of grpo, by which responses in validation and test are graded too.
        weights: of the rewards, one each.
        chat: put prompts that are texts into the model's chat template; if not given, where it has one.
        lora: rank of adapters, which are then trained in place of the weights; 0 for none.
        learning_rate: of AdamW; 0 for 1e-5, and 1e-4 for adapters.
        epochs: how often it goes through the rows.
        steps: in place of epochs.
        batch: rows of a step.
        length: rows of more tokens are left out.
        microbatches: pieces of a batch, one after the other; 0 for as many as it has rows.
        evaluate_every: steps between two looks at the validation rows.
        validation: how many rows of the data are set aside for that (a quarter of them at most).
        bfloat16: compute in bfloat16; weights and optimizer are float32.
        seed: of the order of the data.
    """
    questions.require_test(data, test, held_out)
    optimizer = optimizers.adamw(learning_rate or (1e-4 if lora else 1e-5))
    # the first token of a row is its prompt: what is left of the length may be said by anybody
    collate = Collator(1, length - 1, microbatches=microbatches or batch, pack=True)
    return Config(
        task=conversations.Later(
            lambda: conversations.task(
                data,
                reward,
                weights=weights,
                test=test,
                held_out=held_out,
                prompt_column=prompt_column,
                completion_column=completion_column,
                answer_column=answer_column,
            ),
            graded=bool(reward),
        ),
        model=Pretrained(
            model, chat=chat, lora=qwen2.Lora(rank=lora, alpha=2.0 * lora) if lora else None
        ),
        objective=imitate.IMITATION,
        optimizer=optimizer,
        collate=collate,
        steps=0,
        prompts=batch,
        group_size=1,
        warm_start=WarmStart(
            steps, collate, optimizer, batch, evaluate_every=evaluate_every, epochs=epochs
        ),
        evaluation=Evaluation(validation=validation),
        compute=qwen2.Compute(
            dtype=jnp.bfloat16 if bfloat16 else jnp.float32, remat=jax.checkpoint
        ),
        seed=seed,
    )
