"""The vLLM client against a stand-in that fails in every way that servers fail."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.rollouts.vllm import sampler, sync
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Server, run
from jaxrl_llm.rollouts.vllm.sampler import VllmSampler, make_requests
from tests.rollouts.fake_vllm import LOGP, Fake, completion, tokens_of

SAMPLING = Sampling(max_tokens=4)
PROMPTS = [[1, 2], [3, 4], [5]]
CONFIG = {"vocab_size": 50, "tie_word_embeddings": False, "dtype": "float32"}
WEIGHTS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float32)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sampler, "REST", (0.01, 0.05))
    monkeypatch.setattr(sync, "RETRY", 0.01)


def sampler_of(*fakes, root, key="key", timeout=5.0, expected=LOGP, **settings):
    settings = {"dtype": "float32", "concurrency": 4} | settings
    waiting = {"patience": 30.0} | {
        k: settings.pop(k) for k in ("patience", "check") if k in settings
    }
    root.mkdir(exist_ok=True)
    served = SimpleNamespace(
        config=lambda params, dtype: CONFIG | {"dtype": dtype},
        tensors=lambda params, dtype: params.items(),
        score=lambda params, sequences: [np.full(len(s) - 1, expected) for s in sequences],
    )
    return VllmSampler(
        [Server(fake.url, key, timeout) for fake in fakes],
        sync.WeightSync(root, **waiting),
        served,
        **settings,
    )


def ready(*fakes, root, **settings):
    made = sampler_of(*fakes, root=root, **settings)
    made.push(WEIGHTS, 7)
    return made


def expected_responses(n, prompts=PROMPTS, sampling=SAMPLING):
    tasks = make_requests(prompts, n, sampling.seed)
    return [tokens_of(t.prompt, t.seed, sampling.max_tokens) for t in tasks]


def only(path, *faults):
    """A fault for the first calls of one path, in order; None is none."""
    left = list(faults)

    def fault(here, body, number):
        del body, number
        chosen = left.pop(0) if here == path and left else None
        if isinstance(chosen, type):
            raise chosen
        return chosen

    return fault


def after_the_probe(*faults):
    """Four completions are the probe's."""
    return only("/v1/completions", *[None] * 4, *faults)


def test_a_rollout(tmp_path):
    with Fake() as fake:
        rollout = ready(fake, root=tmp_path).generate(PROMPTS, n=2, sampling=SAMPLING)
    assert list(rollout.prompts) == [p for p in PROMPTS for _ in range(2)]
    assert list(rollout.responses) == expected_responses(2)
    assert rollout.logps == [[LOGP] * 4] * 6
    assert rollout.finished == [False] * 6
    assert rollout.version == 7


def test_a_stop_token_ends_a_response_and_belongs_to_it(tmp_path):
    stop = expected_responses(1)[0][2]
    sampling = Sampling(max_tokens=4, stop=(stop,))
    with Fake() as fake:
        rollout = ready(fake, root=tmp_path).generate(PROMPTS[:1], n=1, sampling=sampling)
    assert rollout.responses[0] == expected_responses(1)[0][:3]
    assert rollout.finished == [True]


def test_seeds_belong_to_the_response():
    seeds = {(t.prompt, t.seed) for t in make_requests(PROMPTS, 4, 0)}
    assert len(seeds) == 12
    assert [t.seed for t in make_requests([[1], [1]], 2, 0)] == [
        t.seed for t in make_requests([[1]], 4, 0)
    ]
    assert seeds.isdisjoint({(t.prompt, t.seed) for t in make_requests(PROMPTS, 4, 1)})
    assert all(0 <= seed < 2**63 for _, seed in seeds)


def broken(**changes):
    answer = completion({"prompt": [1, 2], "max_tokens": 4})
    answer["choices"][0] |= changes
    return 200, json.dumps(answer).encode()


@pytest.mark.parametrize(
    "fault",
    [
        (500, b'{"error": {"message": "EngineCore encountered an issue"}}'),
        (503, b""),
        (200, b"{ not JSON"),
        (200, b"[]"),
        (200, b'{"choices": []}'),
        broken(token_ids=[1, 2, 3]),
        broken(token_ids=[]),
        broken(finish_reason="abort"),
        broken(finish_reason="stop"),
        broken(logprobs={"token_logprobs": [0.0]}),
        ConnectionError,
    ],
)
def test_a_request_that_fails_is_sent_again(tmp_path, fault):
    with Fake(fault=after_the_probe(fault, None, fault)) as fake:
        made = ready(fake, root=tmp_path)
        before = fake.calls["/v1/completions"]
        rollout = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        sent = fake.calls["/v1/completions"] - before
    assert list(rollout.responses) == expected_responses(2)
    assert sent <= 2 * len(PROMPTS) + 2 * 4  # what was under way beside it is asked for again
    assert made.counters["retries"] in (1, 2)  # two may fail in one incident


