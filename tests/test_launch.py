"""The files that `launch` prints: read by the tools of their kind, and run dry, with stand-ins for the cluster."""

import contextlib
import io
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import kubernetes_validate
import pytest
import yaml

from jaxrl_llm.cli.main import main
from jaxrl_llm.training.leaving import UNFINISHED

ROOT = pathlib.Path(__file__).parents[1]
WHEEL = "jaxrl_llm-0.1.0-py3-none-any.whl"
EXAMPLES = {
    "gpu.sh": "gpu configs/kk.py --python .venv/bin/python --folder /home/me/jaxrl_llm",
    "slurm.sh": "slurm configs/kk.py --nodes 2 --python .venv/bin/python --folder /shared/jaxrl_llm",
    "jobset.yaml": "jobset configs/kk.py --nodes 2 --image registry.example/jaxrl-llm:1 --claim runs "
    "--out /shared/runs/kk",
    "tpu_pod.sh": f"tpu-pod configs/kk.py --type v5litepod-16 --zone us-west4-a --wheel {WHEEL} "
    "--out gs://bucket/runs/kk",
}
POD = f"--wheel {WHEEL} --type v4-16 --zone us-central2-b --out gs://b/x".split()
NASTY = [*'"\\*#', "a b", "it's", "$(touch pwned)", "`touch pwned`", "; touch pwned", "@name@"]
NASTY += ["é: - {", "%s", "$(JOB_COMPLETION_INDEX)", "$$(JOB_COMPLETION_INDEX)", "$$$"]
CONFIG = """from tests.training.quick import config as quick

def config(*, steps: int = 2):
    return quick(warm_steps=0, steps=steps)
"""  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where a test works: with a config and what may be a wheel."""
    folder = tmp_path / "a folder; touch pwned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT)
    (folder / "mine.py").write_text(CONFIG)
    (folder / WHEEL).touch()
    return folder


def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["launch", *words])
    return out.getvalue()


def example(name):
    """What launch prints where there is a wheel."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        pathlib.Path(WHEEL).touch()
        pathlib.Path("configs").symlink_to(ROOT / "configs")
        return printed(*shlex.split(EXAMPLES[name]))


