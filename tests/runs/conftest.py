"""The fixtures of the runs in tests/training."""

from tests.training.conftest import environment, s3_port, url, whole, wire  # noqa: F401
