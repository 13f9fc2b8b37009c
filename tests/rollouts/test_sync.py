"""Folders of weights, and their way to a server whose host does not see the trainer's."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import socket
import threading
import tracemalloc
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm import client, sync
from jaxrl_llm.rollouts.vllm.client import Server, run
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION, Receiver
from tests.rollouts.fake import AdapterOfTests
from tests.rollouts.fake_vllm import Fake
from tests.rollouts.test_vllm import (
    CONFIG,
    PROMPTS,
    SAMPLING,
    expected_responses,
    only,
    responses,
    sampler_of,
    server_folder,
)
from tests.training.process import port

MEGABYTES = 2**20
DRAW = np.random.default_rng(0)
WEIGHTS = {"a": DRAW.normal(size=(40, 30)).astype("f4"), "b": DRAW.normal(size=7).astype("f4")}


class Elsewhere(Fake):
    """A server on another host, with our receiver before it: no folder of this one is there.

    The first `noise` parts of files arrive with a wrong bit.
    """

    def __init__(self, folder, noise=0, **how):
        self.receiver, self.noise = Receiver(str(folder)), noise
        super().__init__(**how)

    def received(self, path, query, body):
        if path == "/weights/find":
            query = query.replace("path=", "path=/elsewhere")
        if path == "/weights/file" and self.noise:
            self.noise -= 1
            body = bytes([body[0] ^ 1]) + body[1:]
        return asked(self.receiver, path, query, body)


def asked(application, path, query, body, size=1000):
    """Status and content of its answer to a body that comes in pieces; it has no checksums."""
    if path == EXTENSION:
        return 404, b"{}"
    sent = []
    pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    left = [
        {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)}
        for i, piece in enumerate(pieces)
    ]

    async def receive():
        return left.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "query_string": query.encode()}
    asyncio.run(application(scope, receive, send))
    return sent[0]["status"], sent[1]["body"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(client, "REST", 0.01)
    monkeypatch.setattr(sync, "SHARD_BYTES", 1000)
    monkeypatch.setattr(sync, "PIECE_BYTES", 500)


@pytest.fixture
def there(tmp_path):
    """What belongs to the other host."""
    folder = tmp_path / "there"
    folder.mkdir()
    return folder / "vllm-0.weights"


@pytest.fixture
def root(tmp_path):
    """What belongs to the trainer's host."""
    return tmp_path / "here"


def carried(*fakes, root, **settings):
    """A sampler that sends weights to who does not see them."""
    made = sampler_of(*fakes, root=root, **settings)
    made.weights.remote = True
    return made


def newest(root):
    """The folder that the trainer keeps."""
    (folder,) = root.glob("weights-*")
    return folder


def same(folder, other):
    files = sorted(path.name for path in Path(folder).iterdir())
    assert files == sorted(path.name for path in Path(other).iterdir())
    return all((Path(folder) / f).read_bytes() == (Path(other) / f).read_bytes() for f in files)


def test_bfloat16_and_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "SHARD_BYTES", 8)
    weights = {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float32)}
    written = sync.write_folder(weights.items(), CONFIG | {"dtype": "bfloat16"}, tmp_path / "w")
    assert written.bytes == 22
    assert len(list((tmp_path / "w").glob("*.safetensors"))) == 2
    assert {str(a.dtype) for a in server_folder(tmp_path / "w").values()} == {"bfloat16"}


def test_tensors_are_taken_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "SHARD_BYTES", 100)
    alive = []

    def tensors():
        for i in range(50):
            files = len(list(tmp_path.glob("*/*.safetensors")))
            alive.append(i - 5 * files)
            yield f"t{i}", np.zeros(6, np.float32)

    sync.write_folder(tensors(), CONFIG, tmp_path / "w")
    assert max(alive) <= 5


def test_the_changed_are_counted(tmp_path):
    weights = {"a": np.arange(90, dtype=np.float32), "b": np.zeros(10, np.float32)}
    sync.write_folder(weights.items(), CONFIG, tmp_path / "one")
    weights["a"][[3, 50]] += 1
    share = sync.write_folder(weights.items(), CONFIG, tmp_path / "two", tmp_path / "one").changed
    assert 0.02 <= share <= 0.04  # the header is counted too
    more = weights | {"c": np.zeros(1, np.float32)}
    assert sync.write_folder(more.items(), CONFIG, tmp_path / "3", tmp_path / "two").changed == 1


def test_a_root_that_vanishes_does_not_come_back_open_to_all(tmp_path):
    said = r"cannot write the weights to .*No such file or directory"
    with storage.temporary_folder(tmp_path) as root:
        shutil.rmtree(root)
        with pytest.raises(UserError, match=said):
            sync.write_folder(WEIGHTS.items(), CONFIG, root / "two")
        assert not root.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_root_that_somebody_else_has_made_anew_gets_nothing(tmp_path):
    with storage.temporary_folder(tmp_path) as root:
        shutil.rmtree(root)
        root.mkdir(mode=0o777)
        os.chown(root, 65534, 65534)
        with pytest.raises(UserError, match="it belongs to another user"):
            sync.write_folder(WEIGHTS.items(), CONFIG, root / "two")
        assert not list(root.iterdir())


