"""One guard for everything that takes bytes apart which somebody else may have written.

A digest says that bytes are what somebody wrote, not that a store did: files come from other nodes, backups and strangers. So
whatever a parser stumbles over is a CorruptionError that names the file, and nothing else leaves it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import pyarrow as pa

from nosync.lsm.errors import CorruptionError, FormatVersionError

_STUMBLES = (
    ValueError,  # JSON, UTF-8, numbers
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ArithmeticError,  # a size of zero, or one that no number holds
    RecursionError,
    MemoryError,
    StopIteration,  # what pyarrow says of a stream that ends at once
    struct.error,
    OSError,  # what Arrow calls a body that ends early
    pa.ArrowException,
)


@contextlib.contextmanager
def parsed(what: str, where: str) -> Iterator[None]:
    """Bytes are taken apart in here. Raises CorruptionError where they are not those of `what`."""
    try:
        yield
    except (CorruptionError, FormatVersionError):
        raise
    except _STUMBLES as error:
        said = str(error).splitlines()[0][:200] if str(error) else ""
        raise CorruptionError(f"{where}: is not {what} ({type(error).__name__}{': ' * bool(said)}{said})") from error
