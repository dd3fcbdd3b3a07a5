"""An object store, as far as the remote level needs one. `cloud` has the real ones, `nosync.testing` a faulty one.

What is required of it
- `put_new` is atomic: an object is there whole or not at all, and of two writers of one name one is told that it lost.
- What was put, or deleted, is seen by the next `get` of that name. A `list` may lag behind.
- A call that raises `UnavailableError` may have had its effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nosync.lsm.errors import RemoteError


class MissingObjectError(RemoteError):
    """There is no object of this name."""


class UnavailableError(RemoteError):
    """The object store did not answer, or asks to be asked later. The call may have had its effect."""


@dataclass(frozen=True, order=True)
class ObjectInfo:
    """One object of a listing. `name`: relative to the prefix of the remote."""

    name: str
    size_bytes: int


class Bucket(Protocol):
    """The objects below one prefix. Methods raise RemoteError; safe to be called from several threads."""

    url: str
    """Where it is, without credentials."""

    def put_new(self, name: str, data: bytes | bytearray | memoryview) -> bool:
        """Puts an object, unless there is one of that name: then False is returned, and it stays as it is."""

    def get(self, name: str) -> bytes:
        """Returns a whole object. Raises MissingObjectError."""

    def get_range(self, name: str, begin: int, end: int) -> bytes:
        """Returns the bytes `[begin, end)` of an object, which has so many. Raises MissingObjectError."""

    def get_end(self, name: str, size_bytes: int) -> bytes:
        """Returns the last bytes of an object; all of it where it has fewer. Raises MissingObjectError."""

    def directories(self, prefix: str) -> list[str]:
        """Returns what comes next in names below a prefix that ends in `/`, up to another `/`, in order."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Returns the objects below a prefix that ends in `/`, in order of their names."""

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects. One that is not there is fine."""
