"""A plan against what is there: bytes of live arrays, names of machines, what a person reads."""

import importlib.util
import io
import json
from dataclasses import replace

import jax
import pytest
import rich.console

from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Mesh
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.machines import plan as plans
from jaxrl_llm.machines import plan_text, search, topologies
from jaxrl_llm.machines.hlo import Collective
from jaxrl_llm.machines.programs import Planned
from jaxrl_llm.machines.seconds import Seconds
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.native import NativeSampler
from tests.training import quick


def first_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_parts_are_the_bytes_of_live_arrays(sizes):
    config, mesh = quick.config(), sharding.make_mesh(*sizes)
    planned = Planned(config, config.model.shape, mesh, 2**34)
    with jax.set_mesh(mesh):
        parts = plans.parts_of(planned)
        shapes = qwen2.graph(planned.shape)[1]
        params = qwen2.init(planned.shape, shardings=sharding.param_shardings(shapes, mesh))
        state = update.init_state(params, config.optimizer)
    assert parts["parameters"] == first_device(state.params)
    assert parts["optimizer"] == first_device(state.opt_state)
    live = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    expected = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), planned.state)
    assert live == expected


def test_a_plan_for_the_devices_here_is_printed_and_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = quick.__file__
    main(["plan", path, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [*found["programs"]] == ["prefill", "decode", "score", "credit", "update"]
    assert found["fits"] is True
    assert found["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    held = found["parts"]["parameters"] + found["parts"]["optimizer"]
    assert held < found["programs"]["update"]["peak"] <= found["peak"]
    assert found["programs"]["update"]["collectives"]
    assert not any(tmp_path.iterdir())


GATHER = Collective("all-gather", "bf16[896,4864]", 29_800_000, 8, 8, 192, "models/qwen2.py:66")


@pytest.mark.parametrize(("memory", "verdict"), [(80, "it fits"), (8, "more collate.microbatches")])
def test_what_a_person_reads(memory, verdict):
    program = plans.Program("update", 10 * 2**30, 2**30, 0, [GATHER], {}, 0, 1.0, Seconds(2.0, 1.0))
    mesh = {"data": 1, "fsdp": 8, "tensor": 1}
    made = plans.Plan("h100x8", mesh, 8, memory * 2**30, {"parameters": 2**26}, [program])
    console = rich.console.Console(file=io.StringIO(), width=120)
    for part in plan_text.tables(made, steps=100):
        console.print(part)
    said = " ".join(console.file.getvalue().split())
    for words in (
        verdict,
        "10.00 GiB",
        "64.0 MiB",
        "models/qwen2.py:66",
        "5.01",
        "2.0 s",
        "3.0 s",
        "5 min",
    ):
        assert words in said
    assert "--search" not in plan_text.verdict(replace(made, timed=False))


@pytest.mark.parametrize("name", ["v5e-7", "v9z-8", "h100", "h900x8", "v5p-9", "x", "0xh100x8"])
def test_an_unknown_machine_is_refused_with_examples(name):
    with pytest.raises(UserError, match="v5e-16, v5p-8"):
        topologies.machine(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e-16", "plan-tpu"), ("h100x8", "plan-gpu")])
def test_without_its_compiler_a_line_says_what_to_install(name, extra, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main(["plan", quick.__file__, "--on", name])
    assert stop.value.code == 2
    assert f"pip install 'jaxrl-llm[{extra}]'" in capsys.readouterr().err


def test_published_models_are_known_by_name():
    from jaxrl_llm.config import Pretrained

    config = quick.config()
    for name, layers in (("Qwen/Qwen2.5-3B-Instruct", 36), ("Qwen2.5-7B", 28)):
        object.__setattr__(config, "model", Pretrained(name))
        assert plans.shape_of(config).num_layers == layers


def test_time_is_between_all_at_once_and_one_after_the_other():
    seconds = Seconds(arithmetic=3.0, memory=1.0, links=2.0, network=0.5)
    assert (seconds.least, seconds.most) == (3.0, 6.5)


def test_what_a_collective_sends():
    gather = Collective("all-gather", "f32[8]", 32, 8, 8, 3, "")
    assert gather.sent == 3 * 32 * 7 / 8
    sum_ = Collective("all-reduce", "f32[8]", 32, 8, 8, 1, "")
    assert sum_.sent == 2 * 32 * 7 / 8


MACHINE = topologies.Machine(
    "toy", tuple(range(8)), 4, topologies.Chip("cuda", 10**9, 1e12, 1e11, 1e10, 1e9, 1e10)
)


def test_candidates_divide_evenly():
    config = quick.config()
    layouts = [*search.candidates(config, config.model.shape, MACHINE)]
    assert layouts
    rows = config.prompts * config.group_size // config.collate.minibatches
    for layout in layouts:
        assert layout.tensor * layout.fsdp * layout.data == 8
        assert config.model.shape.num_heads % layout.tensor == 0
        assert rows % (layout.microbatches * layout.fsdp * layout.data) == 0
        made = layout.of(config)
        assert made.mesh == Mesh(layout.data, layout.fsdp, layout.tensor)


@pytest.mark.parametrize("devices", [3, 6, 24])
def test_a_machine_over_which_nothing_divides_evenly_has_layouts_too(devices):
    """The collator fills rows up."""
    config, machine = quick.config(), replace(MACHINE, devices=tuple(range(devices)))
    layouts = [*search.candidates(config, config.model.shape, machine)]
    assert layouts
    assert all(x.tensor * x.fsdp * x.data == devices for x in layouts)


def test_slots_are_planned_as_the_engine_has_them():
    config = replace(quick.config(), engine=Native(slots=13, prefill_prompts=3))
    planned = Planned(config, config.model.shape, sharding.make_mesh(), 2**34)
    sampler = NativeSampler(planned.decoder, slots=13, prefill_prompts=3)
    assert (planned.engine.slots, planned.engine.prefill_prompts) == (16, 8)
    assert (sampler.slots, sampler.together) == (16, 8)


def test_weights_that_are_gathered_over_the_network_take_longer():
    config = quick.config()
    shape, micro = config.model.shape, config.collate.microbatches
    within = search.Layout(1, 4, 2, micro, True)
    across = search.Layout(1, 8, 1, micro, True)
    offloaded = search.Layout(1, 4, 2, micro, True, "both")
    assert offloaded.of(config).offload == "both"
    times = [search.estimate(x, config, shape, MACHINE) for x in (within, offloaded, across)]
    assert times[2] > 5 * times[0] < 5 * times[1]


def test_the_search_takes_the_fastest_that_fits_with_all_its_programs(monkeypatch):
    config, said, whole = quick.config(), [], []
    program = plans.Program("decode", 2, 0, 0, [], {}, 0, 0.0, Seconds())

    def planned(config, machine, *, tokens, only=()):
        if not only:
            whole.append(config.mesh.tensor)
        fits = config.mesh.tensor == 2 and (only or len(whole) == 2)
        return plans.Plan("toy", vars(config.mesh), 8, 2 if fits else 1, {}, [program])

    monkeypatch.setattr(search, "plan", planned)
    assert search.fastest(config, MACHINE, 0, said.append).mesh["tensor"] == 2
    assert whole == [2, 2]
    assert ["tensor 2" in line for line in said] == [False] * (len(said) - 4) + [True] * 4
    monkeypatch.setattr(plans.Plan, "fits", False)
    with pytest.raises(UserError, match="layouts of this config fits on toy"):
        search.fastest(config, MACHINE, 0, said.append)


def test_a_search_needs_a_data_sheet(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", quick.__file__, "--search"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "name the machine with --on" in error
    assert error.count("\n") == 1
