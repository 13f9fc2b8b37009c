"""Tokens go to the experts that the sampler sent them to, also where the trainer's router would choose others."""

import base64
import dataclasses
import functools
import io
import json
import math
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.config import Config, Evaluation, Scratch
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import groups, update
from jaxrl_llm.learning.batch import Collator
from jaxrl_llm.learning.groups import Group
from jaxrl_llm.models import logprobs, qwen2
from jaxrl_llm.models.generation import ScannedGenerator, UnrolledGenerator
from jaxrl_llm.models.policy import Policy, mesh_of_copies
from jaxrl_llm.objectives import Objective, advantages
from jaxrl_llm.reward import Reward
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.training import run, terminal
from jaxrl_llm.training import tokens as kept_tokens
from tests import tiny
from tests.rollouts.fake_vllm import Fake, as_generated, completion, experts_of
from tests.rollouts.test_turns import SAMPLING, Beginning, Random, Warmer, hidden, prompts
from tests.rollouts.test_vllm import PROMPTS, WEIGHTS, ready

ROUTER = {"family": "qwen3_moe", "biases": (), "norms_of_heads": True}
ROUTED = ("qwen3_moe", "qwen3_5_moe", "gemma4 with experts")


def array(x):
    """As vLLM sends it."""
    written = io.BytesIO()
    np.save(written, x, allow_pickle=x.dtype == object)
    return base64.b64encode(written.getvalue()).decode()


def routers(path):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.endswith(("mlp/gate/weight", "router/proj/weight"))


@functools.cache
def policy(name):
    """`(definition, params)`: experts are nearly as likely as each other, so that noise chooses others."""
    _, params = tiny.policy(tiny.FAMILIES[name])
    scale = lambda path, x: 1e-2 * x if routers(path) else x
    return qwen2.graph(tiny.FAMILIES[name])[0], jax.tree_util.tree_map_with_path(scale, params)


def noisy(params, scale=1e-3):
    """The parameters with noise in the routers' weights."""
    draw = np.random.default_rng(0).normal
    add = lambda path, x: x + scale * draw(size=x.shape) if routers(path) else x
    return jax.tree_util.tree_map_with_path(add, params)


def sampler(name, devices=(1, 1, 1), *, static=False, routed=True):
    definition, params = policy(name)
    mesh = mesh_of_copies(tiny.mesh_of(*devices), 1)
    if static:
        made = UnrolledGenerator(definition, mesh, routed=routed)
    else:
        made = ScannedGenerator(definition, 16, mesh, routed=routed)
    sampler = NativeSampler(made, slots=8, prefill_prompts=4, steps=10)
    sampler.push(params, 1)
    return sampler


def scored(name, params, batch):
    """The trainer's log-probs in `[B,T]`."""
    score = update.make_score(partial(logprobs.of_responses, policy(name)[0]))
    return np.asarray(batch.layout.to_rows(score(params, batch.inputs)))


def gaps(name, params, trajectories, **how):
    """The largest distance between the trainer's log-probs and the sampler's, with the experts and without."""
    collate = Collator(prompt_length=60, response_length=40, round_to=8, **how)
    plain = [dataclasses.replace(one, experts=()) for one in trajectories]
    for some in (trajectories, plain):
        batch = collate(some)
        gap = np.abs(scored(name, params, batch) - batch.sampler_logp)[np.asarray(batch.mask)]
        yield float(gap.max())


def alike(episodes, others):
    return len(episodes) == len(others) and all(
        one.tokens == other.tokens and all(map(np.array_equal, one.experts, other.experts))
        for one, other in zip(episodes, others, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "static"),
    [
        (ROUTED[0], False),
        tiny.slow(ROUTED[1], True),
        tiny.slow(ROUTED[0], True),
        tiny.slow(ROUTED[1], False),
        tiny.slow(ROUTED[2], False),
        tiny.slow(ROUTED[2], True),
    ],
)
def test_a_noisy_router_is_followed_only_by_a_replay(name, static):
    """Sampler and trainer differ by noise in the router, as they do by rounding."""
    made = sampler(name, static=static).generate(prompts(12), n=2, sampling=SAMPLING)
    shape = tiny.FAMILIES[name]
    for one in made:
        [experts] = one.experts
        assert experts.shape == (
            len(one.prompt) + len(one.tokens) - 1, shape.num_layers, shape.mixture.chosen,
        )  # fmt: skip
        assert 0 <= experts.min() <= experts.max() < shape.mixture.experts
        assert (np.diff(np.sort(experts, -1), axis=-1) > 0).all()
    params = policy(name)[1]
    replayed, free = gaps(name, params, made)
    assert max(replayed, free) < 1e-4  # the same weights
    replayed, free = gaps(name, noisy(params), made)
    assert free > 0.02
    assert replayed < free / 20


