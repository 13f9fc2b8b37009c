"""The exact proof: what vLLM's workers tell of their weights, against the trainer's own checksums.

The stand-in's workers run the code of the real ones, on layers cut, fused and padded as vLLM's are and on
numpy in place of torch.
"""

import dataclasses
import json
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.models.policy import Served
from jaxrl_llm.rollouts.vllm import client, serverside
from jaxrl_llm.rollouts.vllm.client import Server
from jaxrl_llm.rollouts.vllm.sampler import VllmSampler
from jaxrl_llm.rollouts.vllm.sync import WeightSync
from tests import tiny
from tests.rollouts.fake_vllm import LOGP, Fake

SHAPE = tiny.shape(tied=False)
LAYER = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight",
    *(f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
    *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
]  # fmt: skip
TENSORS = [
    "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
    *(f"model.layers.1.{name}" for name in LAYER),
]  # fmt: skip


class Tensor(np.ndarray):
    """What of torch the workers' code uses, on numpy."""

    device = "cpu"
    detach = contiguous = lambda self: self
    float = lambda self: tensor(np.ascontiguousarray(self, np.float32))


def tensor(x):
    return np.asarray(x).view(Tensor)


TORCH = SimpleNamespace(
    int32=np.int32,
    arange=lambda n, dtype, device: tensor(np.arange(n, dtype=dtype)),
    eye=lambda n, dtype: tensor(np.eye(n, dtype=dtype)),
)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", TORCH)
    monkeypatch.setattr(serverside, "BLOCK", 1000)  # so that every matrix comes in several
    monkeypatch.setattr(serverside, "CACHED", 300)
    monkeypatch.setattr(client, "REST", 0.01)


class VocabParallelEmbedding(SimpleNamespace):
    """Named as vLLM's: its rows are looked up, those of a head multiplied."""


class Model(SimpleNamespace):
    packed_modules_mapping = MappingProxyType({
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    })  # fmt: skip

    config = SimpleNamespace()

    def get_submodule(self, path):
        return self.modules[path]

    def named_buffers(self):
        for path, module in self.modules.items():
            if (found := getattr(module, "layer_scalar", None)) is not None:
                yield f"{path}.layer_scalar", tensor(found)

    def named_parameters(self, remove_duplicate):
        assert not remove_duplicate
        for path, module in self.modules.items():
            for kind in ("weight", "bias"):
                if (found := getattr(module, kind, None)) is not None:
                    yield f"{path}.{kind}", tensor(found)


