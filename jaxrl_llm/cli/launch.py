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
from jaxrl_llm.errors import UserError
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
class Kind(train.Options):
    """A kind of machines: its template, and flags besides those of `train`, each with one value."""

    name: str = ""
    """name of the job (default: that of the config)"""
    template: ClassVar[str]

    def quote(self, value: object) -> str:
        """A value quoted for the language of the template."""
        return shlex.quote(str(value))

    def values(self, run: "Run") -> Mapping[str, str]:
        """Further values of the template, by name: they replace @NAME@."""
        raise NotImplementedError

    @property
    def patience(self) -> int:
        """Seconds from a signal to the end of the trainer, at the latest."""
        return math.ceil(self.grace) + MARGIN

    @property
    def url(self) -> str:
        """`--out` if it is a URL, else ""."""
        return self.out if self.out and storage.is_url(self.out) else ""


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

    @property
    def alone(self) -> Path:
        """The config file, to be copied by itself; a UserError if it loads another file."""
        for other in userfile.ran(but=self.file):
            raise UserError(
                f"{self.file} loads {other}, which would not travel with it: make them one file"
            )
        return self.file


@dataclass(frozen=True, kw_only=True)
class Gpu(Kind):
    """One host with GPUs or TPU chips; hand it to bash there."""

    gpus: int = 8
    """GPUs of a host; it matters where some are vLLM's"""
    folder: Path | None = None
    """the folder that relative paths start from (default: this one)"""
    python: str = sys.executable
    """the Python there that has jaxrl-llm (default: this one)"""
    template = "gpu.sh"

    def values(self, run: Run, process: str = "") -> Mapping[str, str]:
        devices, module = run.devices(self.gpus), ["-P", "-m", "jaxrl_llm.cli"]
        return {
            "folder": self.quote(self.folder or Path.cwd()),
            "devices": devices
            and f"export CUDA_VISIBLE_DEVICES={devices} # the others are vLLM's\n",
            "command": shlex.join([self.python, *module, *run.arguments(str(run.file), process)]),
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
        return {
            **super().values(run, "auto" if self.nodes > 1 else ""),
            "minutes": str(int(60 * self.hours)),
        }


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
        if not (
            self.url or (self.claim and self.out and Path("/shared") in Path(self.out).parents)
        ):
            raise UserError(
                f"--out {self.out or 'is missing'}: a pod's own files go with it: give a URL, or "
                "--claim NAME and a folder in /shared"
            )
        arguments = [word.replace("$", "$$") for word in run.arguments("/config/run.py")]
        if self.nodes > 1:
            meet = f"{run.name}-trainer-0-0.{run.name}:55527"
            arguments += ["--process", f"$(JOB_COMPLETION_INDEX)/{self.nodes}@{meet}"]
        volume = (
            {"persistentVolumeClaim": {"claimName": self.claim}} if self.claim else {"emptyDir": {}}
        )
        environment = {"JAX_COMPILATION_CACHE_DIR": "/shared/compiled"}
        if devices := run.devices(self.gpus):
            environment["CUDA_VISIBLE_DEVICES"] = devices
        return {
            "volume": self.quote({"name": "shared", **volume}),
            "environment": self.quote([{"name": k, "value": v} for k, v in environment.items()]),
            "arguments": self.quote(arguments),
            "config": block(run.alone),
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
    """the workers' account, with access to the bucket of --out (default: that of the project)"""
    template = "tpu_pod.sh"

    def values(self, run: Run) -> Mapping[str, str]:
        runtime = RUNTIMES.get(self.type.partition("-")[0])
        if not self.url.startswith("gs://"):
            out = self.out or "is missing"
            raise UserError(f"--out {out}: the workers share a bucket only: give gs://...")
        if not runtime:
            raise UserError(
                f"--type {self.type}: known are {', '.join(f'{x}-N' for x in RUNTIMES)}"
            )
        if self.wheel.suffix != ".whl" or not self.wheel.is_file():
            raise UserError(f"--wheel {self.wheel} is no wheel: make it by pip wheel --no-deps .")
        account = self.service_account
        return {
            "runtime": runtime,
            "rights": account and f" --service-account={self.quote(account)}",
            "copies": self.quote(f"{self.url}-launch"),
            "wheel_name": self.quote(f"./{self.wheel.name}[tpu,gcs]"),
            "config": self.quote(run.alone),
            "arguments": shlex.join(run.arguments(run.file.name, "auto")),
        }


KINDS: dict[str, type[Kind]] = {"gpu": Gpu, "slurm": Slurm, "jobset": JobSet, "tpu-pod": TpuPod}


def run(words: list[str]) -> None:
    """Parse `KIND CONFIG` and the flags of the kind, `train` and the config, and run `main`."""
    kind = words[0] if words else ""
    if kind not in KINDS:
        known = "; ".join(f"{name}: {record.__doc__}" for name, record in KINDS.items())
        if {*words} & {"-h", "--help"}:
            print(f"usage: jaxrl-llm launch KIND CONFIG ...\n\n{main.__doc__}\n{known}")
            return
        raise UserError(f"launch wants a kind of machines and a config ({', '.join(KINDS)})")
    made = parse.with_config(f"launch {kind}", words[1:], KINDS[kind], KINDS[kind].__doc__)
    options, config, source = made
    main(options, config, source.path, words)


def main(options: Kind, config: Config, made_by: Path, words: Sequence[str]) -> None:
    """Print the file that starts a run on other machines: gpu, slurm, jobset or tpu-pod."""
    for flag in ("resume", "process", "dry_run"):
        if getattr(options, flag):
            flag = flag.replace("_", "-")
            raise UserError(f"launch: leave --{flag} out; the file says what is needed of it")
    for flag in ("nodes", "gpus"):
        if getattr(options, flag, 1) < 1:
            raise UserError(f"--{flag} {getattr(options, flag)} must be at least 1")
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
