"""Keys and exchange folders where strangers may write: nothing is followed, waited for, or shown to others."""

import os
import shutil
import stat

import numpy as np
import pytest

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm import client as keys
from jaxrl_llm.rollouts.vllm import sync as weight_sync

CONFIG = {"vocab_size": 50, "tie_word_embeddings": False, "dtype": "float32"}
STRANGER = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def write(folder):
    return weight_sync.write_folder({"a": np.ones(3, np.float32)}.items(), CONFIG, folder)


def test_a_folder_that_vanishes_does_not_come_back_open_to_all(tmp_path):
    with storage.temporary_folder(tmp_path) as root:
        write(root / "one")
        shutil.rmtree(root)
        with pytest.raises(
            UserError, match=r"cannot write the weights to .*No such file or directory"
        ):
            write(root / "two")
        assert not root.exists()


@only_root
def test_a_folder_that_somebody_else_has_made_anew_gets_nothing(tmp_path):
    with storage.temporary_folder(tmp_path) as root:
        shutil.rmtree(root)
        root.mkdir(mode=0o777)
        os.chown(root, STRANGER, STRANGER)
        with pytest.raises(UserError, match="it belongs to another user"):
            write(root / "two")
        assert not list(root.iterdir())


def test_a_key_is_written_for_its_owner_alone(tmp_path):
    path = tmp_path / "key"
    keys.write_key("secret", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.read_key(path) == "secret"
    with pytest.raises(FileExistsError):
        keys.write_key("other", path)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"secret", 0o644, "not yours alone: chmod 600"),
        (b"", 0o600, "holds no key"),
        (b"a\nb", 0o600, "more than letters, digits and signs on one line"),
        ("clé".encode(), 0o600, "more than letters"),
        (b"\xff", 0o600, "more than letters"),
        (None, 0o600, "no key in .*: No such file"),
    ],
)
def test_a_key_file_that_will_not_do(tmp_path, content, mode, says):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(UserError, match=says):
        keys.read_key(path)


def test_a_fifo_for_a_key_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(UserError, match="holds no key"):
        keys.read_key(tmp_path / "key")


def test_without_a_file_the_key_is_the_environments(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys.read_key(None) == ""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert keys.read_key(None) == "secret"
    monkeypatch.setenv("VLLM_API_KEY", "a\r\nX: y")
    with pytest.raises(UserError, match="the key in VLLM_API_KEY holds more than"):
        keys.read_key(None)
