"""run.json: id, config, flags and sessions of a run; a session is a start or a resume.

A resumed run keeps its flags. Only those in `LENGTHS`, which do not change what a step computes,
may be given anew; each session records its own.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import inspect
import json
import os
import platform
import socket
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax

import jaxrl_llm
from jaxrl_llm import storage
from jaxrl_llm.errors import UserError
from jaxrl_llm.training.fingerprint import checksum

NAME, CONFIG, VERSION = "run.json", "config.py", 4
LENGTHS = {
    "steps",
    "evaluate_every",
    "evaluation_examples",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "show_samples_every",
    "keep_tokens",
}
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
Run = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """How a config was made: its file, the flags, and other files by the user that were run."""

    path: Path
    flags: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def new(
    source: Source | None, origin: Path | None = None, given: Mapping[str, Any] | None = None
) -> Run:
    """The record of a new run; `origin` is the folder of the run whose warm start it uses.

    `given` are checksums of what its numbers depend on beside the config, by name. Without a source
    the config was made by a program, and only that can resume the run.
    """
    run: Run = {
        "version": VERSION,
        "id": uuid.uuid4().hex,
        "config": None,
        "flags": {},
        "files": {},
        "from": origin and storage.spoken(origin),
        "from_id": origin and identity(origin),
        "given": dict(given or {}),
        "sessions": [_session({})],
    }
    if source is not None:
        flags = plain(source.flags)
        copies = {str(path): f"files/{i}-{path.name}" for i, path in enumerate(source.files)}
        run |= {"config": str(source.path.absolute()), "flags": flags, "files": copies}
        run["sessions"] = [_session(flags)]
    return run


def read(folder: Path) -> Run:
    """The record of the run in the folder; a UserError if there is none or it is damaged."""
    path = folder / NAME
    try:
        found = json.loads(path.read_bytes())
        version, was = found["version"], found.pop("sha256", None)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{folder} is not the folder of a run: give what --out was") from error
    except KeyError as error:
        raise UserError(
            f"{folder} was made by another version of this package: start anew"
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} is damaged: take it from a copy of the run; nothing was changed"
        ) from error
    if version != VERSION:
        raise UserError(f"{folder} was made by another version of this package: start anew")
    if was != checksum(found):
        raise UserError(f"{path} was altered: take it from a copy of the run; nothing was changed")
    return found


def identity(folder: Path) -> str | None:
    """The unique id of the run in the folder; None if there is no run."""
    return read(folder)["id"] if (folder / NAME).exists() else None


def write(folder: Path, run: Run) -> None:
    """Writes the record with its checksum."""
    # flags are read back from here: one with another bit would make another run
    checked = run | {"sha256": checksum(run)}
    storage.write(folder / NAME, json.dumps(checked, indent=2) + "\n")


def require_sources(folder: Path, run: Run) -> None:
    """A UserError if a file to be executed again has changed since the run was started."""
    for name, was in run["sums"].items():
        copy = folder / name
        if not copy.is_file() or storage.sha256(copy) != was:
            raise UserError(
                f"{copy} is not as it was when the run was started: take it from a copy of the run; nothing "
                "was changed"
            )


def changed(folder: Path, run: Run, made_by: Path) -> tuple[Path, Path] | None:
    """The first original file that differs from the run's copy, and the copy; None if none does."""
    for original, name in {str(made_by): CONFIG, **run["files"]}.items():
        there, copy = Path(original), folder / name
        if there.exists() and copy.exists() and there.read_bytes() != copy.read_bytes():
            return there, copy
    return None


def continued(
    folder: Path,
    run: Run,
    source: Source | None,
    origin: Path | None,
    given: Mapping[str, Any] | None = None,
) -> Run:
    """The record with one more session; a UserError for whatever would make it another run."""
    for name, was in run["given"].items():
        now = (given or {}).get(name, was)  # a module may not be loaded yet
        if now != was:
            raise UserError(
                f"{folder}: {name} is not as it was when the run was started ({was}; now {now}): put it back, or "
                "start anew with another --out"
            )
    require_sources(folder, run)
    if source is not None and (other := changed(folder, run, source.path)):
        raise UserError(
            f"{other[0]} has changed since {folder} was started: resume with the run's own copy, {other[1]}, "
            "or start anew with another --out"
        )
    moved = origin is not None and run["from_id"] and identity(origin) == run["from_id"]
    if not moved and (origin and storage.spoken(origin)) != run["from"]:
        how = f"with --from {run['from']}" if run["from"] else "without --from"
        raise UserError(f"{folder} was started {how}: resume it so")
    stored, flags = run["flags"], plain({} if source is None else source.flags)
    for name in sorted(stored.keys() | flags.keys()):
        if name not in LENGTHS and stored.get(name) != flags.get(name):
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{folder} was started with {flag} {stored.get(name)}, not {flags.get(name)}: "
                f"leave {flag} out to go on, or start anew with another --out"
            )
    return run | {"flags": flags, "sessions": [*run["sessions"], _session(flags)]}


def with_stored_flags(make: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`make` with its defaults replaced by the flags of the run in the folder."""
    stored = flags_for(make, read(folder)["flags"])
    signature = inspect.signature(make)

    def made(*args: Any, **given: Any) -> Any:
        return make(*args, **given)

    made.__signature__ = signature.replace(  # pyright: ignore[reportFunctionMemberAccess]
        parameters=[
            parameter.replace(default=stored.get(name, parameter.default))
            for name, parameter in signature.parameters.items()
        ]
    )
    made.__doc__, made.__annotations__ = make.__doc__, get_type_hints(make, include_extras=True)
    return made


def flags_for(make: Callable[..., Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags read from JSON, as `make` annotates them: paths and tuples are restored."""
    hints = get_type_hints(make)

    def restored(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(restored(name, one) for one in value)
        kinds = (hints.get(name), *get_args(hints.get(name)))
        as_path = isinstance(value, str) and Path in kinds and str not in kinds
        return Path(value) if as_path else value

    return {name: restored(name, value) for name, value in flags.items()}


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


def files_of(run: Run) -> Iterable[str]:
    """Names of the copies in the run's folder that are executed again."""
    return [*([CONFIG] if run["config"] else []), *run["files"].values()]


def modules() -> dict[str, str]:
    """The checksums of modules that are loaded from outside the installed packages, by name.

    Without the files of the user that the run keeps copies of.
    """
    installed = {
        sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    ours = str(Path(jaxrl_llm.__file__).parent)
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        own = path.suffix == ".py" and not name.startswith(("user_", "__"))
        if own and path.is_file() and not any(map(path.is_relative_to, [*installed, ours])):
            found[f"module {name}"] = storage.sha256(path)
    return found


def code() -> dict[str, Any]:
    """The package's version and, in a checkout, its commit and whether files differ from it."""
    found: dict[str, Any] = {"version": jaxrl_llm.__version__}
    root = Path(jaxrl_llm.__file__).parent.parent
    if not (root / ".git").exists():
        return found
    git = functools.partial(
        subprocess.run, cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git here
        found["commit"] = git(["git", "rev-parse", "HEAD"]).stdout.strip()
        changed = git(["git", "status", "--porcelain", "-uno"]).stdout
        found["dirty"] = bool(changed.strip())
    return found


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
