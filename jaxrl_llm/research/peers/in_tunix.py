"""tunix: its own model, GRPO loss and accumulation of micro-batches, AdamW by optax."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama  # pyright: ignore[reportMissingImports]
from tunix.models.llama3 import params as llama_files  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import model as qwen  # pyright: ignore[reportMissingImports]
from tunix.models.qwen2 import params as qwen_files  # pyright: ignore[reportMissingImports]
from tunix.rl import algo_core, common  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.grpo_learner import GRPOConfig  # pyright: ignore[reportMissingImports]

NO_TOKEN = -1  # for padding and the end of a text: all tokens count


def update(job):
    """Its loss for each micro-batch, one optimizer step after all of them."""
    axes = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (axes, axes), devices=jax.devices()[:1])
    jax.set_mesh(mesh)
    model = _load(Path(job["model"]), mesh, jnp.bfloat16 if job["bfloat16"] else jnp.float32)
    count, algorithm = job["microbatches"], GRPOConfig(
        num_generations=len(job["prompts"]),
        beta=1e-3,
        epsilon=0.2,
        kl_loss_mode="low_var_kl",
        loss_agg_mode="token-mean",
    )  # fmt: skip
    algorithm.temperature = 1.0  # which its learner sets, too
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))
    accumulated = optax.MultiSteps(chain, count).gradient_transformation()
    optimizer = nnx.Optimizer(model, accumulated, wrt=nnx.Param)
    prompts, responses = (jnp.asarray(job[x], jnp.int32) for x in ("prompts", "responses"))

    @nnx.jit
    def score(model, prompts, responses):
        definition, state = nnx.split(model)
        return common.compute_per_token_logps(
            definition, state, prompts, responses, NO_TOKEN, NO_TOKEN, stop_gradient=True
        )

    def parts(x):
        return x.reshape(count, -1, *x.shape[1:])

    pairs = zip(parts(prompts), parts(responses), strict=True)
    old = jnp.concatenate([score(model, *pair) for pair in pairs])
    whole = common.TrainExample(
        prompts, prompts >= 0, responses, responses >= 0, jnp.asarray(job["advantages"]), old, old
    )
    micro = [jax.tree.map(lambda x, i=i: parts(x)[i], whole) for i in range(count)]
    loss = nnx.value_and_grad(
        lambda model, example: algo_core.grpo_loss_fn(
            model, example, algorithm, NO_TOKEN, NO_TOKEN
        ),
        has_aux=True,
    )
    gradient = nnx.jit(lambda model, example: loss(model, example)[1])
    total = gradient(model, micro[0])
    for example in micro[1:]:
        total = jax.tree.map(jnp.add, total, gradient(model, example))
    norm = float(optax.global_norm(total)) / count

    @nnx.jit
    def train(model, optimizer, example):
        (value, _), gradients = loss(model, example)
        optimizer.update(model, gradients)
        return value

    def step():
        for example in micro:
            value = train(model, optimizer, example)
        jax.block_until_ready((value, nnx.state(model)))

    return {"logp": old.tolist(), "grad_norm": norm}, step


def _load(folder, mesh, dtype):
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": rope["rope_theta"],
        "norm_eps": config["rms_norm_eps"],
    }
    tied = config["tie_word_embeddings"]
    if config["model_type"] == "llama":
        llama.apply_rope.__defaults__ = (rope["rope_theta"],)  # else its layers turn by 1,000,000
        shape, files = llama.ModelConfig(**sizes, weight_tying=tied), llama_files
    else:
        shape, files = qwen.ModelConfig(**sizes, use_tied_embedding=tied), qwen_files
    return files.create_model_from_safe_tensors(str(folder), shape, mesh, dtype)
