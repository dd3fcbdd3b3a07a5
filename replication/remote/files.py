"""The bytes of a store's files: read here and compared with their digests before they go to a bucket or come from one."""

from __future__ import annotations

from pathlib import PurePosixPath

import pyarrow as pa
from blake3 import blake3

from nosync.lsm.errors import CorruptionError
from nosync.lsm.layers.format import decode, verify_block
from nosync.lsm.node.metadata_checks import check_contents
from nosync.replication.protocol.file_names import FileName


def digest_of(name: FileName, data: pa.Buffer, where: str) -> str:
    """Returns the digest of a file, after every byte of it was looked at. Raises CorruptionError for what is no file that
    a store has under this name.
    """
    if name.layer is not None:
        opened = decode(data, where)
        if opened.info.id != name.layer:
            raise CorruptionError(f"{where}: holds {opened.info.id}, and is called {name}")
        for index in range(len(opened.info.blocks)):
            verify_block(opened, index, where)
        return opened.digest
    if not name.is_opaque:
        check_contents(PurePosixPath(name), data.to_pybytes())
    return blake3(data).hexdigest()


def check_digest(name: FileName, data: pa.Buffer, digest: str, where: str) -> None:
    """Raises CorruptionError where a file is not the one with this digest."""
    found = digest_of(name, data, where)
    if found != digest:
        raise CorruptionError(
            f"{where}: has digest {found[:16]}, expected {digest[:16]}: it is not the file that was copied"
        )
