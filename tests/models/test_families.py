"""Every family of models against transformers, and each of its features broken on purpose."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import jaxrl_llm as jl
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import delta, families, hf, int8, lora, primitives, qwen2, tokenizer
from jaxrl_llm.models.qwen2 import LayerKind, MoE
from tests import tiny
from tests.reference import peer

SHAPES, LLAMA3, YARN = tiny.FAMILIES, tiny.LLAMA3, tiny.YARN
BROKEN = [  # a field of each feature, and what it would be without it
    ("qwen2", {"kinds": (LayerKind(1e6),)}),
    ("qwen3", {"norms_of_heads": False}),
    ("qwen3 with biases", {"kinds": (LayerKind(1e4),)}),
    ("qwen3 with biases", {"kinds": (dataclasses.replace(YARN, amplitude=1.0),)}),
    ("qwen3 with biases", {"kinds": (dataclasses.replace(YARN, ramp=None),)}),
    ("qwen3 with biases", {"kinds": (dataclasses.replace(YARN, ramp=(16.0, 1.0, 4096)),)}),
    ("qwen3 with biases", {"kinds": (dataclasses.replace(YARN, ramp=(32.0, 4.0, 4096)),)}),
    ("qwen3_moe", {"mixture": MoE(8, 1, 48)}),
    ("qwen3_moe", {"mixture": MoE(8, 2, 48, rescaled=False)}),
    ("llama", {"kinds": (LayerKind(1e4),)}),
    ("llama", {"kinds": (dataclasses.replace(LLAMA3, bands=None),)}),
    ("mistral", {"kinds": (LayerKind(1e4, 8),)}),
    ("smollm3", {"kinds": (LayerKind(2e6),)}),
    ("exaone4", {"norms_before": True}),
    ("exaone4", {"kinds": (*[dataclasses.replace(LLAMA3, window=6)] * 2, LLAMA3)}),
    ("gemma3", {"query_scalar": None}),
    ("gemma3", {"kinds": (LayerKind(1e4, 6), LayerKind(1e4, 6), LayerKind(1e6))}),
    ("gemma3", {"kinds": (LayerKind(1e6, 6), LayerKind(1e6, 6), LayerKind(1e6, None, 8.0))}),
    ("gemma3", {"activation": "silu"}),
    ("gemma3", {"norm_offset": False}),
    ("gemma3", {"scaled_embedding": False}),
    ("gemma4", {"kinds": (LayerKind(1e4, 7), LayerKind(1e5, None, 2.0, turned=4, head_size=32))}),
    ("gemma4", {"kinds": (LayerKind(1e4, 6), LayerKind(1e5, None, 2.0, head_size=32))}),
    ("gemma4", {"kinds": (LayerKind(1e4, 6), LayerKind(1e5, turned=4, head_size=32))}),
    ("gemma4", {"kinds": (LayerKind(1e4, 6), LayerKind(1e5, None, 2.0, turned=4))}),
    ("gemma4", {"shared_layers": 0, "shared_wide": False}),
    ("gemma4", {"shared_wide": False}),
    ("gemma4", {"per_layer": 0}),
    ("gemma4", {"layer_scalars": False}),
    ("gemma4", {"logit_cap": None}),
    ("gemma4", {"norm_values": False}),
    ("gemma4", {"query_scalar": None}),
    ("gemma4", {"norm_offset": True}),
    (
        "gemma4 of one product",
        {"kinds": (LayerKind(1e4, 6), LayerKind(1e4, 6), LayerKind(1e6, kv_heads=1))},
    ),
    ("gemma4 of one product", {"kinds": (LayerKind(1e4, 6), LayerKind(1e4, 6), LayerKind(1e6))}),
    ("qwen3_5", {"rotary_size": None}),
    ("qwen3_5", {"norm_offset": False}),
    ("qwen3_5", {"gated": False}),
    ("qwen3_5_moe", {"mixture": MoE(8, 2, 48, fused=True)}),
    ("qwen3_5_moe", {"mixture": MoE(8, 3, 48, shared=40, fused=True)}),
    ("gemma4 with experts", {"mixture": MoE(8, 2, 48, fused=True)}),
    ("gemma4 with experts", {"mixture": MoE(8, 1, 48, beside=True, fused=True)}),
]

back = lambda x, n: jnp.pad(x, ((0, 0), (n, 0), (0, 0)))[:, : x.shape[1]]
parts, silu = delta.GatedDelta._parts, jax.nn.silu
read = lambda self, x, out: self.out_proj(out.reshape(*x.shape[:2], -1))
RULE = {  # a part of Qwen3.5's layers, and what it would be without it
    "lengths of one": (delta, "_unit", lambda x: x),
    "a decay": (delta, "log_decay", lambda a, *_: 0 * a),
    "corrections": (delta, "inverse", lambda below: 0 * below + jnp.eye(64)[None, None, None]),
    "a convolution": (delta, "convolved", lambda x, w, *_: silu(x * w[:, 0, -1][None, None])),
    "its activation": (delta, "convolved", lambda x, w, *_: sum(
        back(x, i) * w[:, 0, -1 - i][None, None] for i in range(w.shape[-1])
    )),
    "rates": (delta.GatedDelta, "_parts", lambda *a: (*(p := parts(*a))[:4], jnp.ones_like(p[4]))),
    "a gate of what is read": (delta.GatedDelta, "_out", lambda self, x, out: read(self, x, self.norm(out))),
    "a norm of what is read": (delta.GatedDelta, "_out", lambda self, x, out: read(
        self, x, out * silu(self.in_proj_z(x).reshape(out.shape))
    )),
    "a gate of attention": (qwen2.SelfAttention, "out", lambda self, mixed, gate: self.o_proj(mixed)),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of random weights for each shape, with logits, entropies, gradient and a greedy answer."""
    there = tmp_path_factory.mktemp("families")
    for name, shape in SHAPES.items():
        _, params = tiny.policy(shape, seed=1)
        hf.export(params, shape, there / name)
        config = hf.read_config(
            there / name
        )  # yarn's factor of attention is not given, as in published configs
        config["rope_parameters"].pop("attention_factor", None)
        (there / name / "config.json").write_text(json.dumps(config))
        (there / name / hf.SUMS).unlink()
        size = (25 if shape.mixture else 3, 80 if shape.delta else 40)  # more than a chunk
        np.save(there / name / "tokens.npy", np.random.default_rng(0).integers(0, 96, size))
    peer.transformers("families", *(there / name for name in SHAPES))
    return there


