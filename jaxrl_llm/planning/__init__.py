"""Plans: a step's memory, traffic and time on a machine, by its compiler, without the machine."""

import os

# The share of a GPU's memory that the command line has JAX take (JAX's own default is 0.75); the
# rest is for the driver and the communication libraries.
OF_A_GPU = 0.94
FRACTIONS = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
)  # JAX refuses both at once


def share_of_a_gpu() -> float:
    """The share of a GPU's memory that JAX takes, by the environment or `OF_A_GPU`."""
    return float(next(filter(None, map(os.environ.get, FRACTIONS)), OF_A_GPU))
