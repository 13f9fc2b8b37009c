"""The accelerators of this host: what JAX is told before it starts, and what it found."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError

# Of a GPU's memory the command line has JAX take this share (JAX's own default is 0.75), and leaves
# at least so many bytes: what is left is for the driver and the communication libraries.
OF_A_GPU, LEFT = 0.94, 2 * 2**30
FRACTIONS = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # JAX refuses both at once
OF_THE_HOST = 0.8  # the share of the host's memory that may be pinned for all of its GPUs together
CONTEXT = 560 * 2**20  # bytes that CUDA takes for a process besides, as seen on an H200
PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of a GPU: 64 unless it is set
COMPILED = "JAX_COMPILATION_CACHE_DIR"
# XLA tries each fusion by Triton too: of 164 on an H200 every one stayed as it was, and compiling took longer
UNTRIED = "--xla_gpu_experimental_enable_fusion_autotuner=false"
CGROUP = Path("/sys/fs/cgroup/memory.max")
DRIVER = Path("/proc/driver/nvidia/version")
DEV = Path("/dev")
IOMMU = Path("/sys/kernel/iommu_groups")
GOOGLE = "0x1ae0"  # its number as a maker of devices
FOR_GPUS = "install jaxrl-llm[cuda], which needs driver 580 or newer, or jaxrl-llm[cuda12], which needs 525"
FOR_TPUS = "install jaxrl-llm[tpu]"


def share_of_a_gpu(memory: int | None = None) -> float:
    """The share that JAX takes of a GPU of so many bytes (None: of those here).

    As the environment says, else `OF_A_GPU`, or less to leave `LEFT`.
    """
    said = next(filter(None, map(os.environ.get, FRACTIONS)), None)
    own = _by_rule(gpu_memory())
    return _by_rule(memory or gpu_memory()) if said in (None, str(own)) else float(said)


def _by_rule(memory: int) -> float:
    return round(min(OF_A_GPU, 1 - LEFT / memory), 3) if memory else OF_A_GPU


@cache
def gpu_memory() -> int:
    """Bytes of the smallest GPU that this process may use; 0 where that is unknown."""
    return min((int(total) * 2**20 for [total] in ask_driver("memory.total")), default=0)


def ask_driver(*fields: str) -> list[list[float]]:
    """The figures of each GPU that this process may use, by NVIDIA's program; empty where it says nothing."""
    if not present("nvidia"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return [[*map(float, row)] for row in rows if all(x.strip().isdecimal() for x in row)]


def leave(share: float) -> None:
    """Has JAX leave this share of each GPU to others, unless the environment said how much it takes.

    In time only before JAX has started.
    """
    if whole := _unsaid():
        os.environ[FRACTIONS[0]] = str(round(whole - share, 3))


def divided(count: int) -> dict[str, str]:
    """Variables with which each of so many processes takes its part of the GPUs, unless all is said."""
    whole = _unsaid()
    if count == 1 or not whole or not gpu_memory():
        return {}
    return {FRACTIONS[0]: str(round(whole / count - CONTEXT / gpu_memory(), 3))}


def _unsaid() -> float:
    """JAX's share of a GPU by our rule; 0 where the environment said another."""
    own, other = map(os.environ.get, FRACTIONS)
    whole = _by_rule(gpu_memory())
    return whole if not other and own in (None, "", str(whole)) else 0.0  # the last `prepare` sets


def require_room() -> None:
    """A UserError where other programs hold what JAX is to take of a GPU.

    JAX itself goes on with what is left, to die later beneath a thousand lines of its allocator.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    by_need = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    if by_need or not {"cuda", "gpu"} & {*platforms.split(",")}:
        return
    share = share_of_a_gpu()
    for used, total in ask_driver("memory.used", "memory.total"):
        if used > (1 - share) * total:
            raise UserError(
                f"other programs hold {used / 1024:.1f} of a GPU's {total / 1024:.1f} GiB, of which JAX is to take "
                f"{share:.0%}: end them (nvidia-smi names them), choose another GPU by CUDA_VISIBLE_DEVICES, set "
                f"{FRACTIONS[0]} to less, or JAX_PLATFORMS=cpu to stay off it"
            )


def prepare() -> None:
    """Sets what JAX reads as it starts, as far as the environment does not say it; `require_room`.

    Its share of a GPU; beside an accelerator a folder for compiled programs, which take minutes
    there; beside GPUs how much of the host's memory each may pin, and that fusions are not tuned.
    """
    if not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = str(share_of_a_gpu())
    require_room()
    if present():
        os.environ.setdefault(COMPILED, os.path.expanduser("~/.cache/jaxrl_llm/compiled"))
    if gpus := present("nvidia"):
        os.environ.setdefault(PINNED, str(int(OF_THE_HOST * host_memory() / gpus / 2**30)))
        if UNTRIED.partition("=")[0] not in (flags := os.environ.get("XLA_FLAGS", "")):
            os.environ["XLA_FLAGS"] = f"{flags} {UNTRIED}".lstrip()


def present(kind: str = "nvidia|accel") -> int:
    """How many GPUs of NVIDIA's (`nvidia`) or TPUs (`accel`) this process may use, by its files."""
    files = (*DEV.glob("*"), *DEV.glob("accel/*"))
    devices = [path for path in files if re.fullmatch(rf"({kind})\d+", path.name)]
    if "accel" in kind:  # newer TPUs are groups of vfio, as devices of other makers may be
        maker = lambda group: {x.read_text() for x in IOMMU.glob(f"{group}/devices/*/vendor")}
        devices += [x for x in DEV.glob("vfio/[0-9]*") if f"{GOOGLE}\n" in maker(x.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind == "nvidia" and visible is not None:
        return min(len(devices), len([name for name in visible.split(",") if name.strip()]))
    return len(devices)


def host_memory() -> int:
    """Bytes of memory of the host, or as many as the container may use."""
    known = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP.read_text().strip() if CGROUP.exists() else ""
    return min(known, int(limit)) if limit.isdigit() else known


def driver() -> str:
    """The version of NVIDIA's driver, empty without one."""
    said = DRIVER.read_text() if DRIVER.exists() else ""
    return next(iter(re.findall(r"\s(\d+\.\d+(?:\.\d+)?)\s", said)), "")


def described(devices: Sequence[Any]) -> str:
    """Devices in words, as `8 x NVIDIA H100 80GB HBM3 (JAX 0.10.2, driver 580.95.05)`."""
    kinds = Counter(device.device_kind for device in devices)
    said = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    beside = f", driver {driver()}" if driver() else ""
    return f"{said} (JAX {metadata.version('jax')}{beside})"


def require_used(devices: Sequence[Any]) -> None:
    """A UserError where JAX fell back to the CPU, of which it says little, beside an accelerator."""
    if os.environ.get("JAX_PLATFORMS") or any(device.platform != "cpu" for device in devices):
        return
    for kind, name, remedy in (("nvidia", "GPU", FOR_GPUS), ("accel", "TPU", FOR_TPUS)):
        if count := present(kind):
            beside = f" (driver {driver()})" if kind == "nvidia" and driver() else ""
            raise UserError(
                f"this host has {count} {name}{'s' * (count > 1)}{beside}, but JAX runs on the CPU: {remedy}; "
                "JAX_PLATFORMS=cpu says that the CPU is meant"
            )