def test_experts_are_those_of_the_training_forward():
    """Each token's, of prompts and of responses, in packed rows and padded ones."""
    name = "qwen3_moe"
    definition, params = policy(name)
    made = sampler(name).generate(prompts(6), n=2, sampling=SAMPLING)
    seen = []

    def watching(logits, mixture, replayed=None):
        chosen, weights = choice(logits, mixture, replayed)
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), chosen, ordered=True)
        return chosen, weights

    choice, qwen2.choice = qwen2.choice, watching
    try:
        longest = max(len(one.prompt) + len(one.tokens) for one in made)
        for one in made:
            sequence = [*one.prompt, *one.tokens]
            sequence = jnp.asarray(sequence + [0] * (longest - len(sequence)))[None]
            model = qwen2.nnx.merge(definition, params)
            seen.clear()
            model(sequence, jnp.arange(longest)[None])
            jax.effects_barrier()
            every = np.stack([layer[0] for layer in seen], 1)
            np.testing.assert_array_equal(one.experts[0], every[: len(one.experts[0])])
    finally:
        qwen2.choice = choice


@pytest.mark.parametrize(
    ("devices", "pack"),
    [
        ((2, 2, 2), True),
        *(tiny.slow((n,) * 3, pack) for n, pack in ((1, False), (1, True), (2, False))),
    ],
)
def test_a_step_learns_with_the_sampler_s_experts(devices, pack):
    """The update of one device and of eight; experts get gradients, and so does the router."""
    name = "qwen3_moe"
    made = sampler(name).generate(prompts(4), n=2, sampling=SAMPLING)
    definition, params = policy(name)
    params = noisy(params)
    collate = Collator(prompt_length=12, response_length=40, pack=pack, shards=devices[0] * 2)
    mesh = tiny.mesh_of(*devices)
    reward = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [0.0, 0.25]])
    logp = partial(logprobs.of_responses, definition)

    def change(trajectories, mesh):
        with jax.set_mesh(mesh):
            _, shapes = qwen2.graph(tiny.FAMILIES[name])
            here = jax.device_put(params, tiny.sharding.param_shardings(shapes, mesh))
            batch = update.place(collate(trajectories), mesh)
            how = {"objective": tiny.objective(), "optimizer": optax.sgd(1.0)}
            state, _ = tiny.run_step(logp, jax.tree.map(jnp.copy, here), batch, reward, **how)
            return jax.tree.map(lambda a, b: np.asarray(b) - np.asarray(a), params, state.params)

    ours = change(made, mesh)
    plain = change([dataclasses.replace(one, experts=()) for one in made], mesh)
    assert np.abs(ours["layers"]["mlp"]["gate"]["weight"]).max() > 1e-4
    distance = lambda a, b: max(jax.tree.leaves(jax.tree.map(lambda x, y: abs(x - y).max(), a, b)))
    assert distance(ours, plain) > 1e-3
    assert distance(ours, change(made, tiny.mesh_of())) < 1e-4


@pytest.mark.parametrize(
    ("name", "make", "asked"),
    [
        (ROUTED[0], Random, prompts(10)),
        tiny.slow(ROUTED[0], Beginning, hidden(10)),
        tiny.slow(ROUTED[1], Random, prompts(10)),
        tiny.slow(ROUTED[1], Beginning, hidden(10)),
    ],
)
def test_episodes_have_their_experts_a_context_each(name, make, asked):
    """With replies, new contexts, late environments, and hidden prompts."""
    made = sampler(name).generate(asked, n=2, sampling=SAMPLING, reply=make())
    assert max(len(one.segments) for one in made) > 1
    for one in made:
        read = [len(prompt) + end - start - 1 for prompt, start, end in one.segments]
        assert [len(experts) for experts in one.experts] == read
        assert all((experts >= 0).all() for experts in one.experts)
    replayed, free = gaps(name, noisy(policy(name)[1]), made, pack=True)
    assert replayed < free / 20
    late = sampler(name).generate(asked, n=2, sampling=SAMPLING, reply=make(late=0.02))
    assert alike(late, made)


