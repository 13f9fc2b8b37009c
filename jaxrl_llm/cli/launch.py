"""`jaxrl-llm launch`: print the script or manifest that starts a run on other machines."""

import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from jaxrl_llm import storage, userfile
from jaxrl_llm.cli import parse, train
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError, at_least
from jaxrl_llm.rollouts.engines import Vllm

TEMPLATES = Path(__file__).with_name("templates")
MARGIN = 60  # seconds beyond the trainer's --grace: Slurm may send its signal that much early
STARTING = 600  # seconds that a trainer may need to start, compile and make its first step
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run to start: its config, the file that made it, and the words for `jaxrl-llm train`."""

    file: Path
    name: str
    config: Config
    words: Sequence[str]

    def arguments(self, file: str, process: str = "") -> list[str]:
        """Arguments of `jaxrl-llm` that start or resume it; `file` is the config's path there."""
        together = ["--process", process] if process else []
        return ["train", file, *self.words, "--resume", "auto", *together]

    def devices(self, gpus: int) -> str:
        """The GPUs of a host that its vLLM servers leave to the trainer; "" if they use none."""
        engine = self.config.engine
        named = engine.devices if isinstance(engine, Vllm) and not engine.servers else ()
        taken = {device.strip() for name in named for device in name.split(",")} - {""}
        left = [str(i) for i in range(gpus) if str(i) not in taken]
        if not left or len(left) + len(taken) > gpus:
            raise UserError(
                f"--gpus {gpus}: the config gives {', '.join(sorted(taken))} to vLLM, which leaves "
                f"the trainer {', '.join(left) or 'none'}"
            )
        return ",".join(left) if taken else ""

    def alone(self) -> Path:
        """The config file, to be copied by itself; a UserError if it loads another file."""
        for other in userfile.ran(but=self.file):
            raise UserError(
                f"{self.file} loads {other}, which would not travel with it: make them one file"
            )
        return self.file


@dataclass(frozen=True, kw_only=True)
class Kind(train.Options):
    """A kind of machines: its template, and flags besides those of `train`, each with one value."""

    name: str = ""
    """name of the job; if not given, that of the config"""
    template: ClassVar[str]

    def values(self, run: Run) -> Mapping[str, str]:
        """What replaces @NAME@ in the template, besides the flags themselves."""
        raise NotImplementedError

    def quote(self, value: object) -> str:
        """A value quoted for the language of the template."""
        return shlex.quote(str(value))

    @property
    def patience(self) -> int:
        """Seconds from a signal to the end of the trainer, at the latest."""
        return math.ceil(self.grace) + MARGIN


@dataclass(frozen=True, kw_only=True)
class Gpu(Kind):
    """One host with GPUs or TPU chips; hand it to bash there."""

    gpus: int = 8
    """GPUs of a host; it matters where some are vLLM's"""
    folder: Path | None = None
    """the folder that relative paths start from; if not given, this one"""
    python: str = sys.executable
    """the Python there that has jaxrl-llm; if not given, this one"""
    template = "gpu.sh"

    def values(self, run: Run, process: str = "") -> Mapping[str, str]:
        start = [self.python, "-P", "-m", "jaxrl_llm.cli", *run.arguments(str(run.file), process)]
        devices = run.devices(self.gpus)
        # the others are vLLM's; by `env`, for srun sets the variable anew for each task
        own = ["env", f"CUDA_VISIBLE_DEVICES={devices}"] if devices else []
        return {
            "folder": self.quote(self.folder or Path.cwd()),
            "command": shlex.join([*own, *start]),
        }


@dataclass(frozen=True, kw_only=True)
class Slurm(Gpu):
    """Nodes of a Slurm cluster, each with the same storage; hand it to sbatch."""

    nodes: int = 1
    """how many nodes"""
    hours: float = 24.0
    """time limit of the job, after which it is queued again"""
    template = "slurm.sh"

    def values(self, run: Run) -> Mapping[str, str]:
        if not self.patience + STARTING <= 3600 * self.hours < math.inf:
            raise UserError(
                f"--hours {self.hours}: the trainer is told to stop {self.patience} s before the end, "
                f"and may not have made a step by then: give {STARTING} s more than that at least"
            )
        shared = super().values(run, "auto" if self.nodes > 1 else "")
        return {**shared, "minutes": str(int(60 * self.hours))}


@dataclass(frozen=True, kw_only=True)
class JobSet(Kind):
    """Nodes of a Kubernetes cluster that has JobSet; hand it to kubectl."""

    image: str
    """a container image made with launch/Dockerfile"""
    nodes: int = 1
    """how many nodes"""
    gpus: int = 8
    """GPUs of a node"""
    claim: str = ""
    """a volume claim that many nodes may write to, mounted at /shared; --out is in it, or a URL"""
    service_account: str = "default"
    """the account of the pods, with the rights to read and write a bucket if --out is one"""
    template = "jobset.yaml"

    def quote(self, value: object) -> str:
        """In JSON, which YAML contains."""
        return json.dumps(value, ensure_ascii=False)

    def values(self, run: Run) -> Mapping[str, str]:
        out = self.out or ""
        if not storage.is_url(out) and not (self.claim and Path("/shared") in Path(out).parents):
            raise UserError(
                f"--out {out or 'is missing'}: a pod's own files go with it: give a URL, or "
                "--claim NAME and a folder in /shared"
            )
        arguments = [word.replace("$", "$$") for word in run.arguments("/config/run.py")]
        if self.nodes > 1:
            meet = f"{run.name}-trainer-0-0.{run.name}:55527"
            arguments += ["--process", f"$(JOB_COMPLETION_INDEX)/{self.nodes}@{meet}"]
        claimed = {"persistentVolumeClaim": {"claimName": self.claim}}
        environment = {"JAX_COMPILATION_CACHE_DIR": "/shared/compiled"}
        if devices := run.devices(self.gpus):
            environment["CUDA_VISIBLE_DEVICES"] = devices
        volume = {"name": "shared", **(claimed if self.claim else {"emptyDir": {}})}
        return {
            "volume": self.quote(volume),
            "environment": self.quote([{"name": k, "value": v} for k, v in environment.items()]),
            "arguments": self.quote(arguments),
            "config": block(run.alone()),
        }


