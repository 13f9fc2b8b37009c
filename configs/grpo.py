"""A pretrained model, a table of questions and a reward: policy gradients on one machine.

    jaxrl-llm train grpo --model Qwen/Qwen2.5-0.5B-Instruct --data openai/gsm8k:main --reward math
    jaxrl-llm train grpo --model Qwen/Qwen3-0.6B --data mine.jsonl --reward my.py:reward --lora 32 --length 2048
    jaxrl-llm train grpo --model Qwen/Qwen3-0.6B --data mine.jsonl --teacher Qwen/Qwen3-8B
    jaxrl-llm train grpo --model Qwen/Qwen3-4B --data mine.jsonl --teacher Qwen/Qwen3-4B --hint-column solution
    jaxrl-llm plan  grpo --model Qwen/Qwen2.5-0.5B-Instruct --data mine.jsonl --on h100x1

How many responses are sampled and learned from at a time follows from the memory of the devices. 1e-6 for all
weights of models of 0.5B to 8B is what GRPO's and this method's papers take (arXiv:2402.03300, 2505.12929);
adapters want about ten times as much ("LoRA Without Regret", 2025). docs/own-task.md tells which files and
rewards are read.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Evaluation, Mesh, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import qwen2
from jaxrl_llm.objectives import recipes
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks import judges, questions


def config(
    model: str,
    data: str,
    reward: tuple[str, ...] = (),
    *,
    weights: tuple[float, ...] = (),
    test: str = "",
    held_out: int = questions.HELD_OUT,
    prompt_column: str = "",
    answer_column: str = "",
    system: str = "",
    instruction: str | None = None,
    judge: str = "",
    judge_model: str = "",
    judge_rubric: str = "",
    judge_ranks: bool = False,
    chat: bool | None = None,
    objective: recipes.Name | None = None,
    teacher: str = "",
    hint_column: str = "",
    alpha: float = 0.0,
    eta: float = 0.0,
    lora: int = 0,
    learning_rate: float = 0.0,
    steps: int = 200,
    prompts: int = 32,
    group: int = 8,
    minibatches: int = 1,
    prompt_length: int = 512,
    length: int = 1024,
    temperature: float = 1.0,
    vllm: str = "",
    slots: int = 0,
    microbatches: int = 0,
    share_prompts: bool = False,
    sequence_parallel: int = 1,
    evaluate_every: int = 20,
    validation: int = 100,
    bfloat16: bool = True,
    seed: int = 0,
) -> Config:
    """Responses to questions, rewarded, and learned from.

    Args:
        model: a Hugging Face folder or hub name.
        data: a parquet, JSONL, JSON or CSV file, owner/name[:config[:split]] at the hub, or
            tfds:name[/config][:split] of tensorflow-datasets.
        reward: math, exact, choice, tagged, em, f1, regex:PATTERN, or FILE.py:FUNCTION (1 or more is right); the
            sum of several; math where there is no judge.
        weights: of the rewards, one each, and of the judge, if there is one, the last.
        test: as data, to test on; else the hub's test split, or questions that are held out.
        held_out: how many, where there is no test split (a tenth of them at most).
        prompt_column: of the question, where it has none of the usual names.
        answer_column: the same of the answer.
        system: a system message before each question.
        instruction: what is said after each question; if not given, what the reward needs.
        judge: the URL of a server with OpenAI's interface, a model at which is a reward (key: JAXRL_JUDGE_KEY).
        judge_model: that model.
        judge_rubric: a text file, what it judges by.
        judge_ranks: it ranks the responses to a question, in one request, and marks only those that stand alone.
        chat: put questions into the model's chat template; if not given, where it has one.
        objective: a published one, by its name; if not given, grpo, and distillation with a teacher.
        teacher: a folder or hub name of a larger model with the same tokens, which the other learns from.
        hint_column: of what the teacher's prompt has besides, such as a solution: so a model can teach itself.
        alpha: strength of Advantage Reweighting (0.1 to 0.3; 0 switches it off).
        eta: the probability that separates Lopti's two stages (0.5; 0 switches it off).
        lora: rank of adapters, which are then trained in place of the weights; 0 for none.
        learning_rate: of AdamW; 0 for 1e-6, and 1e-5 for adapters.
        steps: of so many prompts times group responses each.
        prompts: different questions of a step.
        group: responses to each.
        minibatches: parts of a batch with an optimizer step each; with one, and eta 0, no ratio is clipped.
        prompt_length: questions of more tokens are left out.
        length: the longest response, in tokens.
        temperature: of sampling.
        vllm: the Python of an environment with vLLM, which then samples; it shares the trainer's GPUs.
        slots: responses that the embedded engine samples at a time; 0 for as many as fit.
        microbatches: pieces of a batch, one after the other; 0 for as few as fit.
        share_prompts: compute a question once for all its responses; pays where they are shorter.
        sequence_parallel: devices that share each response, for long ones; best a divisor of the model's heads.
        evaluate_every: steps between two looks at the validation questions.
        validation: how many questions of the data are set aside for that (a quarter of them at most).
        bfloat16: compute in bfloat16; weights and optimizer are float32.
        seed: of the order of the data and of sampling.
    """
    if hint_column and not teacher:
        raise UserError(
            "--hint-column is for a teacher: name it by --teacher, be it the model itself"
        )
    questions.require_test(data, test, held_out)
    made = recipes.BY_NAME[objective or ("distillation" if teacher else "grpo")](length)
    adapters = qwen2.Lora(rank=lora, alpha=2.0 * lora) if lora else None
    return Config(
        task=lambda folder: questions.task(
            data,
            reward or (() if judge else ("math",)),
            weights=weights,
            test=test,
            held_out=held_out,
            prompt_column=prompt_column,
            answer_column=answer_column,
            hint_column=hint_column,
            system=system,
            instruction=instruction,
            judge=judges.of_flags(judge, judge_model, judge_rubric, folder, ranks=judge_ranks),
        ),
        model=Pretrained(model, chat=chat, lora=adapters),
        objective=recipes.with_ar_and_lopti(made, alpha=alpha, eta=eta),
        teacher=Pretrained(teacher, chat=chat) if teacher else None,
        optimizer=optimizers.adamw(learning_rate or (1e-5 if lora else 1e-6)),
        collate=Collator(
            prompt_length,
            length,
            minibatches=minibatches,
            microbatches=microbatches,
            pack=True,
            share_prompts=share_prompts,
        ),
        steps=steps,
        prompts=prompts,
        group_size=group,
        drop_constant_groups=objective in ("dapo", "entropy_80_20"),
        sampling=Sampling(temperature=temperature),
        reward_threads=16 if judge else 1,
        engine=Vllm(
            python=vllm,
            share=0.4,
            max_model_len=prompt_length + length,
            dtype="bfloat16" if bfloat16 else "float32",
        )
        if vllm
        else Native(slots=slots),
        evaluation=Evaluation(every=evaluate_every, validation=validation),
        compute=qwen2.Compute(
            dtype=jnp.bfloat16 if bfloat16 else jnp.float32,
            remat=jax.checkpoint,
            sequence_parallel=sequence_parallel > 1,
        ),
        mesh=Mesh(tensor=sequence_parallel),
        seed=seed,
    )