def scores(folder, shape=None, mesh=(1, 1, 1), *, differentiate=True):
    """Log-probs of all tokens at each position, and the embedding's gradient of the labels' mean."""
    shape = shape or hf.load_shape(folder)
    definition, _ = qwen2.graph(shape)
    mesh = tiny.mesh_of(*mesh)
    with jax.set_mesh(mesh):
        params = hf.load(folder, hf.load_shape(folder), mesh)
        tokens = jnp.asarray(np.load(folder / "tokens.npy"))
        rows = len(tokens)
        tokens = jnp.pad(tokens, ((0, -rows % mesh.shape["fsdp"]), (0, 0)))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def mean(params):
            model = qwen2.nnx.merge(definition, params)
            logits = jnp.einsum("rld,vd->rlv", model(tokens, positions), model.head)
            logits = primitives.capped(logits, shape.logit_cap)
            logp = jax.nn.log_softmax(logits)[:rows]
            label = jnp.take_along_axis(logp[:, :-1], tokens[:rows, 1:, None], -1)
            return label.mean(), logp

        if not differentiate:
            return np.asarray(jax.jit(mean)(params)[1]), None
        gradient, logp = jax.jit(jax.grad(mean, has_aux=True))(params)
    return np.asarray(logp), np.asarray(gradient["embed_tokens"]["weight"])


