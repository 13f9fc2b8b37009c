"""`python -m tests.training.topologies`: checkpoints written on some topologies and opened on others, a table.

A state of three supervised steps is saved by jobs of so many processes and devices each; every other job must
find the same bits in parameters and moments, and take the same next step, to rounding.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import distributed
from jaxrl_llm.learning import imitate, update
from jaxrl_llm.models import sharding
from jaxrl_llm.tasks.pipeline import Batches
from jaxrl_llm.training.checkpoint import Checkpoints
from jaxrl_llm.training.leaving import Stop
from jaxrl_llm.training.parts import parts as make_parts
from tests.chaos import small
from tests.processes import QUICKLY
from tests.training.process import ROOT, port

WRITERS = ("1x8", "2x4", "4x2")  # processes x devices of each
READERS = (*WRITERS, "1x4", "2x2", "4x1", "1x1")
STEPS = 3


def main() -> None:
    """All jobs, one after the other, and the table; exits with 1 if something is not the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", nargs=4, metavar=("PROCESS", "NAME", "FOLDER", "WRITES"))
    job = parser.parse_args().job
    if job:
        work(job[0], job[1], Path(job[2]), writes=job[3] == "yes")
        return
    with tempfile.TemporaryDirectory(prefix="topologies-") as scratch:
        folder = Path(scratch)
        for name in WRITERS:
            run(name, folder, "yes")
        print("| opened by | " + " | ".join(f"written by {name}" for name in WRITERS) + " |")
        print("|---" * (len(WRITERS) + 1) + "|")
        fine = True
        for name in READERS:
            run(name, folder, "no")
            found = json.loads((folder / f"{name}.json").read_text())
            fine &= all(same and worst < 1e-5 for same, worst in found.values())
            cells = [
                f"{'same bits' if same else 'OTHER BITS'}, next step {worst:.1e}"
                for same, worst in found.values()
            ]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    sys.exit(not fine)


def run(name: str, folder: Path, writes: str) -> None:
    """A job of processes, to its end."""
    processes, devices = map(int, name.split("x"))
    where = f"127.0.0.1:{port()}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": QUICKLY,
    }
    command = [sys.executable, "-m", "tests.training.topologies", "--job"]
    started = []
    for i in range(processes):
        process = f"{i}/{processes}@{where}" if processes > 1 else "alone"
        with (folder / f"{name}-{i}.log").open("a") as log:
            started.append(subprocess.Popen(
                [*command, process, name, str(folder), writes],
                cwd=ROOT, env=environment, stdout=log, stderr=log,
            ))  # fmt: skip
    for i, one in enumerate(started):
        if one.wait():
            sys.exit(f"{name}: {(folder / f'{name}-{i}.log').read_text()[-2000:]}")


def work(process: str, name: str, folder: Path, *, writes: bool) -> None:
    """The part of one process: writes its checkpoint, or opens those of all and says how they compare."""
    with distributed.joined(None if process == "alone" else process, Stop()):
        config = small.config()
        assert config.warm_start
        parts = make_parts(config, folder)
        with jax.set_mesh(parts.mesh):
            optimizer = config.warm_start.optimizer
            step = partial(steps, config, parts)
            if writes:
                state = update.init_state(parts.fresh(config.seed), optimizer)
                state, _ = step(state, 0, STEPS)
                write(folder / name, state, step)
                return
            like = update.state_like(parts.like, optimizer)
            found = {there: read(folder / there, like, step) for there in WRITERS}
    if distributed.first():
        (folder / f"{name}.json").write_text(json.dumps(found))


def write(folder: Path, state: update.TrainState, step: Any) -> None:
    """A checkpoint, what it holds, and what the next step makes of it."""
    folder.mkdir(exist_ok=True)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(STEPS, state, {})
    bits = digests(state)
    state, loss = step(state, STEPS, STEPS + 1)
    params = whole(state.params)
    if distributed.first():
        folder.with_suffix(".bits").write_text(json.dumps(bits))
        np.savez(folder.with_suffix(".npz"), *params, loss)


def read(folder: Path, like: update.TrainState, step: Any) -> tuple[bool, float]:
    """Whether the bits are the same, and how far the next step's loss and parameters are from the writer's.

    Not the biases of keys, which change no probability: their gradients are rounding, and Adam makes steps of it.
    """
    state = Checkpoints(folder).restore(STEPS, like)
    same = digests(state) == json.loads(folder.with_suffix(".bits").read_text())
    state, loss = step(state, STEPS, STEPS + 1)
    here = [*whole(state.params), np.asarray(loss)]
    if not distributed.first():
        return False, 0.0
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.params)]
    counts = [not name.endswith("['k_proj']['bias']") for name in [*names, "loss"]]
    with np.load(folder.with_suffix(".npz")) as there:
        worst = [np.abs(a - b).max() for a, b in zip(here, there.values(), strict=True)]
    return same, float(max(x for x, count in zip(worst, counts, strict=True) if count))


def steps(config: Any, parts: Any, state: Any, start: int, stop: int) -> tuple[Any, float]:
    """The state after these supervised steps, and the last loss."""
    warm = config.warm_start
    data = Batches(parts.task.train, warm.batch, seed=config.seed)
    for _ in range(start):
        next(data)
    demonstrate = partial(
        imitate.demonstrations,
        parts.token_task(config),
        parts.task.demonstration,
        warm.collate.response_length,
    )
    programs = imitate.compiled(
        parts.policy, warm.optimizer, parts.collator(warm.collate), parts.mesh, state
    )
    for _ in range(start, stop):
        state, visits = programs.update(state, programs.batch(demonstrate(next(data))))
    return state, float(imitate.describe(visits, 0)["loss"])


def whole(tree: Any) -> list[np.ndarray]:
    """The arrays on the first host."""
    return [np.asarray(sharding.on_first_host(x)) for x in jax.tree.leaves(tree)]


def digests(state: update.TrainState) -> list[str]:
    """Of every array of a state, counted from its bytes."""
    return [hashlib.sha256(array.tobytes()).hexdigest() for array in whole(state)]


if __name__ == "__main__":
    main()
