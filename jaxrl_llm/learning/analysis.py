"""The figures of arXiv:2505.12929 for a batch: which tokens an update comes from, and which it moves.

Every function gives plain records of numbers, for JSON; `say` hears what is being done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from jaxrl_llm.learning import probe, token_gradients
from jaxrl_llm.learning.batch import Batch
from jaxrl_llm.learning.probe import Moved, Probe
from jaxrl_llm.learning.token_gradients import Chosen, Logits
from jaxrl_llm.learning.update import Credited
from jaxrl_llm.models.activations import Offsets

EDGES = (0.25, 0.5, 0.75)
PROBABILITY = ["p < 0.25", "0.25 to 0.5", "0.5 to 0.75", "p ≥ 0.75"]
SHARE = ["lowest quarter", "second", "third", "highest quarter"]
GROUPS = ["chatter", "reasoning", "answer"]
JACOBIAN_FLOATS = 2**25  # as many are fetched for one token's stretch, at most
PIECE = 16  # tokens whose gradients are made at a time
STRETCHED = 24  # tokens that are followed through the layers
TOLERANCE = 1e-4  # of float32 sums, relative
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch as they lie in it: what every part of an analysis looks at."""

    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    group: np.ndarray
    """number in GROUPS, -1 on padding"""
    response: np.ndarray
    """number of the response, -1 on padding"""
    position: np.ndarray
    """number of the token in its response"""

    @property
    def bins(self) -> dict[str, tuple[list[str], np.ndarray]]:
        """The names and numbers of bins, by probability and by share."""
        return {
            "probability": (PROBABILITY, probe.by_probability(self.logp, self.mask, EDGES)),
            "share": (SHARE, probe.by_share(self.logp, self.mask, len(SHARE))),
        }


def tokens_of(batch: Batch, credited: Credited, logp: Any, groups: Sequence[list[str]]) -> Tokens:
    """`groups` are those of each response's tokens."""
    rows = np.asarray(batch.layout.in_rows)
    mask, width = rows >= 0, batch.mask.shape[1]
    response, position = np.divmod(rows, width)
    response = np.where(mask, response, -1)
    group = np.full(rows.shape, -1)
    of_tokens = zip(response[mask].tolist(), position[mask].tolist(), strict=True)
    group[mask] = [GROUPS.index(groups[i][t]) for i, t in of_tokens]
    return Tokens(mask, np.asarray(logp), np.asarray(credited.advantage), group, response, position)


def updates(
    plain: Credited,
    tokens: Tokens,
    optimizer: Probe,
    along: Callable[[float], Callable[[Credited], Moved]],
    say: Say,
) -> dict[str, Any]:
    """Fig. 1: the bins, their gradients, and what an update on all tokens or on one bin does to each.

    `optimizer` takes the run's own step; `along(rate)` a plain one, here as long as that of all tokens.
    """
    say("update on all tokens")
    whole = optimizer(plain)
    rate = whole.distance / max(float(whole.grad_norm[0]), 1e-30)
    tried = {"optimizer": (optimizer, whole), "gradient": (along(rate), None)}
    out: dict[str, Any] = {"gradient_norm": float(whole.grad_norm[0]), "rate": rate}
    for kind, (names, bins) in tokens.bins.items():
        records = probe.described(names, bins, tokens.logp, tokens.advantage)
        out[kind] = {"bins": records, "updates": {}}
        for by, (step, known) in tried.items():
            moved = {"all": known or step(plain)}
            for b, name in enumerate(names):
                if (bins == b).any():
                    say(f"update on {name}, by the {by}")
                    moved[name] = step(probe.only(plain, bins == b))
                    records[b]["gradient_norm"] = float(moved[name].grad_norm[0])
            out[kind]["updates"][by] = {
                on: probe.change(bins, len(names), tokens.logp, after.logp)
                for on, after in moved.items()
            }
    return out


def directions(
    credited: Mapping[str, Credited], tokens: Tokens, optimizer: Probe, say: Say
) -> dict[str, Any]:
    """Fig. 3: after one update by each variant, which tokens moved as their advantage says."""
    out: dict[str, Any] = {}
    for kind, (names, _) in tokens.bins.items():
        out[kind] = {"bins": names, "variants": {}}
    for name, batch in credited.items():
        say(f"update by {name}")
        after = optimizer(batch).logp
        for kind, (names, bins) in tokens.bins.items():
            out[kind]["variants"][name] = probe.direction(
                bins, len(names), tokens.advantage, tokens.logp, after
            )
    return out


