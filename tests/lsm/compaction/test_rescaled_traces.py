"""Merging traces of several layouts: what a shard deletes may lie in the layers of another number of shards."""

from __future__ import annotations

import pyarrow as pa

from nosync.lsm.columnar.hashing import hash32, key_groups_of
from nosync.lsm.layers.writer import arrange
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.lsm.settings import StoreSettings
from tests.conftest import OpenStore


def test_deletions_outlive_merges_above_another_layout(open_store: OpenStore) -> None:
    store = open_store(settings=StoreSettings(background=False, grace_s=0.0, retain=0))
    keys = pa.array(range(20), pa.int64())
    whole = LayerId(TraceId("kv", "f", Shard(0, 1)), Description.of_epoch(0))
    store.directory.publish(whole, arrange(pa.table({"k": keys, "v": keys}), ["k"], whose="test"))
    store.node.seal(0, [whole])
    groups = key_groups_of(hash32([keys]), 128)
    for t in range(1, 4):
        ids = []
        for i in range(2):
            mine = Shard(i, 2).groups(128)
            gone = keys.filter(pa.array([t == 1 and int(group) in mine for group in groups]))
            rows = arrange(
                pa.table({"k": keys.slice(0, 0), "v": keys.slice(0, 0)}),
                ["k"],
                whose="test",
                deletes=pa.table({"k": gone}),
            )
            ids.append(LayerId(TraceId("kv", "f", Shard(i, 2)), Description.of_epoch(t)))
            store.directory.publish(ids[-1], rows)
        store.node.seal(t, ids)
    assert store.read("kv").num_rows == 0
    assert store.compact() > 0
    assert store.read("kv").num_rows == 0, "the deletions are still needed: the rows lie in the layers of one shard"
