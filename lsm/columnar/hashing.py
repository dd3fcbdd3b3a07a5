"""The key hash: Spark's `xxhash64(columns...)` over whole Arrow columns.

Spark computes the hash in the JVM when it shuffles; the store computes the same one here for callers
without Spark, so both place a key in the same shard and find it at the same place in a layer. Only the
upper 32 bits, `hash32`, are stored: they order rows inside a layer and give the key group,
`hash32 * key_groups >> 32`. That map is monotone, so an order by `hash32` is an order by
(key group, hash). Equal hashes are told apart by comparing keys, never by trusting the hash.

Algorithm: XXH64 (Yann Collet), as `org.apache.spark.sql.catalyst.expressions.XXH64` applies it: the seed is 42, each
column is hashed with the previous column's result as its seed, nulls are passed over, 8- to 32-bit integers and dates
are hashed as 4 bytes, 64-bit ones, timestamps and intervals as 8; a struct is hashed field by field, an array element
by element. NaN has one hash, and so have the two zeros.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from nosync.lsm.columnar.types import has_part
from nosync.lsm.errors import InvalidInputError, SchemaError

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Hasher = Callable[[Sequence[pa.Array]], U32]
"""From key columns of equal length to `hash32` per row. The store's is `hash32`; tests force collisions."""

SEED = 42
HASH_BITS = 32

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_P5_AND_4, _P5_AND_8 = _P5 + np.uint64(4), _P5 + np.uint64(8)
_LOW_32 = np.uint64(0xFFFFFFFF)
_LARGEST_LONG_DECIMAL = 18
_PIECE_ROWS = 8192


def check_key_type(name: str, type_: pa.DataType) -> None:
    """Raises SchemaError for a type that cannot be a key."""
    if has_part(type_, pa.types.is_map):
        raise SchemaError(
            f"key column {name!r} has type {type_}: maps cannot be compared. Make it "
            f"array<struct<key, value>> before, as array_sort(map_entries({name})) does"
        )
    if not _can_be_key(type_):
        raise SchemaError(
            f"key column {name!r} has type {type_}, which cannot be a key: use integers, strings, binary, dates, timestamps, "
            "intervals, decimals, booleans, floats, or structs and arrays of these"
        )


def _can_be_key(type_: pa.DataType) -> bool:
    t = pa.types
    if is_list(type_) or t.is_struct(type_):
        return all(_can_be_key(type_.field(i).type) for i in range(type_.num_fields))
    return bool(
        t.is_integer(type_)
        or t.is_string(type_)
        or t.is_large_string(type_)
        or t.is_binary(type_)
        or t.is_large_binary(type_)
        or t.is_boolean(type_)
        or t.is_date(type_)
        or t.is_timestamp(type_)
        or t.is_duration(type_)
        or t.is_decimal128(type_)
        or t.is_float32(type_)
        or t.is_float64(type_)
        or t.is_null(type_)
    )


def is_list(type_: pa.DataType) -> bool:
    """Returns whether it is a list, of any kind but a map."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def hash32(columns: Sequence[pa.Array]) -> U32:
    """Returns the upper half of `hash64`, the form that layers store."""
    return (hash64(columns) >> np.uint64(HASH_BITS)).astype(np.uint32)


def is_quick(types: Iterable[pa.DataType]) -> bool:
    """Returns whether to hash columns of these types takes less time than to have their hash sent along: all are of
    fixed width.
    """
    t = pa.types
    return all(
        (t.is_integer(type_) and not t.is_uint64(type_))
        or t.is_boolean(type_)
        or t.is_date32(type_)
        or t.is_timestamp(type_)
        or t.is_float32(type_)
        or t.is_float64(type_)
        for type_ in types
    )


def hash64(columns: Sequence[pa.Array]) -> U64:
    """Returns Spark's `xxhash64` of every row of `columns` (equal lengths), as unsigned 64-bit integers."""
    if not columns:
        raise InvalidInputError("a key needs at least one column")
    n = len(columns[0])
    out: U64 = np.empty(n, dtype=np.uint64)
    # In pieces whose temporaries stay in the processor's cache: 4 times faster than whole columns.
    for start in range(0, n, _PIECE_ROWS):
        state: U64 = np.full(min(_PIECE_ROWS, n - start), SEED, dtype=np.uint64)
        for column in columns:
            state = _hashed(column.slice(start, _PIECE_ROWS), state)
        out[start : start + len(state)] = state
    return out


def key_groups_of(hashes: U32, key_groups: int) -> npt.NDArray[np.int64]:
    groups: npt.NDArray[np.int64] = ((hashes.astype(np.uint64) * np.uint64(key_groups)) >> np.uint64(HASH_BITS)).astype(
        np.int64
    )
    return groups


