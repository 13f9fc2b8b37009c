"""Compiles configs/kk.py and the notebook's run for each kind of device, and records what fits.

    JAX_PLATFORMS=cpu python -m tests.planning.devices l4 float32     only cases with these words; all take hours

devices.json has, by version of JAX and case, the sizes that a run would choose, and each program's memory and
fused kernels; or why the case is refused. A case that it has already is passed over. It wants the extras plan-gpu
and plan-tpu.
"""

import itertools
import json
import sys
from dataclasses import replace
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning.machines import machine
from jaxrl_llm.planning.plan import shape_of
from jaxrl_llm.planning.sizes import fitted
from tests.planning.records import CONFIGS, HERE, figures

RECORD = HERE / "devices.json"
# machines, and whether 3B is trained whole there or by adapters
DEVICES = {
    "t4x1": False, "l4x1": False, "a100-40x1": False, "rtx5090x1": False,
    "h100x1": True, "b200x1": True, "v5e-16": True, "v6e-8": True,
}  # fmt: skip
CASES = itertools.product(("larger", "kk"), DEVICES, ("bfloat16", "float32"), ("packed", "padded"))


def config_of(file: str, on: str, dtype: str, layout: str) -> Config:
    """The config of a case, with sizes left open."""
    if file == "larger":
        cells = json.loads((HERE.parents[1] / "docs/first-run.ipynb").read_text())["cells"]
        [task] = ["".join(cell["source"]) for cell in cells if cell["id"] == "task"]
        exec(task, names := dict[str, Any]())
        config = names["config"]()
    else:
        make: Any = configs.load(CONFIGS / "kk.py")
        config = make(model="Qwen2.5-3B", lora=0 if DEVICES[on] else 16)
    compute, collate = config.compute, config.collate
    return replace(
        config,
        compute=replace(compute, dtype=dtype),
        collate=replace(collate, pack=layout == "packed"),
    )


def compiled(config: Config, on: str) -> dict[str, Any]:
    """What is recorded of a case."""
    try:
        sized, plan = fitted(config, machine(on), shape_of(config))
    except UserError as error:
        return {"refused": str(error)}
    assert plan is not None
    return {
        "programs": figures(plan),
        "KiB a device": plan.memory // 1024,
        "needed": plan.peak // 1024,
        "sizes": {**sized.sizes},
    }


def main(words: list[str]) -> None:
    """Compiles and records the cases that have all of these words and no record."""
    for case in CASES:
        key = " ".join((f"JAX {jax.__version__}:", *case))
        recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        if key in recorded or not {*words} <= {*case}:
            continue
        found = compiled(config_of(*case), case[1])
        print(f"{key}: {found}", flush=True)
        recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        lines = json.dumps(recorded | {key: found}, indent=1, sort_keys=True)
        RECORD.write_text(lines + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
