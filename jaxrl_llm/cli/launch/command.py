"""`jaxrl-llm launch`: the file that starts a run on machines elsewhere, filled in, on standard output."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from jaxrl_llm import userfile
from jaxrl_llm.cli import train
from jaxrl_llm.cli.launch import terms
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.runs.leaving import UNFINISHED
from jaxrl_llm.storage import url_of

TEMPLATES = Path(__file__).parent
OURS = ("--resume", "--process", "--dry-run")  # flags of train that the files set themselves
RESTARTS = 20  # of a trainer that breaks; one that was told to stop is always started again
MARGIN = 60  # seconds beyond the grace of the trainer: Slurm may signal so much earlier
STARTING = 600  # seconds that a trainer may need to start, compile and make its first step
PORT = 55527  # where the processes of a JobSet meet
SHARED = "/shared"  # where a JobSet has its volume
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


@dataclass(frozen=True)
class Trainer:
    """What is to be started: `jaxrl-llm train` with the file of a config and these words, which mean this."""

    file: Path
    words: tuple[str, ...]
    options: train.Options
    config: Config

    @property
    def name(self) -> str:
        """What the run is called by default."""
        return re.sub(r"[^a-z0-9]+", "-", self.file.stem.lower()).strip("-")

    def devices(self, gpus: int) -> str:
        """The GPUs of a host that its vLLM servers leave to the trainer; nothing where all see all."""
        engine = self.config.engine
        named = engine.devices if isinstance(engine, Vllm) and not engine.servers else ()
        taken = {device.strip() for name in named for device in name.split(",")} - {""}
        left = [str(i) for i in range(gpus) if str(i) not in taken]
        if not left or not taken <= {str(i) for i in range(gpus)}:
            raise UserError(
                f"--gpus {gpus}: the config gives {', '.join(sorted(taken))} to vLLM, which leaves the trainer "
                f"{', '.join(left) or 'none'}"
            )
        return ",".join(left) if taken else ""

    def arguments(self, config: str, process: str = "") -> list[str]:
        """The arguments of `jaxrl-llm` that start or resume it; `process` says how it finds the others."""
        together = ["--process", process] if process else []
        return ["train", config, *self.words, "--resume", "auto", *together]


class Kind(Protocol):
    """Machines of a kind: options of `launch`, and a template with the values that fill it in."""

    template: ClassVar[str]

    def values(self, trainer: Trainer) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Gpu:
    """One host with GPUs or TPU chips; hand it to bash there."""

    gpus: int = 8
    """in it; it matters where some are vLLM's"""
    folder: Path | None = None
    """where relative paths begin (default: here)"""
    python: str = sys.executable
    """the Python that jaxrl-llm is installed for there (default: this one)"""
    template: ClassVar[str] = "gpu.sh"

    def values(self, trainer: Trainer) -> Mapping[str, str]:
        """In words of the shell."""
        return {
            "folder": shlex.quote(str(self.folder or Path.cwd())),
            "devices": _export(trainer.devices(self.gpus)),
            "command": _command(self.python, trainer),
            "restarts": str(RESTARTS),
        }


@dataclass(frozen=True)
class Slurm:
    """Nodes of a Slurm cluster, each with the same storage; hand it to sbatch."""

    nodes: int = 1
    """how many"""
    gpus: int = 8
    """in each of them"""
    time: str = "24:00:00"
    """of the job, until it is queued again"""
    name: str = ""
    """of the job (default: that of the config)"""
    folder: Path | None = None
    """where relative paths begin (default: here)"""
    python: str = sys.executable
    """the Python that jaxrl-llm is installed for there (default: this one)"""
    template: ClassVar[str] = "slurm.sh"

    def values(self, trainer: Trainer) -> Mapping[str, str]:
        """In words of the shell and of sbatch."""
        grace = _seconds(trainer)
        if terms.seconds(self.time) < grace + MARGIN + STARTING:
            raise UserError(
                f"--time {self.time}: the trainer is told to stop {grace + MARGIN} s before its end, and may not "
                f"have made a step by then: give {STARTING // 60} minutes more than that at least"
            )
        return {
            "name": terms.name(self.name or trainer.name),
            "nodes": terms.count("nodes", self.nodes),
            "gpus": terms.count("gpus", self.gpus),
            "time": self.time,
            "warning": str(grace + MARGIN),
            "wait": str(2 * grace + MARGIN),
            "folder": shlex.quote(str(self.folder or Path.cwd())),
            "devices": _export(trainer.devices(self.gpus)),
            "command": _command(self.python, trainer, "auto" if self.nodes > 1 else ""),
            "restarts": str(RESTARTS),
        }


