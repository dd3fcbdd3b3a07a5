"""Merging layers: what is kept, in bounded steps, over whole columns.

Invariants, for a merge of the contiguous layers [a, b) of a trace at frontier `since`
- For every t >= since, the state as of t read through the merged layer equals the one read through its inputs.
- Of each key's entries at or before `since` only the newest is kept; its time becomes at most `since`. A tombstone at
  or before `since` goes altogether when nothing older lies below the merged layers (`bottom`).
- The result depends on the inputs, `since` and the block size only: nodes with the same settings write the same bytes.
- Logs (layers without a key) have nothing to supersede: they are concatenated, and keep every time.

A merge is an iterator of blocks (`merged_blocks`); each step works on one range of hashes with at most about
`block_rows` input rows, so the caller can stop, sleep or do other work between any two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from nosync.lsm.columnar.columns import (
    EXPIRED_COLUMN,
    HASH_COLUMN,
    TIME_COLUMN,
    TOMBSTONE_COLUMN,
)
from nosync.lsm.columnar.hashing import key_groups_of
from nosync.lsm.errors import CorruptionError
from nosync.lsm.layers.format import LayerFileWriter
from nosync.lsm.layers.merging import BLOCK_ROWS, Rows, added_columns, log_blocks, merged_blocks, unified_schema
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.layers.writer import Published, link_layer
from nosync.lsm.model.layer import Description, Digest, LayerId
from nosync.lsm.model.timestamp import ZERO, Time, epoch_of, pack
from nosync.lsm.platform.env import Env, storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.publish import temporary_path

_SYNC_EACH_BYTES = 8 << 20


# --- choosing what to merge -------------------------------------------------------------------------------------------


# --- the work --------------------------------------------------------------------------------------------------------


class Merge:
    """One merge in progress: `layers` of one trace, oldest first and contiguous, become one layer.

    `for _ in merge.steps(): ...` does the work, a bounded step at a time; then `merge.published` is the result.
    Abandoning it in the middle leaves nothing but a temporary file, which the next start removes.
    """

    def __init__(
        self,
        root: Path,
        layers: Sequence[LayerReader],
        *,
        since: Time,
        bottom: bool,
        env: Env,
        block_rows: int = BLOCK_ROWS,
        temporary: Path | None = None,
    ) -> None:
        """`temporary`: where it is written, in the store's `tmp/` (default: a name that nobody else takes)."""
        first, last = layers[0].info, layers[-1].info
        self.temporary = temporary or temporary_path(root, env)
        self.root, self.layers, self._env = root, tuple(layers), env
        self.bottom, self.block_rows = bottom, block_rows
        self.requested_since = since
        self.key = first.key
        lower, upper = first.id.description.lower, last.id.description.upper
        carried = max(layer.id.description.since for layer in layers)
        # A frontier beyond the newest epoch says nothing more about these layers.
        frontier = max(carried, min(since, pack(epoch_of(Time(upper - 1))))) if self.key else ZERO
        self._since = frontier
        self.id = LayerId(first.id.trace, Description(lower, upper, frontier))
        times = {t for layer in layers for t in layer.info.times}
        self._times = sorted({max(t, frontier) for t in times})
        self._published: Published | None = None

    @property
    def published(self) -> Published:
        assert self._published is not None, "run steps() to its end first"
        return self._published

    def steps(self) -> Iterator[int]:
        """Yields the number of rows written after each step. Raises CorruptionError or StorageError."""
        schema = unified_schema(self.layers)
        stored = self._stored_schema(schema)
        key_groups = self.layers[0].info.key_groups
        counts = np.zeros(key_groups if self.key else 0, dtype=np.int64)
        temporary = self.temporary
        done = False
        try:
            with storage_errors("write", temporary), new_file(self.root, temporary, self._env) as file:
                writer = LayerFileWriter(file, stored)
                synced = 0
                for rows in self._blocks(schema):
                    writer.write_block(self._stored(rows, stored))
                    if writer.body_bytes - synced >= _SYNC_EACH_BYTES:
                        # One fsync of all at the end would hold up everyone who creates files meanwhile.
                        file.flush()
                        self._env.sync_file(temporary)
                        synced = writer.body_bytes
                    if self.key:
                        counts += np.bincount(key_groups_of(rows.hashes, key_groups), minlength=key_groups)
                    yield writer.rows
                offsets = np.concatenate([[0], np.cumsum(counts)]) if self.key else counts
                info, digest = writer.finish(
                    self.id,
                    key=self.key,
                    key_groups=key_groups,
                    times=self._times,
                    group_offsets=offsets.astype(np.uint64),
                    added=added_columns(self.layers, self._since),
                )
            # Inputs are deleted once this is published, so it must be durable first; nobody waits for a merge.
            with storage_errors("sync", temporary):
                self._env.sync_file(temporary)
            self._verify(digest)
            self._published = link_layer(self.root, self.id, temporary, info, digest, self._env)
            done = True
        finally:
            if not done:
                with storage_errors("remove", temporary):
                    self._env.unlink(temporary)

    def _verify(self, digest: Digest) -> None:
        """What is to stand for its inputs, which go, is read back first. Raises CorruptionError."""
        written = LayerReader.open(self.temporary, self._env, self.id)
        written.verify()
        if written.digest != digest:
            raise CorruptionError(f"{self.temporary}: was written with digest {digest[:16]}, is {written.digest[:16]}")

    def _blocks(self, schema: pa.Schema) -> Iterator[Rows]:
        if not self.key:
            return log_blocks(self.layers, schema, self.block_rows)
        return merged_blocks(self.layers, since=self._since, bottom=self.bottom, block_rows=self.block_rows)

    def _stored_schema(self, schema: pa.Schema) -> pa.Schema:
        fields = list(schema)
        if self.key:
            fields.insert(0, pa.field(HASH_COLUMN, pa.uint32()))
        if len(self._times) > 1:
            fields.append(pa.field(TIME_COLUMN, _index_type(len(self._times))))
        if any(layer.info.tombstones for layer in self.layers):
            fields.append(pa.field(TOMBSTONE_COLUMN, pa.bool_()))
            # A layer of which a merge left no tombstones has the column still: it says nothing then.
            if any(layer.has_expiries for layer in self.layers):
                fields.append(pa.field(EXPIRED_COLUMN, pa.bool_()))
        return pa.schema(fields)

    def _stored(self, rows: Rows, stored: pa.Schema) -> pa.RecordBatch:
        columns = list(rows.data.columns)
        if self.key:
            columns.insert(0, pa.array(rows.hashes))
        if len(self._times) > 1:
            index = np.searchsorted(np.array(self._times), np.maximum(rows.times, self._since))
            columns.append(pa.array(index).cast(stored.field(TIME_COLUMN).type))
        if stored.get_field_index(TOMBSTONE_COLUMN) >= 0:
            columns.append(pa.array(rows.tombstones))
        if stored.get_field_index(EXPIRED_COLUMN) >= 0:
            assert rows.expired is not None, "rows of keyed layers say which of them expired"
            columns.append(pa.array(rows.expired))
        return pa.RecordBatch.from_arrays(columns, schema=stored)


def _index_type(times: int) -> pa.DataType:
    if times <= 1 << 8:
        return pa.uint8()
    return pa.uint16() if times <= 1 << 16 else pa.uint32()
