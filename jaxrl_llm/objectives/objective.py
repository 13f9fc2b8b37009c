"""`Objective`: a policy-gradient loss as a record of pure functions, in order of application."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.errors import at_least
from jaxrl_llm.objectives import aggregation, losses, partition, selections
from jaxrl_llm.objectives.token_data import Mask, Rewards, TokenData, Tokens

Weights = Float[Array, "S B T"]


@dataclass(frozen=True)
class Objective:
    """A policy-gradient loss: `credit` is constant in the parameters, `per_token` differentiated.

    `advantage` sees the whole batch, the other functions one mini-batch. `data.proxy_logp` leaves
    out tokens less likely than `proxy` times the most likely; `data.teacher_top` has `top` tokens.
    Which fields of `TokenData` are read is found by tracing the functions on the shapes `tried_on`:
    prompts, responses a prompt, tokens a response; a config sets its own.

    >>> from functools import partial
    >>> objective = jl.Objective(
    ...     advantage=jl.objectives.advantages.grpo,
    ...     penalties=((1e-3, jl.objectives.kl.k3),),
    ...     partition=partial(jl.objectives.partition.lopti, eta=0.5),
    ... )
    >>> objective.stages
    2
    """

    advantage: Callable[[Rewards, TokenData], Tokens]
    factors: tuple[Callable[[Tokens, TokenData], Tokens], ...] = ()
    select: Callable[[Tokens, TokenData], Mask] = selections.nothing
    surrogate: Callable[[Tokens, Tokens, TokenData], Tokens] = losses.clipped
    penalties: tuple[tuple[float, Callable[[Tokens, TokenData], Tokens]], ...] = ()
    aggregate: Callable[[Mask], Tokens] = aggregation.token_mean
    partition: Callable[[TokenData], Bool[Array, "S B T"]] = partition.together
    proxy: float = 0.02
    top: int = 64
    tried_on: tuple[int, int, int] = field(default=(16, 64, 32), compare=False)

    def __post_init__(self):
        at_least(1, "objective", self, "top")

    def credit(
        self, reward: Rewards, data: TokenData, *, minibatches: int = 1
    ) -> tuple[Tokens, Weights, TokenData]:
        """Advantage [B,T], weight [S,B,T], and `data` with `reward`, `response`, `selected` set.

        Each of `minibatches` equal consecutive parts of the rows has its own denominator and
        selection. Raises TypeError where a function returns another shape than the tokens'.
        """
        by_token = jnp.where(data.mask, reward.reshape(-1, 1), 0.0)
        data = data._replace(reward=by_token, response=data.mask.astype(jnp.int32))  # a row is one
        split, join = _runs(minibatches)
        of_one = jax.vmap(self._credit_minibatch, out_axes=(0, 1, 0))
        advantage, weight, data = of_one(*split((self._advantage(reward, data), data)))
        return join(advantage), jax.vmap(join)(weight), join(data)

    def _advantage(self, reward: Rewards, data: TokenData) -> Tokens:
        return _of_tokens("advantage", self.advantage(reward, data), data.mask)

    def _credit_minibatch(
        self, advantage: Tokens, data: TokenData
    ) -> tuple[Tokens, Weights, TokenData]:
        for factor in self.factors:
            weight = factor(advantage, data)
            if jnp.ndim(weight) == 1:  # of responses, or of columns: no product may choose
                _of_tokens("factor", weight, data.mask)
            advantage = jnp.where(data.mask, advantage * weight, 0.0)
            _of_tokens("advantage times factor", advantage, data.mask)
        selected = _of_tokens("select", self.select(advantage, data), data.mask)
        data = data._replace(selected=selected)
        weight = self.aggregate(data.mask)
        if jnp.ndim(weight) == 0:  # an aggregation may return one weight for all tokens
            weight = jnp.broadcast_to(weight, data.mask.shape)
        stages = self.partition(data)
        _of_tokens("a stage of partition", stages[0], data.mask)
        return advantage, _of_tokens("aggregate", weight, data.mask)[None] * stages, data

    def per_token(self, logp: Tokens, advantage: Tokens, data: TokenData) -> tuple[Tokens, Tokens]:
        """The surrogate and the weighted sum of penalties, each `[B,T]`; the loss adds the two."""
        penalty = jnp.zeros_like(logp)
        for coefficient, estimator in self.penalties:
            penalty += coefficient * _of_tokens("penalty", estimator(logp, data), logp)
        return _of_tokens("surrogate", self.surrogate(logp, advantage, data), logp), penalty

    def try_out(self) -> None:
        """Traces all functions on the shapes `tried_on`; raises whatever they raise."""
        self._read(self._everything)

    @property
    def stages(self) -> int:
        """The number S of optimizer steps that each mini-batch takes."""
        return jax.eval_shape(self.partition, self.example()).shape[0]

    @property
    def whole_responses(self) -> bool:
        """True if a token's loss depends on its whole response, so a stage must score all of it."""
        read = self._read(lambda _, x, data: self.per_token(x, x, data))
        return not read.isdisjoint(("response", "turn", "segment"))

    def reads(self, *fields: str) -> bool:
        """True if any function of the objective reads one of these fields of `TokenData`."""
        return not self._read(self._everything).isdisjoint(fields)

    @property
    def corrects(self) -> bool:
        """True if a factor or the selection reads `sampler_logp`; useless if that is `old_logp`."""
        return "sampler_logp" in self._read(lambda _, x, data: self._chosen(x, data))

    @property
    def allows_for_staleness(self) -> bool:
        """True if a factor, the selection or the surrogate reads `sampler_logp`."""
        weighs = lambda _, x, data: (self._chosen(x, data), self.surrogate(x, x, data))
        return "sampler_logp" in self._read(weighs)

    def _chosen(self, advantage: Tokens, data: TokenData):
        for factor in self.factors:
            factor(advantage, data)
        self.select(advantage, data)

    def _everything(self, reward: Rewards, logp: Tokens, data: TokenData):
        credited = data._replace(teacher_top=None, top_logp=None)  # the update alone has these
        self._credit_minibatch(self._advantage(reward, credited), credited)
        self.per_token(logp, logp, data)

    def _read(self, call: Callable[[Rewards, Tokens, TokenData], object]) -> set[str]:
        """The fields of `TokenData` that a call reads, found by tracing it on shapes."""
        notes = _Notes()

        def traced(reward, tokens, data):
            call(reward, tokens, _Watched.of(data, notes))

        data = self.example()
        rewards = jax.ShapeDtypeStruct(self.tried_on[:2], jnp.float32)
        jax.eval_shape(traced, rewards, data.old_logp, data)
        return notes.fields

    def example(self) -> TokenData:
        """The shapes of a batch with every field known."""
        prompts, responses, tokens = self.tried_on
        of = lambda kind: jax.ShapeDtypeStruct((prompts * responses, tokens), kind)
        known: dict[str, Any] = dict.fromkeys(TokenData._fields, of(jnp.float32))
        known |= dict.fromkeys(("mask", "selected"), of(jnp.bool_))
        known |= dict.fromkeys(("response", "turn", "segment"), of(jnp.int32))
        wide = jax.ShapeDtypeStruct((prompts * responses, tokens, self.top), jnp.float32)
        known |= dict.fromkeys(("teacher_top", "top_logp"), wide)
        return TokenData(**known)


