"""Addresses, keys, and servers that drip, flood, lie, or are somebody else's: each costs a line, and no memory."""

import contextlib
import itertools
import json
import os
import pathlib
import re
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.engines import Vllm
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.vllm import client
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Server, address, is_private, run
from tests.rollouts.fake_vllm import Fake, completion

SAMPLING = Sampling(max_tokens=4, stop=(49,))
MEGABYTES = 2**20


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000", "http://h:abc", "http://h:99999", "http://[::1", "http://", "ftp://h:1", "http://u:p@h:1",
        "unix://x/y", "unix:", "http://h:1/a b", "http://h:1/\r\nX: y", "http://h:1/é",
        "http://" + "a" * 64 + ":1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_one_line_when_the_config_is_made(url):
    with pytest.raises(UserError, match="is no address of a server: write unix:///PATH") as said:
        Vllm(servers=(url,))
    assert "\n" not in str(said.value)


def test_the_path_of_a_socket_is_limited():
    with pytest.raises(UserError, match="choose a shorter `memory`"):
        address("unix:///" + "a" * 107)
    assert address("unix:///" + "a" * 106).path == "/" + "a" * 106


@pytest.mark.parametrize(
    ("url", "private"),
    [
        ("http://localhost:1", True),
        ("http://127.0.0.9:1", True),
        ("http://[::1]:1/prefix", True),
        ("https://elsewhere", True),
        ("unix:///tmp/x", True),
        ("http://10.0.0.1:1", False),
        ("http://elsewhere:1", False),
        ("http://127.0.0.1.elsewhere:1", False),
    ],
)
def test_plain_http_leaves_this_machine_only_if_told_to(url, private):
    assert is_private(url) == private
    if private:
        Vllm(servers=(url,))
    else:
        with pytest.raises(UserError, match="key and data in the open"):
            Vllm(servers=(url,))
        Vllm(servers=(url,), plain_http=True)


HEAD = b"HTTP/1.1 200 OK\r\n"
DRIP = [b"x"] * 6000  # two minutes
JSON = b'{"weight_version": "a-1"}'


@contextlib.contextmanager
def answering(pieces, pause=0.0):
    """A server that reads a request and sends these pieces, however many, one after the other."""
    ended = threading.Event()

    def serve(link):
        with contextlib.suppress(OSError), link:
            link.recv(10_000)
            for piece in pieces():
                link.sendall(piece)
                if ended.wait(pause) or ended.is_set():
                    return

    def listen():
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: DRIP,
        lambda: [HEAD, *([b"X: y\r\n"] * 90), *DRIP],
        lambda: [HEAD + b"Content-Length: 1000\r\n\r\n", *DRIP],
        lambda: [HEAD + b"\r\n", *DRIP],
        lambda: [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *([b"1\r\nx\r\n"] * 6000)],
        lambda: [HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *([b"X: y\r\n"] * 6000)],
        lambda: [b"HTTP/1.1 100 Continue\r\n\r\n"] * 6000,
        lambda: [],
    ],
)
def test_a_drip_does_not_outlast_the_deadline(pieces):
    with answering(pieces, pause=0.02) as url:
        start = time.monotonic()
        with pytest.raises(NoAnswer):
            run(Server(url, timeout=0.3).label())
        assert time.monotonic() - start < 60


def test_a_request_that_is_not_read_ends_too():
    with socket.create_server(("127.0.0.1", 0), backlog=4) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        body = {"prompt": "x" * (32 * MEGABYTES)}
        with pytest.raises(NoAnswer, match="time"):
            run(Server(url, timeout=0.3).post("/v1/completions", body))


def test_long_responses_have_more_time():
    """A second and a half for 400 tokens is no timeout of 0.5 s and a quarter of a second each."""
    with Fake(seconds=1.5) as fake:
        server = Server(fake.url, "key", timeout=0.5)
        assert len(run(server.complete([1], Sampling(max_tokens=400), 0, 50)).tokens) == 400
        with pytest.raises(NoAnswer, match="time"):
            run(server.complete([1], Sampling(max_tokens=1), 0, 50))


BLOCK = b"[" * MEGABYTES


@pytest.mark.parametrize(
    "pieces",
    [
        lambda: [HEAD + b"Content-Length: 1000000000\r\n\r\n", *itertools.repeat(BLOCK, 1000)],
        lambda: [HEAD + b"\r\n", *itertools.repeat(BLOCK, 1000)],
        lambda: [
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
            *itertools.repeat(b"100000\r\n" + BLOCK + b"\r\n", 1000),
        ],
        lambda: itertools.repeat(BLOCK, 1000),
        lambda: [HEAD, *itertools.repeat(b"X: y\r\n" * 10_000, 1000)],
        lambda: [HEAD + b"Content-Length: 500000\r\n\r\n", BLOCK[:500_000]],
    ],
)
def test_a_flood_costs_no_memory(pieces):
    with answering(pieces) as url:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(NoAnswer):
            run(Server(url, timeout=120).label())
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def answered(**changes):
    answer = completion({"prompt": [1, 2], "max_tokens": 4})
    answer["choices"][0] |= changes
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{ not JSON", b"\xff\xfe", b'{"choices": []}', b'{"choices": 3}',
        b'{"choices": [3]}',
        b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"choices": ' + b"9" * 100_000 + b"}",
        answered(token_ids=None), answered(token_ids=3), answered(token_ids="1234"), answered(token_ids=[]),
        answered(token_ids=[1, 2, 3]), answered(token_ids=[1, 2, 3, 4, 5]), answered(token_ids=[1, 2, 3, 50]),
        answered(token_ids=[1, 2, 3, -1]), answered(token_ids=[1, 2, 3, 1.0]), answered(token_ids=[1, 2, 3, True]),
        answered(token_ids=[1, 2, 3, 10**30]), answered(token_ids=[[1], 2, 3, 4]),
        answered(token_ids=[1, 49, 2, 3]),
        answered(token_ids=[1, 2, 3, 49]), answered(finish_reason="stop"), answered(finish_reason="abort"),
        answered(finish_reason=["length"]), answered(finish_reason="stop", token_ids=[1, 49, 3, 49]),
        answered(finish_reason="stop", token_ids=[1, 2, 3, 4, 49], logprobs={"token_logprobs": [-1.0] * 5}),
        answered(logprobs=None), answered(logprobs={}), answered(logprobs={"token_logprobs": [-1.0] * 3}),
        answered(logprobs={"token_logprobs": [-1.0, None, -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, "-1", -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, float("nan"), -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, float("-inf"), -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, 0.5, -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, -(10**400), -1.0, -1.0]}),
        answered(logprobs={"token_logprobs": [-1.0, True, -1.0, -1.0]}),
    ],
)  # fmt: skip
def test_a_lie_is_no_answer(content):
    complete = lambda server: server.complete([1], SAMPLING, 0, 50)
    assert len(no_answer(200, content, complete)) < 500


