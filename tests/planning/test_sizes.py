"""Sizes left open: what is chosen fits, more memory never means less, and a run keeps to its choice."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxrl_llm.cli import plan as cli
from jaxrl_llm.cli.main import main
from jaxrl_llm.config import Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import attention, qwen2
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.planning import machines, sizes
from jaxrl_llm.planning import plan as plans
from jaxrl_llm.rollouts.engines import Native, Vllm
from jaxrl_llm.tasks.conversations import Later
from jaxrl_llm.training import phases, record
from jaxrl_llm.training.folder import RunFolder
from tests import tiny
from tests.training import quick
from tests.training.process import fails

SHAPE = quick.config().model.shape
MIB = 2**20
OPEN = """from tests.training.quick import *
made = config
def config(slots: int = 0, microbatches: int = 0) -> Config:
    one = made(warm_steps=0, steps=1)
    collate = replace(one.collate, microbatches=microbatches)
    return replace(one, engine=Native(slots=slots, prefill_prompts=4, block=32), collate=collate)
"""


def opened(slots=0, microbatches=0, **changes):
    made = replace(quick.config(warm_steps=0), prompts=32, group_size=8, **changes)
    collate = replace(made.collate, microbatches=microbatches)
    return replace(made, engine=Native(slots=slots, prefill_prompts=8, block=32), collate=collate)


def machine(memory, devices=1):
    """CPU devices that are planned like a chip with so many bytes."""
    chip = machines.Chip("tpu", int(memory), 1.0, 1.0, 1.0, 1.0, 1.0)
    return machines.Machine("toy", tuple(jax.devices()[:devices]), devices, chip)


def planned(monkeypatch, needs):
    """Plans without a compiler: `needs(config)` are bytes by program. What was planned, in order."""
    asked = []

    def made(config, on, shape, *, only=(), **_):
        asked.append(config.sizes)
        nothing = dict.fromkeys(plans.WAITS, 1.0)
        compiled = [
            plans.Compiled(name, size, 0, 0, [], {}, 0, 0.0, nothing)
            for name, size in needs(config).items()
            if not only or name in only
        ]
        return plans.Plan("toy", {}, 1, on.chip.memory, {}, compiled, sizes=config.sizes)

    monkeypatch.setattr(sizes, "plan", made)
    return asked


@pytest.mark.parametrize(
    ("devices", "pack"), [(1, True), (8, False), *(tiny.slow(*x) for x in ((1, False), (8, True)))]
)
def test_more_memory_never_means_fewer_slots_or_more_micro_batches(devices, pack):
    """Up to a step's responses, and to one micro-batch, or where rows are packed sixteen."""
    config = opened()
    config = replace(config, collate=replace(config.collate, pack=pack))
    found = [
        sizes.estimated(config, machine(memory * MIB, devices), SHAPE)
        for memory in (1, 2, 4, 16, 64)
    ]
    slots, micro = ([one[name] for one in found] for name in ("slots", "microbatches"))
    assert slots == sorted(slots)
    assert micro == sorted(micro, reverse=True)
    assert all(number % devices == 0 for number in slots)
    assert (slots[-1], micro[-1]) == (256, 16 if pack else 1)
    assert slots[0] < 256
    assert devices > 1 or micro[0] > micro[-1]


@pytest.mark.parametrize("name", ["slots", "microbatches"])
def test_a_size_that_is_given_stays(name):
    given = opened(**{name: 3})
    chosen = given.sized(sizes.estimated(given, machine(4 * MIB), SHAPE)).sizes
    assert chosen[name] == 3
    assert all(chosen.values())


def test_slots_fill_what_the_arrays_of_a_step_leave():
    """The plan's arrays with this many slots fit, with a tenth more they do not."""
    config, memory = opened(), 6 * MIB
    slots = sizes.estimated(config, machine(memory), SHAPE)["slots"]

    def held(number):
        step = plans.step_of(
            config.sized({"slots": number, "microbatches": 1}), machine(memory), SHAPE
        )
        parts = ("optimizer", "reference", "parameters", "cache")
        return sum(step.on_device[name] for name in parts)

    assert 0.5 * memory < held(slots) <= sizes.ROOM * memory < held(2 * slots)


