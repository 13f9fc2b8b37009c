"""The embedded engine: the trainer's numbers, the same tokens in any company, no slot left idle."""

import dataclasses
import functools
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.models import hf, logprobs, qwen2
from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.policy import mesh_of_copies
from jaxrl_llm.rollouts import native
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Sampler, Sampling
from tests import tiny
from tests.reference import peer
from tests.rollouts.fake import Scripted

STOP = (7, 9)
SAMPLING = Sampling(max_tokens=24, stop=STOP)
GREEDY = dataclasses.replace(SAMPLING, temperature=0.0)


def prompts(count, seed=0, longest=20):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 96, rng.integers(1, longest)).tolist() for _ in range(count)]


@functools.cache
def engine(slots=8, *, together=4):
    definition, _ = qwen2.graph(tiny.SHAPE)
    made = NativeSampler(
        ScannedGenerator(definition, 16, tiny.mesh_of()),
        slots=slots,
        prefill_prompts=together,
        steps=10,
    )
    made.push(tiny.policy()[1], 1)
    return made


def responses(made):
    return [list(one.tokens) for one in made]


@pytest.mark.parametrize("make", [engine, lambda: Scripted(lambda p, i: [*p, i, STOP[0]])])
def test_what_every_sampler_keeps(make):
    """Groups side by side, one log-prob a token, `finished` only on a stop token, the pushed version."""
    sampler: Sampler = make()
    sampler.push(tiny.policy()[1], version=5)
    asked = prompts(3)
    made = sampler.generate(asked, n=4, sampling=SAMPLING)
    assert sampler.tolerance is None
    assert [list(one.prompt) for one in made] == [p for p in asked for _ in range(4)]
    for one in made:
        assert one.versions == (5, 5)
        assert 1 <= len(one.tokens) == len(one.logps) <= 24
        assert max(one.logps) <= 0
        assert one.finished == (one.tokens[-1] in STOP)
        assert one.finished or len(one.tokens) == 24


def test_where_tokens_are_slow_a_stop_is_looked_for_between_few(monkeypatch):
    """A response of minutes on a CPU would be one call to the devices, and its run lost to the grace period."""
    monkeypatch.setattr(engine(), "steps", 256)
    undisturbed = engine().generate(prompts(6), n=2, sampling=SAMPLING)
    now, calls, run = [0.0], [], engine()._run

    def slow(*arguments):
        result = run(*arguments)
        calls.append(int(result[2]))
        now[0] += calls[-1]  # a second a token
        return result

    monkeypatch.setattr(engine(), "_run", slow)
    monkeypatch.setattr(native.time, "perf_counter", lambda: now[0])
    assert engine().generate(prompts(6), n=2, sampling=SAMPLING) == undisturbed
    assert max(calls[1:]) <= native.CALL
    assert len(calls) > 5


@pytest.mark.parametrize(("seed", "temperature", "pack"), [(3, 0.7, False), (0, 1.0, True)])
def test_log_probs_are_those_of_the_newest_weights_in_the_trainer(seed, temperature, pack):
    params = tiny.policy(seed=seed)[1]
    engine().push(params, version=seed)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature, top_p=0.95, top_k=40)
    made = engine().generate(prompts(6), n=4, sampling=sampling)
    definition, _ = qwen2.graph(tiny.SHAPE)
    batch = Collator(prompt_length=20, response_length=24, pack=pack, round_to=4)(made)
    score = update.make_score(partial(logprobs.of_responses, definition, temperature=temperature))
    trainer = np.asarray(batch.layout.to_rows(score(params, batch.inputs)))
    mask = np.asarray(batch.mask)
    assert mask.sum() == sum(map(len, responses(made))) > 200
    np.testing.assert_allclose(np.asarray(batch.sampler_logp)[mask], trainer[mask], atol=1e-4)


