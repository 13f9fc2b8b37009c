"""An objective is a record of pure functions, in the order in which the data meets them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives import aggregation, losses, partition, selections
from jaxrl_llm.objectives.seen import Mask, Rewards, Seen, Tokens

Weights = Float[Array, "S B T"]


@dataclass(frozen=True)
class Objective:
    """What is maximised: `credit` is constant in the parameters, `per_token` is what is differentiated.

    `advantage` sees the whole batch; what follows sees one mini-batch. `proxy` is how likely, against the most
    likely, a token must be to stay in the policy of `seen.proxy_logp`.
    """

    advantage: Callable[[Rewards, Seen], Tokens]
    factors: tuple[Callable[[Tokens, Seen], Tokens], ...] = ()
    select: Callable[[Tokens, Seen], Mask] = selections.nothing
    surrogate: Callable[[Tokens, Tokens, Seen], Tokens] = losses.clipped
    penalties: tuple[tuple[float, Callable[[Tokens, Seen], Tokens]], ...] = ()
    aggregate: Callable[[Mask], Tokens] = aggregation.token_mean
    partition: Callable[[Seen], Bool[Array, "S B T"]] = partition.together
    proxy: float = 0.02

    def credit(
        self, reward: Rewards, seen: Seen, *, minibatches: int = 1
    ) -> tuple[Tokens, Weights, Seen]:
        """The advantage of every token, its weight in every stage, and `seen` with what this added.

        Each of the `minibatches` equal runs of rows has a denominator and a selection of its own.
        """
        seen = _complete(reward, seen)
        split, join = _runs(minibatches)
        of_one = jax.vmap(self._credit_minibatch, out_axes=(0, 1, 0))
        advantage, weight, seen = of_one(*split((self.advantage(reward, seen), seen)))
        return join(advantage), jax.vmap(join)(weight), join(seen)

    def _credit_minibatch(self, advantage: Tokens, seen: Seen) -> tuple[Tokens, Weights, Seen]:
        for factor in self.factors:
            advantage = jnp.where(seen.mask, advantage * factor(advantage, seen), 0.0)
        seen = seen._replace(selected=self.select(advantage, seen))
        return advantage, self.aggregate(seen.mask)[None] * self.partition(seen), seen

    def per_token(self, logp: Tokens, advantage: Tokens, seen: Seen) -> tuple[Tokens, Tokens]:
        """The surrogate and the weighted sum of the penalties; the loss is their sum."""
        penalty = jnp.zeros_like(logp)
        for coefficient, estimator in self.penalties:
            penalty += coefficient * estimator(logp, seen)
        return self.surrogate(logp, advantage, seen), penalty

    @property
    def stages(self) -> int:
        """How many optimizer steps the partition asks for."""
        return jax.eval_shape(self.partition, _example()).shape[0]

    @property
    def whole_responses(self) -> bool:
        """Whether a token's loss depends on its whole response, so that every stage has to score all of it."""
        return "response" in self._read(self.per_token)

    def reads(self, field: str) -> bool:
        """Whether a function of the objective looks at this field of `Seen`."""
        return field in self._read(self._everything)

    @property
    def corrects(self) -> bool:
        """Whether a factor or the selection looks at the sampler: in vain, where `old_logp` is the sampler's."""
        return "sampler_logp" in self._read(self._chosen)

    @property
    def allows_for_staleness(self) -> bool:
        """Whether what a token weighs looks at the sampler: a factor, the selection or the surrogate."""
        weighs = lambda *what: (self._chosen(*what), self.surrogate(*what))
        return "sampler_logp" in self._read(weighs)

    def _chosen(self, logp: Tokens, advantage: Tokens, seen: Seen):
        del logp
        for factor in self.factors:
            factor(advantage, seen)
        self.select(advantage, seen)

    def _everything(self, logp: Tokens, advantage: Tokens, seen: Seen):
        self.advantage(advantage[:, :1], seen)
        self._chosen(logp, advantage, seen)
        self.partition(seen)
        return self.per_token(logp, advantage, seen)

    def _read(self, call: Callable[[Tokens, Tokens, Seen], object]) -> set[str]:
        """The fields that a call reads, found by tracing it on the shapes of one token."""
        notes = _Notes()

        def traced(logp, advantage, seen):
            call(logp, advantage, _Watched.of(seen, notes))

        seen = _example()
        jax.eval_shape(traced, seen.old_logp, seen.old_logp, seen)
        return notes.fields


class _Notes:
    """The fields that are asked for; equal to itself alone, so that no trace serves two of them."""

    def __init__(self):
        self.fields: set[str] = set()


class _Watched(Seen):
    """A `Seen` that notes which of its fields are asked for, within transformations too.

    A field that is replaced is a function's own and no longer of the batch.
    """

    _notes: _Notes
    _replaced: frozenset[str]

    @classmethod
    def of(
        cls, values: Iterable[Any], notes: _Notes, replaced: frozenset[str] = frozenset()
    ) -> "_Watched":
        watched = cls._make(values)
        watched._notes, watched._replaced = notes, replaced
        return watched

    def __getattribute__(self, name):
        if name in Seen._fields and name not in self._replaced:
            self._notes.fields.add(name)
        return super().__getattribute__(name)

    def __iter__(self):
        return (getattr(self, name) for name in self._fields)

    def _replace(self, **changes):
        changed = Seen(*tuple.__iter__(self))._replace(**changes)
        return _Watched.of(changed, self._notes, self._replaced.union(changes))


jax.tree_util.register_pytree_node(
    _Watched,
    lambda seen: (tuple(tuple.__iter__(seen)), (seen._notes, seen._replaced)),
    lambda known, values: _Watched.of(values, *known),
)


def _example() -> Seen:
    """The shapes of one token of which everything is known."""
    of = lambda kind: jax.ShapeDtypeStruct((1, 1), kind)
    known: dict[str, Any] = dict.fromkeys(Seen._fields, of(jnp.float32))
    known |= {"mask": of(jnp.bool_), "selected": of(jnp.bool_), "response": of(jnp.int32)}
    return Seen(**known)


def _complete(reward: Rewards, seen: Seen) -> Seen:
    """What follows from the layout of `[B,T]`: a token's reward, and its response, the row."""
    by_token = jnp.where(seen.mask, reward.reshape(-1, 1), 0.0)
    return seen._replace(reward=by_token, response=seen.mask.astype(jnp.int32))


def _runs(count: int):
    """Functions that cut every array of a tree into `count` runs of rows, and join them again."""
    split = lambda x: x.reshape(count, -1, *x.shape[1:])
    join = lambda x: x.reshape(-1, *x.shape[2:])
    return (lambda tree: jax.tree.map(split, tree)), (lambda tree: jax.tree.map(join, tree))