def test_no_request_leaves_the_configured_hosts(tmp_path, monkeypatch):
    """Neither a redirect nor a proxy of the environment takes one elsewhere."""
    with Fake() as elsewhere:
        away = (302, f"{elsewhere.url}/v1/completions".encode())
        monkeypatch.setenv("http_proxy", elsewhere.url)
        monkeypatch.setenv("HTTP_PROXY", elsewhere.url)
        with Fake(fault=after_the_probe(away, away)) as fake:
            made = ready(fake, root=tmp_path)
            rollout = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        assert list(rollout.responses) == expected_responses(2)
        assert not elsewhere.calls


def test_a_request_that_always_fails_is_given_up(tmp_path):
    with Fake(fault=after_the_probe(*[(500, b'{"error": "no"}')] * 100)) as fake:
        made = ready(fake, root=tmp_path)
        with pytest.raises(
            UserError, match=r"failed 5 times, last at http://127.*: status 500: no"
        ):
            made.generate(PROMPTS, n=2, sampling=SAMPLING)


def test_a_server_that_hangs_costs_a_timeout(tmp_path):
    hang, leave = iter([True]), threading.Event()

    def fault(path, body, number):
        if path == "/v1/completions" and number > 4 and next(hang, False):
            leave.wait(20)

    with Fake(fault=fault) as fake:
        made = ready(fake, root=tmp_path, timeout=1.0)
        rollout = made.generate(PROMPTS, n=1, sampling=SAMPLING)
        leave.set()
    assert list(rollout.responses) == expected_responses(1)
    assert made.counters["retries"] == 1


def test_a_server_that_dies_leaves_its_prompts_to_the_other(tmp_path):
    with Fake(seconds=0.02) as a, Fake(seconds=0.02) as b:
        made = ready(a, b, root=tmp_path)
        threading.Timer(0.1, a.die).start()
        rollout = made.generate(PROMPTS, n=20, sampling=SAMPLING)
        assert list(rollout.responses) == expected_responses(20)
        assert (
            len(a.bodies) + len(b.bodies) < 8 + 60 + 5
        )  # the finished ones are not asked for again


def test_a_server_that_dies_and_returns_goes_on(tmp_path):
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Fake(seconds=0.02))
        made = ready(fake, root=tmp_path)

        def restart():
            fake.die()
            time.sleep(0.2)
            stack.enter_context(Fake(port=fake.port))

        timer = threading.Timer(0.1, restart)
        timer.start()
        rollout = made.generate(PROMPTS, n=20, sampling=SAMPLING)
        timer.join()
    assert list(rollout.responses) == expected_responses(20)
    assert rollout.version == 7


def test_a_server_that_returns_with_old_weights_is_brought_up_to_date(tmp_path):
    """Somebody else's server: nobody but the client can load and prove the newest weights."""
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Fake())
        made = ready(fake, root=tmp_path)
        fake.die()
        new = stack.enter_context(Fake(port=fake.port))
        rollout = made.generate(PROMPTS, n=4, sampling=SAMPLING)
    assert list(rollout.responses) == expected_responses(4)
    assert [path.rsplit("/", 1)[1] for path in new.loaded] == ["weights-000001"]
    assert new.label == fake.label
    assert sum("prompt_logprobs" in body for body in new.bodies) == 4  # the probe


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume", "/update_weight_version"])
def test_bringing_a_server_up_to_date_may_break_half_way(tmp_path, path):
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Fake())
        made = ready(fake, root=tmp_path)
        fake.die()
        new = stack.enter_context(Fake(port=fake.port, fault=only(path, (500, b""), (503, b""))))
        rollout = made.generate(PROMPTS, n=4, sampling=SAMPLING)
    assert list(rollout.responses) == expected_responses(4)
    assert new.calls[path] >= 3


def test_weights_that_were_not_proved_are_not_used(tmp_path):
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        fake.logp -= 1
        with pytest.raises(UserError, match="differ from the trainer's"):
            made.push(WEIGHTS, 8)
        fake.logp += 1
        with pytest.raises(UserError, match=r"serves the weights \w+-8, and not \w+-7"):
            made.generate(PROMPTS, n=1, sampling=SAMPLING)


