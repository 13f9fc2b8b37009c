"""Runs in a bucket: the same as in a folder, through kills, damage and cuts of the network."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

from jaxrl_llm import desk
from jaxrl_llm.cli import main as cli
from jaxrl_llm.cli import serve
from jaxrl_llm.config import Pretrained
from jaxrl_llm.runs import assemble, folder
from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.storage import Place
from jaxrl_llm.tasks import builders
from jaxrl_llm.tasks.knights_knaves import task as knights_knaves
from jaxrl_llm.tasks.knights_knaves.generate import Recipe
from tests.training import quick, test_analyze
from tests.training.conftest import forget
from tests.training.process import QUICK, ROOT, metrics, train

SMALL = ("--warm-steps", "0", "--steps", "4")


def users(environment):
    """A user of the server: one device, and what `wire` has set."""
    return environment | {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}


def trained(environment, url, *flags, **how):
    done = train(users(environment), url, *flags, **how)
    assert done.returncode == 0, done.stderr
    return done


def recorded(url):
    forget()
    return metrics(folder.at_hand(Path(url)))


@pytest.fixture(scope="session")
def small(environment, tmp_path_factory):
    """The records of a run of four steps in a folder."""
    out = tmp_path_factory.mktemp("small") / "run"
    assert train(environment, out, *SMALL).returncode == 0
    return metrics(out)


@pytest.fixture
def stored(environment, url):
    """A run of four steps in a bucket, whole."""
    trained(environment, url, *SMALL)
    return url


def test_a_run_in_a_bucket_is_the_same_as_in_a_folder(environment, whole, url):
    url = f"{url}/lr=[1e-4] [b]*"
    done = trained(environment, url)
    assert recorded(url) == metrics(whole)
    assert f"talk to it: jaxrl-llm sample {url}" in done.stdout
    assert done.stderr == ""
    names = set(Place(url).names())
    assert {"run.json", "config.py", "metrics.jsonl", "curves.png", "reference.json"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"8", "10"}
    assert any(name.startswith("tensorboard/events") for name in names)
    assert {p.name for p in (whole / "samples").iterdir()} == {
        name.partition("/")[2] for name in names if name.startswith("samples/")
    }
    again = trained(environment, url, "--resume")
    assert f"nothing was left to do in {url}" in again.stdout


def test_a_second_trainer_is_refused_and_the_first_goes_on(environment, small, url):
    command = [sys.executable, "-m", "jaxrl_llm.cli", "train", QUICK, "--out", url, *SMALL]
    with subprocess.Popen(
        command, cwd=ROOT, env=users(environment), stdout=subprocess.DEVNULL
    ) as first:
        until = time.monotonic() + 120
        while "run.json" not in Place(url).names():
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)
        second = train(users(environment), url, *SMALL, "--resume")
        assert second.returncode == 2
        assert f"{url} is in use by process {first.pid} on " in second.stderr
        first.send_signal(signal.SIGCONT)
        assert first.wait() == 0
    assert recorded(url) == small


@pytest.mark.parametrize(
    ("moment", "nth", "delay"),
    [("save", 2, 0.05), pytest.param("update", 4, 0.0, marks=pytest.mark.slow)],
)
def test_killed_and_resumed_it_is_the_same(environment, small, url, moment, nth, delay):
    program = ("-m", "tests.training.killed", moment, str(nth), str(delay))
    assert train(users(environment), url, *SMALL, program=program).returncode == -signal.SIGKILL
    forget()
    assert json.loads(Place(url).read("run.json"))
    trained(environment, url, *SMALL, "--resume")
    assert recorded(url) == small


def test_half_a_checkpoint_is_none(environment, small, stored):
    """The upload was cut short before the file that says it is whole."""
    Place(stored).remove("checkpoints/4/_CHECKPOINT_METADATA")
    here = folder.at_hand(Path(stored))
    assert Checkpoints(here / "checkpoints", read_only=True).steps == [2]
    assert "4" in desk.entries(here / "checkpoints")
    trained(environment, stored, *SMALL, "--resume")
    assert recorded(stored) == small


@pytest.mark.parametrize(
    "damage",
    ["flipped", *(pytest.param(name, marks=pytest.mark.slow) for name in ("short", "lost"))],
)
def test_a_damaged_checkpoint_is_passed_over_and_kept_aside(environment, small, stored, damage):
    place = Place(stored)
    sizes = place.names("checkpoints/4/state")
    largest = max(sizes, key=lambda name: sizes[name])
    content = bytearray(place.read(largest))
    if damage == "flipped":
        content[len(content) // 2] ^= 1
        place.write(largest, bytes(content))
    elif damage == "short":
        place.write(largest, bytes(content[: len(content) // 2]))
    else:
        place.remove(largest)
    left = place.names("checkpoints/4")
    done = trained(environment, stored, *SMALL, "--resume")
    assert f"set aside as {stored}/checkpoints/damaged-4-0" in done.stderr
    aside = place.names("checkpoints/damaged-4-0")
    assert set(aside.values()) == set(left.values())
    assert recorded(stored) == small


def test_other_commands_read_a_run_in_a_bucket(environment, stored, tmp_path, capsys, url):
    def said(*arguments):
        forget()
        cli.main(list(map(str, arguments)))
        return capsys.readouterr().out

    assert f"{stored}, step" in said("eval", stored, "--step", "4")
    assert said("sample", stored, "--example", "0")
    local, remote = tmp_path / "model", f"{url}/exported"
    said("export", stored, local)
    assert f"written to {remote}" in said("export", stored, remote)
    forget()
    here = desk.at_hand(Path(remote))
    desk.fetch(here)
    assert {p.name: p.read_bytes() for p in here.iterdir()} == {
        p.name: p.read_bytes() for p in local.iterdir()
    }
    forget()
    config = replace(quick.config(), model=Pretrained(remote), warm_start=None)
    assert assemble.parts(config, tmp_path).source == desk.at_hand(Path(remote))
    forget()
    options, parts = serve.Options(run=Path(stored)), assemble.parts(quick.config(), tmp_path)
    served = serve._first_weights(options, config, parts, "float32", tmp_path / "served")
    assert list(served.glob("*.safetensors"))
    with pytest.raises(SystemExit):
        said("export", stored, remote)
    assert f"{remote} is not empty" in capsys.readouterr().err
    picture = f"{url}/pictures/both.png"
    assert f"written to {picture}" in said("plot", stored, "--out", picture)
    assert Place(picture.rpartition("/")[0]).read("both.png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_analysis_lies_beside_the_run(url, tmp_path, capsys):
    (tmp_path / "config.py").write_text(test_analyze.CONFIG)
    cli.main(["train", str(tmp_path / "config.py"), "--out", url])
    forget()
    cli.main(["analyze", url, "--step", "1", "--prompts", "6", "--tokens", "4"])
    assert f"written to {url}/analysis" in capsys.readouterr().out
    names = {name.partition("/")[2] for name in Place(url).names("analysis")}
    assert names == test_analyze.FIGURES | {"analysis.json"}


def test_a_run_begins_with_the_warm_start_of_one_in_a_bucket(environment, url, tmp_path):
    flags = ("--warm-steps", "4", "--steps", "2")
    trained(environment, f"{url}/a", *flags)
    trained(environment, f"{url}/b", *flags, "--from", f"{url}/a")
    assert json.loads(Place(f"{url}/b").read("run.json"))["from"] == f"{url}/a"
    begun = [r for r in recorded(f"{url}/a") if r["step"] > 4]
    assert [r for r in recorded(f"{url}/b") if r["step"] > 4] == begun


def test_data_sets_are_built_once(url):
    recipe = Recipe(people=(3,), depth=1, train=8, test=4)
    task = lambda data: knights_knaves.tiny(*builders.knights_knaves(recipe, data))
    written, prompts = [], []
    for _ in range(2):
        forget()
        made = assemble.parts(replace(quick.config(), task=task), Path(url)).task
        prompts.append([made.prompt(made.train[i]) for i in range(8)])
        found = Place(url)._objects.find(url, detail=True)
        written.append({name: about["LastModified"] for name, about in found.items()})
    assert prompts[0] == prompts[1]
    assert written[0] == written[1]
    assert any(name.endswith("dataset_info.json") for name in written[0])


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_a_network_that_is_cut_during_a_save_costs_nothing_but_time(
    environment, small, url, wire, seconds
):
    wire.cut_at(f"PUT /{url.partition('//')[2]}/checkpoints/2/state".encode())

    def mend():
        wire.met.wait()
        time.sleep(seconds)
        wire.mend()

    threading.Thread(target=mend, daemon=True).start()
    done = trained(environment, url, *SMALL)
    assert wire.met.is_set()
    assert "Traceback" not in done.stderr
    assert recorded(url) == small


def test_a_checkpoint_of_eight_devices_opens_on_one(url):
    eight, one = (
        jax.sharding.NamedSharding(
            jax.make_mesh((n,), ("fsdp",), devices=jax.devices()[:n]), P("fsdp")
        )
        for n in (8, 1)
    )
    array = jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(16, 4), eight)
    here = folder.at_hand(Path(url)) / "checkpoints"
    written = Checkpoints(here)
    written.save(1, {"params": {"a": array}}, {})
    written.close()
    forget()
    like = {"params": {"a": jax.ShapeDtypeStruct((16, 4), "float32", sharding=one)}}
    there = Checkpoints(folder.at_hand(Path(url)) / "checkpoints", read_only=True)
    for found in (
        there.restore(1, like),
        {"params": there.restore(1, like["params"], part="params")},
    ):
        np.testing.assert_array_equal(found["params"]["a"], array)
        assert len(found["params"]["a"].sharding.device_set) == 1
    there.close()


@pytest.mark.slow
def test_a_run_on_eight_devices_goes_on_with_one(environment, url, tmp_path):
    eight = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    trained(environment | eight, url, *SMALL)
    weights = []
    for devices in (environment, environment | eight):
        out = tmp_path / str(len(weights))
        command = [sys.executable, "-m", "jaxrl_llm.cli", "export", url, str(out)]
        subprocess.run(command, cwd=ROOT, env=users(devices), check=True, capture_output=True)
        weights.append(safetensors.numpy.load_file(out / "model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for name, array in weights[0].items():
        np.testing.assert_array_equal(array, weights[1][name])
    trained(environment, url, *SMALL[:3], "6", "--resume")  # on one
    assert [r["step"] for r in recorded(url) if "updates" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": ""}, r"\(.*credentials.*\):"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, r"\(.*127\.0\.0\.1:9.*\):"),
    ],
)
def test_what_is_wrong_with_the_way_there_is_one_line(environment, url, changes, said, tmp_path):
    there = users(environment) | changes
    there["TMPDIR"] = str(tmp_path)
    done = train(there, url, *SMALL)
    assert done.returncode == 2
    [line] = [x for x in done.stderr.splitlines() if x.startswith("jaxrl-llm: ")]
    assert re.search(said, line)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
