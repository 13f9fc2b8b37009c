"""A server that many runs use in turn: the stand-in, or the real vLLM as `jaxrl-llm serve` runs it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.chaos.scene import CONFIG, ROOT
from tests.chaos.standin import Standin


class Serving:
    """The server, with its `url` and `key`."""

    def __init__(self, scratch: Path, vllm: str | None):
        self.key = "chaos-key"
        self._process = None
        if vllm is None:
            self.url = f"unix://{scratch / 's.sock'}"
            (scratch / "s.sock").unlink(missing_ok=True)
            self._standin = Standin(path=scratch / "s.sock", key=self.key)
            return
        memory = scratch / "s"
        memory.mkdir()
        environment = os.environ | {"VLLM_API_KEY": self.key, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "jaxrl_llm.cli", "serve", str(CONFIG)]
        command += ["--python", vllm, "--memory", str(memory)]
        with (scratch / "serve.log").open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                cwd=scratch,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.url = self._listening(memory, scratch / "serve.log")

    def _listening(self, memory: Path, log: Path) -> str:
        """The address, once it answers."""
        while True:
            assert self._process
            assert self._process.poll() is None, log.read_text()
            if "ready;" in log.read_text():
                return f"unix://{next(memory.glob('*/vllm-0.sock'))}"
            time.sleep(1.0)

    def close(self) -> None:
        """Ends it."""
        if self._process is None:
            self._standin.die()
        else:
            self._process.terminate()
            self._process.wait()
