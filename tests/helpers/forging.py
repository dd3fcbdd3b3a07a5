"""Files as a stranger makes them: what a store does not write, with digests that fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from nosync.lsm.layers.format import _TRAILER, HEAD_BYTES, MAGIC, TRAILER_BYTES, _digest

Fields = dict[str, Any]


def parts_of(path: Path) -> tuple[bytes, bytearray, bytes, Fields]:
    """A layer file's head, body, offsets of key groups, and description."""
    data = path.read_bytes()
    body_bytes, count, length = _TRAILER.unpack(data[-TRAILER_BYTES:])[:3]
    at = HEAD_BYTES + body_bytes
    fields = json.loads(data[at + 8 * count : at + 8 * count + length])
    return data[:HEAD_BYTES], bytearray(data[HEAD_BYTES:at]), data[at : at + 8 * count], fields


def forge_layer(
    path: Path,
    body: Callable[[bytearray], bytes | bytearray] = lambda body: body,
    fields: Callable[[Fields], None] = lambda fields: None,
    offsets: Callable[[bytes], bytes] = lambda offsets: offsets,
) -> None:
    """Writes a layer again with other contents, under digests that fit them."""
    head, was, groups, said = parts_of(path)
    new, groups = bytes(body(was)), offsets(groups)
    delta, start = len(new) - len(was), 0
    for block in said["blocks"]:
        block[0] += delta  # what grew, grew in the first block
        block[4] = blake3(new[start : block[0]]).hexdigest()
        start = block[0]
    fields(said)
    text = json.dumps(said, separators=(",", ":"), sort_keys=True).encode()
    lengths = (len(new), len(groups) // 8, len(text), 1)
    digest = _digest(head, groups, text, _TRAILER.pack(*lengths, bytes(32), MAGIC))
    path.unlink()
    path.write_bytes(head + new + groups + text + _TRAILER.pack(*lengths, digest, MAGIC))


def forge_body(path: Path, table: pa.Table, *, compression: str | None) -> None:
    """Puts another Arrow file into a layer of one block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    new = sink.getvalue().to_pybytes()
    footer = 10 + int(np.frombuffer(new[-10:-6], "<i4")[0])

    def fields(said: Fields) -> None:
        ends = [len(new) - footer - 8, len(new)]
        said["blocks"] = [
            [ends[0], table.num_rows, *said["blocks"][0][2:4], blake3(new[: ends[0]]).hexdigest()],
            [ends[1], 0, 0, 0, blake3(new[ends[0] :]).hexdigest()],
        ]
        said["rows"] = table.num_rows

    forge_layer(path, lambda _: new, fields)