def worker(held, rank=0, size=1, *, packed=False, quantized=None):
    """A worker of vLLM with its share of the tensors `held`."""
    shape, modules = SHAPE, {}
    copies = max(1, size // shape.num_kv_heads)
    part = lambda x, axis=0: np.split(x, size, axis)[rank]
    part_of_heads = lambda x: np.split(x, size // copies)[rank // copies]

    def matrix(weight, width, kind=SimpleNamespace, **more):
        own = {"output_size_per_partition": len(weight), "params_dtype": weight.dtype}
        if packed and kind is SimpleNamespace:  # as on a CPU: a copy in a closure
            own["cpu_linear"] = lambda x, _, bias, weight=weight: tensor(x @ weight.T)
            weight = weight[:0] if "shard_indices" not in more else weight * 0
        return kind(
            weight=weight, input_size=width, input_size_per_partition=own_width(width, more),
            tp_rank=rank, **own, **more,
        )  # fmt: skip

    own_width = lambda width, more: width // size if more.pop("by_columns", False) else width

    def vocabulary(weight, kind):
        rows = -(-len(weight) // 64) * 64 // size
        first, last = (min(end * rows, len(weight)) for end in (rank, rank + 1))
        mine = np.full((rows, weight.shape[1]), 3, weight.dtype)  # padding, which is not compared
        mine[: last - first] = weight[first:last]
        indices = SimpleNamespace(num_org_elements=last - first, org_vocab_start_index=first)
        return matrix(mine, weight.shape[1], kind, shard_indices=indices)

    def fused(layer, names, width, cut):
        parts = {
            kind: [cut[name](held[f"{layer}.{name}.{kind}"]) for name in names]
            for kind in ("weight", "bias")
            if f"{layer}.{names[0]}.{kind}" in held
        }
        sizes = [len(x) for x in parts["weight"]]
        made = matrix(np.concatenate(parts["weight"]), width, output_partition_sizes=sizes)
        made.bias = np.concatenate(parts["bias"]) if "bias" in parts else None
        return made

    wide, narrow = shape.intermediate_size, shape.hidden_size
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        cut = {"q_proj": part, "k_proj": part_of_heads, "v_proj": part_of_heads}
        modules[f"{attention}.qkv_proj"] = fused(attention, list(cut), narrow, cut)
        modules[f"{attention}.qkv_proj"].num_kv_head_replicas = copies
        cut = {"gate_proj": part, "up_proj": part}
        modules[f"{mlp}.gate_up_proj"] = fused(mlp, list(cut), narrow, cut)
        for path, width in ((f"{attention}.o_proj", narrow), (f"{mlp}.down_proj", wide)):
            modules[path] = matrix(part(held[f"{path}.weight"], 1), width, by_columns=True)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            modules[f"{layer}.{norm}"] = SimpleNamespace(weight=held[f"{layer}.{norm}.weight"])
    modules["model.norm"] = SimpleNamespace(weight=held["model.norm.weight"])
    table, head = (held[f"{x}.weight"] for x in ("model.embed_tokens", "lm_head"))
    modules["model.embed_tokens"] = vocabulary(table, VocabParallelEmbedding)
    modules["lm_head"] = vocabulary(head, SimpleNamespace)
    made = serverside.Extension()
    made.vllm_config = SimpleNamespace(quant_config=quantized)
    made.get_model = lambda: Model(modules=modules)
    return made


class Workers(Fake):
    """A server of `size` workers that tells checksums; it never reloads the tensors in `deaf`."""

    def __init__(self, started_with, *, size=1, deaf=(), harm=lambda rank, held: None, **how):
        self.held, self.size, self.deaf, self.harm = dict(started_with), size, deaf, harm
        self.how, self.told, self.asked = how, None, []
        super().__init__()

    def received(self, path, query, body):
        if path != serverside.EXTENSION:
            return super().received(path, query, body)
        asked = json.loads(body)
        if asked["method"] == "jaxrl_reload":
            return 200, json.dumps(self.route("/collective_rpc", asked)).encode()
        self.asked.append(asked.pop("method"))
        assert not asked
        if self.told is not None:
            return 200, json.dumps(self.told).encode()
        results = []
        for rank in range(self.size):
            held = {name: np.array(x) for name, x in self.held.items()}
            self.harm(rank, held)
            results.append(worker(held, rank, self.size, **self.how).jaxrl_checksums())
        return 200, json.dumps({"results": results}).encode()

    def route(self, path, body):
        if path == "/collective_rpc":
            self.asked.append(body["method"])
            for file in Path(body["kwargs"]["weights_path"]).glob("*.safetensors"):
                new = safetensors.numpy.load_file(file)
                self.held |= {k: v for k, v in new.items() if k not in self.deaf}
        return super().route(path, body)


class Sound(Served):
    """Served with log-probs that no weights change: as the probe sees it, the server is sound."""

    def score(self, params, sequences):
        return [np.full(len(s) - 1, LOGP) for s in sequences]


def weights(seed, mesh=None, shape=SHAPE):
    return tiny.policy(shape, seed=seed, mesh=mesh)[1]


def served(shape=SHAPE):
    return Sound(qwen2.graph(shape)[0])


def started_with(dtype="bfloat16"):
    return served().tensors(weights(0), dtype)


def sampler(fake, root, dtype="bfloat16", shape=SHAPE, patience=5.0):
    return VllmSampler(
        [Server(fake.url, "key", 120.0)],
        WeightSync(root, patience=patience),
        served(shape),
        dtype=dtype,
        concurrency=4,
    )


def pushed(fake, root, params, *how, **more):
    """The figures of a first sync of these parameters."""
    made = sampler(fake, root, *how, **more)
    made.push(params, 1)
    return made.sync


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sound_server_has_the_trainers_weights(tmp_path, size, dtype):
    """Of one worker or several, two of which share heads of keys and values; one has padding alone."""
    with Workers(started_with(dtype), size=size) as fake:
        figures = pushed(fake, tmp_path, weights(1), dtype)
        assert fake.asked == ["jaxrl_reload", "jaxrl_checksums"]
    assert figures["sync/proof"] == 1.0
    assert 0 < figures["sync/proof_seconds"] < 600


def test_log_probs_are_compared_once_a_start_where_checksums_prove_the_rest(tmp_path):
    probes = lambda: sum("prompt_logprobs" in body for body in fake.bodies)
    with Workers(started_with()) as fake:
        made = sampler(fake, tmp_path)
        made.push(weights(1), 1)
        assert probes() == 4
        assert made.sync["sync/difference"] == 0.0
        fake.logp -= 2  # what the comparison would see
        made.push(weights(2), 2)
        assert probes() == 4
        assert "sync/difference" not in made.sync
        assert made.sync["sync/proof"] == 1.0
        fake.label = "default"  # as after a new start
        with pytest.raises(UserError, match="differ from the trainer's"):
            made.push(weights(3), 3)


@pytest.mark.parametrize(("device", "kernel"), [("cpu", None), ("cuda:0", "kernel")])
def test_a_reload_packs_experts_anew_on_a_cpu(device, kernel):
    method = SimpleNamespace(moe_kernel="kernel")
    modules = [SimpleNamespace(quant_method=x) for x in (method, None)] + [SimpleNamespace()]
    made, found = serverside.Extension(), []
    made.device, made.get_model = device, lambda: SimpleNamespace(modules=lambda: modules)
    made.reload_weights = lambda weights_path: found.append((weights_path, method.moe_kernel))
    made.jaxrl_reload("folder")
    assert found == [("folder", kernel)]


NO_RELOAD = (
    "Call to collective_rpc method failed: Worker failed with error ''TPUWorker' object has no attribute "
    "'reload_weights'', please check the stack trace above for the root cause"
)


@pytest.mark.parametrize("route", [serverside.EXTENSION, "/collective_rpc"], ids=["ours", "theirs"])
def test_a_server_that_cannot_reload_is_refused_at_once(tmp_path, route):
    """As vLLM 0.32 says it, and ends; it would do the same when it is started again."""
    answer = 500, json.dumps({"error": {"message": NO_RELOAD, "code": 500}}).encode()
    with Fake(fault=lambda path, *_: answer if path == route else None) as fake:
        with pytest.raises(UserError, match=r"cannot reload .*TPUWorker.*use the Native engine"):
            pushed(fake, tmp_path, weights(1), patience=2.0)
        assert fake.calls[route] == 1


def test_it_may_multiply_by_packed_copies(tmp_path):
    with Workers(started_with("float32"), packed=True) as fake:
        assert pushed(fake, tmp_path, weights(1), "float32")["sync/proof"] == 1.0


def test_a_tied_model_is_served_untied(tmp_path):
    tied = tiny.shape(tied=True)
    config = served(tied).config("bfloat16")
    assert (config["tie_word_embeddings"], config["pad_token_id"]) == (False, None)
    with Workers(started_with()) as fake:
        assert pushed(fake, tmp_path, weights(1, shape=tied), shape=tied)["sync/proof"] == 1.0


def test_many_devices_have_the_checksums_of_one():
    params = {dtype: weights(1) for dtype in ("float32", "bfloat16")}
    mesh = tiny.mesh_of(2, 2, 2)
    for dtype, alone in params.items():
        together = weights(1, mesh)
        with jax.set_mesh(mesh):
            assert served().checksums(together, dtype) == served().checksums(alone, dtype)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_tensor_that_is_not_reloaded_is_named(tmp_path, name, size):
    with Workers(started_with(), size=size, deaf=(name,)) as fake:
        with pytest.raises(UserError, match="success, but 1 of its 27 tensors") as said:
            pushed(fake, tmp_path, weights(1))
        assert f": {name}: this vLLM" in str(said.value)
        assert not fake.label.endswith("-1") or fake.label.startswith("loading")


def flip(array, *places):
    """Another highest bit, the sign, of the numbers at these places."""
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    bits[list(places)] ^= bits.dtype.type(1 << (8 * array.itemsize - 1))


def exchange(array):
    flat = array.reshape(-1)
    flat[[3, 700]] = flat[[700, 3]]


HARMS = {
    "one bit": lambda x: np.bitwise_xor.at(x.reshape(-1).view("u2"), 77, np.uint16(1)),
    "a sign": lambda x: flip(x, 77),
    "two signs": lambda x: flip(x, 77, 1003),
    "all signs": lambda x: flip(x, *range(x.size)),
    "two exchanged": exchange,
    "two rows exchanged": lambda x: x.__setitem__([2, 5], x[[5, 2]]),
    "two columns exchanged": lambda x: x.T.__setitem__([2, 5], x.T[[5, 2]]),
    "row and column exchanged": lambda x: x[:16, :16].__setitem__(..., x[:16, :16].T.copy()),
    "a power of two": lambda x: x.__imul__(x.dtype.type(2)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("harm", [pytest.param(harm, id=name) for name, harm in HARMS.items()])
def test_every_bit_of_a_tensor_counts(tmp_path, harm, dtype):
    if dtype == "float32" and harm is HARMS["one bit"]:
        pytest.skip("two bytes are no number there")
    name = "model.layers.0.mlp.up_proj.weight"
    with (
        Workers(started_with(dtype), harm=lambda rank, held: harm(held[name])) as fake,
        pytest.raises(UserError, match=f"1 of its 27 tensors are not the trainer's: {name}:"),
    ):
        pushed(fake, tmp_path, weights(1), dtype)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.v_proj.bias"])
def test_every_copy_of_a_part_is_compared(tmp_path, name):
    """Each worker has the norms; of four, two share a head of values."""

    def harm(rank, held):
        if rank == 3:
            flip(held[name], 0, len(held[name]) - 1)

    with (
        Workers(started_with(), size=4, harm=harm) as fake,
        pytest.raises(UserError, match=f"1 of its 27 tensors .*: {name}:"),
    ):
        pushed(fake, tmp_path, weights(1))


def test_a_server_that_cannot_tell_is_probed(tmp_path):
    with Workers(started_with(), deaf=TENSORS, quantized=object()) as quantized, Fake() as plain:
        for fake in (quantized, plain):
            root = tmp_path / str(fake.port)
            root.mkdir()
            assert pushed(fake, root, weights(1))["sync/proof"] == 0.0


@pytest.mark.parametrize("told", [{}, {"results": [None]}, {"results": [{"a": [[0, "1"]]}]}])
def test_what_is_no_checksum_is_asked_for_again(tmp_path, told):
    with Workers(started_with()) as fake:
        fake.told = told
        with pytest.raises(UserError, match=r"for 0.3 s, last by: told no checksums"):
            pushed(fake, tmp_path, weights(1), patience=0.3)
        assert fake.calls[serverside.EXTENSION] > 1


@pytest.mark.parametrize("size", [1, 2])
def test_the_tensors_of_a_recurrence_are_told(size):
    """Fused, of one worker or of two, which share the heads of queries, keys and values."""
    shape = tiny.FAMILIES["qwen3_5"]
    params, sizes, layer = weights(1, shape=shape), shape.delta, "model.layers.2.linear_attn"
    held, want = (
        dict(f(params, "float32")) for f in (served(shape).tensors, served(shape).checksums)
    )
    keys, values = sizes.key_heads * sizes.key_size, sizes.heads * sizes.value_size
    parts = {
        "in_proj_qkv": (keys, keys, values),
        "conv1d": (keys, keys, values),
        "in_proj_z": (values,),
    }
    found = {}
    for rank in range(size):

        def cut(name, *, rank=rank):
            x = held[f"{layer}.{name}"]
            rows = parts.get(name.removesuffix(".weight"), (len(x),))
            return [np.split(y, size)[rank] for y in np.split(x, np.cumsum(rows)[:-1])]

        def fused(*names, cut=cut, rank=rank):
            some = [x for name in names for x in cut(f"{name}.weight")]
            width = some[0].shape[-1]
            return SimpleNamespace(
                weight=np.concatenate(some), output_partition_sizes=[*map(len, some)], tp_rank=rank,
                tp_size=size, input_size=width, input_size_per_partition=width,
            )  # fmt: skip

        own = {name: cut(name)[0] for name in ("A_log", "dt_bias")}
        own |= {"num_v_heads": sizes.heads, "key_dim": keys, "value_dim": values}
        out = np.split(held[f"{layer}.out_proj.weight"], size, 1)[rank]
        modules = {
            layer: SimpleNamespace(tp_rank=rank, tp_size=size, **own),
            f"{layer}.in_proj_qkvz": fused("in_proj_qkv", "in_proj_z"),
            f"{layer}.in_proj_ba": fused("in_proj_b", "in_proj_a"),
            f"{layer}.conv1d": fused("conv1d"),
            f"{layer}.norm": SimpleNamespace(weight=held[f"{layer}.norm.weight"]),
            f"{layer}.out_proj": SimpleNamespace(
                weight=out, tp_rank=rank, input_size=values, input_size_per_partition=values // size
            ),
        }
        made = serverside.Extension()
        made.vllm_config = SimpleNamespace(quant_config=None)
        made.get_model = lambda modules=modules: Recurrent(modules=modules)
        for name, told in made.jaxrl_checksums().items():
            found.setdefault(name, {}).update(told)
    summed = {name: sum(told.values()) % 2**32 for name, told in found.items()}
    assert summed == {name: x for name, x in want.items() if name.startswith(f"{layer}.")}


class Recurrent(Model):
    """Of Qwen3.5's packing, and with a layer's own parameters."""

    packed_modules_mapping = MappingProxyType({
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    })  # fmt: skip

    def named_parameters(self, remove_duplicate):
        yield from super().named_parameters(remove_duplicate)
        for path, module in self.modules.items():
            yield from (
                (f"{path}.{x}", tensor(getattr(module, x)))
                for x in ("A_log", "dt_bias")
                if hasattr(module, x)
            )


@pytest.mark.parametrize("packed", [False, True])
def test_the_tensors_of_gemma_4_are_told(packed):
    """Layers that are there twice, a buffer, a product that every worker has whole, values that are keys."""
    shape = dataclasses.replace(tiny.FAMILIES["gemma4 of one product"], per_layer=8)
    _, params = tiny.policy(shape)
    held, want = (
        dict(f(params, "float32")) for f in (served(shape).tensors, served(shape).checksums)
    )

    def product(weight, **more):
        how = {"cpu_linear": lambda x, _, bias: tensor(x @ weight.T)} if packed else {}
        return SimpleNamespace(
            weight=weight[:0] if packed else weight, input_size=weight.shape[1], output_size=len(weight),
            params_dtype=weight.dtype, tp_rank=0, **how, **more,
        )  # fmt: skip

    modules = {}
    for i, kind in enumerate(shape.kind_of):
        layer = f"model.layers.{i}"
        heads = ["q_proj", "k_proj", "k_proj" if shape.distinct[kind].keys_as_values else "v_proj"]
        parts = [held[f"{layer}.self_attn.{name}.weight"] for name in heads]
        qkv = {"output_partition_sizes": [*map(len, parts)]}
        modules[layer] = SimpleNamespace(layer_scalar=held[f"{layer}.layer_scalar"])
        modules[f"{layer}.self_attn.qkv_proj"] = product(np.concatenate(parts), **qkv)
        for name in ("per_layer_input_gate", "per_layer_projection"):
            modules[f"{layer}.{name}"] = product(held[f"{layer}.{name}.weight"])
    again = {
        path.replace("layers", "self_decoder.decoder_layers"): x for path, x in modules.items()
    }
    kinds = [
        "full_attention" if kind.keys_as_values else "sliding_attention" for kind in shape.kinds
    ]
    made = serverside.Extension()
    made.vllm_config = SimpleNamespace(quant_config=None)
    config = SimpleNamespace(attention_k_eq_v=True, layer_types=kinds)
    made.get_model = lambda: Model(modules=modules | again, config=config)
    summed = {
        name: sum(dict(told).values()) % 2**32 for name, told in made.jaxrl_checksums().items()
    }
    ours = ("layer_scalar", "self_attn", "per_layer_input_gate", "per_layer_projection")
    left = ("_norm.weight", "o_proj.weight", ".bias")
    assert summed == {
        name: x for name, x in want.items()
        if name.startswith("model.layers.") and any(x in name for x in ours) and not name.endswith(left)
    }  # fmt: skip
