"""JAX takes as much of a GPU as a plan counts on."""

import os

import pytest

from jaxrl_llm.machines import share

NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")


def said():
    return {name: os.environ[name] for name in NAMES}


def test_it_takes_what_is_planned_with():
    assert share.of_a_gpu() == 0.94
    share.take()
    assert said() == {NAMES[0]: "0.94", NAMES[1]: ""}


@pytest.mark.parametrize("name", NAMES)
def test_who_has_said_how_much_is_heard(name, monkeypatch):
    """JAX refuses both names at a time."""
    monkeypatch.setenv(name, "0.5")
    share.take()
    assert said() == {**dict.fromkeys(NAMES, ""), name: "0.5"}
    assert share.of_a_gpu() == 0.5
