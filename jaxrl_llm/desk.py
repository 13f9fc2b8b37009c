"""A folder of this machine in which what lies in a bucket is worked on.

`at_hand` gives it for a URL; a path in a file system is at hand as it is, and every function here then does
nothing. `fetch` brings objects, `store` puts there what has changed since. What says that a folder is whole
(`LAST`) is stored last and removed first, so that half a folder is never taken for one. Before anything in the
bucket is changed its guard is called: it raises where the place is no longer ours.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from jaxrl_llm.held import held_folder
from jaxrl_llm.storage import Place, url_of

LAST = ("dataset_info.json", "config.json", "_CHECKPOINT_METADATA", "reference.json", "run.json")


class _Desk:
    """What is known of a folder: its place, the files as they were stored, who says that it is ours."""

    def __init__(self, url: str):
        self.place = Place(url)
        until_closed = ExitStack()
        root = until_closed.enter_context(held_folder(Path(tempfile.gettempdir())))
        self.close = until_closed.close
        atexit.register(self.close)
        name = re.sub(r"[^\w.,=+-]", "_", url.rpartition("/")[2])
        self.folder = root.resolve() / name
        self.folder.mkdir()
        self.stored: dict[str, tuple[int, int]] = {}
        self.guard: Callable[[], None] = lambda: None

    def name(self, path: Path) -> str:
        """What an object is called whose file this is; "" for the folder itself."""
        name = path.relative_to(self.folder).as_posix()
        return "" if name == "." else name


_DESKS: dict[str, _Desk] = {}


def at_hand(path: Path) -> Path:
    """The folder for what a path or URL names; empty until something is fetched."""
    url = url_of(path)
    if url is None:
        return path
    if url not in _DESKS:
        _DESKS[url] = _Desk(url)
    return _DESKS[url].folder


def place(folder: Path) -> Place | None:
    """Where in a bucket a folder lies; None if it is a folder of a file system."""
    found = _of(folder)
    return found.place if found else None


def guard(folder: Path, check: Callable[[], None]) -> None:
    """Has `check` called before anything of the folder is changed in its bucket."""
    if found := _of(folder):
        found.guard = check


def fetch(path: Path) -> None:
    """Brings a file, or all files below a folder, as they are stored; those here as they were stored stay."""
    if found := _of(path):
        for name, size in found.place.names(found.name(path)).items():
            file = found.folder / name
            if not (file.exists() and file.stat().st_size == size):
                bring(file)


def bring(file: Path) -> None:
    """Brings one file anew; without its object it goes."""
    if found := _of(file):
        name = found.name(file)
        try:
            found.place.download(name, file)
        except FileNotFoundError:
            file.unlink(missing_ok=True)
        else:
            found.stored[name] = _mark(file)


def entries(folder: Path) -> dict[str, set[str]]:
    """What is stored below the folders in a folder, by their names."""
    out: dict[str, set[str]] = {}
    if found := _of(folder):
        under = found.name(folder)
        for name in found.place.names(under):
            first, _, rest = name[len(under) + 1 if under else 0 :].partition("/")
            out.setdefault(first, set()).add(rest)
    return out


def store(path: Path, but: tuple[str, ...] = ()) -> None:
    """Puts there what has changed of a file, or below a folder; not what is hidden, nor `but`.

    Nor `but.anything`: that may be on its way to become `but`, and gone the next moment.
    """
    found = _of(path)
    if found is None:
        return
    inside = path.iterdir() if path.is_dir() else [path]
    whole = [one for one in inside if one.name.partition(".")[0] not in but]
    files = [file for one in whole for file in [one, *one.rglob("*")] if file.is_file()]
    files = [file for file in files if not file.name.startswith(".")]
    found.guard()
    for file in sorted(files, key=lambda file: (_rank(file.name), file)):
        name, mark = found.name(file), _mark(file)
        if found.stored.get(name) != mark:
            if _rank(name):
                found.guard()
            found.place.upload(file, name)
            found.stored[name] = mark


def release(folder: Path) -> None:
    """Makes room: the files here go, for they are stored and can be fetched."""
    if _of(folder):
        shutil.rmtree(folder)


def drop(folder: Path) -> None:
    """Removes what is stored of a folder."""
    if found := _of(folder):
        found.guard()
        for name in sorted(found.place.names(found.name(folder)), key=_rank, reverse=True):
            found.place.remove(name)
            found.stored.pop(name, None)


def exists(path: Path) -> bool:
    """Whether it is here, or stored."""
    found = _of(path)
    return path.exists() or bool(found and found.place.names(found.name(path)))


def named(path: Path) -> str:
    """What people call a path: its URL, where it has one."""
    return spoken(str(path))


def spoken(text: str) -> str:
    """A text for people, in which folders are called by their URLs."""
    for url, desk in _DESKS.items():
        text = text.replace(str(desk.folder), url)
    return text


def _of(path: Path) -> _Desk | None:
    for desk in _DESKS.values():
        if path == desk.folder or desk.folder in path.parents:
            return desk
    return None


def _rank(name: str) -> int:
    """0, or the turn among those that say a folder is whole."""
    last = name.rpartition("/")[2]
    return 1 + LAST.index(last) if last in LAST else 0


def _mark(file: Path) -> tuple[int, int]:
    """Two numbers of which one changes when the file does."""
    about = os.stat(file)
    return about.st_size, about.st_mtime_ns
