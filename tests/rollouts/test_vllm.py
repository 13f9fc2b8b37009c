"""The vLLM client against a stand-in that fails in every way that servers fail."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.cli import serve
from jaxrl_llm.errors import StopRequested, UserError
from jaxrl_llm.rollouts import engines
from jaxrl_llm.rollouts.sampler import Draft, Sampling
from jaxrl_llm.rollouts.vllm import client, sync
from jaxrl_llm.rollouts.vllm.client import NoAnswer, Response, Server
from jaxrl_llm.rollouts.vllm.sampler import VllmSampler, turns_of
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION
from jaxrl_llm.rollouts.vllm.service import Service, Turn, request_seed
from tests.rollouts.fake import OfTests
from tests.rollouts.fake_vllm import LOGP, Fake, completion, tokens_of
from tests.training.process import port

SAMPLING = Sampling(max_tokens=4)
PROMPTS = [[1, 2], [3, 4], [5]]
CONFIG = {"vocab_size": 50, "tie_word_embeddings": False, "dtype": "float32"}
WEIGHTS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float32)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(client, "REST", 0.01)
    monkeypatch.setattr(client, "CHECK_SECONDS", 0.05)


def sampler_of(*fakes, root, key="key", timeout=120.0, expected=LOGP, **settings):
    settings = {"dtype": "float32", "concurrency": 4} | settings
    waiting = {"patience": settings.pop("patience", 120.0)}
    root.mkdir(exist_ok=True)
    served = OfTests(
        config=lambda dtype: CONFIG | {"dtype": dtype},
        tensors=lambda params, dtype: params.items(),
        checksums=lambda params, dtype: {},
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
    turns = turns_of(prompts, n, sampling, None)
    return [tokens_of(t.prompt, t.seed, sampling.max_tokens) for t in turns]


def only(path, *faults):
    """A fault for the first calls of one path, in order; None is none."""

    def fault(here, body, number):
        del body
        chosen = faults[number - 1] if here == path and number <= len(faults) else None
        if isinstance(chosen, type):
            raise chosen
        return chosen

    return fault


def after_the_probe(*faults):
    """Four completions are the probe's."""
    return only("/v1/completions", *[None] * 4, *faults)


def responses(made):
    return [list(one.tokens) for one in made]


def test_what_is_answered(tmp_path):
    with Fake() as fake:
        made = ready(fake, root=tmp_path).generate(PROMPTS, n=2, sampling=SAMPLING)
    assert all(client.PLAIN.items() <= one.items() for one in fake.bodies if "seed" in one)
    assert [one.prompt for one in made] == [p for p in PROMPTS for _ in range(2)]
    assert responses(made) == expected_responses(2)
    for one in made:
        assert (one.logps, one.finished, one.versions) == ([LOGP] * 4, False, (7, 7))


def test_a_stop_token_ends_a_response_and_belongs_to_it(tmp_path):
    stop = expected_responses(1)[0][2]
    sampling = Sampling(max_tokens=4, stop=(stop,))
    with Fake() as fake:
        [one] = ready(fake, root=tmp_path).generate(PROMPTS[:1], n=1, sampling=sampling)
    assert one.tokens == expected_responses(1)[0][:3]
    assert one.finished


def test_seeds_belong_to_the_response():
    turns = lambda prompts, n, seed: turns_of(prompts, n, Sampling(seed=seed), None)
    seeds = {(t.prompt, t.seed) for t in turns(PROMPTS, 4, 0)}
    assert len(seeds) == 12
    assert [t.seed for t in turns([[1], [1]], 2, 0)] == [t.seed for t in turns([[1]], 4, 0)]
    assert seeds.isdisjoint({(t.prompt, t.seed) for t in turns(PROMPTS, 4, 1)})
    assert all(0 <= seed < 2**63 for _, seed in seeds)


def broken(**changes):
    answer = completion({"prompt": [1, 2], "max_tokens": 4})
    answer["choices"][0] |= changes
    return 200, json.dumps(answer).encode()