def linted(name, *arguments, text=None):
    """By a program that comes with the development tools; without it the test is skipped, in CI it fails."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.fail(f"{name} is missing") if os.environ.get("CI") else pytest.skip(f"no {name}")
    done = subprocess.run([found, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def shellcheck(text):
    for script in (text, *heredocs(text)):
        linted("shellcheck", "-s", "bash", "-e", "SC2016", "-", text=script)


def heredocs(text):
    """The scripts within a script."""
    for _, inner in re.findall(r"<<'(\w+)'\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE):
        yield from (inner, *heredocs(inner))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_files_in_launch_are_what_the_command_prints(name):
    text = (ROOT / "launch" / name).read_text()
    assert text == example(name), f"python -m tests.test_launch writes launch/{name} anew"
    said = text.removeprefix("#!/usr/bin/env bash\n").splitlines()[0]
    assert said.startswith("# Not run on real hardware yet")


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_pass_the_linter(path):
    shellcheck(path.read_text())


def test_the_container_is_made_of_what_is_here():
    """What is copied exists, and reaches the build; nothing else does."""
    path = ROOT / "launch" / "Dockerfile"
    linted("hadolint", str(path))
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
    sources = {source for copy in copies for source in copy.split()}
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[:1] + ignored[-1:] == ["*", "**/__pycache__"]
    assert set(ignored[1:-1]) == {f"!{source}" for source in sources}
    assert path.read_text().endswith("\nUSER 1000\n")


# Kubernetes.


def job_set(text):
    """The config, and the pods' job, after the objects had the form that the cluster wants."""
    config, policy, made = yaml.safe_load_all(text)
    [job] = made["spec"]["replicatedJobs"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
    for one in (config, policy, whole):
        kubernetes_validate.validate(one, "1.31", strict=True)
    return config["data"]["run.py"], whole["spec"]


def test_a_job_set_is_what_the_cluster_and_the_trainer_need():
    """Besides what launch/jobset.yaml shows: what follows from the flags, and that names agree."""
    words = [*EXAMPLES["jobset.yaml"].split(), "--grace", "90"]
    words[1] = str(ROOT / words[1])
    config, job = job_set(printed(*words))
    assert config == (ROOT / "configs" / "kk.py").read_text()
    assert job["completions"] == job["parallelism"] == 2
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 90 + 30
    [trainer] = pod["containers"]
    meet = "$(JOB_COMPLETION_INDEX)/2@kk-trainer-0-0.kk:55527"
    flags = ["--grace", "90", "--resume", "auto", "--process", meet]
    assert trainer["args"] == ["train", "/config/run.py", "--out", "/shared/runs/kk", *flags]
    mounted = {mount["name"] for mount in trainer["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [UNFINISHED]


def test_no_text_breaks_out_of_yaml():
    """Kubernetes expands arguments: `$$` is `$`, and what it does not know stays."""
    text = CONFIG + "\n\n# é 中 \U0001f600 \t: - {} |\n   # after\n\n\n"
    pathlib.Path("mine.py").write_text(text)
    known = {"$$": "$", "$(JOB_COMPLETION_INDEX)": "1"}
    for nasty in NASTY:
        words = ("--image", nasty, "--out", "gs://b/x", f"--data={nasty}")
        config, job = job_set(printed("jobset", "mine.py", *words))
        assert config == text
        [trainer] = job["template"]["spec"]["containers"]
        assert trainer["image"] == nasty
        expand = lambda word: re.sub(r"\$(\$|\(\w+\))", lambda m: known.get(m[0], m[0]), word)
        assert f"--data={nasty}" in map(expand, trainer["args"])


# Shells.

NOTES = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >> calls\n'
RUNS = NOTES + 'while [[ $1 = -* ]]; do shift; done\nexec "$@"\n'
WAITS = NOTES + "trap 'sleep 0.5; exit {}' TERM\ntouch up\nwhile :; do sleep 0.05; done\n"
TRAIN = "trainer -P -m jaxrl_llm.cli train mine.py"


class Cluster:
    """Stand-ins for programs, which note how they are called."""

    def __init__(self, folder, **programs):
        self.folder, self.bin = folder, folder.parent / "bin"
        self.bin.mkdir()
        path = f"{self.bin}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "SLURM_JOB_ID": "7"}
        for name, text in {"sleep": NOTES, "scontrol": NOTES, "srun": RUNS, **programs}.items():
            self.add(name, text)

    def add(self, name, text):
        path = self.bin / name.replace("_", "-")
        path.write_text(text)
        path.chmod(0o755)

    def calls(self, name):
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(name)]

    def run(self, text):
        return subprocess.run(
            ["bash"], input=text, cwd=self.folder, env=self.environment, text=True,
            capture_output=True, timeout=100, check=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "failures", "again"),
    [(0, 0, False), (2, 0, True), (UNFINISHED, 99, True), (1, 19, True), (1, 20, False)],
)
def test_slurm_queues_again_what_did_not_finish(folder, code, failures, again):
    """Preemptions, which Slurm counts too, are no failures."""
    cluster = Cluster(folder, trainer=NOTES + f"exit {code}")
    script = printed("slurm", "mine.py", "--python=trainer", "--nodes", "3", "--hours", "1.5")
    shellcheck(script)
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --time=90\n" in script
    noted = folder / "logs" / "mine-7.failed"
    noted.parent.mkdir()
    noted.write_text("again\n" * failures)
    assert cluster.run(script).returncode == code
    assert len(noted.read_text().splitlines()) == failures + (code in (1, 2))
    assert cluster.calls("scontrol") == ["scontrol requeue 7"] * again
    assert cluster.calls("trainer") == [f"{TRAIN} --resume auto --process auto"]


@pytest.mark.parametrize(
    ("kind", "code"), [("slurm", UNFINISHED), ("gpu", UNFINISHED), ("gpu", 128 + signal.SIGTERM)]
)
def test_told_to_stop_the_trainer_may_save(folder, kind, code):
    """scancel ends the batch script and the step; a script on one host has to pass it on."""
    cluster = Cluster(folder, trainer=WAITS.format(code))
    (cluster.bin / "sleep").unlink()
    script = printed(kind, "mine.py", "--python", "trainer")
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=cluster.environment, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:  # fmt: skip
        try:
            while not (folder / "up").exists():
                assert running.poll() is None
                time.sleep(0.02)
            tell = os.killpg if kind == "slurm" else os.kill
            tell(running.pid, signal.SIGTERM)
            assert running.wait(timeout=100) == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert cluster.calls("scontrol") == []


def test_one_host_starts_a_broken_trainer_again(folder):
    cluster = Cluster(folder, trainer=NOTES + '[ "$(grep -c ^trainer calls)" -gt 2 ] || exit 1\n')
    script = printed("gpu", "mine.py", "--python", "trainer", "--steps", "3")
    shellcheck(script)
    done = cluster.run(script)
    assert done.returncode == 0, done.stderr
    assert cluster.calls("trainer") == [f"{TRAIN} --steps 3 --resume auto"] * 3
    assert cluster.calls("sleep") == ["sleep 30"] * 2
    cluster.add("trainer", "#!/usr/bin/env bash\nexit 1\n")
    assert cluster.run(script).returncode == 1
    assert len(cluster.calls("sleep")) == 2 + 21


def test_no_text_breaks_out_of_the_shell(folder):
    cluster = Cluster(folder, trainer='#!/usr/bin/env bash\nprintf "%s\\n" "$@" > given\n')
    for nasty in NASTY:
        done = cluster.run(printed("gpu", "mine.py", "--python", "trainer", "--data", nasty))
        assert done.returncode == 0, done.stderr
        given = (folder / "given").read_text().splitlines()
        assert given[given.index("--data") + 1] == nasty
    assert not list(folder.parent.rglob("pwned"))


GCLOUD = (
    NOTES
    + """case $* in
*" list "*) head -1 states; sed -i 1d states ;;
"storage cat"*) [ -s states ] && exit 1; cat ended ;;
*startup-script=*) cp "${!#/--metadata-from-file=startup-script=/}" worker ;;
"storage rm"*) exit 1 ;;
esac
"""
)


@pytest.mark.parametrize(("ended", "code"), [("exit code 0\nbye", 0), ("exit code 2\nno", 1)])
def test_a_tpu_pod_is_asked_for_again_until_the_run_has_ended(folder, ended, code):
    cluster = Cluster(folder, gcloud=GCLOUD)
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "", "ACTIVE"]
    (folder / "states").write_text("\n".join(states) + "\n")
    (folder / "ended").write_text(ended + "\n")
    (folder / "my config.py").write_text(CONFIG)
    trains = ["--out", "gs://b/x y", "--data", "it's $(touch pwned)"]
    script = printed("tpu-pod", "my config.py", *POD, "--service-account", "me@b", *trains)
    shellcheck(script)
    done = cluster.run(script)
    assert (done.returncode, ended in done.stdout) == (code, True), done.stderr
    changes = [x for x in cluster.calls("gcloud compute") if " list " not in x]
    assert [x.split()[4] for x in changes] == ["create", "delete", "create", "delete"]
    assert "--spot --async --service-account=me@b" in changes[0]
    assert cluster.calls("gcloud storage cp")[0].endswith("my config.py gs://b/x y-launch/")
    run = next(heredocs((folder / "worker").read_text()))
    given = shlex.split(next(x for x in run.splitlines() if "venv/bin/jaxrl-llm" in x))
    words = ["train", "my config.py", "--out", "gs://b/x", *trains, "--resume", "auto"]
    assert given[given.index("venv/bin/jaxrl-llm") + 1 :] == [*words, "--process", "auto"]
    assert not list(folder.parent.rglob("pwned"))


