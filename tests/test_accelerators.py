"""What JAX is told before it starts, and what is said of the devices that it found; with files for devices."""

import os
import pathlib
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest
from jax._src import xla_bridge

from jaxrl_llm import accelerators
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import sharding
from jaxrl_llm.planning import machines
from jaxrl_llm.research.runner import divided
from tests.training.process import port

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
PREALLOCATE, SHARE = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"


def device(kind="NVIDIA L4", platform="gpu"):
    return SimpleNamespace(device_kind=kind, platform=platform, process_index=0)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host without accelerators, whose device files the test makes; nothing is set."""
    for name in (*accelerators.FRACTIONS, accelerators.PINNED, accelerators.COMPILED):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("CUDA_VISIBLE_DEVICES", PREALLOCATE, "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.delenv(name, raising=False)
    told = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(accelerators, "DEV", tmp_path)
    monkeypatch.setattr(accelerators, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(accelerators, "CGROUP", tmp_path / "memory.max")
    monkeypatch.setattr(accelerators, "IOMMU", tmp_path / "iommu")
    monkeypatch.setattr(accelerators, "ACCEL", tmp_path / "class")
    accelerators.gpu_memory.cache_clear()
    yield tmp_path
    accelerators.gpu_memory.cache_clear()
    jax.config.update("jax_platforms", told)


def test_nothing_is_set_for_devices_that_are_not_here(host):
    accelerators.prepare()
    assert accelerators.COMPILED not in os.environ
    assert accelerators.PINNED not in os.environ
    assert os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(("visible", "each"), [(None, 20), ("2", 80), ("", None)])
def test_what_is_set_beside_gpus(host, monkeypatch, visible, each):
    """Four GPUs share 80% of a container's 100 GiB, of which the process may see some; what is set stays."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (host / name).touch()
    (host / "memory.max").write_text(f"{100 * 2**30}\n")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**30, "SC_PAGE_SIZE": 4096}.__getitem__)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv(accelerators.COMPILED, "/mine")
    accelerators.prepare()
    assert os.environ.get(accelerators.PINNED) == (each and str(each))
    assert os.environ[accelerators.COMPILED] == "/mine"
    assert os.environ[accelerators.FRACTIONS[0]] == "0.94"


FIRST, SECOND = (flag for _, flag in accelerators.FLAGS)


@pytest.mark.parametrize(
    ("version", "said", "after"),
    [
        ("0.10.2", "", [FIRST]),
        ("0.11.2", "", [FIRST, SECOND]),
        ("0.12.0.1", "--xla_dump_to=x", ["--xla_dump_to=x", FIRST, SECOND]),
        ("0.12.0.1", mine := FIRST.replace("false", "true"), [mine, SECOND]),
        ("0.12.0.1", "flags.txt", ["flags.txt"]),  # a file of flags
    ],
)
def test_flags_of_xla_on_gpus(host, monkeypatch, version, said, after):
    (host / "nvidia0").touch()
    monkeypatch.setattr(accelerators.metadata, "version", lambda package: version)
    monkeypatch.setenv("XLA_FLAGS", said)
    accelerators.prepare()
    assert os.environ["XLA_FLAGS"] == " ".join(after)


def test_this_jax_knows_its_flags():
    """It ends at one that it does not know."""
    variables = {**os.environ, "XLA_FLAGS": " ".join(accelerators.flags()), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True, env=variables)


SMI = """#!/bin/sh
[ "$1" = --query-gpu=memory.total,mig.mode.current ] && printf '%s, [N/A]\\n' {} N/A
"""