@pytest.mark.parametrize(
    "fault",
    [
        (500, b'{"error": {"message": "EngineCore encountered an issue"}}'),
        (200, b"{ not JSON"),
        broken(finish_reason="abort", token_ids=[1] * 5),
        ConnectionError,
    ],
)
def test_a_request_that_fails_is_sent_again(tmp_path, fault):
    with Fake(fault=after_the_probe(fault, None, fault)) as fake:
        made = ready(fake, root=tmp_path)
        before = fake.calls["/v1/completions"]
        answered = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        sent = fake.calls["/v1/completions"] - before
    assert responses(answered) == expected_responses(2)
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
            answered = made.generate(PROMPTS, n=2, sampling=SAMPLING)
        assert responses(answered) == expected_responses(2)
        assert not elsewhere.calls


def test_a_server_that_hangs_costs_a_timeout(tmp_path):
    hang, leave = iter([True]), threading.Event()

    def fault(path, body, number):
        if path == "/v1/completions" and number > 4 and next(hang, False):
            leave.wait(120)

    with Fake(fault=fault) as fake:
        made = ready(fake, root=tmp_path, timeout=3.0)
        answered = made.generate(PROMPTS, n=1, sampling=SAMPLING)
        leave.set()
    assert responses(answered) == expected_responses(1)
    assert made.counters["retries"] == 1


def test_a_server_that_dies_leaves_its_prompts_to_the_other(tmp_path):
    with Fake(seconds=0.02) as a, Fake(seconds=0.02) as b:
        made = ready(a, b, root=tmp_path)
        threading.Timer(0.1, a.die).start()
        answered = made.generate(PROMPTS, n=20, sampling=SAMPLING)
        assert responses(answered) == expected_responses(20)
        assert (
            len(a.bodies) + len(b.bodies) < 8 + 60 + 5
        )  # the finished ones are not asked for again


def test_a_server_that_returns_with_old_weights_is_brought_up_to_date(tmp_path):
    """Somebody else's server: nobody but the client can load and prove the newest weights."""
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(Fake(port=port()))
        made = ready(fake, root=tmp_path)
        fake.die()
        new = stack.enter_context(Fake(port=fake.port))
        answered = made.generate(PROMPTS, n=4, sampling=SAMPLING)
    assert responses(answered) == expected_responses(4)
    assert [path.rsplit("/", 1)[1] for path in new.loaded] == ["weights-000001"]
    assert new.label == fake.label
    assert sum("prompt_logprobs" in body for body in new.bodies) == 4  # the probe


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume", "/update_weight_version"])
def test_bringing_a_server_up_to_date_may_break_half_way(tmp_path, path):
    """At a push, and again when it has restarted."""
    with contextlib.ExitStack() as stack:
        fault = only(path, (500, b""), ConnectionError)
        fake = stack.enter_context(Fake(port=port(), fault=fault))
        made = ready(fake, root=tmp_path)
        assert fake.label.endswith("-7")
        fake.die()
        new = stack.enter_context(Fake(port=fake.port, fault=only(path, (500, b""), (503, b""))))
        answered = made.generate(PROMPTS, n=4, sampling=SAMPLING)
    assert responses(answered) == expected_responses(4)
    assert new.calls[path] >= 3


def test_weights_that_were_not_proved_are_not_used(tmp_path):
    with Fake() as fake:
        made = ready(fake, root=tmp_path)
        fake.logp -= 1
        for _ in range(2):
            with pytest.raises(UserError, match="differ from the trainer's"):
                made.push(WEIGHTS, 8)
        with pytest.raises(UserError, match="differ from the trainer's"):
            made.generate(PROMPTS, n=1, sampling=SAMPLING)
        fake.logp += 1
        assert made.generate(PROMPTS, n=1, sampling=SAMPLING)[0].versions == (8, 8)


def test_a_proof_that_is_cut_off_is_made_again(tmp_path):
    """The server has the weights by then, and nobody has seen that it computes with them."""
    with Fake(port=port()) as fake:
        made = ready(fake, root=tmp_path)
        fake.die()
        with Fake(port=fake.port, fault=only("/v1/completions", None, (500, b""))) as new:
            made.generate(PROMPTS, n=1, sampling=SAMPLING)
            assert sum("prompt_logprobs" in body for body in new.bodies) >= 1 + 4


def test_no_server_left(tmp_path):
    fake = Fake()
    made = ready(fake, root=tmp_path, patience=0.5)
    fake.die()
    with pytest.raises(UserError, match=r"has failed for 0.5 s, last by: ConnectError"):
        made.generate(PROMPTS, n=1, sampling=SAMPLING)


