"""How much of a GPU's memory JAX takes: by itself three quarters, which is less than a plan counts on."""

import os

OF_A_GPU = 0.94  # the rest is for the driver and the libraries that communicate
_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def take() -> None:
    """Has JAX take that much, unless the environment says how much; to be called before it sees a device."""
    if not any(os.environ.get(name) for name in _NAMES):
        os.environ[_NAMES[0]] = str(OF_A_GPU)


def of_a_gpu() -> float:
    """What JAX takes, or would take."""
    return float(next(filter(None, map(os.environ.get, _NAMES)), OF_A_GPU))
