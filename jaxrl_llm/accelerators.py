"""The accelerators of this host: what JAX is told before it starts, and what it found."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError

# Of a GPU's memory JAX is made to take this share (JAX's own default is 0.75), and leaves
# at least so many bytes: what is left is for the driver and the communication libraries.
OF_A_GPU, LEFT = 0.94, 2 * 2**30
JAXS_SHARE = 0.75
LEAST = 0.02  # a share that is worth a process
PATIENCE = 10.0  # seconds
FRACTIONS = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # JAX refuses both at once
OF_THE_HOST = 0.8  # the share of the host's memory that may be pinned for all of its GPUs together
CONTEXT = 560 * 2**20  # bytes that CUDA takes for a process besides, as seen on an H200
PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of a GPU: 64 unless it is set
COMPILED = "JAX_COMPILATION_CACHE_DIR"
FLAGS = (  # for XLA on GPUs, and since which jaxlib it knows them: it ends at another
    # or it tries each fusion in two ways: of 164, in attention on an H200, none was changed
    ((0, 10, 2), "--xla_gpu_experimental_enable_fusion_autotuner=false"),
    # or its allocator works from both ends, and ended a run there: "expects one central gap"
    ((0, 11, 2), "--xla_gpu_enable_allocator_spatial_partitioning=false"),
)
CGROUP = Path("/sys/fs/cgroup/memory.max")
DRIVER = Path("/proc/driver/nvidia/version")
DEV = Path("/dev")
IOMMU = Path("/sys/kernel/iommu_groups")
ACCEL = Path("/sys/class/accel")
GOOGLE = "0x1ae0"  # its number as a maker of devices
MIG = "mig.mode.current"  # "Enabled" where a GPU is divided
FOR_GPUS = "install jaxrl-llm[cuda], for driver 580 and a T4 or newer, or jaxrl-llm[cuda12], which needs 525"
FOR_TPUS = "install jaxrl-llm[tpu]"


def share_of_a_gpu(memory: int | None = None, *, left: float = 0.0) -> float:
    """The share that JAX takes of a GPU of so many bytes (None: of those here).

    As the environment says, else `OF_A_GPU`, or less to leave `LEFT`, without what is `left` to others.
    """
    said = _set_by_others()
    return _by_rule(memory or gpu_memory()) - left if said is None else said


def _set_by_others() -> float | None:
    """JAX's share of a GPU in the environment; None where `prepare` or nobody has set it."""
    said = _fraction()
    return None if said == _by_rule(gpu_memory()) else said


def _fraction() -> float | None:
    name = next(filter(os.environ.get, FRACTIONS), None)
    if name is None:
        return None
    try:
        return float(os.environ[name])
    except ValueError:
        said = os.environ[name]
        raise UserError(f"{name} is {said!r}: a part of a GPU's memory, as 0.5") from None


def _by_rule(memory: int) -> float:
    return round(min(OF_A_GPU, 1 - LEFT / memory), 3) if memory else OF_A_GPU


@cache
def gpu_memory() -> int:
    """Bytes of the smallest GPU that this process may use; 0 where that is unknown."""
    return min((int(total) * 2**20 for [total] in ask_driver("memory.total")), default=0)


def ask_driver(*fields: str) -> list[list[float]]:
    """The figures of each GPU that this process may use, by NVIDIA's program; empty where it says nothing.

    It knows the whole GPU alone, so of one that is divided (MIG) there are none.
    """
    if not present("nvidia"):
        return []
    query = f"--query-gpu={','.join((*fields, MIG))}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    whole = [row for *row, divided in rows if divided != "Enabled"]
    return [[*map(float, row)] for row in whole if row and all(map(str.isdecimal, row))]


def begin(shared: float = 0.0) -> None:
    """Has all done that is to be done before JAX starts: `prepare`, `leave`, `require_room`; nothing after."""
    import jax  # which starts nothing
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        prepare()
        kept = jax.config.jax_compilation_cache_dir or os.environ.get(COMPILED)
        jax.config.update("jax_compilation_cache_dir", kept)  # it has read the variable already
        leave(shared)
        require_room()


def leave(share: float) -> None:
    """Has JAX leave this share of each GPU to others, unless the environment said how much it takes."""
    if not share or not (whole := own_share()):
        return
    if whole - share < LEAST:
        raise UserError(
            f"engine: share = {share:g} leaves JAX nothing: at most {whole - LEAST:.2f}"
        )
    os.environ[FRACTIONS[0]] = str(round(whole - share, 3))


def own_share() -> float:
    """JAX's share of a GPU by our rule; 0 where the environment sets another."""
    return _by_rule(gpu_memory()) if _set_by_others() is None else 0.0