def no_answer(status, content, ask=Server.label):
    """What is said of it."""
    with Fake(fault=lambda *_: (status, content)) as fake, pytest.raises(NoAnswer) as said:
        run(ask(Server(fake.url, "key")))
    return str(said.value)


@pytest.mark.parametrize(
    "entries",
    [
        None, [], [None], [None, None], [None, 3], [None, {}], [None, {"2": None}],
        [None, {"2": {"logprob": None}}],
        [None, {"2": {"logprob": -(10**400)}}], [None, {"2": {"logprob": "x"}}],
        [None, *[{"2": {"logprob": -1}}] * 2],
    ],
)  # fmt: skip
def test_a_lie_about_a_score_is_no_answer(entries):
    content = answered(prompt_logprobs=entries)
    said = no_answer(200, content, lambda server: server.score([1, 2]))
    assert "scored a prompt without its log-probs" in said


@pytest.mark.parametrize("label", [b"null", b"3", b'["a"]'])
def test_a_label_is_text(label):
    said = no_answer(200, b'{"weight_version": %s}' % label)
    assert "does not say which weights" in said


@pytest.mark.parametrize(
    "content",
    [
        rb'{"error": {"message": "a \q b"}}',
        b'{"error": {"message": "a \n b"}}',
        b'{"error": {"message": "a \\\n b"}}',
        b'{"error": "a \x1b[31m b"}',
        b"a \x00 b",
        b"a \xff b" + b"x" * 10_000,
    ],
)
def test_what_is_said_is_one_short_line_that_a_terminal_can_show(content):
    said = no_answer(500, content)
    assert re.search(r"status 500: .*a .* b", said)
    assert said.isprintable()
    assert len(said) < 500


@pytest.mark.parametrize("status", [404, 408, 429, 500, 502, 503, 504, 302, 204])
def test_what_a_load_balancer_says_is_no_answer(status):
    assert no_answer(status, b"<html>not here</html>")


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NoAnswer, match="ConnectError"):
            run(Server(f"http://127.0.0.1:{taken.getsockname()[1]}").label())


LISTENER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    link, _ = listener.accept()
    print(link.recv(1000), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_who_has_taken_the_place_of_a_socket_gets_no_key():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        taken(f"{folder}/s")


def test_a_socket_that_goes_while_it_is_looked_at_is_nobodys(tmp_path, monkeypatch):
    """As where its server starts again: the request is told so, and sent once more."""
    monkeypatch.setattr(pathlib.Path, "is_socket", lambda path: True)
    Server(f"unix://{tmp_path / 'gone'}", "secret")._refuse_strangers()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"devices": "0,1"}, r"devices = '0,1' is one text: write \('0,1',\)"),
        ({"arguments": "--x=2"}, "arguments = '--x=2' is one text"),
        ({"servers": "http://localhost:1"}, "servers = .* is one text"),
        ({"devices": ()}, "leaves nothing to serve on"),
    ],
)
def test_lists_of_an_engine_are_lists(settings, said):
    with pytest.raises(UserError, match=said):
        Vllm(**{"python": "python"} | settings)


def taken(path):
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, path], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        server = Server(f"unix://{path}", "secret")
        with pytest.raises(UserError, match=r"user 65534 listens on .*, and not you"):
            run(server.label())
        other.kill()
        assert other.stdout.read() == ""


def test_a_key_is_written_for_its_owner_alone(tmp_path):
    path = tmp_path / "key"
    client.write_key("secret", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert client.read_key(path) == "secret"
    with pytest.raises(FileExistsError):
        client.write_key("other", path)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"secret", 0o644, "not yours alone: chmod 600"),
        (b"", 0o600, "holds no key"),
        (b"a\nb", 0o600, "more than letters, digits and signs on one line"),
        ("clé".encode(), 0o600, "more than letters"),
        (b"\xff", 0o600, "more than letters"),
        (None, 0o600, "no key in .*: No such file"),
    ],
)
def test_a_key_file_that_will_not_do(tmp_path, content, mode, says):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(UserError, match=says):
        client.read_key(path)


def test_a_fifo_for_a_key_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "key", 0o600)
    with pytest.raises(UserError, match="holds no key"):
        client.read_key(tmp_path / "key")


def test_without_a_file_the_key_is_the_environments(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert client.read_key(None) == ""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert client.read_key(None) == "secret"
    monkeypatch.setenv("VLLM_API_KEY", "a\r\nX: y")
    with pytest.raises(UserError, match="the key in VLLM_API_KEY holds more than"):
        client.read_key(None)
