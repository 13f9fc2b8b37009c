"""What can happen to a run: each fault starts it, does its worst at a random moment, and says when that was."""

import contextlib
import errno
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos import proxy
from tests.chaos.scene import Finding, Scene, Undisturbed, checkpoints
from tests.chaos.standin import HANGING
from tests.processes import kill
from tests.training.process import steady

NATIVE, OWN, SERVED, REAL = "native", "own server", "server elsewhere", "vLLM"
FOREVER = 10**9
OFTEN = (1, 3, FOREVER)
REWARDS = 40  # in a run, at least
Act = Callable[[Scene, random.Random, Undisturbed], str]
Backup = dict[Path, bytes]


@dataclass(frozen=True)
class Fault:
    """A kind of fault. `damage` is done to what an ended run has left: it gives words and what to put back."""

    engine: str
    act: Act
    damage: Callable[[Scene, random.Random], tuple[str, Backup]] | None = None


# The trainer's processor and signals.


def signalled(
    number: int, times: int, scene: Scene, draw: random.Random, whole: Undisturbed
) -> str:
    """The trainer gets a signal."""
    scene.told = (number,)
    scene.start()
    moment = scene.wait_for(draw, whole)
    for _ in range(times):
        scene.signal(number)
        time.sleep(0.05)
    return moment


