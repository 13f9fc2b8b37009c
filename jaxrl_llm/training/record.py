"""run.json: id, config, flags and sessions of a run; a session is a start or a resume.

A run that goes on, is opened again, or is run by several processes has to be the one that was
started: `differences` says where two records are of different runs, and nothing else does.
A resumed run keeps its flags. Only those in `LENGTHS`, which change at most the rounding of what a
step computes, may be given anew; each session records its own.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import jax

import jaxrl_llm
from jaxrl_llm import distributed, storage, userfile
from jaxrl_llm.errors import UserError
from jaxrl_llm.training.fingerprint import checksum

NAME, CONFIG, VERSION = "run.json", "config.py", 6
MODULE = "module "  # how the names of modules begin
LENGTHS = {
    "steps",
    *("evaluate_every", "evaluation_examples", "show_samples_every", "keep_tokens"),
    *("save_every", "save_minutes", "keep_checkpoints"),
    *("slots", "microbatches"),  # which may be what memory lacked
}
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
Run = dict[str, Any]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """How a config was made: its file, the flags, and other files by the user that were run or read."""

    path: Path
    flags: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def new(
    source: Source | None, init_from: Path | None = None, inputs: Mapping[str, Any] | None = None
) -> Run:
    """The record of a new run; `init_from` is the folder of the run whose warm start it uses.

    `inputs` are checksums of what its numbers depend on beside the config, by name. Without a source
    the config was made by a program, and only that can resume the run.
    """
    flags = plain(source.flags if source else {})
    run: Run = {
        "version": VERSION,
        "id": uuid.uuid4().hex,
        "config": None,
        "flags": flags,
        "files": {},
        "sums": {},
        "folder": str(Path.cwd()),
        "init_from": init_from and storage.as_url(init_from),
        "init_from_id": init_from and identity(init_from),
        "given": dict(inputs or {}),
        "sessions": [_session(flags)],
    }
    if source is not None:
        copies = [f"files/{i}-{path.name}" for i, path in enumerate(source.files)]
        sums = map(userfile.checksum, (source.path, *source.files))
        run["config"] = str(userfile.absolute(source.path))
        run["files"] = dict(zip(map(str, source.files), copies, strict=True))
        run["sums"] = dict(zip((CONFIG, *copies), sums, strict=True))
    return run


def read(folder: Path) -> Run:
    """The record of the run in the folder; a UserError if there is none or it is damaged."""
    path = folder / NAME
    try:
        run = json.loads(path.read_bytes())
        version, was = run.get("version"), run.pop("sha256", None)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{folder} is not the folder of a run: give what --out was") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged: take it from a copy of the run; nothing was changed"
        ) from error
    if version != VERSION:
        raise UserError(f"{folder} was made by another version of this package: start anew")
    if was != checksum(run):
        raise UserError(f"{path} was altered: take it from a copy of the run; nothing was changed")
    return run


def identity(folder: Path) -> str | None:
    """The unique id of the run in the folder; None if there is no run."""
    return read(folder)["id"] if (folder / NAME).exists() else None


def write(folder: Path, run: Run) -> None:
    """Writes the record with its checksum."""
    # flags are read back from here: one with another bit would make another run
    checked = run | {"sha256": checksum(run)}
    storage.write(folder / NAME, json.dumps(checked, indent=2) + "\n")


class Difference(NamedTuple):
    """A difference between two records, of which one may have None: a kind of fact and its name."""

    kind: str
    name: str
    was: Any
    now: Any


def differences(was: Run, now: Run) -> Iterator[Difference]:
    """The differences of two records in all that makes a run the one it is.

    Files are compared wherever they lie. Of what is "given" and of "code" only what both know is
    compared: a module may not be loaded yet.
    """
    same = was["init_from_id"] and was["init_from_id"] == now["init_from_id"]  # it may have moved
    if not same and was["init_from"] != now["init_from"]:
        yield Difference("from", "--from", was["init_from"], now["init_from"])
    one, other = _facts(was), _facts(now)
    for kind, name in one | other:
        a, b = one.get((kind, name)), other.get((kind, name))
        if a != b and (kind in ("file", "flag") or None not in (a, b)):
            yield Difference(kind, f"--{name.replace('_', '-')}" if kind == "flag" else name, a, b)


def _facts(run: Run) -> dict[tuple[str, str], Any]:
    """All that makes the run the one it is, by kind and name."""
    code: dict[str, str] = {}
    for session in run["sessions"][-1:]:
        package = f"{session['code']['version']} ({session['code'].get('sha256', '')[:12]})"
        code = {jaxrl_llm.__name__: package} | session["versions"]
    parts = {"given": run["given"], "file": run["sums"], "flag": run["flags"], "code": code}
    return {(kind, name): x for kind, part in parts.items() for name, x in part.items()}


def require_sources(folder: Path, run: Run) -> None:
    """A UserError if a file to be executed again has changed since the run was started."""
    there = {name: folder / name for name in run["sums"] if (folder / name).is_file()}
    sums = {name: storage.sha256(path) for name, path in there.items()}
    for _, name, *_ in differences(run, run | {"sums": sums}):
        raise UserError(
            f"{folder / name} is not as it was when the run was started: take it from a copy of the run; nothing "
            "was changed"
        )


def changed(folder: Path, run: Run, made_by: Path) -> tuple[Path, Path] | None:
    """The first original file that differs from the run's copy, and the copy; None if none does."""
    originals = {name: Path(path) for path, name in {str(made_by): CONFIG, **run["files"]}.items()}
    for name, path in originals.items():
        if name in run["sums"] and path.exists() and storage.sha256(path) != run["sums"][name]:
            return path, folder / name
    return None


