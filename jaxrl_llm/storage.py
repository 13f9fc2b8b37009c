"""A place in a bucket: objects that are put whole or not at all, made only if absent, listed, removed.

It is reached through fsspec, as orbax's paths are. What may pass (the network, a busy server) is tried again:
for `PATIENCE` seconds, or `FIRST` seconds as long as the bucket has not answered once, so that a wrong name or
address is said soon and an outage does not end a run; and after `PATIENCE` in vain, so that a run ends soon then.
"""

import errno
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.errors import UserError, first_line

T = TypeVar("T")
FIRST, PATIENCE = 20.0, 900.0
SHORTEST, LONGEST = 0.5, 15.0  # seconds to the next attempt
EXTRAS = {"s3": "s3", "gs": "gcs"}  # the extra of this package that each scheme needs
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    ValueError,
    TypeError,
    ImportError,
    NotImplementedError,
)
logger = logging.getLogger(__name__)


def url_of(path: Path) -> str | None:
    """The URL that a path was given as (pathlib leaves one slash of two); None for one in a file system."""
    found = re.fullmatch(r"(\w[\w+.-]+):/+([^/]+.*?)/*", str(path))
    if found is None:
        return None
    if found[1] not in EXTRAS:
        raise UserError(f"{found[1]}://{found[2]}: of URLs only s3:// and gs:// are known")
    return f"{found[1]}://{found[2]}"


class Place:
    """The objects under a URL, by their names below it."""

    def __init__(self, url: str):
        self.url = url
        scheme, _, self._root = url.partition("://")
        self._answered = False
        try:
            self._objects = _opened(scheme)
        except ImportError as error:
            raise UserError(
                f"{scheme}:// needs a package more: pip install 'jaxrl-llm[{EXTRAS[scheme]}]'"
            ) from error

    def names(self, under: str = "") -> dict[str, int]:
        """The objects below a name, or the one of that name, and their sizes in bytes."""
        found = self._patiently(lambda: self._objects.find(self._path(under), detail=True))
        sizes = {name[len(self._root) + 1 :]: about["size"] for name, about in found.items()}
        for name in sizes:
            if name.startswith("/") or ".." in name.split("/"):
                raise UserError(
                    f"{self.url} holds an object {name!r}, which would lie outside a folder here"
                )
        return {name: size for name, size in sizes.items() if name and not name.endswith("/")}

    def read(self, name: str) -> bytes | None:
        """What an object holds; None if there is none."""
        try:
            return self._patiently(lambda: self._objects.cat_file(self._path(name)), absent=True)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, patience: float | None = None) -> None:
        """An object, in place of what was there."""
        self._patiently(
            lambda: self._objects.pipe_file(self._path(name), content), patience=patience
        )

    def create(self, name: str, content: bytes) -> bool:
        """Whether the object was not there, and now holds this; of many who try one hears so."""
        try:
            self._patiently(
                lambda: self._objects.pipe_file(self._path(name), content, mode="create")
            )
        except FileExistsError:  # or an attempt came through whose answer was lost
            return self.read(name) == content
        return True

    def upload(self, file: Path, name: str) -> None:
        """A file as an object."""
        self._patiently(lambda: self._objects.put_file(str(file), self._path(name)))

    def download(self, name: str, file: Path) -> None:
        """An object as a file, which appears when it is whole; a FileNotFoundError if there is none."""
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.new")
        self._patiently(lambda: self._objects.get_file(self._path(name), str(beside)), absent=True)
        beside.replace(file)

    def remove(self, name: str) -> None:
        """An object less; it need not be there."""
        with suppress(FileNotFoundError):
            self._patiently(lambda: self._objects.rm_file(self._path(name)), absent=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _patiently(
        self, call: Callable[[], T], *, absent: bool = False, patience: float | None = None
    ) -> T:
        """What a call returns; with `absent` its FileNotFoundError is of an object, else of the bucket."""
        usual = PATIENCE if self._answered else FIRST
        until = time.monotonic() + (usual if patience is None else patience)
        delay = SHORTEST
        while True:
            try:
                found = call()
            except Exception as error:  # the libraries' errors have no common base
                if isinstance(error, FileExistsError) or (
                    absent and isinstance(error, FileNotFoundError)
                ):
                    self._answered = True
                    raise
                if _lasts(error) or time.monotonic() + delay > until:
                    if patience is None:
                        self._answered = False
                    raise _cannot_reach(self.url, error) from error
                if delay == SHORTEST:  # fsspec has tried five times by itself
                    logger.warning("%s does not answer (%s): trying again", self.url, error)
                time.sleep(delay)
                delay = min(2 * delay, LONGEST)
            else:
                self._answered = True
                return found


@cache
def _opened(scheme: str) -> Any:
    """The file system of fsspec, which must not remember what it has listed: others write there too."""
    import fsspec

    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it says again what is raised here
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    return fsspec.filesystem(scheme, **options)


def _lasts(error: Exception) -> bool:
    """Whether no new attempt would help."""
    if isinstance(error, OSError) and error.errno in _DISK:
        return True
    if str(error).startswith("Forbidden"):  # as gcsfs says it
        return True
    return isinstance(error, _LASTING) or "Credential" in type(error).__name__


def _cannot_reach(url: str, error: Exception) -> UserError:
    return UserError(
        f"cannot reach {url} ({first_line(error)}): check its name, the credentials in the environment "
        "and the network"
    )