def test_a_tpu_pod_that_is_refused_is_not_asked_for_for_ever(folder):
    cluster = Cluster(folder, gcloud=GCLOUD)
    (folder / "states").write_text("\nFAILED\n\nACTIVE\n" + "\nFAILED\n" * 9)
    done = cluster.run(printed("tpu-pod", "mine.py", *POD))
    assert (done.returncode, "refused three times" in done.stderr) == (2, True)
    assert len(cluster.calls("gcloud compute tpus queued-resources create")) == 5


INSTALLS = (
    NOTES
    + """[[ -e flaky ]] || { touch flaky; exit 1; }
[[ $* != *.whl* ]] || { mkdir -p venv/bin && cp "$(dirname "$0")/trainer" venv/bin/jaxrl-llm; }
"""
)
UPLOADS = NOTES + "[[ $* != *' - '* ]] || { [[ -e tried ]] && cat > said || ! touch tried; }\n"


@pytest.mark.parametrize(("worker", "code", "starts"), [(0, 0, 1), (0, 2, 20), (1, 0, 1)])
def test_a_worker_of_a_tpu_pod_says_when_the_run_has_ended(folder, worker, code, starts):
    """Worker 0 alone: it writes the run, and knows that all is written. The first upload fails."""
    cluster = Cluster(
        folder, gcloud=UPLOADS, python3=INSTALLS, trainer=NOTES + f"exit {code}", systemd_run=RUNS,
        systemctl="#!/bin/sh\nexit 3\n", curl=f"#!/bin/sh\necho {worker}\n",
        journalctl="#!/bin/sh\necho the last line\n",
    )  # fmt: skip
    script = printed("tpu-pod", "mine.py", *POD)
    boot = next(heredocs(script)).replace("/opt/jaxrl-llm", shlex.quote(str(folder)))
    done = cluster.run(boot)
    assert done.returncode == 0, done.stderr
    train = "jaxrl-llm train mine.py --out gs://b/x --resume auto --process auto"
    assert cluster.calls("jaxrl-llm ") == [train] * starts
    ends = [x for x in cluster.calls("gcloud") if " - " in x]
    assert ends == ["gcloud storage cp - gs://b/x-launch/ended"] * (2 if worker == 0 else 0)
    assert worker or (folder / "said").read_text() == f"exit code {code}\nthe last line\n"
    assert cluster.run(boot).returncode == 0  # the next boot
    assert len(cluster.calls("python3")) == 4  # one of them failed, none is of the next boot


