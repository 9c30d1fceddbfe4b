"""A commit in a file: what is left when all workers and their agents are gone.

The file is the magic, the number of the commit (8 bytes, little-endian), the SHA-256 of what follows, and the snapshot.
With another magic, what the commit has seen stands before the snapshot, behind its length (8 bytes).
"""

from __future__ import annotations

import hashlib
import os
from typing import Tuple

from ..errors import InvalidError
from ._agent import Buffer

__all__ = ["number_of", "read", "write"]

_MAGIC = b"steadfc1"
_MAGIC_WITH_RECORD = b"steadfc2"
_NUMBER_BYTES = 8
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + _NUMBER_BYTES + _DIGEST_BYTES


def write(path: str, number: int, data: Buffer, record: bytes, *, mark: str) -> None:
    """Replaces the file at once: it is the old or the new one, whatever fails.

    Args:
        record: What the commit has seen, in a job that deals its records; otherwise empty.
        mark: Part of the name of the file that is written first. A worker that is cut off, and does not know of a later
            round yet, has another one.
    """
    written = f"{path}.{mark}.tmp"
    magic, before = _MAGIC, b""
    if record:
        magic, before = _MAGIC_WITH_RECORD, len(record).to_bytes(_NUMBER_BYTES, "little") + record
    digest = hashlib.sha256(before)
    digest.update(data)
    with open(written, "wb") as file:
        file.write(magic + number.to_bytes(_NUMBER_BYTES, "little") + digest.digest() + before)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(written, path)
    # The new name outlives the machine only with its directory.
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def number_of(path: str) -> int:
    """Returns the number of the commit in a file, without its contents; 0 if there is no file.

    Raises:
        InvalidError: The file is no commit.
    """
    try:
        with open(path, "rb") as file:
            return _number(path, file.read(_HEAD_BYTES))
    except FileNotFoundError:
        return 0


def read(path: str) -> Tuple[int, bytes, bytes]:
    """Returns the number of the commit in a file, its contents, and what it has seen, if the file says so.

    Raises:
        InvalidError: The file is no commit, or damaged.
    """
    with open(path, "rb") as file:
        head, data = file.read(_HEAD_BYTES), file.read()
    number = _number(path, head)
    if hashlib.sha256(data).digest() != head[-_DIGEST_BYTES:]:
        raise InvalidError(f"the commit in `{path}` is damaged; remove the file to start over, or restore a copy")
    if head.startswith(_MAGIC):
        return number, data, b""
    end = _NUMBER_BYTES + int.from_bytes(data[:_NUMBER_BYTES], "little")
    return number, data[end:], data[_NUMBER_BYTES:end]


def _number(path: str, head: bytes) -> int:
    if len(head) != _HEAD_BYTES or not head.startswith((_MAGIC, _MAGIC_WITH_RECORD)):
        raise InvalidError(f"`{path}` is no commit; name another file in `save_to`, or remove it to start over")
    return int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + _NUMBER_BYTES], "little")
