"""Eight virtual devices, strict broadcasting, and every shape annotation checked."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
ROOMS = ("objectives", "models", "rollouts", "batch", "metrics", "update")  # those that know arrays
install_import_hook([f"jaxrl_llm.{room}" for room in ROOMS], "beartype.beartype")
