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
from jaxrl_llm.runs.leaving import UNFINISHED

from jaxrl_llm.cli.main import main
from tests.runs import process
from tests.training.process import metrics, port

ROOT = pathlib.Path(__file__).parents[2]
WHEEL = "jaxrl_llm-0.1.0-py3-none-any.whl"
EXAMPLES = {
    "gpu.sh": "gpu configs/kk.py --python .venv/bin/python --folder jaxrl_llm",
    "slurm.sh": "slurm configs/kk.py --nodes 2 --python .venv/bin/python --folder /shared/jaxrl_llm",
    "jobset.yaml": "jobset configs/kk.py --nodes 2 --image registry.example/jaxrl-llm:1 --claim runs "
    "--out /shared/runs/kk",
    "tpu_pod.sh": f"tpu-pod configs/kk.py --type v5litepod-16 --zone us-west4-a --wheel {WHEEL} --out gs://bucket/runs/kk",
}
NASTY = (
    "a b",
    "it's",
    '"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "\\",
    "*",
    "@name@",
    "#",
    "é: - {",
    "%s",
)
NAMED = """from tests.training.quick import config as quick

def config(*, name: str = "", steps: int = 2):
    return quick(warm_steps=0, steps=steps)
"""  # fmt: skip


def printed(capsys, *words):
    main(["launch", *words])
    return capsys.readouterr().out


def example(name):
    """What launch prints where there is a wheel."""
    out = io.StringIO()
    with TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(out):
        pathlib.Path(WHEEL).touch()
        pathlib.Path("configs").symlink_to(ROOT / "configs")
        main(["launch", *shlex.split(EXAMPLES[name])])
    return out.getvalue()