@pytest.mark.parametrize(
    ("driver", "share"),
    [((81559,), 0.94), ((23034, 81559), 0.911), ((15360,), 0.867), ((), 0.94), (None, 0.94)],
)
def test_a_small_card_keeps_2_gib_for_the_driver(host, monkeypatch, driver, share):
    """The smallest of the host's, in MiB by the driver's program, if there is one; plans count the same."""
    (host / "nvidia0").touch()
    if driver is not None:
        (host / "nvidia-smi").write_text(SMI.format(" ".join(map(str, driver))))
        (host / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{host}:/bin:/usr/bin")
    accelerators.prepare()
    assert os.environ[accelerators.FRACTIONS[0]] == str(share)
    for chip in machines.CHIPS.values():  # whichever card is here
        left = 1 - accelerators.share_of_a_gpu(chip.memory)
        assert left == pytest.approx(max(0.06, 2 * 2**30 / chip.memory), abs=1e-3)
    accelerators.leave(0.4)
    assert float(os.environ[accelerators.FRACTIONS[0]]) == pytest.approx(share - 0.4)
    accelerators.leave(0.4)  # once is enough
    assert accelerators.share_of_a_gpu() == pytest.approx(share - 0.4)


@pytest.fixture
def smi(host, monkeypatch):
    """Two GPUs of 80,000 MiB, of the second so many in use; `-i` names those that are asked of."""
    for name in ("nvidia0", "nvidia1"):
        (host / name).touch()

    def write(used, mig="[N/A]"):
        head = "case $1 in *index*) a='0, 10, 80000'; b='1, %s, 80000';; *) a=80000; b=80000;; esac"
        query = f'{head}; case $1 in *mig*) a="$a, [N/A]"; b="$b, {mig}";; esac'
        said = 'case "$4" in 0) echo "$a";; 1) echo "$b";; *) echo "$a"; echo "$b";; esac'
        (host / "nvidia-smi").write_text(f"#!/bin/sh\n{query % used}\n{said}\n")
        (host / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{host}:/bin:/usr/bin")
        monkeypatch.setattr(accelerators, "PATIENCE", 0.0)
        monkeypatch.setattr(accelerators.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)

    return write


@pytest.mark.parametrize(
    ("used", "variables", "refused"),
    [
        (4_000, {}, False),
        (4_300, {}, True),  # 6% are 4,800 MiB, of which CUDA takes 560
        (75_000, {}, True),
        (75_000, {SHARE: "0.05"}, False),
        (75_000, {SHARE: "0.1"}, True),
        (10, {SHARE: "1.0"}, False),
        (75_000, {PREALLOCATE: "false"}, False),
        (75_000, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, False),
        (75_000, {"JAX_PLATFORMS": "cpu"}, False),
        (75_000, {"JAX_PLATFORMS": ""}, True),
        (75_000, {"JAX_PLATFORMS": "cuda,cpu"}, True),
        (75_000, {"CUDA_VISIBLE_DEVICES": "0"}, False),
        (75_000, {"CUDA_VISIBLE_DEVICES": "1"}, True),
        (75_000, {"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_a_gpu_that_others_use_is_refused(smi, monkeypatch, used, variables, refused):
    """JAX would go on with what is left, and die later."""
    smi(used)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    jax.config.update("jax_platforms", variables.get("JAX_PLATFORMS"))
    says = rf"others hold {used / 1024:.1f} of the 78.1 GiB of GPU 1, .*nvidia-smi names them"
    with pytest.raises(UserError, match=says) if refused else nullcontext():
        accelerators.begin()


def test_of_a_gpu_that_is_divided_nothing_is_known(smi, monkeypatch):
    """The driver tells of the whole one, and of all who use it; an instance (MIG) has its own memory."""
    smi(75_000, "Enabled")
    accelerators.begin()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    accelerators.gpu_memory.cache_clear()
    assert accelerators.gpu_memory() == 0


def test_one_that_has_just_ended_gives_its_memory_back(smi, monkeypatch):
    smi(75_000)
    monkeypatch.setattr(accelerators, "PATIENCE", 10.0)
    monkeypatch.setattr(accelerators.time, "sleep", lambda seconds: smi(0))
    accelerators.begin()


@pytest.mark.parametrize("place", [None, "0/1@127.0.0.1:{}"])
def test_a_run_looks_for_room_before_jax_starts(tmp_path, place):
    """After that its own memory would be another's; what its servers take of a GPU is left to them."""
    root = pathlib.Path(__file__).parents[1]
    (tmp_path / "nvidia0").touch()
    words = [
        "train",
        str(root / "tests" / "rollouts" / "served.py"),
        "--memory",
        "memory",
        "--share",
        "0.4",
    ]
    script = f"""
import os, pathlib
from jax._src import xla_bridge
from jaxrl_llm import accelerators
from jaxrl_llm.cli.main import main
accelerators.DEV = pathlib.Path.cwd()
def ask():
    print("started:", xla_bridge.backends_are_initialized(), os.environ[{SHARE!r}])
    raise SystemExit
accelerators.require_room = ask
main({words + (["--process", place.format(port())] if place else [])!r})
"""
    variables = {
        **os.environ,
        "PYTHONPATH": str(root),
        "JAX_PLATFORMS": "cpu",
        "FAKE_PYTHON": "python",
    }
    for name in accelerators.FRACTIONS:
        variables.pop(name, None)
    how = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", script], check=True, **how)
    assert done.stdout == "started: False 0.54\n"


def test_from_python_a_run_does_what_the_command_does(tmp_path):
    """JAX, which would take 75% of a GPU, is told before it starts."""
    (tmp_path / "nvidia0").touch()
    script = """
import os, pathlib
import jax
from jaxrl_llm import accelerators
from jaxrl_llm.models import sharding
accelerators.DEV = pathlib.Path.cwd()
sharding.make_mesh()
print(os.environ["XLA_CLIENT_MEM_FRACTION"], "XLA_FLAGS" in os.environ, jax.config.jax_compilation_cache_dir)
"""
    root = str(pathlib.Path(__file__).parents[1])
    variables = {**os.environ, "PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}
    for name in (*accelerators.FRACTIONS, accelerators.COMPILED, "XLA_FLAGS"):
        variables.pop(name, None)
    how = {"cwd": tmp_path, "env": variables, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", script], check=True, **how)
    assert done.stdout == f"0.94 True {os.path.expanduser('~/.cache/jaxrl_llm/compiled')}\n"


def test_servers_may_not_be_left_all_of_a_gpu(host):
    with pytest.raises(UserError, match=r"share = 0\.93 leaves JAX nothing: at most 0\.92"):
        accelerators.leave(0.93)


@pytest.mark.parametrize(
    ("files", "platforms", "visible", "used"),
    [
        ((), None, None, False),
        (("nvidia0",), None, None, True),
        (("nvidia0",), "", None, True),
        (("nvidia0",), "cuda,cpu", None, True),
        (("nvidia0",), "cpu", None, False),
        (("nvidia0",), None, "", False),
        (("accel0",), None, None, True),
        (("accel0",), "cpu", None, False),
    ],
)
def test_devices_that_jax_will_run_on(host, monkeypatch, files, platforms, visible, used):
    for name in files:
        (host / name).touch()
    jax.config.update("jax_platforms", platforms)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerators.in_use() is used
    monkeypatch.setenv("JAX_PLATFORMS", platforms or "")
    monkeypatch.delitem(sys.modules, "jax")  # before that it is the environment that tells
    assert accelerators.in_use() is used


def test_processes_that_share_the_gpus(smi, monkeypatch):
    """Each takes its part, less what CUDA takes for it; what the environment says stays, and so does a CPU."""
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    assert divided(4) == {SHARE: "0.235"}  # the driver says nothing: 0.94 / 4
    smi(0)
    accelerators.gpu_memory.cache_clear()
    accelerators.prepare()
    assert divided(1) == {}
    assert divided(4) == {SHARE: "0.228"}  # less 560 / 80,000
    with pytest.raises(UserError, match="40 processes on a GPU would have"):
        divided(40)
    monkeypatch.setenv(SHARE, "0.3")
    assert divided(4) == {}
    monkeypatch.delenv(SHARE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert divided(4) == {}


def test_compiled_programs_are_kept_beside_an_accelerator(host):
    (host / "accel0").touch()
    accelerators.prepare()
    assert os.environ[accelerators.COMPILED].endswith("/.cache/jaxrl_llm/compiled")
    assert accelerators.PINNED not in os.environ


@pytest.mark.parametrize(("vendor", "count"), [("0x1ae0", 1), ("0x10de", 0)])
def test_a_tpu_may_be_given_to_programs_by_vfio(host, vendor, count):
    """Newer ones are; hosts without any have the folder too, and may pass other devices on."""
    (device := host / "iommu" / "7" / "devices" / "0000:00:05.0").mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (host / "vfio").mkdir()
    for name in ("vfio", "7"):
        (host / "vfio" / name).touch()
    assert accelerators.present() == count
    assert accelerators.present("nvidia") == 0


@pytest.mark.parametrize(("vendor", "count"), [("0x1ae0", 1), ("0x8086", 0)])
def test_a_tpu_may_lie_beside_other_makers_accelerators(host, vendor, count):
    """Linux has one folder for all of them, such as the neural processors of laptops."""
    (host / "accel").mkdir()
    (host / "accel" / "accel0").touch()
    (device := host / "class" / "accel0" / "device").mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    assert accelerators.present() == count


@pytest.mark.parametrize(
    ("visible", "count"), [("-1", 0), ("0,-1,1", 1), ("0, 1", 2), ("GPU-8932f937", 1), (",", 0)]
)
def test_gpus_are_visible_up_to_the_first_that_is_none(host, monkeypatch, visible, count):
    for name in ("nvidia0", "nvidia1"):
        (host / name).touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerators.present("nvidia") == count


def test_a_host_without_a_limit_of_the_container(host):
    known = accelerators.host_memory()
    (host / "memory.max").write_text("max\n")
    assert accelerators.host_memory() == known > 0


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("nvidia0",), r"1 GPU \(driver 535.183.01\), but JAX.*jaxrl-llm\[cuda12\], which needs 525"),
        (("nvidia0", "nvidia1"), "2 GPUs"),
        (("accel0", "accel1"), r"2 TPUs, but.*jaxrl-llm\[tpu\]"),
    ],
)  # fmt: skip
def test_a_cpu_beside_an_accelerator_is_refused(host, monkeypatch, files, says):
    """JAX itself goes on, at a hundredth of the speed, where a driver is too old; unless the CPU is meant."""
    for name in files:
        (host / name).touch()
    (host / "version").write_text(NVRM)
    [cpu, *_] = jax.devices("cpu")
    monkeypatch.setattr(jax, "devices", lambda: [cpu])
    with pytest.raises(UserError, match=says):
        sharding.make_mesh()
    with pytest.raises(UserError, match=says):
        machines.machine("here")
    accelerators.require_used([device()])
    sharding.make_mesh(devices=[cpu])  # a machine that is only compiled for
    jax.config.update("jax_platforms", "cpu")
    sharding.make_mesh()


def test_a_cpu_alone_is_used(host):
    accelerators.require_used([device("cpu", "cpu")])


def test_devices_in_words(host):
    assert accelerators.described([device("cpu")]).startswith("1 x cpu (JAX 0.")
    (host / "version").write_text(NVRM)
    said = accelerators.described([device("NVIDIA L4")] * 8)
    assert said.startswith("8 x NVIDIA L4 (JAX ")
    assert said.endswith(", driver 535.183.01)")


@pytest.mark.parametrize(
    ("kind", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # slower than its data sheet
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6e", "v6e"),
        ("cpu", None),
    ],
)
def test_a_device_has_its_own_data_sheet(kind, chip):
    assert machines.chip_of(device(kind)) == machines.CHIPS.get(chip)


def test_a_share_that_is_no_number_is_one_line(monkeypatch):
    monkeypatch.setenv(SHARE, "50%")
    with pytest.raises(UserError, match=f"{SHARE} is '50%'"):
        accelerators.share_of_a_gpu(80 * 2**30)
