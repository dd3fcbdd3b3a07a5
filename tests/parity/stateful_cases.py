"""Functions with a state of their own: by `applyInPandasWithState` and `transformWithState`, and what they become here."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import nosync
from tests.parity.both_ways import APPEND, UPDATE, Case, Streams, flow_of, one

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
}
"""What transformWithState needs."""
PATIENCE = datetime.timedelta(minutes=7)


# --- a value ----------------------------------------------------------------------------------------------------------


def _counted_by_hand(streams: Streams) -> DataFrame:
    import pandas as pd
    from pyspark.sql.streaming.state import GroupStateTimeout

    def count(key: Any, tables: Any, state: Any) -> Any:
        n, total = state.get if state.exists else (0, 0)
        for table in tables:
            n, total = n + len(table), total + int(table["x"].fillna(0).sum())
        state.update((n, total))
        yield pd.DataFrame({"k": [key[0]], "n": [n], "total": [total]})

    return (
        streams["events"]
        .groupBy("k")
        .applyInPandasWithState(
            count, "k string, n bigint, total bigint", "n bigint, total bigint", "update", GroupStateTimeout.NoTimeout
        )
    )


def _counted(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    before = state or {"n": 0, "total": 0}
    return {"n": before["n"] + len(changes), "total": before["total"] + sum(row["x"] or 0 for row in changes)}


# --- a value, a list and a map ----------------------------------------------------------------------------------------


def _collected_by_spark(streams: Streams) -> DataFrame:
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    class Collect(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.n = handle.getValueState("n", "n long")
            self.values = handle.getListState("values", "x long")
            self.times = handle.getMapState("times", "x long", "n long")

        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
            (n,) = self.n.get() if self.n.exists() else (0,)
            for table in rows:
                for x in table["x"].dropna().astype("int64").tolist():
                    self.values.appendValue((x,))
                    before = self.times.getValue((x,))[0] if self.times.containsKey((x,)) else 0
                    self.times.updateValue((x,), (before + 1,))
                n += len(table)
            self.n.update((n,))
            values = sorted(x for (x,) in self.values.get())
            times = sorted((x, n) for (x,), (n,) in self.times.iterator())
            yield pd.DataFrame({"k": [key[0]], "n": [n], "values": [str(values)], "times": [str(times)]})

        def close(self) -> None:
            pass

    return (
        streams["events"]
        .groupBy("k")
        .transformWithStateInPandas(Collect(), "k string, n long, values string, times string", "update", "none")
    )


def _collected(key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None) -> dict[str, Any]:
    before = state or {"n": 0, "values": [], "times": []}
    came = [row["x"] for row in changes if row["x"] is not None]
    times = dict(before["times"])
    for x in came:
        times[x] = times.get(x, 0) + 1
    return {
        "n": before["n"] + len(changes),
        "values": sorted([*before["values"], *came]),
        "times": sorted(times.items()),
    }


def _shown(rows: pa.Table) -> pa.Table:
    """Shows a list and a map as the query does: Spark compares no maps."""
    shown = {
        name: pa.array([str(value) for value in rows[name].to_pylist()], pa.string()) for name in ("values", "times")
    }
    return pa.table({name: shown.get(name, rows[name]) for name in rows.column_names})


def _collected_flow(source: nosync.Stage) -> object:
    state = "n bigint, values array<bigint>, times map<bigint, bigint>"
    return source.update_per_key("collected", key=["k"], state=state, fn=_collected).map("out", _shown)


# --- a timer ----------------------------------------------------------------------------------------------------------


def _silent_by_spark(streams: Streams) -> DataFrame:
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor

    patience_ms = PATIENCE // datetime.timedelta(milliseconds=1)

    class Silent(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.due = handle.getValueState("due", "ms long")

        def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
            newest = max(int(table["at"].max().value // 1_000_000) for table in rows if len(table))
            (before,) = self.due.get() if self.due.exists() else (None,)
            due = max(newest + patience_ms, before or 0)
            if before is not None:
                self.handle.deleteTimer(before)
            self.handle.registerTimer(due)
            self.due.update((due,))
            return iter(())

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
            self.due.clear()
            yield pd.DataFrame({"k": [key[0]], "ms": [expiredTimerInfo.getExpiryTimeInMs()]})

        def close(self) -> None:
            pass

    events = streams["events"].withWatermark("at", "5 minutes")
    found = events.groupBy("k").transformWithStateInPandas(Silent(), "k string, ms long", "append", "eventTime")
    return found.selectExpr("k", "timestamp_millis(ms) AS due")


def _silent(
    key: Any, changes: list[dict[str, Any]], state: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, Mapping[str, list[dict[str, Any]]]]:
    if not changes:
        assert state is not None
        return None, {"silent": [{"k": key[0], "due": state["due"]}]}
    due = max(row["at"] for row in changes) + PATIENCE
    return {"due": max(due, state["due"]) if state else due}, {}


def _silent_flow(source: nosync.Stage) -> object:
    watched = source.update_per_key(
        "watched", key=["k"], state="due timestamp", fn=_silent, time="at", watermark="5 minutes", timer="due",
        outputs={"silent": "k string, due timestamp"},
    )  # fmt: skip
    return watched.output("silent").map("out", lambda rows: rows)


STATEFUL = [
    Case("state-update", UPDATE, _counted_by_hand,
         flow_of(lambda s: s.update_per_key("out", key=["k"], state="n bigint, total bigint", fn=_counted)),
         ["k", "n", "total"], one("k", "x"), ["k"]),
    Case("value-list-map-update", UPDATE, _collected_by_spark, flow_of(_collected_flow), ["k", "n", "values", "times"],
         one("k", "x"), ["k"], settings=ROCKSDB),
    Case("timer-append", APPEND, _silent_by_spark, flow_of(_silent_flow), ["k", "due"], one("k", "x"),
         settings=ROCKSDB),
]  # fmt: skip
