"""`bench accelerator`: its checks, each in a process of its own, rehearsed on a CPU."""

import json
import os
import shlex
import signal
import time

import pytest

from jaxrl_llm.cli.main import main
from jaxrl_llm.research import accelerator, checks
from jaxrl_llm.research.accelerator import Check
from jaxrl_llm.research.checks import Line


def told(tmp_path, words):
    """What a rehearsal has written, by the names of checks; its exit code."""
    out = tmp_path / "found.json"
    code = 0
    try:
        main([*shlex.split(f"bench accelerator --rehearse --out {out}"), *shlex.split(words)])
    except SystemExit as stop:
        code = stop.code
    return {entry["name"]: entry for entry in json.loads(out.read_text())["checks"]}, code


def raises(settings):
    print("to standard output, which is that of the lines")
    yield Line("before", "1", "at most 2", True)
    raise FloatingPointError("of this check")


def hangs(settings):
    time.sleep(600)
    yield Line("never")


def dies(settings):
    os.kill(os.getpid(), signal.SIGABRT)
    yield Line("never")


def test_what_fails_costs_only_itself(tmp_path, monkeypatch, capfd):
    """A check that raises, one that hangs and one that dies are WRONG, and the next is made."""
    after = Check(4, "kernels", checks.kernels, 60)
    wrong = [
        Check(1, "raises", raises, 60),
        Check(2, "hangs", hangs, 0.1),
        Check(3, "dies", dies, 60),
    ]
    first = Check(0, "environment", checks.environment, 60)
    monkeypatch.setattr(accelerator, "every", lambda models: [first, *wrong, after])
    found, code = told(tmp_path, "")
    assert code == 2
    lines = {name: [Line(**line) for line in entry["lines"]] for name, entry in found.items()}
    assert [*lines] == ["environment", "raises", "hangs", "dies", "kernels"]
    before, failed = lines["raises"]
    assert before == ("before", "1", "at most 2", True, "")
    assert failed.fine is False
    assert "FloatingPointError: of this check" in failed.why
    assert "in raises\n    raise FloatingPointError" in found["raises"]["error"]
    [late] = lines["hangs"]
    assert (late.fine, late.why.strip()) == (False, "not done in 0.5 s")
    [dead] = lines["dies"]
    assert (dead.fine, found["dies"]["status"]) == (False, -signal.SIGABRT)
    known = {line.name: line.value for line in lines["environment"]}
    assert known["platform"] == "cpu"
    assert {"jaxlib", "jaxrl-llm", "devices", "JAX_PLATFORMS"} <= {*known}
    judged = [line.fine for line in lines["kernels"]]
    assert judged.count(True) >= 3
    assert False not in judged
    said = capfd.readouterr()
    assert "3 figures are WRONG" in said.err
    assert "WRONG: not done in 0.5 s" in said.out


def test_a_cpu_is_refused(tmp_path, capsys):
    out = tmp_path / "found.json"
    with pytest.raises(SystemExit) as stop:
        main(["bench", "accelerator", "--out", str(out)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxrl-llm: JAX runs on 8 x cpu (JAX ")
    assert "--rehearse" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_all_checks_can_be_made(tmp_path):
    """With what a CPU has: nothing is wrong, and what it has not is left out with a reason."""
    vllm = os.environ.get("JAXRL_VLLM_PYTHON")
    found, code = told(tmp_path, f"--vllm {vllm}" if vllm else "")
    lines = [Line(**line) for entry in found.values() for line in entry["lines"]]
    assert [line for line in lines if line.fine is False] == []
    assert code == 0
    assert {entry["check"] for entry in found.values()} == {*range(8)}
    assert {line.why for line in lines if line.why} <= {"a cpu does not tell", "no --vllm PYTHON"}
    judged = {entry["check"] for entry in found.values() if any(x["fine"] for x in entry["lines"])}
    assert judged >= {1, 2, 3, 4, 7} | ({6} if vllm else set())
