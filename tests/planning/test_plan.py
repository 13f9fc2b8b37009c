"""A plan against what is there: bytes of live arrays, records, names of machines, what a person reads."""

import importlib.util
import io
import json
import os
import pathlib
import subprocess
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
import rich.console

from jaxrl_llm import accelerators
from jaxrl_llm.accelerators import host_memory, share_of_a_gpu
from jaxrl_llm.cli import plan as cli
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Mesh, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning import update
from jaxrl_llm.models import hf, qwen2, sharding
from jaxrl_llm.models.generation import ScannedGenerator
from jaxrl_llm.planning import flops, machines, report, search, sizes
from jaxrl_llm.planning import plan as plans
from jaxrl_llm.planning.hlo import Collective
from jaxrl_llm.planning.programs import Program, Step, first_phase, local_bytes, model_shape
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Sampling
from jaxrl_llm.tasks.knights_knaves import tiny as kk_tiny
from tests import tiny
from tests.planning.records import PRESETS, SCALING, SMALL, preset, worse
from tests.public import write_model
from tests.reference.peer import needed
from tests.tiny import slow
from tests.training import quick
from tests.training.process import fails

ROOT = pathlib.Path(__file__).parents[2]
NOTHING = dict.fromkeys(plans.WAITS, 0.0)
CHIP = machines.Chip("cuda", 10**9, 1e12, 1e11, 1e10, 1e9, 1e10, whole=1e12)
TOY = machines.Machine("toy", tuple(range(8)), 4, CHIP)


def first_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_a_shared_prompt_is_computed_once_a_group():
    config = quick.config(warm_steps=0)
    shape, prompt = config.model.shape, config.collate.prompt_length
    apart, shared = (
        flops.scoring(
            replace(config, collate=replace(config.collate, pack=True, share_prompts=x)), shape, 20
        )
        for x in (False, True)
    )
    again = config.prompts * (config.group_size - 1) * prompt
    assert apart - shared == flops.forward(shape, tokens=again, scored=0, length=prompt + 20) > 0


@pytest.mark.parametrize(("sizes", "dtype"), [((1, 8, 1), "bfloat16"), ((2, 2, 2), "float32")])
def test_parts_are_the_bytes_of_live_arrays(sizes, dtype, tmp_path):
    """Those of a teacher of another size too, in the precision that is computed in."""
    write_model(tmp_path / "teacher", words=kk_tiny.vocabulary())
    config, mesh = quick.config(teacher=str(tmp_path / "teacher")), sharding.make_mesh(*sizes)
    config = replace(config, compute=qwen2.Compute(dtype=dtype))
    step = Step(config, config.model.shape, mesh, 2**34)
    with jax.set_mesh(mesh):
        shapes = qwen2.graph(step.shape)[1]
        params = qwen2.init(step.shape, shardings=sharding.param_shardings(shapes, mesh))
        state = update.init_state(params, config.optimizer)
        assert step.on_device["parameters"] == first_device(state.params)
        assert step.on_device["optimizer"] == first_device(state.opt_state)
        teacher = hf.load(tmp_path / "teacher", step.teacher[0], mesh, dtype)
        assert step.on_device["teacher"] == first_device(teacher) > 0
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    assert described(state) == described(step.state)
    assert described(teacher) == described(step.teacher[1])
    programs = {program.name: program for program in step.programs()}
    assert [*programs][-4:] == ["score", "teacher", "credit", "update"]
    assert programs["teacher"].flops > 0
    held = lambda *names: sum(step.on_device[name] for name in names)
    assert programs["update"].beside == held("reference", "teacher")
    assert programs["teacher"].beside == held("parameters", "optimizer", "reference")
    waiting = Step(replace(config, offload="reference"), config.model.shape, mesh, 2**34)
    assert waiting.on_device.get("teacher", 0) == 0
    assert waiting.on_hosts["teacher"] == first_device(teacher)


def test_slots_are_planned_as_the_engine_has_them():
    config = replace(quick.config(), engine=Native(slots=13, prefill_prompts=3))
    step = Step(config, config.model.shape, sharding.make_mesh(), 2**34)
    sampler = NativeSampler(step.generator, slots=13, prefill_prompts=3)
    assert (step.engine.slots, step.engine.prefill_prompts) == (16, 8)
    assert (sampler.slots, sampler.prefill_prompts) == (16, 8)


