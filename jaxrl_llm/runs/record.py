"""run.json: the id of a run, the flags that made it, and the sessions that worked on it.

A resumed run has the flags that it was started with. Only those of `LENGTHS`, which do not change what a
step computes, may be given anew; each session says which ones it ran with.
"""

import datetime
import importlib.metadata
import inspect
import json
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jaxrl_llm
from jaxrl_llm import desk, files
from jaxrl_llm.errors import UserError
from jaxrl_llm.runs import seal
from jaxrl_llm.runs.disk import DamageError
from jaxrl_llm.runs.seal import sealed, unsealed

NAME, CONFIG = "run.json", "config.py"
LENGTHS = {
    "steps",
    "evaluate_every",
    "evaluation_examples",
    "save_every",
    "keep_checkpoints",
    "show_samples_every",
}
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")


def new(
    made_by: Path, flags: dict[str, Any], used: Iterable[Path], origin: Path | None = None
) -> dict[str, Any]:
    """The record of a run that starts; `used` are the files beside the config that made it.

    `origin` is the folder of the run whose warm start it begins with.
    """
    flags = plain(flags)
    copies = {str(path): f"files/{i}-{path.name}" for i, path in enumerate(used)}
    return {
        "id": uuid.uuid4().hex,
        "config": str(made_by.absolute()),
        "flags": flags,
        "files": copies,
        "from": origin and desk.named(origin),
        "from_id": origin and identity(origin),
        "sessions": [_session(flags)],
    }


def read(folder: Path) -> dict[str, Any]:
    """The record of the run whose folder this is."""
    path = folder / NAME
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found["flags"], dict):
            raise TypeError
        if "sha256" in found:
            found = unsealed(found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{folder} is not the folder of a run: give what --out was") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, DamageError) as error:
        raise UserError(
            f"{path} is damaged: take it from a copy of the run; nothing was changed"
        ) from error
    defaults = {"id": None, "files": {}, "sums": {}, "sessions": [], "from": None, "from_id": None}
    return {**defaults, **found}


def begins_with(run: dict[str, Any], origin: Path | None) -> bool:
    """Whether that is the run whose warm start this one begins with; its folder may have moved."""
    if origin is None or run["from"] is None:
        return origin is run["from"]
    moved = run["from_id"] is not None and identity(origin) == run["from_id"]
    return moved or desk.named(origin) == run["from"]


def require_sources(folder: Path, run: dict[str, Any]) -> None:
    """A UserError if a file that is to be executed again is not as it was when the run was started."""
    for name, checksum in run["sums"].items():
        copy = folder / name
        if not copy.is_file() or seal.of_file(copy) != checksum:
            raise UserError(
                f"{copy} is not as it was when the run was started: take it from a copy of the run; nothing was "
                "changed"
            )


def changed(folder: Path, run: dict[str, Any], made_by: Path) -> tuple[Path, Path] | None:
    """The first file that made the run and is not what it was, and the run's own copy of it."""
    for original, name in {str(made_by): CONFIG, **run["files"]}.items():
        there, copy = Path(original), folder / name
        if there.exists() and copy.exists() and there.read_bytes() != copy.read_bytes():
            return there, copy
    return None


def identity(folder: Path) -> str | None:
    """What no other run is called; None where no run was started."""
    return read(folder)["id"] if (folder / NAME).exists() else None


def write(folder: Path, run: dict[str, Any]) -> None:
    """Puts the record in its place."""
    files.write(folder / NAME, json.dumps(sealed(run), indent=2) + "\n")


def continued(folder: Path, run: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The record with one more session; a UserError for the first flag that would make it another run."""
    stored, given = run["flags"], plain(flags)
    for name in sorted(stored.keys() | given.keys()):
        if name not in LENGTHS and stored.get(name) != given.get(name):
            flag = "--" + name.replace("_", "-")
            raise UserError(
                f"{folder} was started with {flag} {stored.get(name)}, not {given.get(name)}: "
                f"leave {flag} out to go on, or start anew with another --out"
            )
    return run | {"flags": given, "sessions": [*run["sessions"], _session(given)]}


def with_stored_flags(make: Callable[..., Any], folder: Path | None) -> Callable[..., Any]:
    """The same function, its defaults replaced by the flags of the run in the folder, if there is one."""
    if folder is None or not (folder / NAME).exists():
        return make
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


def flags_for(make: Callable[..., Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Flags that went through JSON, as the function wants them."""
    hints = get_type_hints(make)

    def restored(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(restored(name, one) for one in value)
        kinds = (hints.get(name), *get_args(hints.get(name)))
        return (
            Path(value) if isinstance(value, str) and Path in kinds and str not in kinds else value
        )

    return {name: restored(name, value) for name, value in flags.items()}


def plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags as JSON gives them back."""
    out = {}
    for name, value in flags.items():
        try:
            out[name] = json.loads(json.dumps(value, default=_of_path))
        except TypeError as error:
            raise UserError(
                f"the flag {name} of config() is a {type(value).__name__}, which cannot be kept with the "
                "run: use numbers, text, true or false, paths, or tuples of them"
            ) from error
    return out


def _of_path(value: Any) -> str:
    if not isinstance(value, Path):
        raise TypeError
    return str(value)


def _session(flags: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "versions": {"jaxrl_llm": jaxrl_llm.__version__}
        | {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "lengths": {name: value for name, value in flags.items() if name in LENGTHS},
    }