def test_the_weights_of_others_are_refused(tmp_path):
    """Another run's of the same step, and our own of an earlier one, which somebody has brought back."""
    with Fake() as fake:
        ours, theirs = (ready(fake, root=tmp_path / name) for name in "ab")
        assert theirs.generate(PROMPTS, n=1, sampling=SAMPLING)[0].versions == (7, 7)
        with pytest.raises(UserError, match=r"serves the weights \w+-7, and not \w+-7, the newest"):
            ours.generate(PROMPTS, n=1, sampling=SAMPLING)
        earlier = fake.label
        theirs.push(WEIGHTS, 8)
        fake.label = earlier
        with pytest.raises(UserError, match="somebody else has synced it"):
            theirs.generate(PROMPTS, n=1, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("fault", "settings", "says"),
    [
        (None, {"key": "other"}, "refused the key"),
        (only("/reset_prefix_cache", "loading 0123-7"), {}, "given the weights loading 0123-7"),
        (only("/reset_prefix_cache", *[(200, b'{"success": false}')] * 1000), {"patience": 0.5},
         "for 0.5 s, last by: its prefix cache was not cleared"),
    ],
    ids=["wrong key", "another run loads meanwhile", "prefix cache stays"],
)  # fmt: skip
def test_a_push_that_is_refused(fault, settings, says, tmp_path):
    with Fake(fault=fault) as fake, pytest.raises(UserError, match=says):
        ready(fake, root=tmp_path, **settings)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (after_the_probe(None, "0123-7"), "serves the weights 0123-7"),
        (after_the_probe((400, b'{"error": {"message": "too long"}}')), "refused a request: .*too long"),
        (only("/update_weight_version", None, *[(200, b"{}")] * 1000), "its weights became loading"),
    ],
    ids=["weights of others", "refused by vLLM", "label not taken"],
)  # fmt: skip
def test_responses_that_are_refused(fault, says, tmp_path):
    with Fake(fault=fault) as fake:
        made = ready(fake, root=tmp_path, patience=0.5)
        with pytest.raises(UserError, match=says):
            made.generate(PROMPTS, n=4, sampling=SAMPLING)


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        ([[50]], SAMPLING, "token 50, the vocabulary has 50"),
        ([[1] * 30], SAMPLING, "exceed max_model_len = 32"),
        ([[1]], Sampling(max_tokens=4, top_p=0.9), "set top_p to 1"),
        ([[1]], Sampling(max_tokens=4, temperature=0.005), "at a temperature of 0.01 where 0.005"),
        ([[]], SAMPLING, "at least one prompt"),
    ],
)
def test_requests_that_a_server_would_choke_on(tmp_path, prompts, sampling, says):
    with Fake() as fake:
        made = ready(fake, root=tmp_path, max_model_len=32)
        with pytest.raises(UserError, match=says):
            made.generate(prompts, n=1, sampling=sampling)


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
    assert made.sync["sync/bytes"] == 44
    assert made.sync["sync/difference"] == 0.0
    written = server_folder(fake.loaded[-1])
    np.testing.assert_equal(written["a"], WEIGHTS["a"])


def server_folder(folder):
    files = sorted(Path(folder).glob("*.safetensors"))
    return {k: v for f in files for k, v in safetensors.numpy.load_file(f).items()}


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
        assert made.generate(PROMPTS, n=1, sampling=SAMPLING)[0].versions == (7, 7)


@pytest.mark.parametrize("call", ["push", "generate"])
def test_who_waits_for_a_server_that_hangs_may_be_asked_to_leave(tmp_path, call):
    asked, over = threading.Event(), threading.Event()

    def look():
        if asked.is_set():
            raise StopRequested

    def hang(*_):
        asked.set()
        over.wait(120)

    with Fake() as fake:
        made = ready(fake, root=tmp_path, check=look)
        fake.fault = hang
        with pytest.raises(StopRequested):
            made.push(WEIGHTS, 8) if call == "push" else made.generate(
                PROMPTS, n=1, sampling=SAMPLING
            )
        over.set()


@pytest.mark.parametrize("error", [StopRequested("stop"), UserError("wrong")])
def test_who_waits_for_long_responses_learns_of_an_error_at_once(tmp_path, error):
    """One of a later response, while an earlier one is still sampled."""
    made = sampler_of(root=tmp_path)
    slow, failed = futures.Future(), futures.Future()
    failed.set_exception(error)
    threading.Timer(20.0, lambda: slow.cancelled() or slow.set_result(None)).start()
    start = time.monotonic()
    with pytest.raises(type(error)):
        made.wait([slow, failed])
    assert time.monotonic() - start < 10
    assert slow.cancelled()