def test_a_plan_has_the_prompts_and_the_cache_of_the_engine(monkeypatch):
    """Which pads prompts to a power of two."""
    config = quick.config()
    config = replace(
        config,
        prompts=16,
        collate=replace(config.collate, prompt_length=20, response_length=8),
        engine=Native(slots=8, prefill_prompts=8, block=8),
    )
    mesh, called = sharding.make_mesh(1, 1, 1, jax.devices()[:1]), {"empty": [], "prefill": []}
    step = Step(config, config.model.shape, mesh, 2**34)

    def recorded(name):
        """What a program of the engine reads, in shapes, and what it gives."""
        program = getattr(ScannedGenerator, name)

        def run(self, *arguments):
            result = program(self, *arguments)
            called[name].append(jax.tree.map(jax.numpy.shape, (arguments[-2:], result)))
            return result

        monkeypatch.setattr(ScannedGenerator, name, run)

    recorded("empty")
    recorded("prefill")
    planned = {program.name: program for program in step.programs()}
    planned["prefill"].compile()
    held = {"prefill": [], "run": []}
    with jax.set_mesh(mesh):
        sampler = NativeSampler(step.generator, slots=8, prefill_prompts=8)
        sampler.push(qwen2.init(step.shape), 0)
        before = live_bytes()
        for name, most in held.items():
            program = getattr(sampler, f"_{name}")

            def run(*arguments, most=most, program=program):
                most.append(live_bytes() - before)
                return program(*arguments)

            monkeypatch.setattr(sampler, f"_{name}", run)
        sampler.submit([[2 + i] * 20 for i in range(16)], n=2, sampling=Sampling(max_tokens=8))
    assert all(plan == run for plan, *runs in called.values() for run in runs)
    # prompts that are read together are there until each response has a slot, but no others beside them
    cache, group = local_bytes(step.cache), 8 * 32 * local_bytes(step.cache) // (8 * 40)
    assert cache <= max(held["prefill"]) < cache + group // 10  # and the slots
    assert cache + group <= max(held["run"]) < cache + group + group // 10
    assert planned["decode"].beside == step.beside_sampler + group
    assert planned["prefill"].beside == step.beside_sampler + cache


def live_bytes():
    return sum(x.nbytes for x in jax.live_arrays())


def test_a_plan_knows_the_precision_of_the_weights_that_are_sampled_from(monkeypatch):
    """A CPU with an older JAX samples in float32."""
    config = replace(quick.config(), compute=qwen2.Compute(dtype="bfloat16"))
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    step = Step(config, config.model.shape, mesh, 2**34)
    with jax.set_mesh(mesh):
        read = step.generator.weights(qwen2.init(step.shape))
    assert local_bytes(step.weights) == local_bytes(read) == 4 * qwen2.parameter_count(step.shape)


