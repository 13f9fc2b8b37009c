"""Which processes of a run write and read the arrays of a folder together."""

from pathlib import Path

import orbax.checkpoint as ocp

from jaxrl_llm import desk, hosts


def gathers(folder: Path) -> bool:
    """Whether the first process writes for all, because the folders here are not one and the same."""
    return hosts.count() > 1 and desk.place(folder) is not None


def of(folder: Path) -> ocp.options.MultiprocessingOptions:
    """Who reads and writes together: all processes, or each by itself in a folder of its own.

    They are named: else the library's threads wait by programs on the devices, in between ours.
    """
    if hosts.count() == 1:
        return ocp.options.MultiprocessingOptions()
    if gathers(folder):
        return alone("folder")
    return ocp.options.MultiprocessingOptions(active_processes={*range(hosts.count())})


def alone(purpose: str) -> ocp.options.MultiprocessingOptions:
    """This process by itself."""
    me = hosts.index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"{purpose}-{me}"
    )