def test_a_call_that_is_interrupted_calls_its_requests_off(tmp_path):
    """Ctrl-C, or a run that is told to leave, in the main thread, while many are under way."""
    asked = threading.Event()

    def slow(path, body, number):
        if path == "/v1/completions" and number > 4:
            asked.set()
            time.sleep(1.0)

    def interrupt():
        asked.wait(120)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
    with Fake(fault=slow) as fake:
        made = ready(fake, root=tmp_path)
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            made.generate(PROMPTS, n=20, sampling=SAMPLING)
        sent = -1
        while sent != fake.calls["/v1/completions"]:  # what was on its way comes yet
            sent = fake.calls["/v1/completions"]
            time.sleep(1.5)
        assert sent < 20
        again = made.generate(PROMPTS, n=1, sampling=SAMPLING)
        assert responses(again) == expected_responses(1)


# New weights while responses are under way.

LONG = Sampling(max_tokens=40)


def stitched(turn, sampled):
    """The response of a turn in the parts that servers gave back: each is asked for as a next turn is."""
    prompt, seed, sizes = turn.prompt, turn.seed, {(p, s): size for p, s, size in sampled}
    while len(prompt) < len(turn.prompt) + 40:
        part = tokens_of(prompt, seed, sizes[prompt, seed])
        prompt = (*prompt, *part)
        seed = request_seed(seed, prompt, 0)
    return [*prompt[len(turn.prompt) :]]


def test_new_weights_interrupt_responses_which_go_on_under_them(tmp_path):
    """On both servers; what waits is not begun meanwhile, and nothing that was sampled is lost."""
    with Fake() as one, Fake() as other:
        made = ready(one, other, root=tmp_path, concurrency=2)
        for fake in (one, other):
            fake.pace = 0.05
        responses = made.submit(PROMPTS, n=2, sampling=LONG)
        wait_for(lambda: one.at_work and other.at_work)
        time.sleep(0.2)
        made.push(WEIGHTS, 8)
        made.push(WEIGHTS, 9)  # at once: the parts may be empty
        whole = made.wait(responses)
    turns = turns_of(PROMPTS, 2, LONG, None)
    assert [len(response.tokens) for response in whole] == [40] * 6
    assert [response.turns for response in whole] == [()] * 6
    assert (7, 9) in {response.versions for response in whole}
    assert max(response.versions[1] for response in whole) == 9
    sampled = [*one.sampled, *other.sampled]
    assert [stitched(turn, sampled) for turn in turns] == [response.tokens for response in whole]


def test_a_server_that_returns_while_a_push_is_scored_has_the_weights_before(tmp_path, monkeypatch):
    """The new ones cannot be proved yet; the turns that it was at are asked for again."""

    class ByFolder(Fake):
        def route(self, path, body):
            answer = super().route(path, body)
            if path == "/collective_rpc":
                self.logp = LOGP - (self.loaded[-1] != str(first))
            return answer

    first = tmp_path / "weights-000001"
    with contextlib.ExitStack() as stack:
        fake = stack.enter_context(ByFolder(port=port()))
        made = ready(fake, root=tmp_path)
        fake.pace = 0.05
        under_way = made.submit(PROMPTS, n=1, sampling=LONG)
        wait_for(lambda: fake.at_work)

        def score(params, sequences):
            fake.die()
            new = stack.enter_context(ByFolder(port=fake.port))
            wait_for(lambda: new.sampled)  # it has been given weights, and proved them
            return [np.full(len(x) - 1, LOGP - 1) for x in sequences]

        monkeypatch.setattr(made._served, "score", score)
        made.push(WEIGHTS, 8)
        assert {one.versions[1] for one in made.wait(under_way)} <= {7, 8}


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# Servers that are sick, each in its own way: none ends a run or keeps the others waiting.


