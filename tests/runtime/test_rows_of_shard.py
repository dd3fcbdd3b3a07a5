"""Which shard takes a row of a log that begins anew: exactly one, wherever the row was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import nosync
from nosync.flow.binder import bind
from nosync.lsm.columnar.columns import as_array
from nosync.lsm.columnar.hashing import hash32
from nosync.lsm.model.layer import Shard, TraceId
from nosync.operators.bootstrap import rows_of_shard
from tests.helpers.runner import parse_ddl

KEY_GROUPS = 128


@pytest.mark.parametrize("now", [1, 2, 3])
@pytest.mark.parametrize("alike", [False, True])
def test_a_row_of_a_source_is_in_one_shard(now: int, alike: bool) -> None:
    flow = nosync.Dataflow("f")
    flow.source("rows", "k bigint, v bigint").aggregate("sums", key=["k"], n=nosync.count())
    source = replace(bind(flow, parse_ddl).stages["rows"], placed_alike=alike)
    assert source.placed_by == ("k",)
    table = pa.table({"k": pa.array(range(500), pa.int64()), "v": pa.array(range(500), pa.int64())})
    groups = hash32([as_array(table["k"])]).astype(np.uint64) * np.uint64(KEY_GROUPS) >> np.uint64(32)
    # Two shards recorded them: by k, or by something else.
    shard_of = (
        groups * np.uint64(2) // np.uint64(KEY_GROUPS) if alike else np.arange(500, dtype=np.uint64) % np.uint64(2)
    )
    found = []
    for i in range(now):
        mine = Shard(i, now)
        for j in range(2):
            take = rows_of_shard(source, TraceId("rows", "other", Shard(j, 2)), mine, KEY_GROUPS)
            taken = table.slice(0, 0) if take is None else take(table.filter(pa.array(shard_of == j)))
            wanted = mine.groups(KEY_GROUPS)
            at = groups[taken["k"].to_numpy()]
            assert ((at >= wanted.start) & (at < wanted.stop)).all(), "the rows of a key are where its state is"
            found += taken["k"].to_pylist()
            if alike and now == 2 and i != j:
                assert take is None, "nothing is read in vain"
    assert sorted(found) == list(range(500))