def test_a_plan_for_the_devices_here_is_printed_and_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["plan", quick.__file__, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [*found["programs"]] == ["prefill", "decode", "score", "credit", "update"]
    assert found["fits"] is True
    assert found["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    held = found["parts"]["parameters"] + found["parts"]["optimizer"]
    assert held < found["programs"]["update"]["peak"] <= found["peak"]
    assert found["programs"]["update"]["collectives"]
    assert found["seconds"] is None  # there is no data sheet
    assert {program["seconds"] for program in found["programs"].values()} == {None}
    assert not any(tmp_path.iterdir())


def of_sft(*flags):
    """The words that plan a run of supervised learning; its data need not be there."""
    sized = "--batch", "8", "--microbatches", "1", "--length", "64"
    return "plan", "sft", "--model", "model", "--data", "nowhere.jsonl", *sized, *flags


def test_supervised_learning_is_planned_without_what_it_does_not_do(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", words=kk_tiny.vocabulary())
    main([*of_sft("--json")])
    found = json.loads(capsys.readouterr().out)
    assert [*found["programs"]] == ["credit", "update"]
    assert found["sizes"] == {"microbatches": 1}
    assert not {"cache", "sampler's copy"} & found["parts"].keys()


def test_supervised_learning_with_rewards_samples_to_validate(tmp_path, monkeypatch):
    """Whose prompts may be nearly as long as rows; that is no time of a step."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", words=kk_tiny.vocabulary())
    planned = []
    monkeypatch.setattr(cli, "plan", lambda config, *_, **__: planned.append(config) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*of_sft("--reward", "exact")])
    step = plans.step_of(planned[0], machines.machine("here"), plans.shape_of(planned[0]))
    programs = {program.name: program for program in step.programs()}
    assert [*programs] == ["prefill", "decode", "credit", "update"]
    assert programs["decode"].runs == programs["decode"].flops == 0
    assert step.on_device["cache"] > 0
    assert step.prompt_columns == 64


def test_without_steps_of_reinforcement_the_warm_start_is_planned(capsys):
    config = quick.config(steps=0)
    columns = lambda config: (
        Step(config, config.model.shape, sharding.make_mesh(), 2**34).cache_columns
    )
    assert columns(config) == columns(quick.config())  # that of its validation
    config = replace(config, warm_start=replace(config.warm_start, batch=16))
    step = Step(first_phase(config), config.model.shape, sharding.make_mesh(), 2**34)
    warm = config.warm_start
    assert step.batch.mask.shape[0] == warm.batch != config.prompts * config.group_size
    assert [program.name for program in step.programs()][-2:] == ["credit", "update"]
    assert "reference" not in step.on_device
    assert first_phase(quick.config()).collate == quick.config().collate
    program = plans.Compiled("update", 1, 1, 0, [], {}, 0, 1.0, NOTHING | {"arithmetic": 2.0})
    plan = plans.Plan("h100x8", {}, 1, 2, {}, [program])
    for steps, said in (
        (warm.steps, "nothing does; 4 steps 8.0 s to 8.0 s."),
        (0, "nothing does. "),
    ):
        assert any(said in line for line in report.tables(plan, steps) if isinstance(line, str))


QUICK = ("h100x4, fsdp 4, packed", "v5e-4, fsdp 4, packed")
LONG = tuple({*SMALL} - {*QUICK})


@pytest.mark.parametrize("names", [slow(QUICK), pytest.param(LONG, marks=pytest.mark.long)])
def test_programs_for_accelerators_do_not_grow_and_keep_fused_attention(names):
    """By their compilers, in an environment of their own."""
    python = needed("JAXRL_PLAN_PYTHON", "an interpreter with the extras plan-gpu and plan-tpu")
    command = [python, "-m", "tests.planning.records", "small", *names]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{done.stderr[-3000:]} (records small --write)"
    assert done.stdout.count(" GiB in ") == len(names)


def test_the_name_of_a_model_at_the_hub_is_no_path(monkeypatch):
    asked = []
    monkeypatch.setattr(hf, "resolve", lambda name, revision: asked.append(str(name)))
    monkeypatch.setattr(hf, "load_shape", lambda folder: tiny.SHAPE)
    assert model_shape(Pretrained("somebody/no-preset")) == tiny.SHAPE
    assert asked == ["somebody/no-preset"]


def test_every_case_of_the_large_records_is_a_config_and_a_machine():
    """They are compiled by hand alone, which takes an hour."""
    for name in f"{PRESETS}; {SCALING}".split(";"):
        config, on = preset(name.strip())
        assert on in name.split()
        assert config.offload == (name.split()[-1] if "offload" in name else "none")
        assert {*config.sizes.values()} <= {256, 32, 64}
    assert preset("kk 7B 8xh100x8 8 x 8 x 1")[0].mesh == Mesh(8, 8, 1)


def test_what_has_grown_is_said():
    before = {"update": {"KiB": 1000, "all-gather": 4, "all-reduce": 2, "triton": 3}}
    assert [*worse(before, {"update": {"KiB": 1010, "all-gather": 3, "triton": 3}})] == []
    memory, *counts = worse(before, {"update": {"KiB": 1030, "all-gather": 5, "all-to-all": 1}})
    assert memory == "update: 1000 KiB a device before, 1030 now"
    assert counts == [
        "update: all-gather 4 times before, 5 now",
        "update: all-to-all 0 times before, 1 now",
        "update: triton 3 times before, 0 now",
    ]


@pytest.mark.parametrize(("memory", "verdict"), [(80, "it fits"), (8, "more collate.microbatches")])
def test_what_a_person_reads(memory, verdict):
    line = "models/qwen2.py:66"
    gather = Collective("all-gather", "bf16[896,4864]", 29_800_000, 8, 8, 192, line)
    seconds = NOTHING | {"arithmetic": 2.0, "memory": 1.0}
    program = plans.Compiled("update", 10 * 2**30, 2**30, 0, [gather], {}, 0, 1.0, seconds, 0.25)
    mesh = {"data": 1, "fsdp": 8, "tensor": 1}
    made = plans.Plan("h100x8", mesh, 8, memory * 2**30, {"parameters": 2**26}, [program])
    assert made.seconds == (2.0, 3.0)
    console = rich.console.Console(file=io.StringIO(), width=120)
    for part in report.tables(made, steps=100):
        console.print(part)
    said = " ".join(console.file.getvalue().split())
    for words in (verdict, "10.00 GiB", "64.0 MiB", line, "5.01", "2.0 s", "3.0 s", "5 min"):
        assert words in said
    assert "25% of the update's arithmetic is recomputation" in said
    assert "is 50% of what the machine could do meanwhile, 75% if everything overlaps" in said
    assert "--search" not in report.verdict(replace(made, timed=False))


# Machines.


@pytest.mark.parametrize(
    "name",
    [
        "v5e-7",
        "v9z-8",
        "h100",
        "h900x8",
        "v5p-9",
        "x",
        "0xh100x8",
        "v5e:0x0",
        "v5e:2x2x2",
        "v5p:2x2",
        "v9z:2x2",
    ],
)
def test_an_unknown_machine_is_refused_with_examples(name):
    with pytest.raises(UserError, match="v5e-16, v5p-8"):
        machines.machine(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e-16", "plan-tpu"), ("h100x8", "plan-gpu")])
def test_without_its_compiler_a_line_says_what_to_install(name, extra, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = fails(capsys, "plan", quick.__file__, "--on", name)
    assert f"pip install 'jaxrl-llm[{extra}]'" in said


def test_published_models_are_known_by_name():
    for name, layers in (("Qwen/Qwen2.5-3B-Instruct", 36), ("Qwen2.5-7B", 28)):
        assert plans.shape_of(replace(quick.config(), model=Pretrained(name))).num_layers == layers


def test_a_folder_is_planned_as_what_it_holds(tmp_path, monkeypatch):
    """Whatever its name; only one that is none stands for a preset."""
    write_model(tmp_path / "Qwen2.5-3B", words=kk_tiny.vocabulary())
    held = hf.load_shape(tmp_path / "Qwen2.5-3B")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("Qwen2.5-3B", str(tmp_path / "Qwen2.5-3B"), "~/Qwen2.5-3B"):
        assert plans.shape_of(replace(quick.config(), model=Pretrained(name))) == held


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["configs"]])
def test_help_does_not_ask_the_driver(words, monkeypatch):
    monkeypatch.setattr(accelerators, "ask_driver", pytest.fail)
    monkeypatch.setattr(accelerators, "present", lambda kind="": 1)
    accelerators.gpu_memory.cache_clear()
    for name in accelerators.FRACTIONS:
        monkeypatch.setenv(name, "")
    with suppress(SystemExit):
        main(words)


def test_jax_takes_as_much_of_a_gpu_as_a_plan_counts_on(monkeypatch):
    """Unless the environment says how much; JAX refuses both of its names at a time."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    assert machines.machine("here").chip.memory == host_memory() // len(jax.local_devices())
    for given in ((), *((name,) for name in names)):
        for name in names:
            monkeypatch.setenv(name, "0.5" if name in given else "")
        assert share_of_a_gpu() == (0.5 if given else 0.94)
        with pytest.raises(SystemExit):
            main(["train", "nowhere.py"])
        assert os.environ[names[0]] == ("" if names[1] in given else "0.5" if given else "0.94")
        assert os.environ[names[1]] == ("0.5" if names[1] in given else "")


def test_products_of_float32_take_their_own_time():
    """They keep all bits, so no tensor core helps; on a TPU they are six passes of bfloat16."""
    program = Program("update", pytest.fail, flops=8 * 10**15)
    for name, times in (("t4", 65 / 8.1), ("h100", 989 / 67), ("b200", 2250 / 75), ("v5e", 6)):
        whole, half = (
            plans._seconds(program, replace(TOY, chip=machines.CHIPS[name].computing(dtype)), [])
            for dtype in ("float32", "bfloat16")
        )
        assert whole["arithmetic"] / half["arithmetic"] == pytest.approx(times)
    config = quick.config(warm_steps=0)
    one = replace(config, mesh=Mesh(1, 1, 1))
    half = replace(one, compute=qwen2.Compute(dtype="bfloat16"))
    there = replace(TOY, chip=replace(TOY.chip, whole=1e6))  # nothing else takes as long
    whole, half = (search.estimate(x, config.model.shape, there) for x in (one, half))
    work = flops.of_step(config, config.model.shape, config.collate.response_length)["update"]
    assert whole == pytest.approx(work / 8 / 1e6, rel=0.01)
    assert half < whole / 1000
    assert not machines.machine("here").chip.computing("float32").flops  # unknown stays unknown


def test_a_plan_takes_the_rate_of_the_precision_that_it_computes_in(monkeypatch):
    rates = []
    monkeypatch.setattr(plans, "_compiled", lambda _, machine: rates.append(machine.chip.flops))
    there = replace(TOY, devices=tuple(jax.devices()), chip=replace(TOY.chip, whole=1e6))
    for dtype in ("float32", "bfloat16"):
        config = replace(quick.config(), compute=qwen2.Compute(dtype=dtype))
        assert plans.plan(config, there, config.model.shape, only=("credit",)).timed
    assert rates == [1e6, 1e12]


def test_a_server_on_the_same_gpus_leaves_a_plan_what_it_leaves_a_run(monkeypatch):
    """Nothing is taken off a share that the environment sets: a run does not either."""
    config = replace(quick.config(), engine=Vllm(share=0.4))
    there = replace(TOY, devices=tuple(jax.devices()), chip=replace(TOY.chip, memory=80 * 2**30))
    memory = lambda: plans.step_of(config, there, config.model.shape).memory / there.chip.memory
    for name in accelerators.FRACTIONS:
        monkeypatch.setenv(name, "")
    assert memory() == pytest.approx(0.94 - 0.4)
    for name in accelerators.FRACTIONS:
        monkeypatch.setenv(name, "0.5")
        assert memory() == pytest.approx(0.5)
        monkeypatch.setenv(name, "")


def test_a_plan_for_the_gpus_here_leaves_a_server_its_share_before_jax_starts(
    tmp_path, monkeypatch
):
    """As `train` does, since what JAX has then is what is planned; for other machines not."""
    config = tmp_path / "mine.py"
    config.write_text(
        "from dataclasses import replace\nfrom jaxrl_llm.rollouts.engines import Vllm\n"
        "from tests.training import quick\n"
        "def config(): return replace(quick.config(), engine=Vllm(share=0.4))\n"
    )
    asked = []

    def machine(name):
        asked.append((name, os.environ[accelerators.FRACTIONS[0]]))
        raise UserError("enough")

    monkeypatch.setattr(machines, "machine", machine)
    for on in ("h100x8", "here"):
        for name in accelerators.FRACTIONS:
            monkeypatch.setenv(name, "")
        with pytest.raises(SystemExit):
            main(["plan", str(config), "--on", on])
    assert asked == [("h100x8", "0.94"), ("here", "0.54")]


# The search.


@pytest.mark.parametrize("devices", [3, 6, 8, 24])
def test_layouts_divide_evenly_where_any_does(devices):
    """Where none does, the collator fills rows up."""
    config, machine = quick.config(), replace(TOY, devices=tuple(range(devices)))
    layouts = search.candidates(config, config.model.shape, machine)
    assert layouts
    rows = config.prompts * config.group_size // config.collate.minibatches
    for layout in layouts:
        mesh = layout.mesh
        assert mesh.tensor * mesh.fsdp * mesh.data == devices
        assert config.model.shape.num_heads % mesh.tensor == 0
        assert devices != 8 or rows % (mesh.fsdp * mesh.data) == 0


def test_of_frozen_weights_a_search_counts_no_moments():
    config = quick.config()
    shape = replace(config.model.shape, lora=qwen2.Lora(rank=2, alpha=4.0))
    whole = replace(shape, lora=None)
    over = replace(config, offload="both", mesh=Mesh(1, 1, 1))
    assert search.estimate(over, shape, TOY) < search.estimate(over, whole, TOY)


def test_weights_that_are_gathered_over_the_network_take_longer():
    config = quick.config()
    within = replace(config, mesh=Mesh(2, 4, 1))
    layouts = within, replace(within, offload="both"), replace(config, mesh=Mesh(1, 8, 1))
    times = [search.estimate(layout, config.model.shape, TOY) for layout in layouts]
    assert times[2] > 5 * times[0] < 5 * times[1]


def test_copies_of_the_weights_exchange_gradients():
    """Once a mini-batch, so a search does not take copies over the network for free."""
    config = quick.config()
    one, two = (replace(config, mesh=Mesh(data, 1, 1)) for data in (1, 8))
    apart = search.estimate(two, config.model.shape, TOY) - search.estimate(
        one, config.model.shape, TOY
    )
    sent = 2 * 4 * config.collate.minibatches * qwen2.parameter_count(config.model.shape) * 7 / 8
    stages = config.loss.stages
    assert apart == pytest.approx(stages * sent / TOY.chip.network, rel=1e-6)


def test_the_search_takes_the_fastest_that_fits_with_all_its_programs(monkeypatch):
    """At the sizes that are estimated to fit, so what cannot fit is not compiled."""
    config, said, whole = quick.config(), [], []
    there = replace(TOY, devices=tuple(jax.devices()), chip=replace(TOY.chip, platform="tpu"))
    program = plans.Compiled("decode", 2, 0, 0, [], {}, 0, 0.0, NOTHING)

    def planned(config, machine, shape, *, tokens=0, only=()):
        assert (
            config.sizes["microbatches"]
            == sizes.estimated(
                replace(config, collate=replace(config.collate, microbatches=0)), machine, shape
            )["microbatches"]
        )
        if not only:
            whole.append(config.mesh.tensor)
        fits = config.mesh.tensor == 2 and (only or len(whole) == 2)
        return plans.Plan("toy", vars(config.mesh), 8, 2 if fits else 1, {}, [program])

    for module in (search, sizes):
        monkeypatch.setattr(module, "plan", planned)
    assert search.fastest(config, there, 0, said.append).mesh["tensor"] == 2
    assert whole == [2, 2]
    assert ["tensor 2" in line for line in said] == [False] * (len(said) - 2) + [True] * 2
    monkeypatch.setattr(plans.Plan, "fits", False)
    with pytest.raises(UserError, match="none of 12 layouts of this config fits on toy"):
        search.fastest(config, there, 0, said.append)
    small = replace(there, chip=replace(there.chip, memory=10**4))
    with pytest.raises(UserError, match=r"none of 0 layouts .*\(0 looked possible\)"):
        search.fastest(config, small, 0, said.append)
    with pytest.raises(UserError, match="name the machine with --on"):  # which has a data sheet
        search.fastest(config, machines.machine("here"), 0, said.append)


def test_what_the_compiler_of_a_tpu_refuses_does_not_fit():
    """It ends by an error where that of a GPU gives a program that is too large."""
    said = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (34.10G) exceeds available HBM (15.75G). HLO module: jit_train_step."
    )

    def refused():
        raise jax.errors.JaxRuntimeError(said)

    chip = replace(TOY.chip, flops=0.0)
    program = SimpleNamespace(name="update", compile=refused, recomputed=0.0)
    found = plans._compiled(program, replace(TOY, chip=chip))
    assert found.needed == int(34.1 * 2**30)
    said = "RESOURCE_EXHAUSTED: no figure"
    assert plans._compiled(program, replace(TOY, chip=chip)).needed > chip.memory
    said = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        plans._compiled(program, replace(TOY, chip=chip))


def test_attention_is_counted_by_what_tokens_see():
    window, length, shape = 70, 400, tiny.shape(num_layers=1)
    heads = 4 * shape.num_heads * shape.head_dim  # scores and values, a multiply-add each
    within = replace(shape, kinds=(qwen2.LayerKind(1e4, window),))
    count = lambda shape: flops.forward(shape, tokens=length, scored=0, length=length)
    hidden = sum(max(0, i + 1 - window) for i in range(length))
    assert count(shape) - count(within) == pytest.approx(heads * hidden, rel=0.02)
    config = replace(quick.config(), warm_start=None)
    longer = replace(config, collate=replace(config.collate, prompt_length=140))
    decode = [flops.of_step(one, shape, 50)["decode"] for one in (config, longer)]
    tokens = config.prompts * config.group_size * 50
    assert decode[1] - decode[0] == tokens * heads * 100  # each sees the whole prompt
