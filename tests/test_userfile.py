"""A user's file is run as it is on the disk now."""

import os
import sys

from jaxrl_llm import userfile


def test_an_edit_of_the_same_length_in_the_same_second_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "config.py"
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert userfile.run(path, "config").value == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.py"]
