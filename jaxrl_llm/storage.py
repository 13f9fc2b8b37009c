"""Files written whole or not at all, folders with one writer, buckets mirrored by local folders.

A run always works in a local folder. Where a bucket is named instead (`s3://...`, `gs://...`),
`local` gives the folder that mirrors it, `pull` downloads what is missing there, `push` uploads
what has changed. For ordinary folders both do nothing, so callers need not tell the two apart.
"""

import atexit
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jaxrl_llm.errors import UserError, first_line

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Files.


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to; at the end of the block it is synced to disk and replaces `path`."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Replaces the content of a file atomically."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def copy(source: Path, target: Path) -> None:
    """Copies a file's bytes and permissions; replaces `target` atomically."""
    with replacing(target) as file:
        os.fchmod(file.fileno(), stat.S_IMODE(source.stat().st_mode))
        file.write(source.read_bytes())


def sync(path: Path) -> None:
    """fsync of a file, or of the names in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every system syncs folders
            raise
    finally:
        os.close(number)


def sync_tree(folder: Path) -> None:
    """fsync of everything below a folder, and of the folder."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


# Folders with one writer.

MEMORY = Path("/dev/shm")  # noqa: S108 (a folder with a random name is made in it)
PREFIX, LOCK = "jaxrl-llm-", "lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes this process the folder's only writer for the block; else a UserError names the other.

    The kernel releases the lock however the process ends, so no lock is ever stale, and a suspended
    process keeps it. A bucket's mirror is locked in the bucket too.
    """
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise UserError(
                f"{folder} is in use by {who}: wait for it, end it, or choose another --out"
            ) from error
        file.truncate(0)
        with suppress(OSError):  # on a full disk the lock works, without a name in it
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        mirror = _mirror_of(folder)
        with mirror.lease() if mirror else ExitStack():
            yield


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine has the folder locked."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def memory() -> Path:
    """A folder in memory (/dev/shm), or else the temporary folder."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def temporary_folder(under: Path) -> Iterator[Path]:
    """A fresh folder, removed at the end; removes those that killed processes have left in `under`.

    Others may write to `under` too, so nothing in it is trusted: symlinks are not followed, pipes
    do not block, folders of other users or hosts stay. Raises a UserError if it cannot be made.
    """
    for folder in under.glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=under))
        lock = os.open(root / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, _here())
    except OSError as error:
        raise UserError(f"cannot make a folder in {under}: {error.strerror}") from error
    try:
        yield root
    finally:
        os.close(lock)
        shutil.rmtree(root, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with ExitStack() as stack, suppress(OSError):  # anything unexpected: leave it
        inside = os.open(folder, how | os.O_DIRECTORY)
        stack.callback(os.close, inside)
        lock = os.open(LOCK, how, dir_fd=inside)
        stack.callback(os.close, lock)
        ours = all(os.fstat(it).st_uid == os.geteuid() for it in (inside, lock))
        if ours and stat.S_ISREG(os.fstat(lock).st_mode) and os.read(lock, 1000) == _here():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def _here() -> bytes:
    """Content of a lock file; names the host, because locks are not seen across hosts."""
    return f"jaxrl-llm on {socket.gethostname()}\n".encode()[:1000]


# Buckets.

EXTRAS = {"s3": "s3", "gs": "gcs"}  # the extra of this package that each scheme needs
# files that mark a folder as complete: uploaded last, in this order
LAST = ("dataset_info.json", "config.json", "_CHECKPOINT_METADATA", "run.json")
WRITERS = "writers"  # the folder in a bucket that holds its lease
FIRST_PATIENCE, PATIENCE = 20.0, 900.0  # seconds to retry: before the first answer, and after
SHORTEST, LONGEST = 0.5, 15.0  # seconds between attempts
# seconds between heartbeats, and without one until a writer counts as dead
BEAT, STALE = 10.0, 120.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    ValueError,
    TypeError,
    ImportError,
    NotImplementedError,
)


