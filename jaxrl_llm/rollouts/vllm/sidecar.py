"""A vLLM server as a child process: started, watched, restarted with the newest weights, ended.

It listens on a Unix socket in a private folder: a port could be taken or seen by other users.
"""

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm import serverside
from jaxrl_llm.rollouts.vllm.client import MODEL, NoAnswer, Server, run

POLL = 0.5  # seconds
HEALTH_SECONDS = 5.0  # for an answer of /health
SILENCE = 120.0  # seconds without such an answer, after the first one
START_SECONDS = 1800.0  # until the first one
STARTS = 3  # in a row that end without an answer, before a UserError
ENDS = 20  # in a row after less than HEALTHY seconds of answers, before a UserError
HEALTHY = 3600.0  # seconds
# Names passed on from the trainer's environment; the rest may hold secrets.
ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|TMPDIR|XDG_(CACHE|CONFIG)_HOME"
    r"|LD_(LIBRARY_PATH|PRELOAD)|LIBRARY_PATH|CPATH|CC|CXX|PYTHONDONTWRITEBYTECODE"
    r"|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)|(HIP|ROCR)_VISIBLE_DEVICES"
    r"|(CUDA|NCCL|GLOO|UCX|OMP|KMP|MKL|OPENBLAS|TORCH|TORCHINDUCTOR|TRITON|FLASHINFER|VLLM)_\w+"
    r"|HF_HOME|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|TOKENIZERS_PARALLELISM"
)


@dataclass(frozen=True)
class Launch:
    """How a server is run: with the Python of an environment that has vLLM, listening on `socket`.

    `arguments` and `environment` go to vLLM; of the trainer's environment only ALLOWED names do.
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
        return f"unix://{self.socket}"

    def command(self, folder: Path) -> list[str]:
        """The command that serves the model in a folder, without a tokenizer."""
        length = [] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)]
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder), "--served-model-name", MODEL, "--dtype", self.dtype,
            "--uds", str(self.socket), "--middleware", "serverside.Guard",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--skip-tokenizer-init", "--disable-uvicorn-access-log", *length, *self.arguments,
        ]  # fmt: skip

    def variables(self, plugins: Path) -> dict[str, str]:
        """The environment of the server; the key is here and not on the command line."""
        return {
            **{name: value for name, value in os.environ.items() if ALLOWED.fullmatch(name)},
            "VLLM_SERVER_DEV_MODE": "1",  # enables the routes of the sync
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(plugins),
            "PYTHONSAFEPATH": "1",  # else a math.py in the working folder hides Python's
            "JAXRL_WEIGHTS": str(self.socket.with_suffix(".weights")),
            **self.environment,
            "VLLM_API_KEY": self.key,
        }


class Sidecar:
    """One supervised server; `root` holds its weights, and is deleted if the trainer dies.

    Nothing runs before the first `serve`. `healthy` is whether it answers, `restarts` how often it
    has ended.
    """

    def __init__(self, launch: Launch, root: Path, timeout: float = 600.0):
        self.launch, self.root = launch, root
        self.server = Server(launch.url, launch.key, timeout)
        self.healthy, self.restarts = False, 0
        self._health = Server(launch.url, launch.key, HEALTH_SECONDS)
        self._weights = Path()
        self._supervisor: asyncio.Task | None = None
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
        self._weights = folder

        async def start() -> asyncio.Task:
            return asyncio.create_task(self._supervise())

        self._supervisor = self._supervisor or run(start())

    def check(self) -> None:
        """A UserError if the server cannot be kept running."""
        if self._supervisor is not None and self._supervisor.done():
            self._supervisor.result()

    def stop(self) -> None:
        """Ends the server and all its processes."""

        async def stopped(supervisor: asyncio.Task) -> None:
            supervisor.cancel()
            await asyncio.wait([supervisor])

        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            run(stopped(supervisor))

    async def _supervise(self) -> None:
        """Runs the server again whenever it ends; a UserError if it ends too often."""
        ends = unanswered = 0
        try:
            while ends < ENDS and unanswered < STARTS:
                seconds = await self._run_once()
                unanswered = 0 if seconds else unanswered + 1
                ends = 0 if seconds > HEALTHY else ends + 1
                self.restarts += 1
        except OSError as error:
            raise UserError(f"vLLM at {self.launch.url} cannot be kept running: {error}") from error
        often = f"{STARTS} times before it answered" if unanswered else f"{ENDS} times in a row"
        raise UserError(
            f"vLLM ended {often}; the end of {self.launch.log}: {_last_error(self.launch.log)}"
        )

    async def _run_once(self) -> float:
        """One process from start to end; seconds from its first to its last answer (0: none)."""
        process = self._start(self._weights)
        answered = time.monotonic()
        first = None
        try:
            while not _ended(process):
                with contextlib.suppress(NoAnswer):
                    await self._health.get("/health")
                    answered = time.monotonic()
                    first = first or answered
                    self.healthy = True
                if time.monotonic() - answered > (SILENCE if first else START_SECONDS):
                    break
                await asyncio.sleep(POLL)
        finally:
            self.healthy = False
            await self._health.close()
            await _end(process)
        return answered - first + 1e-9 if first else 0.0  # a single answer is not 0

    def _start(self, folder: Path) -> subprocess.Popen:
        plugins = self.root / "plugins"
        plugins.mkdir(exist_ok=True)
        shutil.copy(serverside.__file__, plugins)
        # if an older server still lives, nobody can reach it by this path any more
        self.launch.socket.unlink(missing_ok=True)
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        keeper = [sys.executable, "-IS", serverside.__file__, str(os.getpid()), str(self.root)]
        with self.launch.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [*keeper, *self.launch.command(folder)],
                env=self.launch.variables(plugins),
                stdin=subprocess.PIPE,  # closing it tells the keeper to end
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _ended(process: subprocess.Popen) -> bool:
    """Whether it has; it stays a zombie, so that its process and group ids are not reused."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


async def _end(process: subprocess.Popen) -> None:
    """Ends a keeper, which ends the server; then kills all that is left of the group."""
    assert process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 3 * serverside.GRACE
    while not _ended(process) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_error(log: Path) -> str:
    """The last line of a log that names an error, else its last line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            lines = file.read().decode(errors="replace").splitlines() or ["it is empty"]
    except FileNotFoundError:
        return "it is gone"
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1].strip()[:300]
