"""The proof of a sync, against a server that computes in bfloat16 as a real one does."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm.client import NoRoute, Server, run
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE, Proof, probe_sequences
from jaxrl_llm.rollouts.vllm.sampler import VllmSampler
from jaxrl_llm.rollouts.vllm.sync import WeightSync
from tests.rollouts.fake import OfTests
from tests.rollouts.fake_vllm import Fake, completion

VOCABULARY, WIDTH = 512, 64
CONFIG = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "dtype": "bfloat16"}


def model(seed=0):
    rng = np.random.default_rng(seed)
    names = {"embed": (VOCABULARY, WIDTH), "middle": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    return {
        name: (rng.normal(size=size) * (2.0 if name == "head" else 1.0) / WIDTH**0.5).astype(
            np.float32
        )
        for name, size in names.items()
    }


def logps_of(weights, sequences, rounded=lambda x: x):
    """Log-probs of each token but the first, the result of every layer rounded."""
    made = []
    for sequence in sequences:
        hidden = rounded(np.cumsum(rounded(weights["embed"])[sequence[:-1]], axis=0))
        hidden = rounded(np.tanh(rounded(hidden @ rounded(weights["middle"]))) * 4)
        logits = rounded(hidden @ rounded(weights["head"]))
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        made.append(logits[np.arange(len(sequence) - 1), sequence[1:]])
    return made


def bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Rounding(Fake):
    """Computes with the weights it was told to load, unless it is `deaf`."""

    weights, deaf = None, False

    def route(self, path, body):
        if path == "/collective_rpc" and not (self.deaf and self.weights):
            folder = body["kwargs"]["weights_path"]
            self.weights = {
                k: v.astype(np.float32)
                for k, v in safetensors.numpy.load_file(f"{folder}/model-00000.safetensors").items()
            }
        answer = super().route(path, body)
        if path == "/v1/completions" and self.weights is not None:
            prompt = body["prompt"]
            (logps,) = logps_of(self.weights, [prompt], bfloat16)
            answer = completion(body)
            scored = [
                {str(t): {"logprob": float(x)}} for t, x in zip(prompt[1:], logps, strict=True)
            ]
            answer["choices"][0]["prompt_logprobs"] = [None, *scored]
        return answer


@pytest.fixture
def fake():
    with Rounding() as made:
        yield made


def sampler_of(fake, root):
    served = OfTests(
        config=lambda dtype: CONFIG,
        tensors=lambda params, dtype: params.items(),
        checksums=lambda params, dtype: {},
        score=logps_of,
    )
    return VllmSampler(
        [Server(fake.url, "key", 120.0)],
        WeightSync(root, patience=0.5),
        served,
        dtype="bfloat16",
        concurrency=4,
    )


def moved(weights, size, seed=1):
    """Weights after a step of random direction that moves log-probs by so much in the mean."""
    rng = np.random.default_rng(seed)
    step = {k: rng.normal(size=v.shape).astype(np.float32) for k, v in weights.items()}
    probes = probe_sequences(VOCABULARY)

    def effect(scale):
        new = {k: v + np.float32(scale) * step[k] for k, v in weights.items()}
        both = (np.concatenate(logps_of(w, probes)) for w in (new, weights))
        return new, np.abs(np.subtract(*both)).mean()

    _, slope = effect(1e-4)
    new, found = effect(1e-4 * size / slope)
    assert size / 2 < found < size * 2
    return new


@pytest.mark.parametrize("size", [1e-4, 3e-4, 1e-3, 1e-2, 0.1])
def test_old_weights_are_seen_at_the_first_sync(fake, tmp_path, size):
    made = sampler_of(fake, tmp_path)
    made.push(model(), 1)
    fake.deaf = True
    with pytest.raises(UserError, match="still computes with the old weights"):
        made.push(moved(model(), size), 2)


@pytest.mark.parametrize("size", [1e-4, 3e-4, 1e-3, 1e-2, 0.1])
def test_new_weights_are_no_cause_for_alarm(fake, tmp_path, size):
    made, weights = sampler_of(fake, tmp_path), model()
    for version in range(12):
        made.push(weights, version)
        assert made.sync["sync/difference"] < 0.3
        weights = moved(weights, size, seed=version)
    assert 0 < made.sync["sync/changed"] <= 1


def test_weights_that_stay_are_no_cause_for_alarm(fake, tmp_path):
    made = sampler_of(fake, tmp_path)
    made.push(model(), 1)
    assert made.sync["sync/changed"] == 1.0
    fake.deaf = True
    made.push(model(), 2)
    assert made.sync["sync/changed"] == 0.0


def test_a_step_within_the_rounding_is_no_cause_for_alarm(fake, tmp_path):
    """Half a percent of the distance to the next bfloat16 changes what the trainer computes, and no byte sent."""
    made = sampler_of(fake, tmp_path)
    weights = {name: bfloat16(value) for name, value in model().items()}
    made.push(weights, 1)
    made.push({name: value * np.float32(1 + 1e-5) for name, value in weights.items()}, 2)
    assert made.sync["sync/changed"] == 0.0


class Scored(Server):
    """Its log-probs are `logps`, in turn; it tells checksums, if it is given any."""

    def __init__(self, checksums=None):
        super().__init__("http://a")
        self.logps, self.checksums = np.full(92, -1.5), checksums

    async def score(self, tokens):
        taken = self.logps[: len(tokens) - 1]
        self.logps = np.roll(self.logps, -len(taken))
        return taken

    async def post(self, path, body=None, tokens=0):
        if self.checksums is None:
            raise NoRoute(path)
        return {"results": [self.checksums]}


@pytest.mark.parametrize(
    ("logp", "config", "says"),
    [
        (-1.5, {}, "still computes with the old weights"),
        (-1.5001, {"dtype": "bfloat16"}, "still computes with the old weights"),
        (-1.0, {"tie_word_embeddings": True}, "stale LM head"),
        (-1.0, {"dtype": "bfloat16"}, "rounding of bfloat16"),
        (-1.0, {}, "a part of the old weights"),
        (float("nan"), {}, "differ from the trainer's by nan"),
    ],
)
def test_the_likely_cause_is_named(logp, config, says):
    """The trainer says -2 now, both said -1.5 before; the server says `logp`."""
    server, proof = Scored(), Proof(TOLERANCE["float32"])
    config = CONFIG | {"vocab_size": 50, "dtype": "float32"} | config
    proof.expect([np.full(23, -1.5)] * 4, {}, config, 1.0)
    assert run(proof(server))[:2] == (0.0, False)
    server.logps = np.full(92, logp)
    proof.expect([np.full(23, -2.0)] * 4, {}, config, 1.0)
    with pytest.raises(UserError, match=says):
        run(proof(server))


def test_weights_that_are_the_same_are_not_blamed():
    """An attention in TF32: answers that have not moved, 0.01 from the trainer's, with its very weights."""
    server, proof = Scored({"head": [[0, 5]]}), Proof(TOLERANCE["float32"])
    for logp in (-1.5, -1.51):
        proof.expect([np.full(23, logp)] * 4, {"head": 5}, CONFIG | {"dtype": "float32"}, 1.0)
        proof.started(server)
        if logp == -1.5:
            assert run(proof(server))[:2] == (0.0, True)
    with pytest.raises(UserError, match="another precision") as found:
        run(proof(server))
    assert "old weights" not in str(found.value)


def test_an_odd_token_of_bfloat16_is_no_cause_for_alarm():
    server, proof = Scored({"head": [[0, 5]]}), Proof(TOLERANCE["bfloat16"])
    proof.expect([np.full(23, -1.5)] * 4, {"head": 5}, CONFIG, 1.0)
    server.logps = np.where(np.arange(92) == 7, -5.6, -1.5)
    assert run(proof(server))[:2] == (pytest.approx(4.1 / 92), True)