class _Notes:
    """The fields read so far; compared by identity, so that JAX never reuses an earlier trace."""

    def __init__(self):
        self.fields: set[str] = set()


class _Watched(TokenData):
    """A `TokenData` that records which of its fields are read, inside transformations such as vmap too.

    A field set by `_replace` is the function's own value, so reading it is not recorded.
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
        if name in TokenData._fields and name not in self._replaced:
            self._notes.fields.add(name)
        return super().__getattribute__(name)

    def __iter__(self):
        return (getattr(self, name) for name in self._fields)

    def _replace(self, **changes):
        changed = TokenData(*tuple.__iter__(self))._replace(**changes)
        return _Watched.of(changed, self._notes, self._replaced.union(changes))


_Watched.__name__ = TokenData.__name__  # as an AttributeError calls it
jax.tree_util.register_pytree_node(
    _Watched,
    lambda data: (tuple(tuple.__iter__(data)), (data._notes, data._replaced)),
    lambda known, values: _Watched.of(values, *known),
)


def _of_tokens(name: str, value: Any, like: Any) -> Any:
    """`value`; a TypeError if its shape is not that of the tokens, which broadcasting would hide."""
    shape = jnp.shape(value) if value is not None else None
    if shape != like.shape:
        hints = {
            (): "aggregate is what sums up",
            like.shape[:1]: "x[:, None] * data.mask spreads it",
        }
        hint = f": {hints[shape]}" if shape in hints else ""
        raise TypeError(f"{name} has the shape {shape}, not that of the tokens, {like.shape}{hint}")
    return value


def _runs(count: int):
    """Two functions of trees: cut each array into `count` equal parts along rows, and undo it."""
    split = lambda x: x.reshape(count, -1, *x.shape[1:])
    join = lambda x: x.reshape(-1, *x.shape[2:])
    return (lambda tree: jax.tree.map(split, tree)), (lambda tree: jax.tree.map(join, tree))