@dataclass(frozen=True)
class JobSet:
    """Nodes of a Kubernetes cluster that has JobSet; hand it to kubectl."""

    image: str
    """made with launch/Dockerfile"""
    nodes: int = 1
    """how many"""
    gpus: int = 8
    """in each of them"""
    name: str = ""
    """of the JobSet (default: that of the config)"""
    claim: str = ""
    """a volume claim that many nodes may write to, mounted at /shared; --out lies there, or is a URL"""
    secret: str = ""
    """a secret whose items are variables of the trainer's environment, as HF_TOKEN"""
    service_account: str = "default"
    """whose rights the pods have, as to read and write a bucket"""
    template: ClassVar[str] = "jobset.yaml"

    def values(self, trainer: Trainer) -> Mapping[str, str]:
        """In YAML; flags may not be taken for variables of Kubernetes."""
        out, name = trainer.options.out, terms.name(self.name or trainer.name)
        url = out and url_of(out)
        if not (url or (self.claim and out and Path(SHARED) in out.parents)):
            raise UserError(
                f"--out {out or 'is missing'}: a pod's own files go with it: give a URL, or --claim NAME and a "
                f"folder in {SHARED}"
            )
        if not re.fullmatch(r"[-\w.]+", trainer.file.name, re.ASCII):
            raise UserError(f"{trainer.file}: a ConfigMap takes letters, digits, -, _ and . only")
        _require_alone(trainer.file)
        meet = f"$(JOB_COMPLETION_INDEX)/{self.nodes}@{name}-trainer-0-0.{name}:{PORT}"
        arguments = [
            x.replace("$", "$$") for x in trainer.arguments(f"/config/{trainer.file.name}")
        ]
        volumes: dict[str, tuple[str, Mapping[str, object]]] = {
            "weights": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # noqa: S108
            "config": ("/config", {"configMap": {"name": name}}),
        }
        if self.claim:
            claim = {"persistentVolumeClaim": {"claimName": terms.name(self.claim, "claim")}}
            volumes["shared"] = (SHARED, claim)
        environment = {
            "CUDA_VISIBLE_DEVICES": trainer.devices(self.gpus),
            "JAX_COMPILATION_CACHE_DIR": f"{SHARED}/compiled" if self.claim else "",
        }
        secret = {"secretRef": {"name": terms.name(self.secret, "secret")}} if self.secret else None
        return {
            "name": name,
            "nodes": terms.count("nodes", self.nodes),
            "gpus": terms.count("gpus", self.gpus),
            "restarts": str(RESTARTS),
            "patience": str(_seconds(trainer) + MARGIN),
            "service_account": terms.name(self.service_account, "service-account"),
            "image": terms.yaml(self.image),
            "arguments": terms.yaml(arguments + (["--process", meet] if self.nodes > 1 else [])),
            "environment": terms.yaml(
                [{"name": x, "value": y} for x, y in environment.items() if y]
            ),
            "secrets": terms.yaml([secret] if secret else []),
            "mounts": terms.yaml([{"name": x, "mountPath": at} for x, (at, _) in volumes.items()]),
            "volumes": terms.yaml([{"name": x, **what} for x, (_, what) in volumes.items()]),
            "config_name": terms.yaml(trainer.file.name),
            "config_text": terms.block(trainer.file),
        }


