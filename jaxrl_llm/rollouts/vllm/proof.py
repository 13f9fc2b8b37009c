"""Proof that a server computes with the weights that it was given.

HTTP 200 proves nothing: some backends keep part of the old weights and report no error. So after
every load a server that we started tells a checksum of each tensor that it computes with, which
one other bit changes. Its log-probs of a few fixed sequences are compared with the trainer's too:
once after its start, for another config or kernel does not come later; at every load of a server
that tells no checksums, and there with its own before. In bfloat16 server and trainer differ by far
more than a step changes, but the server's own answers must have moved. Where the weights are the same to
the bit, what differs is the arithmetic, and old weights are not to blame.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm.client import NoAnswer, NoRoute, Server
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION

# the largest difference in float32; in bfloat16 the mean, 0.06 on a sound 135M model: the largest
# one grows with depth and with each choice of an expert that rounding turns
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
PROBES = (4, 24)  # sequences, and tokens of each
SEEN = 1e-5  # share of the weights whose change must alter some bit of the answers


class Proved(NamedTuple):
    """The difference of log-probs if compared; whether all bits of the weights are the same.

    That is the largest one in float32, else the mean. `seconds` is how long the server took to tell the latter.
    """

    difference: float | None
    exact: bool
    seconds: float


class Proof:
    """Compares servers with the trainer; other weights are a UserError.

    So are log-probs that differ by more than `tolerance` (nats). `rank` is that of adapters, if they
    are what servers are given.
    """

    def __init__(self, tolerance: float, rank: int = 0):
        self.tolerance, self._rank = tolerance, rank
        self._config: Mapping[str, Any] = {}
        self._checksums: Mapping[str, int] = {}
        self._changed = 0.0
        # log-probs of all probes, `[N]`: the trainer's and the servers', with these weights and
        # with those before
        self._expected = self._expected_before = np.zeros(0)
        self._answers: dict[str, np.ndarray] = {}
        self._answers_before: dict[str, np.ndarray] = {}
        self._compared: set[str] = set()  # servers whose log-probs were the trainer's

    def expect(
        self,
        logps: Sequence[np.ndarray],
        checksums: Mapping[str, int],
        config: Mapping[str, Any],
        changed: float,
    ):
        """Sets what the trainer has with new weights, a share `changed` of which differ."""
        self._expected_before, self._expected = self._expected, np.concatenate(logps)
        self._answers_before, self._answers = self._answers, {}
        self._checksums, self._config, self._changed = checksums, config, changed

    async def __call__(self, server: Server) -> Proved:
        """Compares a server with the trainer."""
        began = time.monotonic()
        exact = await self.same_weights(server, self._checksums, self._rank)
        seconds = time.monotonic() - began
        if exact and server.url in self._compared:
            return Proved(None, exact, seconds)
        sequences = probe_sequences(self._config["vocab_size"])
        got = np.concatenate([await server.score(x) for x in sequences])
        apart = np.abs(got - self._expected)
        difference = float(apart.max() if self._config["dtype"] == "float32" else apart.mean())
        stale = not exact and self._stale(server, got)
        if stale or not difference <= self.tolerance:
            raise UserError(
                f"{server.url} loaded new weights with success, but its log-probs differ from the "
                f"trainer's by {difference:.3g} (tolerance {self.tolerance:g}): "
                f"{_cause(exact, stale, difference, self._config)}"
            )
        self._answers[server.url] = got
        self._compared.add(server.url)
        return Proved(difference, exact, seconds)

    def started(self, server: Server) -> None:
        """Notes that a server has started: its log-probs are to be compared."""
        self._compared.discard(server.url)

    async def same_weights(self, server: Server, ours: Mapping[str, int], rank: int = 0) -> bool:
        """True if a server has the trainer's weights, False if it cannot tell, else a UserError.

        With `rank` they are adapters of that rank.
        """
        asked = {"method": "jaxrl_checksums"} | ({"args": [rank]} if rank else {})
        try:
            answer = await server.post(EXTENSION, asked, tokens=len(ours))
            parts = {
                (name, place, number)
                for worker in answer["results"]
                for name, held in worker.items()
                for place, number in held
            }  # workers that hold copies of a part say the same
            sums: Counter[str] = Counter()
            for name, _, number in parts:
                sums[name] += number
        except NoRoute:
            return False
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NoAnswer(f"told no checksums of its weights ({error!r:.200})") from error
        if not sums:
            return False
        wrong = [x for x in ours if sums[x] % 2**32 != ours[x]]
        wrong += [f"{x!r:.99}, which is unknown" for x in sums if x not in ours]
        if wrong:
            raise UserError(
                f"{server.url} loaded new weights with success, but {len(wrong)} of its {len(ours)} tensors "
                f"are not the trainer's: {', '.join(wrong[:4])}{', ...' if wrong[4:] else ''}: this vLLM "
                "does not reload them; use the Native engine"
            )
        return True

    def _stale(self, server: Server, got: np.ndarray) -> bool:
        """True if its answers did not move at all, or barely while the trainer's clearly did."""
        if (before := self._answers_before.get(server.url)) is None:
            return False
        moved = np.abs(got - before).mean()
        should = np.abs(self._expected - self._expected_before).mean()
        if moved == 0 and self._changed >= SEEN:
            return True
        return bool(2 * moved < should and 2 * should > np.abs(got - self._expected).mean())


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """Fixed sequences of tokens from the whole vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, PROBES).tolist()


def _cause(exact: bool, stale: bool, difference: float, config: Mapping[str, Any]) -> str:
    """The likely cause of a failed proof, in words."""
    if exact:
        return (
            "its weights are the trainer's to the bit, so it multiplies in another precision (such as TF32 for "
            "float32), or by another config; look into its log, or raise the engine's tolerance"
        )
    if stale:
        return "it still computes with the old weights, so this vLLM does not reload; use the Native engine"
    if config["tie_word_embeddings"]:
        return "likely a stale LM head, because the model is served tied; serve it untied"
    if config["dtype"] != "float32" and difference < 10 * TOLERANCE["bfloat16"]:
        return f"likely the rounding of {config['dtype']}; serve float32, or raise the tolerance"
    return "likely a part of the old weights is still in use (a stale head), or another dtype or config"
