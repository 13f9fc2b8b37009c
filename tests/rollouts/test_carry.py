"""Weights over the network, to a server whose host does not see the trainer's folder."""

import asyncio
import contextlib
import errno
import json
import os
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts import carry, receiver, weight_sync
from jaxrl_llm.rollouts.receiver import Receiver
from jaxrl_llm.rollouts.server import Server
from tests.rollouts.fake_vllm import Fake
from tests.rollouts.test_vllm import PROMPTS, SAMPLING, expected_responses, only, sampler_of

MEGABYTES = 2**20
DRAW = np.random.default_rng(0)
WEIGHTS = {"a": DRAW.normal(size=(40, 30)).astype("f4"), "b": DRAW.normal(size=7).astype("f4")}


class Elsewhere(Fake):
    """A server on another host, with our receiver before it: no folder of this one is there."""

    def __init__(self, folder, **how):
        self.receiver = Receiver(str(folder))
        super().__init__(**how)

    def received(self, path, query, body):
        if path == "/weights/find":
            body = json.dumps(json.loads(body) | {"path": "/elsewhere"}).encode()
        return asked(self.receiver, path, query, body)


def asked(application, path, query, body, size=1000):
    """Status and content of its answer to a body that comes in pieces."""
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
    monkeypatch.setattr(weight_sync, "RETRY", 0.01)
    monkeypatch.setattr(carry, "PART_BYTES", 1000)


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
    made.transport.carry = True
    return made


def newest(root):
    """The folder that the trainer keeps."""
    (folder,) = root.glob("weights-*")
    return folder


def same(folder, other):
    files = sorted(path.name for path in Path(folder).iterdir())
    assert files == sorted(path.name for path in Path(other).iterdir())
    return all((Path(folder) / f).read_bytes() == (Path(other) / f).read_bytes() for f in files)


def test_the_other_host_has_the_same_files_of_the_newest_only(root, there):
    with Elsewhere(there) as fake:
        made = carried(fake, root=root)
        for version in (1, 2):
            made.push(WEIGHTS, version)
            assert Path(fake.loaded[-1]).parent == there
            assert same(fake.loaded[-1], newest(root))
        assert [str(path) for path in there.iterdir()] == fake.loaded[-1:]
        assert fake.calls["/weights/part"] > 10
        rollout = made.generate(PROMPTS, n=2, sampling=SAMPLING)
    assert list(rollout.responses) == expected_responses(2)
    assert made.sync["sync/bytes"] == 4 * 1207


def test_who_sees_the_folder_is_sent_nothing(root, there):
    class Beside(Fake):
        def received(self, path, query, body):
            return asked(Receiver(str(there)), path, query, body)

    with Beside() as beside, Fake() as plain:
        made = carried(beside, plain, root=root)
        made.push(WEIGHTS, 1)
        assert beside.loaded == plain.loaded == [str(newest(root))]
        assert beside.calls["/weights/find"] == plain.calls["/weights/find"]
        assert not beside.calls["/weights/part"]
        assert not there.exists()


def test_servers_of_one_host_share_a_copy_and_have_none_of_other_trainers(root, tmp_path, there):
    with Elsewhere(there) as one, Elsewhere(there.with_name("vllm-1.weights")) as other:
        carried(one, other, root=root).push(WEIGHTS, 1)
        assert one.loaded == other.loaded
        assert not other.calls["/weights/part"]
        carried(other, root=tmp_path / "another").push(WEIGHTS, 1)
        assert other.calls["/weights/part"] == one.calls["/weights/part"]
        assert Path(one.loaded[0]).exists()


@pytest.mark.parametrize("fault", [(500, b""), (200, b"nonsense"), ConnectionError])
@pytest.mark.parametrize("path", ["/weights/find", "/weights/part", "/weights/whole"])
def test_what_fails_is_sent_again(root, there, path, fault):
    with Elsewhere(there, fault=only(path, None, fault)) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        made.push(WEIGHTS, 2)
        assert same(fake.loaded[-1], newest(root))