def test_keeping_experts_changes_no_bit():
    for static in (False, True):
        made = [
            sampler("qwen3_moe", static=static, routed=routed).generate(
                prompts(9), n=2, sampling=SAMPLING
            )
            for routed in (True, False)
        ]
        assert made[0] == made[1]
        assert all(one.experts for one in made[0])
        assert not any(one.experts for one in made[1])


@pytest.mark.slow
def test_eight_devices_keep_the_same_experts():
    made = [
        sampler("qwen3_moe", devices).generate(prompts(9), n=2, sampling=SAMPLING)
        for devices in ((1, 1, 1), (8, 1, 1))
    ]
    assert alike(*made)


@pytest.mark.slow
def test_a_reference_and_a_teacher_choose_for_themselves():
    name = "qwen3_moe"
    made = sampler(name).generate(prompts(4), n=2, sampling=SAMPLING)
    definition, params = policy(name)
    graded = [
        dataclasses.replace(one, reward=Reward(i % 2, i % 2 == 1)) for i, one in enumerate(made)
    ]
    parts = tiny.groups(graded)
    optimizer = optax.sgd(0.1)
    state = update.init_state(jax.tree.map(jnp.copy, params), optimizer)
    asked = []

    def teacher(inputs):
        asked.append(inputs.experts)
        return jnp.zeros(inputs.target.shape), None

    step = tiny.step(
        Policy(definition), tiny.objective(), optimizer,
        Collator(prompt_length=12, response_length=40), tiny.mesh_of(), state, reference=noisy(params),
        teacher=teacher,
    )  # fmt: skip
    batch, _ = step.batch(parts)
    assert batch.inputs.experts is not None
    found, _ = step.score(params, batch, parts)
    assert asked == [None]
    own = scored(name, noisy(params), batch._replace(inputs=batch.inputs._replace(experts=None)))
    ref = np.asarray(batch.layout.to_rows(found["ref_logp"]))
    np.testing.assert_allclose(ref, own, atol=1e-6)


def test_experts_survive_a_checkpoint_and_the_way_to_other_processes():
    made = sampler("qwen3_moe").generate(prompts(3), n=2, sampling=SAMPLING, reply=Random())
    parts = [Group(None, tuple(made[i : i + 2])) for i in (0, 2, 4)]
    for back in (groups.unpack(groups.pack(parts)), groups.from_note(groups.noted(parts))):
        for part, other in zip(parts, back, strict=True):
            for one, same in zip(part.trajectories, other.trajectories, strict=True):
                assert all(map(np.array_equal, one.experts, same.experts))
                assert len(one.experts) == len(same.experts)


def test_mixtures_alone_are_routed():
    mesh = tiny.mesh_of()
    for name in (*ROUTED, "qwen2"):
        made = Policy(qwen2.graph(tiny.FAMILIES[name])[0])
        generator = made.generator(mesh, block=16, routed=True)
        assert generator.routed == (name != "qwen2")


def replaying(fake, root):
    made = ready(fake, root=root)
    made.servers[0].experts = (3, 2, 8)
    return made


def read_by_the_server(one):
    """The experts of each context of a response, by the stand-in."""
    for prompt, start, end in one.segments:
        yield experts_of([*prompt, *one.tokens[start:end]][:-1])


def test_a_server_tells_experts(tmp_path):
    """In turns and contexts; what is asked for and sampled is the same as without."""
    with Fake() as fake, Fake() as other:
        made = replaying(fake, tmp_path / "a")
        plain = ready(other, root=tmp_path / "b")
        for every, reply in ((PROMPTS, type(None)), (prompts(8), Random), (hidden(8), Beginning)):
            asked = [type(one)(token % 50 for token in one) for one in every]
            replies = reply(), reply()
            responses = [
                sampler.generate(asked, n=2, sampling=SAMPLING, reply=reply)
                for sampler, reply in zip((made, plain), replies, strict=True)
            ]
            assert responses[0] == responses[1]
            for one in responses[0]:
                assert all(map(np.array_equal, one.experts, read_by_the_server(one)))
                assert len(one.experts) == len(one.segments)
        assert fake.calls["/inference/v1/generate"] > 50


