"""A user's file is run as it is on the disk now."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxrl_llm import config, userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import assemble, folder
from tests.training.process import QUICK, ROOT

LOADS = """from dataclasses import replace
from pathlib import Path
from jaxrl_llm.config import load
base = load(Path(__file__).parents[1] / "base.py")
def config(): return replace(base(), steps=3)
"""


def test_an_edit_of_the_same_length_in_the_same_second_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "config.py"
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert userfile.run(path, "config").value == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.py"]


def test_a_config_that_loads_another_is_opened_again_as_it_was(tmp_path):
    """Wherever the other lies now, and whatever is written there; only a resumed run asks for the same."""
    (mine := tmp_path / "mine" / "config_of_mine.py").parent.mkdir()
    base, run = tmp_path / "base.py", tmp_path / "runs" / "run"
    mine.write_text(LOADS)
    shutil.copy(ROOT / QUICK, base)
    userfile.forget()
    parts = assemble.parts(config.load(mine)(), tmp_path)
    with folder.opened(run, mine, {}, parts, resume=False):
        pass
    base.write_text(base.read_text().replace("1e-3", "1e-4"))
    assert folder.reopen(run).steps == 3
    with (
        pytest.raises(UserError, match=r"base\.py has changed since"),
        folder.opened(run, mine, {}, parts, resume=True),
    ):
        pass
    for path in (base, mine):
        path.unlink()
    assert folder.reopen(run).steps == 3
    made = folder.reopen(Path(run)).task(tmp_path)
    assert len(made.train) == 64
