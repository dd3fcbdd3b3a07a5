"""Builds layer files and publishes them.

Invariants
- Whole or absent: a file gets its final name by `link(2)` only after all of it was written, so a name that can be
  seen is a whole layer (until the machine loses power before the node has synced it; the node verifies).
- Nothing is ever overwritten: a second layer of the same name is either the same layer, which is success, or a
  DeterminismError, and the first one stays.
- The critical path is build, write, link: no fsync, no lock, no RPC (design: the task's commit).

Steps of `publish_rows`
1. Check and normalise the rows; add a tombstone for each deleted key.
2. Sort by (key group, hash, key): with hash32 as the first sort key that is one argsort.
3. Write head, one Arrow batch (or some, of a large layer), key-group offsets, description, trailer to a temporary file.
4. Link it to its final name and drop the temporary name.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nosync.lsm.columnar.columns import (
    CHANGE_TYPE_COLUMN,
    EXPIRED_COLUMN,
    HASH_COLUMN,
    TOMBSTONE_COLUMN,
    Bools,
    Indices,
    as_batch,
    key_columns,
    packed,
    plain,
    take_batch,
)
from nosync.lsm.columnar.hashing import U32, Hasher, first_hash_of_group, hash32, key_groups_of
from nosync.lsm.columnar.ordering import order_by_key
from nosync.lsm.errors import CorruptionError, DeterminismError, InvalidInputError, SchemaError, StorageError
from nosync.lsm.layers.blocks import cut, is_large
from nosync.lsm.layers.format import LayerFileWriter, LayerInfo
from nosync.lsm.layers.reader import LayerReader
from nosync.lsm.model.layer import Digest, LayerId, Shard
from nosync.lsm.model.timestamp import show
from nosync.lsm.platform.env import Env, Identity, storage_errors
from nosync.lsm.platform.file_pool import new_file
from nosync.lsm.platform.publish import discard, give_name, temporary_path

_ATTEMPTS = 3
_LOG_COLUMNS = frozenset({CHANGE_TYPE_COLUMN})
"""A log of changes, as a stateless stage over a changing input writes it, says of each row what it does."""


@dataclass(frozen=True)
class Published:
    """A layer that stands under its final name. `existed`: it was there before, with the same contents."""

    id: LayerId
    digest: Digest
    rows: int
    size_bytes: int
    existed: bool
    identity: Identity | None = field(default=None, compare=False, repr=False)
    """Of its file, where this call wrote it."""


@dataclass(frozen=True)
class LayerRows:
    """The rows of a layer in stored order: `batch` begins with the hash column and may end with the tombstone column,
    after which may come the one that says which of them are expiries.

    A layer without a key (a log: sources and stateless stages) keeps the order it was given.
    """

    batch: pa.RecordBatch
    key: tuple[str, ...]
    order: Indices
    """Which of the rows that were given, and of the deletes behind them, each one is."""

    @property
    def hashes(self) -> U32:
        hashes: U32 = self.batch.column(0).to_numpy()
        return hashes


def arrange(
    rows: pa.Table | None,
    key: Sequence[str],
    *,
    whose: str,
    deletes: pa.Table | None = None,
    hasher: Hasher = hash32,
    hashes: U32 | None = None,
    expired: Bools | None = None,
) -> LayerRows:
    """Steps 1 and 2: the rows of one layer, checked, with tombstones for `deletes`, in stored order.

    `rows` has the key's columns and any value columns, in any order; `deletes` the key's columns. `hashes` are
    the hash32 of the rows and then of the deletes, where the caller has them already (Spark computed them). `expired`
    says which of the deletes are of rows that expired.
    Raises SchemaError for missing or unusable columns and InvalidInputError for a key that occurs twice.
    """
    if rows is None:
        if deletes is None:
            raise InvalidInputError(
                f"{whose}: give rows, deletes or both (an empty table records that nothing changed)"
            )
        rows = deletes.slice(0, 0)
    if not key:
        if deletes is not None:
            raise InvalidInputError(f"{whose}: a layer without a key cannot delete")
        return LayerRows(packed(as_batch(plain(rows, allow=_LOG_COLUMNS))), (), np.arange(rows.num_rows))
    rows = plain(rows)
    names = [*key, *(name for name in rows.column_names if name not in key)]
    key_columns(rows, key, whose)
    rows = rows.select(names)
    live_rows = rows.num_rows
    if deletes is not None and deletes.num_rows:
        rows = _with_deletes(rows, deletes, key, whose)
    keys = key_columns(rows, key, whose)
    if hashes is None:
        hashes = hasher(keys)
    order, same_key = order_by_key(hashes, keys)
    if same_key.any():
        at = order[np.flatnonzero(same_key)[:1]]
        example = {name: column.take(pa.array(at))[0].as_py() for name, column in zip(key, keys, strict=True)}
        raise InvalidInputError(
            f"{whose}: key {example} occurs twice; a layer holds one entry per key: aggregate or deduplicate first"
        )
    arrays, fields = [pa.array(hashes), *rows.columns], [pa.field(HASH_COLUMN, pa.uint32()), *rows.schema]
    if live_rows < rows.num_rows:
        arrays.append(pa.array(np.arange(rows.num_rows) >= live_rows))
        fields.append(pa.field(TOMBSTONE_COLUMN, pa.bool_()))
        if expired is not None and expired.any():
            arrays.append(pa.array(np.concatenate([np.zeros(live_rows, dtype=np.bool_), expired])))
            fields.append(pa.field(EXPIRED_COLUMN, pa.bool_()))
    batch = as_batch(pa.Table.from_arrays(arrays, schema=pa.schema(fields)))
    return LayerRows(take_batch(batch, order), tuple(key), order)


def without_empty(rows: LayerRows, rare: Collection[str]) -> LayerRows:
    """Returns the layer without those of the columns `rare` that are null in all of its rows."""
    names = rows.batch.schema.names
    kept = [
        name for i, name in enumerate(names) if name not in rare or rows.batch.column(i).null_count < len(rows.batch)
    ]
    return rows if len(kept) == len(names) else replace(rows, batch=rows.batch.select(kept))


def _with_deletes(rows: pa.Table, deletes: pa.Table, key: Sequence[str], whose: str) -> pa.Table:
    deletes = plain(deletes)
    key_columns(deletes, key, f"{whose}, deletes")
    for name in key:
        if deletes.schema.field(name).type != rows.schema.field(name).type:
            raise SchemaError(
                f"{whose}: key column {name!r} is {rows.schema.field(name).type} in the rows "
                f"and {deletes.schema.field(name).type} in the deletes"
            )
    columns = [deletes.column(f.name) if f.name in key else pa.nulls(deletes.num_rows, f.type) for f in rows.schema]
    return plain(pa.concat_tables([rows, pa.Table.from_arrays(columns, schema=rows.schema)]))


def group_offsets(hashes: U32, key_groups: int) -> npt.NDArray[np.uint64]:
    """Returns where each key group's rows begin in sorted `hashes`: `key_groups + 1` row numbers."""
    starts: npt.NDArray[np.uint64] = np.searchsorted(hashes, _group_bounds(key_groups)).astype(np.uint64)
    return np.append(starts, np.uint64(len(hashes)))


