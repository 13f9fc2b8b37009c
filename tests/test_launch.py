"""The files of launch/: read by the tools of their kind, and run dry, with stand-ins for the cluster."""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import kubernetes_validate
import pytest
import yaml

from jaxrl_llm.cli.main import main
from jaxrl_llm.training.leaving import UNFINISHED

ROOT = pathlib.Path(__file__).parents[1]
WHEEL = "jaxrl_llm-0.1.0-py3-none-any.whl"
NASTY = [
    *'"\\*#',
    "a b",
    "it's",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "é: - {",
    "%s",
    "$$$",
]


@pytest.fixture
def folder(tmp_path):
    """Where a script is called: with a config and what may be a wheel."""
    folder = tmp_path / "a folder; touch pwned"
    folder.mkdir()
    (folder / "mine.py").touch()
    (folder / WHEEL).touch()
    return folder


def script(name, **settings):
    """A file of launch/, with these of the settings at its top."""
    text = (ROOT / "launch" / name).read_text()
    for setting, value in settings.items():
        text, there = re.subn(rf"^{setting}=\S*", f"{setting}={value}", text, flags=re.MULTILINE)
        assert there == 1
    return text


def linted(name, *arguments, text=None):
    """By a program that comes with the development tools; without it the test is skipped, in CI it fails."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.fail(f"{name} is missing") if os.environ.get("CI") else pytest.skip(f"no {name}")
    done = subprocess.run([found, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def heredocs(text):
    """The scripts within a script."""
    for _, inner in re.findall(r"<<'(\w+)'\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE):
        yield from (inner, *heredocs(inner))


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_pass_the_linter(path):
    whole, *inner = path.read_text(), *heredocs(path.read_text())
    linted("shellcheck", "-s", "bash", "-e", "SC2016", "-", text=whole)
    for text in inner:  # whose variables come from the script around it
        linted("shellcheck", "-s", "bash", "-e", "SC2154", "-", text=text)


@pytest.mark.parametrize("name", ["gpu.sh", "slurm.sh", "tpu_pod.sh", "jobset.yaml", "Dockerfile"])
def test_what_was_never_run_on_a_cluster_says_so(name):
    lines = (ROOT / "launch" / name).read_text().splitlines()[:4]
    assert any("Not run on real hardware yet" in line for line in lines)


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
    assert path.read_text().index("COPY configs") < path.read_text().index(
        "--no-deps ."
    )  # they are in the wheel


# Kubernetes.


def test_a_job_set_is_what_the_cluster_and_the_trainer_need():
    policy, made = yaml.safe_load_all(script("jobset.yaml"))
    [replicated] = made["spec"]["replicatedJobs"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    for one in (policy, whole | replicated["template"]):
        kubernetes_validate.validate(one, "1.31", strict=True)
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 2
    pod, name = job["template"]["spec"], made["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] >= 60 + 30  # of --grace
    [trainer] = pod["containers"]
    meet = f"$(JOB_COMPLETION_INDEX)/2@{name}-{replicated['name']}-0-0.{name}:55527"
    run = ["train", "/config/run.py", "--out", "/shared/runs/kk", "--resume", "auto"]
    assert trainer["args"] == [*run, "--process", meet]
    mounted = {mount["name"] for mount in trainer["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [UNFINISHED]
    [same] = {one["podSelector"]["matchLabels"]["jobset.sigs.k8s.io/jobset-name"]
              for one in (policy["spec"], *policy["spec"]["ingress"][0]["from"])}  # fmt: skip
    assert same == name == pod["volumes"][1]["configMap"]["name"]


# Shells.

NOTES = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >> calls\n'
RUNS = NOTES + 'while [[ $1 = -* ]]; do shift; done\nexec "$@"\n'
WAITS = NOTES + "trap 'sleep 0.5; exit {}' TERM\ntouch up\nwhile :; do sleep 0.05; done\n"
TRAIN = "trainer -P -m jaxrl_llm train mine.py --steps 3 --resume auto"


class Cluster:
    """Stand-ins for programs, which note how they are called."""

    def __init__(self, folder, nodes=1, **programs):
        self.folder, self.bin = folder, folder.parent / "bin"
        self.bin.mkdir()
        path = f"{self.bin}:{os.environ['PATH']}"
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "kk", "SLURM_JOB_NUM_NODES": str(nodes)}
        self.environment = os.environ | {"PATH": path} | slurm
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

    def command(self, text, *words):
        return ["bash", "-c", text, "script", *(words or ("mine.py", "--steps", "3"))]

    def run(self, text, *words):
        return subprocess.run(
            self.command(text, *words), cwd=self.folder, env=self.environment, text=True,
            capture_output=True, timeout=600, check=False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "failures", "again"),
    [(0, 0, False), (2, 0, True), (UNFINISHED, 99, True), (1, 19, True), (1, 20, False)],
)
def test_slurm_queues_again_what_did_not_finish(folder, code, failures, again):
    """Preemptions, which Slurm counts too, are no failures."""
    cluster = Cluster(folder, nodes=3, trainer=NOTES + f"exit {code}")
    noted = folder / "logs" / "kk-7.failed"
    noted.parent.mkdir()
    noted.write_text("again\n" * failures)
    assert cluster.run(script("slurm.sh", python="trainer")).returncode == code
    assert len(noted.read_text().splitlines()) == failures + (code in (1, 2))
    assert cluster.calls("scontrol") == ["scontrol requeue 7"] * again
    assert cluster.calls("trainer") == [f"{TRAIN} --process auto"]


@pytest.mark.parametrize("name", ["gpu.sh", "slurm.sh"])
def test_the_trainer_leaves_the_servers_their_gpus(folder, name):
    cluster = Cluster(folder, trainer=NOTES + 'echo "gpus $CUDA_VISIBLE_DEVICES" >> calls\n')
    cluster.environment["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    cluster.add("srun", RUNS.replace("exec", "CUDA_VISIBLE_DEVICES=0,1,2,3 exec"))  # as srun does
    for gpus, seen in (("", "0,1,2,3"), ("2,3", "2,3")):
        assert cluster.run(script(name, python="trainer", gpus=gpus)).returncode == 0
        assert cluster.calls("trainer")[-1] == TRAIN
        assert cluster.calls("gpus")[-1] == f"gpus {seen}"


@pytest.mark.parametrize(
    ("name", "code"),
    [("slurm.sh", UNFINISHED), ("gpu.sh", UNFINISHED), ("gpu.sh", 128 + signal.SIGTERM)],
)
def test_told_to_stop_the_trainer_may_save(folder, name, code):
    """scancel ends the batch script and the step; a script on one host has to pass it on."""
    cluster = Cluster(folder, trainer=WAITS.format(code))
    (cluster.bin / "sleep").unlink()
    with subprocess.Popen(
        cluster.command(script(name, python="trainer")), cwd=folder, env=cluster.environment,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            while not (folder / "up").exists():
                assert running.poll() is None
                time.sleep(0.02)
            tell = os.killpg if name == "slurm.sh" else os.kill
            tell(running.pid, signal.SIGTERM)
            assert running.wait(timeout=600) == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert cluster.calls("scontrol") == []


def test_one_host_starts_a_broken_trainer_again(folder):
    cluster = Cluster(folder, trainer=NOTES + '[ "$(grep -c ^trainer calls)" -gt 2 ] || exit 1\n')
    done = cluster.run(script("gpu.sh", python="trainer"))
    assert done.returncode == 0, done.stderr
    assert cluster.calls("trainer") == [TRAIN] * 3
    assert cluster.calls("sleep") == ["sleep 30"] * 2
    cluster.add("trainer", "#!/usr/bin/env bash\nexit 1\n")
    assert cluster.run(script("gpu.sh", python="trainer", restarts=4)).returncode == 1
    assert len(cluster.calls("sleep")) == 2 + 5


@pytest.mark.parametrize("name", ["gpu.sh", "slurm.sh"])
def test_arguments_arrive_as_they_are(folder, name):
    cluster = Cluster(folder, trainer='#!/usr/bin/env bash\nprintf "%s\\n" "$@" > given\n')
    words = ["mine.py", *(word for nasty in NASTY for word in ("--data", nasty))]
    done = cluster.run(script(name, python="trainer"), *words)
    assert done.returncode == 0, done.stderr
    given = (folder / "given").read_text().splitlines()
    assert given == ["-P", "-m", "jaxrl_llm", "train", *words, "--resume", "auto"]
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


def asked(folder, states, *words, ended="exit code 0", **settings):
    """A slice was asked for, whose states are these: the cluster, and how the script ended."""
    cluster = Cluster(folder, gcloud=GCLOUD)
    (folder / "states").write_text("\n".join(states) + "\n")
    (folder / "ended").write_text(ended + "\n")
    return cluster, cluster.run(script("tpu_pod.sh", **settings), *words)


@pytest.mark.parametrize(("ended", "code"), [("exit code 0\nbye", 0), ("exit code 2\nno", 1)])
def test_a_tpu_pod_is_asked_for_again_until_the_run_has_ended(folder, ended, code):
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "", "ACTIVE"]
    cluster, done = asked(folder, states, ended=ended, account="me@b")
    assert (done.returncode, ended in done.stdout) == (code, True), done.stderr
    changes = [x for x in cluster.calls("gcloud compute") if " list " not in x]
    assert [x.split()[4] for x in changes] == ["create", "delete", "create", "delete"]
    assert "--spot --async --service-account=me@b" in changes[0]
    assert cluster.calls("gcloud storage cp")[0].endswith("mine.py gs://bucket/runs/kk-launch/")


def test_a_tpu_pod_that_is_refused_is_not_asked_for_for_ever(folder):
    states = ["", "FAILED", "", "ACTIVE", *["", "FAILED"] * 9]
    cluster, done = asked(folder, states)
    assert (done.returncode, "refused three times" in done.stderr) == (2, True)
    assert len(cluster.calls("gcloud compute tpus queued-resources create")) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"out": "runs/kk"}, ()), ({"wheel": "none.whl"}, ()), ({}, ("none.py",))],
)
def test_what_a_tpu_pod_cannot_start_with_is_one_line(folder, settings, words):
    cluster, done = asked(folder, [], *words, **settings)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert not cluster.calls("gcloud")


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
    cluster, _ = asked(folder, ["", "ACTIVE"], "mine.py", "--data", "it's $(touch pwned)")
    given = '\nprintf "%s\\n" "$@" > given'
    for name, text in {
        "gcloud": UPLOADS, "python3": INSTALLS, "trainer": f"{NOTES}{given}\nexit {code}",
        "systemd-run": RUNS, "systemctl": "#!/bin/sh\nexit 3\n",
        "curl": f"#!/bin/sh\necho {worker}\n", "journalctl": "#!/bin/sh\necho the last line\n",
    }.items():  # fmt: skip
        cluster.add(name, text)
    boot = (folder / "worker").read_text().replace("/opt/jaxrl-llm", shlex.quote(str(folder)))
    (folder / "calls").unlink()
    done = cluster.run(boot)
    assert done.returncode == 0, done.stderr
    assert len(cluster.calls("jaxrl-llm ")) == starts
    words = ["train", "mine.py", "--out", "gs://bucket/runs/kk", "--data", "it's $(touch pwned)"]
    words += ["--resume", "auto", "--process", "auto"]
    assert (folder / "given").read_text().splitlines() == words
    assert not list(folder.parent.rglob("pwned"))
    ends = [x for x in cluster.calls("gcloud") if " - " in x]
    assert ends == ["gcloud storage cp - gs://bucket/runs/kk-launch/ended"] * 2 * (worker == 0)
    assert worker or (folder / "said").read_text() == f"exit code {code}\nthe last line\n"
    assert cluster.run(boot).returncode == 0  # the next boot
    assert len(cluster.calls("python3")) == 4  # one of them failed, none is of the next boot


# What they call.


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
def test_times_are_refused_at_once(flag, least, values, capsys):
    for value in values:
        with pytest.raises(SystemExit) as stop:
            main(["train", str(ROOT / "configs/kk_tiny.py"), f"{flag}={value}"])
        assert stop.value.code == 2
        said = capsys.readouterr()
        line = f"jaxrl-llm: {flag} {float(value):g}: a number from {least:g} to 1,000,000\n"
        assert (said.err, said.out) == (line, "")
