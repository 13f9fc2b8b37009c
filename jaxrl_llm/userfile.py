"""Runs users' Python files (configs, tasks), reads their texts; errors in them become one line that says where."""

import difflib
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from jaxrl_llm.errors import UserError, first_line


class _AsItIs(SourceFileLoader):
    """Compiles every time: Python's cache misses an edit of equal size in the same second."""

    stands_for = Path()

    def get_code(self, fullname: str) -> CodeType:
        content = self.get_data(self.path)
        _note(self.stands_for, content)
        return self.source_to_code(content, self.path)


# shipped configs import nothing beside them, and who asks for a library `gym` must not find one
_SHIPPED = [str(folder / "configs") for folder in Path(__file__).parents[:2]]
_READ: dict[Path, Path] = {}  # original path: the file that was read for it, in order
_SUMS: dict[Path, str] = {}  # and the SHA-256 of what was read
_INSTEAD: ContextVar[tuple[Mapping[Path, Path], Path] | None] = ContextVar("_INSTEAD", default=None)


@contextmanager
def redirected(copies: Mapping[Path, Path], folder: Path) -> Iterator[None]:
    """For the block, `run(original)` runs `copies[original]` as if it were the original.

    Relative paths are taken from `folder`; a file without a copy is a UserError.
    """
    token = _INSTEAD.set((copies, folder))
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def absolute(path: Path, folder: Path | None = None) -> Path:
    """The path from the root, as text: it means the same where its links are not."""
    return Path(os.path.normpath((folder or Path.cwd()) / path))


def reset() -> None:
    """Empties the list that `files_read` returns."""
    _READ.clear()
    _SUMS.clear()


def _note(stands_for: Path, content: bytes) -> None:
    """Notes what was read for a file, unless that is a run's copy."""
    if _INSTEAD.get() is None:
        _SUMS[absolute(stands_for)] = hashlib.sha256(content).hexdigest()


def checksum(path: Path) -> str:
    """The SHA-256 of a file as it was when it was run or read, whatever it is by now; else as it is."""
    there = absolute(path)
    return _SUMS[there] if there in _SUMS else hashlib.sha256(path.read_bytes()).hexdigest()


def files_read(*, but: Path) -> list[Path]:
    """The original paths of the files that were run or read so far, except `but`."""
    return [path for path in _READ if path != absolute(but)]


def _copy_of(path: Path, kind: str) -> tuple[Path, Path]:
    """The file to be read for `path`, and the path that it stands for; runs keep a copy of it."""
    stands_for = path
    if found := _INSTEAD.get():
        copies, folder = found
        stands_for = absolute(path, folder)
        if stands_for not in copies:
            raise UserError(f"{kind} file {str(path)!r} is none that the run keeps a copy of")
        path = copies[stands_for]
    if not path.is_file():
        raise UserError(f"{kind} file {str(path)!r} does not exist")
    _READ[absolute(stands_for)] = path
    return path, stands_for


def read(path: Path, kind: str) -> str:
    """The text of the file at `path`, of which runs keep a copy; a UserError if that fails."""
    path, stands_for = _copy_of(path, kind)
    try:
        content = path.read_bytes()
        _note(stands_for, content)
        return content.decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {kind} file {str(path)!r}: {error}") from error


def valid_unicode(text: str) -> None:
    r"""A UserError if a text has half a surrogate pair, as the `\ud83d` of JSON is: no tokenizer reads it."""
    if half := re.search("[\ud800-\udfff]", text):
        raise UserError(
            f"a text has half a surrogate pair, {half[0]!r}, so it is no valid Unicode: take it out"
        )


def run(path: Path, kind: str) -> ModuleType:
    """Runs the file at `path` as a module; a UserError (`kind` file, line) if that fails.

    It finds modules beside it, then and later; of a run's copy those beside the original.
    """
    path, stands_for = _copy_of(path, kind)
    if path.suffix != ".py":
        raise UserError(f"{kind} file {str(path)!r} is not a Python file (*.py)")
    beside = str(absolute(stands_for).parent)
    if beside not in (*sys.path, *_SHIPPED):
        sys.path.append(beside)  # the last, so that it hides nothing
    loader = _AsItIs(f"user_{kind}_{path.stem}", str(path))
    loader.stands_for = stands_for
    spec = importlib.util.spec_from_file_location(loader.name, stands_for, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up by name
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[loader.name]
        raise UserError(f"{blame(path, error)}: {type(error).__name__}: {error}") from error
    return module


def ran(filename: str) -> bool:
    """True if a file with this name, as a traceback has it, is the user's and was run."""
    return Path(filename) in _READ.values()


def is_kept(module: ModuleType) -> bool:
    """True if `run` made the module, of a file that runs keep a copy of."""
    return isinstance(getattr(module, "__loader__", None), _AsItIs)


def blame(path: Path, error: BaseException) -> str:
    """The file and, where it is in it, the line that an error came from, as text."""
    return _place({str(path)}, error) or str(path)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turns what a user's function raises in the block into a UserError with file and line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = _place({str(path) for path in _READ.values()}, error)
        said = f"{where}: " if where else ""
        raise UserError(f"{what}: {said}{type(error).__name__}: {first_line(error)}") from error


def _place(files: set[str], error: BaseException) -> str:
    """The innermost of `files` in the traceback, with its line; empty if none is in it."""
    if isinstance(error, SyntaxError) and error.filename in files:
        return f"{error.filename}, line {error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def nearest(word: str, names: Iterable[str], least: float = 0.6) -> str:
    """A hint at the known name that is most like a wrong one; empty if none is by `least`."""
    near = difflib.get_close_matches(word, list(names), n=1, cutoff=least)
    return f"; did you mean {near[0]!r}?" if near else ""


def member(module: ModuleType, name: str, where: str) -> Any:
    """The module's attribute `name`; a UserError that suggests the nearest name if it has none."""
    if hasattr(module, name):
        return getattr(module, name)
    raise UserError(f"{where} defines no {name!r}{nearest(name, vars(module))}")
