"""Code that runs beside and in a vLLM server, not in the trainer: standard library, and its torch.

The keeper (`python serverside.py PARENT ROOT SOCKET COMMAND...`) is a process that runs the server,
again when it ends, and ends with the trainer, kill -9 included: vLLM's engine and workers would
live on and hold the GPU's memory. In the server, the guard is middleware: vLLM asks for its key
under /v1 only, and would load weights for anybody. Behind the guard, the receiver takes weights
that come over the network. In vLLM's workers, the extension tells checksums of the weights.
"""

import contextlib
import hmac
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import zlib
from typing import Any

GRACE = 10.0  # seconds for a server to end by itself
POLL = 0.5
HEALTH_SECONDS = 5.0  # for an answer of /health
SILENCE = 120.0  # seconds without one, after the first
AGAIN = ".again"  # of the file by which the trainer has a server started again
STARTS = 3  # that end soon, before the keeper gives up
SOON = 60.0  # seconds after the first answer: its first requests may end it
EXTENSION = "/weights/extension"
BLOCK = 2**20  # numbers of a weight that are worked on at a time
CACHED = 2**15  # the same on a CPU: they stay in its cache, and no threads wait for each other
# A shell in the server's group kills that when the keeper, which holds its input, is killed.
ENDING_WITH_KEEPER = 'exec 3<&0 </dev/null; (read _ <&3; kill -9 0) & exec "$@" 3<&-'


def keep(parent, root, path, command):
    """Runs a server until there is input, or it closes, or the parent ends; then deletes `root` if it has.

    (The parent is looked at too because its forks may hold the input open.) A server that ends, no
    longer answers at the socket `path`, or is asked to by the file AGAIN beside that, is started
    again. It gives up after STARTS that end within SOON.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # may go to a whole job; the trainer decides
    failed, asked = 0, pathlib.Path(path).with_suffix(AGAIN)
    while failed < STARTS:
        for old in (pathlib.Path(path), asked):
            old.unlink(missing_ok=True)
        shell = ["/bin/sh", "-c", ENDING_WITH_KEEPER, "sh"]
        server = subprocess.Popen(  # noqa: S603
            [*shell, *command],
            stdin=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        first = answered = None
        while server.poll() is None:
            if os.getppid() != parent or select.select([sys.stdin], [], [], POLL)[0]:
                end(server)
                if os.getppid() != parent:
                    shutil.rmtree(root, ignore_errors=True)
                return
            if healthy(path):
                answered = time.monotonic()
                first = first or answered
            silent = answered is not None and time.monotonic() - answered > SILENCE
            if silent or asked.exists():
                break
        by_itself = server.poll() is not None
        end(server)
        soon = first is None or (by_itself and time.monotonic() - first < SOON)
        failed = failed + 1 if soon else 0
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"vLLM at {path} ended (status {server.returncode})", file=sys.stderr, flush=True)
    sys.exit(1)


def healthy(path):
    """Whether a server answers at a socket."""
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(HEALTH_SECONDS)
            link.connect(path)
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return link.recv(12).endswith(b" 200")
    except OSError:
        return False


def end(server):
    """Ends a server and its group.

    The last process to end frees vLLM's shared memory (400 MB), so all get time to do so.
    """
    deadline = time.monotonic() + GRACE
    with server, contextlib.suppress(ProcessLookupError):  # nobody is left of the group
        os.killpg(server.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            server.poll()
            os.killpg(server.pid, 0)
            time.sleep(0.05)
        os.killpg(server.pid, signal.SIGKILL)


class Guard:
    """ASGI middleware: only /health answers without the key.

    A server without our extension is known by its answer to EXTENSION: status 404.
    """

    def __init__(self, app):
        self.app, self.receiver = app, Receiver(os.environ["JAXRL_WEIGHTS"])
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        """Passes on requests with the key, and refuses the rest with 401."""
        public = scope["type"] not in ("http", "websocket") or scope["path"] == "/health"
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if public or hmac.compare_digest(given, self.expected):
            if scope.get("path") == EXTENSION:
                scope = {**scope, "path": "/collective_rpc"}
            weights = scope["type"] == "http" and scope["path"].startswith("/weights/")
            await (self.receiver if weights else self.app)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(send, 401, {"error": "Unauthorized"})


class Receiver:
    """An ASGI application that stores weights in a folder of its host, only the newest.

        GET /weights/find?name=&path= -> {"path": where they are read here, "files": those there}
        PUT /weights/file?name=&file=&checksum= with bytes; kept if that is their crc32

    Each may be repeated; only a piece of a file is in memory at a time.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    async def __call__(self, scope, receive, send):
        """Answers one request."""
        status, said = 200, {}
        try:
            asked = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))
            if not re.fullmatch(r"[\w-]{1,100}", asked["name"]):
                raise ValueError("no name of weights")
            if scope["path"] == "/weights/find":
                said = self._find(asked["name"], pathlib.Path(asked["path"]))
            elif not await self._write(receive, **asked):
                status, said = 500, {"error": "a file arrived otherwise than it was sent"}
        except (KeyError, TypeError, ValueError) as error:
            status, said = 400, {"error": f"not a request for weights: {error}"}
        except OSError as error:
            status, said = 400, {"error": f"{self.folder} on its host: {error.strerror}"}
        await answer(send, status, said)

    def _find(self, name, theirs):
        """The trainer's folder if this host sees it, else a copy here, complete or not."""
        names = ("config.json", "adapter_config.json")
        here = any(os.access(theirs / config, os.R_OK) for config in names)
        folder = theirs if here else self._copy(name)
        files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return {"path": str(folder), "files": files}

    def _copy(self, name):
        """The folder of a copy: that of a server beside this one if it has begun with it."""
        copies = self.folder.parent.glob(f"*{self.folder.suffix}/{name}")
        return next(iter(sorted(copies)), self.folder / name)

    async def _write(self, receive, name, file, checksum):
        """Whether the file was whole, and is kept; new weights delete the old ones first."""
        if not re.fullmatch(
            r"(adapter_)?config\.json|(model-\d{5}|adapter_model)\.safetensors", file
        ):
            raise ValueError("no such file in a folder of weights")
        folder, found, more = self._copy(name), 0, True
        if not folder.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
            folder.mkdir(0o700, parents=True)
        with (folder / f"{file}.partial").open("wb") as partial:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                more, piece = message.get("more_body", False), message.get("body", b"")
                found = zlib.crc32(piece, found)
                partial.write(piece)
        if found != int(checksum):
            return False
        os.replace(partial.name, folder / file)
        return True