def test_the_same_request_gives_the_same_tokens_in_any_company():
    """Alone, in another order, among longer prompts, in larger groups, in more slots: bit for bit."""
    asked = prompts(9)
    base = engine().generate(asked, n=2, sampling=SAMPLING)
    expected = {(tuple(p), i): (base[2 * k + i].tokens, base[2 * k + i].logps)
                for k, p in enumerate(asked) for i in range(2)}  # fmt: skip
    for slots, company, n in (
        (8, asked[::-1], 2), (8, asked[4:5], 2), (8, [[3] * 40, *asked[2:6]], 5), (16, asked, 2)
    ):  # fmt: skip
        made = engine(slots).generate(company, n=n, sampling=SAMPLING)
        for k, p in enumerate(company):
            for i in range(2):
                if (tuple(p), i) in expected:
                    got = made[n * k + i]
                    assert (got.tokens, got.logps) == expected[tuple(p), i]


def test_responses_differ_within_a_group_between_seeds_and_for_a_prompt_given_twice():
    prompt = prompts(1)[0]
    group = responses(engine().generate([prompt], n=6, sampling=SAMPLING))
    assert len({tuple(r) for r in group}) == 6
    other = dataclasses.replace(SAMPLING, seed=1)
    assert responses(engine().generate([prompt], n=6, sampling=other)) != group
    twice = responses(engine().generate([prompt, prompt], n=3, sampling=SAMPLING))
    assert twice == group


def test_a_stop_token_ends_the_response_and_belongs_to_it():
    """Every greedy token in turn is made the stop token: the response is cut right after its first one."""
    prompt = prompts(1)[0]
    endless = dataclasses.replace(GREEDY, stop=())
    [whole] = engine().generate([prompt], n=1, sampling=endless)
    assert not whole.finished
    assert len(whole.tokens) == 24
    for token in set(whole.tokens):
        [held] = engine().generate(
            [prompt], n=1, sampling=dataclasses.replace(endless, stop=(token,))
        )
        end = list(whole.tokens).index(token) + 1
        assert list(held.tokens) == list(whole.tokens[:end])
        assert list(held.logps) == list(whole.logps[:end])
        assert held.finished


def test_finished_rows_are_replaced_by_waiting_ones():
    """A long tail: 8 slots serve 96 responses in far fewer steps than 12 rounds of 8 would take."""
    sampling = dataclasses.replace(SAMPLING, stop=tuple(range(7, 17)))
    lengths = [*map(len, responses(engine().generate(prompts(12), n=8, sampling=sampling)))]
    rounds = sum(max(lengths[i : i + 8]) for i in range(0, 96, 8))
    counters = engine().counters
    assert counters["decode_steps"] < 0.75 * rounds
    assert counters["decode_steps"] <= sum(lengths) / 8 + 24
    every = dataclasses.replace(SAMPLING, stop=tuple(range(96)))
    first = responses(engine().generate(prompts(8), n=1, sampling=every))
    assert [*map(len, first)] == [1] * 8
    assert engine().counters["decode_steps"] == 1


def test_a_model_without_numbers_is_an_error():
    """Else the tokens are none of the vocabulary's."""
    made = engine.__wrapped__()
    made.push(jax.tree.map(lambda x: x * np.nan, tiny.policy()[1]), 2)
    with pytest.raises(UserError, match="log-probs that are not finite"):
        made.generate(prompts(2), n=1, sampling=SAMPLING)


def test_each_prompt_is_prefilled_once_for_its_group():
    asked = prompts(5)
    engine().generate(asked, n=8, sampling=SAMPLING)
    assert engine().counters["prefill_tokens"] == sum(map(len, asked))


def test_prompts_that_are_longer_than_planned_take_no_more_memory(monkeypatch):
    """They come last, in fewer slots; a test has such."""
    made, caches, read, plain = engine(), [], [], engine()._empty
    prefill = made._prefill
    asked = [*prompts(3, longest=17), [5, 3] * 50, *prompts(2, seed=1, longest=17)]
    expected = responses(made.generate(asked, n=3, sampling=SAMPLING))
    monkeypatch.setattr(made, "prompt_length", 16)
    monkeypatch.setattr(made, "_empty", lambda *size: caches.append(size) or plain(*size))
    noted = lambda params, tokens, lengths: (
        read.append(tokens.shape) or prefill(params, tokens, lengths)
    )
    monkeypatch.setattr(made, "_prefill", noted)
    assert responses(made.generate(asked, n=3, sampling=SAMPLING)) == expected
    assert caches == [(8, 16 + 24), (2, 128 + 24)]
    assert {*read} == {(4, 16), (1, 128)}
    assert made.counters["left"] == 0
    assert made.counters["prefill_tokens"] == sum(map(len, asked))


