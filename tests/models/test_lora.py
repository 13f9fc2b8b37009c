"""Adapters: the law of their gradients, PEFT's forward and format, and the train step with a frozen base."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jl
from jaxrl_llm.cli import export
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.models import hf, int8, logprobs, lora, qwen2, sharding, tokenizer
from jaxrl_llm.models.primitives import merge_params
from tests import tiny
from tests.models.test_families import SHAPES
from tests.reference import peer

LORA = jl.Lora(rank=4, alpha=6.0)
SOME = jl.Lora(rank=3, alpha=6.0, targets=("q_proj", "o_proj", "down_proj"))
ADAPTED = ("qwen2", "qwen3", "llama", "mistral", "smollm3", "gemma3")
WHOLE = jl.Lora(rank=4, alpha=6.0, targets=(*qwen2.LINEAR, *qwen2.OF_DELTA))
MESHES = [(1, 1, 1), tiny.slow((2, 2, 2))]


def adapted(shape, one=LORA, **compute):
    """A policy with adapters, its parameters, and its policy without them."""
    shape = dataclasses.replace(shape, lora=one)
    policy, params = tiny.policy(shape, seed=1, **compute)
    plain, _ = tiny.policy(dataclasses.replace(shape, lora=None), **compute)
    return policy, params, plain


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    found = logprobs.of_sequences([rng.integers(0, 96, n).tolist() for n in (19, 24)], 2, 24)
    return jax.tree.map(jnp.asarray, found)


def without(params):
    """A tree without its adapters."""
    inner = {k: without(v) if isinstance(v, dict) else v for k, v in params.items()}
    return {k: v for k, v in inner.items() if k not in lora.ADAPTER}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("qwen2", SOME),
        *(
            tiny.slow(name, one)
            for one in (LORA, SOME)
            for name in ("qwen2", "qwen3", "gemma3")
            if (name, one) != ("qwen2", SOME)
        ),
        tiny.slow("gemma4", LORA),
        tiny.slow("qwen3_5", WHOLE),
    ],
)
def test_gradients_are_those_of_the_merged_model_projected(name, one, mesh):
    """dB = scale dW A' and dA = scale B' dW, in every layer and product."""
    policy, params, plain = adapted(SHAPES[name], one)
    mesh = tiny.mesh_of(*mesh)
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(2, 23)), jnp.float32)
    mean = lambda policy, p: (policy(p, inputs())[:, : weights.shape[1]] * weights).sum()
    with jax.set_mesh(mesh):
        whole = lora.merged(params, one)
        value, full = jax.jit(jax.value_and_grad(partial(mean, plain)))(whole)
        ours, found = jax.jit(jax.value_and_grad(partial(mean, policy)))(params)
    np.testing.assert_allclose(ours, value, rtol=1e-5)
    checked = set()

    def check(module, leaf, full, found):
        if "lora_A" not in leaf:
            for x in (x for x in leaf if isinstance(leaf[x], dict)):
                check(x, leaf[x], full[x], found[x])
            return
        n = leaf["weight"].shape[0]
        into = leaf["lora_A"]["weight"].ndim - 2
        dw = np.asarray(full["weight"])
        dw = dw.reshape(n, -1, np.prod(dw.shape[dw.ndim - into :]))
        a = np.asarray(leaf["lora_A"]["weight"]).reshape(n, one.rank, -1)
        b = np.asarray(leaf["lora_B"]["weight"]).reshape(n, -1, one.rank)
        da, db = (np.asarray(found[x]["weight"]) for x in lora.ADAPTER)
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5 * np.abs(dw).max())
        close(db.reshape(b.shape), one.scale * dw @ a.swapaxes(1, 2))
        close(da.reshape(a.shape), one.scale * b.swapaxes(1, 2) @ dw)
        checked.add(module)

    check("layers", params["layers"], full["layers"], found["layers"])
    assert checked == {*one.targets}


def test_new_adapters_change_nothing():
    shape = dataclasses.replace(tiny.SHAPE, lora=LORA)
    policy, _, plain = adapted(tiny.SHAPE)
    params = qwen2.init(shape, 3)
    np.testing.assert_array_equal(policy(params, inputs()), plain(without(params), inputs()))
    a, b = (params["layers"]["mlp"]["up_proj"][x]["weight"] for x in lora.ADAPTER)
    assert float(jnp.abs(a).max()) > 0 == float(jnp.abs(b).max())


OBJECTIVE = jl.recipes.dr_grpo(14)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_step_moves_adapters_as_optax_does_and_nothing_else(mesh):
    mesh, optimizer = tiny.mesh_of(*mesh), optax.adamw(1e-2, weight_decay=0.1)
    policy, params, _ = adapted(tiny.SHAPE)
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
    frozen, trained = without(params), lora.adapters(params)
    with jax.set_mesh(mesh):
        batch = update.place(tiny.collator(shards=4)(tiny.responses()), mesh)
        reward = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)
        old = update.make_score(policy)(merge_params(trained, frozen), batch.inputs)
        credited = update.make_credit(OBJECTIVE)(batch, reward, old_logp=old)
        state = update.init_state(jax.tree.map(jnp.copy, trained), optimizer)
        assert jax.tree.structure(state.opt_state[0].mu) == jax.tree.structure(trained)
        step = update.make_train_step(policy, OBJECTIVE, optimizer)
        after, visits = jax.block_until_ready(step(state, credited, frozen))
        every, _ = update.make_train_step(policy, OBJECTIVE, optax.sgd(1.0))(
            update.init_state(jax.tree.map(jnp.copy, params), optax.sgd(1.0)), credited
        )
    gradient = jax.tree.map(jnp.subtract, trained, lora.adapters(every.params))
    moves, _ = optimizer.update(gradient, optimizer.init(trained), trained)
    expected = optax.apply_updates(trained, moves)
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(visits["grad_norm"][0], optax.tree.norm(gradient), rtol=1e-4)
    assert not any(x.is_deleted() for x in jax.tree.leaves(frozen))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_base_in_8_bits_is_that_of_its_numbers(mesh):
    """Log-probs, gradients and answers are those of the widened weights; these are nearly the base's."""
    one = dataclasses.replace(SOME, base="int8")
    policy, params, _ = adapted(SHAPES["gemma3"], one)
    mesh = tiny.mesh_of(*mesh)
    params = jax.device_put(params, sharding.param_shardings(params, mesh))
    keep = lora.base_quantizer(dataclasses.replace(tiny.SHAPE, lora=one))
    small = jax.tree_util.tree_map_with_path(keep, lora.base_of(params))
    assert small["layers"]["mlp"]["up_proj"]["weight"].numbers.dtype == jnp.int8
    wide, added = int8.dequantize(small, jnp.float32), lora.adapters(params)
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(lora.base_of(params)), strict=True):
        assert float(jnp.abs(a - b).max()) <= float(jnp.abs(b).max()) / 253
    whole = lambda added, base: policy(merge_params(added, base), inputs()).sum()
    with jax.set_mesh(mesh):
        found, gradient = jax.jit(jax.value_and_grad(whole))(added, small)
        want, expected = jax.jit(jax.value_and_grad(whole))(added, wide)
        np.testing.assert_allclose(found, want, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        merged = lora.merged(merge_params(added, small), one)
        again = lora.merged(merge_params(added, wide), one)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), merged, again))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with adapters of ours, adapters of PEFT's, and PEFT's log-probs with both."""
    there = tmp_path_factory.mktemp("adapters")
    for name, shape in SHAPES.items():
        if name not in ADAPTED:
            continue
        _, params, _ = adapted(shape, LORA if name != "llama" else SOME)
        one = LORA if name != "llama" else SOME
        hf.export(without(params), shape, there / name)
        tokenizer.of_words([f"w{i}" for i in range(94)]).save(there / name)
        (there / name / "adapter_config.json").write_text(json.dumps(lora.config_of(one, "base")))
        lora.export(
            lora.adapters(params),
            there / name / "adapter",
            source=there / name,
            dtype="float32",
        )
        (there / name / "adapter_config.json").unlink()
        np.save(there / name / "tokens.npy", np.random.default_rng(0).integers(0, 96, (3, 40)))
    peer.transformers("adapters", *sorted(x for x in there.iterdir()))
    return there


@pytest.mark.parametrize("whose", ["ours", tiny.slow("theirs")])
@pytest.mark.parametrize(
    "name", [ADAPTED[0], *(pytest.param(one, marks=pytest.mark.long) for one in ADAPTED[1:])]
)
def test_log_probs_are_those_of_peft(folders, name, whose):
    adapter = folders / name / {"ours": "adapter", "theirs": "theirs"}[whose]
    tokens = np.load(folders / name / "tokens.npy")
    want = np.load(folders / name / "found.npz")[whose]
    label = np.take_along_axis(want[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    model = jl.load(folders / name, adapter=adapter)
    # one float32 step of a log-prob of -7 is 5e-7: a few of them are rounding
    close = partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-6)
    close(jl.token_logps(model, tokens), label)
    shape = hf.load_shape(folders / name)
    one, added = lora.load(adapter, shape, model.mesh)
    definition, _ = qwen2.graph(dataclasses.replace(shape, lora=one))
    base = jl.load(folders / name)
    beside = dataclasses.replace(
        base,
        params=merge_params(added, base.params),
        policy=dataclasses.replace(base.policy, definition=definition),
    )
    close(jl.token_logps(beside, tokens), label)
    assert np.abs(jl.token_logps(base, tokens) - label).max() > 1e-3
    [answer] = jl.generate(beside, [tokens[0, :9].tolist()], jl.Sampling(max_tokens=12, stop=(95,)))
    logps = jl.token_logps(beside, [tokens[0, :9].tolist() + answer.tokens])[0, 8:]
    np.testing.assert_allclose(answer.logps, logps, atol=2e-5)


def plain(tmp_path, **changes):
    """A folder with a config as PEFT writes it, but for these fields."""
    peft = {  # 0.21
        "task_type": None, "peft_type": "LORA", "auto_mapping": None, "peft_version": "0.21.2", "revision": None,
        "base_model_name_or_path": "base", "inference_mode": True, "r": 4, "target_modules": ["q_proj"],
        "exclude_modules": None, "lora_alpha": 8, "lora_dropout": 0.1, "fan_in_fan_out": False, "bias": "none",
        "use_rslora": False, "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None,
        "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": None,
        "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {}, "eva_config": None,
        "corda_config": None, "lora_ga_config": None, "use_dora": False, "velora_config": None,
        "alora_invocation_tokens": None, "use_qalora": False, "qalora_group_size": 16, "monteclora_config": None,
        "layer_replication": None, "lora_bias": False, "target_parameters": None, "use_bdlora": None,
        "arrow_config": None, "kasa_config": None, "ensure_weight_tying": False,
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft | changes))
    return tmp_path


def test_adapters_are_exported_where_a_base_is_named(tmp_path, monkeypatch):
    """`--base` says where parts for images are, of which adapters have none."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    plain(tmp_path / "run" / "model")
    tokenizer.of_words(["a"]).save(tmp_path / "run" / "model")
    shape = dataclasses.replace(tiny.SHAPE, lora=LORA)
    added = lora.adapters(tiny.policy(shape)[1])
    there = SimpleNamespace(path=tmp_path / "run", weights=lambda step: (1, shape, added))
    monkeypatch.setattr(export, "RunFolder", lambda run: there)
    monkeypatch.setattr(export.card, "write", lambda *_, **how: None)
    (tmp_path / "base").mkdir()
    export.main("run", str(tmp_path / "out"), base=str(tmp_path / "base"))
    assert lora.read_config(tmp_path / "out")[0].rank == 4
    shape, there.base = dataclasses.replace(shape, family="gemma4_text"), lambda: tmp_path / "base"
    (tmp_path / "base" / "config.json").write_text('{"model_type": "gemma4", "text_config": {}}')
    with pytest.raises(UserError, match=r"by other names: .*--merge --base"):
        export.main("run", str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "fine",
    [{}, {"init_lora_weights": "gaussian"}, {"init_lora_weights": False}, {"layers_pattern": "x"}],
    ids=str,
)
def test_plain_adapters_of_peft_are_read(tmp_path, fine):
    one, _ = lora.read_config(plain(tmp_path, **fine))
    assert one == jl.Lora(4, 8.0, ("q_proj",))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("init_lora_weights", x) for x in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")),
        ("alora_invocation_tokens", [5, 6]),
        ("use_qalora", True),
        *((name, {"x": 1}) for name in ("use_bdlora", "velora_config", "monteclora_config", "kasa_config")),
        *((name, {"x": 1}) for name in ("corda_config", "arrow_config", "loftq_config", "lora_ga_config")),
        ("a_field_of_next_year", True),
    ],
)  # fmt: skip
def test_adapters_that_change_the_numbers_otherwise_are_refused_by_name(tmp_path, name, value):
    with pytest.raises(UserError, match=f"{name} = .* is not supported"):
        lora.read_config(plain(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": "q.*"}, "must be a number, a number and a list of names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "not q_proj, lm_head"),
        ({"r": 0}, "r = 0 and lora_alpha"),
        ({"r": -1, "use_rslora": True}, "r = -1 and lora_alpha"),
        ({"r": 10**400, "use_rslora": True}, "must be above 0 and below 2"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf must be"),
        ({"r": 5}, "config"),
    ],
)
def test_adapters_that_are_not_ours_are_refused(folders, tmp_path, change, said):
    config = json.loads((folders / "qwen2" / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    there = folders / "qwen2" / "adapter" / "adapter_model.safetensors"
    (tmp_path / there.name).write_bytes(there.read_bytes())
    with pytest.raises(UserError, match=said):
        jl.load(folders / "qwen2", adapter=tmp_path)


def test_products_that_a_model_has_not_have_no_adapters():
    with pytest.raises(UserError, match=r"this model has no in_proj_qkv, .*: leave them out"):
        lora.shape_with_adapters(tiny.SHAPE, WHOLE)
    assert lora.shape_with_adapters(tiny.FAMILIES["qwen3_5"], WHOLE).lora == WHOLE
    keys_alone = tiny.shape(kinds=(qwen2.LayerKind(1e4, keys_as_values=True),))
    with pytest.raises(UserError, match="no layer of this model has v_proj"):
        lora.shape_with_adapters(keys_alone, lora.Lora(targets=("v_proj",)))


def test_experts_have_no_adapters():
    """By default attention alone has some then, so that `--lora` is for every model."""
    shape = tiny.FAMILIES["qwen3_moe"]
    with pytest.raises(UserError, match="no adapters of up_proj, down_proj: leave them"):
        lora.shape_with_adapters(shape, lora.Lora(targets=("q_proj", "up_proj", "down_proj")))
    attention = lora.Lora(targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    for given in (attention, lora.Lora()):
        assert lora.shape_with_adapters(shape, given).lora == attention
