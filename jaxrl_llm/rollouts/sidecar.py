"""A vLLM server as a child process: started with weights, watched, restarted with the newest, ended with us.

It listens on a Unix socket in a folder that is ours alone: no port that others could take first, share or see.
A new server has a new socket, so that nobody meets an older one by mistake.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts import guard, keeper, receiver
from jaxrl_llm.rollouts.server import MODEL, NoAnswer, Server

POLL = 0.5  # seconds
STARTS = 3  # how often in a row a server may end before it has answered
LOG_BYTES = 2**24  # of a longer log this much becomes LOG.1, in the place of an older one
TAIL_BYTES = 2**16
SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)(_|$)")


@dataclass(frozen=True)
class Launch:
    """How a server is run: with the Python of an environment that has vLLM, listening on `socket`.

    `arguments` and `environment` are passed on to vLLM. The log is appended to.
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
        """Where it answers."""
        return f"unix://{self.socket}"

    def command(self, folder: Path) -> list[str]:
        """The command line that serves the model in a folder, tokens only."""
        length = [] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)]
        return [
            self.python, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(folder), "--served-model-name", MODEL, "--dtype", self.dtype,
            "--uds", str(self.socket), "--middleware", "guard.Guard",
            "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
            "--skip-tokenizer-init", *length, *self.arguments,
        ]  # fmt: skip

    def variables(self, plugins: Path) -> dict[str, str]:
        """The environment of the server; the key is in it, not on the command line, and no secret of others."""
        return {
            **{name: value for name, value in os.environ.items() if not SECRET.search(name)},
            "VLLM_SERVER_DEV_MODE": "1",  # which is what the sync's routes need
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(plugins),
            "PYTHONSAFEPATH": "1",  # or a config named math.py in the folder here hides Python's own
            "JAXRL_WEIGHTS": str(self.socket.with_suffix(".weights")),
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
        self._prober = Server(launch.url, launch.key, 5.0)
        self.restarts = 0
        self._weights: Path | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._failure = ""
        if shutil.which(launch.python) is None:
            raise UserError(
                f"no Python at {launch.python}: make an environment with vLLM by launch/sidecar.sh and "
                "name its Python"
            )

    def serve(self, folder: Path) -> None:
        """The weights to start with from now on; the first call starts the server.

        What serves them has no label yet: who uses the server loads and labels what it wants.
        """
        self.check()
        self._weights = folder
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, daemon=True)
            self._thread.start()

    def answers(self) -> bool:
        """Whether the server is up."""
        try:
            self._prober.label()
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
        assert self._weights is not None
        lived = False
        process = self._start(self._weights)
        try:
            while not _ended(process) and not self._stop.wait(POLL):
                lived = lived or self.answers()
                _bound(self.launch.log)
        finally:
            _end(process)
            self._prober.close()
        return lived

    def _start(self, folder: Path) -> subprocess.Popen:
        plugins = self.root / "plugins"
        plugins.mkdir(exist_ok=True)
        self.launch.socket.unlink(missing_ok=True)
        self.launch.log.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(guard.__file__, plugins)
        shutil.copy(receiver.__file__, plugins)
        kept = [sys.executable, keeper.__file__, str(os.getpid()), str(self.root)]
        with self.launch.log.open("ab") as log:
            return subprocess.Popen(  # noqa: S603
                [*kept, *self.launch.command(folder)],
                env=self.launch.variables(plugins),
                stdin=subprocess.PIPE,  # its end tells the keeper to end
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _ended(process: subprocess.Popen) -> bool:
    """Whether it has; it stays a zombie, so that its number and its group's go to nobody else."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, how) is not None


def _end(process: subprocess.Popen) -> None:
    """Ends a keeper, which ends the server; what an ended keeper has left is killed."""
    assert process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 3 * keeper.GRACE
    while not _ended(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _bound(log: Path) -> None:
    """Moves the end of a long log aside; the server goes on at its beginning, because it appends."""
    with contextlib.suppress(FileNotFoundError):  # somebody has moved it
        if log.stat().st_size > LOG_BYTES:
            log.with_name(log.name + ".1").write_bytes(_tail(log, LOG_BYTES))
            os.truncate(log, 0)


def _last_error(log: Path) -> str:
    """The last line of a log that speaks of an error."""
    try:
        lines = _tail(log, TAIL_BYTES).decode(errors="replace").splitlines() or ["it is empty"]
    except FileNotFoundError:
        return "it is gone"
    errors = [line for line in lines if "Error" in line]
    return (errors or lines)[-1].strip()[:300]


def _tail(log: Path, size: int) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size))
        return file.read(size)