def test_the_other_host_has_the_same_files_of_the_newest_only(root, there):
    with Elsewhere(there) as fake:
        made = carried(fake, root=root)
        for version in (1, 2):
            made.push(WEIGHTS, version)
            assert Path(fake.loaded[-1]).parent == there
            assert same(fake.loaded[-1], newest(root))
        assert [str(path) for path in there.iterdir()] == fake.loaded[-1:]
        assert fake.calls["/weights/file"] == 2 * 3
        answered = made.generate(PROMPTS, n=2, sampling=SAMPLING)
    assert responses(answered) == expected_responses(2)
    assert made.sync["sync/bytes"] == 4 * 1207


def test_who_sees_the_folder_is_sent_nothing(root, there):
    with Fake(received=partial(asked, Receiver(str(there)))) as beside, Fake() as plain:
        made = carried(beside, plain, root=root)
        made.push(WEIGHTS, 1)
        assert beside.loaded == plain.loaded == [str(newest(root))]
        assert beside.calls["/weights/find"] == plain.calls["/weights/find"]
        assert not beside.calls["/weights/file"]
        assert not there.exists()


def test_servers_of_one_host_share_a_copy_and_have_none_of_other_trainers(root, tmp_path, there):
    with Elsewhere(there) as one, Elsewhere(there.with_name("vllm-1.weights")) as other:
        carried(one, other, root=root).push(WEIGHTS, 1)
        assert one.loaded == other.loaded
        assert not other.calls["/weights/file"]
        carried(other, root=tmp_path / "another").push(WEIGHTS, 1)
        assert other.calls["/weights/file"] == one.calls["/weights/file"]
        assert Path(one.loaded[0]).exists()


@pytest.mark.parametrize("fault", [(500, b""), (200, b"nonsense"), ConnectionError])
@pytest.mark.parametrize("path", ["/weights/find", "/weights/file"])
def test_what_fails_is_sent_again(root, there, path, fault):
    with Elsewhere(there, fault=only(path, None, fault)) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        made.push(WEIGHTS, 2)
        assert same(fake.loaded[-1], newest(root))


def test_a_part_that_arrives_otherwise_is_sent_again(root, there):
    with Elsewhere(there, noise=3) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        assert fake.noise == 0
        assert same(fake.loaded[-1], newest(root))


def test_a_host_that_lost_them_half_way_gets_them_from_the_beginning(root, there):
    def lost(path, body, number):
        if path == "/weights/file" and number == 3:
            shutil.rmtree(there)
            return 500, b""
        return None

    with Elsewhere(there, fault=lost) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        assert same(fake.loaded[-1], newest(root))


def test_a_host_that_starts_anew_gets_them_again(root, there):
    """The server comes back without weights, label and files in the middle of a rollout."""
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Elsewhere(there, port=port()))
        made = carried(fake, root=root)
        made.push(WEIGHTS, 7)
        fake.die()
        fresh = there.parent / "anew" / there.name
        fresh.parent.mkdir()
        new = stack.enter_context(Elsewhere(fresh, port=fake.port))
        answered = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        assert responses(answered) == expected_responses(2)
        assert Path(new.loaded[-1]).parent == fresh
        assert same(new.loaded[-1], newest(root))


@pytest.mark.parametrize("found", [{"path": 3, "files": []}, {"path": "/x", "files": None}])
def test_a_host_that_says_nothing_of_its_weights_is_asked_again(root, found):
    fault = only("/weights/find", *[(200, json.dumps(found).encode())] * 1000)
    said = "not say where it reads weights"
    with Fake(fault=fault) as fake, pytest.raises(UserError, match=said):
        carried(fake, root=root, patience=0.2).push(WEIGHTS, 1)
    assert fake.calls["/weights/find"] > 1


def test_who_restarts_servers_hears_of_a_folder_before_they_load_it(root):
    with Fake() as fake:
        made, heard = sampler_of(fake, root=root), []
        made.weights.publish = lambda folder: heard.append((folder, [*fake.loaded]))
        made.push(WEIGHTS, 1)
        assert heard == [(newest(root), [])]


class Adapted(Fake):
    """A server that takes adapters beside its model by vLLM's own routes."""

    def __init__(self, **how):
        self.adapters, self.wrong = dict[str, Path](), []
        super().__init__(**how)

    def route(self, path, body):
        if path == "/v1/load_lora_adapter":
            self.adapters[body["lora_name"]] = Path(body["lora_path"])
            self.wrong += [self.label] if self.label != sync.loading(body["lora_name"]) else []
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if path == "/v1/models":
            ours = [{"id": name, "parent": "policy"} for name in self.adapters]
            return {"data": [{"id": "policy", "parent": None}, *ours]}
        if path == "/v1/completions" and body["model"] not in self.adapters:
            self.wrong.append(body["model"])
        return super().route(path, body)


