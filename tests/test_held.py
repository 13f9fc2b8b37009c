"""Folders and keys where strangers may write: nothing waits for them, follows them, or touches what is theirs."""

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import held
from jaxrl_llm.errors import UserError
from jaxrl_llm.held import LOCK, held_folder
from jaxrl_llm.rollouts.vllm import client, sync

NAME = "jaxrl-llm-x"
CONFIG = {"vocab_size": 50, "tie_word_embeddings": False, "dtype": "float32"}
STRANGER = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def folder_with(lock, under):
    (under / NAME).mkdir(mode=0o700)
    if lock is not None:
        (under / NAME / LOCK).write_bytes(lock)
    return under / NAME


def fifo(under):
    os.mkfifo(folder_with(None, under) / LOCK)


def link_to_a_lock(under):
    (under / "elsewhere").write_bytes(held._mark())
    (folder_with(None, under) / LOCK).symlink_to(under / "elsewhere")


def link_to_a_folder(under):
    folder_with(held._mark(), under).rename(under / "elsewhere")
    (under / NAME).symlink_to(under / "elsewhere")


def a_socket(under):
    with contextlib.chdir(folder_with(None, under)), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(LOCK)


def a_folder_as_lock(under):
    (folder_with(None, under) / LOCK).mkdir()


def another_program(under):
    folder_with(b"", under)


def another_host(under):
    folder_with(b"jaxrl-llm on elsewhere\n", under)


def being_made(under):
    folder_with(None, under)


def no_folder(under):
    (under / NAME).write_bytes(held._mark())


def a_huge_lock(under):
    with (folder_with(None, under) / LOCK).open("wb") as file:
        file.truncate(2**40)


def contents(under):
    return {
        path.relative_to(under): stat.S_IFMT(path.lstat().st_mode)
        for path in sorted(under.rglob("*"))
        if path.exists() or path.is_symlink()
    }


@pytest.mark.parametrize(
    "trap",
    [
        fifo, link_to_a_lock, link_to_a_folder, a_socket, a_folder_as_lock, another_program, another_host,
        being_made, no_folder, a_huge_lock,
    ],
)  # fmt: skip
def test_what_is_not_ours_neither_hangs_nor_goes(tmp_path, trap):
    trap(tmp_path)
    before = contents(tmp_path)
    with held_folder(tmp_path):
        assert before.items() <= contents(tmp_path).items()
    assert contents(tmp_path) == before


@only_root
@pytest.mark.parametrize("whose", ["", LOCK])
def test_a_strangers_folder_stays(tmp_path, whose):
    folder = folder_with(held._mark(), tmp_path)
    os.chown(folder / whose, STRANGER, STRANGER)
    with held_folder(tmp_path):
        pass
    assert (folder / LOCK).exists()


def test_a_folder_in_use_stays_and_a_dead_one_goes(tmp_path):
    folder = folder_with(held._mark(), tmp_path)
    with (folder / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with held_folder(tmp_path):
            assert folder.exists()
    with held_folder(tmp_path) as ours:
        assert not folder.exists()
        assert stat.S_IMODE(ours.stat().st_mode) == 0o700
        assert stat.S_IMODE((ours / LOCK).stat().st_mode) == 0o600
        assert socket.gethostname() in (ours / LOCK).read_text()


def write(folder):
    return sync.write_folder({"a": np.ones(3, np.float32)}.items(), CONFIG, folder)


def test_a_folder_that_vanishes_does_not_come_back_open_to_all(tmp_path):
    with held_folder(tmp_path) as root:
        write(root / "one")
        held.shutil.rmtree(root)
        with pytest.raises(
            UserError, match=r"cannot write the weights to .*No such file or directory"
        ):
            write(root / "two")
        assert not root.exists()


@only_root
def test_a_folder_that_somebody_else_has_made_anew_gets_nothing(tmp_path):
    with held_folder(tmp_path) as root:
        held.shutil.rmtree(root)
        root.mkdir(mode=0o777)
        os.chown(root, STRANGER, STRANGER)
        with pytest.raises(UserError, match="it belongs to another user"):
            write(root / "two")
        assert not list(root.iterdir())


def test_a_key_is_written_for_its_owner_alone(tmp_path):
    path = tmp_path / "key"
    client.write_key("secret", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client.read_key(path) == "secret"
    with pytest.raises(FileExistsError):
        client.write_key("other", path)


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
        client.read_key(path)


def test_a_fifo_for_a_key_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(UserError, match="holds no key"):
        client.read_key(tmp_path / "key")


def test_without_a_file_the_key_is_the_environments(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert client.read_key(None) == ""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert client.read_key(None) == "secret"
    monkeypatch.setenv("VLLM_API_KEY", "a\r\nX: y")
    with pytest.raises(UserError, match="the key in VLLM_API_KEY holds more than"):
        client.read_key(None)


def test_the_memory_of_this_machine_is_the_default():
    with held_folder(held.memory()) as root:
        assert root.parent in (Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp")))