class Stub(Server):
    """Answers after `seconds`; `fault(number, prompt)` may raise."""

    def __init__(self, name, fault=lambda number, prompt: None, seconds=0.001):
        super().__init__(f"http://{name}")
        self.fault, self.seconds = fault, seconds
        self.asked = Counter()
        self.prepared = self.flying = self.most = 0

    async def ask(self, turn):
        self.asked[turn.prompt] += 1
        number = self.asked.total()
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await asyncio.sleep(self.seconds)
            self.fault(number, turn.prompt)
        finally:
            self.flying -= 1
        turn.add(Response([turn.seed], [-1.0], False), 0)

    async def prepare(self):
        self.prepared += 1
        return self.width


def answered_by(*servers, count=200, width=16, patience=120.0):
    """Has them answer so many turns; how often something was asked again."""
    for server in servers:
        server.width = width
    prepare: Any = lambda server: server.prepare()
    service = Service(servers, patience, Stub.ask, prepare)  # pyright: ignore[reportArgumentType]
    turns = [Turn((i,), i, Draft(Sampling(max_tokens=1), (i,)), None) for i in range(count)]
    service.submit(turns)
    assert [turn.response.result(120).tokens for turn in turns] == [[i] for i in range(count)]
    assert all(server.most <= width and not server.flying for server in servers)
    return service.retries()


def sick(number, prompt):
    raise NoAnswer("sick")


def test_after_a_failure_nothing_is_asked_for_that_is_over():
    """Turns that are called off as the call fails end after it."""

    class Refused(Stub):
        async def prepare(self):
            await asyncio.sleep(0.05)
            if not self.prepared:
                self.prepared = 1
                raise UserError("refused")
            return self.width

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl_llm.rollouts.vllm.service.READY", 0.0)
        servers = [Stub("well", seconds=0.3), Refused("refused")]
        for server in servers:
            server.width = 16
        sent = Counter()

        async def leaving(server, turn):
            try:
                await Stub.ask(server, turn)
            finally:
                await asyncio.sleep(0.05)  # as a connection is closed

        def ask(server, turn):
            sent[turn.prompt] += 1
            return leaving(server, turn)

        service = Service(servers, 120.0, ask, lambda server: server.prepare())  # pyright: ignore
        begin = lambda numbers: [
            Turn((i,), i, Draft(Sampling(max_tokens=1), (i,)), None) for i in numbers
        ]
        lost, later = begin(range(4)), begin(range(100, 103))
        service.submit(lost)
        for turn in lost:
            with pytest.raises(UserError, match="refused"):
                turn.response.result(60)
        service.submit(later)
        assert [turn.response.result(60).tokens for turn in later] == [[100], [101], [102]]
    assert sent == Counter((i,) for i in (*range(4), *range(100, 103)))


def test_what_was_asked_again_is_counted_over_pushes():
    well = Stub("well", lambda number, prompt: sick(number, prompt) if number == 2 else None)
    service = Service([well], 120.0, Stub.ask, lambda server: server.prepare())  # pyright: ignore
    well.width = 4

    def answer(first):
        turns = [
            Turn((i,), i, Draft(Sampling(max_tokens=1), (i,)), None)
            for i in range(first, first + 3)
        ]
        service.submit(turns)
        assert all(turn.response.result(60).tokens for turn in turns)

    async def push():
        async with service.interrupted(lambda server: asyncio.sleep(0)):
            pass

    answer(0)
    client.run(push())
    answer(3)
    assert (service.retries(), service.retries()) == (1, 0)


def test_the_server_with_the_most_room_is_given_the_next():
    servers = [Stub(name, seconds=0.5) for name in "abc"]
    answered_by(*servers, count=12)
    assert [server.most for server in servers] == [4, 4, 4]


def test_one_sick_server_of_two_ends_nothing():
    well, ill = Stub("well", seconds=0.01), Stub("ill", sick)
    answered_by(ill, well)
    assert well.asked.total() == 200
    assert ill.asked.total() < 16 + 100  # sixteen at once, then one after each rest


def test_nothing_is_given_up_while_another_server_works_on_it():
    """The sick one fails for longer than patience, while the other is at work on long ones."""
    answered_by(Stub("ill", sick), Stub("well", seconds=1.0), count=2, patience=0.3)


def test_what_fails_on_every_server_is_given_up():
    def fault(number, prompt):
        if prompt == (7,):
            raise NoAnswer("a poison")

    servers = [Stub("a", fault), Stub("b", fault)]
    with pytest.raises(UserError, match=r"has failed for 1 s, last by: a poison"):
        answered_by(*servers, patience=1.0)
    assert all(server.prepared > 1 for server in servers)