def test_logits_and_what_is_within_a_layer_are_not_there_together(monkeypatch):
    """The larger of the two counts, so few logits change no choice."""

    def chosen(logits):
        monkeypatch.setattr(sizes.logprobs, "logit_bytes", lambda: logits)
        return sizes.estimated(opened(), machine(3 * MIB), SHAPE)["microbatches"]

    assert chosen(0) == chosen(MIB // 4) < chosen(MIB)


def test_plain_attention_takes_room_that_a_kernel_does_not(monkeypatch):
    """As on a GPU that has no kernel: it has numbers for each token and each before it."""
    monkeypatch.setattr(sizes.logprobs, "logit_bytes", lambda: MIB)

    def chosen(attend):
        made = opened(compute=qwen2.Compute(attend=attend))
        made = replace(made, collate=replace(made.collate, response_length=900))
        return sizes.estimated(made, machine(32 * MIB), SHAPE)["microbatches"]

    plain, fused = chosen(attention.xla), chosen(attention.gpu)
    assert chosen(attention.for_platform) == plain > 4 * fused > 4


def test_prompts_that_are_read_at_a_time_take_room_from_slots():
    def chosen(prefill, **collate):
        made = opened(compute=qwen2.Compute(attend=attention.gpu))
        made = replace(made, engine=Native(slots=0, prefill_prompts=prefill, block=32))
        made = replace(made, collate=replace(made.collate, prompt_length=600, **collate))
        return sizes.estimated(made, machine(64 * MIB), SHAPE)["slots"]

    assert chosen(1) > chosen(16) > 1
    assert chosen(16, share_prompts=True) == chosen(16)  # which changes the update alone


def test_an_estimate_is_confirmed_by_one_plan_of_the_update(monkeypatch):
    asked = planned(monkeypatch, lambda config: {"update": MIB})
    sized, made = sizes.fitted(opened(), machine(4 * MIB), SHAPE, only=("update",))
    assert asked == [sized.sizes] == [made.sizes]


def test_what_the_plan_does_not_confirm_gets_smaller_until_it_does(monkeypatch):
    """The size that the worst program depends on: fewer slots, or more micro-batches."""

    def needs(config):
        slots, micro = config.sizes.values()
        return {"decode": slots * MIB // 8, "update": 256 * MIB // micro}

    asked = planned(monkeypatch, needs)
    sized, _ = sizes.fitted(opened(), machine(8 * MIB), SHAPE)
    assert len(asked) > 1
    assert max(needs(sized).values()) <= 8 * MIB < max(needs(opened().sized(asked[-2])).values())


@pytest.mark.parametrize(
    ("config", "needs", "says"),
    [
        (opened(), {"update": 9 * MIB}, "128 micro-batches on toy: the worst moment is update: 9.0 MiB of 4.0"),
        (opened(microbatches=4), {"update": 9 * MIB}, "4 micro-batches on toy: .*more collate.microbatches"),
        (opened(), {"gather": 9 * MIB}, "on toy: the worst moment is gather: .*What would help: more devices"),
    ],
)  # fmt: skip
def test_what_would_have_to_be_smaller_is_said(monkeypatch, config, needs, says):
    planned(monkeypatch, lambda config: needs)
    with pytest.raises(UserError, match=says):
        sizes.fitted(config, machine(4 * MIB), SHAPE)


def test_arrays_that_leave_no_room_are_named_without_compiling(monkeypatch):
    asked = planned(monkeypatch, lambda config: {})
    with pytest.raises(
        UserError,
        match=r"sampling holds .* of 0\.2 MiB a device \(optimizer .*: take a smaller model",
    ):
        sizes.fitted(opened(), machine(MIB // 4), SHAPE)
    assert asked == []


def test_a_server_has_no_slots_to_choose():
    config = replace(opened(), engine=Vllm())
    assert sizes.estimated(config, machine(4 * MIB), SHAPE).keys() == {"microbatches"}
    assert config.sized({"slots": 3, "microbatches": 2}).sizes == {"microbatches": 2}


def test_slots_that_nothing_is_sampled_in_are_chosen_all_the_same():
    """Else a resumed run would have to choose again."""
    task = Later(lambda: None, graded=False)
    config = replace(opened(), task=task, steps=0)
    there = machine(4 * MIB)
    assert all(config.sized(sizes.estimated(config, there, SHAPE)).sizes.values())
    ran_out = config.sized({"slots": 64, "microbatches": 64})
    assert "slots=32, microbatches=128 would fit" in sizes.smaller(ran_out, there, SHAPE)


def test_a_cpu_gets_a_fixed_choice():
    """As many slots as the engine has anywhere else, and micro-batches of about 4,096 tokens."""
    sized, made = sizes.fitted(opened(), machines.machine("here"), SHAPE)
    rows = 128 // sized.collate.microbatches // len(jax.devices())
    assert made is None
    assert sized.engine.slots == 64
    assert 2048 < rows * 88 <= 4096 or rows == 16


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "mine.py"
    path.write_text(OPEN)
    return path


def test_a_run_says_and_records_what_it_chose_and_keeps_to_it(
    config_file, tmp_path, monkeypatch, capsys
):
    """On a machine that would make another choice too; out of memory, it says what would fit."""

    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    monkeypatch.setattr(phases.Reinforcement, "train_step", full)
    train = ("train", config_file, "--out", tmp_path / "run")
    with pytest.raises(SystemExit):
        main([*map(str, train)])
    said = capsys.readouterr()
    assert said.out.splitlines().count("chosen to fit: 8 slots, 1 micro-batch") == 1
    assert "memory (RESOURCE_EXHAUSTED: Out of memory while" in said.err
    assert "by an estimate slots=4, microbatches=2 would fit; jaxrl-llm plan tells" in said.err
    given = record.read(tmp_path / "run")["given"]
    assert (given["slots"], given["microbatches"]) == (8, 1)

    monkeypatch.setattr(sizes, "SLOTS", 3)
    assert RunFolder(tmp_path / "run").config().sizes == {"slots": 8, "microbatches": 1}
    assert "microbatches=2 would fit" in fails(capsys, *train, "--resume")
    assert "micro-batch" not in capsys.readouterr().out
    assert record.read(tmp_path / "run")["given"] == given
    with pytest.raises(UserError, match=r"slots is not as it was when .* was started \(8; now 3\)"):
        record.require_given(tmp_path / "run", {"slots": 3})


def test_a_warm_start_that_is_out_of_memory_says_what_needs_less(tmp_path, monkeypatch, capsys):
    """It has a batch of its own, which --microbatches does not divide."""

    def full(*_, **__):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    monkeypatch.setattr(phases.Imitation, "train_step", full)
    path = tmp_path / "mine.py"
    path.write_text("from tests.training.quick import *\n")
    said = fails(capsys, "train", path, "--out", tmp_path / "run")
    assert (
        "in warm_start a smaller batch than 8, or more micro-batches than 1 (of its collate), need less. Beside"
        in said
    )


def test_sizes_that_are_given_are_no_choice(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(phases.Reinforcement, "train_step", lambda *_: 1 / 0)
    sized = ("--slots", "4", "--microbatches", "2")
    with pytest.raises(ZeroDivisionError):
        main(["train", str(config_file), "--out", str(tmp_path / "run"), *sized])
    assert "micro-batch" not in capsys.readouterr().out
    assert not {"slots", "microbatches"} & record.read(tmp_path / "run")["given"].keys()
    assert RunFolder(tmp_path / "run").config().sizes == {"slots": 4, "microbatches": 2}


@pytest.mark.parametrize("memory", [2, 64])
def test_sizes_that_would_fit_are_at_most_half(memory):
    """What an accelerator has room for by estimate; the estimate itself may have been what ran out."""
    config = opened(slots=256, microbatches=16)
    fit = sizes.estimated(opened(), machine(memory * MIB), SHAPE)
    said = sizes.smaller(config, machine(memory * MIB), SHAPE)
    assert (
        f"slots={min(128, fit['slots'])}, microbatches={max(32, fit['microbatches'])} would" in said
    )


def test_a_plan_chooses_what_is_left_open(config_file, monkeypatch, capsys):
    """And says it, as a table or as JSON."""
    planned(monkeypatch, lambda config: {"update": MIB})
    monkeypatch.setattr(cli, "plan", sizes.plan)  # what is here is a CPU
    main(["plan", str(config_file), "--json"])
    assert json.loads(capsys.readouterr().out)["sizes"] == {"slots": 8, "microbatches": 1}
    monkeypatch.setattr(machines, "machine", lambda name: machine(4 * MIB))
    main(["plan", str(config_file)])
    said = " ".join(capsys.readouterr().out.split())
    assert "8 slots, 4 micro-batches; the worst moment is update: 1.0 MiB of 4.0 MiB" in said


def test_open_sizes_outside_a_run_are_the_smallest_and_the_usual():
    one, none = (tiny.collator(microbatches=n)(tiny.responses()) for n in (1, 0))
    jax.tree.map(np.testing.assert_array_equal, one, none)
    definition = qwen2.graph(SHAPE)[0]
    with Native(slots=0).start(Policy(definition), tiny.mesh_of()) as sampler:
        assert sampler.slots == 64


@pytest.mark.parametrize("rank", [0, 16])
def test_a_card_of_24_gib_holds_3b_with_adapters_and_not_without(rank):
    """By shapes alone, as far as the arrays go."""
    model = Pretrained("Qwen/Qwen2.5-3B", lora=qwen2.Lora(rank=rank) if rank else None)
    config = opened(model=model, compute=qwen2.Compute(dtype="bfloat16"))
    there = machine(20 * 2**30), plans.shape_of(config)
    if rank:
        assert sizes.estimated(config, *there)["slots"] == 256
    else:
        with pytest.raises(UserError, match="take a smaller model, lora"):
            sizes.estimated(config, *there)