def require_given(folder: Path, inputs: Mapping[str, Any]) -> None:
    """A UserError if one of these is not as it was when the run was started; modules are warned of."""
    run = read(folder)
    for _, name, was, now in differences(run, run | {"given": inputs}):
        said = f"{name} is not as it was when {folder} was started ({was}; now {now})"
        if not name.startswith(MODULE):
            raise UserError(f"{said}: put it back, or start anew with another --out")
        logger.warning("%s", said)


def require_alike(run: Run, resume: bool | int | str) -> None:
    """A UserError, in all processes, unless each of them would record this run, resumed alike."""
    word = json.dumps(run | {"flags": run["flags"] | {"resume": resume}})
    first, *others = map(json.loads, distributed.agree(word))
    for i, one in enumerate(others, 1):
        for _, name, theirs, ours in differences(one, first):
            raise UserError(
                f"process {i} on {one['sessions'][-1]['host']} was started with {name} {theirs}, process 0 with "
                f"{ours}: start all with the same files, flags and versions"
            )


_REFUSED = {
    "from": "{folder} was started {how}: resume it so",
    "flag": "{folder} was started with {name} {was}, not {now}: leave {name} out to go on, or start anew with "
    "another --out",
    "given": "{name} is not as it was when {folder} was started ({was}; now {now}): put it back, or start anew "
    "with another --out",
    "file": "{path} has changed since {folder} was started: resume with the run's own copy, {folder}/{name}, or "
    "start anew with another --out",
}


def continued(folder: Path, run: Run, now: Run) -> Run:
    """The record with the session of `now`; a UserError for whatever would make that another run.

    Another version of the package or a library is a warning.
    """
    require_sources(folder, run)
    versions = list[str]()
    paths = dict(zip(now["sums"], [now["config"], *now["files"]], strict=False))
    flags = {name: value for name, value in run["flags"].items() if name not in LENGTHS}
    flags |= {name: value for name, value in now["flags"].items() if name in LENGTHS}
    for other in differences(run | {"flags": flags}, now):
        if other.kind != "code":
            how = f"with --from {other.was}" if other.was else "without --from"
            facts = {"folder": folder, "how": how, "path": paths.get(other.name, other.name)}
            raise UserError(_REFUSED[other.kind].format(**facts, **other._asdict()))
        versions.append(f"{other.name} {other.was} then, {other.now} now")
    if versions:
        what = "%s goes on with other code than before, which may compute something else: %s"
        logger.warning(what, folder, "; ".join(versions))
    return run | {"flags": now["flags"], "sessions": [*run["sessions"], *now["sessions"]]}


