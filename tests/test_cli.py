"""`bench`: its tables, and one line with exit code 2 for what is wrong."""

import io
import json
import logging
import pathlib
import re
import shlex
import sys

import pytest

import jaxrl_llm as jl
from jaxrl_llm import accelerators
from jaxrl_llm import config as configs
from jaxrl_llm.cli.main import main
from jaxrl_llm.errors import UserError
from jaxrl_llm.research import bench
from tests.training.process import fails

ROOT = pathlib.Path(__file__).parents[1]
SMALL = shlex.split("bench update --rows 2 --prompt-length 8 --response-length 24 --repeats 1")


@pytest.mark.slow
def test_bench_update_prints_the_table(capsys):
    main([*SMALL, "--microbatches", "1"])
    out = capsys.readouterr().out
    assert "plain GRPO" in out
    assert "Lopti (2 stages)" in out


@pytest.mark.long
def test_bench_growth_times_updates_and_rollouts(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    sizes = "--prompts 2 --group 2 --prompt 8 --response 8"
    main(f"bench growth --quantities group width {sizes} --doublings 1 --repeats 1".split())
    out = capsys.readouterr().out
    assert re.search(r"group +│ 2  4 +│ ", out)
    assert re.search(r"width +│ 128  256 +│ ", out)


def test_bench_growth_marks_what_grows_faster_than_arithmetic(monkeypatch, capsys):
    """Here the update's time goes by the square of the responses, the rollout's as arithmetic does."""
    programs = lambda _, load, *__: (0.01 * load.group**2, 0.1 * load.group)
    timed = lambda seconds, repeats, _: {name: [x] * repeats for name, x in seconds.items()}
    monkeypatch.setattr(bench, "_programs", programs)
    monkeypatch.setattr(bench, "in_turn", timed)
    monkeypatch.setenv("COLUMNS", "200")
    main(["bench", "growth", "--quantities", "group", "--group", "2", "--repeats", "1"])
    [row] = [line for line in capsys.readouterr().out.splitlines() if "group" in line]
    _, _, sizes, _, update, _, rollout, arithmetic, _ = [x.strip() for x in row.split("│")]
    assert sizes == "2  4  8  16"
    assert (update, rollout, arithmetic) == ("2.00 *", "1.00", "1.00")


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_exponent_is_that_of_the_upper_sizes(power):
    """What does not grow hides it at the smallest."""
    sizes = [8, 16, 32, 64]
    costs = [5.0, *(0.1 * size**power for size in sizes[1:])]
    assert bench.exponent(sizes, costs) == pytest.approx(power)


@pytest.mark.slow
def test_bench_compile_prints_the_table(capsys):
    main(["bench", "compile", "--layers", "1", "2", "--repeats", "1"])
    assert "x 1 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--microbatches", "3"], "2 rows do not divide into 3 micro-batches"),
        (["bench", "update", "/nowhere"], "no model folder /nowhere"),
        (["plot", "/nothing/here"], "there is no folder /nothing/here"),
        (["bench", "accelerator", "--models", "nothing"], "known are tiny, small, Qwen2.5-0.5B"),
        (["bench", "accelerator", "--checks", "1", "8"], "--checks 1 8: their numbers are 0 to 7"),
        (["bench", "update", "--repeat", "1"], "options: --repeat; Perhaps you meant: --repeats"),
        (["train", "grpo"], "; see jaxrl-llm train grpo --help"),  # as it was typed
        (["train", "kk_tny"], "there is no config 'kk_tny'; did you mean 'kk_tiny'?"),
        (["configs", "show", "kk_tny"], "there is no config 'kk_tny'; did you mean 'kk_tiny'?"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, message, capsys):
    assert message in fails(capsys, *arguments)


def test_a_folder_called_like_a_config_does_not_hide_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kk_tiny").mkdir()
    main(["configs", "show", "kk_tiny"])
    assert "def config(" in capsys.readouterr().out
    (tmp_path / "mine.py").write_bytes(b"# \xff")
    assert "cannot read config file 'mine.py'" in fails(capsys, "configs", "show", "mine.py")