class Extension:
    """Methods for vLLM's workers, by --worker-extension-cls."""

    def jaxrl_reload(self, weights_path):
        """Reloads weights, and packs experts for a CPU, which vLLM does only where a kernel is new."""
        worker: Any = self
        for module in worker.get_model().modules() if str(worker.device) == "cpu" else ():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        worker.reload_weights(weights_path=weights_path)

    def jaxrl_batched(self):
        """How many requests are worked on at a time."""
        worker: Any = self
        return worker.vllm_config.scheduler_config.max_num_seqs

    def jaxrl_checksums(self, rank=0):
        """Checksums of what this worker computes with, `{name: [[place, number], ...]}`.

        Names are those of Hugging Face's files, a place is the position of a part's first number in
        that tensor: copies of a part have the same. A quantized model has none, nor has one with
        experts: vLLM packs their weights in an order of each device's kernel. With `rank` those of
        the adapters of that rank which were loaded last, but of zeros.
        """
        worker: Any = self
        if rank:
            return adapters(worker, rank)
        model, found = worker.get_model(), {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        # Gemma 4: a number of each layer is no parameter to vLLM, and its layers are there twice
        parameters |= {
            path: x for path, x in model.named_buffers() if path.endswith("layer_scalar")
        }
        parameters = {path: x for path, x in parameters.items() if "_decoder." not in path}
        packed = any(path.endswith("w13_weight") for path in parameters)
        if packed or worker.vllm_config.quant_config is not None:
            return {}
        for path, parameter in parameters.items():
            layer, _, kind = path.rpartition(".")
            module, layer = model.get_submodule(layer), layer.removesuffix(".base_layer")
            matrix = kind == "weight" and hasattr(module, "input_size")
            width = module.input_size if matrix else 1
            own = getattr(module, "input_size_per_partition", width) if matrix else 1
            left = module.tp_rank * own if own < width else 0
            for block, row, column in blocks(module, parameter, own, matrix):
                for name, first, size, there in tensors(model, layer, module):
                    low, high = max(first, row), min(first + size, row + len(block))
                    if low < high:
                        part, at = block[low - row : high - row], there + low - first
                        number = checksum(part, at, left + column, width)
                        parts = found.setdefault(f"{name}.{kind}", {})
                        place = there * width + left
                        parts[place] = (parts.get(place, 0) + number) % 2**32
        return {name: list(parts.items()) for name, parts in found.items()}


def adapters(worker, rank):
    """Checksums of the newest adapters' factors where the layers read them."""
    model, manager = worker.get_model(), worker.model_runner.lora_manager._adapter_manager
    slot, found = manager.lora_index_to_id.index(max(manager.list_adapters())), {}
    for layer, module in manager.modules.items():
        base = module.base_layer
        if not isinstance(module.lora_a_stacked, tuple):  # embedding or head
            continue
        own, width = module.input_size, base.input_size
        left = base.tp_rank * own if own < width else 0
        slices = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        for (name, _, _, row), (a, b) in zip(tensors(model, layer, base), slices, strict=True):
            for part, block, down, across, size in (
                ("lora_A", a, 0, left, width),
                ("lora_B", b, row, 0, rank),
            ):
                if number := checksum(block[slot, 0], down, across, size):
                    found[f"{name}.{part}.weight"] = [(down + across, number)]
    return found


def blocks(module, parameter, width, matrix):
    """`(rows, first row, first column)` of a parameter, about BLOCK numbers at a time.

    On a CPU vLLM multiplies by packed copies and drops the parameter, or in a tied head keeps an
    old copy. There they are products with rows of the identity, which are exact.
    """
    import torch  # pyright: ignore[reportMissingImports]

    parameter = getattr(module, "_cpu_unpacked_conv_weight", parameter)
    looked_up = type(module).__name__ == "VocabParallelEmbedding"
    if matrix and hasattr(module, "cpu_linear") and not looked_up:
        identity = torch.eye(width, dtype=module.params_dtype)
        own = getattr(module, "output_size_per_partition", 0) or module.output_size
        step = max(1, BLOCK // own)
        for column in range(0, width, step):
            some = identity[column : column + step]
            yield module.cpu_linear(some, module.weight, None).T, 0, column
    else:
        rows, step = parameter.detach().reshape(-1, width), max(1, BLOCK // width)
        for row in range(0, len(rows), step):
            yield rows[row : row + step], row, 0


def tensors(model, layer, module):
    """`(name, first row here, rows, first row there)` of the tensors of which a module has rows."""
    if hasattr(module, "shard_indices"):  # a part of the vocabulary, then rows of padding
        rows = module.shard_indices
        return [(layer, 0, rows.num_org_elements, rows.org_vocab_start_index)]
    parent, _, leaf = layer.rpartition(".")
    if leaf == "linear_attn":  # its own parameters, a number a head
        return [(layer, 0, sys.maxsize, module.num_v_heads // module.tp_size * module.tp_rank)]
    names = model.packed_modules_mapping.get(leaf)
    sizes = getattr(module, "output_partition_sizes", ())
    if leaf == "conv1d":
        whole = model.get_submodule(parent)
        names = [leaf]
        sizes = [x // whole.tp_size for x in (whole.key_dim, whole.key_dim, whole.value_dim)]
    if names is None:
        return [(layer, 0, sys.maxsize, 0)]
    if leaf == "qkv_proj" and values_are_keys(model.config, layer):
        names, sizes = names[:2], sizes[:2]
    found, first, there = [], 0, 0
    names = [names[0]] * (len(sizes) - len(names)) + list(names)  # of which several parts are there
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        there = there if i and name == names[i - 1] else 0
        copies = 1 if name == "q_proj" else getattr(module, "num_kv_head_replicas", 1)
        found.append((f"{parent}.{name}", first, size, there + module.tp_rank // copies * size))
        first, there = first + size, there + size * getattr(module, "tp_size", 1)
    return found


def values_are_keys(config, layer):
    """Whether one product makes both in a layer: Gemma 4's whole ones, whose weight vLLM has twice."""
    if not getattr(config, "attention_k_eq_v", False):
        return False
    number = layer.split("layers.")[1].split(".")[0]
    return config.layer_types[int(number)] == "full_attention"


def checksum(block, row, column, width) -> int:
    """The trainer's checksum (models/hf.py) of a part of a tensor `[_, width]`, by its first number's place."""
    import torch  # pyright: ignore[reportMissingImports]

    def mixed(words):
        spread = words * -1_640_531_535  # 2,654,435,761 as int32, which wraps
        spread ^= (spread >> 16) & 0xFFFF
        return spread

    def factors(first, count, stride):
        places = torch.arange(count, dtype=torch.int32, device=block.device)
        return mixed((places + first) * stride) | 1

    total, columns = 0, factors(column, block.shape[1], 1)
    step = max(1, CACHED // block.shape[1]) if str(block.device) == "cpu" else len(block)
    for i in range(0, len(block), step):
        bits = block[i : i + step].float().contiguous().view(torch.int32)
        words = mixed(mixed(bits * (bits & 0x7F800000).clip(max=1)))
        words *= factors(row + i, len(words), width)[:, None]
        total += int((words.sum(0, dtype=torch.int32) * columns).sum(dtype=torch.int32))
    return total % 2**32


async def answer(send, status, content):
    """Sends a JSON response."""
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
