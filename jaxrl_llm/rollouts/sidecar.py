"""A vLLM server as a child process: started with weights, watched, restarted with the newest, ended with us."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts import guard, keeper
from jaxrl_llm.rollouts.server import MODEL, NoAnswer, Server

POLL = 0.5  # seconds
STARTS = 3  # how often in a row a server may end before it has answered


@dataclass(frozen=True)
class Launch:
    """How a server is run: with the Python of an environment that has vLLM, listening on `host`:`port`.

    `arguments` and `environment` are passed on to vLLM. The log is appended to.
    """

    python: str
    log: Path
    port: int
    host: str = "127.0.0.1"
    dtype: str = "float32"
    max_model_len: int | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"  # noqa: S104

    def command(self, folder: Path) -> list[str]:
        """The command line that serves the model in a folder, tokens only."""
        length = [] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)]
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder), "--served-model-name", MODEL, "--dtype", self.dtype,
            "--host", self.host, "--port", str(self.port), "--middleware", "guard.Guard",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--skip-tokenizer-init", *length, *self.arguments,
        ]  # fmt: skip

    def variables(self, plugins: Path) -> dict[str, str]:
        """The environment of the server; the key is in it, not on the command line."""
        return {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",  # which is what the sync's routes need
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(plugins),
            **self.environment,
            "VLLM_API_KEY": self.key,
        }


class Sidecar:
    """One supervised server; `root` is the folder of its weights, which goes when the trainer goes.

    Nothing runs before the first `serve`.
    """

    def __init__(self, launch: Launch, root: Path, timeout: float = 600.0):
        self.launch, self.root = launch, root
        self.server = Server(launch.url, launch.key, timeout)
        self._labeller = Server(launch.url, launch.key, 5.0)
        self.restarts = 0
        self._weights: tuple[Path, int | None] | None = None
        self._thread: threading.Thread | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._failure = ""
        _require(launch)

    def serve(self, folder: Path, version: int | None) -> None:
        """The weights to start with from now on; the first call starts the server.

        Without a version it stays unlabelled: it is somebody else who syncs it.
        """
        self.check()
        with self._lock:
            self._weights = folder, version
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, daemon=True)
            self._thread.start()

    def answers(self) -> bool:
        """Whether the server is up."""
        try:
            self._labeller.version()
        except NoAnswer:
            return False
        return True

    def check(self) -> None:
        """A UserError if the server cannot be kept running."""
        if self._failure:
            raise UserError(self._failure)

    def stop(self) -> None:
        """Ends the server and all its processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.server.close()

    def _supervise(self) -> None:
        """Starts the server, and again when it ends, until it is to stop or will not start."""
        failed = 0
        try:
            while failed < STARTS:
                lived = self._run_once()
                if self._stop.is_set():
                    return
                failed = 0 if lived else failed + 1
                self.restarts += 1
        except (UserError, OSError) as error:
            self._failure = f"vLLM at {self.launch.url} cannot be kept running: {error}"
            return
        self._failure = (
            f"vLLM ended {STARTS} times before it answered; the end of {self.launch.log}: "
            f"{_last_error(self.launch.log)}"
        )

    def _run_once(self) -> bool:
        """One process from start to end; whether it came to answer."""
        with self._lock:
            assert self._weights is not None
            folder, version = self._weights
        labelled = False
        process = self._start(folder)
        try:
            while process.poll() is None and not self._stop.wait(POLL):
                labelled = labelled or self._label(folder, version)
        finally:
            _end(process)
            self._labeller.close()
        return labelled

    def _start(self, folder: Path) -> subprocess.Popen:
        plugins = self.root / "plugins"
        plugins.mkdir(exist_ok=True)
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(guard.__file__, plugins)
        kept = [sys.executable, keeper.__file__, str(os.getpid()), str(self.root)]
        with self.launch.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [*kept, *self.launch.command(folder)],
                env=self.launch.variables(plugins),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _label(self, folder: Path, version: int | None) -> bool:
        """Gives a server the version it was started with; False while it does not answer.

        Where newer weights are on their way, their sync does it: the two must not overtake each other.
        """
        try:
            with self._lock:
                unlabelled = self._labeller.version() is None
                if unlabelled and version is not None and self._weights == (folder, version):
                    self._labeller.post("/update_weight_version", {"new_version": str(version)})
        except NoAnswer:
            return False
        return True


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _require(launch: Launch) -> None:
    """A UserError if the server could not even start."""
    if shutil.which(launch.python) is None:
        raise UserError(
            f"no Python at {launch.python}: make an environment with vLLM by launch/sidecar.sh and name its Python"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((launch.host, launch.port))
        except OSError as error:
            raise UserError(
                f"port {launch.port} of {launch.host} is taken ({error.strerror}): choose another, or 0"
            ) from error


def _end(process: subprocess.Popen) -> None:
    """Ends a keeper, which ends the server."""
    process.terminate()
    try:
        process.wait(timeout=3 * keeper.GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_error(log: Path) -> str:
    """The last line of a log that speaks of an error."""
    lines = log.read_text(errors="replace").splitlines() or ["it is empty"]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1].strip()[:300]
