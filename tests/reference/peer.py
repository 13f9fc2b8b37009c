"""An independent implementation, in an environment of its own, and a real model to compare on."""

import os
import pathlib
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent


def needed(variable: str, what: str) -> str:
    """The value of an environment variable, without which a test is skipped, in CI failed."""
    value = os.environ.get(variable)
    if not value:
        if os.environ.get("CI"):
            pytest.fail(f"{variable} is not set")
        pytest.skip(f"{variable} ({what}) is not set")
    return value


def transformers(script: str, *arguments) -> None:
    """Runs transformers_SCRIPT.py with torch."""
    python = needed("JAXRL_TORCH_PYTHON", "an interpreter with torch and transformers")
    path = HERE / f"transformers_{script}.py"
    subprocess.run([python, str(path), *map(str, arguments)], check=True, timeout=3600)


def real_model(folder: pathlib.Path) -> pathlib.Path:
    """A pretrained model in Qwen2 format, linked into a folder that may be written to."""
    source = pathlib.Path(needed("JAXRL_REAL_MODEL", "a folder of SmolLM2"))
    folder.mkdir()
    for path in source.iterdir():
        try:
            os.link(path, folder / path.name)
        except OSError:  # on another disk
            shutil.copy(path, folder / path.name)
    return folder


def browser(
    page: pathlib.Path, pictures: pathlib.Path, readable: bool, kind: str = "tokens"
) -> None:
    """Works through a page in Chromium; `readable`: axe-core finds nothing serious in it."""
    python = needed("JAXRL_BROWSER_PYTHON", "an interpreter with playwright, beside chromium")
    axe = [needed("JAXRL_AXE", "axe.min.js of axe-core")] if readable else []
    command = [python, HERE / "browser.py", kind, page, pictures, *axe]
    subprocess.run([*map(str, command)], check=True, timeout=1800)
