"""Files written whole or not at all, folders with one writer, buckets mirrored by local folders.

A run always works in a local folder. Where a bucket is named instead (`s3://...`, `gs://...`),
`local` gives the folder that mirrors it, `pull` downloads what differs there, `push` uploads what
has changed here. For ordinary folders both do nothing, so callers need not tell the two apart.
"""

import atexit
import errno
import fcntl
import hashlib
import logging
import math
import operator
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from jaxrl_llm import forks
from jaxrl_llm.background import repeating
from jaxrl_llm.errors import UserError, first_line

T = TypeVar("T")
logger = logging.getLogger(__name__)
ABANDONED = 5.0  # seconds that no file takes to be written

# Files.


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to; at the end of the block it is synced to disk and replaces `path`.

    It keeps the permissions of the file that was there.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        with beside.open("xb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def write(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Replaces the content of a file atomically; `mode` sets its permissions."""
    with replacing(path) as file:
        if mode is not None:
            os.fchmod(file.fileno(), mode)
        file.write(content.encode() if isinstance(content, str) else content)


def clear(folder: Path) -> None:
    """Removes what killed writers of `replacing` left below a folder: files that have lain for ABANDONED."""
    for half in [*folder.rglob(".*.new")]:
        with suppress(FileNotFoundError):
            if time.time() - half.stat().st_mtime > ABANDONED:
                half.unlink()


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """fsync of everything below a folder, of the folder, and of its own name."""
    for path in [*folder.rglob("*"), folder, folder.parent]:
        sync(path)


# Folders with one writer.

MEMORY = Path("/dev/shm")  # noqa: S108 (a folder with a random name is made in it)
LOCK = "lock"
# names of temporary folders tell the host, because locks are not seen across hosts
PREFIX = f"jaxrl-llm-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}-"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes this process the folder's only writer for the block; else a UserError names the other.

    The kernel releases the lock however the process ends, so no lock is ever stale, and a suspended
    process keeps it; its forks do not. A bucket's mirror is locked in the bucket too.
    """
    with (folder / LOCK).open("a+") as file, forks.undone_in_children(file.close):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise _in_use(str(folder), file.read().strip()) from error
        except OSError as error:
            raise UserError(
                f"{folder} cannot be locked (flock: {error.strerror}): mount its file system with locks (Lustre: "
                "-o flock), or choose another --out"
            ) from error
        file.truncate(0)
        with suppress(OSError):  # on a full disk the lock works, without a name in it
            file.write(_process())
            file.flush()
        mirror = _mirror_of(folder)
        with mirror.lease() if mirror else nullcontext():
            yield


def memory() -> Path:
    """A folder in memory (/dev/shm), or else the temporary folder."""
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def temporary_folder(under: Path | str) -> Iterator[Path]:
    """A fresh folder, removed at the end; removes those that killed processes have left in `under`.

    It is locked, so that systemd-tmpfiles, which empties /tmp of what is old, passes over it.
    Raises a UserError if it cannot be made.
    """
    for folder in Path(under).glob(f"{PREFIX}*"):
        _remove_if_abandoned(folder)
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=under))
        itself = os.open(root, os.O_RDONLY)
        fcntl.flock(itself, fcntl.LOCK_EX)
        lock = os.open(root / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # now it is made
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(f"cannot make a folder in {under}: {error.strerror}") from error
    try:
        with forks.undone_in_children(lambda: [*map(os.close, (lock, itself))]):
            yield root
    finally:
        os.close(lock)
        os.close(itself)
        shutil.rmtree(root, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    """Removes a folder of this user that nobody has locked; others may write beside it."""
    with suppress(OSError):  # gone meanwhile, or just being made
        if folder.lstat().st_uid != os.geteuid():
            return
        itself = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stat.S_ISREG((folder / LOCK).lstat().st_mode):
                shutil.rmtree(folder)
        finally:
            os.close(itself)


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _in_use(where: str, who: str) -> UserError:
    who = who or "another process"
    return UserError(f"{where} is in use by {who}: wait for it, end it, or choose another --out")


# Buckets.

EXTRAS = {"s3": "s3", "gs": "gcs"}  # the extra of this package that each scheme needs
# files that mark a folder as complete: uploaded last, in this order
COMPLETION_MARKERS = ("dataset_info.json", "config.json", "_CHECKPOINT_METADATA", "run.json")
WRITERS = "writers"  # the folder in a bucket that holds its lease
FIRST_PATIENCE, PATIENCE = 20.0, 900.0  # seconds to retry: before the first answer, and after
SHORTEST, LONGEST = 0.5, 15.0  # seconds between attempts
AT_ONCE = 8  # files that are brought side by side
# seconds between heartbeats, and without one until a writer counts as dead
BEAT, STALE = 4.0, 30.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LASTING = (PermissionError, ValueError, TypeError, ImportError, NotImplementedError)


def is_url(where: str | Path) -> bool:
    """True if it names a place in a bucket; a UserError for a malformed URL."""
    if re.match(r"\w[\w+.-]+:/", str(where)) is None:
        return False
    slashes = "/" if isinstance(where, Path) else "//"  # a Path joins two slashes
    if re.fullmatch(rf"({'|'.join(EXTRAS)}):{slashes}[^/]+(/[^/]+)+/?", str(where)) is None:
        raise UserError(
            f"{where}: write a URL as s3://bucket/name or gs://bucket/name (or is a variable of the "
            "shell empty?)"
        )
    return True


def local(where: str | Path, *, but: Collection[str] = (), bring: bool = True) -> Path:
    """The local folder of a path or URL; from a bucket all is pulled but folders named in `but`.

    Without `bring` nothing is. It is absolute: a reward may change the working folder meanwhile.
    """
    if not is_url(where):
        try:
            return Path(where).expanduser().absolute()
        except RuntimeError as error:
            raise UserError(
                f"{where}: there is no such home folder: write the path out, or set HOME"
            ) from error
    scheme, _, rest = str(where).partition(":")
    url = f"{scheme}://{rest.strip('/')}"
    mirror = _MIRRORS.get(url) or _MIRRORS.setdefault(url, _Mirror(url))
    if bring:
        mirror.pull("", but)
    return mirror.folder


def shared(folder: Path) -> bool:
    """True if all hosts see the same folder under this path: a mirror is each host's own."""
    return _mirror_of(folder) is None


def pull(path: Path, *, but: Collection[str] = ()) -> None:
    """Downloads a file, or those below a folder but not in folders named in `but`, unless it is here.

    Files that are others in the bucket are downloaded too.
    """
    if mirror := _mirror_of(path):
        mirror.pull(mirror.name(path), but)


def push(path: Path) -> None:
    """Uploads a file, or what has changed below a folder (no hidden files, no orbax's own).

    Files that mark a folder as complete (`COMPLETION_MARKERS`) go last.
    """
    if mirror := _mirror_of(path):
        mirror.push(path)


def try_push(path: Path) -> None:
    """As `push`, but only warns where that fails: for what can be had again."""
    try:
        push(path)
    except (UserError, OSError) as error:
        logger.warning("%s was not uploaded: %s", path, first_line(error))


def heard() -> float:
    """When a bucket last answered, by `time.perf_counter`: whoever waits for a long upload lives."""
    return _Mirror.heard


@contextmanager
def upload_after(out: str) -> Iterator[Path]:
    """The local path of a file, by path or URL, that the block writes; it is then uploaded."""
    where, slash, name = out.rpartition("/")
    if re.fullmatch(rf"({'|'.join(EXTRAS)}):/", where.rpartition("/")[0]):
        raise UserError(f"{out}: a file needs a folder in its bucket: {where}/FOLDER/{name}")
    path = local(where or slash or ".", bring=False) / name
    yield path
    push(path)


def rename(folder: Path, name: str) -> None:
    """Renames a folder, here and in the bucket, where what is not here is renamed with it."""
    other = folder.with_name(name)
    if mirror := _mirror_of(folder):
        mirror.copy(mirror.name(folder), mirror.name(other))
        mirror.remove(mirror.name(folder))
    folder.rename(other)


def remove(path: Path) -> None:
    """Removes a folder or file, here and in the bucket; when interrupted it never looks complete."""
    if mirror := _mirror_of(path):
        mirror.remove(mirror.name(path))
    if os.path.lexists(path):
        gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
        path.rename(gone)
        delete(gone)


def delete(path: Path) -> None:
    """Deletes a folder, or a file or link itself; a warning if the disk does not let go of it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        logger.warning("%s cannot be removed and is left (%s)", path, first_line(error))


def as_url(text: Any) -> str:
    """The text with paths of mirrors replaced by their URLs."""
    text = str(text)
    for url, mirror in _MIRRORS.items():
        text = text.replace(str(mirror.folder), url)
    return text


def shown(text: Any) -> str:
    """As `as_url`, for people: a path below the working folder is written from there on."""
    try:
        here = re.escape(os.path.join(os.getcwd(), ""))
    except OSError:  # somebody has removed it
        here = "/"
    text = as_url(text)
    return re.sub(rf"(?<![\w./~-]){here}(?=\w)", "", text) if here != "/" else text


class _Mirror:
    """The local mirror of a URL; removed when the process ends.

    The bucket is reached through fsspec, which knows every store and which orbax uses too. Orbax
    itself cannot write arrays to s3://.
    """

    heard = -math.inf  # when any of them was last answered

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
        # by name, the size and time of each file when it was last the same as in the bucket, and
        # the version there, or None of those that this process, the only writer, has uploaded
        self._synced: dict[str, tuple[tuple[int, int], str | None]] = {}
        self._pushing = threading.Lock()
        self._me = f"{_process()}\n{uuid.uuid4().hex}\n".encode()
        self._lease = 0  # the number of this process's lease; 0 while it is not the writer
        self._lease_checked_at = (-STALE, -STALE)  # when it was last seen to hold, by two clocks

    def name(self, path: Path) -> str:
        """The name of a file's object below the URL; empty for the folder itself."""
        name = path.relative_to(self.folder).as_posix()
        return "" if name == "." else name

    def pull(self, under: str, but: Collection[str] = ()) -> None:
        there = self._list(under)
        wanted = [name for name in there if not {*but, WRITERS} & {*name.split("/")[:-1]}]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            # raises the first error, and drops what is left
            list(pool.map(lambda name: self._bring(name, there[name]), wanted))

    def _bring(self, name: str, version: str) -> None:
        file = self.folder / name
        mark, there = self._synced.get(name, (None, None))
        if file.exists() and mark == _stat(file) and there in (None, version):
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.new")
        try:
            self._try(lambda: self._objects.get_file(self._path(name), str(beside)))
        except FileNotFoundError:
            if name in self._list(name):
                raise
            return  # the writer has removed it meanwhile
        beside.replace(file)
        self._synced[name] = _stat(file), version

    def push(self, path: Path) -> None:
        with self._pushing:
            files = {self.name(file): file for file in ([path] if path.is_file() else _files(path))}
            for name in sorted(files, key=lambda name: (_rank(name), name)):
                file = files[name]
                try:
                    mark = _stat(file)
                    if self._synced.get(name, (None, None))[0] != mark:
                        self._require_lease()
                        self._try(
                            lambda n=name, f=file: self._objects.put_file(str(f), self._path(n))
                        )
                        self._synced[name] = mark, None
                except FileNotFoundError:
                    if file.exists():  # it is the bucket that is gone
                        raise

    def copy(self, under: str, other: str) -> None:
        self._require_lease()
        for name in sorted(self._list(under), key=_rank):
            new = other + name.removeprefix(under)
            self._try(lambda n=name, c=new: self._objects.cp_file(self._path(n), self._path(c)))
            if name in self._synced:  # it will be here under that name
                self._synced[new] = self._synced.pop(name)[0], None

    def remove(self, under: str) -> None:
        self._require_lease()
        # what marks it whole first, and a checkpoint's arrays before its note, by which what an
        # interruption leaves is found: arrays are not looked at
        last = lambda name: (_rank(name), name)
        for name in sorted(self._list(under), key=last, reverse=True):
            with suppress(FileNotFoundError):
                self._try(lambda n=name: self._objects.rm_file(self._path(n)))

    # The lease: numbered objects, each created by one process; the highest number is the writer. To
    # succeed a dead writer, create the next number: only one process can. None writes to another's
    # object, so a suspended writer regains nothing. An empty highest object: there is no writer.

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Makes this process the only writer below the URL for the block."""
        self._lease = self._taken()
        try:
            with repeating(self._beat, min(BEAT, STALE / 4)):
                yield
        finally:
            with suppress(UserError):  # unreachable: the lease goes stale by itself
                self._try(lambda: self._sign(b""))
            self._lease = 0
            # others may write from here on
            self._synced = {name: same for name, same in self._synced.items() if same[1]}

    def _taken(self) -> int:
        """The number of the lease that this process has made."""
        while True:
            number, owner = self._writer()
            if owner:
                who = owner.decode().partition("\n")[0]
                logger.warning("%s is in use by %s: watching whether it is alive", self.url, who)
                until = time.monotonic() + STALE
                while (now := self._writer()) == (number, owner) and time.monotonic() < until:
                    time.sleep(STALE / 30)
                if now != (number, owner) and now[1]:
                    raise _in_use(self.url, who)
            path = self._path(f"{WRITERS}/{number + 1:06d}")
            with suppress(FileExistsError):  # another was first, or the answer was lost
                self._try(lambda p=path: self._objects.pipe_file(p, self._me, mode="create"))
            if self._writer() == (number + 1, self._me):
                return number + 1

    def _beat(self) -> None:
        with suppress(Exception):  # the next heartbeat may succeed
            self._sign(self._me + str(time.monotonic()).encode())

    def _require_lease(self) -> None:
        """A UserError if another process took the lease; nothing is looked at where none is taken (data).

        Asks at most every `STALE` / 2 seconds: nobody takes it sooner than `STALE` after a sign. The
        monotonic clock stands still with a machine that is suspended, the other may be set back.
        """
        now = time.monotonic(), time.time()
        if self._lease and max(map(operator.sub, now, self._lease_checked_at)) > STALE / 2:
            self._try(lambda: self._sign(self._me + str(now).encode()))
            if self._writer()[0] != self._lease:
                raise UserError(
                    f"{self.url} has another writer now: this process stood still; it ends, and "
                    "writes nothing more"
                )
            self._lease_checked_at = now

    def _writer(self) -> tuple[int, bytes]:
        """The highest number of a lease, 0 without one, and its content."""
        name = max(self._list(WRITERS), default="")
        if not name:
            return 0, b""
        content = self._try(lambda: self._objects.cat_file(self._path(name)))
        return int(name.rpartition("/")[2]), content

    def _sign(self, content: bytes) -> None:
        self._objects.pipe_file(self._path(f"{WRITERS}/{self._lease:06d}"), content)

    # Requests to the store; all go through `_try`.

    def _list(self, under: str) -> dict[str, str]:
        """The objects below `under`, or that object: a version by name, another for each content."""
        try:
            found = self._try(lambda: self._objects.find(self._path(under), detail=True))
        except FileNotFoundError as error:  # no such bucket; an unused name gives {}
            raise self._unreachable(error) from error
        out = {}
        for path, about in found.items():
            name = path[len(self._root) + 1 :]
            if name.startswith("/") or ".." in name.split("/"):
                raise UserError(f"{self.url} holds an object {name!r}, which would lie outside it")
            if name and not name.endswith("/") and about["type"] == "file":
                out[name] = str(about.get("ETag") or about["etag"])  # of S3, or Google's
        return out

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _try(self, call: Callable[[], T]) -> T:
        """`call()`, retried for a while if that may help, with one warning; or a UserError.

        FileNotFoundError and FileExistsError are answers, and raised as they are.
        """
        until = time.monotonic() + (PATIENCE if self._answered else FIRST_PATIENCE)
        delay = SHORTEST
        while True:
            try:
                answer = call()
            except (FileNotFoundError, FileExistsError):
                self._answered = True
                raise
            except Exception as error:  # the stores' libraries have no common base class
                if _lasts(error) or time.monotonic() + delay > until:
                    self._answered = False  # later calls give up sooner
                    raise self._unreachable(error) from error
                if delay == SHORTEST:
                    said = f"{self.url} does not answer ({first_line(error)}): trying again"
                    logger.warning(said)
            else:
                self._answered, _Mirror.heard = True, time.perf_counter()
                return answer
            time.sleep(delay)
            delay = min(2 * delay, LONGEST)

    def _unreachable(self, error: Exception) -> UserError:
        return UserError(
            f"cannot reach {self.url} ({first_line(error)}): check its name, the credentials in the "
            "environment and the network"
        )


_MIRRORS: dict[str, _Mirror] = {}


def _mirror_of(path: Path) -> _Mirror | None:
    inside = (m for m in _MIRRORS.values() if path.is_relative_to(m.folder))
    return next(inside, None)


@cache
def _file_system(scheme: str) -> Any:
    """fsspec's, without its cache of listings: others write there too."""
    import fsspec

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it logs raised errors again
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":  # only `_try` retries
        options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    return fsspec.filesystem(scheme, **options)


def _lasts(error: Exception) -> bool:
    """True if retrying is pointless."""
    return (
        isinstance(error, _LASTING)
        or (isinstance(error, OSError) and error.errno in _NO_ROOM)
        or str(error).startswith("Forbidden")  # a message of gcsfs
        or "Credential" in type(error).__name__
    )


def _rank(name: str) -> int:
    """0, or 1 + the position in `COMPLETION_MARKERS` for files that mark a folder as complete."""
    last = name.rpartition("/")[2]
    return 1 + COMPLETION_MARKERS.index(last) if last in COMPLETION_MARKERS else 0


def _files(folder: Path) -> Iterator[Path]:
    """Files below a folder; not the lock, hidden ones or orbax's temporary ones (may vanish)."""
    skipped = lambda name: name.startswith(".") or ".orbax-" in name or name == LOCK
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not skipped(name)]
        yield from (Path(where, name) for name in files if not skipped(name))


def _stat(file: Path) -> tuple[int, int]:
    about = file.stat()
    return about.st_size, about.st_mtime_ns
