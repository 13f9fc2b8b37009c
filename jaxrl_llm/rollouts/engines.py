"""Engines: records of settings whose `start` gives a sampler, alive as long as the `with` block."""

import os
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jax
from jax.sharding import Mesh

from jaxrl_llm import forks, storage
from jaxrl_llm.accelerators import FRACTIONS, OF_A_GPU, gpu_memory, present, share_of_a_gpu
from jaxrl_llm.errors import UserError, at_least
from jaxrl_llm.models.policy import Policy, ServedAdapter
from jaxrl_llm.rollouts.sampler import Sampler

if TYPE_CHECKING:  # each engine is read by whoever starts it
    from jaxrl_llm.rollouts.native import NativeSampler
    from jaxrl_llm.rollouts.vllm.sidecar import Launch, Sidecar

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM keeps room
UTILIZATION = 0.92  # of a GPU's memory, by vLLM's own default
FULL = 0.95  # of it, for JAX and a server together: their own contexts take the rest
SLOTS = 64  # of the embedded engine where nothing else is known
# have vLLM say to which experts it sends tokens, by a route that has to be opened
EXPERTS = ("--enable-return-routed-experts", "--enable-scale-out")
KEY_FILE = "key"  # in the folder of the servers' sockets


class Engine(Protocol):
    """Settings that can start a sampler for a model; `folder` is the run's, for logs.

    `check` is called while a sampler waits; an exception from it ends that. `own_weights` says
    whether the sampler keeps the weights of the last push while the trainer changes its own, `replay`
    whether it tells to which experts a mixture's tokens were sent.
    """

    own_weights: ClassVar[bool]

    @property
    def replay(self) -> bool: ...

    def start(
        self,
        model: Policy,
        mesh: Mesh,
        folder: Path = Path(),
        check: Callable[[], None] = lambda: None,
    ) -> AbstractContextManager[Sampler]: ...


@dataclass(frozen=True)
class Native:
    """The embedded engine: `slots` sequences decode at a time, spread over the trainer's devices.

    With 0 slots a run chooses as many as fit (elsewhere: 64). Prompts are prefilled `prefill_prompts`
    at a time. `devices_a_copy` devices share a copy of the weights (None: as few as have room for it),
    which exists from a push until the responses are in. The cache of a small model on a CPU has blocks
    of `block` columns: a step reads only those the longest needs. With `replay` a mixture's tokens are
    sent to the same experts where they are learned from.

    >>> jl.Native(slots=128).own_weights
    False
    """

    slots: int = SLOTS
    prefill_prompts: int = 16
    block: int = 128
    devices_a_copy: int | None = None
    replay: bool = True
    own_weights: ClassVar[bool] = False

    def __post_init__(self):
        at_least(0, "engine", self, "slots")
        at_least(1, "engine", self, "prefill_prompts", "block")

    def start(
        self,
        model: Policy,
        mesh: Mesh,
        folder: Path = Path(),
        check: Callable[[], None] = lambda: None,
    ) -> "AbstractContextManager[NativeSampler]":
        """A sampler that reads the trainer's own parameters where it can, else a copy of them.

        It needs no closing: what the `with` block gives may be kept.
        """
        from jaxrl_llm.rollouts.native import NativeSampler

        del folder
        generator = model.generator(
            mesh, block=self.block, devices_a_copy=self.devices_a_copy, routed=self.replay
        )
        sampler = NativeSampler(
            generator, slots=self.slots or SLOTS, prefill_prompts=self.prefill_prompts, check=check
        )
        return nullcontext(sampler)


