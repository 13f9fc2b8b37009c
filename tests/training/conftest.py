"""Fixtures of the tests that run the program."""

import os
import re
import sys

import pytest

from jaxrl_llm import storage
from tests.training import s3
from tests.training.process import finished


@pytest.fixture(autouse=True)
def _what_cannot_be_raised_is_reported(monkeypatch):
    """In the next test too, though an error of the disk has silenced it."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Processes of a user: one device, and compilations shared between them (and kept, where the caller says)."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR")
        or str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | cache


@pytest.fixture(scope="session")
def whole(environment, tmp_path_factory):
    """The folder of a run that nothing has disturbed."""
    return finished(environment, tmp_path_factory.mktemp("whole") / "run")


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
