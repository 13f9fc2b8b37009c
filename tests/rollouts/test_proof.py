"""The proof of a sync, against a server that computes in bfloat16 as a real one does."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm.client import Server, run
from jaxrl_llm.rollouts.vllm.proof import TOLERANCE, Proof, probe_sequences
from jaxrl_llm.rollouts.vllm.sampler import VllmSampler
from jaxrl_llm.rollouts.vllm.sync import WeightSync, write_folder
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
    served = SimpleNamespace(
        config=lambda params, dtype: CONFIG,
        tensors=lambda params, dtype: params.items(),
        score=logps_of,
    )
    return VllmSampler(
        [Server(fake.url, "key", 5.0)],
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


def test_rounding_is_larger_than_the_steps_that_are_to_be_seen():
    probes = probe_sequences(VOCABULARY)
    exact, rounded = (
        np.concatenate(logps_of(model(), probes, how)) for how in (lambda x: x, bfloat16)
    )
    assert np.abs(exact - rounded).mean() > 0.005


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
        assert made.report.difference < 0.3
        weights = moved(weights, size, seed=version)
    assert 0 < made.report.changed <= 1


def test_weights_that_stay_are_no_cause_for_alarm(fake, tmp_path):
    made = sampler_of(fake, tmp_path)
    made.push(model(), 1)
    assert made.report.changed == 1.0
    fake.deaf = True
    made.push(model(), 2)
    assert made.report.changed == 0.0


def test_a_step_within_the_rounding_is_no_cause_for_alarm(fake, tmp_path):
    """Half a percent of the distance to the next bfloat16 changes what the trainer computes, and no byte sent."""
    made = sampler_of(fake, tmp_path)
    weights = {name: bfloat16(value) for name, value in model().items()}
    made.push(weights, 1)
    made.push({name: value * np.float32(1 + 1e-5) for name, value in weights.items()}, 2)
    assert made.report.changed == 0.0


def test_the_changed_are_counted(tmp_path):
    config = CONFIG | {"dtype": "float32"}
    weights = {"a": np.arange(90, dtype=np.float32), "b": np.zeros(10, np.float32)}
    write_folder(weights.items(), config, tmp_path / "one")
    weights["a"][[3, 50]] += 1
    share = write_folder(weights.items(), config, tmp_path / "two", tmp_path / "one").changed
    assert 0.02 <= share <= 0.04  # the header is counted too
    more = weights | {"c": np.zeros(1, np.float32)}
    assert write_folder(more.items(), config, tmp_path / "3", tmp_path / "two").changed == 1


@pytest.mark.parametrize(
    ("logp", "config", "says"),
    [
        (-1.5, {}, "still computes with the old weights"),
        (-1.0, {"tie_word_embeddings": True}, "stale LM head"),
        (-1.0, {"dtype": "bfloat16"}, "rounding of bfloat16"),
        (-1.0, {}, "a part of the old weights"),
        (float("nan"), {}, "differ from the trainer's by up to inf"),
    ],
)
def test_the_likely_cause_is_named(logp, config, says):
    """The trainer says -2 now, both said -1.5 before; the server says `logp`."""

    class Constant:
        url, logp = "a server", -1.5

        async def label(self):
            return "a-3"

        async def score(self, tokens):
            return [self.logp] * (len(tokens) - 1)

    server, proof = Constant(), Proof(TOLERANCE["float32"])
    sequences = probe_sequences(50)
    config = CONFIG | {"vocab_size": 50, "dtype": "float32"} | config
    for ours, theirs in ((-1.5, -1.5), (-2.0, logp)):
        server.logp = theirs
        proof.expect([np.full(len(s) - 1, ours) for s in sequences], config, 1.0)
        if theirs is logp and ours == -2.0:
            with pytest.raises(UserError, match=says):
                run(proof(server, "a-3"))  # pyright: ignore[reportArgumentType]
        else:
            assert run(proof(server, "a-3")) == 0.0  # pyright: ignore[reportArgumentType]


class Still:
    """A server whose answers hardly move."""

    url, logp = "a server", -1.0

    async def label(self):
        return "a"

    async def score(self, tokens):
        return [self.logp] * (len(tokens) - 1)


def test_answers_that_hardly_move_are_of_old_weights():
    server, proof = Still(), Proof(1.0)
    probes = probe_sequences(CONFIG["vocab_size"])
    proof.expect([np.full(len(s) - 1, -1.0) for s in probes], CONFIG, 1.0)
    run(proof(server, "a"))
    server.logp = -1.0001
    proof.expect([np.full(len(s) - 1, -1.5) for s in probes], CONFIG, 1.0)
    with pytest.raises(UserError, match="still computes with the old weights"):
        run(proof(server, "a"))