def test_a_part_that_arrives_otherwise_is_sent_again(root, there):
    class Noisy(Elsewhere):
        noise = 3

        def received(self, path, query, body):
            if path == "/weights/part" and self.noise:
                self.noise -= 1
                body = bytes([body[0] ^ 1]) + body[1:]
            return super().received(path, query, body)

    with Noisy(there) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        assert fake.noise == 0
        assert same(fake.loaded[-1], newest(root))


def test_a_host_that_lost_them_half_way_gets_them_from_the_beginning(root, there):
    def lost(path, body, number):
        if path == "/weights/part" and number == 4:
            for file in there.glob("*/*"):
                file.unlink()

    with Elsewhere(there, fault=lost) as fake:
        made = carried(fake, root=root)
        made.push(WEIGHTS, 1)
        assert same(fake.loaded[-1], newest(root))


def test_a_host_that_starts_anew_gets_them_again(root, there):
    """The server comes back without weights, label and files in the middle of a rollout."""
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Elsewhere(there))
        made = carried(fake, root=root)
        made.push(WEIGHTS, 7)
        fake.die()
        fresh = there.parent / "anew" / there.name
        fresh.parent.mkdir()
        new = stack.enter_context(Elsewhere(fresh, port=fake.port))
        rollout = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        assert list(rollout.responses) == expected_responses(2)
        assert Path(new.loaded[-1]).parent == fresh
        assert same(new.loaded[-1], newest(root))


def test_time_is_allowed_by_the_part(root, there, monkeypatch):
    """All together take longer than an answer may, and longer than patience."""
    monkeypatch.setattr(carry, "PART_BYTES", 300)
    with Elsewhere(there, fault=lambda path, *_: slow(path)) as fake:
        made = carried(fake, root=root, timeout=1.0, patience=1.0)
        made.push(WEIGHTS, 1)
        assert made.sync["sync/reload"] > 1.0


def slow(path):
    if path == "/weights/part":
        time.sleep(0.1)


def test_no_room_on_the_other_host_is_one_line(root, there, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(receiver.os, "pwrite", full)
    with Elsewhere(there) as fake:
        with pytest.raises(UserError, match="No space left on device") as said:
            carried(fake, root=root).push(WEIGHTS, 1)
        assert str(there) in str(said.value)
        assert fake.label == "default"


@pytest.mark.parametrize(
    ("route", "query", "body", "status"),
    [
        ("part", "name=a&file=../key&offset=0&sum=0", b"", 400),
        ("part", "name=a&file=model.py&offset=0&sum=0", b"", 400),
        ("part", "name=../a&file=config.json&offset=0&sum=0", b"", 400),
        ("find", "", b'{"path": "/elsewhere", "name": "a/b"}', 400),
        ("find", "", b" " * (receiver.QUESTION + 1), 413),
        ("delete", "", b"{}", 404),
    ],
)
def test_nothing_else_is_written_or_read(there, route, query, body, status):
    found, content = asked(Receiver(str(there)), f"/weights/{route}", query, body, 2**16)
    assert found == status
    assert "error" in json.loads(content)
    assert not there.exists()


def test_neither_side_holds_more_than_parts_in_memory(tmp_path, there, monkeypatch):
    monkeypatch.setattr(carry, "PART_BYTES", 2 * MEGABYTES)
    folder = tmp_path / "weights-000001"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    size = 64 * MEGABYTES
    with (folder / "model-00000.safetensors").open("wb") as file:
        file.truncate(size)
    with Elsewhere(there) as fake, contextlib.closing(Server(fake.url, "key")) as server:
        tracemalloc.start()
        try:
            path = carry.brought(server, folder, lambda attempt: attempt())
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert same(path, folder)
    assert most < 16 * MEGABYTES


def test_a_sum_is_of_the_part(there):
    there.parent.mkdir(exist_ok=True)
    query = f"name=a&file=config.json&offset=0&sum={zlib.crc32(b'{}')}"
    assert asked(Receiver(str(there)), "/weights/part", query, b"{}")[0] == 200
    assert asked(Receiver(str(there)), "/weights/part", query, b"[]")[0] == 503
