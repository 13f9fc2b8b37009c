"""Recorded numbers, which are in the repository, and published data sets, which are not."""

import os
import pathlib

import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"
ROOT = pathlib.Path(__file__).parents[2] / "shared"


def reference(*parts: str) -> pathlib.Path:
    """The path of a published file beside the repository; without it the test is skipped, in CI it fails."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{path} is not here")
    return path
