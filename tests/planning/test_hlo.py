"""Compiled programs read as text: what travels, how often, from which line."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.models.primitives import up_to
from jaxrl_llm.planning import hlo
from tests.tiny import SHAPE

EIGHT = sharding.make_mesh(1, 8, 1)


def placed(shape, *spec, mesh=EIGHT, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def read(function, *arguments):
    return hlo.Module(jax.jit(function).lower(*arguments).compile().as_text())


def summed(x):
    everywhere = lambda x: jax.lax.psum(x, "fsdp")
    return jax.shard_map(everywhere, mesh=EIGHT, in_specs=P("fsdp"), out_specs=P())(x)


def test_a_sum_over_eight_devices():
    (found,) = read(summed, placed((8, 100), "fsdp")).collectives()
    assert (found.kind, found.size, found.devices, found.span) == ("all-reduce", 400, 8, 8)
    assert (found.times, found.sent) == (1, 2 * 400 * 7 / 8)


@pytest.mark.parametrize("turns", [3, 5])
def test_loops_are_multiplied_out(turns):
    def twice_in_a_scan(x):
        again = lambda x, _: (x + summed(x).sum(), summed(2 * x).sum())
        inner = lambda x, _: jax.lax.scan(again, x, None, length=2)
        return jax.lax.scan(inner, x, None, length=turns)

    found = read(twice_in_a_scan, placed((8, 100), "fsdp")).collectives()
    assert sum(c.times for c in found) in (2 * turns, 4 * turns)  # two sums may travel as one
    assert sum(c.size * c.times for c in found) == 4 * turns * 400


def test_a_loop_that_ends_with_its_data_says_its_limit():
    def until(x, used):
        return up_to(7, used, lambda i, x: x + summed(x).sum() + i, x)

    (found,) = read(until, placed((8, 100), "fsdp"), placed((), dtype=jnp.int32)).collectives()
    assert found.times == 7

    def unnamed(x, used):
        return jax.lax.fori_loop(0, used, lambda i, x: x + summed(x).sum() + i, x)

    (found,) = read(unnamed, placed((8, 100), "fsdp"), placed((), dtype=jnp.int32)).collectives()
    assert found.times == 1


WINDOWED = """HloModule windowed

%below (at: (f32[8], u32[])) -> pred[] {
  %end = u32[] constant(16)
  %at = (f32[8], u32[]) parameter(0)
  %count = u32[] get-tuple-element(%at), index=1
  ROOT %less = pred[] compare(%count, %end), direction=LT
}

%piece (now: (f32[8], u32[])) -> (f32[8], u32[]) {
  %now = (f32[8], u32[]) parameter(0)
  %part = f32[8] get-tuple-element(%now), index=0
  %sent = f32[8] collective-permute(%part), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %done = u32[] get-tuple-element(%now), index=1
  %stride = u32[] constant(STRIDE)
  %next = u32[] add(%done, %stride)
  ROOT %both = (f32[8], u32[]) tuple(%sent, %next)
}

ENTRY %main (x: f32[8]) -> (f32[8], u32[]) {
  %x = f32[8] parameter(0)
  %zero = u32[] constant(0)
  %start = (f32[8], u32[]) tuple(%x, %zero)
  ROOT %loop = (f32[8], u32[]) while(%start), condition=%below, body=%piece
}
"""


@pytest.mark.parametrize(("stride", "times"), [(1, 16), (2, 8), (3, 6)])
def test_a_product_in_pieces_runs_for_each(stride, times):
    """As the TPU compiler writes it, two pieces at a time, and says nowhere how often."""
    module = hlo.Module(WINDOWED.replace("STRIDE", str(stride)))
    assert [c.times for c in module.collectives()] == [times]


def test_weights_are_gathered_once_a_layer_at_a_line_of_the_model():
    definition, shapes = qwen2.graph(SHAPE)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=s),
        shapes,
        sharding.param_shardings(shapes, EIGHT),
    )
    forward = lambda params, tokens: hidden(definition, params, tokens)
    with jax.set_mesh(EIGHT):
        module = read(forward, params, placed((8, 16), "fsdp", dtype=jnp.int32))
    gathers = [c for c in module.collectives() if c.kind == "all-gather"]
    largest = 4 * SHAPE.hidden_size * SHAPE.intermediate_size
    mlp = [c for c in gathers if c.size >= largest and c.times % SHAPE.num_layers == 0]
    assert sum(c.size * c.times for c in mlp) >= 3 * largest * SHAPE.num_layers
    assert all(c.line.startswith("models/qwen2.py:") for c in mlp)


def hidden(definition, params, tokens):
    from flax import nnx

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return nnx.merge(definition, params)(tokens, positions)


SPLIT = """HloModule split
%branch (p: f32[4,8]) -> f32[4,8] {
  ROOT %r = f32[4,8] all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
}
ENTRY %main (a: f32[4,8], b: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8] all-reduce(%a), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %y = f32[4,8] all-reduce(%b), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %z = f32[4,8] call(%x), to_apply=%branch
}
"""


def test_one_sum_of_many_arrays_counts_all_of_them_and_its_clone_elsewhere_not():
    (found,) = hlo.Module(SPLIT).collectives()
    assert (found.size, found.times) == (128, 2)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (4, 4)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (2, 5)),
        ("replica_groups=[2,4]<=[8]", (4, 4)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (2, 5)),
        ("replica_groups=mesh['data'=4,'fsdp'=8] {'fsdp'}", (8, 8)),
        ("replica_groups=mesh['data'=4,'fsdp'=8] {'data'}", (4, 25)),
        ("replica_groups=mesh['a'=1,'b'=8,'c'=4], device_ids=([4,8]T(1,0)) {'b'}", (8, 8)),
        ("replica_groups=mesh['a'=1,'b'=8,'c'=4], device_ids=([4,8]T(1,0)) {'c'}", (4, 25)),
        ("source_target_pairs={{0,8},{8,0}}", (2, 9)),
    ],
)
def test_who_takes_part_and_how_far_apart_they_are(groups, expected):
    sent = f"  ROOT %x = f32[8] all-to-all(%a), channel_id=1, {groups}, dimensions={{0}}"
    (found,) = hlo.Module(f"ENTRY %main (a: f32[8]) -> f32[8] {{\n{sent}\n}}").collectives()
    assert (found.devices, found.span) == expected
