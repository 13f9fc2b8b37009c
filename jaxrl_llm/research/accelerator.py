"""`bench accelerator`: judges the devices that are here by checks (checks.py), each a process of its own.

JAX gives no memory back, and a fault of a kernel or driver ends its process. So this one leaves
devices alone, and a check that dies, hangs or runs out of memory costs only itself.
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm import accelerators, storage
from jaxrl_llm.errors import UserError, printable
from jaxrl_llm.research import checks as work
from jaxrl_llm.research.checks import SHAPES, Line, Settings
from jaxrl_llm.training import terminal

SLOWER = 5  # times the limits, on a CPU
VIRTUAL = 2  # devices that a CPU is cut into for the last checks
LAST = 7
TOLD = 4000  # characters of what a check that failed has written


class Check(NamedTuple):
    """A check: its number, by which it is asked for, the most seconds it may take, what it is of."""

    number: int
    name: str
    run: Callable[[Settings], Iterator[Line]]
    seconds: float
    model: str = ""
    dtype: str = ""


def every(models: tuple[str, ...]) -> list[Check]:
    """All checks, the cheapest first; most of their seconds go into tuning, product by product."""
    return [
        Check(0, "environment", work.environment, 60),
        Check(1, "attention kernels", work.kernels, 300),
        Check(2, "numbers against the CPU", work.against_cpu, 420),
        Check(3, "the engine's log-probs", work.decoded, 300),
        Check(4, "offload and a checkpoint", work.offload, 420),
        *(Check(5, f"update of {x}", work.training, 300, model=x) for x in models),
        *(Check(5, f"decoding of {x}", work.decoding, 300, model=x) for x in models),
        Check(6, "vLLM in bfloat16", work.served, 300, dtype="bfloat16"),
        Check(6, "vLLM in float32", work.served, 300, dtype="float32"),
        Check(LAST, "several devices", work.together, 180),
        Check(LAST, "several processes", work.meeting, 180),
    ]


def accelerator(
    *,
    vllm: Path | None = None,
    quick: bool = False,
    rehearse: bool = False,
    checks: tuple[int, ...] = tuple(range(LAST + 1)),
    models: tuple[str, ...] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B"),
    minutes: float = 30.0,
    out: Path = Path("accelerator.json"),
) -> None:
    """Check the GPUs or TPUs that are here: numbers, kernels, memory, speed, vLLM.

    A line a figure: name, value, limit, and right, WRONG or skipped; exit code 2 if any is WRONG.
    Each check is a process with a time limit: 0 the environment, 1 attention kernels against plain
    attention, 2 a small model against the CPU, 3 the engine's log-probs against the trainer's, 4
    offload and a checkpoint, 5 speed and memory of updates and decoding, 6 a vLLM server that
    shares the GPU, 7 several devices and processes. What each line means: docs/first-gpu.md.

    Args:
        vllm: the Python of an environment with vLLM (launch/sidecar.sh makes one), for check 6.
        quick: fewer kernels, small models.
        rehearse: small and on this CPU, which shows that the checks run, and nothing of accelerators.
        checks: which, by number; 0 is always made.
        models: those of check 5, with random weights, smallest first.
        minutes: after so many no check is begun.
        out: a file for figures, versions and errors, to attach to a report of a fault.
    """
    models = ("tiny",) if rehearse else models[:1] if quick else models
    if unknown := [name for name in models if name not in SHAPES]:
        raise UserError(f"--models {unknown[0]}: known are {', '.join(SHAPES)}")
    if {*checks} - {*range(LAST + 1)}:
        raise UserError(f"--checks {' '.join(map(str, checks))}: their numbers are 0 to {LAST}")
    small, real = ("tiny", "tiny") if rehearse else ("small", "small" if quick else "Qwen2.5-0.5B")
    settings = Settings(rehearse, quick, str(vllm or ""), small, real)
    slower, begun, console = SLOWER if rehearse else 1, time.monotonic(), terminal.plain()
    report: dict[str, Any] = {"command": sys.argv, "checks": []}
    for check in every(models):
        if check.number not in (0, *checks):
            continue
        limit = check.seconds * slower
        console.print(f"{check.number} {check.name} (at most {terminal.duration(limit)})")
        entry: dict[str, Any] = {"check": check.number, "name": check.name, "lines": []}
        report["checks"].append(entry)
        late = time.monotonic() - begun > 60 * minutes * slower
        skipped = [Line(check.name, why=f"{minutes:g} minutes are over")]
        for line in skipped if late else _run(check, settings, limit, entry):
            entry["lines"].append(line._asdict())
            console.print(f"  {_written(line)}")
            storage.write(out, json.dumps(report, indent=2) + "\n")  # it may be ended at any line
        storage.write(out, json.dumps(report, indent=2) + "\n")
        if check.number == 0:
            settings = _with_devices(entry, settings)
    lines = [line for entry in report["checks"] for line in entry["lines"]]
    console.print(f"{terminal.duration(time.monotonic() - begun)} in all, written to {out}")
    if wrong := sum(line["fine"] is False for line in lines):
        raise UserError(f"{wrong} figures are WRONG: see above, and attach {out} to a report")


def _with_devices(entry: dict[str, Any], settings: Settings) -> Settings:
    """Settings with what the first check has found; a UserError if nothing more can be checked."""
    values = {line["name"]: line["value"] for line in entry["lines"]}
    if not (platform := values.get("platform")):
        raise UserError(f"JAX has no devices: {entry['lines'][-1]['why']}")
    if platform == "cpu" and not settings.rehearse:
        raise UserError(
            f"JAX runs on {values['devices']}, and this checks GPUs and TPUs: {accelerators.FOR_GPUS}, or "
            f"{accelerators.FOR_TPUS}; --rehearse tries the checks themselves out on a CPU"
        )
    return settings._replace(platform=platform, devices=int(values["number of devices"]))


def _written(line: Line) -> str:
    """A line as it is printed."""
    verdict = {None: "skipped" if line.why else "", True: "right", False: "WRONG"}[line.fine]
    verdict += f": {line.why}" if line.why else ""
    return printable(f"{line.name:50} {line.value:>12}  {line.limit:20} {verdict}".rstrip())


def _run(check: Check, settings: Settings, limit: float, entry: dict[str, Any]) -> Iterator[Line]:
    """The lines of a check, and one more if it dies or exceeds its limit; the rest goes to `entry`."""
    where, begun = (check.run.__module__, check.run.__name__), time.monotonic()
    given = json.dumps([*where, settings._replace(model=check.model, dtype=check.dtype)])
    command = [sys.executable, "-c", f"from {__name__} import child; child()", given]
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=_variables(check, settings), stderr=log, **how) as child,  # noqa: S603
    ):
        assert child.stdout
        timer = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        try:
            for text in child.stdout:
                yield Line(*json.loads(text))
            child.wait()
        finally:
            timer.cancel()
            with suppress(ProcessLookupError):  # what it has started goes with it
                os.killpg(child.pid, signal.SIGKILL)
        log.seek(0)
        written = log.read().decode(errors="replace").strip()
    seconds = time.monotonic() - begun
    entry |= {"seconds": round(seconds, 1), "status": child.returncode}
    if child.returncode:
        entry["error"] = written[-TOLD:]
        died = f"it ended with status {child.returncode}, and at last said: "
        why = f"not done in {limit:g} s; it said: " if seconds >= limit else died
        lines = written.splitlines() or ["nothing"]
        named = [x for x in lines if re.search(r"Error\b|^F\d{4}", x)]  # of Python, of XLA
        yield Line(check.name, fine=False, why=why + (named or lines)[-1].strip()[:300])


def _variables(check: Check, settings: Settings) -> dict[str, str]:
    """The environment of a check; JAX has the CPU too, to compare with."""
    variables = dict(os.environ)
    platforms = variables.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        variables["JAX_PLATFORMS"] = f"{platforms},cpu"
    if settings.rehearse and check.number == LAST:
        flag = f"--xla_force_host_platform_device_count={VIRTUAL}"
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {flag}"
        variables["NPROC"] = "16"  # threads: virtual devices wait for one another
    return variables


def child() -> None:
    """The process of a check: its lines go out as JSON, what else is printed goes to the log."""
    module, name, given = json.loads(sys.argv[1])
    with terminal.alone() as out:
        if name != work.environment.__name__:
            accelerators.begin()  # the check before may have been ended
        for line in getattr(importlib.import_module(module), name)(Settings(*given)):
            print(json.dumps(line), file=out, flush=True)