# What is wrong, and what is not.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpus KK", "a kind of machines and a config (gpu, slurm, jobset, tpu-pod)"),
        ("gpu configs/none.py", "does not exist"),
        ("gpu", "wants a config file"),
        ("gpu KK --aplha 0.1", "--alpha"),
        ("gpu KK --resume", "leave --resume out"),
        ("gpu KK --dry_run", "leave --dry-run out"),
        ("slurm KK --process=auto", "leave --process out"),
        ("slurm KK --nodes 0", "must be at least 1"),
        ("slurm KK --hours nan", "600 s more than that"),
        ("slurm KK --hours 0.1", "600 s more than that"),
        ("slurm KK --name a;b", "lower-case letters"),
        ("slurm KK --image x", "--image"),
        ("gpu KK --python x --folder=y --steps many", "--steps"),
        ("gpu KK --data 'a\nb'", "holds a line break"),
        ("jobset KK --out gs://b/x", "--image"),
        ("jobset KK --image x", "--out is missing"),
        ("jobset KK --image x --out runs/x --claim y", "a folder in /shared"),
        ("jobset KK --image x --out /shared/x", "--claim NAME"),
        ("tpu-pod KK --type v5litepod-16 --zone z", "--wheel"),
        ("tpu-pod KK --type v9-1 --zone z --wheel w --out gs://b/x", "known are v4-N"),
        ("tpu-pod KK --type v4-8 --zone z --wheel w --out gs://b/x", "is no wheel"),
        ("tpu-pod KK --type v4-8 --zone z --wheel w --out runs/x", "give gs://"),
    ],
)
def test_what_is_wrong_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["launch", *shlex.split(words.replace("KK", str(ROOT / "configs/kk.py")))])
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert message in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize("command", ["train", "launch gpu"])
@pytest.mark.parametrize(
    ("flag", "least", "values"),
    [
        ("--max-minutes", 0, ("nan", "inf", "-1", "1e9")),
        ("--grace", 0, ("nan", "inf", "-100", "1e9")),
        ("--lost", 5, ("nan", "inf", "1")),
        ("--stall-minutes", 0.05, ("nan", "inf", "0", "-1")),
        ("--stall-factor", 1, ("nan", "inf", "0", "-1")),
    ],
)
def test_times_are_refused_before_a_day_in_the_queue(command, flag, least, values, capsys):
    for value in values:
        with pytest.raises(SystemExit) as stop:
            main([*command.split(), str(ROOT / "configs/kk_tiny.py"), f"{flag}={value}"])
        assert stop.value.code == 2
        said = capsys.readouterr()
        line = f"jaxrl-llm: {flag} {float(value):g}: a number from {least:g} to 1,000,000\n"
        assert (said.err, said.out) == (line, "")