@pytest.mark.parametrize(("seconds", "restarts"), [(0.0, 1), (30.0, 0)])
def test_a_server_is_restarted_if_it_has_answered_nothing_in_the_time_of_a_request(
    seconds, restarts
):
    """Of one that answers others meanwhile, a request is lost at most."""
    asked, server = [], Stub("a", seconds=0.01)
    server.restart = lambda: asked.append(1)

    def fault(number, prompt):
        if number == 20:
            raise client.Late(seconds)

    server.fault = fault
    answered_by(server)
    assert len(asked) == restarts


def test_many_failures_of_one_cause_are_one():
    """A server that is gone for a moment with sixteen responses rests once, and they come again."""
    gone = []

    def fault(number, prompt):
        if number == 20:
            gone.append(True)
        if gone:
            raise NoAnswer("gone")

    class Returning(Stub):
        async def prepare(self):
            gone.clear()  # it is back by the time that somebody looks
            return await super().prepare()

    server = Returning("a", fault, seconds=0.005)
    assert answered_by(server) == 1
    assert server.prepared == 2


def test_preparing_a_server_that_hangs_keeps_no_other_waiting():
    class Hung(Stub):
        async def prepare(self):
            await asyncio.sleep(1000)

    answered_by(Hung("hung"), Stub("well"))


def batching(*sizes):
    """The fault of a server with our extension: it says how many requests each worker batches."""

    def fault(path, body, number):
        if path == EXTENSION and json.loads(body)["method"] == "jaxrl_batched":
            return 200, json.dumps({"results": sizes}).encode()
        return None

    return fault


@pytest.mark.parametrize(("own", "batch", "most"), [(0, [3, 3], 3), (2, [3, 3], 2), (0, [1], 1)])
def test_a_server_has_as_many_requests_as_it_batches(own, batch, most, tmp_path):
    """Unless the engine says how many."""
    with Fake(fault=batching(*batch)) as fake:
        fake.met, fake.pace = most, 0.0125
        made = ready(fake, root=tmp_path / "w", concurrency=own)
        made.generate(PROMPTS, n=6, sampling=SAMPLING)
        assert fake.most == most


def test_a_server_that_tells_nonsense_of_its_batch_is_asked_again(tmp_path):
    with Fake(fault=batching("many")) as fake:
        made = ready(fake, root=tmp_path / "w", concurrency=0, patience=0.2)
        with pytest.raises(UserError, match="how many requests it batches"):
            made.generate(PROMPTS, n=1, sampling=SAMPLING)


def gpus(monkeypatch, count, visible=None, fraction="0.94"):
    """The trainer sees so many GPUs, of which JAX takes a fraction."""
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    monkeypatch.setattr(engines.jax, "local_devices", lambda: [device] * count)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("count", "visible", "settings", "fraction", "wrong"),
    [
        (1, None, {}, "0.94", "92% of GPU 0, of which JAX has 94%"),
        (8, None, {"devices": ("6", "7")}, "0.94", "of GPU 6"),
        (2, "2,3", {"devices": ("0,3",)}, "0.94", "of GPU 3"),
        (2, "2,3", {"devices": ("0", "1")}, "0.94", ""),
        (1, None, {"arguments": ("--gpu-memory-utilization=0.4",)}, "0.5", ""),
        (1, None, {"arguments": ("--gpu_memory_utilization", "0.6")}, "0.5", "60% of GPU 0"),
        (1, None, {"share": 0.4}, "0.54", ""),
        (1, None, {"share": 0.4}, "0.94", "40% of GPU 0.*set XLA_CLIENT_MEM_FRACTION=0.54"),
        (0, None, {}, "0.94", ""),
    ],
)
def test_servers_and_trainer_do_not_both_want_a_gpu(
    monkeypatch, count, visible, settings, fraction, wrong
):
    gpus(monkeypatch, count, visible, fraction)
    engine = engines.Vllm(**settings)
    if wrong:
        with pytest.raises(UserError, match=wrong):
            engine._sharing_with_jax()
    else:
        given = ("--gpu-memory-utilization", "0.4") if "share" in settings else ()
        assert engine._sharing_with_jax().arguments == (*given, *engine.arguments)