def first_hash_of_group(group: int, key_groups: int) -> int:
    """Returns the smallest `hash32` in `group`; `2**32` for the group after the last one."""
    return -(-(group << HASH_BITS) // key_groups)


def _validity(column: pa.Array) -> npt.NDArray[np.bool_]:
    valid: npt.NDArray[np.bool_] = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return valid


def _hashed(column: pa.Array, seed: U64) -> U64:
    """Returns the column's hash on top of those before it; nulls leave these as they are."""
    hashed = _hash_column(column, seed)
    return np.where(_validity(column), hashed, seed) if column.null_count else hashed


def _hash_column(column: pa.Array, seed: U64) -> U64:
    type_ = column.type
    t = pa.types
    with np.errstate(over="ignore"):
        if t.is_null(type_):
            return seed
        if t.is_struct(type_):
            return functools.reduce(lambda state, i: _hashed(column.field(i), state), range(type_.num_fields), seed)
        if is_list(type_):
            return _hash_lists(column, seed)
        if t.is_string(type_) or t.is_large_string(type_) or t.is_binary(type_) or t.is_large_binary(type_):
            return _hash_bytes_column(column, seed)
        if t.is_decimal128(type_):
            if type_.precision <= _LARGEST_LONG_DECIMAL:
                return _hash_long(_decimal_low_words(column), seed)
            return _hash_bytes_column(_decimal_bytes(column), seed)
        words, is_int = _fixed_width_words(column)
        return _hash_int(words, seed) if is_int else _hash_long(words, seed)


def _hash_lists(column: pa.Array, seed: U64) -> U64:
    """Hashes element after element, all rows in step."""
    starts, lengths, elements = list_parts(column)
    state = seed.copy()
    rows = np.flatnonzero(lengths)
    for at in itertools.count():
        rows = rows[lengths[rows] > at]
        if not len(rows):
            return state
        state[rows] = _hashed(elements.take(pa.array(starts[rows] + at)), state[rows])
    raise AssertionError("lists end")


def list_parts(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], pa.Array]:
    """Returns where the elements of each list begin, how many there are (of null none), and all elements."""
    n, valid = len(column), _validity(column)
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        return (column.offset + np.arange(n)) * size, np.where(valid, size, 0), column.values
    offsets = column.offsets.to_numpy().astype(np.int64)
    return offsets[:-1], np.where(valid, np.diff(offsets), 0), column.values


def _fixed_width_words(column: pa.Array) -> tuple[U64, bool]:
    """Returns the value of each row as raw bits, and whether Spark hashes this type as 4 bytes."""
    type_ = column.type
    t = pa.types
    if t.is_floating(type_):
        bits: type[np.generic] = np.uint32 if t.is_float32(type_) else np.uint64
        values = column.fill_null(0).to_numpy(zero_copy_only=False) + 0.0  # -0.0 becomes 0.0, as in Spark's GROUP BY
        is_nan = np.isnan(values)
        if is_nan.any():
            values[is_nan] = np.nan  # which has many forms; the JVM makes them one
        return values.astype(column.type.to_pandas_dtype()).view(bits).astype(np.uint64), t.is_float32(type_)
    if t.is_boolean(type_):
        return column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64), True
    if t.is_date(type_):
        column = column.cast(pa.date32(), safe=False).view(pa.int32())
    elif t.is_timestamp(type_):
        column = column.cast(pa.timestamp("us", type_.tz), safe=False).view(pa.int64())
    elif t.is_duration(type_):
        column = column.cast(pa.duration("us"), safe=False).view(pa.int64())
    is_int = t.is_integer(column.type) and (column.type.bit_width < 32 or t.is_int32(column.type))
    values = (column.fill_null(0) if column.null_count else column).to_numpy(zero_copy_only=False)
    if not t.is_uint64(column.type):
        values = values.astype(np.int64, copy=False)
    return values.view(np.uint64), is_int


def _decimal_low_words(column: pa.Array) -> U64:
    words = np.frombuffer(column.buffers()[1], dtype=np.uint64)
    return words[2 * column.offset : 2 * (column.offset + len(column)) : 2]


def _decimal_bytes(column: pa.Array) -> pa.Array:
    """Returns wide decimals as Java's `BigInteger.toByteArray` writes them: big-endian, no superfluous sign bytes."""
    raw: npt.NDArray[np.uint8] = np.frombuffer(column.buffers()[1], dtype=np.uint8).reshape(-1, 16)
    big_endian = raw[column.offset : column.offset + len(column), ::-1]
    sign = np.where(big_endian[:, :1] >= 0x80, np.uint8(0xFF), np.uint8(0))
    # A leading byte is superfluous while it and the top bit of the next one only repeat the sign.
    repeats = (big_endian[:, :-1] == sign) & ((big_endian[:, 1:] >= 0x80) == (sign == 0xFF))
    skip = np.cumprod(repeats, axis=1).sum(axis=1)
    keep = np.arange(16) >= skip[:, None]
    offsets = np.concatenate([[0], np.cumsum(16 - skip)]).astype(np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(column), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(big_endian[keep]))]
    )