def adapting(fake, root):
    """A sampler of adapters, and the folders that it has published."""
    made = sampler_of(fake, root=root)
    made._served.adapter = AdapterOfTests(
        rank=4,
        config=lambda dtype: {"peft_type": "LORA", "dtype": dtype},
        tensors=lambda params, dtype: {"a.lora_A": params["a"]}.items(),
        checksums=lambda params, dtype: {},
    )
    published = []
    made.weights.publish = published.append
    return made, published


def test_adapters_go_beside_the_model_and_the_newest_alone_stay(root):
    with Adapted() as fake:
        made, published = adapting(fake, root)
        for version in (1, 2):
            made.push(WEIGHTS, version)
            ((name, folder),) = fake.adapters.items()
            assert fake.label == name
            assert {p.name for p in folder.iterdir()} == {
                "adapter_config.json",
                "adapter_model.safetensors",
            }
        answered = made.generate(PROMPTS, n=2, sampling=SAMPLING)
    assert responses(answered) == expected_responses(2)
    assert not fake.wrong
    assert not fake.loaded
    assert published == [root / "base"]
    assert (root / "base" / "config.json").exists()


def test_who_starts_elsewhere_is_not_given_the_model(root):
    with Adapted() as fake:
        made, published = adapting(fake, root)
        made.weights.remote = True
        made.push(WEIGHTS, 1)
        assert not published
        assert not (root / "base").exists()


@pytest.fixture(params=[Fake, Adapted])
def loaded_anew(request, root):
    """Pushes to a server whose label becomes others while it is asked for log-probs; how often it loads."""

    def loads(*labels):
        with request.param(fault=only("/v1/completions", *labels)) as fake:
            adapted = request.param is Adapted
            made = adapting(fake, root)[0] if adapted else sampler_of(fake, root=root)
            made.push(WEIGHTS, 1)
            assert fake.label.endswith("-1")
            return fake.calls["/v1/load_lora_adapter" if adapted else "/collective_rpc"]

    return loads


def test_a_server_that_starts_again_while_it_loads_is_loaded_again(loaded_anew):
    assert loaded_anew("default") == 2


def test_a_server_that_another_trainer_loads_meanwhile_is_refused(loaded_anew):
    with pytest.raises(UserError, match="was given the weights theirs by somebody else"):
        loaded_anew(*["theirs"] * 99)


def test_no_room_on_the_other_host_is_one_line(root, there, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Receiver, "_write", full)
    with Elsewhere(there) as fake:
        with pytest.raises(UserError, match="No space left on device") as said:
            carried(fake, root=root).push(WEIGHTS, 1)
        assert str(there) in str(said.value)
        assert fake.label == "default"


@pytest.mark.parametrize(
    ("route", "query"),
    [
        ("file", "name=a&checksum=0&file=../key"),
        ("file", "name=a&checksum=0&file=model.py"),
        ("file", "name=../a&checksum=0&file=config.json"),
        ("file", "name=a"),
        ("find", "path=/elsewhere&name=a/b"),
        ("find", "nonsense"),
        ("delete", "name=a"),
    ],
)
def test_nothing_else_is_written_or_read(there, route, query):
    found, content = asked(Receiver(str(there)), f"/weights/{route}", query, b"")
    assert found == 400
    assert "error" in json.loads(content)
    assert not there.exists()


def test_neither_side_holds_more_than_pieces_in_memory(tmp_path, there, monkeypatch):
    monkeypatch.setattr(sync, "PIECE_BYTES", 2**18)
    path = tmp_path / "model-00000.safetensors"
    with path.open("wb") as file:
        file.truncate(64 * MEGABYTES)

    with counting_listener() as (url, counted):
        server = Server(url, "key", 600.0)
        tracemalloc.start()
        try:
            run(sync.send_file(server, path, "a"))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert counted[0] >= 64 * MEGABYTES
    assert most < 16 * MEGABYTES

    left = iter(range(64))

    async def receive():
        return {"type": "http.request", "body": bytes(MEGABYTES), "more_body": next(left) < 63}

    async def send(message):
        del message

    query = b"name=a&file=config.json&checksum=%d" % zlib.crc32(bytes(64 * MEGABYTES))
    scope = {"type": "http", "path": "/weights/file", "query_string": query}
    tracemalloc.start()
    try:
        asyncio.run(Receiver(str(there))(scope, receive, send))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (there / "a" / "config.json").stat().st_size == 64 * MEGABYTES
    assert most < 16 * MEGABYTES


@contextlib.contextmanager
def counting_listener():
    """Counts the bytes that come."""
    counted = [0]

    def serve():
        link, _ = listener.accept()
        with link:
            last = b""
            while not last.endswith(b"0\r\n\r\n"):
                piece = link.recv(2**16)
                counted[0], last = counted[0] + len(piece), (last + piece)[-5:]
            link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", counted
        thread.join()
