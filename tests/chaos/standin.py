"""A stand-in for vLLM that computes what a Qwen2 says, in NumPy: up in half a second, its answers repeatable.

`python -m ... --uds PATH --model FOLDER`, as the real one; whatever `-m` names is ignored.
"""

import argparse
import json
import os
import pathlib
import threading
import time

import numpy as np
import safetensors.numpy

from tests.rollouts.fake_vllm import Fake

HANGING = "hanging"  # the file in a scene's folder that names servers which answer /health alone


class Model:
    """The weights of a Hugging Face folder; `logits(tokens)` are `[L,V]`, in double precision."""

    def __init__(self, folder: pathlib.Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.weights |= safetensors.numpy.load_file(path)
        self.weights = {name: x.astype(np.float64) for name, x in self.weights.items()}

    def logits(self, tokens):
        x = self.weights["model.embed_tokens.weight"][tokens]
        for i in range(self.config["num_hidden_layers"]):
            x = self._layer(x, f"model.layers.{i}.")
        return self._norm(x, "model.norm.weight") @ self.weights["lm_head.weight"].T

    def _layer(self, x, at):
        length, heads = len(x), self.config["num_attention_heads"]
        normed = self._norm(x, at + "input_layernorm.weight")
        q, k, v = (self._heads(normed, f"{at}self_attn.{name}_proj") for name in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (np.repeat(y, heads // y.shape[1], axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", shares, v).reshape(length, -1)
        x = x + mixed @ self.weights[at + "self_attn.o_proj.weight"].T
        normed = self._norm(x, at + "post_attention_layernorm.weight")
        gate = normed @ self.weights[at + "mlp.gate_proj.weight"].T
        up = normed @ self.weights[at + "mlp.up_proj.weight"].T
        return x + gate / (1 + np.exp(-gate)) * up @ self.weights[at + "mlp.down_proj.weight"].T

    def _heads(self, x, name):
        y = x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]
        width = self.config["hidden_size"] // self.config["num_attention_heads"]
        return y.reshape(len(x), -1, width)

    def _rotated(self, x):
        half = x.shape[-1] // 2
        rope = self.config.get("rope_parameters", self.config)
        frequency = rope["rope_theta"] ** -(np.arange(half) / half)
        angle = np.arange(len(x))[:, None, None] * frequency
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _norm(self, x, name):
        scale = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def hangs():
    """Whether this process is one of those that are to."""
    named = pathlib.Path(os.environ.get("VLLM_CHAOS_TRIAL", "")) / HANGING
    return named.exists() and str(os.getpid()) in named.read_text().split()


class Standin(Fake):
    """The stand-in, with a model in it."""

    def __init__(self, model: pathlib.Path | None = None, **how):
        self.model, self._computing = model and Model(model), threading.Lock()
        super().__init__(**how)

    def route(self, path, body):
        if path != "/health" and hangs():
            time.sleep(600)
        if path == "/collective_rpc":
            self.model = Model(pathlib.Path(body["kwargs"]["weights_path"]))
        if path == "/v1/completions":
            with self._computing:
                return {"choices": [self._completion(body)]}
        return super().route(path, body)

    def _completion(self, body):
        tokens, logps, stop = list(body["prompt"]), [], body.get("stop_token_ids", [])
        scored = log_softmax(self.model.logits(tokens))
        prompt_logprobs = [None, *(
            {str(token): {"logprob": scored[i, token]}} for i, token in enumerate(tokens[1:])
        )]  # fmt: skip
        draw, given = np.random.default_rng(body.get("seed", 0)), len(tokens)
        while len(logps) < body["max_tokens"]:
            heat = body["temperature"] or 1.0
            logp = log_softmax(self.model.logits(tokens)[-1] / heat)
            noise = draw.gumbel(size=logp.shape) if body["temperature"] else 0.0
            token = int(np.argmax(logp + noise))
            tokens.append(token)
            logps.append(float(logp[token]))
            if token in stop:
                break
        return {
            "token_ids": tokens[given:],
            "logprobs": {"token_logprobs": logps},
            "finish_reason": "stop" if tokens[-1] in stop else "length",
            "prompt_logprobs": prompt_logprobs,
        }


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--model", type=pathlib.Path)
    known, _ = parser.parse_known_args()
    Standin(known.model, path=known.uds, key=os.environ["VLLM_API_KEY"])
    while True:
        time.sleep(600)


if __name__ == "__main__":
    main()
