"""One flow with every kind of stage, and the rows of its epochs: what the golden store was written by.

Nothing here may ever change, for the golden store has the fingerprints of this code. User functions vouch for theirs with
`version=`, because two versions of Python compile to different bytecode.
"""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import nosync

ROWS = "k bigint, g bigint, v bigint, x double, s string, at timestamp"
EDGES = "node bigint, next bigint"
EPOCHS = 8
KEYS = 6
_START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def double(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("v"), "v", pc.multiply(rows["v"], 2))


def triple(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("v"), "v", pc.multiply(rows["v"], 3))


def is_odd(rows: pa.Table) -> Any:
    return pc.equal(pc.bit_wise_and(rows["v"], 1), 1)


def keep_last(changes: pa.Table, state: pa.Table) -> pa.Table:
    """The last value of each key."""
    found = {row["k"]: row["last"] for row in state.to_pylist()}
    for row in changes.to_pylist():
        found[row["k"]] = row["v"]
    return pa.table({"k": pa.array(list(found), pa.int64()), "last": pa.array(list(found.values()), pa.int64())})


def count_key(key: Any, changes: list[Any], state: Any) -> dict[str, Any]:
    return {"seen": (state["seen"] if state else 0) + len(changes)}


def hop(rows: pa.Table) -> pa.Table:
    names = [name for name in rows.column_names if name not in ("node", "next")]
    return rows.select(["next", *names]).rename_columns(["node", *names])


def make_flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("golden")
    rows = flow.source("rows", ROWS)
    edges = flow.source("edges", EDGES, at_safe_point="keep")
    doubled = rows.map("doubled", double, version="1")
    odd = rows.filter("odd", is_odd, version="1")
    rows.flat_map("flat", double, version="2")
    both = doubled.union("both", odd)
    both.aggregate(
        "sums", key=["k"], n=nosync.count(), total=nosync.sum("v"), mean=nosync.mean("x"), least=nosync.min("v"),
        most=nosync.max("x"),
    )  # fmt: skip
    both.aggregate(
        "multisets", key=["g"], first=nosync.first("v", by="at"), last=nosync.last("s", by="v"), top=nosync.top_k("v", 2),
        all=nosync.collect("v", limit=9), kinds=nosync.count_distinct("s"), spread=nosync.stddev("x"), var=nosync.variance("x"),
    )  # fmt: skip
    rows.dedupe("once", key=["k", "g"])
    rows.update("last", key=["k"], state="last bigint", fn=keep_last, version="1")
    rows.update("fresh", key=["k"], state="last bigint", fn=keep_last, version="1", ttl=2)
    rows.update_per_key("seen", key=["k"], state="seen bigint", fn=count_key, version="1")
    rows.window("tumbling", time="at", size="1 hour", key=["g"], watermark="30 minutes", n=nosync.count())
    rows.window("sliding", time="at", size="2 hours", slide="1 hour", n=nosync.count(), total=nosync.sum("v"))
    rows.window(
        "sessions",
        time="at",
        gap="40 minutes",
        key=["k"],
        watermark="1 hour",
        keep="4 hours",
        n=nosync.count(),
    )
    left = rows.aggregate("by_g", key=["g"], n=nosync.count())
    right = both.aggregate("by_g_too", key=["g"], total=nosync.sum("v"))
    for how in ("inner", "left", "full"):
        left.join(f"joined_{how}", right, on=["g"], how=how)
    roots = rows.map("roots", lambda t: t.select(["k"]).rename_columns(["node"]), version="1")
    roots.iterate("reached", lambda r: r.join("hops", edges, on=["node"]).map("hopped", hop, version="1"))
    return flow


def inputs(t: int) -> dict[str, pa.Table]:
    """The rows of an epoch."""
    keys = [(t * 5 + i) % KEYS for i in range(9)]
    return {
        "rows": pa.table(
            {
                "k": pa.array(keys, pa.int64()),
                "g": pa.array([k % 3 for k in keys], pa.int64()),
                "v": pa.array([t * 10 + i for i in range(9)], pa.int64()),
                "x": pa.array([None if i == 4 else (t - i) / 4 for i in range(9)], pa.float64()),
                "s": pa.array([f"word {k}" for k in keys]),
                "at": pa.array(
                    [_START + datetime.timedelta(minutes=25 * t + 7 * i) for i in range(9)], pa.timestamp("us", "UTC")
                ),
            }
        ),
        "edges": pa.table({"node": pa.array([t % KEYS], pa.int64()), "next": pa.array([(t + 2) % KEYS], pa.int64())}),
    }
