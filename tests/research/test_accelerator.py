"""`bench accelerator`: its checks, each in a process of its own, rehearsed on a CPU."""

import json
import os
import shlex
import signal
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm import accelerators, storage
from jaxrl_llm.cli.main import main
from jaxrl_llm.models import attention
from jaxrl_llm.research import accelerator, checks
from jaxrl_llm.research.accelerator import Check
from jaxrl_llm.research.checks import Line
from tests.reference.peer import needed
from tests.tiny import slow
from tests.training.process import fails


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
    print("F0000 00:00 rendezvous.cc] a sum\n    @ 0x7f (unknown)", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
    yield Line("never")


@pytest.mark.slow
def test_what_fails_costs_only_itself(tmp_path, monkeypatch, capfd):
    """A check that raises, one that hangs and one that dies are WRONG, and the next is made."""
    after = Check(4, "kernels", checks.kernels, 600)
    wrong = [
        Check(1, "raises", raises, 600),
        Check(2, "hangs", hangs, 0.1),
        Check(3, "dies", dies, 600),
    ]
    first = Check(0, "environment", checks.environment, 600)
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
    assert (late.fine, late.why) == (False, "not done in 0.5 s; it said: nothing")
    [dead] = lines["dies"]
    assert (dead.fine, found["dies"]["status"]) == (False, -signal.SIGABRT)
    assert dead.why.endswith("at last said: F0000 00:00 rendezvous.cc] a sum")
    known = {line.name: line.value for line in lines["environment"]}
    assert known["platform"] == "cpu"
    assert {"jaxlib", "jaxrl-llm", "devices", "JAX_PLATFORMS"} <= {*known}
    judged = [line.fine for line in lines["kernels"]]
    assert judged.count(True) >= 3
    assert False not in judged
    said = capfd.readouterr()
    assert "3 figures are WRONG" in said.err
    assert "WRONG: not done in 0.5 s" in said.out


@pytest.mark.slow
def test_an_interrupted_check_leaves_its_lines(tmp_path, monkeypatch):
    """And a finished one its seconds."""
    first = Check(0, "environment", checks.environment, 600)
    monkeypatch.setattr(
        accelerator, "every", lambda models: [first, Check(1, "raises", raises, 600)]
    )
    write = storage.write

    def once_a_line(path, text):
        write(path, text)
        if any(entry["check"] == 1 and entry["lines"] for entry in json.loads(text)["checks"]):
            raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write", once_a_line)
    found, code = told(tmp_path, "")
    assert code == 130
    assert found["environment"]["seconds"] > 0
    assert [line["name"] for line in found["raises"]["lines"]] == ["before"]


def test_a_cpu_is_refused(tmp_path, capsys):
    said = fails(capsys, "bench", "accelerator", "--out", tmp_path / "found.json")
    assert said.startswith("jaxrl-llm: JAX runs on 8 x cpu (JAX ")
    assert "--rehearse" in said


@pytest.mark.parametrize(
    ("plugins", "driver", "used", "wrong"),
    [
        (["jax-cuda13-plugin"], "580.95.05", 4, set()),
        (["jax-cuda12-plugin"], "535.183.01", 4, set()),
        (["jax-cuda13-plugin"], "570.124.06", 4, {"driver"}),
        (["jax-cuda12-plugin", "jax-cuda13-plugin"], "580.95.05", 4, {"plugins for CUDA"}),
        (["jax-cuda13-plugin"], "580.95.05", 40_000, {"MiB used by others"}),
    ],
)
def test_what_is_said_of_a_gpu(plugins, driver, used, wrong, tmp_path, monkeypatch):
    """With a stand-in for the GPU, its driver and nvidia-smi."""
    stats = {"bytes_limit": int(0.94 * 79.1 * 2**30)}
    gpu = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}
    device = SimpleNamespace(**gpu, memory_stats=lambda: stats)
    packages = [SimpleNamespace(name=x, version="0.10.2") for x in [*plugins, "jaxlib"]]
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA x86_64 Kernel Module  {driver}  Sun\n")
    (smi := tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{used}, 81559, Disabled'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(accelerators, "DEV", tmp_path)
    monkeypatch.setattr(accelerators, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr("importlib.metadata.distributions", lambda: packages)
    lines = {line.name: line for line in checks.environment(checks.Settings())}
    assert {line.name for line in lines.values() if line.fine is False} == wrong
    assert lines["devices"].value.startswith("1 x NVIDIA H100 80GB HBM3 (JAX ")
    assert lines["memory for JAX, GiB"].value == "74.4"


def test_a_kernel_that_sees_other_sequences_is_wrong(monkeypatch):
    """Here one that knows neither segments nor windows: right for padded rows alone."""
    blind = lambda q, k, v, segments, window: attention.xla(q, k, v, None)
    monkeypatch.setattr(attention, "for_platform", blind)
    lines = checks.kernels(checks.Settings(rehearse=True))
    judged = {line.name.partition(",")[0]: line.fine for line in lines if line.fine is not None}
    assert judged == {"packed": False, "padded": True, "window": False}


@pytest.mark.parametrize("served", [False, slow(True)])
def test_all_checks_can_be_made(tmp_path, served):
    """With what a CPU has: nothing is wrong, and what it has not is left out with a reason."""
    vllm = f"--vllm {needed('JAXRL_VLLM_PYTHON', 'an interpreter with vLLM')}" if served else ""
    found, code = told(tmp_path, vllm)
    lines = [Line(**line) for entry in found.values() for line in entry["lines"]]
    assert [line for line in lines if line.fine is False] == []
    assert code == 0
    assert {entry["check"] for entry in found.values()} == {*range(8)}
    assert {line.why for line in lines if line.why} <= {"a cpu does not tell", "no --vllm PYTHON"}
    judged = {entry["check"] for entry in found.values() if any(x["fine"] for x in entry["lines"])}
    assert judged >= {1, 2, 3, 4, 7} | ({6} if served else set())