@functools.cache
def _group_bounds(key_groups: int) -> U32:
    return np.array([first_hash_of_group(g, key_groups) for g in range(key_groups)], dtype=np.uint32)


def check_shard(hashes: U32, shard: Shard, key_groups: int, whose: str) -> None:
    """Raises InvalidInputError where a row of sorted `hashes` does not belong to the shard."""
    groups = shard.groups(key_groups)
    if not shard.count or not len(hashes):
        return
    ends = key_groups_of(hashes[[0, -1]], key_groups)
    if ends[0] not in groups or ends[1] not in groups:
        raise InvalidInputError(
            f"{whose}: rows belong to key groups {ends[0]} to {ends[1]}, but shard {shard} holds "
            f"{groups.start} to {groups.stop - 1}: partition by key first"
        )


def link_layer(root: Path, id: LayerId, temporary: Path, info: LayerInfo, digest: Digest, env: Env) -> Published:
    """Gives the finished temporary file its final name under `root/layers` (step 4 of the module)."""
    final = root / "layers" / id.path
    try:
        with storage_errors("publish", final):
            identity = give_name(temporary, final, env)
        return Published(id, digest, info.rows, identity.size_bytes, existed=False, identity=identity)
    except StorageError as error:
        if not isinstance(error.__cause__, FileExistsError):
            raise
        recorded = _reconcile(final, id, temporary, digest, env)
        return Published(id, recorded.digest, recorded.info.rows, recorded.size_bytes, existed=True)
    finally:
        discard(temporary, env)


def _reconcile(final: Path, id: LayerId, temporary: Path, digest: Digest, env: Env) -> LayerReader:
    """Returns the layer that stands. Raises DeterminismError if it is not the one that was to be published."""
    try:
        recorded = LayerReader.open(final, env, id)
        if recorded.digest == digest or _same_rows(recorded, LayerReader.open(temporary, env)):
            return recorded
    except CorruptionError as error:
        raise CorruptionError(f"{error}. What stands is never overwritten: recover() moves it aside first") from error
    raise _other_contents(id, recorded.digest, f"recorded are {recorded.info.rows} rows,", digest)


