"""The key hash, against values computed by hand and against Spark's own (in tests/spark)."""

import numpy as np
import pyarrow as pa
import pytest

from nosync.lsm.columnar.hashing import check_key_type, hash32, hash64, key_groups_of
from nosync.lsm.errors import SchemaError

# Computed by Spark 4.3 with `SELECT xxhash64(...)`.
FROM_SPARK = [
    (pa.array([1], pa.int64()), -7001672635703045582),
    (pa.array([1], pa.int32()), -6698625589789238999),
    (pa.array(["Spark"]), -4294468057691064905),
    (pa.array([None], pa.int64()), 42),
]


@pytest.mark.parametrize(("column", "expected"), FROM_SPARK)
def test_known_values(column: pa.Array, expected: int) -> None:
    assert hash64([column]).view(np.int64)[0] == expected


def test_slices_and_pieces_hash_as_their_rows() -> None:
    words = pa.array([f"word {i}" * (i % 9) if i % 11 else None for i in range(20_000)])
    numbers = pa.array(range(20_000))
    whole = hash32([words, numbers])
    assert np.array_equal(whole[137:19_001], hash32([words.slice(137, 18_864), numbers.slice(137, 18_864)]))


def test_every_nan_is_one_and_both_zeros_are() -> None:
    nans = np.array([0x7FF8000000000000, 0xFFF8000000000001], dtype=np.uint64).view(np.float64)
    for inside in (lambda x: x, lambda x: pa.StructArray.from_arrays([x], ["x"]), lambda x: pa.array([[v] for v in x])):
        for values in (pa.array(nans), pa.array([0.0, -0.0])):
            assert len(set(hash32([inside(values)]))) == 1


@pytest.mark.parametrize(
    "type_", [pa.list_(pa.time64("us")), pa.struct([("a", pa.month_day_nano_interval())]), pa.time64("us")]
)
def test_types_that_cannot_be_keys(type_: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="cannot be a key"):
        check_key_type("k", type_)


def test_key_groups_follow_the_order_of_hashes() -> None:
    hashes = np.sort(hash32([pa.array(range(5_000))]))
    groups = key_groups_of(hashes, 128)
    assert (np.diff(groups) >= 0).all()
    assert set(groups) == set(range(128))