def _rotl(x: U64, bits: int) -> U64:
    """Rotates in place, as all that is temporary: it takes two thirds of the time."""
    high = x >> np.uint64(64 - bits)
    x <<= np.uint64(bits)
    x |= high
    return x


def _avalanche(h: U64) -> U64:
    """Mixes the bits in place."""
    h ^= h >> np.uint64(33)
    h *= _P2
    h ^= h >> np.uint64(29)
    h *= _P3
    h ^= h >> np.uint64(32)
    return h


def _mix_8(h: U64, word: U64) -> U64:
    mixed = _rotl(word * _P2, 31)
    mixed *= _P1
    mixed ^= h
    mixed = _rotl(mixed, 27)
    mixed *= _P1
    mixed += _P4
    return mixed


def _mix_4(h: U64, word: U64) -> U64:
    return _rotl(h ^ ((word & _LOW_32) * _P1), 23) * _P2 + _P3


def _mix_1(h: U64, byte: U64) -> U64:
    return _rotl(h ^ (byte * _P5), 11) * _P1


def _hash_int(words: U64, seed: U64) -> U64:
    return _avalanche(_mix_4(seed + _P5_AND_4, words))


def _hash_long(words: U64, seed: U64) -> U64:
    return _avalanche(_mix_8(seed + _P5_AND_8, words))


def _hash_bytes_column(column: pa.Array, seed: U64) -> U64:
    """Hashes variable-length values, all rows in step: word by word while any row has one left."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offsets_buffer, data = column.buffers()
    n = len(column)
    if n == 0:
        return seed
    stored = np.frombuffer(offsets_buffer, dtype="<i8" if wide else "<i4")
    offsets: npt.NDArray[np.int64] = stored[column.offset : column.offset + n + 1].astype(np.int64)
    lengths = offsets[1:] - offsets[:-1]
    # Eight spare bytes, so that an unaligned 8-byte load at any position stays inside the buffer.
    raw = np.zeros(int(offsets[-1] - offsets[0]) + 8, dtype=np.uint8)
    if data is not None:
        raw[:-8] = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
    words: U64 = np.ndarray(shape=(len(raw) - 7,), dtype="<u8", buffer=raw.data, strides=(1,))
    at = offsets[:-1] - offsets[0]
    end = at + lengths

    h = seed + _P5
    long_rows = np.flatnonzero(lengths >= 32)
    if len(long_rows):
        h[long_rows], at[long_rows] = _hash_stripes(words, at[long_rows], end[long_rows], seed[long_rows])
    h = h + lengths.astype(np.uint64)

    rows = np.flatnonzero(end - at >= 8)
    while len(rows):
        h[rows] = _mix_8(h[rows], words[at[rows]])
        at[rows] += 8
        rows = rows[end[rows] - at[rows] >= 8]
    rows = np.flatnonzero(end - at >= 4)
    h[rows] = _mix_4(h[rows], words[at[rows]])
    at[rows] += 4
    rows = np.flatnonzero(end > at)
    while len(rows):
        h[rows] = _mix_1(h[rows], raw[at[rows]].astype(np.uint64))
        at[rows] += 1
        rows = rows[end[rows] > at[rows]]
    return _avalanche(h)


def _hash_stripes(
    words: U64, at: npt.NDArray[np.int64], end: npt.NDArray[np.int64], seed: U64
) -> tuple[U64, npt.NDArray[np.int64]]:
    """Hashes the 32-byte stripes of long values. Returns the state before the length is added, and where the rest
    begins.
    """
    lanes = [seed + _P1 + _P2, seed + _P2, seed.copy(), seed - _P1]
    rows = np.arange(len(at))
    while len(rows):
        for i, lane in enumerate(lanes):
            lane[rows] = _rotl(lane[rows] + words[at[rows] + 8 * i] * _P2, 31) * _P1
        at[rows] += 32
        rows = rows[end[rows] - at[rows] >= 32]
    h = _rotl(lanes[0].copy(), 1)
    for lane, bits in zip(lanes[1:], (7, 12, 18), strict=True):
        h += _rotl(lane.copy(), bits)
    for lane in lanes:
        h = (h ^ (_rotl(lane * _P2, 31) * _P1)) * _P1 + _P4
    return h, at