def test_a_server_that_returns_and_does_not_load_is_found_out(tmp_path):
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Fake())
        made = ready(fake, root=tmp_path)
        fake.die()
        stack.enter_context(Fake(port=fake.port, logp=LOGP - 1))
        with pytest.raises(UserError, match="differ from the trainer's"):
            made.generate(PROMPTS, n=4, sampling=SAMPLING)


def test_no_server_left(tmp_path):
    fake = Fake()
    made = ready(fake, root=tmp_path, patience=0.5)
    fake.die()
    with pytest.raises(UserError, match=r"no server has answered for 0.5 s: .*ConnectError"):
        made.generate(PROMPTS, n=1, sampling=SAMPLING)


def test_the_weights_of_others_are_refused(tmp_path):
    """Another run's of the same step, and our own of an earlier one, which somebody has brought back."""
    with Fake() as fake:
        ours, theirs = (ready(fake, root=tmp_path / name) for name in "ab")
        assert theirs.generate(PROMPTS, n=1, sampling=SAMPLING).version == 7
        with pytest.raises(UserError, match=r"serves the weights \w+-7, and not \w+-7, the newest"):
            ours.generate(PROMPTS, n=1, sampling=SAMPLING)
        earlier = fake.label
        theirs.push(WEIGHTS, 8)
        fake.label = earlier
        with pytest.raises(UserError, match="somebody else has synced it"):
            theirs.generate(PROMPTS, n=1, sampling=SAMPLING)


def test_a_response_that_others_weights_overtook_is_refused(tmp_path):
    def fault(path, body, number):
        del body
        if path == "/v1/completions" and number == 6:
            fake.label = "0123-7"

    with Fake(fault=fault) as fake:
        made = ready(fake, root=tmp_path)
        with pytest.raises(UserError, match="serves the weights 0123-7"):
            made.generate(PROMPTS, n=4, sampling=SAMPLING)


def test_two_runs_that_load_at_the_same_time(tmp_path):
    def fault(path, body, number):
        del body, number
        if path == "/reset_prefix_cache":
            fake.label = "loading 0123-7"

    with (
        Fake(fault=fault) as fake,
        pytest.raises(UserError, match="given the weights loading 0123-7"),
    ):
        ready(fake, root=tmp_path)


def test_a_wrong_key(tmp_path):
    with Fake() as fake, pytest.raises(UserError, match="refused the key"):
        ready(fake, root=tmp_path, key="other")


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        ([[50]], SAMPLING, "token 50, the vocabulary has 50"),
        ([[1] * 30], SAMPLING, "exceed max_model_len = 32"),
        ([[1]], Sampling(max_tokens=4, top_p=0.9), "set top_p to 1"),
        ([[]], SAMPLING, "at least one prompt"),
    ],
)
def test_requests_that_a_server_would_choke_on(tmp_path, prompts, sampling, says):
    with Fake() as fake:
        made = ready(fake, root=tmp_path, max_model_len=32)
        with pytest.raises(UserError, match=says):
            made.generate(prompts, n=1, sampling=sampling)


def test_what_vllm_refuses_is_said(tmp_path):
    with Fake(fault=after_the_probe((400, b'{"error": {"message": "too long"}}'))) as fake:
        made = ready(fake, root=tmp_path)
        with pytest.raises(UserError, match="refused a request: too long"):
            made.generate(PROMPTS, n=1, sampling=SAMPLING)


def test_addresses_are_checked():
    with pytest.raises(UserError, match="http://HOST:PORT"):
        Server("localhost:8000")


# Syncs.


def test_a_sync_loads_clears_labels_and_leaves_one_folder(tmp_path):
    with Fake() as fake:
        made = sampler_of(fake, root=tmp_path)
        for version in (1, 2, 2, 3):
            made.push(WEIGHTS, version)
        assert fake.label.endswith("-3")
        assert len(set(fake.loaded)) == 4
        assert [str(f) for f in tmp_path.iterdir()] == fake.loaded[-1:]
        assert (
            fake.calls["/pause"] == fake.calls["/resume"] == fake.calls["/reset_prefix_cache"] == 4
        )
    assert made.report.bytes == 44
    assert made.report.difference == 0.0
    written = server_folder(fake.loaded[-1])
    np.testing.assert_equal(written["a"], WEIGHTS["a"])


