"""Checksums in what is written, so that what a disk has altered is not taken for what was written."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from jaxrl_llm.runs.disk import DamageError

_LINE = b', "crc": "'


def sealed(note: dict[str, Any]) -> dict[str, Any]:
    """The note, with its checksum, as JSON will give it back."""
    note = json.loads(json.dumps(note))
    return note | {"sha256": _checksum(note)}


def unsealed(note: Any) -> dict[str, Any]:
    """The note that was sealed."""
    if not isinstance(note, dict) or "sha256" not in note:
        raise DamageError(
            "its notes have no checksum: an older version wrote it, or they were altered"
        )
    note = dict(note)
    if note.pop("sha256") != _checksum(note):
        raise DamageError("its notes are not the ones that were saved")
    return note


def line(entry: dict[str, Any]) -> bytes:
    """The entry as a line of JSON whose last field is a checksum of what stands before it."""
    text = json.dumps(entry).encode()
    return text[:-1] + _LINE + f'{zlib.crc32(text):08x}"}}\n'.encode()


def entry(text: bytes) -> Any:
    """What a line holds; a ValueError if its checksum is of something else. Older lines have none."""
    body, mark, checksum = text.rpartition(_LINE)
    if not mark:
        return json.loads(text)
    body += b"}"
    if checksum != f'{zlib.crc32(body):08x}"}}'.encode():
        raise ValueError("altered")
    return json.loads(body)


def is_sealed(text: bytes) -> bool:
    """Whether a line has a checksum."""
    return _LINE in text


def of_file(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _checksum(note: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()
