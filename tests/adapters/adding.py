"""A policy that likes to call the tool of `adder.py`, and what the package would learn from its episodes."""

import json
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.adapters.verifiers import Verifiers
from jaxrl_llm.models import tokenizer
from tests import tiny
from tests.reference.peer import needed

TURN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FIRST = [f'{{"name":"add","arguments":{{"a":{k},' for k in range(10)]
SECOND = [f'"b":{k}}}}}' for k in range(10)]
SUMS = [*map(str, range(15))]
NEXT = {
    "assistant": ["<tool_call>", *SUMS[:2]],
    "<tool_call>": FIRST,
    **{one: [*SECOND, "</tool_call>"] for one in FIRST},
    **{one: ["</tool_call>"] for one in SECOND},
    "</tool_call>": ["<|im_end|>"] * 3 + ["<tool_call>"],
    **{one: ["<|im_end|>"] for one in SUMS},
}


def task_of(taskset, renderer, harness=None, **how):
    python = needed("JAXRL_VERIFIERS_PYTHON", "an interpreter with verifiers")
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": taskset, **(harness or {})}}
    how = {"python": python, "train": 40, "test": 10, "env": {"agent": agent}} | how
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return Verifiers(taskset, renderer=renderer, variables=("PYTHONPATH",), **how)


def words():
    """Tokens of Qwen3's turns, of calls and numbers; any other word is a question mark."""
    made = tokenizer.of_words(
        [*TURN, *CALL, *FIRST, *SECOND, *SUMS, "user", "assistant", "?"]
    )._inner
    made.eos_token, made.unk_token, made.backend_tokenizer.model.unk_token = "<|im_end|>", "?", "?"
    return tokenizer.Tokenizer(made)


def weights(shape, known):
    """Random ones, to which the token before says most of what comes next."""
    params = tiny.policy(shape, seed=1)[1]
    table, head = params["embed_tokens"], params["lm_head"]
    table["weight"] += 30 * np.eye(*table["weight"].shape)
    for word, following in NEXT.items():
        for one in following:
            where = known.encode(one)[0], known.encode(word)[0]
            head["weight"] = head["weight"].at[where].set(8 / shape.hidden_size**0.5)
    return params


def require_what_the_package_has(trajectories):
    """Tokens, which of them were sampled, and log-probs are those of the package's own traces.

    Returns how many results of tools the episodes have.
    """
    results = []
    for one in trajectories:
        fields = one.reward.fields
        if "tokens" in fields and not one.restarts:
            where = one.sampled
            mask = np.r_[np.zeros(len(one.prompt), bool), np.isin(range(len(one.tokens)), where)]
            assert fields["tokens"] == zlib.crc32(json.dumps([*one.prompt, *one.tokens]).encode())
            assert fields["sampled"] == zlib.crc32(json.dumps(mask.tolist()).encode())
            assert abs(fields["logps"] - np.asarray(one.logps)[where].sum()) < 1e-4
            assert len([*pairwise(one.turns)]) <= fields["results"]
            results.append(fields["results"])
    return results