DIVIDED = ("qwen2", "qwen3_moe", "qwen3_5")  # in the fast tier: products, experts, the delta rule


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, (1, 1, 1)) for name in SHAPES),
        *((pytest.param if name in DIVIDED else tiny.slow)(name, (2, 2, 2)) for name in SHAPES),
        *(tiny.slow(name, (1, 2, 2)) for name in SHAPES),
    ],
    ids=str,
)
def test_log_probs_and_gradients_are_those_of_transformers(folders, name, mesh):
    want = np.load(folders / name / "found.npz")
    logp, gradient = scores(folders / name, mesh=mesh)
    # these amplify rounding: between compilers and CPUs float32, transformers' too, is 0.6 to 4e-5 from
    # float64; without a part of a family it would be 1e-3 (below)
    limit = (
        1e-4 if name in ("gemma4", "qwen3_5", "qwen3_5_moe", "qwen3_5 of three layers") else 2e-5
    )
    np.testing.assert_allclose(logp, want["logp"], atol=limit)
    np.testing.assert_allclose(gradient, want["gradient"], atol=limit)
    entropy = lambda logp: -(np.exp(logp) * logp).sum(-1)
    np.testing.assert_allclose(entropy(logp), entropy(want["logp"]), atol=limit)


@pytest.mark.parametrize("name", [name for name in SHAPES if "moe" in name])
def test_a_router_chooses_as_transformers_does(folders, name):
    found, shape = np.load(folders / name / "found.npz"), SHAPES[name]
    gates = hf.Tensors(folders / name)
    assert found["inputs"].shape[:2] == (
        shape.num_layers,
        np.load(folders / name / "tokens.npy").size,
    )
    for i, (x, chosen) in enumerate(zip(found["inputs"], found["chosen"], strict=True)):
        logits = x @ gates.slice(f"model.layers.{i}.mlp.gate.weight")[:].T
        ours, _ = qwen2.choice(jnp.asarray(logits)[None], shape.mixture)
        np.testing.assert_array_equal(ours[0], chosen)


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.mixture])
def test_experts_are_products_however_files_have_them(name):
    """For 8 bits, and for optimizers of matrices."""
    shape = SHAPES[name]
    _, params = tiny.policy(shape, mesh=tiny.mesh_of())
    rounded = dataclasses.replace(shape, lora=qwen2.Lora(base="int8"))
    keep = lora.base_quantizer(rounded)
    axes = dict(
        jax.tree_util.tree_leaves_with_path(
            qwen2.matrices(params), is_leaf=lambda x: x is None or isinstance(x, tuple)
        )
    )
    experts = [
        (path, x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if ".experts." in jax.tree_util.keystr(path, simple=True, separator=".")
    ]
    each = 3 * shape.mixture.size * shape.hidden_size
    assert sum(x.size for _, x in experts) == each * shape.mixture.experts * shape.num_layers
    for path, x in experts:
        assert isinstance(keep(path, x), int8.Int8)
        assert axes[path] is not None
        assert np.prod([x.shape[i] for i in (*axes[path][0], *axes[path][1])]) == x[0, 0].size


@pytest.mark.parametrize(("name", "change"), BROKEN)
def test_without_a_feature_log_probs_are_others(folders, name, change, monkeypatch):
    shape = dataclasses.replace(SHAPES[name], **change)
    monkeypatch.setattr(hf, "load_shape", lambda _: shape)
    sizes = [jax.tree.map(lambda x: x.shape, qwen2.graph(one)[1]) for one in (shape, SHAPES[name])]
    if sizes[0] != sizes[1]:
        with pytest.raises(UserError, match=r"too many, first|has no tensor|has shape"):
            scores(folders / name)
        return
    logp, _ = scores(folders / name, differentiate=False)
    assert np.abs(logp - np.load(folders / name / "found.npz")["logp"]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("part", RULE)
def test_without_a_part_of_the_delta_rule_log_probs_are_others(folders, part, monkeypatch):
    monkeypatch.setattr(*RULE[part])
    logp, _ = scores(folders / "qwen3_5", differentiate=False)
    distance = np.abs(logp - np.load(folders / "qwen3_5" / "found.npz")["logp"]).max()
    assert distance > 1e-3


@pytest.mark.parametrize(
    "name",
    [(pytest.param if name in ("gemma4", "qwen3_5") else tiny.slow)(name) for name in SHAPES],
)
def test_a_greedy_answer_is_that_of_transformers(folders, name):
    words = [f"w{i}" for i in range(94)]
    tokenizer.of_words(words).save(folders / name)
    model = jl.load(folders / name)
    prompt = np.load(folders / name / "tokens.npy")[0, :9].tolist()
    [one] = jl.generate(model, [prompt], jl.Sampling(temperature=0.0, max_tokens=24, stop=(95,)))
    want = np.load(folders / name / "found.npz")["greedy"].tolist()
    assert one.tokens[:24] == want[: len(one.tokens)]
    assert len(one.tokens) == 24 or one.tokens[-1] == 95
    # the cache gives what a forward over all gives
    logps = jl.token_logps(model, [prompt + one.tokens])[0, 8:]
    np.testing.assert_allclose(one.logps, logps, atol=2e-5)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *families.PRESETS.values()])
