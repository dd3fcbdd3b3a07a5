"""Functions whose code names their stages' layers, as most users write them: without `version=`. Nothing here may ever change."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import nosync
from nosync import Dataflow

COLUMNS = "k bigint, v bigint"


class Scale:
    """A callable object."""

    def __init__(self, by: int) -> None:
        self.by = by

    def __call__(self, rows: pa.Table) -> pa.Table:
        return rows.set_column(1, "v", pc.multiply(rows["v"], self.by))


def scaled(rows: pa.Table) -> pa.Table:
    return rows.set_column(1, "v", pc.multiply(rows["v"], 2))


def with_public_names(rows: pa.Table) -> pa.Table:
    """Refers to names of nosync, whose modules may move."""
    if Dataflow is None:
        raise nosync.StageError("no flow")
    return rows.append_column(
        "is_sum", pa.array([isinstance(nosync.sum("v"), type(nosync.count()))] * rows.num_rows, pa.bool_())
    )


def seen(key: Any, changes: list[Any], state: Any) -> dict[str, Any]:
    return {"seen": (state["seen"] if state else 0) + len(changes)}


def make_flow() -> nosync.Dataflow:
    flow = nosync.Dataflow("functions")
    rows = flow.source("rows", COLUMNS)
    rows.map("scaled", scaled)
    rows.map("object", Scale(3))
    rows.map("public", with_public_names)
    rows.filter("kept", lambda rows: pc.greater(rows["v"], 1))
    rows.update_per_key("seen", key=["k"], state="seen bigint", fn=seen)
    rows.update_per_key("ttl", key=["k"], state="seen bigint", fn=seen, ttl=3)
    return flow