def test_it_compiles_once_for_each_bucket():
    made = engine(8, together=3)
    for seed in range(3):
        made.generate(prompts(7, seed, longest=14), n=2, sampling=SAMPLING)
    programs: Any = (made._run, made._insert, made._prefill)
    sizes = [f._cache_size() for f in programs]
    other = dataclasses.replace(SAMPLING, temperature=0.6, seed=7)
    made.generate(prompts(30, 9, longest=14), n=1, sampling=other)
    assert sizes == [f._cache_size() for f in programs]


def test_a_mesh_of_eight_gives_the_tokens_of_one_device():
    one = engine().generate(prompts(6), n=2, sampling=GREEDY)
    mesh = tiny.mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        generator = ScannedGenerator(qwen2.graph(tiny.SHAPE)[0], 16, mesh)
        made = NativeSampler(generator, slots=8, prefill_prompts=4)
        made.push(tiny.policy(mesh=mesh)[1], 0)
        eight = made.generate(prompts(6), n=2, sampling=GREEDY)
    assert responses(one) == responses(eight)
    for a, b in zip(one, eight, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)


def test_it_runs_under_a_transfer_guard():
    ready = engine()
    with jax.transfer_guard("disallow"):
        made = ready.generate(prompts(3), n=2, sampling=SAMPLING)
    assert len(made) == 6


@pytest.mark.parametrize("bad", [{"asked": []}, {"asked": [[1], []]}, {"asked": [[1]], "n": 0}])
def test_nothing_to_do_is_an_error(bad):
    with pytest.raises(UserError, match="at least one prompt"):
        engine().generate(bad["asked"], n=bad.get("n", 1), sampling=SAMPLING)


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": 1e-39}, {"top_k": -1}, {"max_tokens": 0},
     {"seed": -1}, {"seed": 2**32}],
)  # fmt: skip
def test_sampling_out_of_range_is_an_error(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("count", [tiny.slow(6), pytest.param(50, marks=pytest.mark.long)])
def test_greedy_equals_transformers_on_a_real_model(tmp_path, count):
    """Prompts of different lengths, token for token."""
    folder = peer.real_model(tmp_path / "model")
    shape = hf.load_shape(folder)
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, shape.vocab_size, rng.integers(4, 60)).tolist() for _ in range(count)]
    (folder / "prompts.json").write_text(json.dumps({"prompts": asked, "new": 24}))
    peer.transformers("greedy", folder)
    definition, _ = qwen2.graph(shape)
    made = NativeSampler(
        ScannedGenerator(definition, 128, tiny.mesh_of()), slots=count, prefill_prompts=4
    )
    made.push(hf.load(folder, shape, tiny.mesh_of()), 0)
    greedy = made.generate(asked, n=1, sampling=Sampling(temperature=0.0, max_tokens=24))
    assert responses(greedy) == json.loads((folder / "greedy.json").read_text())


@functools.cache
def unrolled(devices, share):
    """The engine as on accelerators, on so many devices."""
    mesh = tiny.mesh_of(1, devices, 1)
    generator = UnrolledGenerator(qwen2.graph(tiny.SHAPE)[0], mesh_of_copies(mesh, share))
    made = NativeSampler(generator, slots=6, prefill_prompts=3)
    with jax.set_mesh(mesh):
        made.push(tiny.policy(mesh=mesh)[1], 1)
    return made


@pytest.mark.parametrize(
    ("devices", "share", "sampling"),
    [
        pytest.param(1, 1, GREEDY, id="greedy on one"),
        pytest.param(8, 4, SAMPLING, id="sampled on eight"),
        tiny.slow(2, 1, SAMPLING, id="sampled on two"),
    ],
)
def test_accelerators_give_the_tokens_of_a_cpu(devices, share, sampling):
    """Whatever holds the weights and the slots; prompts and responses beyond the first 256 columns."""
    sampling = dataclasses.replace(sampling, max_tokens=300)
    asked = [*prompts(5), [3, 1] * 100]
    expected = engine().generate(asked, n=2, sampling=sampling)
    made = unrolled(devices, share)
    got = made.generate(asked, n=2, sampling=sampling)
    assert responses(got) == responses(expected)
    assert max(map(len, responses(got))) > 56
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-4)
    assert made.slots % devices == made.prefill_prompts % devices == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(made.params))