def test_a_config_gives_the_shape_again(shape):
    """Also by the names that transformers 4 knows: it passes over `rope_parameters` without a word."""
    config = json.loads(json.dumps(families.config_of(shape, "float32")))
    assert families.shape_of(config) == shape
    if shape.family.startswith(("gemma4", "qwen3_5")):  # which it has not
        return
    del config["rope_parameters"]
    assert families.shape_of(config) == shape


@pytest.mark.parametrize("change", [{"norms_of_heads": True}, {"biases": ()},
                                    {"activation": "gelu"}, {"scaled_embedding": True}])  # fmt: skip
def test_a_shape_that_its_family_has_not_is_refused(change):
    shape = tiny.shape(**change)
    if change == {"activation": "gelu"}:  # which any family could have
        assert families.shape_of(families.config_of(shape, "float32")) == shape
        return
    with pytest.raises(UserError, match=f"no qwen2 has {next(iter(change))}"):
        families.config_of(shape, "float32")


PUBLISHED = [
    (
        {"model_type": "llama", "rope_theta": 500000.0, "hidden_size": 2048, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 16, "intermediate_size": 8192,
         "vocab_size": 128256, "rms_norm_eps": 1e-05, "tie_word_embeddings": True, "head_dim": 64,
         "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        "Llama-3.2-1B",
    ),
    (
        {"model_type": "qwen3", "rope_theta": 1000000, "hidden_size": 1024, "head_dim": 128,
         "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 28,
         "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
         "max_position_embeddings": 40960, "max_window_layers": 28, "use_sliding_window": False,
         "sliding_window": None, "attention_bias": False, "rope_scaling": None},
        "Qwen3-0.6B",
    ),
    (
        {"model_type": "gemma3_text", "hidden_size": 1152, "head_dim": 256, "num_attention_heads": 4,
         "num_key_value_heads": 1, "num_hidden_layers": 26, "intermediate_size": 6912,
         "vocab_size": 262144, "rope_theta": 1000000, "rope_local_base_freq": 10000,
         "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
         "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
         "attn_logit_softcapping": None, "final_logit_softcapping": None},
        "gemma-3-1b-it",
    ),
    (
        {"model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {}, "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "head_dim": 256, "num_attention_heads": 24,
            "num_key_value_heads": 4, "num_hidden_layers": 64, "intermediate_size": 17408,
            "vocab_size": 248320, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_value_head_dim": 128, "max_position_embeddings": 262144, "attn_output_gate": True,
            "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
                "partial_rotary_factor": 0.25, "rope_theta": 10000000}}},
        "Qwen3.5-27B",
    ),
    (
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {}, "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "head_dim": 256, "num_attention_heads": 16,
            "num_key_value_heads": 2, "num_hidden_layers": 40, "vocab_size": 248320, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "full_attention_interval": 4, "linear_num_value_heads": 32, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25,
                                "rope_theta": 10000000}}},
        "Qwen3.5-35B-A3B",
    ),
]  # fmt: skip


SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
PUBLISHED_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SMALL = {"vocab_size_per_layer_input": 96}
SPARSE = [  # what a config says beside its sizes
    *({"model_type": name} for name in families.FAMILIES if name != "gemma4_text"),
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2},
    {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "exaone4", "sliding_window": 9},
    {"model_type": "llama", "rope_scaling": LINEAR},
    {"model_type": "llama", "rope_scaling": LINEAR, "rope_theta": 7e5},
    {"model_type": "llama", "rope_parameters": LINEAR, "rope_theta": 7e5},
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": LINEAR},
    {"model_type": "qwen3_5_text", "full_attention_interval": 2, "partial_rotary_factor": 0.5},
    {"model_type": "qwen3_5_text", "layer_types": ["full_attention", "linear_attention"] * 2,
     "linear_conv_kernel_dim": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
    {"model_type": "qwen3_5_text", "rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}},
    {"model_type": "qwen3_5_text", "rope_scaling": LINEAR,
     "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    *({"model_type": name, "num_key_value_heads": None} for name in ("qwen2", "qwen3", "llama", "smollm3")),
    *({"model_type": name, "rope_scaling": PUBLISHED_YARN} for name in ("qwen2", "qwen3")),
    {"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}},
    {"model_type": "qwen2", "rope_scaling": PUBLISHED_YARN, "original_max_position_embeddings": 64},
    {"model_type": "gemma4_text", **SMALL, "head_dim": 16, "global_head_dim": 16},
    {"model_type": "gemma4_text", **SMALL, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
     "layer_types": ["sliding_attention", "full_attention"] * 2},
    {"model_type": "gemma4_text", **SMALL, "num_global_key_value_heads": 1},
    {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1,
     "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "sliding_window": 9,
     "layer_types": ["sliding_attention"] * 4, "use_bidirectional_attention": "vision",
     "rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e5},
                         "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3}}},
    {"model_type": "gemma3_text", "rope_scaling": LINEAR},
    {"model_type": "gemma3_text", "rope_parameters": LINEAR},
    {"model_type": "gemma3_text", "rope_local_base_freq": 7e3,
     "rope_scaling": {"rope_type": "linear", "factor": 2.0},
     "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e5}}},
]  # fmt: skip


@pytest.mark.parametrize("says", SPARSE, ids=str)
def test_absent_fields_mean_what_they_mean_for_transformers(says):
    """Which writes all fields out."""
    said = SIZES | json.loads(json.dumps(says))
    written = transformers.AutoConfig.for_model(**said).to_dict()
    ours, theirs = (families.shape_of(config) for config in (SIZES | says, written))
    wide = lambda shape: families._written_out(dataclasses.replace(shape, kinds=shape.distinct))
    assert wide(ours) == wide(theirs)


FOREIGN = [  # fields that a family has not
    ("llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}),
    ("llama", {"query_pre_attn_scalar": 48}),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}),
    ("qwen3_5", {"mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1}),
]


@pytest.mark.parametrize("name", [x for x in families.FAMILIES if x not in families.WHOLE])
def test_absent_sizes_mean_what_they_mean_for_transformers(name):
    """Of as many key-value heads as others, and of the length; those of larger Gemma 3 have neither, nor heads."""
    says = {"model_type": name} | (SMALL if name == "gemma4_text" else {})
    left_out = ["num_key_value_heads", "max_position_embeddings"]
    left_out += ["num_attention_heads"] * (name in families.GEMMAS) + ["vocab_size"] * (
        name == "gemma3_text"
    )
    sizes = {key: value for key, value in SIZES.items() if key not in left_out}
    sizes |= {} if name in families.GEMMAS else {"num_attention_heads": 32, "head_dim": 16}
    written = transformers.AutoConfig.for_model(**sizes, **says).to_dict()
    ours, theirs = (families.shape_of(config) for config in (sizes | says, written))
    for field in ("num_heads", "num_kv_heads", "max_length", "vocab_size"):
        assert getattr(ours, field) == getattr(theirs, field), field


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("qwen2", {"hidden_act": []}),
        ("qwen2", {"rope_scaling": {**PUBLISHED_YARN, "mscale": "x", "mscale_all_dim": 1.0}}),
        ("smollm3", {"no_rope_layers": -1}),
        ("gemma4", {"rope_parameters": {"full_attention": 3}}),
        ("gemma4", {"per_layer_config": {"full_attention": 3}}),
        ("llama", {"num_hidden_layers": 10**30}),
    ],
    ids=str,
)
def test_a_config_that_is_damaged_is_one_line(name, says):
    config = families.config_of(SHAPES[name], "float32") | says
    with pytest.raises(UserError, match=r"^config.json: "):
        families.shape_of(config)


@pytest.mark.parametrize("width", [88, 100, 74, 128])
def test_a_part_of_a_head_is_itself_again(width):
    for turned in range(2, width + 1, 2):
        assert int(width * families._share(turned, width)) == turned


@pytest.mark.parametrize(("name", "says"), FOREIGN)
def test_fields_of_other_families_say_nothing(name, says):
    config = families.config_of(SHAPES[name], "float32")
    assert families.shape_of(config | says) == SHAPES[name]


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_window_that_is_not_there_is_refused(name):
    config = families.config_of(SHAPES[name], "float32") | {"sliding_window": None}
    with pytest.raises(UserError, match="sliding layers without a window are not supported"):
        families.shape_of(config)


@pytest.mark.parametrize(("says", "said"), [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ({"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input 95 is not supported"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 cannot be"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers 6 cannot be"),
    ({"per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 16}}}, "per_layer_config is not"),
    ({"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope type 'longrope'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters without layer types"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling is not supported"),
], ids=str)  # fmt: skip
def test_what_of_gemma4_is_not_here_is_refused_by_name(says, said):
    config = families.config_of(SHAPES["gemma4"], "float32") | says
    with pytest.raises(UserError, match=said):
        families.shape_of(config)


@pytest.mark.parametrize(
    "scaling", [{"truncate": False}, {"beta_fast": 1, "beta_slow": 2}], ids=str
)
def test_what_of_yarn_is_not_here_is_refused_by_name(scaling):
    config = families.config_of(SHAPES["qwen3"], "float32") | {"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, **scaling,
    }}  # fmt: skip
    with pytest.raises(UserError, match=f"yarn.*{next(iter(scaling))}"):
        families.shape_of(config)


@pytest.mark.parametrize(("says", "said"), [
    ({"layer_types": ["sliding_attention"] * 4}, "layers of type 'sliding_attention'"),
    ({"linear_num_value_heads": 3}, "3 heads of values for 2 of keys"),
    ({"attn_output_gate": False}, "attn_output_gate is false"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "turns 3 numbers"),
], ids=str)  # fmt: skip
def test_what_of_qwen3_5_is_not_here_is_refused_by_name(says, said):
    config = families.config_of(SHAPES["qwen3_5"], "float32") | says
    with pytest.raises(UserError, match=said):
        families.shape_of(config)


@pytest.mark.parametrize(("config", "preset"), PUBLISHED, ids=[name for _, name in PUBLISHED])
def test_configs_as_they_are_published_are_the_presets(config, preset):
    assert families.shape_of(config) == families.PRESETS[preset]