def require_room() -> None:
    """A UserError where others hold what JAX, which has not started yet, is to take of a GPU.

    It would go on with what is left, to die later beneath some 2,000 lines of its allocator.
    """
    on_demand = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0")
    on_demand |= os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform"
    if on_demand or not _gpus():
        return
    said = _fraction()
    share = JAXS_SHARE if said is None else said
    until = time.monotonic() + PATIENCE
    while full := [
        f"{used / 1024:.1f} of the {total / 1024:.1f} GiB of GPU {index:.0f}"
        for index, used, total in ask_driver("index", "memory.used", "memory.total")
        if 1 > share > 1 - (used + CONTEXT / 2**20) / total
    ]:
        if time.monotonic() > until:
            raise UserError(
                f"others hold {full[0]}, or torch in this process, and JAX is to take {share:.0%} of it: end them "
                f"(nvidia-smi names them), choose another GPU by CUDA_VISIBLE_DEVICES, set {FRACTIONS[0]} to "
                "less, or JAX_PLATFORMS=cpu to stay off it"
            )
        time.sleep(1)  # one that has just ended may not have given all back


def in_use() -> bool:
    """True if JAX will run on GPUs or TPUs of this host, by their files and its settings."""
    return bool(_gpus() or ("tpu" in (_platforms() or "tpu") and present("accel")))


def _gpus() -> int:
    """How many GPUs JAX will run on."""
    platforms = {*(_platforms() or "cuda").split(",")}
    return present("nvidia") if platforms & {"cuda", "gpu"} else 0


def _platforms() -> str:
    """The platforms that JAX is told to run on, if any: by the environment until it is imported."""
    jax = sys.modules.get("jax")
    return (jax.config.jax_platforms if jax else os.environ.get("JAX_PLATFORMS")) or ""


def prepare() -> None:
    """Sets what JAX reads as it starts, as far as the environment does not say it.

    Its share of a GPU; beside an accelerator a folder for compiled programs, which take minutes
    there; beside GPUs how much of the host's memory each may pin, and `FLAGS`.
    """
    if not any(map(os.environ.get, FRACTIONS)):
        os.environ[FRACTIONS[0]] = str(share_of_a_gpu())
    if present():
        os.environ.setdefault(COMPILED, os.path.expanduser("~/.cache/jaxrl_llm/compiled"))
    if gpus := present("nvidia"):
        os.environ.setdefault(PINNED, str(int(OF_THE_HOST * host_memory() / gpus / 2**30)))
        said = os.environ.get("XLA_FLAGS", "")
        if not re.match("[^-]", said):  # else it names a file of flags
            ours = (flag for flag in flags() if flag.partition("=")[0] not in said)
            os.environ["XLA_FLAGS"] = " ".join(filter(None, (said, *ours)))


def flags() -> list[str]:
    """Those of `FLAGS` that the JAX that is here knows."""
    version = tuple(map(int, re.findall(r"\d+", metadata.version("jaxlib"))[:3]))
    return [flag for since, flag in FLAGS if version >= since]


def present(kind: str = "nvidia|accel") -> int:
    """How many GPUs of NVIDIA's (`nvidia`) or TPUs (`accel`) this process may use, by its files."""
    devices = [path for path in DEV.glob("*") if re.fullmatch(rf"({kind})\d+", path.name)]
    if "accel" in kind:  # newer TPUs are where devices of other makers may be too
        devices += [x for x in DEV.glob("vfio/[0-9]*") if _of_google(IOMMU / x.name, "devices/*")]
        devices += [x for x in DEV.glob("accel/accel*") if _of_google(ACCEL / x.name, "device")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind == "nvidia" and visible is not None:  # up to the first that is none, as CUDA reads it
        named = takewhile(lambda name: re.match(r"[^-\s]", name.strip()), visible.split(","))
        return min(len(devices), len([*named]))
    return len(devices)


def _of_google(about: Path, devices: str) -> bool:
    """True if the files about a device, or a group of them, name that maker."""
    return GOOGLE in {path.read_text().strip() for path in about.glob(f"{devices}/vendor")}


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
    if _platforms() or any(device.platform != "cpu" for device in devices):
        return
    for kind, name, remedy in (("nvidia", "GPU", FOR_GPUS), ("accel", "TPU", FOR_TPUS)):
        if count := present(kind):
            beside = f" (driver {driver()})" if kind == "nvidia" and driver() else ""
            raise UserError(
                f"this host has {count} {name}{'s' * (count > 1)}{beside}, but JAX runs on the CPU: {remedy}; "
                "JAX_PLATFORMS=cpu says that the CPU is meant"
            )
