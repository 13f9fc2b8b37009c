"""GRPO with Advantage Reweighting and Lopti, in one file for those who read before they run.

    python examples/grpo.py Qwen/Qwen2.5-0.5B-Instruct

GRPO (arXiv:2402.03300) samples several responses to a prompt; the advantage of one is by how many standard
deviations its reward is above the mean of its group. There is no value function. Advantage Reweighting scales the
advantage of a token of probability p by alpha * p + 1 - alpha; Lopti updates the tokens with p < eta first and the
others after (arXiv:2505.12929). `jaxrl-llm train` does the same to the weights, and adds what a long run needs:
checkpoints, evaluations, servers, several hosts.

Shapes: P prompts, G responses to each, B = P * G rows of at most T tokens. The model computes them as M
mini-batches of m micro-batches of R rows of L tokens, C of which are scored.
"""

import random
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_llm as jl
from jaxrl_llm.learning import update
from jaxrl_llm.models import sharding
from jaxrl_llm.objectives import advantages, factors, kl, losses, partition

PROMPTS, GROUP = 8, 8  # P and G; on one GPU of 80 GB with 0.5B parameters 64 and 8
PROMPT_LENGTH, RESPONSE_LENGTH = 32, 32
TEMPERATURE, LEARNING_RATE = 1.0, 1e-6

# What is learned: a dataclass of functions on arrays [B, T], each of which you may replace by your own.
OBJECTIVE = jl.Objective(
    advantage=advantages.grpo,  # rewards [P, G] -> advantages [B, T]
    factors=(partial(factors.linear_in_probability, alpha=0.3),),  # Advantage Reweighting
    surrogate=partial(losses.clipped, low=0.2, high=0.2),  # -min(r A, clip(r, 1 - low, 1 + high) A)
    penalties=((1e-3, kl.k3),),  # keep the policy near the one it began with
    partition=partial(partition.lopti, eta=0.5),  # which tokens each optimizer step learns from
)


def question(rng: random.Random) -> tuple[str, int]:
    """A prompt, and what the reward has to know about it."""
    a, b = rng.randrange(10), rng.randrange(10)
    return f"{a} + {b} =", a + b


def reward(answer: int, response: str) -> float:
    """1 for a response that begins with the right sum."""
    return float(response.split()[:1] == [str(answer)])


def main(name: str, *, steps: int = 20, prompts: int = PROMPTS, group: int = GROUP) -> list[float]:
    """Trains the model of a Hugging Face folder or hub name; the mean reward of each step."""
    # The parameters, in float32 because an update of 1e-6 is lost in bfloat16, sharded over all devices.
    model = jl.load(name)
    policy_logp = model.policy.logp(TEMPERATURE)  # (params, inputs) -> log-probs [R, C]
    optimizer = jl.optimizers.adamw(LEARNING_RATE)
    reference = jax.tree.map(jnp.copy, model.params)  # the update consumes the others
    state = update.init_state(model.params, optimizer)

    # Three programs, compiled once. Scoring and updating go over micro-batches, so memory does not grow with B.
    score = update.make_score(policy_logp)  # (params, inputs) -> log-probs [M, m, R, C]
    credit = update.make_credit(OBJECTIVE)  # all that is constant in the parameters
    train_step = update.make_train_step(  # consumes the old state
        policy_logp, OBJECTIVE, optimizer, shardings=jax.tree.map(lambda x: x.sharding, state)
    )
    collate = jl.Collator(PROMPT_LENGTH, RESPONSE_LENGTH, microbatches=2, pack=True)

    stop = model.tokenizer.stops
    sampling = jl.Sampling(temperature=TEMPERATURE, max_tokens=RESPONSE_LENGTH, stop=stop)
    means, rng = [], random.Random(0)
    engine = jl.Native(slots=prompts * group).start(model.policy, model.mesh)
    with engine as sampler, jax.set_mesh(model.mesh):
        for step in range(steps):
            # Sample: G responses to each of P prompts by the newest weights, with the log-probs of their tokens.
            texts, answers = zip(*[question(rng) for _ in range(prompts)], strict=True)
            asked = [model.tokenizer.encode(text) for text in texts]
            sampler.push(state.params, step)
            responses = sampler.generate(asked, n=group, sampling=replace(sampling, seed=step))
            sampler.release()  # the cache makes room for the update

            # Reward: one number a response.
            said = [model.tokenizer.decode(one.tokens) for one in responses]
            scored = [reward(answers[i // group], text) for i, text in enumerate(said)]
            rewards = np.asarray(scored, np.float32).reshape(prompts, group)  # [P, G]

            # Collate: ragged responses as arrays; rows [B, T] for the credit, bins [M, m, R, L] for the model.
            batch = update.place(collate(responses), model.mesh)

            # Score: the trainer's own log-probs. The sampler's come from another program and differ in the last
            # bits, which would make ratios of an unchanged policy differ from 1.
            old, ref = score(state.params, batch.inputs), score(reference, batch.inputs)

            # Credit: advantages and weights of the whole batch at once, so that cutting it into micro-batches,
            # shards and packed rows changes no number.
            everywhere = sharding.replicated(rewards, model.mesh)
            credited = credit(batch, everywhere, old_logp=old, ref_logp=ref)

            # Update: an optimizer step for each mini-batch and stage of Lopti; stages are summands of loss and KL.
            state, metrics = train_step(state, credited)

            means.append(float(rewards.mean()))
            loss, drift = (metrics[name].sum() / collate.minibatches for name in ("loss", "kl"))
            print(f"step {step + 1}: reward {means[-1]:.2f}, loss {loss:+.3f}, KL {drift:.4f}")
    return means


if __name__ == "__main__":
    main(sys.argv[1])