@pytest.mark.parametrize(
    ("count", "visible", "settings", "devices"),
    [
        (4, None, {"share": 0.4}, ("0", "1", "2", "3")),
        (2, "5,GPU-8932f937", {"share": 0.4}, ("5", "GPU-8932f937")),
        (1, "5", {"share": 0.4}, ("",)),
        (4, None, {"share": 0.4, "devices": ("0,1",)}, ("0,1",)),
        (2, None, {"share": 0.4, "arguments": ("--tensor-parallel-size=2",)}, ("",)),
        (2, None, {"share": 0.4, "arguments": ("-tp", "2")}, ("",)),
        (4, None, {"arguments": ("--gpu-memory-utilization=0.4",)}, ("",)),
    ],
)
def test_with_a_share_there_is_a_server_on_each_gpu(monkeypatch, count, visible, settings, devices):
    """JAX leaves that part of each."""
    gpus(monkeypatch, count, visible, "0.54")
    assert engines.Vllm(**settings)._sharing_with_jax(count).devices == devices


def test_there_is_no_server_on_a_gpu_that_is_not_trained_on(monkeypatch):
    """As in `bench`, which uses the first of a host."""
    gpus(monkeypatch, 4, None, "0.54")
    assert engines.Vllm(share=0.4)._sharing_with_jax(1).devices == ("",)
    assert engines.Vllm(share=0.4)._sharing_with_jax(2).devices == ("0", "1")


@pytest.mark.parametrize(("stats", "share"), [({"bytes_limit": 60}, 0.75), (None, 0.94)])
def test_what_jax_has_of_a_gpu_is_what_its_allocator_says(monkeypatch, stats, share):
    """It may have started by a rule of its own."""
    gpus(monkeypatch, 1)
    monkeypatch.setattr(engines, "gpu_memory", lambda: 80)
    assert engines._held([SimpleNamespace(memory_stats=lambda: stats)]) == share


@pytest.mark.parametrize("nvidia", [0, 1])
def test_a_server_takes_its_share_where_the_one_that_starts_it_computes_on_the_cpu(
    monkeypatch, nvidia
):
    """As `serve` does, whose servers would take 92% of a GPU otherwise."""
    monkeypatch.setattr(engines, "present", lambda kind: nvidia)
    given = ("--gpu-memory-utilization", "0.4") * nvidia
    assert engines.Vllm(share=0.4)._sharing_with_jax().arguments == given


def test_servers_are_told_to_tell_of_experts_by_whoever_starts_them(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        engines.Vllm, "_launches", lambda self, *_: started.append(self.arguments) or []
    )
    for replay, experts in ((True, (2, 2, 4)), (True, None), (False, (2, 2, 4))):
        (root := tmp_path / f"{len(started)}").mkdir()
        with engines.Vllm(replay=replay).sidecars(root, root, experts=experts):
            assert started[-1] == (engines.EXPERTS if replay and experts else ())


def test_the_trainer_is_told_all_that_it_has_to_agree_in():
    ours = engines.Vllm(
        python="p", dtype="float32", max_model_len=99, replay=True, timeout=9.0, share=0.4
    )
    told = serve.engine_of(ours, ["unix:///a", "unix:///b"], Path("k"))
    assert told == (
        "Vllm(servers=('unix:///a', 'unix:///b'), key_file='k', dtype='float32', max_model_len=99, "
        "replay=True, timeout=9.0)"
    )
    theirs = eval(told, {"Vllm": engines.Vllm})
    assert (theirs.dtype, theirs.max_model_len, theirs.replay) == ("float32", 99, True)


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        # the proof of a sync asks for one token after 24
        ("max_model_len", 24, "max_model_len = 24 must be at least 25"),
        ("dtype", "float16", "neither float32 nor bfloat16"),
        *(("share", share, "share = ") for share in (0.0, 1.0, -0.1, float("nan"))),
        ("devices", (1,), "devices has 1, which is no text: write '1'"),
        ("arguments", ("--tensor-parallel-size", 2), "arguments has 2, which is no text"),
        ("environment", (("MINE", 1),), r"environment = .*'MINE', 1.* more than pairs of texts"),
    ],
)
def test_settings_that_no_server_could_keep(setting, value, says):
    with pytest.raises(UserError, match=says):
        engines.Vllm(**{setting: value})


def test_a_part_of_memory_that_is_no_number():
    with pytest.raises(UserError, match="utilization half in `arguments` is no number"):
        engines.Vllm(arguments=("--gpu-memory-utilization=half",))._sharing_with_jax()
