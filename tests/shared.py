"""Where the reference numbers lie: outside the repository, beside it."""

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "shared"


def reference(*parts: str) -> pathlib.Path:
    """The path of a reference file; without it the test is skipped, in CI it fails."""
    path = ROOT.joinpath(*parts)
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is missing")
        pytest.skip(f"reference data {path} is not here")
    return path
