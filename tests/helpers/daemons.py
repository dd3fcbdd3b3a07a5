"""Rows that are published beside daemons, and what must be read of them."""

from __future__ import annotations

import pyarrow as pa

import nosync
from nosync.lsm.manifests.catalog import Catalog
from nosync.lsm.model.layer import Description, LayerId, Shard, TraceId
from nosync.testing.daemon_cluster import Daemons


def rows(t: int, n: int = 50) -> pa.Table:
    return pa.table({"k": list(range(n)), "v": [1000 * t + i for i in range(n)]})


def publish(store: nosync.Store, t: int, values_of: int | None = None) -> None:
    """An epoch of two shards. `values_of`: with the values of another epoch."""
    values = rows(t if values_of is None else values_of)
    for shard in (0, 1):
        store.append("counts", shard=shard, t=t, rows=values.slice(25 * shard, 25), key=["k"])
    store.seal(t)


def state(store: nosync.Store, t: int) -> list[tuple[int, int]]:
    return sorted((row["k"], row["v"]) for row in store.read("counts", t).to_pylist())


def expected(t: int) -> list[tuple[int, int]]:
    return [(i, 1000 * t + i) for i in range(50)]


def _publish_with_input(store: nosync.Store, t: int, policy: str) -> None:
    store.append("rows", t=t, rows=rows(t), key=[])
    for shard in (0, 1):
        store.append("counts", shard=shard, t=t, rows=rows(t).slice(25 * shard, 25), key=["k"])
    ids = [LayerId(TraceId("counts", "raw", Shard(i)), Description.of_epoch(t)) for i in (0, 1)]
    ids.append(LayerId(TraceId("rows", "raw", Shard(0)), Description.of_epoch(t)))
    store.node.seal(t, ids, meta={"at_safe_point": {"rows": policy}})


def _inputs(daemons: Daemons, node: str) -> int:
    """How many layers of the source a node's catalog has; the files go a while later."""
    catalog = Catalog(daemons.data(node) / "catalog", read_only=True)
    try:
        return sum(record.id.trace.stage == "rows" for record in catalog.records())
    finally:
        catalog.close()