def test_experts_of_an_interrupted_response_are_those_of_all_its_parts(tmp_path):
    with Fake() as fake:
        made = replaying(fake, tmp_path)
        fake.pace = 0.02
        [response] = made.submit([[1, 2, 3]], n=1, sampling=Sampling(max_tokens=30))
        while not fake.at_work:
            time.sleep(0.01)
        time.sleep(0.2)
        made.push(WEIGHTS, 8)
        [one] = made.wait([response])
        assert one.versions == (7, 8)
        assert all(map(np.array_equal, one.experts, read_by_the_server(one)))
        assert len(one.experts) == 1


def telling(experts, answers):
    """A fault: so many answers come with these experts."""

    def fault(path, body, number):
        if path != "/inference/v1/generate" or number > answers:
            return None
        asked = body["sampling_params"] | {"prompt": body["token_ids"]}
        answer = as_generated(completion(asked), asked["prompt"])
        answer["choices"][0]["routed_experts"] = experts
        return 200, json.dumps(answer).encode()

    return fault


@pytest.mark.parametrize("routed", [True, False])
def test_a_server_without_experts_is_one_line(routed, tmp_path):
    missing = lambda path, *_: (404, b"{}") if path == "/inference/v1/generate" else None
    with Fake(fault=telling(None, math.inf) if routed else missing) as fake:
        made = replaying(fake, tmp_path)
        with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
            made.generate(PROMPTS, n=1, sampling=SAMPLING)


@pytest.mark.parametrize(
    "experts",
    ["no base64", base64.b64encode(b"no array").decode(), array(np.zeros((2, 3, 2), int)),
     array(np.zeros((9, 3), int)), array(np.zeros((9, 3, 2))), array(np.zeros((9, 4, 2), int)),
     array(np.full((9, 3, 2), 8)), array(np.full((9, 3, 2), -1)), array(np.asarray([{}] * 9))],
)  # fmt: skip
def test_experts_that_are_none_are_asked_for_again(experts, tmp_path):
    with Fake(fault=telling(experts, 1)) as fake:
        made = replaying(fake, tmp_path)
        [one] = made.generate([[1, 2]], n=1, sampling=Sampling(max_tokens=8))
        assert np.array_equal(one.experts[0], experts_of([1, 2, *one.tokens][:-1]))
        assert made.counters["retries"] == 1


@pytest.mark.slow
def test_a_run_replays_and_its_page_of_tokens_knows(tmp_path):
    """In turns. Before the first update experts are the same without, as sampler and trainer are alike."""
    shape = qwen2.Shape(16, 32, 64, 2, 2, 1, tied=False, mixture=qwen2.MoE(4, 2, 16), **ROUTER)
    configs = [
        Config(
            task=lambda folder: Warmer(),
            model=Scratch(shape, (*map(str, range(10)), "next")),
            objective=Objective(advantage=advantages.by_turn),
            optimizer=optax.sgd(0.1),
            collate=Collator(4, 24, round_to=8, minibatches=2),
            steps=2,
            prompts=2,
            group_size=4,
            sampling=Sampling(max_turns=3),
            engine=Native(slots=8, prefill_prompts=4, block=8, replay=replay),
            evaluation=Evaluation(every=0, validation=2),
        )
        for replay in (True, False)
    ]
    steps = []
    for i, config in enumerate(configs):
        folder = tmp_path / str(i)
        run.train(config, folder, session=run.Session(console=terminal.console(quiet=True)))
        steps.append([kept_tokens.read(folder, step) for step in (1, 2)])
    first, other = (one[0].numbers for one in steps)
    for name in ("old", "advantage"):
        np.testing.assert_allclose(first[name], other[name], atol=2e-3)
    assert (
        np.abs(first["moved"] - other["moved"]).max() > 0.1
    )  # once updated, routers choose others
