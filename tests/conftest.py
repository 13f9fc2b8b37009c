"""Eight virtual devices, strict broadcasting, and every shape annotation checked.

Programs are compiled quickly (`processes.QUICKLY`). In the slow tier runs in processes of their own are as
users have them; `XLA_FLAGS=--xla_backend_optimization_level=3` makes everything so (on JAX 0.10 with
--xla_cpu_use_fusion_emitters=true, which 0.12 does not know).
"""

import os

from tests.processes import QUICKLY

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join([
    "--xla_force_host_platform_device_count=8",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",  # after 40 it would end the process
    QUICKLY,
    os.environ.get("XLA_FLAGS", ""),
])  # fmt: skip

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs queued without waiting can starve each other's reductions where devices outnumber cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def make_devices():
    """XLA gives a device one thread; a collective holds it while it waits, and where devices reach independent
    collectives of one program in different orders, all threads wait (JAX 0.10.2: 4 of 4 runs of 4,000 steps).
    """
    os.environ["NPROC"] = "16"
    jax.devices()
    del os.environ["NPROC"]  # other processes have threads for their cores


if "FORKED_LATER" not in os.environ:  # by tests/mutants.py: a fork would not have their threads
    make_devices()
CHECKED = ("objectives", "models", "learning.batch", "learning.metrics", "learning.update", "rollouts.draw",
           "rollouts.native", "rollouts.sampler", "rollouts.slots", "rollouts.trajectory",
           "rollouts.vllm.sampler", "rollouts.vllm.sync")  # fmt: skip
install_import_hook([f"jaxrl_llm.{name}" for name in CHECKED], "beartype.beartype")


def pytest_xdist_auto_num_workers():
    """One more than cores, at most 4: tests often wait for processes that they started."""
    return min(len(os.sched_getaffinity(0)) + 1, 4)


LONG = ("test_golden_step.py", "test_update.py", "test_replay.py", "test_families.py",
        "test_commands.py", "test_resume.py", "test_supervised.py")  # fmt: skip


def pytest_collection_modifyitems(items):
    """A worker takes a file at a time: long ones come first, so that none is left working alone."""
    items.sort(key=lambda item: item.path.name not in LONG)