OTHER = """from pathlib import Path
from jaxrl_llm.config import load
make = load(Path(__file__).with_name("mine.py"))

def config(*, NAME: int = 2):
    return make(steps=NAME)
"""


@pytest.mark.parametrize(
    "words", [["jobset", "--image", "i", "--out", "gs://b/x"], ["tpu-pod", *POD]]
)
def test_a_config_that_travels_by_itself_loads_no_other(words, folder, capsys):
    pathlib.Path("other.py").write_text(OTHER.replace("NAME", "steps"))
    assert printed(words[0], "mine.py", *words[1:])
    assert printed("gpu", "other.py")
    with pytest.raises(SystemExit) as ended:
        main(["launch", words[0], "other.py", *words[1:]])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert f"other.py loads {folder / 'mine.py'}, which would not travel" in said


def test_no_flag_is_of_two(capsys):
    pathlib.Path("other.py").write_text(OTHER.replace("NAME", "hours"))
    assert "--hours 3" in printed("gpu", "other.py", "--hours", "3")
    with pytest.raises(SystemExit):
        main(["launch", "slurm", "other.py"])
    assert "--hours is a flag of both launch slurm and" in capsys.readouterr().err
    for path in sorted((ROOT / "configs").glob("*.py")):
        assert printed("gpu", str(path))
        assert printed("slurm", str(path))
        assert printed("jobset", str(path), "--image=x", "--out=s3://b/x", "--name=x")
        assert printed("tpu-pod", str(path), *POD)


WITH_SERVERS = """from dataclasses import replace
from jaxrl_llm.rollouts.engines import Vllm
from tests.training.quick import config as quick

def config():
    return replace(quick(), engine=Vllm(python="python", devices=("4,5", "6,7")))
"""


def test_the_trainer_leaves_the_servers_their_devices(capsys):
    assert "CUDA_VISIBLE" not in printed("gpu", "mine.py")
    pathlib.Path("mine.py").write_text(WITH_SERVERS)
    for kind in ("gpu", "slurm"):
        script = printed(kind, "mine.py")
        assert "env CUDA_VISIBLE_DEVICES=0,1,2,3 " in script
        shellcheck(script)
    _, job = job_set(printed("jobset", "mine.py", "--image", "i", "--out", "s3://b/x"))
    [trainer] = job["template"]["spec"]["containers"]
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": "0,1,2,3"} in trainer["env"]
    for gpus in ("4", "6"):
        with pytest.raises(SystemExit):
            main(["launch", "slurm", "mine.py", "--gpus", gpus])
        assert "the config gives 4, 5, 6, 7 to vLLM" in capsys.readouterr().err


if __name__ == "__main__":
    for file in EXAMPLES:
        (ROOT / "launch" / file).write_text(example(file))