def test_a_package_without_its_configs_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "jaxrl_llm" / "config.py"))
    with pytest.raises(UserError, match="installed without its configs"):
        configs.shipped()


class Stream(io.StringIO):
    """Standard output, of a terminal or not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("flag", "said"), [("", "step 12\n"), ("--quiet", ""), ("--json", None)])
def test_train_says_what_it_is_asked_to(flag, said, terminal, monkeypatch):
    """Colours are for terminals alone; records are whole lines of JSON."""
    records = [{"step": 1, "phase": "x", "loss": 0.1 + 0.2}, {"step": 2, "phase": "y", "n": 3}]

    def train(config, out, *, session, **_):
        session.console.print("step 12", style="yellow")
        for record in records if session.on_record else []:
            session.on_record(record)

    monkeypatch.setattr("jaxrl_llm.training.run.train", train)
    monkeypatch.setattr(sys, "stdout", stream := Stream(terminal))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    main(["train", str(ROOT / "configs" / "kk_tiny.py"), *flag.split()])
    out = stream.getvalue()
    if said is None:
        assert [json.loads(line) for line in out.splitlines()] == records
    else:
        assert re.sub(r"\x1b\[[\d;]*m", "", out) == said
        assert ("\x1b" in out) == (terminal and said != "")


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
        "INTERNAL: failed to allocate 2.00GiB from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ],
)  # fmt: skip
def test_a_full_gpu_is_one_line_that_names_a_way_beside_it(said, monkeypatch, capsys):
    """As to an export, a sample or an evaluation while a run has nearly all of the memory."""

    def full(_):
        raise RuntimeError(said)

    monkeypatch.setattr("jaxrl_llm.cli.bench.run", full)
    assert "JAX_PLATFORMS=cpu" in fails(capsys, "bench")


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes in host memory",
        "RESOURCE_EXHAUSTED: Failed to allocate a 9-byte pinned host staging buffer: out of memory",
    ],
)
def test_a_full_host_is_no_full_gpu(said, monkeypatch, capsys):
    """XLA pins memory of the host up to a limit of its own."""

    def full(_):
        raise RuntimeError(said)

    monkeypatch.setattr("jaxrl_llm.cli.bench.run", full)
    assert f"{accelerators.PINNED} is how many GB" in fails(capsys, "bench")


def test_a_warning_does_not_act_on_the_terminal(monkeypatch, capsys):
    said = logging.getLogger("jaxrl_llm.storage").warning
    monkeypatch.setattr("jaxrl_llm.cli.bench.run", lambda _: said("in use by %s", "\x1b[2J"))
    main(["bench"])
    assert capsys.readouterr().err == "warning: in use by \\x1b[2J\n"


def test_the_version_can_be_asked_for(capsys):
    main(["--version"])
    said = capsys.readouterr().out
    assert re.fullmatch(rf"jaxrl_llm {jl.__version__} jax [\d.]+ flax [\d.]+ optax [\d.]+\n", said)


# The configs that come with the package.


def test_a_config_of_the_package_has_a_name(capsys, tmp_path, monkeypatch):
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    names = [path.stem for path in sorted((ROOT / "configs").glob("*.py"))]
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 5 for line in lines)
    main(["configs", "show", "kk_tiny"])
    assert capsys.readouterr().out == (ROOT / "configs/kk_tiny.py").read_text()
    monkeypatch.chdir(tmp_path)
    for command in ("train", "plan"):
        with pytest.raises(SystemExit) as stop:
            main([command, "kk_tiny", "--help"])
        assert stop.value.code == 0
        assert "--learning-rate" in capsys.readouterr().out
    assert configs.named("kk_tiny") == ROOT / "configs/kk_tiny.py"
    assert configs.named("studies/dose") == ROOT / "configs/studies/dose.py"
    (tmp_path / "kk_tiny.py").touch()
    assert configs.named("kk_tiny.py") == pathlib.Path("kk_tiny.py")  # a path is one


def test_an_installed_package_has_its_configs_in_it(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "config.py"))
    assert configs.shipped() == tmp_path / "configs"
