"""Fixtures of the tests that run the program."""

import os

import pytest

from tests.runs.process import finished


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Processes of a user: one device, and compilations shared between them."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | cache


@pytest.fixture(scope="session")
def whole(environment, tmp_path_factory):
    """The folder of a run that nothing has disturbed."""
    return finished(environment, tmp_path_factory.mktemp("whole") / "run")