def test_copies_of_weights_that_no_device_count_divides():
    """They lie whole on the trainer's mesh and on that of the copies, and move to the latter."""
    shape = tiny.shape(vocab_size=97, hidden_size=16)
    answers = []
    for devices, share in ((1, 1), (6, 3)):
        mesh = tiny.mesh_of(1, devices, 1)
        generator = ScannedGenerator(qwen2.graph(shape)[0], 16, mesh_of_copies(mesh, share))
        made = NativeSampler(generator, slots=6, prefill_prompts=6)
        with jax.set_mesh(mesh):
            made.push(tiny.policy(shape, mesh=mesh)[1], 1)
        answers.append(made.generate(prompts(3), n=2, sampling=GREEDY))
    assert responses(answers[0]) == responses(answers[1])


def test_a_longer_prompt_within_its_power_of_two_compiles_nothing():
    """The cache is allocated by that, not by the longest prompt at hand."""
    made = unrolled(1, 1)
    programs: Any = (made._run, made._insert, made._prefill)
    sampling = dataclasses.replace(SAMPLING, max_tokens=200)
    made.generate([[5] * 130], n=1, sampling=sampling)
    before = [f._cache_size() for f in programs]
    for length in (129, 200, 256):
        made.generate([[5] * length], n=1, sampling=sampling)
    assert [f._cache_size() for f in programs] == before


def test_what_an_accelerator_answered_before_changes_no_program(monkeypatch):
    """Their numbers depend on the size of the cache, and a resumed run has another past."""
    made, columns = unrolled(1, 1), []
    empty = made._empty
    monkeypatch.setattr(made, "_empty", lambda *args: (columns.append(args[1]), empty(*args))[1])
    sampling = dataclasses.replace(SAMPLING, max_tokens=2)
    for length in (20, 600, 20):
        made.generate([[5] * length], n=1, sampling=sampling)
    assert columns[0] == columns[2] < columns[1]


def test_a_process_has_its_devices_share_of_the_slots(monkeypatch):
    whole = tiny.mesh_of(8)
    definition, _ = qwen2.graph(tiny.SHAPE)
    make = lambda: NativeSampler(UnrolledGenerator(definition, whole), slots=20, prefill_prompts=12)
    assert (make().slots, make().prefill_prompts) == (24, 16)
    here = jax.sharding.Mesh(whole.devices[:2], whole.axis_names)
    monkeypatch.setattr(native, "own_copies", lambda mesh: here)
    assert (make().slots, make().prefill_prompts) == (6, 4)


@pytest.mark.parametrize("make", [engine, lambda: unrolled(1, 1)], ids=["cpu", "accelerator"])
def test_released_weights_are_gone_until_the_next_push(make):
    made = make()
    made.release()
    assert made.params is None
    with pytest.raises(UserError, match="push"):
        made.generate([[1]], n=1, sampling=SAMPLING)
    made.push(tiny.policy()[1], 2)
    assert made.generate([[1]], n=1, sampling=SAMPLING)[0].versions == (2, 2)


RELEASED = """
import jax
import jax.numpy as jnp
from tests.rollouts.test_native import engine

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

sampler = engine()
jnp.ones(24 << 18).block_until_ready()  # malloc keeps what is smaller from here on
arrays = [jax.block_until_ready(jnp.ones(2 << 18)) for _ in range(200)]
sampler.params, others = [x for i, x in enumerate(arrays) if i % 10], arrays[::10]
del arrays
before = resident()
sampler.release()
print((before - resident()) // 1024)
"""


def test_on_a_cpu_released_weights_are_the_system_s_again():
    command = [sys.executable, "-c", RELEASED]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 300, "of 360 MiB"
