"""Stores whose number of shards changes: what is read by key is what is read of all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import nosync
from nosync.lsm.columnar.columns import as_array
from nosync.lsm.columnar.hashing import hash32, key_groups_of
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from tests.helpers.depth import examples


def table(rows: dict[int, int | None]) -> pa.Table:
    return pa.table({"k": pa.array(list(rows), pa.int64()), "v": pa.array(list(rows.values()), pa.int64())})


def record(store: nosync.Store, t: int, shards: int, rows: dict[int, int | None]) -> None:
    """Seals an epoch of so many shards, each with its own keys. A key whose value is None goes."""
    groups, ids = store.directory.key_groups, []
    for number in range(shards):
        shard = Shard(number, shards)

        def of_it(part: pa.Table, shard: Shard = shard) -> pa.Table:
            group = key_groups_of(hash32([as_array(part["k"])]), groups)
            mine = shard.groups(groups)
            return part.filter(pa.array((group >= mine.start) & (group < mine.stop)))

        there = of_it(table({k: v for k, v in rows.items() if v is not None}))
        gone = of_it(table({k: v for k, v in rows.items() if v is None})).select(["k"])
        ids.append(LayerId(TraceId("counts", "raw", shard), Description.of_epoch(t)))
        store.directory.publish(ids[-1], arrange(there, ["k"], whose="counts", deletes=gone))
    store.node.note(ids)
    store.node.seal(t, ids)


EPOCHS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 3, 4, 7]),
        st.dictionaries(st.integers(0, 30), st.none() | st.integers(0, 9), max_size=12),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=examples(100))
@given(epochs=EPOCHS, is_merged=st.booleans())
def test_a_lookup_finds_what_a_read_has(epochs: list[tuple[int, dict[int, int | None]]], is_merged: bool) -> None:
    models = [dict[int, int]()]
    with tempfile.TemporaryDirectory() as root:
        options = nosync.StoreSettings(background=False)
        with nosync.open(Path(root) / "s", settings=options, retain=100) as store:
            for t, (shards, rows) in enumerate(epochs):
                record(store, t, shards, rows)
                if is_merged:
                    store.compact()
                models.append({k: v for k, v in {**models[-1], **rows}.items() if v is not None})
            for t, model in enumerate(models[1:]):
                asked = np.random.default_rng(t).permutation(32)
                found = store.lookup("counts", pa.table({"k": asked}), t)
                assert rows_of(found) == [(k, model[k]) for k in asked.tolist() if k in model]
                assert dict(rows_of(store.read("counts", t))) == model


def rows_of(found: pa.Table) -> list[tuple[int, int]]:
    return list(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True))