@dataclass(frozen=True, kw_only=True)
class TpuPod(Kind):
    """A slice of a Cloud TPU pod; hand it to bash where gcloud is set up, and let it run."""

    type: str
    """the accelerator type, such as v5litepod-16, v5p-64, v6e-16"""
    zone: str
    """zone of the slice"""
    wheel: Path
    """the wheel of jaxrl-llm, made by: pip wheel --no-deps ."""
    service_account: str = ""
    """the workers' account, with access to the bucket of --out; if not given, that of the project"""
    template = "tpu_pod.sh"

    def values(self, run: Run) -> Mapping[str, str]:
        out, account = self.out or "is missing", self.service_account
        runtime = RUNTIMES.get(self.type.partition("-")[0])
        if not out.startswith("gs://"):
            raise UserError(f"--out {out}: the workers share a bucket only: give gs://...")
        if not runtime:
            known = ", ".join(f"{name}-N" for name in RUNTIMES)
            raise UserError(f"--type {self.type}: known are {known}")
        if self.wheel.suffix != ".whl" or not self.wheel.is_file():
            raise UserError(f"--wheel {self.wheel} is no wheel: make it by pip wheel --no-deps .")
        return {
            "runtime": runtime,
            "rights": account and f" --service-account={self.quote(account)}",
            "copies": self.quote(f"{out}-launch"),
            "wheel_name": self.quote(f"./{self.wheel.name}[tpu,gcs]"),
            "config": self.quote(run.alone()),
            "arguments": shlex.join(run.arguments(run.file.name, "auto")),
        }


KINDS: dict[str, type[Kind]] = {"gpu": Gpu, "slurm": Slurm, "jobset": JobSet, "tpu-pod": TpuPod}


def run(words: list[str]) -> None:
    """Parse `KIND CONFIG` and the flags of the kind, `train` and the config, and run `main`."""
    kind = KINDS.get(words[0]) if words else None
    if kind:
        said = f"launch {words[0]}"
        options, config, source = parse.with_config(said, words[1:], kind, kind.__doc__)
        main(options, config, source.path, words)
    elif {*words} & {"-h", "--help"}:
        known = "; ".join(f"{name}: {record.__doc__}" for name, record in KINDS.items())
        print(f"usage: jaxrl-llm launch KIND CONFIG ...\n\n{main.__doc__}\n{known}")
    else:
        raise UserError(f"launch wants a kind of machines and a config ({', '.join(KINDS)})")


def main(options: Kind, config: Config, made_by: Path, words: Sequence[str]) -> None:
    """Print the file that starts a run on other machines: gpu, slurm, jobset or tpu-pod."""
    for flag in ("resume", "process", "dry-run"):
        if getattr(options, flag.replace("-", "_")):
            raise UserError(f"launch: leave --{flag} out; the file says what is needed of it")
    at_least(1, "launch", options, *(name for name in ("nodes", "gpus") if hasattr(options, name)))
    for word in words:
        if not word.isprintable():  # a line break would end the "Printed by" comment
            raise UserError(f"launch: {word!r} holds a line break or the like, which no file can")
    name = options.name or re.sub(r"[^a-z0-9]+", "-", made_by.stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):  # valid in every cluster
        raise UserError(f"--name {name}: at most 40 lower-case letters and digits, a letter first")
    own = {f.name for f in fields(options)} - {f.name for f in fields(train.Options)}
    run = Run(file=made_by, name=name, config=config, words=without(own, words[2:]))
    values = {flag: options.quote(getattr(options, flag)) for flag in own} | {"name": name}
    values |= {"patience": str(options.patience), "twice": str(2 * options.patience)}
    values |= {"printed_by": shlex.join(["jaxrl-llm", "launch", *words]), **options.values(run)}
    text = (TEMPLATES / options.template).read_text()
    print(re.sub(r"@([a-z_]+)@", lambda found: values[found[1]], text), end="")


def without(flags: set[str], words: Sequence[str]) -> list[str]:
    """The words without these flags (names with underscores) and their values."""
    kept, rest = [], iter(words)
    for word in rest:
        flag, joined, _ = word.partition("=")
        if not flag.startswith("--") or flag[2:].replace("-", "_") not in flags:
            kept.append(word)
        elif not joined:
            next(rest)
    return kept


def block(path: Path) -> str:
    """A file's text as a YAML block, indented by four; the template adds the last line break."""
    text = path.read_text(encoding="utf-8")
    if not text.translate({ord("\t"): None, ord("\n"): None}).isprintable():
        raise UserError(f"{path} holds a character that YAML cannot hold")
    return "|2+\n" + textwrap.indent(text, "    ", lambda line: line != "\n").removesuffix("\n")