def server_folder(folder):
    import safetensors.numpy

    files = sorted(Path(folder).glob("*.safetensors"))
    return {k: v for f in files for k, v in safetensors.numpy.load_file(f).items()}


def test_bfloat16_and_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "SHARD_BYTES", 8)
    report = sync.write_folder(WEIGHTS.items(), CONFIG | {"dtype": "bfloat16"}, tmp_path / "w")
    assert report.bytes == 22
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


def full_disk(tensors, path, metadata):
    """What the library says then."""
    path.write_bytes(b"half")
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    raise safetensors.SafetensorError(said)


def test_a_full_disk_leaves_the_old_weights(tmp_path, monkeypatch):
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        before = fake.calls["/pause"]
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.numpy, "save_file", full_disk)
            with pytest.raises(
                UserError, match=r"No space left.*the servers keep the old ones.*make room"
            ):
                made.push(WEIGHTS, 8)
        assert fake.calls["/pause"] == before
        assert [str(f) for f in tmp_path.iterdir()] == fake.loaded
        assert made.generate(PROMPTS, n=1, sampling=SAMPLING).version == 7


def test_a_prefix_cache_that_stays_is_an_error(tmp_path):
    with Fake() as fake:
        fake.cache_cleared = False
        with pytest.raises(UserError, match=r"did not load .* prefix cache was not cleared"):
            ready(fake, root=tmp_path, patience=0.5)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_a_sync_that_breaks_half_way_is_done_again(tmp_path, path):
    with Fake(fault=only(path, (500, b""), ConnectionError)) as fake:
        made = ready(fake, root=tmp_path)
        assert fake.label.endswith("-7")
        assert made.version == 7


def test_a_restarted_server_that_fails_twice_while_it_is_given_weights_is_given_them(tmp_path):
    """The label that it bears is that of our own broken attempt, and not somebody else's."""
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        fake.die()
        reload, pause = only("/collective_rpc", (503, b"")), only("/pause", None, (503, b""))

        def fault(*call):
            return reload(*call) or pause(*call)

        with Fake(port=fake.port, fault=fault) as new:
            rollout = made.generate(PROMPTS, n=4, sampling=SAMPLING)
            assert list(rollout.responses) == expected_responses(4)
            assert new.calls["/pause"] >= 3


def test_a_sync_that_never_works_ends(tmp_path):
    with Fake(fault=only("/collective_rpc", *[(500, b"")] * 1000)) as fake:
        start = time.monotonic()
        with pytest.raises(UserError, match=r"did not load the weights \w+-7 within 0\.5 s"):
            ready(fake, root=tmp_path, patience=0.5)
        assert time.monotonic() - start < 60


def test_a_server_that_does_not_take_the_label_is_found_out(tmp_path):
    fault = only("/update_weight_version", None, *[(200, b"{}")] * 100)
    said = r"serves the weights loading (\w+-7) after a sync of \1"
    with Fake(fault=fault) as fake, pytest.raises(UserError, match=said):
        ready(fake, root=tmp_path)


def test_a_kept_connection_that_the_server_closed(tmp_path):
    """A busy trainer asks again long after uvicorn has hung up."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer_once():
            link, _ = listener.accept()
            with link:
                link.recv(10_000)
                link.sendall(
                    b'HTTP/1.1 200 OK\r\nContent-Length: 24\r\n\r\n{"weight_version":"a-1"}'
                )

        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(3):
            done = pool.submit(answer_once)
            assert run(server.label()) == "a-1"
            done.result()
        run(server.close())


def test_a_call_that_is_interrupted_calls_its_requests_off(tmp_path):
    """Ctrl-C, or a run that is told to leave, in the main thread, while many are under way."""
    asked = threading.Event()

    class Slow(Fake):
        def route(self, path, body):
            if path == "/v1/completions" and "prompt_logprobs" not in body:
                asked.set()
                time.sleep(1.0)
            return super().route(path, body)

    def interrupt():
        asked.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
    with Slow() as fake:
        made = ready(fake, root=tmp_path)
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            made.generate(PROMPTS, n=20, sampling=SAMPLING)
        time.sleep(1.5)
        sent = fake.calls["/v1/completions"]
        assert sent < 20
        time.sleep(1.5)
        assert fake.calls["/v1/completions"] == sent
        assert list(made.generate(PROMPTS, n=1, sampling=SAMPLING).responses) == expected_responses(
            1
        )


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        server = Server(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(NoAnswer, match="ConnectError"):
            run(server.label())
        run(server.close())
