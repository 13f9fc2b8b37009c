"""Machines that are not here, and what their compilers say of a run's step: memory, traffic, time."""