def is_url(where: str | Path) -> bool:
    """Whether it names a place in a bucket; a UserError for a malformed URL."""
    found = re.fullmatch(r"(\w[\w+.-]+):(/.*)", str(where))
    if found is None:
        return False
    bucket, _, name = found[2].strip("/").partition("/")
    if found[1] not in EXTRAS or not bucket or not name or "//" in found[2].lstrip("/"):
        raise UserError(f"{where}: write a URL as s3://bucket/name or gs://bucket/name")
    if isinstance(where, str) and not re.match(r"\w[\w+.-]+://[^/]", where):
        raise UserError(f"{where}: the URL names no bucket (is a variable of the shell empty?)")
    return True


def local(where: str | Path, *, but: tuple[str, ...] = ()) -> Path:
    """The local folder of a path or URL; from a bucket all is pulled but folders named in `but`."""
    if not is_url(where):
        return Path(where)
    scheme, _, rest = str(where).partition(":")
    url = f"{scheme}://{rest.strip('/')}"
    if url not in _MIRRORS:
        _MIRRORS[url] = _Mirror(url)
    mirror = _MIRRORS[url]
    mirror.pull("", but)
    return mirror.folder


def shared(folder: Path) -> bool:
    """Whether all hosts see the same folder under this path: a mirror is each host's own."""
    return _mirror_of(folder) is None


def pull(path: Path) -> None:
    """Downloads a file, or the files below a folder, that are missing here or differ in size."""
    if mirror := _mirror_of(path):
        mirror.pull(mirror.name(path))


def push(path: Path, *, but: tuple[str, ...] = ()) -> None:
    """Uploads what changed of a file or in a folder (no hidden files, nor folders named in `but`).

    Files that mark a folder as complete (`LAST`) go last.
    """
    if mirror := _mirror_of(path):
        mirror.push(path, but)


def remove(folder: Path) -> None:
    """Removes a folder, here and in the bucket; when interrupted it never looks complete."""
    if mirror := _mirror_of(folder):
        mirror.remove(mirror.name(folder))
    if folder.exists():
        gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.gone")
        folder.rename(gone)
        shutil.rmtree(gone)


def spoken(text: Any) -> str:
    """The text with paths of mirrors replaced by their URLs, for messages."""
    text = str(text)
    for url, mirror in _MIRRORS.items():
        text = text.replace(str(mirror.folder), url)
    return text


def retrying(
    call: Callable[[], T], *, patience: float, lasts: Callable[[Exception], bool], say: str
) -> T:
    """`call()`, retried for `patience` seconds unless `lasts(error)`; `say` begins the warning."""
    until, delay = time.monotonic() + patience, SHORTEST
    while True:
        try:
            return call()
        except Exception as error:  # the stores' libraries have no common base class
            if lasts(error) or time.monotonic() + delay > until:
                raise
            if delay == SHORTEST:
                logger.warning("%s (%s): trying again", say, first_line(error))
        time.sleep(delay)
        delay = min(2 * delay, LONGEST)


