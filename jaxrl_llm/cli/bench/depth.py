"""Whether compile time grows with depth: it must not, since layers are stacked and scanned."""

import dataclasses
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table

from jaxrl_llm.cli.bench.turns import least_one
from jaxrl_llm.cli.bench.update import SMALL
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import optimizers, update
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.logprobs import Inputs
from jaxrl_llm.objectives import Objective, Seen, advantages, kl
from jaxrl_llm.runs import terminal


def main(*, layers: tuple[int, ...] = (4, 28), repeats: int = 3) -> None:
    """Time tracing and compiling the train step at several depths.

    Args:
        layers: depths, taken in turn; ratios are against the first.
        repeats: compilations of each depth; the median is shown.
    """
    if not layers:
        raise UserError("--layers wants at least one depth")
    least_one(layers=min(layers), repeats=repeats)
    console = terminal.plain(soft_wrap=False)
    seconds: dict[int, list[float]] = {depth: [] for depth in layers}
    with console.status("compiling") as status:
        for repeat in range(repeats):
            for depth in layers:
                status.update(f"round {repeat + 1} of {repeats}: {depth} layers")
                seconds[depth].append(_compile(depth))
    table = rich.table.Table("layers", "seconds", "range", f"x {layers[0]} layers")
    first = float(np.median(seconds[layers[0]]))
    for depth, values in seconds.items():
        middle = float(np.median(values))
        spread = f"{min(values):.2f} - {max(values):.2f}"
        table.add_row(str(depth), f"{middle:.2f}", spread, f"{middle / first:.2f}")
    console.print(table)


def _compile(depth: int) -> float:
    shape = dataclasses.replace(SMALL, num_layers=depth)
    definition, params = qwen2.graph(shape)
    optimizer = optimizers.adamw()
    objective = Objective(advantage=advantages.grpo, penalties=((1e-3, kl.k3),))

    def array(*size, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(size, dtype)

    ints, bins = partial(array, dtype=jnp.int32), (1, 1, 4, 128)
    wide = ints(1, 1, 4, 256)
    data = update.Credited(
        inputs=Inputs(
            tokens=wide,
            positions=wide,
            segments=None,
            index=ints(*bins),
            target=ints(*bins),
            scored=array(*bins, dtype=jnp.bool_),
        ),
        advantage=array(*bins),
        weight=array(2, *bins),
        seen=Seen(array(*bins, dtype=jnp.bool_), array(*bins), array(*bins)),
    )
    state = update.TrainState(params, jax.eval_shape(optimizer.init, params), ints(), ints())
    policy = partial(logprobs.of_responses, definition)
    step = update.make_train_step(policy, objective, optimizer)
    start = time.perf_counter()
    step.lower(state, data).compile()
    return time.perf_counter() - start