def _other_contents(
    id: LayerId, recorded: Digest, how: str, digest: Digest, rows: int | None = None
) -> DeterminismError:
    trace = id.trace
    return DeterminismError(
        f"stage {trace.stage} shard {trace.shard} timestamp {show(id.description.lower)}: computed twice with different "
        f"results ({how} digest {recorded[:16]}; now {'' if rows is None else f'{rows} rows, '}digest {digest[:16]}). "
        "What was recorded counts. Remove randomness and order dependence from the stage, or declare it "
        "deterministic=False. For other input than that of an attempt which failed, rewind() to the last sealed epoch first "
        "(-1: there is none); for changed logic, use a branch",
        stage=trace.stage,
        shard=str(trace.shard),
        t=show(id.description.lower),
        recorded_digest=recorded,
        rejected_digest=digest,
    )


def _same_rows(recorded: LayerReader, rejected: LayerReader) -> bool:
    """Returns whether two files of different bytes hold equal rows, as when another version of Arrow laid them out, or one
    of nosync did not cut them into blocks.
    """
    if recorded.info.rows != rejected.info.rows or not recorded.schema.equals(rejected.schema):
        return False
    tables = [
        pa.Table.from_batches(block.batch for block in one.blocks()) for one in (recorded, rejected) if one.info.rows
    ]
    return not tables or bool(tables[0].equals(tables[1])) or _same_bytes(*tables)


def _same_bytes(*tables: pa.Table) -> bool:
    """Returns whether tables have the same bytes in a file: NaN is no other value than NaN, then."""
    first, second = (packed(as_batch(table)).serialize() for table in tables)
    return bool(first.equals(second))


def publish_rows(
    root: Path, id: LayerId, rows: LayerRows, key_groups: int, env: Env, expected: Digest | None = None
) -> Published:
    """Steps 3 and 4: publishes one fresh layer under the data directory `root`.

    `expected`: what the manifest of its epoch lists; a layer that is another one is not published at all. Raises
    DeterminismError for that, and where the name is taken by other contents, SchemaError for values that are not of their
    type, StorageError where the disk refuses; what was there before is untouched.
    """
    check_values(rows.batch, str(id))
    if rows.key:
        check_shard(rows.hashes, id.trace.shard, key_groups, str(id))
    for _ in range(_ATTEMPTS - 1):
        try:
            return _write_and_link(root, id, rows, key_groups, env, expected)
        except StorageError as error:
            # A node that starts just now empties tmp/, also of files that are being written.
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return _write_and_link(root, id, rows, key_groups, env, expected)


def check_values(batch: pa.RecordBatch, whose: str) -> None:
    """Raises SchemaError, naming the column, for values that are not of their column's type.

    Arrow hands on text that is not UTF-8 and decimals of too many digits without a look. Whoever reads a layer looks, and
    would take it for damaged.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not _may_be_invalid(column.type):
            continue
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            hint = (
                ". Text is UTF-8: cast it to binary, or mend it, as with make_valid_utf8 in Spark"
                if "UTF8" in str(error)
                else ""
            )
            raise SchemaError(
                f"{whose}: column {name!r} has values that are no {column.type}: {error}{hint}"
            ) from error


def _may_be_invalid(type_: pa.DataType) -> bool:
    t = pa.types
    always_valid = t.is_integer(type_) or t.is_floating(type_) or t.is_boolean(type_) or t.is_timestamp(type_)
    return not (always_valid or t.is_date32(type_) or t.is_binary(type_) or t.is_null(type_))


def _write_and_link(
    root: Path, id: LayerId, rows: LayerRows, key_groups: int, env: Env, expected: Digest | None
) -> Published:
    for in_one_block in (False, True) if is_large(rows.batch) else (True,):
        temporary, info, digest = _write(root, id, rows, key_groups, env, in_one_block=in_one_block)
        if expected is None or digest == expected:
            return link_layer(root, id, temporary, info, digest, env)
        discard(temporary, env)  # versions that did not cut large layers wrote other bytes for the same rows
    assert expected is not None, "else the first one was linked"
    raise _other_contents(id, expected, "the sealed epoch lists", digest, rows.batch.num_rows)


def _write(
    root: Path, id: LayerId, rows: LayerRows, key_groups: int, env: Env, *, in_one_block: bool
) -> tuple[Path, LayerInfo, Digest]:
    batch, hashes = rows.batch, rows.hashes if rows.key else None
    offsets = np.empty(0, dtype=np.uint64) if hashes is None else group_offsets(hashes, key_groups)
    temporary = temporary_path(root, env)
    with storage_errors("write", temporary):
        try:
            with new_file(root, temporary, env) as file:
                writer = LayerFileWriter(file, batch.schema)
                for block in [batch] if in_one_block else cut(batch, hashes):
                    writer.write_block(block)
                info, digest = writer.finish(
                    id, key=rows.key, key_groups=key_groups, times=[id.description.lower], group_offsets=offsets
                )
        except OSError:
            discard(temporary, env)
            raise
    return temporary, info, digest