def sources(
    credited: Mapping[str, Credited],
    tokens: Tokens,
    gradient: Callable[[Credited], Any],
    group_size: int,
    say: Say,
) -> dict[str, Any]:
    """Whose gradient it is, in each stage of each variant, all before any update.

    Of each group of tokens: its gradient's norm; its share, which is how far its gradient goes along that of the
    whole step (shares add up to 1, and one that the others outweigh is negative); and its cosine to that of the
    others. Agreement is the cosine of the gradients of every other prompt and of the rest.
    """
    total, even = int(tokens.mask.sum()), tokens.response // group_size % 2 == 0
    inside = {name: tokens.group == b for b, name in enumerate(GROUPS) if (tokens.group == b).any()}
    out: dict[str, Any] = {"tokens": {name: int(x.sum()) / total for name, x in inside.items()}}
    for variant, batch in credited.items():
        stages = batch.weight.shape[0]
        for s in range(stages):
            one = probe.stage(batch, s)
            if not bool((one.weight > 0).any()):
                continue  # a stage without tokens is no step
            say(f"gradients of the groups, {variant}")
            halves = {
                name: [gradient(probe.only(one, here & half)) for half in (even, ~even)]
                for name, here in inside.items()
            }
            name = variant + (f", stage {s + 1}" if stages > 1 else "")
            out[name] = _sources_of(halves)
    return out


def _sources_of(halves: Mapping[str, list]) -> dict[str, Any]:
    """Of gradients of groups, each in two halves that add up."""
    added = lambda trees: jax.tree.map(lambda *x: sum(x), *trees)
    groups = {name: added(both) for name, both in halves.items()}
    whole = added(groups.values())
    found = {
        name: {
            "norm": float(optax.tree.norm(mine)),
            "share": probe.along(mine, whole),
            "cosine": probe.cosine(mine, optax.tree.sub(whole, mine)),
            "agreement": probe.cosine(*halves[name]),
        }
        for name, mine in groups.items()
    }
    agreement = probe.cosine(*(added(half) for half in zip(*halves.values(), strict=True)))
    norm = float(optax.tree.norm(whole))
    return {"gradient_norm": norm, "agreement": agreement, "groups": found}


def over_batches(found: Sequence[Any], of: Callable[[list], float]) -> Any:
    """Records of the same form as one, each number `of` those of all that have it."""
    known = [x for x in found if x is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        names = dict.fromkeys(name for x in known for name in x)
        return {name: over_batches([x.get(name) for x in known], of) for name in names}
    if isinstance(known[0], list):
        return [over_batches(x, of) for x in zip(*known, strict=True)]
    return known[0] if isinstance(known[0], str) else of(known)


def single_tokens(
    params: Any,
    chosen: Chosen,
    logits: Logits,
    offsets: Offsets,
    say: Say,
) -> dict[str, Any]:
    """Fig. 2: gradient norms of the log-probs of single tokens against 1 - pi, and the bounds of Prop. 4.2.

    Where the vocabulary is small, the bounds of the layers too, for some of the tokens.
    """
    norms, found = token_gradients.make_norms(logits), []
    count = len(chosen.index)
    for start in range(0, count, PIECE):
        say(f"gradients of single tokens, {start} of {count}")
        part = Chosen(*(x[np.arange(start, start + PIECE) % count] for x in chosen))  # one shape
        found.append(jax.device_get(norms(params, offsets, part)))
    every = token_gradients.Norms(*(np.concatenate(x)[:count] for x in zip(*found, strict=True)))
    vocab = jax.eval_shape(logits, params, offsets, *(x[0] for x in chosen[:2])).shape[0]
    low, high = token_gradients.bounds(every.rest, vocab)
    against = lambda norm: probe.correlation(every.rest, norm)
    out: dict[str, Any] = {
        "vocabulary": vocab,
        "one_minus_p": every.rest.tolist(),
        "at_logits": every.at_logits.tolist(),
        "at_layers": every.at_layers.T.tolist(),
        "over_parameters": every.over_params.tolist(),
        "outside_at_logits": _outside(every.at_logits, low, high),
        "correlation": {
            "at_logits": against(every.at_logits),
            "at_layers": [against(x) for x in every.at_layers.T],
            "over_parameters": against(every.over_params),
        },
    }
    if vocab * offsets.layers.size <= JACOBIAN_FLOATS:
        picked = np.linspace(0, count - 1, min(STRETCHED, count)).astype(int)
        say(f"the stretch of {len(picked)} tokens")
        some = Chosen(*(x[picked] for x in chosen))
        stretch = token_gradients.make_stretch(logits)(params, offsets, some)
        least, most = stretch[..., 0].min(0), stretch[..., 1].max(0)
        at = every.at_layers[picked]
        out["stretch"] = {"tokens": len(picked), "least": least.tolist(), "most": most.tolist()}
        out["outside_at_layers"] = [
            _outside(at[:, i], least[i] * low[picked], most[i] * high[picked])
            for i in range(at.shape[1])
        ]
    return out


def _outside(norms: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    return int(((norms < low * (1 - TOLERANCE)) | (norms > high * (1 + TOLERANCE))).sum())
