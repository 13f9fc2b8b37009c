"""Fixtures of the tests that run the program."""

import fcntl
import gc
import os
import re
import sys

import pytest

from jaxrl_llm import storage
from tests.processes import QUICKLY
from tests.training import s3
from tests.training.process import finished


@pytest.fixture(autouse=True)
def _what_cannot_be_raised_is_reported():
    """In the next test too, though an error of the disk has silenced it."""
    before = sys.unraisablehook
    yield
    if sys.unraisablehook is not before:
        gc.collect()  # what orbax has abandoned, while nobody hears it
        sys.unraisablehook = before


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of a session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def environment(shared, request):
    """Processes with one device and compilations shared between them (kept, where the caller says).

    In the slow tier they are compiled as users have them.
    """
    slow = request.config.option.markexpr == "slow"
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR")
        or str(shared / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "" if slow else QUICKLY,
    }


@pytest.fixture(scope="session")
def whole(environment, shared):
    """The folder of a run that nothing has disturbed, made by the worker that needs it first."""
    made = shared / "whole-is-made"
    with (shared / "whole-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            finished(environment, shared / "whole" / "run")
            made.touch()
    return shared / "whole" / "run"


@pytest.fixture(scope="session")
def s3_port():
    """The port of a server for s3:// with an empty bucket."""
    pytest.importorskip("s3fs", reason="pip install -e '.[dev]'")
    pytest.importorskip("moto", reason="pip install -e '.[dev]'")
    with s3.served() as port:
        yield port


@pytest.fixture
def wire(s3_port, monkeypatch):
    """The way to the server, for this process and those it starts with `os.environ`."""
    between = s3.Wire(s3_port)
    for name, value in s3.credentials(between.port).items():
        monkeypatch.setenv(name, value)
    forget()
    yield between
    between.close()
    forget()


def forget():
    """As if this process had never reached a bucket."""
    import s3fs

    storage._MIRRORS.clear()
    storage._file_system.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def url(wire, request):
    """A place in the bucket for this test alone."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"s3://{s3.BUCKET}/{name}"
