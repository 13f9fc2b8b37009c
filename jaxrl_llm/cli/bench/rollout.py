"""How many tokens a second the embedded engine generates, and a peer."""

import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from jaxrl_llm.cli.bench.turns import Peer, in_turn, least_one
from jaxrl_llm.cli.bench.update import policy
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.planning import flops
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.runs import terminal

PEER = pathlib.Path(__file__).with_name("peer_generate.py")


def main(
    model: str | None = None,
    /,
    *,
    sequences: int = 64,
    prompt_length: int = 64,
    new_tokens: int = 64,
    slots: int = 64,
    repeats: int = 3,
    bfloat16: bool = False,
    peer_python: pathlib.Path | None = None,
) -> None:
    """Time generation with the embedded engine: greedy, sampled, top-p; and PyTorch with transformers.

    Args:
        model: a Qwen2 folder or hub name; without it a small random model (about 6M parameters).
        sequences: how many prompts, all different, one response each.
        prompt_length: tokens of each prompt.
        new_tokens: tokens of each response.
        slots: sequences that decode at a time.
        repeats: timed rounds of each kind, after one that compiles; the median is shown.
        bfloat16: compute in bfloat16 instead of float32.
        peer_python: an interpreter with torch and transformers, timed in turn with ours (needs a model).
    """
    least_one(sequences=sequences, prompt_length=prompt_length, new_tokens=new_tokens, slots=slots,
              repeats=repeats)  # fmt: skip
    if peer_python and not model:
        raise UserError("the peer needs a model folder: give one before --peer-python")
    console = terminal.plain(soft_wrap=False)
    dtype = jnp.bfloat16 if bfloat16 else jnp.float32
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    shape, definition, params = policy(model, mesh, dtype)
    prompts = (
        np.random.default_rng(0).integers(0, shape.vocab_size, (sequences, prompt_length)).tolist()
    )
    rate = flops.matmul_rate(dtype)
    length = prompt_length + new_tokens
    work = flops.forward(
        shape, tokens=sequences * length, scored=sequences * new_tokens, length=length
    )
    console.print(
        f"{sequences} x ({prompt_length} + {new_tokens}) tokens, {jax.devices()[0].device_kind}, matmul "
        f"{rate / 1e9:.0f} GFLOP/s: arithmetic alone allows {sequences * new_tokens * rate / work:,.0f} tokens/s"
    )
    kinds = {
        "greedy": Sampling(temperature=0.0, max_tokens=new_tokens),
        "temperature 1": Sampling(max_tokens=new_tokens),
        "top-p 0.95": Sampling(top_p=0.95, max_tokens=new_tokens),
    }
    engine = engines.Native(slots=slots)
    with jax.set_mesh(mesh), engine.start(Policy(definition), mesh) as sampler:
        sampler.push(params, 0)
        runs = {
            name: partial(_tokens, sampler, prompts, sampling) for name, sampling in kinds.items()
        }
        peers = {}
        if peer_python:
            arguments = [str(x) for x in (sequences, prompt_length, new_tokens)]
            peers["transformers, greedy"] = Peer(
                PEER, peer_python, hf.resolve(str(model)), arguments
            )
        seconds = in_turn(runs | peers, repeats, console)
        for peer in peers.values():
            peer.close()
    table = rich.table.Table("", "seconds", "range", "tokens/s", "x floor")
    for name, values in seconds.items():
        middle = float(np.median(values))
        speed = sequences * new_tokens / middle
        table.add_row(name, f"{middle:.2f}", f"{min(values):.2f} - {max(values):.2f}", f"{speed:,.0f}",
                      f"{middle * rate / work:.2f}")  # fmt: skip
    console.print(table)


def _tokens(sampler, prompts, sampling) -> int:
    """Generates once."""
    return sum(map(len, sampler.generate(prompts, n=1, sampling=sampling).responses))