@dataclass(frozen=True)
class Vllm:
    """vLLM servers, started and supervised by the trainer, or running already.

    `python` is the Python of an environment with vLLM (launch/sidecar.sh makes one); a server is
    started per item of `devices`, its CUDA_VISIBLE_DEVICES (empty: unchanged). Or `servers` are the
    addresses of running ones (jaxrl-llm serve), split among the processes of a run. Weights go
    through a folder in `memory`, and over the network to a server whose host does not see it. The
    servers' key is in `key_file`, or in VLLM_API_KEY; over http it may leave this machine only with
    `plain_http`. `tolerance` is how far a server's log-probs may be from the trainer's after a sync
    (None: by dtype). A server has `concurrency` requests at a time (0: as many as it batches). With
    `share` it takes that part of the trainer's GPUs, and JAX the rest: a server on each, unless
    `devices` or parallelism in `arguments` say otherwise. With `replay` a mixture's tokens are sent
    to the same experts where they are learned from. In seconds: `patience` for a server that starts
    or does not answer, `timeout` for one answer, to which time per token is added.

    >>> jl.Vllm(python="sidecar/bin/python", devices=("4", "5"), max_model_len=2048).dtype
    'bfloat16'
    """

    python: str = "python3"
    servers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("",)
    key_file: Path | str | None = None
    plain_http: bool = False
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    memory: Path | str | None = None
    concurrency: int = 0
    share: float | None = None
    replay: bool = False
    timeout: float = 600.0
    patience: float = 900.0
    tolerance: float | None = None
    own_weights: ClassVar[bool] = True

    def __post_init__(self):
        from jaxrl_llm.rollouts.vllm.client import is_private
        from jaxrl_llm.rollouts.vllm.proof import PROBES, TOLERANCE

        for name in ("servers", "devices", "arguments"):
            if isinstance(value := getattr(self, name), str):
                raise UserError(f"engine: {name} = {value!r} is one text: write ({value!r},)")
            if wrong := [one for one in value if not isinstance(one, str)]:
                raise UserError(
                    f"engine: {name} has {wrong[0]!r}, which is no text: write '{wrong[0]}'"
                )
        if not all(isinstance(word, str) for pair in self.environment for word in pair):
            raise UserError(
                f"engine: environment = {self.environment!r} has more than pairs of texts"
            )
        if not (self.servers or self.devices):
            raise UserError("engine: devices = () leaves nothing to serve on: name a device each")
        if self.dtype not in TOLERANCE:
            raise UserError(f"engine: dtype = {self.dtype!r} is neither float32 nor bfloat16")
        if self.share is not None and not 0 < self.share < OF_A_GPU:
            raise UserError(
                f"engine: share = {self.share}: a part of a GPU, between 0 and {OF_A_GPU}"
            )
        at_least(0, "engine", self, "concurrency")
        if self.max_model_len is not None:  # a sync is proved by a token after each probe
            at_least(PROBES[1] + 1, "engine", self, "max_model_len")
        for url in self.servers:
            if not (is_private(url) or self.plain_http):
                raise UserError(
                    f"engine: {url} would get key and data in the open: use https, a Unix socket (ssh -L "
                    "brings one here), or allow it by plain_http=True"
                )

    @contextmanager
    def start(
        self,
        model: Policy,
        mesh: Mesh,
        folder: Path = Path(),
        check: Callable[[], None] = lambda: None,
    ) -> Iterator[Sampler]:
        """A sampler whose servers start at its first push and end with the block."""
        from jaxrl_llm.rollouts.vllm.client import Server
        from jaxrl_llm.rollouts.vllm.sampler import VllmSampler
        from jaxrl_llm.rollouts.vllm.sync import WeightSync

        with ExitStack() as stack:
            root = stack.enter_context(storage.temporary_folder(self.memory or storage.memory()))
            served = model.served(mesh.shape["data"] * mesh.shape["fsdp"])
            experts = model.experts if self.replay else None
            sidecars = []
            if self.servers:
                stack.enter_context(_removed_at_the_end(root))  # of our own ones the keepers do it
            else:
                own = self.sidecars(root, folder, served.adapter, experts, len(mesh.local_devices))
                sidecars = stack.enter_context(own)

            def publish(weights: Path) -> None:
                for sidecar in sidecars:
                    sidecar.serve(weights)

            def supervise() -> None:
                for sidecar in sidecars:
                    sidecar.check()

            running = [Server(x, self._key(), self.timeout) for x in self._own_servers()]
            servers = [sidecar.server for sidecar in sidecars] or running
            for server in servers:
                server.experts = experts
            sampler = VllmSampler(
                servers,
                WeightSync(root, self.patience, publish, supervise, remote=bool(self.servers)),
                served,
                dtype=self.dtype,
                concurrency=self.concurrency,
                tolerance=self.tolerance,
                max_model_len=self.max_model_len,
                check=check,
            )
            stack.callback(sampler.close)
            yield sampler

    @contextmanager
    def sidecars(
        self,
        root: Path,
        folder: Path,
        adapter: ServedAdapter | None = None,
        experts: Sequence[int] | None = None,
        trained_on: int = 1,  # so many of the devices that JAX has here, the first ones
    ) -> Iterator["list[Sidecar]"]:
        """A supervised server per device, weights under `root`, logs in `folder`; with a mixture its `experts`."""
        from jaxrl_llm.rollouts.vllm.client import write_key
        from jaxrl_llm.rollouts.vllm.sidecar import Sidecar

        with ExitStack() as stack:
            beside = self._sharing_with_jax(trained_on)
            arguments = (*_for_adapters(adapter), *beside.arguments)
            if self.replay and experts:
                arguments = (*EXPERTS, *arguments)
            key = self._key() or secrets.token_urlsafe(32)
            write_key(key, root / KEY_FILE)
            launches = replace(beside, arguments=arguments)._launches(root, folder, key)
            sidecars = [Sidecar(launch, root, self.timeout) for launch in launches]
            pool = stack.enter_context(ThreadPoolExecutor(len(sidecars) or 1))
            for sidecar in sidecars:  # at once: a trainer that is told to end has little time
                stack.callback(pool.submit, sidecar.stop)
            yield sidecars

    def _sharing_with_jax(self, trained_on: int = 1) -> "Vllm":
        """Itself beside JAX: with its share, on all GPUs that are trained on; a UserError where both want one."""
        gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
        here = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(gpus))))
        visible, devices = here.split(","), self.devices
        one = any(re.search("parallel|^-[tp]p", word) for word in self.arguments)  # server of all
        if self.share and devices == ("",) and gpus and trained_on > 1 and not one:
            devices = tuple(visible[:trained_on])
        taken, wanted = _held(gpus), self._utilization()
        remedy = (
            f"JAX has to leave that as it starts: set {FRACTIONS[0]}={OF_A_GPU - self.share:.2f}"
            if self.share
            else "let them share it (share=0.4), or give vLLM others (devices) and name the trainer's own in "
            "CUDA_VISIBLE_DEVICES"
        )
        for named in devices:
            both = {*(named or here).split(",")} & {*visible}
            if gpus and both and taken + wanted > FULL:
                raise UserError(
                    f"engine: a vLLM server is to take {wanted:.0%} of GPU {', '.join(sorted(both))}, of which "
                    f"JAX has {taken:.0%}: {remedy}"
                )
        there = gpus or present("nvidia")  # who only serves computes on the CPU
        part = ("--gpu-memory-utilization", str(self.share)) if there and self.share else ()
        return replace(self, devices=devices, arguments=(*part, *self.arguments))

    def _utilization(self) -> float:
        """The part of a GPU's memory that a server takes: by vLLM's argument, `share`, or its default."""
        words = " ".join(self.arguments).replace("_", "-")
        given = re.findall(r"--gpu-memory-utilization[ =](\S+)", words)
        try:
            return float(given[-1]) if given else self.share or UTILIZATION
        except ValueError:
            raise UserError(
                f"engine: --gpu-memory-utilization {given[-1]} in `arguments` is no number"
            ) from None

    def _own_servers(self) -> tuple[str, ...]:
        """This process's share of the running servers, since a server has one trainer."""
        mine = self.servers[jax.process_index() :: jax.process_count()]
        if self.servers and not mine:
            raise UserError(
                f"engine: {len(self.servers)} servers for {jax.process_count()} processes: each needs one of "
                "its own"
            )
        return mine

    def _key(self) -> str:
        from jaxrl_llm.rollouts.vllm.client import read_key

        return read_key(None if self.key_file is None else Path(self.key_file))

    def _launches(self, root: Path, folder: Path, key: str) -> Iterator["Launch"]:
        from jaxrl_llm.rollouts.vllm.sidecar import Launch

        first = jax.process_index() * len(self.devices)  # all processes log into the run's folder
        for i, device in enumerate(self.devices):
            yield Launch(
                python=self.python,
                log=folder / f"vllm-{first + i}.log",
                socket=root / f"vllm-{i}.sock",
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                arguments=self.arguments,
                environment=dict(self.environment)
                | ({"CUDA_VISIBLE_DEVICES": device} if device else {}),
                key=key,
            )


def _held(gpus: Sequence[Any]) -> float:
    """The share of a GPU that JAX has: by its allocator, else what it is to take."""
    stats = [gpu.memory_stats() or {} for gpu in gpus]
    limits = [one["bytes_limit"] for one in stats if "bytes_limit" in one]
    return min(limits) / memory if limits and (memory := gpu_memory()) else share_of_a_gpu()


@contextmanager
def _removed_at_the_end(folder: Path) -> Iterator[None]:
    """A shell beside this process removes the folder when that ends, however it does: it fills memory."""
    command = ["/bin/sh", "-c", 'trap "" HUP INT TERM; read _; rm -rf -- "$0"', str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:  # noqa: S603
        assert shell.stdin
        with forks.undone_in_children(shell.stdin.close):
            yield


def _for_adapters(served: ServedAdapter | None) -> tuple[str, ...]:
    """vLLM's arguments for adapters: room for those in use, and for those that replace them."""
    if served is None:
        return ()
    rank = next((rank for rank in RANKS if rank >= served.rank), None)
    if rank is None:
        raise UserError(f"lora: vLLM takes ranks up to {RANKS[-1]}, not {served.rank}")
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2")


ENGINES = (Native, Vllm)
