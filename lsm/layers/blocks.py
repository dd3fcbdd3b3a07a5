"""How the rows of a layer are cut into blocks: what is verified, and fetched from elsewhere, as one.

Who looks up a few keys in a bucket fetches a block for each, whatever the rows weigh. So a block has some megabytes at
most, and not only a number of rows. Smaller ones would cost: each is opened, and searched, by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from nosync.lsm.columnar.columns import take_batch
from nosync.lsm.columnar.hashing import U32

BLOCK_BYTES = 4 << 20
"""About the most bytes of a block."""
ONE_BLOCK_BYTES = 4 * BLOCK_BYTES
"""The layer of an epoch has one block, if it is no larger: it is soon merged."""


def rows_of_block(rows: int, size_bytes: int) -> int:
    """Returns how many rows of this size a block has at most."""
    return max(1, BLOCK_BYTES * rows // max(size_bytes, 1))


def is_large(batch: pa.RecordBatch) -> bool:
    """Returns whether the rows of an epoch are cut into blocks. It depends on nothing but the rows."""
    return batch.nbytes > ONE_BLOCK_BYTES // 2 and _written_bytes(batch) > ONE_BLOCK_BYTES


def _written_bytes(batch: pa.RecordBatch) -> int:
    """Returns how many bytes a batch has in a file. In memory equal rows may have more: bitmaps of nulls that are not there."""
    return int(pa.ipc.get_record_batch_size(batch))


def cut(batch: pa.RecordBatch, hashes: U32 | None) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a large layer in blocks, in buffers of their own. `hashes`: in order, of a keyed layer; those of one
    hash stay together.
    """
    most = rows_of_block(batch.num_rows, _written_bytes(batch))
    start = 0
    while start < batch.num_rows:
        end = min(start + most, batch.num_rows)
        if hashes is not None and end < batch.num_rows:
            first = int(np.searchsorted(hashes, hashes[end]))
            end = first if first > start else int(np.searchsorted(hashes, hashes[end], side="right"))
        yield take_batch(batch, np.arange(start, end))
        start = end