def with_stored_flags(make: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`make` with its defaults replaced by the flags of the run in the folder."""
    stored, names = flags_for(make, read(folder)["flags"]), inspect.signature(make).parameters
    by_name = {n for n, one in names.items() if one.kind is not one.POSITIONAL_ONLY}
    stored = {name: value for name, value in stored.items() if name in by_name}
    flagged: Any = functools.wraps(make)(lambda *args, **given: make(*args, **given))
    # by name, as flags are: the config may have got one without a default after one that has a stored one
    flagged.__signature__ = inspect.signature(functools.partial(make, **stored))
    return flagged


def flags_for(make: Callable[..., Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags read from JSON, as `make` annotates them: paths, keys, tuples and lists are restored."""
    hints = get_type_hints(make)
    return {name: _restored(hints.get(name), value) for name, value in flags.items()}


def _restored(kind: Any, value: Any) -> Any:
    """The value that JSON was written of, by its annotation."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):
        values = [_restored(one, value) for one in inner if one is not NoneType]
        return value if value in values else values[0]
    if isinstance(value, dict):
        key, of = inner or (str, Any)
        as_key = key if key in (int, float, Path) else str
        return {as_key(name): _restored(of, one) for name, one in value.items()}
    if isinstance(value, list):
        each = inner if outer is tuple and ... not in inner else inner[:1] * len(value)
        kinds = [*each, *[Any] * len(value)]
        values = [_restored(of, one) for of, one in zip(kinds, value, strict=False)]
        return values if outer in (list, Sequence) else tuple(values)
    return Path(value) if outer is Path and isinstance(value, str) else value


def require_kept(make: Callable[..., Any], flags: Mapping[str, Any]) -> None:
    """A UserError for the first flag that run.json would give back as another."""
    back, hints = flags_for(make, plain(flags)), get_type_hints(make)
    for name, value in flags.items():
        known = [*value] if get_origin(hints.get(name)) is Sequence else value
        if repr(back[name]) != repr(known):
            raise UserError(
                f"the flag {name} of config() is {value!r}, and would come back as {back[name]!r} when the run "
                "goes on: annotate it as what it is, such as tuple[int, ...], list[int] or dict[str, Path]"
            )


def plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as JSON gives them back; a UserError for one that cannot be stored."""

    def of_path(value: Any) -> str:
        if not isinstance(value, Path):
            raise TypeError
        return str(value)

    out = {}
    for name, value in flags.items():
        try:
            out[name] = json.loads(json.dumps(value, default=of_path))
        except TypeError as error:
            raise UserError(
                f"the flag {name} of config() is a {type(value).__name__}, which cannot be kept with the "
                "run: use numbers, text, true or false, paths, or tuples of them"
            ) from error
    return out


def modules() -> dict[str, str]:
    """The checksums of modules that are loaded from outside the installed packages, by name.

    Without the files of the user that the run keeps copies of.
    """
    installed = {
        sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    ours = str(Path(jaxrl_llm.__file__).parent)
    checksums = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        own = path.suffix == ".py" and not userfile.is_kept(module) and not name.startswith("__")
        if own and path.is_file() and not any(map(path.is_relative_to, [*installed, ours])):
            checksums[f"{MODULE}{name}"] = storage.sha256(path)
    return checksums


def code() -> dict[str, Any]:
    """The package's version, a checksum of its files and, in a checkout, its commit and whether it
    differs from that.
    """
    package = Path(jaxrl_llm.__file__).parent
    files = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    sha256 = hashlib.sha256(files).hexdigest()
    version: dict[str, Any] = {"version": jaxrl_llm.__version__, "sha256": sha256}
    root = package.parent
    if not (root / ".git").exists():
        return version
    git = functools.partial(
        subprocess.run, cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git here
        version["commit"] = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "-uno"]).stdout
        version["dirty"] = bool(changed.strip())
    return version


def _session(flags: Mapping[str, Any]) -> dict[str, Any]:
    devices = jax.devices()
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "devices": f"{len(devices)} {devices[0].device_kind}",
        "code": code(),
        "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "lengths": {name: value for name, value in flags.items() if name in LENGTHS},
    }