@dataclass(frozen=True)
class TpuPod:
    """A slice of a Cloud TPU pod; hand it to bash where gcloud is set up, and let it run."""

    type: str
    """the accelerator type, as v5litepod-16, v5p-64, v6e-16"""
    zone: str
    """of the slice"""
    wheel: Path
    """of jaxrl-llm: pip wheel --no-deps ."""
    name: str = ""
    """of the queued resource and its node (default: that of the config)"""
    spot: bool = True
    """cheaper, and preempted at any time"""
    service_account: str = ""
    """whose rights the workers have (default: that of the project); it has to reach the bucket of --out"""
    template: ClassVar[str] = "tpu_pod.sh"

    def values(self, trainer: Trainer) -> Mapping[str, str]:
        """In words of the shell."""
        out, runtime = trainer.options.out, RUNTIMES.get(self.type.partition("-")[0])
        url = out and url_of(out)
        if not (url and url.startswith("gs://")):
            raise UserError(
                f"--out {out or 'is missing'}: the workers share a bucket only: give gs://..."
            )
        if runtime is None or not re.fullmatch(r"\w+-[0-9]+", self.type, re.ASCII):
            known = ", ".join(f"{name}-N" for name in RUNTIMES)
            raise UserError(f"--type {self.type}: known are {known}")
        if self.wheel.suffix != ".whl" or not self.wheel.is_file():
            raise UserError(f"--wheel {self.wheel} is no wheel: make it by pip wheel --no-deps .")
        _require_alone(trainer.file)
        more = ["--spot"] * self.spot
        if self.service_account:
            more.append(f"--service-account={self.service_account}")
        return {
            "name": terms.name(self.name or trainer.name),
            "zone": terms.name(self.zone, "zone"),
            "type": self.type,
            "runtime": runtime,
            "more": shlex.join(more),
            "restarts": str(RESTARTS),
            "patience": str(_seconds(trainer) + MARGIN),
            "place": shlex.quote(f"{url}-launch"),
            "wheel": shlex.quote(str(self.wheel)),
            "wheel_name": shlex.quote(f"./{self.wheel.name}[tpu,gcs]"),
            "config": shlex.quote(str(trainer.file)),
            "arguments": shlex.join(trainer.arguments(trainer.file.name, "auto")),
        }


KINDS: dict[str, type[Gpu] | type[Slurm] | type[JobSet] | type[TpuPod]] = {
    "gpu": Gpu,
    "slurm": Slurm,
    "jobset": JobSet,
    "tpu-pod": TpuPod,
}


def check(kind: str, words: Sequence[str]) -> None:
    """A UserError for what can be said of the words without the config."""
    if kind not in KINDS:
        raise UserError(f"launch {kind!r}: known are {', '.join(KINDS)}")
    if not words or words[0].startswith("-"):
        raise UserError(f"launch wants a config file: jaxrl-llm launch {kind} configs/kk_tiny.py")
    for word in words:
        if not word.isprintable():
            raise UserError(
                f"launch: {word!r} holds a line break or the like, which no file here can"
            )
        if flag_of(word) in OURS:
            raise UserError(f"launch: leave {word} out; the file says what is needed of it")


def flag_of(word: str) -> str:
    """The flag that a word of a command line is or sets."""
    return word.partition("=")[0].replace("_", "-")


def main(kind: Kind, trainer: Trainer, words: Sequence[str]) -> None:
    """Print the file that starts a run on machines elsewhere: gpu, slurm, jobset or tpu-pod."""
    if trainer.options.out:
        url_of(trainer.options.out)  # a URL of another kind is refused
    values = {
        "printed_by": shlex.join(["jaxrl-llm", "launch", *words]),
        "unfinished": str(UNFINISHED),
        **kind.values(trainer),
    }
    text = (TEMPLATES / kind.template).read_text()
    print(re.sub(r"@([a-z_]+)@", lambda found: values[found[1]], text), end="")


def _command(python: str, trainer: Trainer, process: str = "") -> str:
    arguments = trainer.arguments(str(trainer.file), process)
    return shlex.join([python, "-P", "-m", "jaxrl_llm.cli", *arguments])


def _require_alone(config: Path) -> None:
    """A UserError where the config, which travels by itself, has run another file."""
    for other in userfile.ran(but=config):
        raise UserError(
            f"{config} loads {other}, which would not travel with it: make them one file"
        )


def _export(devices: str) -> str:
    return f"export CUDA_VISIBLE_DEVICES={devices} # the others are vLLM's\n" if devices else ""


def _seconds(trainer: Trainer) -> int:
    return int(trainer.options.grace) + 1