class _Mirror:
    """The local mirror of a URL; removed when the process ends.

    The bucket is reached through fsspec, which knows every store and which orbax uses too. Orbax
    itself cannot write arrays to s3://.
    """

    def __init__(self, url: str):
        self.url = url
        scheme, _, self._root = url.partition("://")
        try:
            self._objects = _file_system(scheme)
        except ImportError as error:
            raise UserError(
                f"{scheme}:// needs one more package: pip install 'jaxrl-llm[{EXTRAS[scheme]}]'"
            ) from error
        self._answered = False
        until_exit = ExitStack()
        atexit.register(until_exit.close)
        under = Path(tempfile.gettempdir())
        root = until_exit.enter_context(temporary_folder(under)).resolve()
        self.folder = root / re.sub(r"[^\w.,=+-]", "_", url.rpartition("/")[2])
        self.folder.mkdir()
        # size and time of each file when it was last the same as in the bucket
        self._stored: dict[str, tuple[int, int]] = {}
        self._note = 0  # the number of this process's lease file; 0 while it is not the writer

    def name(self, path: Path) -> str:
        """The name of a file's object below the URL; empty for the folder itself."""
        name = path.relative_to(self.folder).as_posix()
        return "" if name == "." else name

    def pull(self, under: str, but: tuple[str, ...] = ()) -> None:
        for name, size in self._names(under).items():
            file = self.folder / name
            folders = {*name.split("/")[:-1]}
            if folders & {*but, WRITERS} or (file.exists() and file.stat().st_size == size):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.new")
            self._try(lambda n=name, b=beside: self._objects.get_file(self._path(n), str(b)))
            beside.replace(file)
            self._stored[name] = _mark(file)

    def push(self, path: Path, but: tuple[str, ...]) -> None:
        names = {
            self.name(file): file for file in ([path] if path.is_file() else _files(path, but))
        }
        for name in sorted(names, key=lambda name: (_rank(name), name)):
            file = names[name]
            if name == LOCK or not file.exists():
                continue
            if self._stored.get(name) != (mark := _mark(file)):
                self._require_lease()
                self._try(lambda n=name, f=file: self._objects.put_file(str(f), self._path(n)))
                self._stored[name] = mark

    def remove(self, under: str) -> None:
        self._require_lease()
        for name in sorted(self._names(under), key=_rank, reverse=True):
            self._delete(name)
            self._stored.pop(name, None)

    # The lease: numbered files, each created by one process; the highest number is the writer. To
    # succeed a dead writer, create the next number: only one process can. None writes to another's
    # file, so a suspended writer regains nothing. An empty highest file: there is no writer.

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Makes this process the only writer below the URL for the block."""
        self._note = self._take()
        done = threading.Event()
        heart = threading.Thread(target=self._beat, args=(done,), daemon=True)
        heart.start()
        try:
            yield
        finally:
            done.set()
            heart.join()
            with suppress(UserError):  # unreachable: the lease goes stale by itself
                if self._highest()[0] == self._note:
                    path = self._path(f"{WRITERS}/{self._note:06d}")
                    self._try(lambda: self._objects.pipe_file(path, b""))
            self._note = 0

    def _take(self) -> int:
        while True:
            number, said = self._highest()
            if said and not self._is_dead(said):
                who = json.loads(said)["who"]
                logger.warning("%s is in use by %s: watching whether it is alive", self.url, who)
                until = time.monotonic() + STALE
                while time.monotonic() < until and self._highest() == (number, said):
                    time.sleep(min(1.0, STALE / 20))
                now = self._highest()
                if now != (number, said) and now[1]:
                    raise UserError(
                        f"{self.url} is in use by {who}: wait for it, end it, or choose another --out"
                    )
            mine = number + 1
            create = lambda name=f"{WRITERS}/{mine:06d}": self._objects.pipe_file(
                self._path(name), self._sign(0), mode="create"
            )
            try:
                self._try(create)
            except FileExistsError:  # another was first; or ours was made, and the answer was lost
                if self._read(mine) != self._sign(0):
                    continue
            if self._highest()[0] == mine:
                for older in self._numbers()[:-1]:
                    self._delete(f"{WRITERS}/{older:06d}")
                return mine

    def _require_lease(self) -> None:
        """A UserError if another process took the lease; unchecked where none is taken (data)."""
        if self._note and self._highest()[0] != self._note:
            raise UserError(
                f"{self.url} has another writer now: this process stood still; it ends, and writes nothing more"
            )

    def _beat(self, done: threading.Event) -> None:
        beats = 0
        while not done.wait(min(BEAT, STALE / 4)):
            beats += 1
            path = self._path(f"{WRITERS}/{self._note:06d}")
            with suppress(Exception):  # the next heartbeat may succeed
                self._objects.pipe_file(path, self._sign(beats))

    def _sign(self, beats: int) -> bytes:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        note = {"who": who, "machine": _machine(), "folder": str(self.folder.parent)}
        return json.dumps(note | {"beats": beats}).encode()

    def _is_dead(self, said: bytes) -> bool:
        """Whether the writer ran on this machine and has ended: its folder is not locked."""
        note = json.loads(said)
        return note["machine"] == _machine() and not is_locked(Path(note["folder"]))

    def _numbers(self) -> list[int]:
        return sorted(int(name.rpartition("/")[2]) for name in self._names(WRITERS))

    def _highest(self) -> tuple[int, bytes]:
        numbers = self._numbers()
        return (numbers[-1], self._read(numbers[-1])) if numbers else (0, b"")

    def _read(self, number: int) -> bytes:
        with suppress(FileNotFoundError):
            name = self._path(f"{WRITERS}/{number:06d}")
            return self._try(lambda: self._objects.cat_file(name))
        return b""

    # Requests to the store; all go through `_try`.

    def _names(self, under: str) -> dict[str, int]:
        """Sizes in bytes, by name, of the objects below `under` or of that object itself."""
        try:
            found = self._try(lambda: self._objects.find(self._path(under), detail=True))
        except FileNotFoundError as error:  # no such bucket; an unused name gives {}
            raise self._unreachable(error) from error
        sizes = {name[len(self._root) + 1 :]: about["size"] for name, about in found.items()}
        for name in sizes:
            if name.startswith("/") or ".." in name.split("/"):
                raise UserError(f"{self.url} holds an object {name!r}, which would lie outside it")
        return {name: size for name, size in sizes.items() if name and not name.endswith("/")}

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._try(lambda: self._objects.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _try(self, call: Callable[[], T]) -> T:
        patience = PATIENCE if self._answered else FIRST_PATIENCE
        say = f"{self.url} does not answer"
        try:
            found = retrying(call, patience=patience, lasts=_lasts, say=say)
        except (FileNotFoundError, FileExistsError):  # answers, too
            self._answered = True
            raise
        except Exception as error:
            self._answered = False  # later calls give up sooner
            raise self._unreachable(error) from error
        self._answered = True
        return found

    def _unreachable(self, error: Exception) -> UserError:
        return UserError(
            f"cannot reach {self.url} ({first_line(error)}): check its name, the credentials in the "
            "environment and the network"
        )


_MIRRORS: dict[str, _Mirror] = {}


def _mirror_of(path: Path) -> _Mirror | None:
    for mirror in _MIRRORS.values():
        if path == mirror.folder or mirror.folder in path.parents:
            return mirror
    return None


@cache
def _file_system(scheme: str) -> Any:
    """fsspec's, without its cache of listings: others write there too."""
    import fsspec

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it logs raised errors again
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":  # only `retrying` retries
        options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    return fsspec.filesystem(scheme, **options)


def _lasts(error: Exception) -> bool:
    """Whether retrying is pointless."""
    return (
        isinstance(error, (FileExistsError, *_LASTING))
        or (isinstance(error, OSError) and error.errno in _NO_ROOM)
        or str(error).startswith("Forbidden")  # a message of gcsfs
        or "Credential" in type(error).__name__
    )


def _rank(name: str) -> int:
    """0, or 1 + the position in `LAST` for files that mark a folder as complete."""
    last = name.rpartition("/")[2]
    return 1 + LAST.index(last) if last in LAST else 0


def _files(folder: Path, but: tuple[str, ...]) -> Iterator[Path]:
    """Files below a folder; not hidden ones, nor orbax's temporary ones, which may vanish."""
    skipped = lambda name: name.startswith(".") or ".orbax-" in name
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in but and not skipped(name)]
        yield from (Path(where, name) for name in files if not skipped(name))


def _mark(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns


def _machine() -> str:
    """Identifies this boot and process namespace, within which processes see one another."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode()}"
