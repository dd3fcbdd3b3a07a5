"""The checksums that Spark 4.1 and later write beside the files of a checkpoint: `<file>.crc`, JSON with a CRC32C.

They say what the JVM meant to write. So a file that is checked when it is kept is checked on its whole way, from the
JVM's memory to the disks of peers.
"""

from __future__ import annotations

import json
from pathlib import Path

import google_crc32c

from nosync.lsm.errors import CorruptionError
from nosync.lsm.platform.env import Env
from nosync.lsm.platform.parsing import parsed

_ALGORITHM = "CRC32C"
_PIECE_BYTES = 1 << 20
_UNSIGNED = (1 << 32) - 1
"""The JVM writes the checksum as a number with a sign."""


def check(crc: bytes, file: Path, env: Env) -> None:
    """Checks a file beside the contents of its checksum file.

    Raises CorruptionError where the size or the checksum is another one, or where the checksum file is not one. A
    checksum by another algorithm than CRC32C says the size alone.
    """
    with parsed("a checksum of Spark", f"{file}.crc"):
        fields = json.loads(crc)
        algorithm, value, size_bytes = str(fields["algorithm"]), int(fields["value"]), int(fields["mainFileSize"])
    data = memoryview(env.map(file))
    if len(data) != size_bytes:
        raise CorruptionError(f"{file}: has {len(data):,} bytes, and its checksum is of {size_bytes:,}")
    if algorithm == _ALGORITHM and _crc32c(data) != value & _UNSIGNED:
        raise CorruptionError(f"{file}: does not match the checksum that Spark wrote beside it")


def _crc32c(data: memoryview) -> int:
    found = 0
    for start in range(0, len(data), _PIECE_BYTES):
        found = google_crc32c.extend(found, bytes(data[start : start + _PIECE_BYTES]))
    return found
