"""Proof that a server computes with the weights that it was given.

HTTP 200 proves nothing: some backends keep part of the old weights and report no error. So after
every sync each server's log-probs of a few fixed sequences are compared with the trainer's, and
with its own before the sync. In bfloat16 server and trainer differ by far more than a step changes,
but the server's own answers must have moved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm.client import Server

TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}  # bfloat16 reaches 0.4 on a sound 135M model
PROBES = (4, 24)  # sequences, and tokens of each
SEEN = 1e-5  # share of the weights whose change must alter some bit of the answers

Logps = Sequence[np.ndarray]


class Proof:
    """Compares servers with the trainer; a difference above `tolerance` (nats) is a UserError."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self._config: Mapping[str, Any] = {}
        self._expected: Logps | None = None
        self._before: Logps | None = None
        self._answers: dict[str, Logps] = {}
        self._earlier: dict[str, Logps] = {}
        self._changed = 0.0

    def expect(self, logps: Logps, config: Mapping[str, Any], changed: float) -> None:
        """Sets the trainer's log-probs with new weights, a share `changed` of which differ."""
        self._before, self._expected = self._expected, logps
        self._earlier, self._answers = self._answers, {}
        self._config, self._changed = config, changed

    async def __call__(self, server: Server, label: str) -> float:
        """The largest difference between a server, which must have this label, and the trainer."""
        assert self._expected is not None
        if (found := await server.label()) != label:
            raise UserError(
                f"{server.url} serves the weights {found} after a sync of {label}: is somebody else using it?"
            )
        got = [
            np.asarray(await server.score(x)) for x in probe_sequences(self._config["vocab_size"])
        ]
        difference, stale = _largest(got, self._expected), self._stale(server, got)
        if stale or not difference <= self.tolerance:
            raise UserError(
                f"{server.url} answered the sync of {label} with success, but its log-probs differ from "
                f"the trainer's by up to {difference:.3g} (tolerance {self.tolerance:g}): "
                f"{_cause(stale, difference, self._config)}"
            )
        self._answers[server.url] = got
        return difference

    def _stale(self, server: Server, got: Logps) -> bool:
        """Whether its answers did not move at all, or barely while the trainer's clearly did."""
        earlier = self._earlier.get(server.url)
        if earlier is None or self._before is None or self._expected is None:
            return False
        moved, should = _mean(got, earlier), _mean(self._expected, self._before)
        if moved == 0 and self._changed >= SEEN:
            return True
        return 2 * moved < should and 2 * should > _mean(got, self._expected)


def probe_sequences(vocab_size: int) -> list[list[int]]:
    """Fixed sequences of tokens from the whole vocabulary."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, PROBES).tolist()


def _largest(a: Logps, b: Logps) -> float:
    """The largest absolute difference; infinite if there is a NaN."""
    difference = np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).max()
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf))


def _mean(a: Logps, b: Logps) -> float:
    return float(np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).mean())


def _cause(stale: bool, difference: float, config: Mapping[str, Any]) -> str:
    """The likely cause of a failed proof, in words."""
    if stale:
        return "it still computes with the old weights, so this vLLM does not reload; use the Native engine"
    if config["tie_word_embeddings"]:
        return "likely a stale LM head, because the model is served tied; serve it untied"
    if config["dtype"] != "float32" and difference < 2.0:
        return f"likely the rounding of {config['dtype']}; serve float32, or raise the tolerance"
    return "likely a part of the old weights is still in use (a stale head), or another dtype or config"