def linter(name):
    """A program that comes with the development tools; without it the test is skipped, in CI it fails."""
    found = shutil.which(name, path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None and os.environ.get("CI"):
        pytest.fail(f"{name} is missing")
    return found or pytest.skip(f"{name} is not here")


def shellcheck(text):
    for script in (text, *heredocs(text)):
        done = subprocess.run(
            [linter("shellcheck"), "-s", "bash", "-e", "SC2016", "-"],
            input=script, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def heredocs(text):
    """The scripts within a script."""
    for _, inner in re.findall(r"<<'(\w+)'\n(.*?)^\1$", text, re.DOTALL | re.MULTILINE):
        yield from (inner, *heredocs(inner))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_files_in_launch_are_what_the_command_prints(name):
    text = (ROOT / "launch" / name).read_text()
    assert text == example(name), f"python -m tests.runs.test_launch writes launch/{name} anew"
    said = text.removeprefix("#!/usr/bin/env bash\n").splitlines()[0]
    assert said.startswith("# Not run on real hardware yet")


@pytest.mark.parametrize("path", sorted((ROOT / "launch").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_pass_the_linter(path):
    shellcheck(path.read_text())


def test_the_container_file_passes_the_linter():
    done = subprocess.run(
        [linter("hadolint"), ROOT / "launch" / "Dockerfile"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_container_is_made_of_what_is_here():
    """What is copied exists, and reaches the build; nothing else does."""
    copies = re.findall(
        r"^COPY (?!--from)(.+) \S+$", (ROOT / "launch/Dockerfile").read_text(), re.MULTILINE
    )
    sources = {source for copy in copies for source in copy.split()}
    assert all((ROOT / source).exists() for source in sources)
    first, *rest = (ROOT / ".dockerignore").read_text().split()
    assert (first, rest.pop()) == ("*", "**/__pycache__")
    assert set(rest) == {f"!{source}" for source in sources}
    assert (ROOT / "launch/Dockerfile").read_text()[-11:] == "\nUSER 1000\n"


# Kubernetes.


def job_set(text):
    """The config map, and the JobSet with its job, both of the form that the cluster wants."""
    config, made = yaml.safe_load_all(text)
    kubernetes_validate.validate(config, "1.31", strict=True)
    assert made["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert made["kind"] == "JobSet"
    assert set(made) == {"apiVersion", "kind", "metadata", "spec"}
    spec = made["spec"]
    assert set(spec) <= {"network", "failurePolicy", "replicatedJobs", "successPolicy", "suspend"}
    assert set(spec["network"]) <= {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    assert set(spec["failurePolicy"]) == {"maxRestarts", "rules"}
    for rule in spec["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        assert rule["action"] in (
            "FailJobSet",
            "RestartJobSet",
            "RestartJobSetAndIgnoreMaxRestarts",
        )
        assert set(rule["onJobFailureReasons"]) <= {"PodFailurePolicy", "BackoffLimitExceeded"}
    [job] = spec["replicatedJobs"]
    assert set(job) <= {"name", "replicas", "template"}
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]}
    kubernetes_validate.validate(whole, "1.31", strict=True)
    return config, made, whole["spec"]


def test_a_job_set_is_what_the_cluster_and_the_trainer_need(capsys):
    words = EXAMPLES["jobset.yaml"].split()
    config, made, job = job_set(printed(capsys, *words, "--grace", "90", "--secret", "hub"))
    assert config["data"] == {"kk.py": (ROOT / "configs" / "kk.py").read_text()}
    assert made["spec"]["network"]["enableDNSHostnames"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] == 2
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 90 + 30
    assert pod["restartPolicy"] == "Never"
    [trainer] = pod["containers"]
    assert trainer["args"][:2] == ["train", "/config/kk.py"]
    assert trainer["args"][-2:] == [
        "--process",
        "$(JOB_COMPLETION_INDEX)/2@kk-trainer-0-0.kk:55527",
    ]
    assert "--resume auto" in " ".join(trainer["args"])
    assert trainer["envFrom"] == [{"secretRef": {"name": "hub"}}]
    mounts = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert mounts == {"weights": "/dev/shm", "config": "/config", "shared": "/shared"}
    assert volumes["weights"] == {"emptyDir": {"medium": "Memory"}}
    assert volumes["shared"] == {"persistentVolumeClaim": {"claimName": "runs"}}
    disrupted, told = job["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert told["onExitCodes"]["values"] == [UNFINISHED]


def expanded(word):
    """As Kubernetes expands an argument in pod 1: `$$` is `$`, and what it does not know stays."""
    known = {"$$": "$", "$(JOB_COMPLETION_INDEX)": "1"}
    return re.sub(r"\$(\$|\(\w+\))", lambda found: known.get(found[0], found[0]), word)


def test_no_text_breaks_out_of_yaml(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    text = NAMED + "\n\n# é 中 \U0001f600 \t: - {} |\n   # after\n\n\n"
    pathlib.Path("my config.py").write_text(text)
    words = ["--image", "i", "--out", "gs://b/x"]
    with pytest.raises(SystemExit):
        main(["launch", "jobset", "my config.py", *words])
    assert "a ConfigMap takes letters" in capsys.readouterr().err
    pathlib.Path("mine.py").write_text(text)
    for nasty in (*NASTY, "$(JOB_COMPLETION_INDEX)", "$$(JOB_COMPLETION_INDEX)", "$$$"):
        config, _, job = job_set(printed(capsys, "jobset", "mine.py", *words, f"--data={nasty}"))
        assert config["data"]["mine.py"] == text
        given = list(map(expanded, job["template"]["spec"]["containers"][0]["args"]))
        assert f"--data={nasty}" in given


# Shells.

SRUN = """#!/usr/bin/env bash
echo "srun $*" >> calls
while [[ $1 = -* ]]; do shift; done
export SLURM_PROCID=0
exec "$@"
"""
NOTED = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> calls
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch, environment):
    """A folder to work in with stand-ins for programs; made by `add`, asked by `calls`, called with `run`."""

    class Cluster:
        folder = tmp_path / "a folder; touch pwned"
        programs = tmp_path / "bin"
        variables = environment | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SLURM_JOB_ID": "7",
            "JAX_COORDINATOR_PORT": str(port()),  # not that of job 7
        }

        def add(self, name, text=NOTED):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

        def calls(self, name):
            path = self.folder / "calls"
            lines = path.read_text().splitlines() if path.exists() else []
            return [line for line in lines if line.startswith(name)]

        def run(self, text, **variables):
            return subprocess.run(
                ["bash"], input=text, cwd=self.folder, env=self.variables | variables, text=True,
                capture_output=True, timeout=300, check=False,
            )  # fmt: skip

    for path in (Cluster.folder, Cluster.programs):
        path.mkdir()
    monkeypatch.chdir(Cluster.folder)
    monkeypatch.syspath_prepend(ROOT)
    return Cluster()


TASKS = """#!/usr/bin/env bash
while [[ $1 = -* ]]; do shift; done
export SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_LOCALID=0
code=0
for i in 0 1; do
    SLURM_PROCID=$i "$@" > task-$i.log 2>&1 &
    tasks+=($!)
done
echo "${tasks[*]}" > tasks
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""


def test_two_tasks_of_slurm_train_save_and_are_queued_again_and_one_host_finishes(cluster, capsys):
    cluster.add("srun", TASKS)
    cluster.add("scontrol")
    (cluster.folder / "my config.py").write_text(NAMED)
    words = [
        "my config.py",
        "--out",
        "my run",
        "--data",
        "$(touch pwned)",
        "--gpus",
        "1",
        "--steps",
    ]
    script = printed(capsys, "slurm", *words, "400", "--nodes", "2")
    shellcheck(script)
    run = cluster.folder / "my run"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=cluster.folder, env=cluster.variables, start_new_session=True
    ) as job:
        try:
            while not (run.exists() and any(record["step"] for record in metrics(run))):
                assert job.poll() is None
                time.sleep(0.05)
            told = int((cluster.folder / "tasks").read_text().split()[1])
            os.kill(told, signal.SIGTERM)  # as on a node that goes away
            assert job.wait(timeout=100) == UNFINISHED
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert cluster.calls("scontrol") == ["scontrol requeue 7"]
    reached = metrics(run)[-1]["step"]
    done = cluster.run(printed(capsys, "gpu", *words, str(reached + 1)))
    assert done.returncode == 0, done.stderr
    assert [r["step"] for r in metrics(run) if "reward" in r] == list(range(1, reached + 2))
    assert not list(cluster.folder.rglob("pwned"))


ENDS = """#!/usr/bin/env bash
echo "$*" >> calls
exit {}
"""


@pytest.mark.parametrize(
    ("code", "failures", "again"),
    [(0, 0, False), (2, 0, True), (UNFINISHED, 99, True), (1, 19, True), (1, 20, False)],
)
def test_slurm_queues_again_what_did_not_finish(cluster, capsys, code, failures, again):
    """Preemptions, which Slurm counts too, are no failures."""
    cluster.add("srun", SRUN)
    cluster.add("scontrol")
    cluster.add("trainer", ENDS.format(code))
    script = printed(
        capsys, "slurm", str(ROOT / process.QUICK), "--python", "trainer", "--nodes", "3"
    )
    assert "#SBATCH --nodes=3\n" in script
    noted = cluster.folder / "logs" / "quick-7.failed"
    noted.parent.mkdir()
    noted.write_text("again\n" * failures)
    done = cluster.run(script, SLURM_RESTART_COUNT="99")
    assert len(noted.read_text().splitlines()) == failures + (code in (1, 2))
    assert done.returncode == code
    assert cluster.calls("scontrol") == ["scontrol requeue 7"] * again
    [call] = cluster.calls("-P -m jaxrl_llm.cli train ")
    assert call.endswith(" --resume auto --process auto")


WAITS = """#!/usr/bin/env bash
trap 'sleep 0.5; exit {}' TERM
touch "$PWD/up"
while :; do sleep 0.05; done
"""


KILLED = 128 + signal.SIGTERM  # before it could do anything about it


@pytest.mark.parametrize(
    ("kind", "code"), [("slurm", UNFINISHED), ("gpu", UNFINISHED), ("gpu", KILLED)]
)
def test_told_to_stop_the_trainer_may_save(cluster, capsys, kind, code):
    """scancel ends the batch script and the step; a script on one host has to pass it on."""
    cluster.add("srun", SRUN)
    cluster.add("scontrol")
    cluster.add("trainer", WAITS.format(code))
    script = printed(capsys, kind, str(ROOT / process.QUICK), "--python", "trainer")
    with subprocess.Popen(
        ["bash", "-c", script], cwd=cluster.folder, env=cluster.variables, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as running:  # fmt: skip
        try:
            while not (cluster.folder / "up").exists():
                assert running.poll() is None
                time.sleep(0.02)
            tell = os.killpg if kind == "slurm" else os.kill
            tell(running.pid, signal.SIGTERM)
            assert running.wait(timeout=100) == code
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert cluster.calls("scontrol") == []


def test_one_host_starts_a_broken_trainer_again(cluster, capsys):
    fails_twice = (
        '#!/usr/bin/env bash\necho "$*" >> calls\n[ "$(wc -l < calls)" -gt 3 ] || exit 1\n'
    )
    cluster.add("sleep")
    cluster.add("trainer", fails_twice)
    words = ("gpu", str(ROOT / process.QUICK), "--python", "trainer")
    done = cluster.run(printed(capsys, *words))
    assert done.returncode == 0, done.stderr
    assert len(cluster.calls("-P -m jaxrl_llm.cli train")) == 3
    assert cluster.calls("sleep") == ["sleep 30"] * 2
    cluster.add("trainer", ENDS.format(1))
    assert cluster.run(printed(capsys, *words)).returncode == 1
    assert len(cluster.calls("sleep")) == 2 + 21


GCLOUD = """#!/usr/bin/env bash
echo "gcloud $*" >> calls
case $* in
*" list "*) head -1 states; sed -i 1d states ;;
"storage cat"*) [ -s states ] && exit 1; cat ended ;;
*startup-script=*) cp "${!#/--metadata-from-file=startup-script=/}" worker ;;
"storage rm"*) exit 1 ;;
esac
"""


@pytest.mark.parametrize(("ended", "code"), [("exit code 0\nbye", 0), ("exit code 2\nno", 1)])
def test_a_tpu_pod_is_asked_for_again_until_the_run_has_ended(cluster, capsys, ended, code):
    cluster.add("gcloud", GCLOUD)
    cluster.add("sleep")
    (cluster.folder / "my config.py").write_text(NAMED)
    (cluster.folder / WHEEL).write_text("")
    states = ["", "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED", "", "ACTIVE"]
    (cluster.folder / "states").write_text("\n".join(states) + "\n")
    (cluster.folder / "ended").write_text(ended + "\n")
    words = [
        "tpu-pod",
        "my config.py",
        "--wheel",
        WHEEL,
        "--type",
        "v6e-16",
        "--zone",
        "us-east5-a",
    ]
    script = printed(capsys, *words, "--out", "gs://b/x y", "--data", "it's $(touch pwned)")
    shellcheck(script)
    done = cluster.run(script)
    assert (done.returncode, ended in done.stdout) == (code, True), done.stderr
    changes = [x.split()[4:6] for x in cluster.calls("gcloud compute") if " list " not in x]
    name = "my-config"
    assert changes == [[x, name] for x in ("create", "delete", "create", "delete")]
    assert cluster.calls("gcloud storage cp")[0].endswith("my config.py gs://b/x y-launch/")
    run = next(heredocs((cluster.folder / "worker").read_text()))
    command = next(line for line in run.splitlines() if "venv/bin/jaxrl-llm" in line)
    given = shlex.split(command)
    given = given[given.index("venv/bin/jaxrl-llm") :]
    assert given[1:7] == [
        "train",
        "my config.py",
        "--out",
        "gs://b/x y",
        "--data",
        "it's $(touch pwned)",
    ]
    assert given[7:] == ["--resume", "auto", "--process", "auto"]
    assert not list(cluster.folder.rglob("pwned"))


def test_a_tpu_pod_that_is_refused_is_not_asked_for_for_ever(cluster, capsys):
    cluster.add("gcloud", GCLOUD)
    cluster.add("sleep")
    (cluster.folder / WHEEL).write_text("")
    (cluster.folder / "states").write_text("\nFAILED\n\nACTIVE\n" + "\nFAILED\n" * 9)
    words = ["--wheel", WHEEL, "--type", "v4-16", "--zone", "us-central2-b", "--out", "gs://b/x"]
    done = cluster.run(printed(capsys, "tpu-pod", str(ROOT / process.QUICK), *words))
    assert (done.returncode, "refused three times" in done.stderr) == (2, True)
    assert len(cluster.calls("gcloud compute tpus queued-resources create")) == 5


INSTALLS = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> calls
[[ -e flaky ]] || { touch flaky; exit 1; }
[[ $* != *.whl* ]] || { mkdir -p venv/bin && cp "$(dirname "$0")/trainer" venv/bin/jaxrl-llm; }
"""
RUNS = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> calls
while [[ $1 = -* ]]; do shift; done
exec "$@"
"""


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(("code", "starts"), [(0, 1), (2, 20)])
def test_a_worker_of_a_tpu_pod_says_when_the_run_has_ended(cluster, capsys, worker, code, starts):
    """Worker 0 alone: it writes the run, and knows that all is written."""
    for name, text in {
        "gcloud": NOTED + '[[ $* != *" - "* ]] || cat > said\n',
        "python3": INSTALLS, "trainer": ENDS.format(code), "systemd-run": RUNS, "sleep": NOTED,
        "systemctl": "#!/usr/bin/env bash\nexit 3\n", "curl": f"#!/usr/bin/env bash\necho {worker}\n",
        "journalctl": "#!/usr/bin/env bash\necho 'the last line'\n",
    }.items():  # fmt: skip
        cluster.add(name, text)
    (cluster.folder / WHEEL).write_text("")
    words = ["--wheel", WHEEL, "--type", "v4-16", "--zone", "us-central2-b", "--out", "gs://b/x"]
    script = printed(capsys, "tpu-pod", str(ROOT / process.QUICK), *words)
    boot = next(heredocs(script)).replace("/opt/jaxrl-llm", shlex.quote(str(cluster.folder)))
    done = cluster.run(boot)
    assert done.returncode == 0, done.stderr
    train = "train quick.py --out gs://b/x --resume auto --process auto"
    assert cluster.calls("train ") == [train] * starts
    fetched, *later = cluster.calls("gcloud")[1:]  # again, for pip failed the first time
    assert fetched.endswith(" .")
    assert later == ["gcloud storage cp - gs://b/x-launch/ended"] * (worker == 0)
    said = cluster.folder / "said"
    assert worker or said.read_text() == f"exit code {code}\nthe last line\n"
    installs = len(cluster.calls("python3"))
    assert cluster.run(boot).returncode == 0  # the next boot
    assert len(cluster.calls("python3")) == installs == 4


@pytest.mark.parametrize("nasty", NASTY)
def test_no_text_breaks_out_of_the_shell(cluster, capsys, nasty):
    cluster.add("trainer", '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > given\n')
    words = ["--python", "trainer", "--data", nasty]
    done = cluster.run(printed(capsys, "gpu", str(ROOT / process.QUICK), *words))
    assert done.returncode == 0, done.stderr
    given = (cluster.folder / "given").read_text().splitlines()
    assert given[given.index("--data") + 1] == nasty
    assert not list(cluster.folder.rglob("pwned"))


# What is wrong.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpus configs/kk.py", "known are gpu, slurm, jobset, tpu-pod"),
        ("gpu configs/none.py", "does not exist"),
        ("gpu", "wants a config file"),
        ("gpu configs/kk.py --aplha 0.1", "--alpha"),
        ("gpu configs/kk.py --resume", "leave --resume out"),
        ("gpu configs/kk.py --dry_run", "leave --dry_run out"),
        ("slurm configs/kk.py --process=auto", "leave --process=auto out"),
        ("slurm configs/kk.py --nodes 0", "must be at least 1"),
        ("slurm configs/kk.py --time 1;2", "write it as Slurm does"),
        ("slurm configs/kk.py --name a;b", "lower-case letters"),
        ("slurm configs/kk.py --image x", "--image"),
        ("gpu configs/math.py --python x --folder=y --test z --steps many", "--steps"),
        ("gpu configs/kk.py --data 'a\nb'", "holds a line break"),
        ("jobset configs/kk.py --out gs://b/x", "--image"),
        ("jobset configs/kk.py --image x", "--out is missing"),
        ("jobset configs/kk.py --image x --out runs/x --claim y", "a folder in /shared"),
        ("jobset configs/kk.py --image x --out /shared/x", "--claim NAME"),
        ("jobset configs/kk.py --image x --out https://host/x", "only s3:// and gs:// are known"),
        ("slurm configs/kk.py --out https://host/x", "only s3:// and gs:// are known"),
        ("gpu configs/kk.py --out https://host/x", "only s3:// and gs:// are known"),
        ("tpu-pod configs/kk.py --type v5litepod-16 --zone z", "--wheel"),
        ("slurm configs/kk.py --time 10:00", "give 10 minutes more than that"),
        ("slurm configs/kk.py --time 1:2:3:4", "write it as Slurm does"),
        ("tpu-pod configs/kk.py --type v9-1 --zone z --wheel w --out gs://b/x", "known are v4-N"),
        ("tpu-pod configs/kk.py --type v4-8 --zone z --wheel w --out gs://b/x", "is no wheel"),
        ("tpu-pod configs/kk.py --type v4-8 --zone z --wheel w --out runs/x", "give gs://"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stop:
        main(["launch", *shlex.split(words)])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


@pytest.mark.parametrize(
    "words",
    [
        ["jobset", "--image", "i", "--out", "gs://b/x"],
        ["tpu-pod", "--wheel", WHEEL, "--type", "v4-16", "--zone", "us-central2-b", "--out", "gs://b/x"],
    ],
)  # fmt: skip
def test_a_config_that_travels_by_itself_loads_no_other(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pathlib.Path(WHEEL).touch()
    pathlib.Path("quick.py").write_text(NAMED)
    text = """from pathlib import Path
from jaxrl_llm.config import load
make = load(Path(__file__).with_name("quick.py"))

def config(*, steps: int = 2):
    return make(steps=steps)
"""
    pathlib.Path("other.py").write_text(text)
    assert printed(capsys, words[0], "quick.py", *words[1:])
    assert printed(capsys, "gpu", "other.py")
    with pytest.raises(SystemExit) as ended:
        main(["launch", words[0], "other.py", *words[1:]])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert f"other.py loads {tmp_path / 'quick.py'}, which would not travel" in said


def test_a_flag_of_both_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    path = tmp_path / "mine.py"
    path.write_text(NAMED)
    assert "--steps 3" in printed(capsys, "slurm", str(path), "--steps", "3")
    assert "--name x" in printed(capsys, "gpu", str(path), "--name", "x")
    with pytest.raises(SystemExit):
        main(["launch", "slurm", str(path), "--name=x"])
    assert "--name is a flag of both launch slurm and" in capsys.readouterr().err


WITH_SERVERS = """from dataclasses import replace
from jaxrl_llm.rollouts.engines import Vllm
from tests.training.quick import config as quick

def config():
    return replace(quick(), engine=Vllm(python="python", devices=("4,5", "6,7")))
"""


def test_the_trainer_leaves_the_servers_their_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    path = tmp_path / "mine.py"
    path.write_text(WITH_SERVERS)
    for kind in ("gpu", "slurm"):
        script = printed(capsys, kind, str(path))
        assert "export CUDA_VISIBLE_DEVICES=0,1,2,3 " in script
        shellcheck(script)
    _, _, job = job_set(printed(capsys, "jobset", str(path), "--image", "i", "--out", "s3://b/x"))
    assert {"name": "CUDA_VISIBLE_DEVICES", "value": "0,1,2,3"} in job["template"]["spec"][
        "containers"
    ][0]["env"]
    for gpus in ("4", "6"):
        with pytest.raises(SystemExit):
            main(["launch", "slurm", str(path), "--gpus", gpus])
        assert "the config gives 4, 5, 6, 7 to vLLM" in capsys.readouterr().err
    assert "CUDA_VISIBLE" not in printed(capsys, "gpu", str(ROOT / process.QUICK))


def test_help_is_of_the_kind(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["launch", "slurm", "configs/kk.py", "--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--nodes" in out
    assert "jaxrl-llm train configs/kk.py --help" in out
    with pytest.raises(SystemExit) as stop:
        main(["launch", "slurm", "--help"])
    assert stop.value.code == 0
    assert "--nodes" in capsys.readouterr().out


if __name__ == "__main__":
    for file in EXAMPLES:
        (ROOT / "launch" / file).write_text(example(file))