def killed_twice(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The trainer is killed, resumed, and killed again."""
    first = signalled(signal.SIGKILL, 1, scene, draw, whole)
    if scene.end() == "completed":
        return first
    return f"{first}; {signalled(signal.SIGKILL, 1, scene, draw, whole)}"


def paused(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The trainer stands still for a while."""
    scene.start()
    moment, seconds = scene.wait_for(draw, whole), draw.uniform(0.5, 4.0)
    scene.signal(signal.SIGSTOP)
    time.sleep(seconds)
    scene.signal(signal.SIGCONT)
    return f"{moment} for {seconds:.1f} s"


def joined(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """A second trainer is started in the same folder."""
    scene.start()
    moment = scene.wait_for(draw, whole)
    first = scene.pid
    scene.start()
    end = scene.end()
    if end == "a line" and "in use" not in scene.line():
        raise Finding(f"the second trainer said {scene.line()}")
    scene.pid, second = first, end
    scene.started -= 1
    return f"{moment}; the second: {second}"


def jumped(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The clock jumps by hours.

    A jump back while a checkpoint is written: tensorstore waits until the clock is there again. SIGTERM ends that.
    """
    after = whole.operation(draw)
    seconds = draw.choice((-1, 1)) * draw.randrange(3600, 48 * 3600)
    scene.told = (signal.SIGTERM,)
    scene.start(-1, -1, 0, after, seconds, flags=("--grace", "5"))
    scene.until(within=3 * whole.seconds + 30)
    stuck = ", SIGTERM" if scene.status is None else ""
    scene.signal(signal.SIGTERM)
    return f"operation {after} by {seconds / 3600:+.1f} h{stuck}"


# Hanging.


def hung(where: str, scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The main thread waits for ever at a moment of the run, or in a reward; or all who use the disk do."""
    if where == "disk":
        first = whole.operation(draw)
        scene.start(first, first + FOREVER, -2, -1, 0, flags=scene.stall)
        moment = f"operation {first} of {whole.operations}"
    else:
        hang = ("reward", draw.randrange(REWARDS)) if where == "reward" else whole.moment(draw)
        scene.start(flags=scene.stall, hang=hang)
        moment = f"{hang[0]} {hang[1]}"
    scene.until()
    scene.flags = scene.flags[: -len(scene.stall)]
    return f"{moment}, {scene.stalled()}"


def hung_and_told(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The main thread waits for ever; it is told to leave."""
    name, before = whole.moment(draw)
    scene.start(flags=("--grace", "3"), hang=(name, before))
    scene.until(lambda: scene.moments().count(name) > before)
    scene.signal(signal.SIGTERM)
    scene.until(within=30.0)
    return f"{name} {before}"


def reward_told(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """A reward that has SIGALRM for itself hangs; a stop is heard, and loses no step."""
    before = draw.randrange(REWARDS)
    scene.start(flags=("--grace", "20"), hang=("reward", before, "with an alarm"))
    scene.until(lambda: "hanging" in scene.moments())
    scene.signal(signal.SIGTERM)
    scene.until(within=60.0)
    if "is lost" in scene.said:
        raise Finding(f"the stop was not heard: {scene.line()}")
    return f"reward {before}"


def reward_exits(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """A reward forks a child, which exits."""
    before = draw.randrange(REWARDS)
    scene.start(hang=("reward", before, "exits"))
    scene.until()
    return f"reward {before}, {'there' if 'hanging' in scene.moments() else 'not there'}"


# Children of rewards.


def forked(how: str, number: int, scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """A reward forks; its child outlives the trainer, which may get a signal, or is terminated."""
    scene.environment["CHAOS_FORKS"] = f"{how} {(first := draw.randrange(REWARDS))}"
    if number:
        return f"reward {first}, {signalled(number, 1, scene, draw, whole)}"
    scene.start()
    scene.until()
    return _undisturbed(scene, f"reward {first}")


def _undisturbed(scene: Scene, moment: str) -> str:
    """The moment; a Finding if the run has not come to its end at once."""
    if scene.status is not None and (end := scene.end()) != "completed":
        raise Finding(f"{moment}: {end}: {scene.line()}")
    return moment


# The disk.


def failing(code: int, count: int, scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """Operations on files fail, from a random one on."""
    first = whole.operation(draw)
    scene.start(first, first + count - 1, code, -1, 0)
    return f"operation {first} of {whole.operations}"


def torn_off(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """Killed in the middle of an operation on a file; half of a write is done."""
    scene.told = (signal.SIGKILL,)
    first = whole.operation(draw)
    scene.start(first, first, -1, -1, 0)
    return f"operation {first} of {whole.operations}"


def killed_late(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """Killed when there is something to damage."""
    scene.told = (signal.SIGKILL,)
    scene.start()
    saves = draw.randint(2, 1 + whole.moments.count("save") - 1)
    scene.until(lambda: scene.moments().count("save") >= saves)
    time.sleep(draw.uniform(0.0, 0.5))
    scene.signal(signal.SIGKILL)
    return f"save {saves}"


def _files(scene: Scene, kind: str) -> list[Path]:
    """The files of a kind in the folder of a run, the newest last."""
    out = scene.out
    newest = [out / "none", *checkpoints(out)][-1]
    found = {
        "checkpoint": [*newest.rglob("*")],
        "note": [*newest.glob("note/*"), *newest.glob("_*")],
        "initial policy": [*(out / "initial").rglob("*")],
        "journal": [out / "metrics.jsonl"],
        "record": [out / "run.json"],
        "sources": [out / "config.py", *(out / "files").glob("*")],
    }[kind]
    sized = [p for p in found if p.is_file() and p.stat().st_size]
    return sorted(sized, key=lambda p: (p.stat().st_mtime_ns, str(p)))


def cut(kind: str, scene: Scene, draw: random.Random) -> tuple[str, Backup]:
    """A file has lost its end."""
    if not (files := _files(scene, kind)):
        return "nothing there", {}
    path, content = files[-1], files[-1].read_bytes()
    at = draw.randrange(len(content))
    path.write_bytes(content[:at])
    return f"{path.name} at {at} of {len(content)}", {path: content}


def flipped(kind: str, scene: Scene, draw: random.Random) -> tuple[str, Backup]:
    """A bit of a file is another."""
    if not (files := _files(scene, kind)):
        return "nothing there", {}
    path = draw.choice(steady(files))
    content = path.read_bytes()
    at, bit = draw.randrange(len(content)), 1 << draw.randrange(8)
    path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
    return f"{path.name} byte {at} bit {bit}", {path: content}


def unmounted(scene: Scene, draw: random.Random) -> tuple[str, Backup]:
    """Its checkpoints are on another disk, which is not there yet when it is started again."""
    del draw
    there, disk = scene.out / "checkpoints", scene.folder / "disk"
    if not there.exists():
        return "nothing there", {}
    there.rename(disk)
    there.symlink_to(disk)
    backup = {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    shutil.rmtree(disk)
    return f"{len(backup)} files", backup


# The trainer's own server.


def _pids(scene: Scene, keeper: bool) -> list[int]:
    """The keeper's number, or those of the server's processes."""
    found = []
    for pid in scene.processes():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            ours = pid == scene.pid or b"tests.chaos.nursery" in words
            if not ours and (b"serverside.py" in words) == keeper:
                found.append(pid)
    return found


def server_signalled(
    number: int, victims: str, scene: Scene, draw: random.Random, whole: Undisturbed
) -> str:
    """Processes of the server get a signal; those that are stopped go on after a while."""
    scene.told = (number,) if "trainer" in victims else ()
    scene.start()
    moment = scene.wait_for(draw, whole)
    scene.until(lambda: bool(_pids(scene, keeper=False)))  # it starts at the first push
    chosen = [
        *(_pids(scene, keeper=True) if "keeper" in victims else []),
        *(_pids(scene, keeper=False) if "server" in victims else []),
        *([scene.pid] if "trainer" in victims else []),
    ]
    kill(chosen, number)
    if number == signal.SIGSTOP:
        time.sleep(draw.uniform(0.5, 15.0))
        kill(chosen, signal.SIGCONT)
    return f"{moment}, {len(chosen)} processes"


def stopped_for_good(victims: str, scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The server, or its keeper, stands still and never goes on."""
    scene.start(flags=scene.short)
    moment = scene.wait_for(draw, whole)
    scene.until(lambda: bool(_pids(scene, keeper=False)))
    kill(chosen := _pids(scene, keeper=victims == "keeper"), signal.SIGSTOP)
    scene.until()
    return f"{moment}, {len(chosen)} processes"


def engine_hangs(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The server answers nothing any more but /health, until it is started again."""
    scene.start()
    moment = scene.wait_for(draw, whole)
    scene.until(lambda: bool(_pids(scene, keeper=False)))
    (scene.folder / HANGING).write_text(" ".join(map(str, _pids(scene, keeper=False))))
    scene.until()
    return _undisturbed(scene, moment)


def socket_removed(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The file of the server's socket is removed, and the server killed a little later."""
    scene.start()
    moment = scene.wait_for(draw, whole)
    for path in scene.folder.rglob("vllm-0.sock"):
        path.unlink(missing_ok=True)
    time.sleep(draw.uniform(0.0, 2.0))
    kill(_pids(scene, keeper=False))
    return moment


# A server elsewhere, and the way to it.


def lied_to(
    kinds: tuple[str, ...], fault: proxy.Lie, counts: tuple[int, ...],
    scene: Scene, draw: random.Random, whole: Undisturbed,
) -> str:  # fmt: skip
    """Requests meet a fault."""
    assert scene.proxy
    kind = draw.choice(kinds)
    first, count = draw.randrange(whole.calls[kind]), draw.choice(counts)
    scene.proxy.lay(kind, first, count, fault)
    scene.start(flags=scene.short if count == FOREVER else ())
    scene.until()
    met, _ = scene.proxy.met, scene.proxy.lift()
    return f"{kind} {first} of {whole.calls[kind]}, {met} met"


def away(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """The server's address is gone for a while, or for good."""
    assert scene.proxy
    scene.start(flags=scene.short)
    moment, seconds = scene.wait_for(draw, whole), draw.choice((1.0, 4.0, FOREVER))
    scene.proxy.vanish()
    if seconds < FOREVER:
        time.sleep(seconds)
    else:
        scene.until()
    scene.proxy.listen()
    return f"{moment} for {'good' if seconds == FOREVER else f'{seconds:g} s'}"


def replaced(scene: Scene, draw: random.Random, whole: Undisturbed) -> str:
    """Another trainer syncs the same server in the middle of the run."""
    assert scene.proxy
    scene.start()
    moment = scene.wait_for(draw, whole)
    label = draw.choice(("default", "deadbeef-3"))
    scene.proxy.relabel(label)
    return f"{moment}, now {label}"


LIES: dict[str, tuple[tuple[str, ...], proxy.Lie, tuple[int, ...]]] = {
    "server hangs": (proxy.REQUESTS, proxy.hang, (1, FOREVER)),
    "server drips": (proxy.REQUESTS, proxy.drip, (1, FOREVER)),
    "server hangs up": (proxy.REQUESTS, proxy.reset, OFTEN),
    "server answers 404": (proxy.REQUESTS, proxy.not_found, OFTEN),
    "server answers 500": (proxy.REQUESTS, proxy.internal, OFTEN),
    "server answers nonsense": (proxy.REQUESTS, proxy.nonsense, OFTEN),
    "answer cut short": (proxy.REQUESTS, proxy.torn, OFTEN),
    "answer of 1 GB": (proxy.REQUESTS, proxy.huge, (1, 3)),
    "tokens of no vocabulary": (proxy.COMPLETIONS, proxy.strange_tokens, OFTEN),
    "other tokens": ((proxy.ROLLOUT,), proxy.other_tokens, (1, FOREVER)),
    "too few tokens": (proxy.COMPLETIONS, proxy.fewer_tokens, OFTEN),
    "log-probs that are none": (proxy.COMPLETIONS, proxy.nan_logps, OFTEN),
    "other log-probs": ((proxy.ROLLOUT,), proxy.other_logps, (1, FOREVER)),
    "other log-probs for the proof": ((proxy.PROBE,), proxy.other_scores, (1, FOREVER)),
    "no choices": (proxy.COMPLETIONS, proxy.no_choices, OFTEN),
    "old weights, new label": ((proxy.RELOAD,), proxy.swallowed, (1,)),
    "label of another": ((proxy.LABEL,), proxy.old_label, (1,)),
}
DAMAGED = ("checkpoint", "note", "initial policy", "journal", "record", "sources")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGQUIT")

FAULTS: dict[str, Fault] = {
    "kill -9": Fault(NATIVE, partial(signalled, signal.SIGKILL, 1)),
    **{name: Fault(NATIVE, partial(signalled, signal.Signals[name], 1)) for name in SIGNALS},
    "SIGINT twice": Fault(NATIVE, partial(signalled, signal.SIGINT, 2)),
    "kill -9 twice": Fault(NATIVE, killed_twice),
    "stands still": Fault(NATIVE, paused),
    "second trainer": Fault(NATIVE, joined),
    "clock jumps": Fault(NATIVE, jumped),
    "hangs": Fault(NATIVE, partial(hung, "moment")),
    "reward hangs": Fault(NATIVE, partial(hung, "reward")),
    "reward with an alarm hangs": Fault(NATIVE, reward_told),
    "reward exits": Fault(NATIVE, reward_exits),
    "disk blocks": Fault(NATIVE, partial(hung, "disk")),
    "SIGTERM while it hangs": Fault(NATIVE, hung_and_told),
    "reward forks": Fault(NATIVE, partial(forked, "outlives", 0)),
    "reward forks, kill -9": Fault(NATIVE, partial(forked, "outlives", signal.SIGKILL)),
    "reward forks, SIGTERM": Fault(NATIVE, partial(forked, "outlives", signal.SIGTERM)),
    "reward terminates its child": Fault(NATIVE, partial(forked, "terminated", 0)),
    "disk full": Fault(NATIVE, partial(failing, errno.ENOSPC, FOREVER)),
    "disk full once": Fault(NATIVE, partial(failing, errno.ENOSPC, 1)),
    "disk error": Fault(NATIVE, partial(failing, errno.EIO, FOREVER)),
    "disk error once": Fault(NATIVE, partial(failing, errno.EIO, 1)),
    "killed while writing": Fault(NATIVE, torn_off),
    **{f"{kind} cut": Fault(NATIVE, killed_late, partial(cut, kind)) for kind in DAMAGED},
    **{f"{kind} flipped": Fault(NATIVE, killed_late, partial(flipped, kind)) for kind in DAMAGED},
    "checkpoints unmounted": Fault(NATIVE, killed_late, unmounted),
    "SIGTERM beside a server": Fault(OWN, partial(signalled, signal.SIGTERM, 1)),
    "kill -9 beside a server": Fault(OWN, partial(signalled, signal.SIGKILL, 1)),
    "server killed": Fault(OWN, partial(server_signalled, signal.SIGKILL, "server")),
    "keeper killed": Fault(OWN, partial(server_signalled, signal.SIGKILL, "keeper")),
    "keeper and trainer killed": Fault(
        OWN, partial(server_signalled, signal.SIGKILL, "keeper trainer")
    ),
    "server stands still": Fault(OWN, partial(server_signalled, signal.SIGSTOP, "server")),
    "server stops for good": Fault(OWN, partial(stopped_for_good, "server")),
    "keeper stops for good": Fault(OWN, partial(stopped_for_good, "keeper")),
    "hangs beside a server": Fault(OWN, partial(hung, "moment")),
    "socket removed": Fault(OWN, socket_removed),
    "engine hangs, health is good": Fault(OWN, engine_hangs),
    "server away": Fault(SERVED, away),
    "another trainer at the server": Fault(SERVED, replaced),
    "kill -9 beside a server elsewhere": Fault(SERVED, partial(signalled, signal.SIGKILL, 1)),
    **{name: Fault(SERVED, partial(lied_to, *how)) for name, how in LIES.items()},
    "vLLM killed": Fault(REAL, partial(server_signalled, signal.SIGKILL, "server")),
    "vLLM stands still": Fault(REAL, partial(server_signalled, signal.SIGSTOP, "server")),
    "trainer of vLLM stands still": Fault(REAL, paused),
    "reward hangs beside vLLM": Fault(REAL, partial(hung, "reward")),
    "kill -9 beside vLLM": Fault(REAL, partial(signalled, signal.SIGKILL, 1)),
    "vLLM's keeper killed": Fault(REAL, partial(server_signalled, signal.SIGKILL, "keeper")),
    "SIGTERM beside vLLM": Fault(REAL, partial(signalled, signal.SIGTERM, 1)),
    "vLLM stops for good": Fault(REAL, partial(stopped_for_good, "server")),
}
